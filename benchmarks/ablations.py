"""Measure what each part of the model is worth: small versions of the ablations in the paper's table 4.

    python benchmarks/ablations.py --train_file books/*.txt --validation_file held_out.txt
    python benchmarks/ablations.py ... --steps 4000 --variants DeBERTa "- EMD" "- P2C" "EMD -> absolute at input"
    python benchmarks/ablations.py ... --causal     # DeBERTa, -AP and -MT as autoregressive models, table 10

Each variant is the same model (4 layers, `--hidden_size` wide) except for some fields of its configuration.
`run_mlm.py` trains it from scratch on the same rows in the same order with the same masks. Rows are added to
results/ablations.csv, with --causal to results/causal.csv, as runs finish; runs that are already there are skipped,
unless --again repeats them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import RESULTS, read_rows, record_runs

ROOT = Path(__file__).parents[1]
HEAD_SIZE = 64
VARIANTS = {  # name -> fields of the configuration
    "DeBERTa": "",
    "- EMD": "emd_steps=0",
    "- C2P": "pos_att_type=p2c",
    "- P2C": "pos_att_type=c2p",
    "- EMD - C2P": "emd_steps=0,pos_att_type=p2c",
    "- EMD - P2C": "emd_steps=0,pos_att_type=c2p",
    "EMD -> absolute at input": "position_biased_input=true",  # which leaves out the decoder; relative attention stays
    "BERT (absolute at input)": "relative_attention=false,pos_att_type=none,position_biased_input=true",
}
CAUSAL_VARIANTS = {  # name -> objective, fields of the configuration
    "DeBERTa": ("causal", ""),
    "DeBERTa-AP": ("causal", "position_biased_input=true"),
    "DeBERTa-MT": ("joint", ""),
}
METRICS = {"validation_loss": "eval_loss", "masked_accuracy": "eval_masked_accuracy"}
CAUSAL_METRICS = {name: f"eval_{name}" for name in ("token_perplexity", "word_perplexity", "bits_per_byte")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", nargs="+", required=True)
    parser.add_argument("--validation_file", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden_size", type=int, default=256, help=f"a multiple of {HEAD_SIZE} (default: 256)")
    parser.add_argument("--vocab_size", type=int, default=8000)
    parser.add_argument("--learning_rate", default="1e-3")
    parser.add_argument("--seeds", type=int, default=3)
    names = list(dict.fromkeys((*VARIANTS, *CAUSAL_VARIANTS)))
    parser.add_argument("--variants", nargs="+", choices=names, help="default: all")
    parser.add_argument("--causal", action="store_true", help="autoregressive models")
    parser.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "ablations")
    args = parser.parse_args()
    if args.hidden_size % HEAD_SIZE:
        parser.error(f"--hidden_size must be a multiple of {HEAD_SIZE}, not {args.hidden_size}")
    variants = CAUSAL_VARIANTS if args.causal else {name: ("mlm", fields) for name, fields in VARIANTS.items()}
    if unknown := set(args.variants or ()) - variants.keys():
        parser.error(f"no such variant {'with' if args.causal else 'without'} --causal: {', '.join(unknown)}")
    results = RESULTS / ("causal.csv" if args.causal else "ablations.csv")
    setting = f"{args.steps} steps of {args.batch} x {args.length}, peak {args.learning_rate}"
    setting += f", {args.vocab_size / 1000:g}k Unigram"
    if args.hidden_size != 256:  # rows without a width have this one
        setting += f", width {args.hidden_size}"
    runs = [
        {"variant": variant, "seed": str(seed), "setting": setting}
        for seed in range(1, args.seeds + 1)
        for variant in args.variants or variants
    ]
    record_runs(results, runs, lambda run: [train(args, *variants[run["variant"]], run["seed"])], args.again)
    print_table(results, setting, "word_perplexity" if args.causal else "validation_loss")


def size(width: int) -> str:
    """Return the fields of the configuration that all variants share."""
    fields = f"hidden_size={width},num_hidden_layers=4,num_attention_heads={width // HEAD_SIZE}"
    return fields + f",intermediate_size={4 * width},hidden_dropout_prob=0,attention_probs_dropout_prob=0"


def train(args: argparse.Namespace, objective: str, fields: str, seed: str) -> dict[str, str]:
    """Pretrain one variant; return its metrics on the validation text."""
    folder = args.work_dir / "run"
    command: list[object] = [sys.executable, "-W", "ignore", ROOT / "run_mlm.py", "--config_preset", "v3-small"]
    command += ["--config_overrides", ",".join(filter(None, (size(args.hidden_size), fields)))]
    command += ["--train_file", *args.train_file, "--validation_file", *args.validation_file]
    command += ["--max_seq_length", args.length, "--tokens_dir", args.work_dir / "tokens"]
    tokenizer = args.work_dir / "tokenizer"  # the first run trains it, all runs use it
    command += ["--tokenizer_name", tokenizer] if tokenizer.exists() else ["--train_tokenizer", args.vocab_size]
    command += ["--output_dir", folder, "--resume_from_checkpoint", "false", "--save_strategy", "no"]
    command += ["--objective", objective]
    command += ["--perplexity_stride", args.length // 2] if args.causal else []
    command += ["--max_steps", args.steps, "--per_device_train_batch_size", args.batch, "--seed", seed]
    command += ["--learning_rate", args.learning_rate, "--warmup_steps", "0.1", "--disable_tqdm", "true"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, "USE_TF": "0"})
    if not tokenizer.exists():
        (folder / "tokenizer").rename(tokenizer)
    metrics = json.loads((folder / "all_results.json").read_text())
    names = CAUSAL_METRICS if args.causal else METRICS
    return {name: f"{metrics[logged]:.4f}" for name, logged in names.items()}


def print_table(results: Path, setting: str, metric: str) -> None:
    """Print mean and range over seeds, and the mean difference from the complete model with the same seed."""
    scores: dict[str, dict[str, float]] = {}
    for row in read_rows(results):
        if row["setting"] == setting:
            scores.setdefault(row["variant"], {})[row["seed"]] = float(row[metric])
    heading = f"{setting} | {metric.replace('_', ' ')} | smallest to largest | minus DeBERTa, same seed"
    print(f"\n| {heading} |\n|---|--:|--:|--:|")
    complete = scores.get("DeBERTa", {})
    for variant, by_seed in scores.items():
        values = list(by_seed.values())
        differences = [by_seed[seed] - complete[seed] for seed in by_seed if seed in complete]
        spread = f"{min(values):.3f} to {max(values):.3f}"
        difference = f"{statistics.mean(differences):+.3f}" if differences else ""
        print(f"| {variant} | {statistics.mean(values):.3f} | {spread} | {difference} |")


if __name__ == "__main__":
    main()
