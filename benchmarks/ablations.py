"""What each part of the model is worth: the ablations of the paper's table 4, small, by `run_mlm.py`.

    python benchmarks/ablations.py --train_file books/*.txt --validation_file held_out.txt

Every variant is the same model (4 layers, 256 wide) but for some fields of its configuration, trained from scratch on
the same rows in the same order with the same masks. Rows go to results/ablations.csv as they are done, and what is
there is not done again.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import RESULTS, circumstances, write_rows

ROOT = Path(__file__).parents[1]
SIZE = "hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024"
SIZE += ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"
VARIANTS = {
    "DeBERTa": "",
    "- EMD": "emd_steps=0",
    "- C2P": "pos_att_type=p2c",
    "- P2C": "pos_att_type=c2p",
    "- EMD - C2P": "emd_steps=0,pos_att_type=p2c",
    "- EMD - P2C": "emd_steps=0,pos_att_type=c2p",
    "BERT (absolute at input)": "relative_attention=false,pos_att_type=none,position_biased_input=true",
}
TABLE = RESULTS / "ablations.csv"


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
            if not any(
                (row["variant"], row["seed"], row["setting"]) == (variant, str(seed), setting) for row in done()
            ):
                found = train(args, variant, seed)
                row = {"variant": variant, "seed": seed, "setting": setting, **found, **circumstances()}
                write_rows(TABLE, [row], ("variant", "seed", "setting"))
                print(f"{variant:26} seed {seed}: {found}", flush=True)
    print_table(setting)


def train(args: argparse.Namespace, variant: str, seed: int) -> dict[str, str]:
    folder = args.work_dir / "run"
    command = [sys.executable, "-W", "ignore", str(ROOT / "run_mlm.py"), "--config_preset", "v3-small"]
    command += ["--config_overrides", ",".join(filter(None, (SIZE, VARIANTS[variant])))]
    command += ["--train_file", *args.train_file, "--validation_file", *args.validation_file]
    command += ["--max_seq_length", args.length, "--tokens_dir", args.work_dir / "tokens"]
    tokenizer = args.work_dir / "tokenizer"  # learnt by the first run, used by all
    command += ["--tokenizer_name", tokenizer] if tokenizer.exists() else ["--train_tokenizer", 8000]
    command += ["--output_dir", folder, "--resume_from_checkpoint", "false", "--save_strategy", "no"]
    command += ["--max_steps", args.steps, "--per_device_train_batch_size", args.batch, "--seed", seed]
    command += ["--learning_rate", args.learning_rate, "--warmup_steps", "0.1", "--disable_tqdm", "true"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, "USE_TF": "0"})
    if not tokenizer.exists():
        (folder / "tokenizer").rename(tokenizer)
    found = json.loads((folder / "all_results.json").read_text())
    return {
        "validation_loss": f"{found['eval_loss']:.4f}",
        "masked_accuracy": f"{found['eval_masked_accuracy']:.4f}",
    }


def done() -> list[dict[str, str]]:
    if not TABLE.exists():
        return []
    with open(TABLE, newline="") as file:
        return list(csv.DictReader(file))


def print_table(setting: str) -> None:
    """Mean and spread over seeds, and the mean difference to the whole model at equal seeds."""
    losses = {}
    for row in done():
        if row["setting"] == setting:
            losses.setdefault(row["variant"], {})[row["seed"]] = float(row["validation_loss"])
    print(f"\n| {setting} | validation loss | smallest to largest | minus DeBERTa, same seed |\n|---|--:|--:|--:|")
    whole = losses.get("DeBERTa", {})
    for variant, by_seed in losses.items():
        values = list(by_seed.values())
        differences = [by_seed[seed] - whole[seed] for seed in by_seed if seed in whole]
        spread = f"{min(values):.3f} to {max(values):.3f}"
        difference = f"{statistics.mean(differences):+.3f}" if differences else ""
        print(f"| {variant} | {statistics.mean(values):.3f} | {spread} | {difference} |")


if __name__ == "__main__":
    main()
