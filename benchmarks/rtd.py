"""Show that replaced token detection learns: the discriminator's scores on held-out text, while a pair is trained.

    python benchmarks/rtd.py released --model FOLDER --train_file books/*.txt --validation_file held_out.txt
    python benchmarks/rtd.py scratch --train_file books/*.txt --validation_file held_out.txt

`released` continues a discriminator whose generator is not at hand, such as one that was fine-tuned. The generator
starts as its embeddings and first layers, with a new head. `scratch` trains new pairs with each kind of embedding
sharing: GDES, ES and NES, section 3.3 of the DeBERTaV3 paper. `run_rtd.py` trains; every evaluation is a row of
results/rtd.csv. Rows are added as runs finish; runs that are already there are skipped, unless --again repeats them.
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

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.tokenization_hf_deberta import load_tokenizer

ROOT = Path(__file__).parents[1]
RESULT_FILE = RESULTS / "rtd.csv"
METRICS = ("replaced_found", "original_kept", "rtd_loss", "masked_accuracy", "lm_loss")
HEAD_SIZE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    experiments = parser.add_subparsers(dest="experiment", required=True)
    released = experiments.add_parser("released", help="continue a released discriminator")
    released.add_argument("--model", type=Path, required=True, help="folder of the discriminator")
    scratch = experiments.add_parser("scratch", help="train new pairs")
    scratch.add_argument("--layers", type=int, default=4)
    scratch.add_argument("--hidden_size", type=int, default=128, help=f"a multiple of {HEAD_SIZE}")
    scratch.add_argument("--vocab_size", type=int, default=1000)
    for command, steps, batch, rate, generator_layers, seeds, sharings in (
        (released, 300, 8, "1e-4", 3, 1, ["gdes"]),
        (scratch, 1500, 8, "1e-3", 2, 3, ["gdes", "es", "nes"]),
    ):
        command.add_argument("--train_file", nargs="+", required=True)
        command.add_argument("--validation_file", nargs="+", required=True)
        command.add_argument("--max_eval_samples", type=int, default=200)
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--batch", type=int, default=batch)
        command.add_argument("--length", type=int, default=64)
        command.add_argument("--learning_rate", default=rate)
        command.add_argument("--rtd_weight", type=float, default=50.0)
        command.add_argument("--generator_layers", type=int, default=generator_layers)
        command.add_argument("--embedding_sharing", nargs="+", default=sharings, choices=["gdes", "es", "nes"])
        command.add_argument("--seeds", type=int, default=seeds)
        command.add_argument("--evaluations", type=int, default=10)
        command.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
        command.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "rtd")
    args = parser.parse_args()
    setting = describe_setting(args)
    runs = [
        {"experiment": args.experiment, "embedding_sharing": sharing, "seed": str(seed), "setting": setting}
        for seed in range(1, args.seeds + 1)
        for sharing in args.embedding_sharing
    ]
    record_runs(RESULT_FILE, runs, lambda run: train(args, run["embedding_sharing"], run["seed"]), args.again)
    print_table(args.experiment, setting)


def describe_setting(args: argparse.Namespace) -> str:
    training = f"{args.steps} steps of {args.batch} x {args.length}, peak {args.learning_rate}"
    training += f", RTD weight {args.rtd_weight:g}, generator of {args.generator_layers} layers"
    if args.experiment == "released":
        return training
    return f"{args.layers} layers of {args.hidden_size}, {args.vocab_size} pieces, {training}"


def train(args: argparse.Namespace, sharing: str, seed: str) -> list[dict[str, str]]:
    """Pretrain one pair; return the metrics of each evaluation."""
    folder = args.work_dir / "run"
    command: list[object] = [sys.executable, "-W", "ignore", ROOT / "run_rtd.py", "--output_dir", folder]
    command += released_model(args) if args.experiment == "released" else new_model(args)
    command += ["--train_file", *args.train_file, "--validation_file", *args.validation_file]
    command += ["--max_eval_samples", args.max_eval_samples, "--max_seq_length", args.length]
    command += ["--tokens_dir", args.work_dir / f"tokens_{args.experiment}"]
    command += ["--embedding_sharing", sharing, "--rtd_weight", args.rtd_weight, "--seed", seed]
    command += ["--max_steps", args.steps, "--per_device_train_batch_size", args.batch]
    command += ["--learning_rate", args.learning_rate, "--warmup_steps", "0.1", "--adam_beta2", "0.98"]
    command += ["--eval_strategy", "steps", "--eval_steps", max(1, args.steps // args.evaluations)]
    command += ["--eval_on_start", "true", "--resume_from_checkpoint", "false", "--save_strategy", "no"]
    command += ["--disable_tqdm", "true"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, "USE_TF": "0"})
    if args.experiment == "scratch" and not tokenizer_folder(args).exists():
        (folder / "tokenizer").rename(tokenizer_folder(args))
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    evaluations = {entry["step"]: entry for entry in history if "eval_rtd_loss" in entry}
    return [
        {"step": str(step), **{name: f"{entry[f'eval_{name}']:.4f}" for name in METRICS}}
        for step, entry in evaluations.items()
    ]


def new_model(args: argparse.Namespace) -> list[object]:
    """Return the flags of a new pair. The first run trains the tokenizer, all runs use it."""
    fields = f"num_hidden_layers={args.layers},hidden_size={args.hidden_size},intermediate_size={4 * args.hidden_size}"
    fields += f",num_attention_heads={args.hidden_size // HEAD_SIZE}"
    fields += ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    flags: list[object] = ["--config_preset", "v3-small", "--config_overrides", fields]
    flags += ["--generator_layers", args.generator_layers]
    tokenizer = tokenizer_folder(args)
    return flags + (["--tokenizer_name", tokenizer] if tokenizer.exists() else ["--train_tokenizer", args.vocab_size])


def tokenizer_folder(args: argparse.Namespace) -> Path:
    return args.work_dir / f"tokenizer_{args.vocab_size}"


def released_model(args: argparse.Namespace) -> list[object]:
    """Return the flags of a pair whose generator is made from the discriminator's embeddings and first layers."""
    folder = args.work_dir / f"generator_{args.generator_layers}"
    if not folder.exists():
        config = HfDebertaConfig.from_pretrained(args.model, num_hidden_layers=args.generator_layers)
        HfDebertaForMaskedLM.from_pretrained(args.model, config=config).save_pretrained(folder)
        load_tokenizer(args.model).save_pretrained(folder)
    return ["--discriminator_name_or_path", args.model, "--generator_name_or_path", folder]


def print_table(experiment: str, setting: str) -> None:
    """Print the course of each kind of embedding sharing: means over seeds, at the end with smallest and largest."""
    rows = [row for row in read_rows(RESULT_FILE) if (row["experiment"], row["setting"]) == (experiment, setting)]
    print(f"\n{experiment}: {setting}\n\n| sharing | step | seeds | {' | '.join(METRICS)} |")
    print("|---|--:|--:|" + "--:|" * len(METRICS))
    for sharing in dict.fromkeys(row["embedding_sharing"] for row in rows):
        of_sharing = [row for row in rows if row["embedding_sharing"] == sharing]
        steps = sorted({int(row["step"]) for row in of_sharing})
        for step in steps:
            at_step = [row for row in of_sharing if int(row["step"]) == step]
            cells = [mean_and_range([float(row[name]) for row in at_step], step == steps[-1]) for name in METRICS]
            print(f"| {sharing} | {step} | {len(at_step)} | {' | '.join(cells)} |")


def mean_and_range(values: list[float], with_range: bool) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ({min(values):.3f} to {max(values):.3f})" if with_range and len(values) > 1 else mean


if __name__ == "__main__":
    main()
