"""Fine-tune with the scripts on several tasks; compare scores and time with Transformers' own classes.

    python benchmarks/fine_tuning.py --model my-pretrained --data ../data --tasks cola sst2
    python benchmarks/fine_tuning.py --model deberta-v3-xsmall --data ../data --settings short --who ours --seeds 1
    python benchmarks/fine_tuning.py --print deberta-v3-xsmall   # the tables of results/README.md, from the csv

Only the encoder of the checkpoint is kept, and exported once to the format of Transformers' DebertaV2 classes: both
start from identical weights, with the same rows in the same order, seeds and settings. Rows are added to
results/fine_tuning.csv as runs finish; runs that are already there are skipped, unless --again repeats them.

`--settings uniform` trains every task alike, as the flags --epochs, --learning_rate, --length and --max_train_samples
say. `--settings short` takes each task's recipe with the changes of `TASKS`, so that a run of an xsmall model ends
within about ten minutes on one core. Beside Transformers' classes the classifier has the dropout of the encoder: that
of a recipe would reach ours alone.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import run_script, save_encoder
from table import RESULTS, markdown, mean_and_range, pairs_by_seed, read_rows, summary
from timing import record_runs
from transformers import AutoTokenizer

from hf_deberta import export_to_transformers
from hf_deberta.fine_tuning.recipes import find_recipe

WHO = {"ours": "our classes", "in-tree": "Transformers' own", "untrained": "our classes with new weights"}
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
    flags: dict[str, str] = field(default_factory=dict)
    published: str = ""  # the figure of DeBERTa-v3-xsmall, on the official rows

    def data_flags(self, data: Path) -> dict[str, Any]:
        train, validation = (data / self.folder / file for file in self.files)
        name = {"task_name": self.name} if self.name else {}
        if train.suffix == ".jsonl":
            return {"data_dir": data / self.folder, **name, **self.flags}
        return {"train_file": train, "validation_file": validation, **name, **self.flags}


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
                  flags={"doc_stride": "48"}),
    "squad_v2": Task(**SQUAD, changes=short(1, batch=16), recipe="squad_v2", published="84.8",
                     files=("train-v2-constructed.json", "dev-v2-constructed.json"),
                     flags={"doc_stride": "48", "version_2_with_negative": "true"}),
    "dream": Task("run_race.py", "dream", "accuracy", short(1, batch=16, rows=400, eval_rows=300), "race"),
    "arc": Task("run_race.py", "arc", "accuracy", short(1, batch=16, rows=800, eval_rows=300), "swag"),
    "conll2003": Task(  # sentences of a document are merged to rows of 512 tokens: 120 rows
        "run_ner.py", "conll2003", "f1", short(3, batch=2, rows=3000, eval_rows=1000), "conll2003",
        files=("train.txt", "valid.txt")),
    "wnut17": Task("run_ner.py", "wnut17", "f1", short(1), recipe="ner", files=("train.txt", "dev.txt")),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint, ours or released")
    parser.add_argument("--name", help="its name in the result file; default: that of the folder")
    parser.add_argument("--data", type=Path, help="folder with glue/cola/train.jsonl, conll2003/train.txt and so on")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; 0 only prints the table")
    parser.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
    parser.add_argument("--settings", choices=("uniform", "short"), default="uniform")
    parser.add_argument("--print", metavar="NAME", help="only print the tables of this checkpoint")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--who", nargs="+", default=["ours", "in-tree"], choices=WHO, help="; ".join(WHO.values()))
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--learning_rate", default="3e-4")
    parser.add_argument("--length", default="128", help="maximum number of tokens of an input")
    parser.add_argument("--max_train_samples", type=int, help="default: 8000, or what short settings say")
    parser.add_argument("--max_eval_samples", type=int, help="default: all, or what short settings say")
    parser.add_argument("--no_dropout", action="store_true", help="train without: both classes compute the same then")
    args = parser.parse_args()
    if args.print:
        print(tables(args.print))
        return
    if args.data is None or args.model is None:
        parser.error("--model and --data are required, or --print NAME")
    name = args.name or args.model.name
    runs = [
        {"checkpoint": name, "task": task, "who": who, "seed": str(seed)}
        | {"setting": describe_setting(args, TASKS[task])}
        for seed in range(1, args.seeds + 1)
        for task in args.tasks
        for who in args.who
    ]
    with tempfile.TemporaryDirectory() as scratch:
        save_checkpoints(args.model, Path(scratch), not args.no_dropout)
        record_runs("fine_tuning.csv", runs, lambda run: [train(args, run, Path(scratch))], args.again)
    rows = [row for row in read_rows(RESULTS / "fine_tuning.csv") if row["checkpoint"] == name]
    print(summary(rows, ("task", "metric", "who", "setting"), ("value", "train_loss", "train_seconds")))


def save_checkpoints(model_folder: Path, folder: Path, dropout: bool) -> None:
    """Save the encoder for our classes and for Transformers' own, and one of the same shape with new weights."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = save_encoder(model_folder, folder / "ours", tokenizer, dropout)
    export_to_transformers(model, folder / "in-tree")
    type(model)(model.config).save_pretrained(folder / "untrained")
    for name in ("in-tree", "untrained"):
        tokenizer.save_pretrained(folder / name)


def settings_of(args: argparse.Namespace, task: Task) -> dict[str, str]:
    """Return the flags that say how to train, by name."""
    settings = {"num_train_epochs": args.epochs, "max_train_samples": str(args.max_train_samples or 8000)}
    settings |= {"per_device_train_batch_size": "32", "learning_rate": args.learning_rate, "warmup_steps": "0.1"}
    settings |= {"max_seq_length": args.length}
    if args.settings == "short":
        settings = dict(task.changes)
        if "in-tree" in args.who and task.script != "run_squad.py":
            settings["cls_dropout"] = "0.1"  # what Transformers' classes have, which ignore the flag
        if args.max_train_samples:
            settings["max_train_samples"] = str(args.max_train_samples)
    if args.max_eval_samples:
        settings["max_eval_samples"] = str(args.max_eval_samples)
    if args.no_dropout and task.script != "run_squad.py":  # whose head has none
        settings["cls_dropout"] = "0"
    return settings


def describe_setting(args: argparse.Namespace, task: Task) -> str:
    """Return the column that identifies a way to train: the flags without dashes."""
    words = ["recipe auto"] if args.settings == "short" else []
    words += [f"{flag} {value}" for flag, value in settings_of(args, task).items()]
    return " ".join([*words, *(["no_dropout"] if args.no_dropout else [])])


def train(args: argparse.Namespace, run: dict[str, str], scratch: Path) -> dict[str, str]:
    """Fine-tune once; return score, loss, seconds and numbers of rows."""
    task = TASKS[run["task"]]
    settings = settings_of(args, task)
    flags = {"model_name_or_path": scratch / run["who"], "seed": run["seed"], **task.data_flags(args.data), **settings}
    flags["recipe"] = "auto" if args.settings == "short" else "none"
    metrics = run_script(task.script, scratch / "run", flags, run["who"])
    train_labels, labels = (
        read_labels(args.data / task.folder / file)[: int(settings.get(flag, 0)) or None]
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


def read_labels(file: Path) -> list[Any]:
    """Return the label of each row: None for questions with an answer, "" for others, None for sentences of words."""
    content = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        rows = map(json.loads, content.removesuffix("\n").split("\n"))
        return [row.get("label", row.get("answer")) for row in rows]
    if file.suffix == ".json":
        paragraphs = [each for article in json.loads(content)["data"] for each in article["paragraphs"]]
        return [None if question["answers"] else "" for each in paragraphs for question in each["qas"]]
    return [None for block in content.strip().split("\n\n") if not block.startswith("-DOCSTART-")]


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
    """Our scores minus those of Transformers' own classes with the same seed and short settings, with dropout.

    Empty if no such pair was run. Both draw other dropout masks, so a difference has a standard error.
    """
    rows = [row for row in rows if row["who"] != "untrained" and row["setting"].startswith("recipe auto")]
    lines = []
    for (task, metric, _, train_rows, _), pairs in pairs_by_seed(
        rows, ("task", "metric", "setting", "train_rows"), "who", "in-tree"
    ).items():
        scores = [mean_and_range(values) for values in zip(*pairs, strict=True)]
        differences = [ours - theirs for ours, theirs in pairs]
        error = f"{statistics.stdev(differences) / len(pairs) ** 0.5:.3f}" if len(pairs) > 1 else "-"
        mean = f"{statistics.mean(differences):+.3f}"
        lines.append([f"{task}, {metric}", train_rows, str(len(pairs)), *scores, mean, error])
    head = ["task, metric", "training rows", "seeds", "hf_deberta", "Transformers", "difference", "standard error"]
    return markdown(head, lines, 2) if lines else ""


if __name__ == "__main__":
    main()
