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
import subprocess
import sys
from pathlib import Path

from ablations import ROOT, released_model
from fine_tuning import run_script
from table import RESULTS, markdown, mean_and_range, read_rows
from timing import record_runs

from hf_deberta import HfDebertaModel
from hf_deberta.tokenization_hf_deberta import load_tokenizer

SCRIPTS = {"none": "", "RTD": "run_rtd.py", "MLM": "run_mlm.py"}  # continuation -> script
METRICS = {
    "RTD": ("rtd_loss", "replaced_found", "original_kept", "lm_loss", "masked_accuracy"),
    "MLM": ("loss", "masked_accuracy"),
}
MIN_WORDS = 8  # SST-2 has parts of sentences, down to single words
BATCH, LENGTH, LEARNING_RATE, EVALUATIONS, EVALUATED = 16, 64, "1e-4", 4, 96
TASK_ROWS, TASK_STEPS, TASK_RATE = ("32", "200"), "60", "5e-5"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a released v3 discriminator")
    parser.add_argument("--name", help="name of the checkpoint in the result files")
    parser.add_argument("--data", type=Path, required=True, help="folder with glue/sst2/train.jsonl")
    parser.add_argument("--work_dir", type=Path, required=True, help="for continued models and checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="of fine-tuning")
    parser.add_argument("--continuations", nargs="+", default=list(SCRIPTS), choices=SCRIPTS)
    parser.add_argument("--again", action="store_true", help="repeat recorded fine-tuning, and print both")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    setting = f"{args.steps} steps of {BATCH} x {LENGTH}, peak {LEARNING_RATE}, bfloat16"
    first = {"checkpoint": args.name or args.model.name, "setting": setting}
    for name in args.continuations:
        if SCRIPTS[name]:
            run = {**first, "continuation": name}
            record_runs("continuation_losses.csv", [run], lambda run: continue_on_domain(args, run), again=False)
    tuned = f"{TASK_STEPS} steps of {BATCH}, peak {TASK_RATE}"
    runs = [
        {**first, "continuation": name, "rows": rows, "fine_tuning": tuned, "seed": str(seed)}
        for seed in range(1, args.seeds + 1)
        for rows in TASK_ROWS
        for name in args.continuations
    ]
    record_runs("continuation.csv", runs, lambda run: [fine_tune(args, run)], args.again)
    print(table(first))


def continue_on_domain(args: argparse.Namespace, run: dict[str, str]) -> list[dict[str, str]]:
    """Continue pretraining, or resume it; return the metrics of each evaluation on the validation sentences."""
    name, folder = run["continuation"], args.work_dir / run["continuation"]
    files = {split: write_text(args, split) for split in ("train", "validation")}
    flags: list[object] = ["--model_name_or_path", args.model] if name == "MLM" else released_model(args)
    flags += ["--train_file", files["train"], "--validation_file", files["validation"], "--max_seq_length", LENGTH]
    flags += ["--per_device_train_batch_size", BATCH, "--max_steps", args.steps, "--learning_rate", LEARNING_RATE]
    flags += ["--warmup_steps", "0.1", "--eval_strategy", "steps", "--eval_steps", args.steps // EVALUATIONS]
    flags += ["--eval_on_start", "--max_eval_samples", EVALUATED, "--bf16", "--use_cpu", "--seed", 1]
    flags += ["--save_steps", args.steps // EVALUATIONS, "--save_total_limit", 1]
    command = [sys.executable, "-W", "ignore", ROOT / SCRIPTS[name], *flags, "--output_dir", folder]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    evaluations = {entry["step"]: entry for entry in history if "eval_masked_accuracy" in entry}
    names = dict.fromkeys(metric for metrics in METRICS.values() for metric in metrics)
    return [
        {"step": str(step)}
        | {metric: f"{logged[f'eval_{metric}']:.4f}" if metric in METRICS[name] else "" for metric in names}
        for step, logged in evaluations.items()
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
    flags = ["--model_name_or_path", str(encoder_of(args, run["continuation"])), "--task_name", "sst2"]
    flags += ["--data_dir", str(args.data / "glue" / "sst2"), "--max_train_samples", run["rows"], "--recipe", "none"]
    flags += ["--max_steps", TASK_STEPS, "--learning_rate", TASK_RATE, "--warmup_steps", "0.1", "--seed", run["seed"]]
    flags += ["--per_device_train_batch_size", str(BATCH), "--max_seq_length", str(LENGTH)]
    metrics = run_script("ours", "run_glue.py", flags, args.work_dir / "task")
    return {"accuracy": f"{metrics['eval_accuracy']:.4f}", "train_loss": f"{metrics['train_loss']:.4f}"}


def encoder_of(args: argparse.Namespace, continuation: str) -> Path:
    """Return a folder with the encoder alone, so that all start with a new head."""
    folder = args.work_dir / f"encoder_{continuation}"
    if not folder.exists():
        parts = {"none": args.model, "RTD": args.work_dir / "RTD" / "discriminator"}
        source = parts.get(continuation, args.work_dir / continuation)
        HfDebertaModel.from_pretrained(source, dtype="float32").save_pretrained(folder)
        load_tokenizer(args.model).save_pretrained(folder)
    return folder


def table(first: dict[str, str]) -> str:
    """Return the accuracy by number of rows, and the difference from no continuation with the same seed."""
    runs = [row for row in read_rows(RESULTS / "continuation.csv") if first.items() <= row.items()]
    scores = {(row["continuation"], row["rows"], row["seed"]): float(row["accuracy"]) for row in runs}
    lines = []
    for rows in dict.fromkeys(row["rows"] for row in runs):
        for name in SCRIPTS:
            values = {seed: score for (of, number, seed), score in scores.items() if (of, number) == (name, rows)}
            differences = [score - scores["none", rows, seed] for seed, score in values.items()]
            if values:
                gain = mean_and_range(differences) if name != "none" else ""
                lines.append([rows, name, str(len(values)), mean_and_range([*values.values()]), gain])
    return markdown(["labelled rows", "continued with", "seeds", "accuracy", "minus none, same seed"], lines, 2)


if __name__ == "__main__":
    main()
