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
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from fine_tuning import TASKS
from scripts import run_script
from table import RESULTS, markdown, mean_and_deviation, mean_and_range, pairs_by_seed, read_rows
from timing import record_runs, run_parser

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer
from hf_deberta.fine_tuning.sift import PerturbedEmbeddings, SiftArguments, sift_loss

NAMES = ("cola", "stsb", "conll2003", "mrpc", "rte")  # of tasks, smallest inputs first
BATCH, LEARNING_RATE, LENGTH, EVAL_ROWS = "16", "1e-4", "128", "500"
SIFT_LAMBDA = "3"  # weight of the adversarial loss, as published for xsmall
MIN_LETTERS, TYPO_RATE, DROP_RATE = 4, 0.2, 0.1
FIELDS_WITHOUT_TEXT = {"label", "idx", "id", "example_id", "answer"}
DIVERGENCES: dict[str, dict[str, Any]] = {  # settings of SiFT; "without dropout" computes in evaluation mode
    "as released": {},
    "no perturbation": {"sift_init_perturbation": 1e-30, "sift_learning_rate": 1e-30},  # R-Drop
    "as released, without dropout": {},
    "shared": {"sift_dropout": "shared"},
    "shared 0.03": {"sift_dropout": "shared", "sift_init_perturbation": 0.03, "sift_learning_rate": 0.03},
    "shared 0.1": {"sift_dropout": "shared", "sift_init_perturbation": 0.1, "sift_learning_rate": 0.1},
}
ARMS = {"plain": {}, "SiFT": {"sift": True, "sift_lambda": SIFT_LAMBDA}}  # flags of each training
ARMS |= {name: {**ARMS["SiFT"], **DIVERGENCES[name]} for name in ("no perturbation", "shared 0.03", "shared 0.1")}
DRAWS = 4  # of dropout and noise
VERSIONS = {"": "as they are", "_typos": "typos", "_drops": "words left out"}  # suffix of a split -> name in the table


def main() -> None:
    parser = run_parser(__doc__, seeds=5)
    parser.add_argument("--tasks", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--steps", default="60")
    parser.add_argument("--epochs", help="instead of --steps")
    parser.add_argument("--max_train_samples", help="default: all training rows")
    parser.add_argument("--arms", nargs="+", default=["plain", "SiFT"], choices=ARMS)
    parser.add_argument("--divergence", action="store_true", help="measure what the divergence consists of, instead")
    args = parser.parse_args()
    name = args.name or args.model.name
    if args.divergence:
        runs = [{"checkpoint": name, "task": task, "passes": passes} for task in args.tasks for passes in DIVERGENCES]
        record_runs("sift_divergence.csv", runs, lambda run: [measure_divergence(args, run)], args.again)
        return
    length = f"{args.epochs} epochs" if args.epochs else f"{args.steps} steps"
    length += f" of {args.max_train_samples} rows in steps" if args.max_train_samples else ""
    setting = f"{length} of {BATCH}, {LENGTH} tokens, learning rate {LEARNING_RATE}"
    setting += f", lambda {SIFT_LAMBDA}, at most {EVAL_ROWS} validation rows"
    runs = [
        {"checkpoint": name, "task": task, "training": training, "seed": str(seed), "setting": setting}
        for seed in range(1, args.seeds + 1)
        for task in args.tasks
        for training in args.arms
    ]
    with tempfile.TemporaryDirectory() as scratch:
        record_runs("sift.csv", runs, lambda run: [train(args, run, Path(scratch))], args.again)
    print(table(name))


def measure_divergence(args: argparse.Namespace, run: dict[str, str]) -> dict[str, str]:
    """Return the mean divergence of 8 training rows, and the cosine of its gradient with that of SiFT as released."""
    task = TASKS[run["task"]]
    with open(args.data / task.folder / "train.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, 8)]
    texts = [[text for name, text in row.items() if name not in FIELDS_WITHOUT_TEXT] for row in rows]
    tokenizer = HfDebertaTokenizer.from_pretrained(args.model)
    inputs = dict(tokenizer(*map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt"))
    inputs["labels"] = torch.tensor([row["label"] for row in rows])
    model = HfDebertaForSequenceClassification.from_pretrained(args.model)
    losses, gradients = {}, {}
    for passes in ("as released", run["passes"]):
        model.train("without dropout" not in passes).zero_grad()
        losses[passes] = 0.0
        for draw in range(DRAWS):
            torch.manual_seed(draw)
            with PerturbedEmbeddings(model, SiftArguments(sift=True, **DIVERGENCES[passes])) as embeddings:
                loss = sift_loss(model, inputs, model(**inputs), embeddings) / DRAWS
            loss.backward()
            losses[passes] += loss.item()
        weights = (weight.grad.flatten() for weight in model.parameters() if weight.grad is not None)
        gradients[passes] = torch.cat([*weights]).double()
    cosine = torch.nn.functional.cosine_similarity(gradients["as released"], gradients[run["passes"]], dim=0)
    return {"divergence": f"{losses[run['passes']]:.3e}", "cosine": f"{cosine.item():.5f}"}


def train(args: argparse.Namespace, run: dict[str, str], folder: Path) -> dict[str, str]:
    """Fine-tune once; return scores, losses and seconds."""
    task, sift = TASKS[run["task"]], ARMS[run["training"]]
    flags = {"intermediate": args.model, "task_name": run["task"], "seed": run["seed"], "recipe": "none", **sift}
    flags["data_dir"] = write_rows_of(run["task"], args.data, folder)
    flags |= {"num_train_epochs": args.epochs} if args.epochs else {"max_steps": args.steps}
    flags |= {"max_train_samples": args.max_train_samples} if args.max_train_samples else {}
    flags |= {"per_device_train_batch_size": BATCH, "learning_rate": LEARNING_RATE, "warmup_steps": 0.1}
    flags |= {"max_seq_length": LENGTH, "max_eval_samples": EVAL_ROWS}
    flags |= {"document_context": "none"} if task.script == "run_ner.py" else {}
    metrics = run_script(task.script, folder / "run", flags)
    return {
        "metric": task.metric,
        **{f"value{suffix}": f"{metrics[f'eval_{task.metric}{suffix}']:.4f}" for suffix in VERSIONS},
        "task_loss": f"{metrics['train_task_loss' if sift else 'train_loss']:.5f}",
        "sift_loss": f"{metrics['train_sift_loss']:.6f}" if sift else "",
        "train_seconds": f"{metrics['train_runtime']:.1f}",
    }


def write_rows_of(name: str, data: Path, folder: Path) -> Path:
    """Return a folder with the training rows, the validation rows, and damaged validation rows."""
    source, target = data / TASKS[name].folder, folder / name
    if target.exists():
        return target
    target.mkdir(parents=True)
    for path in source.iterdir():
        if not path.stem.startswith(("train", "valid")):
            continue
        (target / path.name).symlink_to(path.resolve())
        for suffix in ("_typos", "_drops") if path.stem.startswith("valid") else ():
            draw = random.Random(0)
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            damage = damaged_word if path.suffix == ".txt" else damaged_row
            damaged = [line for line in (damage(line, suffix, draw) for line in lines) if line is not None]
            (target / f"validation{suffix}{path.suffix}").write_text("\n".join(damaged) + "\n", encoding="utf-8")
    return target


def damaged_row(line: str, suffix: str, draw: random.Random) -> str:
    """Return a row of jsonl whose texts have typos, or words left out."""
    row = json.loads(line)
    for column, text in row.items():
        if column not in FIELDS_WITHOUT_TEXT:
            words = text.split(" ")
            if suffix == "_typos":
                words = [with_typo(word, draw) for word in words]
            else:
                words = [word for word in words if draw.random() >= DROP_RATE] or words
            row[column] = " ".join(words)
    return json.dumps(row)


def damaged_word(line: str, suffix: str, draw: random.Random) -> str | None:
    """Return a line of CoNLL columns with a typo, or None to leave it out, which no word of an entity is."""
    word, _, labels = line.partition(" ")
    if not labels or word == "-DOCSTART-":
        return line
    if suffix == "_typos":
        return f"{with_typo(word, draw)} {labels}"
    return None if labels.endswith(" O") and draw.random() < DROP_RATE else line


def with_typo(word: str, draw: random.Random) -> str:
    """Return the word, at a rate of TYPO_RATE with two neighbouring letters exchanged if it is long enough."""
    if not (len(word) >= MIN_LETTERS and word.isalpha() and draw.random() < TYPO_RATE):
        return word
    first = draw.randrange(len(word) - 1)
    return word[:first] + word[first + 1] + word[first] + word[first + 2 :]


def table(checkpoint: str) -> str:
    """Return scores of each training and of plain, and the difference with the same seed, over seeds."""
    rows = [row for row in read_rows(RESULTS / "sift.csv") if row["checkpoint"] == checkpoint]
    lines = []
    for suffix, version in VERSIONS.items():
        by = ("setting", "task", "metric")
        for (*key, training), pairs in pairs_by_seed(rows, by, "training", "plain", f"value{suffix}").items():
            scores = [mean_and_range(values) for values in zip(*pairs, strict=True)]
            difference = mean_and_deviation([own - plain for own, plain in pairs], "+")
            lines.append([*key, training, version, str(len(pairs)), *scores, difference])
    head = ["setting", "task", "metric", "training", "validation rows", "seeds", "this training", "plain"]
    return markdown([*head, "difference, same seed"], sorted(lines), 5)


if __name__ == "__main__":
    main()
