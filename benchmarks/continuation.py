"""Continue pretraining on the text of a domain, then fine-tune on few rows of a task of that domain: does it pay?

    python benchmarks/continuation.py --model deberta-v3-xsmall --data ../data --work_dir continued

The domain is film reviews: the text of SST-2's training rows with eight words or more, without labels. The checkpoint
is continued on it with replaced token detection (run_rtd.py) and with masked language modelling (run_mlm.py), with the
same steps, rows and learning rate. Each encoder, and the one that was not continued, is then fine-tuned with a new
head on the same few labelled rows.

Scores are added to results/continuation.csv and losses on the validation sentences to results/continuation_losses.csv
as runs finish; what is there is skipped. An interrupted continuation resumes from its last checkpoint.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ablations import released_model
from scripts import read_evaluations, run_script, save_encoder
from table import RESULTS, grouped, markdown, mean_and_range, pairs_by_seed, read_rows
from timing import record_runs, run_parser

from hf_deberta.tokenization_hf_deberta import load_tokenizer

METRICS: dict[str, tuple[str, ...]] = {  # continuation -> what the evaluations of its script give
    "none": (),
    "RTD": ("rtd_loss", "replaced_found", "original_kept", "lm_loss", "masked_accuracy"),
    "MLM": ("loss", "masked_accuracy"),
}
MIN_WORDS = 8  # SST-2 has parts of sentences, down to single words
BATCH, LENGTH, LEARNING_RATE, EVALUATIONS, EVALUATED = 16, 64, "1e-4", 4, 96
TASK_ROWS, TASK_STEPS, TASK_RATE = ("32", "200"), "60", "5e-5"
SIZE = {"per_device_train_batch_size": BATCH, "max_seq_length": LENGTH, "warmup_steps": 0.1}


def main() -> None:
    parser = run_parser(__doc__, seeds=3)
    parser.add_argument("--work_dir", type=Path, required=True, help="for continued models and checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    setting = f"{args.steps} steps of {BATCH} x {LENGTH}, peak {LEARNING_RATE}, bfloat16"
    first = {"checkpoint": args.name or args.model.name, "setting": setting}
    continuations = [{**first, "continuation": name} for name in METRICS if METRICS[name]]
    record_runs("continuation_losses.csv", continuations, lambda run: continue_on_domain(args, run), again=False)
    tuned = f"{TASK_STEPS} steps of {BATCH}, peak {TASK_RATE}"
    runs = [
        {**first, "continuation": name, "rows": rows, "fine_tuning": tuned, "seed": str(seed)}
        for seed in range(1, args.seeds + 1)
        for rows in TASK_ROWS
        for name in METRICS
    ]
    record_runs("continuation.csv", runs, lambda run: [fine_tune(args, run)], args.again)
    print(table([row for row in read_rows(RESULTS / "continuation.csv") if first.items() <= row.items()]))


def continue_on_domain(args: argparse.Namespace, run: dict[str, str]) -> list[dict[str, str]]:
    """Continue pretraining, or resume it; return the metrics of each evaluation on the validation sentences."""
    name, folder = run["continuation"], args.work_dir / run["continuation"]
    script = "run_mlm.py" if name == "MLM" else "run_rtd.py"
    flags: dict[str, Any] = {f"{split}_file": write_text(args, split) for split in ("train", "validation")}
    flags |= {"model_name_or_path": args.model} if name == "MLM" else released_model(args.model, args.work_dir)
    flags |= {**SIZE, "max_steps": args.steps, "learning_rate": LEARNING_RATE, "bf16": True, "use_cpu": True, "seed": 1}
    flags |= {"eval_strategy": "steps", "eval_steps": args.steps // EVALUATIONS, "eval_on_start": True}
    flags |= {"save_strategy": "steps", "save_steps": args.steps // EVALUATIONS, "save_total_limit": 1}
    run_script(script, folder, {**flags, "max_eval_samples": EVALUATED, "resume_from_checkpoint": True})
    names = dict.fromkeys(metric for metrics in METRICS.values() for metric in metrics)
    return [
        {"step": step}
        | {metric: f"{logged[f'eval_{metric}']:.4f}" if metric in METRICS[name] else "" for metric in names}
        for step, logged in read_evaluations(folder).items()
    ]


def write_text(args: argparse.Namespace, split: str) -> Path:
    """Write the sentences of a split, each once, and return the file."""
    path = args.work_dir / f"{split}.txt"
    lines = (args.data / "glue" / "sst2" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    sentences = dict.fromkeys(json.loads(line)["sentence"].strip() for line in lines)
    path.write_text("\n".join(text for text in sentences if len(text.split()) >= MIN_WORDS) + "\n", encoding="utf-8")
    return path


def fine_tune(args: argparse.Namespace, run: dict[str, str]) -> dict[str, str]:
    """Fine-tune the encoder, with a new head, on the first rows of SST-2; return its accuracy."""
    encoder = args.work_dir / f"encoder_{run['continuation']}"
    if not encoder.exists():
        sources = {"none": args.model, "RTD": args.work_dir / "RTD" / "discriminator", "MLM": args.work_dir / "MLM"}
        save_encoder(sources[run["continuation"]], encoder, load_tokenizer(args.model))
    flags = {"model_name_or_path": encoder, "task_name": "sst2", "data_dir": args.data / "glue" / "sst2", **SIZE}
    flags |= {"max_train_samples": run["rows"], "max_steps": TASK_STEPS, "learning_rate": TASK_RATE}
    metrics = run_script("run_glue.py", args.work_dir / "task", {**flags, "recipe": "none", "seed": run["seed"]})
    return {"accuracy": f"{metrics['eval_accuracy']:.4f}", "train_loss": f"{metrics['train_loss']:.4f}"}


def table(runs: list[dict[str, str]]) -> str:
    """Return the accuracy by number of rows, and the difference from no continuation with the same seed."""
    pairs = pairs_by_seed(runs, ("rows",), "continuation", "none", "accuracy")
    lines = []
    for key, group in grouped(runs, ("rows", "continuation")).items():
        accuracy = mean_and_range([float(row["accuracy"]) for row in group])
        gains = [own - none for own, none in pairs.get(key, [])]
        lines.append([*key, str(len(group)), accuracy, mean_and_range(gains) if gains else ""])
    return markdown(["labelled rows", "continued with", "seeds", "accuracy", "minus none, same seed"], lines, 2)


if __name__ == "__main__":
    main()
