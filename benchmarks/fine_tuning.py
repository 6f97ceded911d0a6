"""Fine-tune with the scripts on several tasks; compare scores and time with Transformers' own classes.

    python benchmarks/fine_tuning.py --model my-pretrained --data ../data --tasks cola sst2
    python benchmarks/fine_tuning.py --model deberta-v3-xsmall --data ../data --settings short --who ours --seeds 1
    python benchmarks/fine_tuning.py --print deberta-v3-xsmall   # the tables of docs/reproduction.md, from the csv
    python benchmarks/fine_tuning.py --data ../data --text > tasks.txt   # training rows without labels, to pretrain on

Only the encoder of the checkpoint is kept, and exported once to the format of Transformers' DebertaV2 classes: both
start from identical weights, with the same rows in the same order, seeds and settings. Rows are added to
results/fine_tuning.csv as runs finish; runs that are already there are skipped, unless --again repeats them.

`--settings uniform` trains every task alike, as the flags --epochs, --learning_rate, --length and --max_train_samples
say. `--settings short` takes each task's recipe with the changes of `TASKS`, so that a run of an xsmall model ends
within about ten minutes on one core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from table import RESULTS, markdown, mean_and_range, read_rows, summary
from timing import record_runs
from transformers import AutoTokenizer

import hf_deberta
from hf_deberta.fine_tuning.recipes import find_recipe

ROOT = Path(__file__).parents[1]
WHO = {"ours": "our classes", "in-tree": "Transformers' own", "untrained": "our classes with new weights"}
# Runs a script. It adds the processor time of training to the metrics, which other programs on the machine do not
# change. The scripts load every DeBERTa with our classes; "in-tree" makes them use Transformers' own.
START = """
import runpy, sys, time
import transformers
from hf_deberta.fine_tuning import task_model
train = transformers.Trainer.train
def timed_train(*args, **kwargs):
    start = time.process_time()
    result = train(*args, **kwargs)
    result.metrics["train_cpu_seconds"] = time.process_time() - start
    return result
transformers.Trainer.train = timed_train
if sys.argv[1] == "in-tree":
    assert hasattr(task_model, "load_deberta_config")
    task_model.load_deberta_config = lambda *_: None
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Flags by which short settings differ from a recipe, and why. `TASKS` has their values.
REASONS = {
    "learning_rate": "a run has few steps, in which the recipe's rate hardly moves the weights",
    "num_train_epochs": "one run should end within about ten minutes on one core",
    "max_train_samples": "the same",
    "max_eval_samples": "the same",
    "per_device_train_batch_size": "more steps from few rows",
    "warmup_steps": "the recipe's warmup is longer than the run",
}


@dataclass(frozen=True)
class Task:
    """A task's script, data, metric to report, and what short settings change in its recipe."""

    script: str
    folder: str
    metric: str
    changes: dict[str, str]
    name: str = ""  # of the task for the script
    recipe: str = ""  # its name in recipes.py, where it is another
    files: tuple[str, str] = ("train.jsonl", "validation.jsonl")
    flags: tuple[str, ...] = ()
    published: str = ""  # the figure of DeBERTa-v3-xsmall, on the official rows

    def data_flags(self, data: Path) -> list[str]:
        train, validation = (data / self.folder / file for file in self.files)
        if train.suffix == ".jsonl":
            files = ["--data_dir", str(data / self.folder)]
        else:
            files = ["--train_file", str(train), "--validation_file", str(validation)]
        return [*files, *(["--task_name", self.name] if self.name else []), *self.flags]


def short(epochs: int, batch: int = 0, rows: int = 0, eval_rows: int = 0) -> dict[str, str]:
    """Return the changes of short settings; every task has the same learning rate and warmup."""
    limits = {"per_device_train_batch_size": batch, "max_train_samples": rows, "max_eval_samples": eval_rows}
    changes = {"num_train_epochs": str(epochs), "learning_rate": "1e-4", "warmup_steps": "0.1"}
    return changes | {flag: str(value) for flag, value in limits.items() if value}


SQUAD: dict[str, Any] = {"script": "run_squad.py", "folder": "squad", "metric": "f1"}
TASKS = {
    "cola": Task("run_glue.py", "glue/cola", "matthews_correlation", short(1, rows=4000), "cola"),
    "sst2": Task("run_glue.py", "glue/sst2", "accuracy", short(1, rows=3000), "sst2"),
    "mrpc": Task("run_glue.py", "glue/mrpc", "accuracy", short(1), "mrpc"),
    "stsb": Task("run_glue.py", "glue/stsb", "pearson", short(1, rows=3000), "stsb"),
    "qqp": Task("run_glue.py", "glue/qqp", "accuracy", short(1, batch=32, rows=2000, eval_rows=1000), "qqp"),
    "mnli": Task("run_glue.py", "glue/mnli", "accuracy", short(1, batch=32, rows=2000, eval_rows=1000), "mnli",
                 published="0.881", files=("train.jsonl", "validation_matched.jsonl")),
    "qnli": Task("run_glue.py", "glue/qnli", "accuracy", short(1, rows=2000), "qnli"),
    "rte": Task("run_glue.py", "glue/rte", "accuracy", short(1), "rte"),
    "cb": Task("run_superglue.py", "superglue/cb", "accuracy", short(4), "cb"),
    "copa": Task("run_superglue.py", "superglue/copa", "accuracy", short(5, batch=16), "copa"),
    "squad": Task(**SQUAD, changes=short(2, batch=16), recipe="squad", files=("train-v1.1.json", "dev-v1.1.json"),
                  flags=("--doc_stride", "48")),
    "squad_v2": Task(**SQUAD, changes=short(1, batch=16), recipe="squad_v2", published="84.8",
                     files=("train-v2-constructed.json", "dev-v2-constructed.json"),
                     flags=("--doc_stride", "48", "--version_2_with_negative")),
    "dream": Task("run_race.py", "dream", "accuracy", short(1, batch=16, rows=400, eval_rows=300), "race"),
    "arc": Task("run_race.py", "arc", "accuracy", short(1, batch=16, rows=800, eval_rows=300), "swag"),
    "conll2003": Task(  # sentences of a document are merged to rows of 512 tokens: 120 rows
        "run_ner.py", "conll2003", "f1", short(3, batch=2, rows=3000, eval_rows=1000), "conll2003",
        files=("train.txt", "valid.txt")),
    "wnut17": Task("run_ner.py", "wnut17", "f1", short(1), recipe="ner", files=("train.txt", "dev.txt")),
}  # fmt: skip
FIELDS_WITHOUT_TEXT = {"label", "idx", "id", "example_id", "answer"}
OTHER_TEXTS = ("cb", "copa", "dream", "conll2003", "squad")  # beside those of GLUE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained or fine-tuned model, ours or released")
    parser.add_argument("--data", type=Path, help="folder with glue/cola/train.jsonl, conll2003/train.txt and so on")
    parser.add_argument("--settings", choices=("uniform", "short"), default="uniform")
    parser.add_argument("--print", metavar="NAME", help="only print the tables of this checkpoint")
    parser.add_argument("--text", action="store_true", help="only print the texts of the training files, a row a line")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--who", nargs="+", default=["ours", "in-tree"], choices=WHO, help="; ".join(WHO.values()))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--learning_rate", default="3e-4")
    parser.add_argument("--length", default="128", help="maximum number of tokens of an input")
    parser.add_argument("--max_train_samples", type=int, default=8000)
    parser.add_argument("--max_eval_samples", type=int, help="default: all, or what short settings say")
    parser.add_argument("--no_dropout", action="store_true", help="train without: both classes compute the same then")
    parser.add_argument("--extra", nargs="*", default=[], help="more flags for the script, without dashes")
    parser.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
    parser.add_argument("--name", help="name of the checkpoint in the result file")
    args = parser.parse_args()
    if args.print:
        print(tables(args.print))
        return
    if args.data is None or (args.model is None and not args.text):
        parser.error("--model and --data are required, or --print NAME")
    if args.text:
        files = sorted(args.data.glob("glue/*/train.jsonl"))
        files += [args.data / TASKS[task].folder / TASKS[task].files[0] for task in OTHER_TEXTS]
        texts = (" ".join(text.split()) for file in files for text, _ in read_examples(file))
        print(*dict.fromkeys(texts), sep="\n")
        return
    name = args.name or args.model.name
    runs = [
        {
            "checkpoint": name,
            "task": task,
            "who": who,
            "seed": str(seed),
            "setting": describe_setting(args, TASKS[task]),
        }
        for seed in range(1, args.seeds + 1)
        for task in args.tasks
        for who in args.who
    ]
    with tempfile.TemporaryDirectory() as scratch:
        prepare(args.model, {who: Path(scratch) / who for who in WHO}, args.no_dropout)
        record_runs("fine_tuning.csv", runs, lambda run: [train(args, run, Path(scratch))], args.again)
    rows = [row for row in read_rows(RESULTS / "fine_tuning.csv") if row["checkpoint"] == name]
    print(summary(rows, ("task", "metric", "who", "setting"), ("value", "train_loss", "train_seconds")))


def prepare(model_folder: Path, checkpoints: dict[str, Path], no_dropout: bool) -> None:
    """Save the encoder for our classes and for Transformers' own, and one of the same shape with new weights."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = hf_deberta.HfDebertaModel.from_pretrained(model_folder, dtype=torch.float32)
    if no_dropout:
        model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.save_pretrained(checkpoints["ours"])
    hf_deberta.export_to_transformers(model, checkpoints["in-tree"])
    type(model)(model.config).save_pretrained(checkpoints["untrained"])
    for folder in checkpoints.values():
        tokenizer.save_pretrained(folder)


def settings_of(args: argparse.Namespace, task: Task) -> dict[str, str]:
    """Return the flags that say how to train, by name."""
    settings = {"num_train_epochs": args.epochs, "max_train_samples": str(args.max_train_samples)}
    settings |= {"per_device_train_batch_size": "32", "learning_rate": args.learning_rate, "warmup_steps": "0.1"}
    settings |= {"max_seq_length": args.length}
    if args.settings == "short":
        settings = dict(task.changes)
    if args.max_eval_samples:
        settings["max_eval_samples"] = str(args.max_eval_samples)
    if args.no_dropout and task.script != "run_squad.py":  # whose head has none
        settings["cls_dropout"] = "0"
    return settings


def describe_setting(args: argparse.Namespace, task: Task) -> str:
    """Return the column that identifies a way to train: the flags without dashes."""
    words = ["recipe auto"] if args.settings == "short" else []
    words += [f"{flag} {value}" for flag, value in settings_of(args, task).items()]
    return " ".join([*words, *args.extra, *(["no_dropout"] if args.no_dropout else [])])


def train(args: argparse.Namespace, run: dict[str, str], scratch: Path) -> dict[str, str]:
    """Fine-tune once; return score, loss, seconds and numbers of rows."""
    task = TASKS[run["task"]]
    flags = ["--model_name_or_path", str(scratch / run["who"]), "--seed", run["seed"], *task.data_flags(args.data)]
    settings = settings_of(args, task)
    flags += [word for flag, value in settings.items() for word in (f"--{flag}", value)]
    flags += [f"--{word}" if word[0].isalpha() else word for word in args.extra]
    flags += ["--recipe", "auto" if args.settings == "short" else "none"]
    metrics = run_script(run["who"], task.script, flags, scratch / "run")
    train_labels, labels = (
        [label for _, label in read_examples(args.data / task.folder / file)][: int(settings.get(flag, 0)) or None]
        for file, flag in zip(task.files, ("max_train_samples", "max_eval_samples"), strict=True)
    )
    scores = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
    return {
        "metric": task.metric,
        "value": f"{scores[task.metric]:.4f}",
        "train_loss": f"{metrics['train_loss']:.4f}",
        "train_seconds": f"{metrics['train_runtime']:.1f}",
        "train_cpu_seconds": f"{metrics['train_cpu_seconds']:.1f}",
        "train_rows": str(len(train_labels)),
        "eval_rows": str(len(labels)),
        "majority": majority(task.metric, labels),
        "all_metrics": " ".join(
            f"{name}={value:.4f}"
            for name, value in scores.items()
            if isinstance(value, float) and not name.endswith(("runtime", "second"))
        ),
    }


def run_script(who: str, script: str, flags: list[str], folder: Path) -> dict[str, float]:
    """Train and evaluate once with a script of this package; return the metrics."""
    command = [sys.executable, "-W", "ignore", "-c", START, who, str(ROOT / script), *flags]
    command += ["--output_dir", str(folder), "--do_train", "--do_eval", "--eval_strategy", "no"]
    command += ["--save_strategy", "no", "--resume_from_checkpoint", "false", "--disable_tqdm", "true"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    # all_results.json would still hold other metrics of the task before
    files = (folder / f"{name}_results.json" for name in ("train", "eval"))
    return {name: value for file in files for name, value in json.loads(file.read_text()).items()}


def read_examples(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the text and the label of each row: None for questions with an answer, and for sentences of words."""
    content = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        for row in map(json.loads, content.removesuffix("\n").split("\n")):
            values = [value for name, value in row.items() if name not in FIELDS_WITHOUT_TEXT]
            parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
            yield " ".join(parts), row.get("label", row.get("answer"))
    elif file.suffix == ".json":
        for paragraph in (each for article in json.loads(content)["data"] for each in article["paragraphs"]):
            for question in paragraph["qas"]:
                yield f"{question['question']} {paragraph['context']}", None if question["answers"] else ""
    else:
        for block in content.strip().split("\n\n"):
            if not block.startswith("-DOCSTART-"):
                yield " ".join(line.split()[0] for line in block.splitlines() if line.strip()), None


def majority(metric: str, labels: list[Any]) -> str:
    """The score of the most frequent label as the answer to every row, which is 0 for all metrics but accuracy.

    For questions it is the F1 of never giving an answer, in percent.
    """
    if metric == "accuracy":
        return f"{Counter(labels).most_common(1)[0][1] / len(labels):.4f}"
    return f"{100 * labels.count('') / len(labels):.4f}" if "" in labels else "0"


def tables(checkpoint: str) -> str:
    """The scores with short settings, why they differ from the recipes, and ours beside Transformers' classes."""
    rows = [row for row in read_rows(RESULTS / "fine_tuning.csv") if row["checkpoint"] == checkpoint]
    reasons = "\n".join(f"- `--{flag}`: {reason}" for flag, reason in REASONS.items())
    parts = (score_table(rows), reasons, pair_table(rows), difference_table(rows))
    return "\n\n".join(part for part in parts if part)


def score_table(rows: list[dict[str, str]]) -> str:
    """One line for each task that was trained with short settings; in brackets what the recipe has instead."""
    lines = []
    for name, task in TASKS.items():
        setting = " ".join(["recipe auto", *(f"{flag} {value}" for flag, value in task.changes.items())])
        runs = [row for row in rows if (row["task"], row["who"], row["setting"]) == (name, "ours", setting)]
        if not runs:
            continue
        digits = 1 if task.script == "run_squad.py" else 3  # its scores are in percent
        score, _, spread = mean_and_range([float(run["value"]) for run in runs], digits).partition(" ")
        recipe, _ = find_recipe(task.recipe or task.name, "v3-xsmall")
        seconds = [float(run["train_cpu_seconds"]) for run in runs if run["train_cpu_seconds"]]
        cells = [f"{name}, {task.metric}", f"**{score}** {spread}".strip(), str(len(runs))]
        cells += [f"{float(runs[0]['majority']):.{digits}f}", task.published or "-"]
        cells += [f"{runs[0]['train_rows']}; {runs[0]['eval_rows']}"]
        cells += [with_recipe(task.changes["num_train_epochs"], f"{recipe.epochs:g}")]
        cells += [with_recipe(task.changes["learning_rate"], f"{recipe.learning_rate:g}")]
        cells += [with_recipe(task.changes.get("per_device_train_batch_size", str(recipe.batch)), str(recipe.batch))]
        lines.append([*cells, f"{statistics.mean(seconds) / 60:.1f}" if seconds else "-"])
    head = ["task, metric", "score", "seeds", "most frequent answer", "published, xsmall", "training rows; validation"]
    return markdown([*head, "epochs", "learning rate", "batch", "processor minutes"], lines)


def with_recipe(value: str, of_recipe: str) -> str:
    return value if float(value) == float(of_recipe) else f"{value} ({of_recipe})"


def pair_table(rows: list[dict[str, str]]) -> str:
    """Our classes and Transformers' own, trained without dropout from the same weights with the same seed and rows."""
    runs = {tuple(row[name] for name in ("who", "task", "seed", "setting")): row for row in rows}
    lines = []
    for (who, *run), ours in runs.items():
        theirs = runs.get(("in-tree", *run))
        if who == "ours" and theirs is not None and ours["setting"].endswith("no_dropout"):
            cells = [row[column] for column in ("train_loss", "value") for row in (ours, theirs)]
            ratio = float(theirs["train_cpu_seconds"]) / float(ours["train_cpu_seconds"])
            lines.append([f"{ours['task']}, {ours['metric']}", *cells, f"{ratio:.1f}"])
    head = ["task, metric", "train loss, hf_deberta", "Transformers", "score, hf_deberta", "Transformers"]
    return markdown([*head, "processor time of Transformers over ours"], lines)


def difference_table(rows: list[dict[str, str]]) -> str:
    """Our scores minus those of Transformers' own classes with the same seed, rows and steps, trained with dropout.

    Empty if no such pair was run. Both draw other dropout masks, so a difference has a standard error.
    """
    runs = {tuple(row[name] for name in ("who", "task", "setting", "seed")): row for row in rows}
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (who, task, setting, seed), ours in runs.items():
        theirs = runs.get(("in-tree", task, setting, seed))
        if who == "ours" and theirs is not None and not setting.endswith("no_dropout"):
            pairs.setdefault((f"{task}, {ours['metric']}", setting), []).append(
                (float(ours["value"]), float(theirs["value"]))
            )
    lines = []
    for (task, setting), values in pairs.items():
        ours, theirs = (mean_and_range(scores) for scores in zip(*values, strict=True))
        differences = [mine - other for mine, other in values]
        error = f"{statistics.stdev(differences) / len(values) ** 0.5:.3f}" if len(values) > 1 else "-"
        lines.append([task, setting, str(len(values)), ours, theirs, f"{statistics.mean(differences):+.3f}", error])
    head = ["task, metric", "settings", "seeds", "hf_deberta", "Transformers", "difference", "standard error"]
    return markdown(head, lines, 2) if lines else ""


if __name__ == "__main__":
    main()
