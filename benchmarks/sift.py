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
import statistics
import tempfile
from itertools import islice
from pathlib import Path

import torch
from fine_tuning import FIELDS_WITHOUT_TEXT, TASKS, run_script
from table import RESULTS, markdown, read_rows
from timing import record_runs

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer
from hf_deberta.fine_tuning.sift import PerturbedEmbeddings, SiftArguments, sift_loss

NAMES = ("cola", "stsb", "conll2003", "mrpc", "rte")  # of tasks, smallest inputs first
BATCH, LEARNING_RATE, LENGTH, EVAL_ROWS = "16", "1e-4", "128", "500"
SIFT_LAMBDA = "3"  # weight of the adversarial loss, as published for xsmall
MIN_LETTERS, TYPO_RATE, DROP_RATE = 4, 0.2, 0.1
SIZES = ("--sift_init_perturbation", "--sift_learning_rate")  # of the perturbation
ARMS = {  # flags of each training
    "plain": [],
    "SiFT": ["--sift"],
    "no perturbation": ["--sift", SIZES[0], "1e-30", SIZES[1], "1e-30"],  # R-Drop
    "shared 0.03": ["--sift", "--sift_dropout", "shared", SIZES[0], "0.03", SIZES[1], "0.03"],
    "shared 0.1": ["--sift", "--sift_dropout", "shared", SIZES[0], "0.1", SIZES[1], "0.1"],
}
DIVERGENCES = {  # settings of SiFT; "without dropout" computes in evaluation mode
    "as released": {},
    "no perturbation": {"sift_init_perturbation": 1e-30, "sift_learning_rate": 1e-30},
    "as released, without dropout": {},
    "shared": {"sift_dropout": "shared"},
    "shared 0.03": {"sift_dropout": "shared", "sift_init_perturbation": 0.03, "sift_learning_rate": 0.03},
    "shared 0.1": {"sift_dropout": "shared", "sift_init_perturbation": 0.1, "sift_learning_rate": 0.1},
}
DRAWS = 4  # of dropout and noise
VERSIONS = {"": "as they are", "_typos": "typos", "_drops": "words left out"}  # suffix of a split -> name in the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of any checkpoint that the scripts load")
    parser.add_argument("--data", type=Path, help="folder with glue/cola/train.jsonl, conll2003/train.txt and so on")
    parser.add_argument("--tasks", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", default="60")
    parser.add_argument("--epochs", help="instead of --steps")
    parser.add_argument("--max_train_samples", help="default: all training rows")
    parser.add_argument("--arms", nargs="+", default=["plain", "SiFT"], choices=ARMS)
    parser.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
    parser.add_argument("--divergence", action="store_true", help="measure what the divergence consists of, instead")
    parser.add_argument("--name", help="name of the checkpoint in the result file")
    args = parser.parse_args()
    if args.divergence:
        runs = [
            {"checkpoint": args.name or args.model.name, "task": task, "passes": passes}
            for task in args.tasks
            for passes in DIVERGENCES
        ]
        record_runs("sift_divergence.csv", runs, lambda run: [measure_divergence(args, run)], args.again)
        return
    length = f"{args.epochs} epochs" if args.epochs else f"{args.steps} steps"
    length += f" of {args.max_train_samples} rows in steps" if args.max_train_samples else ""
    setting = f"{length} of {BATCH}, {LENGTH} tokens, learning rate {LEARNING_RATE}"
    setting += f", lambda {SIFT_LAMBDA}, at most {EVAL_ROWS} validation rows"
    runs = [
        {"checkpoint": args.name or args.model.name, "task": task, "training": training, "seed": str(seed)}
        | {"setting": setting}
        for seed in range(1, args.seeds + 1)
        for task in args.tasks
        for training in args.arms
    ]
    with tempfile.TemporaryDirectory() as scratch:
        record_runs("sift.csv", runs, lambda run: [train(args, run, Path(scratch))], args.again)
    print(table())


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
    data = write_rows_of(run["task"], args.data, folder)
    flags = ["--intermediate", args.model, "--task_name", run["task"], "--data_dir", data]
    flags += ["--num_train_epochs", args.epochs] if args.epochs else ["--max_steps", args.steps]
    flags += ["--max_train_samples", args.max_train_samples] if args.max_train_samples else []
    flags += ["--seed", run["seed"], "--warmup_steps", "0.1", "--recipe", "none"]
    flags += ["--per_device_train_batch_size", BATCH, "--learning_rate", LEARNING_RATE]
    flags += ["--max_seq_length", LENGTH, "--max_eval_samples", EVAL_ROWS]
    flags += [*sift, "--sift_lambda", SIFT_LAMBDA] if sift else []
    flags += ["--document_context", "none"] if task.script == "run_ner.py" else []
    metrics = run_script("ours", task.script, list(map(str, flags)), folder / "run")
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


def table() -> str:
    """Return mean scores over seeds, and the mean and standard deviation of the difference with the same seed."""
    groups: dict[tuple[str, ...], dict[tuple[str, str], dict[str, str]]] = {}
    for row in read_rows(RESULTS / "sift.csv"):
        group = groups.setdefault((row["checkpoint"], row["setting"], row["task"], row["metric"]), {})
        group[row["training"], row["seed"]] = row
    settings = list(dict.fromkeys((checkpoint, setting) for checkpoint, setting, *_ in groups))
    lines = []
    for (checkpoint, setting, task, metric), group in groups.items():
        label = f"{task}, {metric} ({settings.index((checkpoint, setting)) + 1})"
        for arm in list(ARMS)[1:]:
            seeds = [seed for training, seed in group if training == "plain" and (arm, seed) in group]
            for suffix, name in VERSIONS.items() if seeds else ():
                plain, sift = (
                    [float(group[training, seed][f"value{suffix}"]) for seed in seeds] for training in ("plain", arm)
                )
                differences = [after - before for before, after in zip(plain, sift, strict=True)]
                means = [f"{statistics.mean(values):.3f}" for values in (plain, sift)]
                lines.append([label, arm, name, str(len(seeds)), *means, mean_and_deviation(differences)])
    head = ["task, metric", "training", "validation rows", "seeds", "plain", "this training", "difference, same seed"]
    legend = [f"({number}) {checkpoint}; {setting}." for number, (checkpoint, setting) in enumerate(settings, 1)]
    return "\n".join([markdown(head, lines, 3), "", *legend])


def mean_and_deviation(differences: list[float]) -> str:
    mean = f"{statistics.mean(differences):+.3f}"
    return f"{mean} ± {statistics.stdev(differences):.3f}" if len(differences) > 1 else mean


if __name__ == "__main__":
    main()
