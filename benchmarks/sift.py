"""Fine-tune with and without SiFT from the same weights, seeds and rows; compare scores on clean and on damaged text.

    python benchmarks/sift.py --model deberta-v3-xsmall --data ../data --steps 60

The validation rows are scored three times: as they are, with typos (in one word of five that has four letters or more,
two neighbouring letters change places), and with one word of ten left out (of named entities, only words outside of
them). Rows are added to results/sift.csv as runs finish; runs that are already there are skipped, unless --again
repeats them. --seeds 0 trains nothing and prints the table.
"""

import argparse
import json
import random
import runpy
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from timing import RESULTS, read_rows, record_runs

ROOT = Path(__file__).parents[1]
RESULT_FILE = RESULTS / "sift.csv"
TASKS = {  # script, folder of the data, metric, text columns; smallest inputs first
    "cola": ("run_glue.py", "glue/cola", "matthews_correlation", ("sentence",)),
    "stsb": ("run_glue.py", "glue/stsb", "pearson", ("sentence1", "sentence2")),
    "conll2003": ("run_ner.py", "conll2003", "f1", ()),
    "mrpc": ("run_glue.py", "glue/mrpc", "accuracy", ("sentence1", "sentence2")),
    "rte": ("run_glue.py", "glue/rte", "accuracy", ("sentence1", "sentence2")),
}
MIN_LETTERS, TYPO_RATE, DROP_RATE = 4, 0.2, 0.1
VERSIONS = {"": "", "_typos": ", typos", "_drops": ", words left out"}  # suffix of a split -> name in the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of any checkpoint that the scripts load")
    parser.add_argument("--data", type=Path, help="folder with glue/cola/train.jsonl, conll2003/train.txt and so on")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first_seed", type=int, default=1)
    parser.add_argument("--steps", default="60")
    parser.add_argument("--batch", default="16")
    parser.add_argument("--learning_rate", default="1e-4")
    parser.add_argument("--length", default="128", help="maximum number of tokens of an input")
    parser.add_argument("--eval_rows", default="500", help="score at most the first N validation rows")
    parser.add_argument("--sift_lambda", default="3", help="weight of the adversarial loss (3: published for xsmall)")
    parser.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
    parser.add_argument("--name", help="name of the checkpoint in the result file")
    parser.add_argument("--work_dir", type=Path, help="folder for runs and damaged rows (default: a temporary one)")
    args = parser.parse_args()
    setting = f"{args.steps} steps of {args.batch}, {args.length} tokens, learning rate {args.learning_rate}"
    setting += f", lambda {args.sift_lambda}, at most {args.eval_rows} validation rows"
    runs = [
        {"checkpoint": args.name or args.model.name, "task": task, "training": training, "seed": str(seed)}
        | {"setting": setting}
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for task in args.tasks
        for training in ("plain", "SiFT")
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.work_dir or Path(scratch)
        record_runs(RESULT_FILE, runs, lambda run: [train(args, run, folder)], args.again)
    print(table())


def train(args: argparse.Namespace, run: dict[str, str], folder: Path) -> dict[str, str]:
    """Fine-tune once; return scores, losses and seconds."""
    task, training = run["task"], run["training"]
    script, _, metric, _ = TASKS[task]
    flags = ["--intermediate", args.model, "--task_name", task, "--data_dir", write_rows_of(task, args, folder)]
    flags += ["--output_dir", folder / "run", "--seed", run["seed"], "--max_steps", args.steps, "--warmup_steps", "0.1"]
    flags += ["--per_device_train_batch_size", args.batch, "--learning_rate", args.learning_rate]
    flags += ["--max_seq_length", args.length, "--recipe", "none", "--do_train", "--do_eval", "--eval_strategy", "no"]
    flags += ["--save_strategy", "no", "--resume_from_checkpoint", "false", "--disable_tqdm", "true"]
    flags += ["--sift", "--sift_lambda", args.sift_lambda] if training == "SiFT" else []
    flags += ["--max_eval_samples", args.eval_rows]
    flags += ["--document_context", "none"] if script == "run_ner.py" else []
    metrics = run_script(script, list(map(str, flags)), folder / "run")
    return {
        "metric": metric,
        **{f"value{suffix}": f"{metrics[f'eval_{metric}{suffix}']:.4f}" for suffix in VERSIONS},
        "task_loss": f"{metrics.get('train_task_loss', metrics['train_loss']):.5f}",
        "sift_loss": f"{metrics['train_sift_loss']:.6f}" if training == "SiFT" else "",
        "train_seconds": f"{metrics['train_runtime']:.1f}",
    }


def run_script(script: str, flags: list[str], folder: Path) -> dict[str, float]:
    """Run a script in this process, which saves the imports, and return its metrics."""
    sys.argv = [script, *flags]
    with redirect_stdout(sys.stderr):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return json.loads((folder / "all_results.json").read_text())


# Damaged validation rows


def write_rows_of(task: str, args: argparse.Namespace, folder: Path) -> Path:
    """Return a folder with the training rows, the validation rows, and damaged validation rows."""
    _, source, _, columns = TASKS[task]
    source, target = args.data / source, folder / task
    if target.exists():
        return target
    target.mkdir(parents=True)
    for path in source.iterdir():
        if not path.stem.startswith(("train", "valid")):
            continue
        (target / path.name).symlink_to(path.resolve())
        for suffix in ("_typos", "_drops") if path.stem.startswith("valid") else ():
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            damaged = damage_columns(lines, suffix) if path.suffix == ".txt" else damage_rows(lines, columns, suffix)
            (target / f"validation{suffix}{path.suffix}").write_text("\n".join(damaged) + "\n", encoding="utf-8")
    return target


def damage_rows(lines: list[str], columns: tuple[str, ...], suffix: str) -> list[str]:
    """Return rows of jsonl whose text columns have typos, or words left out."""
    draw, damaged = random.Random(0), []
    for line in lines:
        row = json.loads(line)
        for column in columns:
            words = row[column].split(" ")
            if suffix == "_typos":
                words = [with_typo(word, draw) for word in words]
            else:
                words = [word for word in words if draw.random() >= DROP_RATE] or words
            row[column] = " ".join(words)
        damaged.append(json.dumps(row))
    return damaged


def damage_columns(lines: list[str], suffix: str) -> list[str]:
    """Return lines of CoNLL columns, with typos in words, or without some of the words outside of entities."""
    draw, damaged = random.Random(0), []
    for line in lines:
        word, _, labels = line.partition(" ")
        is_word = bool(labels) and word != "-DOCSTART-"
        if is_word and suffix == "_typos":
            line = f"{with_typo(word, draw)} {labels}"
        elif is_word and labels.endswith(" O") and draw.random() < DROP_RATE:
            continue
        damaged.append(line)
    return damaged


def with_typo(word: str, draw: random.Random) -> str:
    """Return the word, at a rate of TYPO_RATE with two neighbouring letters exchanged if it is long enough."""
    if not (len(word) >= MIN_LETTERS and word.isalpha() and draw.random() < TYPO_RATE):
        return word
    first = draw.randrange(len(word) - 1)
    return word[:first] + word[first + 1] + word[first] + word[first + 2 :]


# The table


def table() -> str:
    """Return mean scores over seeds, and the mean and standard deviation of the difference with the same seed."""
    pairs: dict[tuple[str, ...], dict[str, dict[str, dict]]] = {}
    for row in read_rows(RESULT_FILE):
        seeds = pairs.setdefault((row["checkpoint"], row["setting"], row["task"], row["metric"]), {})
        seeds.setdefault(row["seed"], {})[row["training"]] = row
    lines = ["| task, metric | validation rows | seeds | plain | SiFT | SiFT minus plain, same seed |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    settings = dict.fromkeys((checkpoint, setting) for checkpoint, setting, *_ in pairs)
    for (checkpoint, setting, task, metric), seeds in pairs.items():
        number = "" if len(settings) == 1 else f" ({[*settings].index((checkpoint, setting)) + 1})"
        complete = [pair for pair in seeds.values() if len(pair) == 2]
        for suffix, name in VERSIONS.items() if complete else ():

            def values(training: str, column: str = f"value{suffix}", rows: list = complete) -> list[float]:
                return [float(pair[training][column]) for pair in rows]

            plain, sift = values("plain"), values("SiFT")
            differences = [after - before for before, after in zip(plain, sift, strict=True)]
            lines.append(
                f"| {task}, {metric}{number} | {name.removeprefix(', ') or 'as they are'} | {len(complete)} | "
                f"{statistics.mean(plain):.3f} | {statistics.mean(sift):.3f} | {mean_and_spread(differences)} |"
            )
    legend = [
        f"{f'({number}) ' if len(settings) > 1 else ''}{checkpoint}; {setting}."
        for number, (checkpoint, setting) in enumerate(settings, start=1)
    ]
    return "\n".join([*lines, "", *legend])


def mean_and_spread(differences: list[float]) -> str:
    mean = f"{statistics.mean(differences):+.3f}"
    return f"{mean} ± {statistics.stdev(differences):.3f}" if len(differences) > 1 else mean


if __name__ == "__main__":
    main()
