"""Pretrain small models that differ in one thing, and compare them on held-out text: what is each part worth?

    python benchmarks/ablations.py parts --train_file books/*.txt --validation_file held_out.txt
    python benchmarks/ablations.py parts ... --steps 4000 --variants DeBERTa "- EMD" "- P2C" "EMD -> absolute at input"
    python benchmarks/ablations.py recipes --data ../data ...
    python benchmarks/ablations.py causal ...
    python benchmarks/ablations.py rtd ...
    python benchmarks/ablations.py released --model FOLDER ...

- parts: table 4 of the DeBERTa paper, by masked language modelling with run_mlm.py
- recipes: --recipe modern beside --recipe paper with the same tokens and peak rate, and the modern one without EMD, or
  with BERT's attention; all are evaluated with the same masks (15 % of the words, all by [MASK]), and fine-tuned on
  2,000 rows of SST-2 of --data
- causal: DeBERTa, -AP and -MT as autoregressive models, table 10
- rtd: replaced token detection with each kind of embedding sharing, section 3.3 of the DeBERTaV3 paper, with run_rtd.py
- released: the same for a discriminator whose generator is not at hand, such as one that was fine-tuned: the generator
  starts as its embeddings and first layers, with a new head

All variants of an experiment see the same rows in the same order with the same masks. Runs are added to the result file
as they finish; runs that are already there are skipped, unless --again repeats them.
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
from typing import Any

from fine_tuning import run_script
from table import RESULTS, read_rows, summary
from timing import record_runs

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.tokenization_hf_deberta import load_tokenizer

ROOT = Path(__file__).parents[1]
HEAD_SIZE, LAYERS, BATCH, RTD_WEIGHT = 64, 4, 8, 50
PARTS = {  # name -> fields of the configuration
    "DeBERTa": "",
    "- EMD": "emd_steps=0",
    "- C2P": "pos_att_type=p2c",
    "- P2C": "pos_att_type=c2p",
    "- EMD - C2P": "emd_steps=0,pos_att_type=p2c",
    "- EMD - P2C": "emd_steps=0,pos_att_type=c2p",
    "EMD -> absolute at input": "position_biased_input=true",  # which leaves out the decoder; relative attention stays
    "BERT (absolute at input)": "relative_attention=false,pos_att_type=none,position_biased_input=true",
}
RECIPES = {  # name -> recipe, fields of the configuration
    "modern": ("modern", ""),
    "paper": ("paper:v1-base", ""),
    "modern - EMD": ("modern", "emd_steps=0"),
    "modern, BERT's attention": ("modern", PARTS["BERT (absolute at input)"]),
}
CAUSAL = {"DeBERTa": "", "DeBERTa-AP": "position_biased_input=true", "DeBERTa-MT": ""}
SHARINGS = {"gdes": "", "es": "", "nes": ""}


@dataclass(frozen=True)
class Experiment:
    """What an experiment trains by default, and which of its numbers the result file gets."""

    result_file: str
    variants: dict[str, Any]
    metrics: tuple[str, ...]
    steps: int
    length: int
    hidden_size: int
    vocab_size: int
    learning_rate: str = "1e-3"
    seeds: int = 3
    evaluations: int = 1
    eval_rows: int | None = None
    generator_layers: int = 0  # replaced token detection if there are any

    @property
    def column(self) -> str:
        """The column of the result file that names the variant."""
        return "embedding_sharing" if self.generator_layers else "variant"


MASKED_METRICS = ("validation_loss", "masked_accuracy")
SAME_MASKS = ("--mlm_probability", "0.15", "--max_ngram", "1", "--mask_prob", "1", "--random_prob", "0")
SST2 = ("--max_train_samples", "2000", "--num_train_epochs", "3", "--learning_rate", "3e-4", "--warmup_steps", "0.1")
CAUSAL_METRICS = ("token_perplexity", "word_perplexity", "bits_per_byte")
RTD_METRICS = ("replaced_found", "original_kept", "rtd_loss", "masked_accuracy", "lm_loss")
RTD: dict[str, Any] = {"result_file": "rtd.csv", "metrics": RTD_METRICS, "length": 64}
EXPERIMENTS = {
    "parts": Experiment("ablations.csv", PARTS, MASKED_METRICS, 800, 128, 256, 8000),
    "recipes": Experiment("recipes.csv", RECIPES, (*MASKED_METRICS, "sst2_accuracy"), 1500, 128, 128, 4000),
    "causal": Experiment("causal.csv", CAUSAL, CAUSAL_METRICS, 1000, 128, 128, 4000),
    "rtd": Experiment(
        **RTD, variants=SHARINGS, steps=500, hidden_size=128, vocab_size=1000, evaluations=5, eval_rows=200,
        generator_layers=2,
    ),
    "released": Experiment(
        **RTD, variants={"gdes": ""}, steps=200, hidden_size=0, vocab_size=0, learning_rate="1e-4", seeds=1,
        evaluations=8, eval_rows=100, generator_layers=3,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--train_file", nargs="+", required=True)
    parser.add_argument("--validation_file", nargs="+", required=True)
    parser.add_argument("--model", type=Path, help="folder of the released discriminator")
    parser.add_argument("--data", type=Path, help="for recipes: folder with glue/sst2/train.jsonl")
    for name in ("steps", "length", "hidden_size", "vocab_size", "seeds"):
        parser.add_argument(f"--{name}", type=int, help="default: that of the experiment")
    parser.add_argument("--variants", nargs="+", help="default: all")
    parser.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "ablations")
    args = parser.parse_args()
    experiment = EXPERIMENTS[args.experiment]
    parser.set_defaults(**vars(experiment))
    args = parser.parse_args()
    if args.experiment == "recipes" and args.data is None:
        parser.error("recipes needs --data")
    if args.hidden_size % HEAD_SIZE:
        parser.error(f"--hidden_size must be a multiple of {HEAD_SIZE}, not {args.hidden_size}")
    if unknown := set(args.variants) - experiment.variants.keys():
        parser.error(f"{args.experiment} has no such variant: {', '.join(unknown)}")
    setting = describe_setting(args)
    first = {"experiment": args.experiment.replace("rtd", "scratch")} if experiment.generator_layers else {}
    runs = [
        {**first, experiment.column: variant, "seed": str(seed), "setting": setting}
        for seed in range(1, args.seeds + 1)
        for variant in args.variants
    ]
    record_runs(experiment.result_file, runs, lambda run: train(args, run[experiment.column], run["seed"]), args.again)
    print_tables(experiment, setting)


def describe_setting(args: argparse.Namespace) -> str:
    """Name what was trained, as the result files do."""
    experiment = EXPERIMENTS[args.experiment]
    setting = f"{args.steps} steps of {BATCH} x {args.length}, peak {experiment.learning_rate}"
    if experiment.generator_layers:
        setting += f", RTD weight {RTD_WEIGHT}, generator of {experiment.generator_layers} layers"
        pair = f"{LAYERS} layers of {args.hidden_size}, {args.vocab_size} pieces, "
        return setting if args.experiment == "released" else pair + setting
    setting += f", {args.vocab_size / 1000:g}k Unigram"
    return setting if args.hidden_size == 256 else f"{setting}, width {args.hidden_size}"  # rows without one have 256


def train(args: argparse.Namespace, variant: str, seed: str) -> list[dict[str, str]]:
    """Pretrain one variant; return its metrics on the validation text, for each step if there are several."""
    experiment, folder = EXPERIMENTS[args.experiment], args.work_dir / "run"
    script = "run_rtd.py" if experiment.generator_layers else "run_mlm.py"
    tokenizer = args.work_dir / f"tokenizer_{args.vocab_size}"
    command: list[object] = [sys.executable, "-W", "ignore", ROOT / script, "--output_dir", folder, "--seed", seed]
    command += released_model(args) if args.experiment == "released" else new_model(args, variant, tokenizer)
    command += ["--train_file", *args.train_file, "--validation_file", *args.validation_file]
    command += ["--max_seq_length", args.length, "--tokens_dir", args.work_dir / f"tokens_{args.experiment}"]
    command += ["--max_steps", args.steps, "--per_device_train_batch_size", BATCH]
    command += ["--learning_rate", experiment.learning_rate, "--warmup_steps", "0.1", "--disable_tqdm", "true"]
    command += ["--resume_from_checkpoint", "false", "--save_strategy", "no"]
    if experiment.generator_layers:
        command += ["--embedding_sharing", variant, "--rtd_weight", RTD_WEIGHT, "--adam_beta2", "0.98"]
        command += ["--eval_strategy", "steps", "--eval_steps", max(1, args.steps // experiment.evaluations)]
        command += ["--eval_on_start", "true", "--max_eval_samples", experiment.eval_rows]
    else:
        objective = "joint" if variant == "DeBERTa-MT" else "causal" if args.experiment == "causal" else "mlm"
        command += ["--objective", objective]
        command += ["--perplexity_stride", args.length // 2] if args.experiment == "causal" else []
    if args.experiment == "recipes":
        command += ["--recipe", experiment.variants[variant][0], "--gradient_accumulation_steps", 1]
    run_quietly(command)
    if args.experiment != "released" and not tokenizer.exists():
        (folder / "tokenizer").rename(tokenizer)
    if args.experiment == "recipes":
        return [{**evaluate_with_same_masks(args, folder), "sst2_accuracy": fine_tune(args, folder, seed)}]
    return metrics_of(folder, experiment)


def run_quietly(command: list[object]) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, "USE_TF": "0"})


def evaluate_with_same_masks(args: argparse.Namespace, model: Path) -> dict[str, str]:
    """Return loss and accuracy on the validation text with masks that do not depend on the recipe."""
    folder = args.work_dir / "same_masks"
    command: list[object] = [sys.executable, "-W", "ignore", ROOT / "run_mlm.py", "--do_train", "false"]
    command += ["--model_name_or_path", model, "--output_dir", folder, "--resume_from_checkpoint", "false", *SAME_MASKS]
    command += ["--train_file", *args.train_file, "--validation_file", *args.validation_file]
    command += ["--max_seq_length", args.length, "--tokens_dir", args.work_dir / f"tokens_{args.experiment}"]
    run_quietly(command)
    logged = json.loads((folder / "all_results.json").read_text())
    return {name: f"{logged[f'eval_{name}'.replace('validation_', '')]:.4f}" for name in MASKED_METRICS}


def fine_tune(args: argparse.Namespace, model: Path, seed: str) -> str:
    """Return the accuracy of the model on SST-2."""
    flags = ["--model_name_or_path", str(model), "--task_name", "sst2", "--data_dir", str(args.data / "glue" / "sst2")]
    flags += ["--recipe", "none", "--seed", seed, "--max_seq_length", str(args.length), *SST2]
    return f"{run_script('ours', 'run_glue.py', flags, args.work_dir / 'sst2')['eval_accuracy']:.4f}"


def metrics_of(folder: Path, experiment: Experiment) -> list[dict[str, str]]:
    """Return the metrics of the final evaluation, or of every evaluation with its step."""
    steps: dict[str, dict[str, float]] = {"": json.loads((folder / "all_results.json").read_text())}
    if experiment.generator_layers:
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        steps = {str(entry["step"]): entry for entry in history if "eval_rtd_loss" in entry}
    return [
        ({"step": step} if step else {})
        | {name: f"{logged[f'eval_{name}'.replace('validation_', '')]:.4f}" for name in experiment.metrics}
        for step, logged in steps.items()
    ]


def new_model(args: argparse.Namespace, variant: str, tokenizer: Path) -> list[object]:
    """Return the flags of a new model. The first run trains the tokenizer, all runs use it."""
    experiment, width = EXPERIMENTS[args.experiment], args.hidden_size
    fields = f"hidden_size={width},num_hidden_layers={LAYERS},num_attention_heads={width // HEAD_SIZE}"
    fields += f",intermediate_size={4 * width}"
    changes = experiment.variants[variant]
    if args.experiment == "recipes":
        changes = changes[1]
    else:  # a recipe decides about dropout
        fields += ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    fields += f",{changes}" if changes else ""
    flags: list[object] = ["--config_preset", "v3-small", "--config_overrides", fields]
    flags += ["--generator_layers", experiment.generator_layers] if experiment.generator_layers else []
    return flags + (["--tokenizer_name", tokenizer] if tokenizer.exists() else ["--train_tokenizer", args.vocab_size])


def released_model(args: argparse.Namespace) -> list[object]:
    """Return the flags of a pair whose generator is made from the discriminator's embeddings and first layers."""
    layers = EXPERIMENTS["released"].generator_layers
    folder = args.work_dir / f"generator_{layers}"
    if not folder.exists():
        config = HfDebertaConfig.from_pretrained(args.model, num_hidden_layers=layers)
        HfDebertaForMaskedLM.from_pretrained(args.model, config=config).save_pretrained(folder)
        load_tokenizer(args.model).save_pretrained(folder)
    return ["--discriminator_name_or_path", args.model, "--generator_name_or_path", folder]


def print_tables(experiment: Experiment, setting: str) -> None:
    """Print means and ranges over seeds, and the mean difference from the complete model with the same seed."""
    rows = [row for row in read_rows(RESULTS / experiment.result_file) if row["setting"] == setting]
    by = (experiment.column, "step") if experiment.generator_layers else (experiment.column,)
    print(f"\n{setting}\n\n{summary(rows, by, experiment.metrics)}")
    if experiment.generator_layers:
        return
    metric = experiment.metrics[1 if experiment.result_file == "causal.csv" else 0]
    values = {(row["variant"], row["seed"]): float(row[metric]) for row in rows}
    first = next(iter(experiment.variants))
    print(f"\n{metric} minus that of {first}, mean over the seeds of both:")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        seeds = [seed for name, seed in values if name == variant and (first, seed) in values]
        if seeds:
            difference = statistics.mean(values[variant, seed] - values[first, seed] for seed in seeds)
            print(f"- {variant}: {difference:+.3f}")


if __name__ == "__main__":
    main()
