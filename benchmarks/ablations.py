"""Measure what each part of the model is worth: small versions of the ablations in the paper's table 4.

    python benchmarks/ablations.py --train_file books/*.txt --validation_file held_out.txt

Each variant is the same model (4 layers, 256 wide) except for some fields of its configuration. `run_mlm.py` trains it
from scratch on the same rows in the same order with the same masks. Rows are added to results/ablations.csv as runs
finish; runs that are already there are skipped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import RESULTS, environment, read_rows, write_rows

ROOT = Path(__file__).parents[1]
SIZE = "hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024"
SIZE += ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"
VARIANTS = {  # name -> fields of the configuration
    "DeBERTa": "",
    "- EMD": "emd_steps=0",
    "- C2P": "pos_att_type=p2c",
    "- P2C": "pos_att_type=c2p",
    "- EMD - C2P": "emd_steps=0,pos_att_type=p2c",
    "- EMD - P2C": "emd_steps=0,pos_att_type=c2p",
    "BERT (absolute at input)": "relative_attention=false,pos_att_type=none,position_biased_input=true",
}
RESULT_FILE = RESULTS / "ablations.csv"
KEY = ("variant", "seed", "setting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", nargs="+", required=True)
    parser.add_argument("--validation_file", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning_rate", default="1e-3")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "ablations")
    args = parser.parse_args()
    setting = f"{args.steps} steps of {args.batch} x {args.length}, peak {args.learning_rate}, 8k Unigram"
    for seed in range(1, args.seeds + 1):
        for variant in args.variants:
            row = {"variant": variant, "seed": str(seed), "setting": setting}
            if any(all(earlier[column] == row[column] for column in KEY) for earlier in read_rows(RESULT_FILE)):
                continue
            metrics = train(args, variant, seed)
            write_rows(RESULT_FILE, [{**row, **metrics, **environment()}], KEY)
            print(f"{variant:26} seed {seed}: {metrics}", flush=True)
    print_table(setting)


def train(args: argparse.Namespace, variant: str, seed: int) -> dict[str, str]:
    """Pretrain one variant; return its validation loss and accuracy."""
    folder = args.work_dir / "run"
    command: list[object] = [sys.executable, "-W", "ignore", ROOT / "run_mlm.py", "--config_preset", "v3-small"]
    command += ["--config_overrides", ",".join(filter(None, (SIZE, VARIANTS[variant])))]
    command += ["--train_file", *args.train_file, "--validation_file", *args.validation_file]
    command += ["--max_seq_length", args.length, "--tokens_dir", args.work_dir / "tokens"]
    tokenizer = args.work_dir / "tokenizer"  # the first run trains it, all runs use it
    command += ["--tokenizer_name", tokenizer] if tokenizer.exists() else ["--train_tokenizer", 8000]
    command += ["--output_dir", folder, "--resume_from_checkpoint", "false", "--save_strategy", "no"]
    command += ["--max_steps", args.steps, "--per_device_train_batch_size", args.batch, "--seed", seed]
    command += ["--learning_rate", args.learning_rate, "--warmup_steps", "0.1", "--disable_tqdm", "true"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, "USE_TF": "0"})
    if not tokenizer.exists():
        (folder / "tokenizer").rename(tokenizer)
    metrics = json.loads((folder / "all_results.json").read_text())
    return {
        "validation_loss": f"{metrics['eval_loss']:.4f}",
        "masked_accuracy": f"{metrics['eval_masked_accuracy']:.4f}",
    }


def print_table(setting: str) -> None:
    """Print mean and range over seeds, and the mean difference from the complete model with the same seed."""
    losses: dict[str, dict[str, float]] = {}
    for row in read_rows(RESULT_FILE):
        if row["setting"] == setting:
            losses.setdefault(row["variant"], {})[row["seed"]] = float(row["validation_loss"])
    print(f"\n| {setting} | validation loss | smallest to largest | minus DeBERTa, same seed |\n|---|--:|--:|--:|")
    complete = losses.get("DeBERTa", {})
    for variant, by_seed in losses.items():
        values = list(by_seed.values())
        differences = [by_seed[seed] - complete[seed] for seed in by_seed if seed in complete]
        spread = f"{min(values):.3f} to {max(values):.3f}"
        difference = f"{statistics.mean(differences):+.3f}" if differences else ""
        print(f"| {variant} | {statistics.mean(values):.3f} | {spread} | {difference} |")


if __name__ == "__main__":
    main()
