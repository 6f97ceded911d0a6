"""Fine-tune with the scripts on several tasks; compare scores and time with Transformers' own classes.

    python benchmarks/fine_tuning.py --model my-pretrained --data ../data --tasks cola sst2
    python benchmarks/fine_tuning.py --model deberta-v3-xsmall --data ../data --settings short --who ours --seeds 1
    python benchmarks/fine_tuning.py --print deberta-v3-xsmall   # the tables of docs/reproduction.md, from the csv

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, read_rows, record_runs
from transformers import AutoTokenizer

import hf_deberta
from hf_deberta.fine_tuning.recipes import find_recipe

ROOT = Path(__file__).parents[1]
RESULT_FILE = RESULTS / "fine_tuning.csv"
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
    """The script and flags of a task, the metric to report, and what short settings change in the recipe.

    `recipe` is the task's name in `recipes.py`. `published` is the figure of DeBERTa-v3-xsmall, on the official rows.
    """

    script: str
    flags: tuple[str, ...]
    metric: str
    recipe: str
    train_file: str
    validation_file: str
    changes: dict[str, str]
    published: str = ""


def short(
    epochs: int, batch: int | None = None, rows: int | None = None, eval_rows: int | None = None
) -> dict[str, str]:
    """The changes of short settings; every task has the same learning rate and warmup."""
    limits = {"per_device_train_batch_size": batch, "max_train_samples": rows, "max_eval_samples": eval_rows}
    changes = {"num_train_epochs": str(epochs), "learning_rate": "1e-4", "warmup_steps": "0.1"}
    return changes | {flag: str(value) for flag, value in limits.items() if value}


def glue(name: str, metric: str, changes: dict[str, str], validation: str = "validation", published: str = "") -> Task:
    folder = f"glue/{name}"
    flags = ("--task_name", name, "--data_dir", f"DATA/{folder}")
    files = (f"{folder}/train.jsonl", f"{folder}/{validation}.jsonl")
    return Task("run_glue.py", flags, metric, name, *files, changes, published)


def superglue(name: str, metric: str, changes: dict[str, str]) -> Task:
    folder = f"superglue/{name}"
    flags = ("--task_name", name, "--data_dir", f"DATA/{folder}")
    return Task("run_superglue.py", flags, metric, name, f"{folder}/train.jsonl", f"{folder}/validation.jsonl", changes)


def squad(recipe: str, version: str, changes: dict[str, str], *flags: str, published: str = "") -> Task:
    files = (f"squad/train-{version}.json", f"squad/dev-{version}.json")
    file_flags = ("--train_file", f"DATA/{files[0]}", "--validation_file", f"DATA/{files[1]}")
    return Task("run_squad.py", (*file_flags, "--doc_stride", "48", *flags), "f1", recipe, *files, changes, published)


def choice(folder: str, recipe: str, changes: dict[str, str], *flags: str) -> Task:
    files = (f"{folder}/train.jsonl", f"{folder}/validation.jsonl")
    return Task("run_race.py", ("--data_dir", f"DATA/{folder}", *flags), "accuracy", recipe, *files, changes)


def ner(folder: str, recipe: str, validation: str, changes: dict[str, str], *flags: str) -> Task:
    files = (f"{folder}/train.txt", f"{folder}/{validation}.txt")
    file_flags = ("--train_file", f"DATA/{files[0]}", "--validation_file", f"DATA/{files[1]}")
    return Task("run_ner.py", (*file_flags, *flags), "f1", recipe, *files, changes)


TASKS = {
    "cola": glue("cola", "matthews_correlation", short(1, rows=4000)),
    "sst2": glue("sst2", "accuracy", short(1, rows=3000)),
    "mrpc": glue("mrpc", "accuracy", short(1)),
    "stsb": glue("stsb", "pearson", short(1, rows=3000)),
    "qqp": glue("qqp", "accuracy", short(1, batch=32, rows=2000, eval_rows=1000)),
    "mnli": glue("mnli", "accuracy", short(1, batch=32, rows=2000, eval_rows=1000), "validation_matched", "0.881"),
    "qnli": glue("qnli", "accuracy", short(1, rows=2000)),
    "rte": glue("rte", "accuracy", short(1)),
    "cb": superglue("cb", "accuracy", short(4)),
    "copa": superglue("copa", "accuracy", short(5, batch=16)),
    "squad": squad("squad", "v1.1", short(2, batch=16)),
    "squad_v2": squad("squad_v2", "v2-constructed", short(1, batch=16), "--version_2_with_negative", published="84.8"),
    "dream": choice("dream", "race", short(1, batch=16, rows=400, eval_rows=300), "--task_name", "race"),
    "arc": choice("arc", "swag", short(1, batch=16, rows=800, eval_rows=300), "--task_name", "swag"),
    "conll2003": ner(  # sentences of a document are merged to rows of 512 tokens: 120 rows
        "conll2003", "conll2003", "valid", short(3, batch=2, rows=3000, eval_rows=1000), "--task_name", "conll2003"
    ),
    "wnut17": ner("wnut17", "ner", "dev", short(1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained or fine-tuned model, ours or released")
    parser.add_argument("--data", type=Path, help="folder with glue/cola/train.jsonl, conll2003/train.txt and so on")
    parser.add_argument("--settings", choices=("uniform", "short"), default="uniform")
    parser.add_argument("--print", metavar="NAME", help="only print the tables of this checkpoint")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--who",
        nargs="+",
        default=["ours", "in-tree"],
        choices=["ours", "in-tree", "untrained"],
        help="our classes; Transformers' own; our classes with new weights",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first_seed", type=int, default=1)
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
    if args.model is None or args.data is None:
        parser.error("--model and --data are required, or --print NAME")
    name = args.name or args.model.name
    runs = [
        {"checkpoint": name, "task": task, "who": who, "seed": str(seed), "setting": describe_setting(args, task)}
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for task in args.tasks
        for who in args.who
    ]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = {who: Path(scratch) / who for who in ("ours", "in-tree", "untrained")}
        prepare(args.model, checkpoints, args.no_dropout)
        folder = Path(scratch) / "run"
        record_runs(RESULT_FILE, runs, lambda run: [train(args, run, checkpoints[run["who"]], folder)], args.again)
    print_table()


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
    """The flags that say how to train, and that identify a row of the result file."""
    if args.settings == "short":
        settings = dict(task.changes)
    else:
        settings = {"num_train_epochs": args.epochs, "max_train_samples": str(args.max_train_samples)}
        settings |= {"per_device_train_batch_size": "32", "learning_rate": args.learning_rate, "warmup_steps": "0.1"}
        settings |= {"max_seq_length": args.length}
    if args.max_eval_samples:
        settings["max_eval_samples"] = str(args.max_eval_samples)
    if args.no_dropout and task.script != "run_squad.py":  # whose head has none
        settings["cls_dropout"] = "0"
    return settings


def setting_flags(args: argparse.Namespace, task: Task) -> list[str]:
    settings = [word for flag, value in settings_of(args, task).items() for word in (f"--{flag}", value)]
    return settings + [f"--{word}" if word[0].isalpha() else word for word in args.extra]


def describe_setting(args: argparse.Namespace, name: str) -> str:
    recipe = ["recipe", "auto"] if args.settings == "short" else []
    words = [*recipe, *setting_flags(args, TASKS[name]), *(["no_dropout"] if args.no_dropout else [])]
    return " ".join(words).replace("--", "")


def train(args: argparse.Namespace, run: dict[str, str], checkpoint: Path, folder: Path) -> dict[str, str]:
    """Fine-tune once; return score, loss, seconds and numbers of rows."""
    task = TASKS[run["task"]]
    recipe = "auto" if args.settings == "short" else "none"
    flags = [part.replace("DATA", str(args.data)) for part in task.flags]
    command = [sys.executable, "-W", "ignore", "-c", START, run["who"], str(ROOT / task.script)]
    command += ["--model_name_or_path", str(checkpoint), "--output_dir", str(folder), "--seed", run["seed"], *flags]
    command += [*setting_flags(args, task), "--recipe", recipe, "--do_train", "--do_eval", "--eval_strategy", "no"]
    command += ["--save_strategy", "no", "--resume_from_checkpoint", "false", "--disable_tqdm", "true"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    # all_results.json would still hold other metrics of the task before
    metrics = {}
    for file_name in ("train_results.json", "eval_results.json"):
        metrics |= json.loads((folder / file_name).read_text())
    limits = settings_of(args, task)
    train_rows, eval_rows = (
        read_labels(args.data / file)[: int(limits.get(flag, 0)) or None]
        for file, flag in ((task.train_file, "max_train_samples"), (task.validation_file, "max_eval_samples"))
    )
    return {
        "metric": task.metric,
        "value": f"{metrics[f'eval_{task.metric}']:.4f}",
        "train_loss": f"{metrics['train_loss']:.4f}",
        "train_seconds": f"{metrics['train_runtime']:.1f}",
        "train_cpu_seconds": f"{metrics['train_cpu_seconds']:.1f}",
        "train_rows": str(len(train_rows)),
        "eval_rows": str(len(eval_rows)),
        "majority": majority(task.metric, eval_rows),
        "all_metrics": " ".join(
            f"{metric.removeprefix('eval_')}={value:.4f}"
            for metric, value in metrics.items()
            if metric.startswith("eval_") and isinstance(value, float) and not metric.endswith(("runtime", "second"))
        ),
    }


def read_labels(file: Path) -> list[Any]:
    """Return a label for each row: None for questions with an answer in a text, and for sentences of words."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
        return [row["label"] if "label" in row else row["answer"] for row in rows]
    if file.suffix == ".json":
        questions = [
            question
            for article in json.loads(text)["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
        return [None if question["answers"] else "" for question in questions]
    sentences = [block for block in text.strip().split("\n\n") if not block.startswith("-DOCSTART-")]
    return [None] * len(sentences)


def majority(metric: str, labels: list[Any]) -> str:
    """The score of the most frequent label as the answer to every row, which is 0 for all metrics but accuracy.

    For questions it is the F1 of never giving an answer, in percent.
    """
    if metric == "accuracy":
        return f"{Counter(labels).most_common(1)[0][1] / len(labels):.4f}"
    return f"{100 * labels.count('') / len(labels):.4f}" if "" in labels else "0"


def print_table() -> None:
    """Print mean and range over seeds, and each time divided by ours."""
    groups: dict[tuple[str, ...], dict[str, list[dict]]] = {}
    for row in read_rows(RESULT_FILE):
        by_who = groups.setdefault((row["checkpoint"], row["task"], row["metric"], row["setting"]), {})
        by_who.setdefault(row["who"], []).append(row)
    print("\n| checkpoint | task | metric | who | seeds | mean | smallest to largest | train loss | time, ours = 1 |")
    print("|---|---|---|---|--:|--:|--:|--:|--:|")
    for (checkpoint, task, metric, _), by_who in groups.items():
        seconds = {who: statistics.mean(float(row["train_seconds"]) for row in rows) for who, rows in by_who.items()}
        for who, rows in by_who.items():
            values = [float(row["value"]) for row in rows]
            loss = statistics.mean(float(row["train_loss"]) for row in rows)
            ratio = f"{seconds[who] / seconds['ours']:.2f}" if "ours" in seconds else ""
            print(
                f"| {checkpoint} | {task} | {metric} | {who} | {len(rows)} | {statistics.mean(values):.3f} | "
                f"{min(values):.3f} to {max(values):.3f} | {loss:.3f} | {ratio} |"
            )


def tables(checkpoint: str) -> str:
    """The scores with short settings, why they differ from the recipes, and ours beside Transformers' classes."""
    rows = [row for row in read_rows(RESULT_FILE) if row["checkpoint"] == checkpoint]
    reasons = "\n".join(f"- `--{flag}`: {reason}" for flag, reason in REASONS.items())
    return "\n\n".join((score_table(rows), reasons, pair_table(rows)))


def score_table(rows: list[dict[str, str]]) -> str:
    """One line for each task that was trained with short settings; in brackets what the recipe has instead."""
    lines = [
        "| task, metric | score | seeds | most frequent answer | published, xsmall | training rows; validation | "
        "epochs | learning rate | batch | processor minutes |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, task in TASKS.items():
        setting = " ".join(["recipe auto", *(f"{flag} {value}" for flag, value in task.changes.items())])
        runs = [row for row in rows if (row["task"], row["who"], row["setting"]) == (name, "ours", setting)]
        if not runs:
            continue
        values = [float(run["value"]) for run in runs]
        digits = 1 if task.script == "run_squad.py" else 3  # its scores are in percent
        score = f"**{statistics.mean(values):.{digits}f}**"
        if len(values) > 1:
            score += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
        recipe, _ = find_recipe(task.recipe, "v3-xsmall")
        seconds = [float(run["train_cpu_seconds"]) for run in runs if run["train_cpu_seconds"]]
        cells = [f"{name}, {task.metric}", score, str(len(runs)), f"{float(runs[0]['majority']):.{digits}f}"]
        cells += [task.published or "-", f"{runs[0]['train_rows']}; {runs[0]['eval_rows']}"]
        cells += [with_recipe(task.changes["num_train_epochs"], f"{recipe.epochs:g}")]
        cells += [with_recipe(task.changes["learning_rate"], f"{recipe.learning_rate:g}")]
        cells += [with_recipe(task.changes.get("per_device_train_batch_size", str(recipe.batch)), str(recipe.batch))]
        lines.append("| " + " | ".join([*cells, f"{statistics.mean(seconds) / 60:.1f}" if seconds else "-"]) + " |")
    return "\n".join(lines)


def with_recipe(value: str, of_recipe: str) -> str:
    return value if float(value) == float(of_recipe) else f"{value} ({of_recipe})"


def pair_table(rows: list[dict[str, str]]) -> str:
    """Our classes and Transformers' own, trained without dropout from the same weights with the same seed and rows."""
    by_run: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["setting"].endswith("no_dropout"):
            by_run.setdefault((row["task"], row["seed"], row["setting"]), {})[row["who"]] = row
    lines = [
        "| task, metric | train loss, hf_deberta | Transformers | score, hf_deberta | Transformers | "
        "processor time of Transformers over ours |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for (task, _, _), runs in by_run.items():
        if {"ours", "in-tree"} <= set(runs):
            ours, theirs = runs["ours"], runs["in-tree"]
            cells = [f"{task}, {ours['metric']}", ours["train_loss"], theirs["train_loss"]]
            cells += [ours["value"], theirs["value"]]
            ratio = float(theirs["train_cpu_seconds"]) / float(ours["train_cpu_seconds"])
            lines.append("| " + " | ".join([*cells, f"{ratio:.1f}"]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
