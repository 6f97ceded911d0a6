"""Fine-tune with the scripts on several tasks; compare scores and time with Transformers' own classes.

    python benchmarks/fine_tuning.py --model my-pretrained --data ../data --tasks cola sst2

The checkpoint is exported once to the format of Transformers' DebertaV2 classes, so both start from identical weights,
with the same rows in the same order, seeds and settings. Rows are added to results/fine_tuning.csv as runs finish; runs
that are already there are skipped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from timing import RESULTS, environment, read_rows, write_rows
from transformers import AutoModel, AutoTokenizer

import hf_deberta

ROOT = Path(__file__).parents[1]
RESULT_FILE = RESULTS / "fine_tuning.csv"
KEY = ("checkpoint", "task", "who", "seed", "setting")
# The scripts load every DeBERTa with our classes; this makes them use Transformers' own.
IN_TREE = """
import runpy, sys
from hf_deberta.fine_tuning import task_model
assert hasattr(task_model, "load_deberta_config")
task_model.load_deberta_config = lambda *_: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Task:
    """The script and flags of a task, and the metric to report."""

    script: str
    flags: list[str]
    metric: str


def glue(name: str, metric: str) -> Task:
    return Task("run_glue.py", ["--task_name", name, "--data_dir", f"DATA/glue/{name}"], metric)


def superglue(name: str, metric: str) -> Task:
    return Task("run_superglue.py", ["--task_name", name, "--data_dir", f"DATA/superglue/{name}"], metric)


SQUAD = ["--train_file", "DATA/squad/train-v1.1.json", "--validation_file", "DATA/squad/dev-v1.1.json"]
TASKS = {
    "cola": glue("cola", "matthews_correlation"),
    "sst2": glue("sst2", "accuracy"),
    "mrpc": glue("mrpc", "accuracy"),
    "rte": glue("rte", "accuracy"),
    "qnli": glue("qnli", "accuracy"),
    "stsb": glue("stsb", "pearson"),
    "mnli": glue("mnli", "accuracy"),
    "qqp": glue("qqp", "accuracy"),
    "conll2003": Task("run_ner.py", ["--task_name", "conll2003", "--data_dir", "DATA/conll2003"], "f1"),
    "dream": Task("run_race.py", ["--data_dir", "DATA/dream"], "accuracy"),
    "squad": Task("run_squad.py", [*SQUAD, "--doc_stride", "48"], "f1"),
    "cb": superglue("cb", "accuracy"),
    "copa": superglue("copa", "accuracy"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a pretrained model, saved by this package")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with glue/cola/train.jsonl, conll2003/train.txt and so on",
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--who",
        nargs="+",
        default=["ours", "in-tree"],
        choices=["ours", "in-tree", "untrained"],
        help="our classes; Transformers' own; our classes with new weights",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=1)
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--learning_rate", default="3e-4")
    parser.add_argument("--length", default="128", help="maximum number of tokens of an input")
    parser.add_argument("--max_train_samples", type=int, default=8000)
    parser.add_argument("--extra", nargs="*", default=[], help="more flags for the script, without dashes")
    parser.add_argument("--name", help="name of the checkpoint in the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = {"ours": args.model, "in-tree": Path(scratch) / "in_tree", "untrained": Path(scratch) / "new"}
        prepare(checkpoints)
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for task in args.tasks:
                for who in args.who:
                    measure(args, task, who, seed, checkpoints[who], Path(scratch) / "run")
    print_table()


def prepare(checkpoints: dict[str, Path]) -> None:
    """Save the model for Transformers' own classes, and a model of the same shape with new weights."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["ours"])
    model = AutoModel.from_pretrained(checkpoints["ours"])
    hf_deberta.export_to_transformers(model, checkpoints["in-tree"])
    type(model)(model.config).save_pretrained(checkpoints["untrained"])
    for name in ("in-tree", "untrained"):
        tokenizer.save_pretrained(checkpoints[name])


def measure(args: argparse.Namespace, task: str, who: str, seed: int, checkpoint: Path, folder: Path) -> None:
    """Fine-tune once and write the row, unless it is there already."""
    recipe = TASKS[task]
    settings = ["--num_train_epochs", args.epochs, "--max_train_samples", str(args.max_train_samples)]
    settings += ["--per_device_train_batch_size", "32", "--learning_rate", args.learning_rate, "--warmup_steps", "0.1"]
    settings += ["--max_seq_length", args.length, *(f"--{word}" if word[0].isalpha() else word for word in args.extra)]
    setting = " ".join(settings).replace("--", "")
    row = {"checkpoint": args.name or args.model.name, "task": task, "who": who, "seed": str(seed), "setting": setting}
    if any(all(earlier[column] == row[column] for column in KEY) for earlier in read_rows(RESULT_FILE)):
        return
    flags = [part.replace("DATA", str(args.data)) for part in recipe.flags]
    command = [
        sys.executable,
        "-W",
        "ignore",
        *(["-c", IN_TREE] if who == "in-tree" else []),
        str(ROOT / recipe.script),
    ]
    command += ["--model_name_or_path", str(checkpoint), "--output_dir", str(folder), "--seed", str(seed), *flags]
    command += [*settings, "--recipe", "none", "--do_train", "--do_eval", "--eval_strategy", "no"]
    command += ["--save_strategy", "no", "--resume_from_checkpoint", "false", "--disable_tqdm", "true"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    metrics = json.loads((folder / "all_results.json").read_text())
    row |= {
        "metric": recipe.metric,
        "value": f"{metrics[f'eval_{recipe.metric}']:.4f}",
        "train_loss": f"{metrics['train_loss']:.4f}",
        "train_seconds": f"{metrics['train_runtime']:.1f}",
        **environment(),
    }
    write_rows(RESULT_FILE, [row], KEY)
    print(f"{task:8} {who:10} seed {seed}: {row['value']} {recipe.metric}, {row['train_seconds']} s", flush=True)


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


if __name__ == "__main__":
    main()
