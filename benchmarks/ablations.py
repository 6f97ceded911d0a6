"""Pretrain small models that differ in one thing, and compare them on held-out text: what is each part worth?

    python benchmarks/ablations.py parts --train_file books/*.txt --validation_file held_out.txt
    python benchmarks/ablations.py parts ... --steps 4000 --variants DeBERTa "- EMD" "- P2C" "EMD -> absolute at input"
    python benchmarks/ablations.py recipes --data ../data ...
    python benchmarks/ablations.py causal ...
    python benchmarks/ablations.py rtd ...

- parts: table 4 of the DeBERTa paper, by masked language modelling with run_mlm.py
- recipes: --recipe modern beside --recipe paper with the same tokens and peak rate, and the modern one without EMD, or
  with BERT's attention; all are evaluated with the same masks (15 % of the words, all by [MASK]), and fine-tuned on
  2,000 rows of SST-2 of --data
- causal: DeBERTa, -AP and -MT as autoregressive models, table 10
- rtd: replaced token detection with each kind of embedding sharing, section 3.3 of the DeBERTaV3 paper, with run_rtd.py

All variants of an experiment see the same rows in the same order with the same masks. Runs are added to the result file
as they finish; runs that are already there are skipped, unless --again repeats them.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import read_evaluations, run_script
from table import RESULTS, pairs_by_seed, read_rows, summary
from timing import record_runs

HEAD_SIZE, LAYERS, BATCH, RTD_WEIGHT = 64, 4, 8, 50
NO_DROPOUT = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
FIELDS = {  # name of a part -> fields of the configuration
    "DeBERTa": "",
    "- EMD": "emd_steps=0",
    "- C2P": "pos_att_type=p2c",
    "- P2C": "pos_att_type=c2p",
    "- EMD - C2P": "emd_steps=0,pos_att_type=p2c",
    "- EMD - P2C": "emd_steps=0,pos_att_type=c2p",
    "EMD -> absolute at input": "position_biased_input=true",  # which leaves out the decoder; relative attention stays
    "BERT (absolute at input)": "relative_attention=false,pos_att_type=none,position_biased_input=true",
}
Variants = dict[str, dict[str, str]]  # name -> flags of the script
PARTS: Variants = {name: {"config_overrides": fields} for name, fields in FIELDS.items()}
RECIPES: Variants = {
    "modern": {"recipe": "modern"},
    "paper": {"recipe": "paper:v1-base"},
    "modern - EMD": {"recipe": "modern", **PARTS["- EMD"]},
    "modern, BERT's attention": {"recipe": "modern", **PARTS["BERT (absolute at input)"]},
}
CAUSAL: Variants = {
    "DeBERTa": {"objective": "causal"},
    "DeBERTa-AP": {"objective": "causal", **PARTS["EMD -> absolute at input"]},
    "DeBERTa-MT": {"objective": "joint"},
}
SHARINGS: Variants = {name: {"embedding_sharing": name} for name in ("gdes", "es", "nes")}
SAME_MASKS = {"mlm_probability": 0.15, "max_ngram": 1, "mask_prob": 1, "random_prob": 0}
SST2 = {"max_train_samples": 2000, "num_train_epochs": 3, "learning_rate": 3e-4, "warmup_steps": 0.1}
Metrics = dict[str, float]


def evaluate_recipe(args: argparse.Namespace, folder: Path, seed: str) -> Metrics:
    """Evaluate with masks that do not depend on the recipe, and fine-tune on SST-2."""
    flags = {**data_flags(args), **SAME_MASKS, "model_name_or_path": folder, "do_train": False}
    metrics = run_script("run_mlm.py", args.work_dir / "same_masks", flags)
    flags = {"model_name_or_path": folder, "task_name": "sst2", "data_dir": args.data / "glue" / "sst2", **SST2}
    flags |= {"recipe": "none", "seed": seed, "max_seq_length": args.length}
    tuned = run_script("run_glue.py", args.work_dir / "sst2", flags)
    return {**metrics, "eval_sst2_accuracy": tuned["eval_accuracy"]}


def rtd_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of replaced token detection with five evaluations of 200 rows."""
    flags = {"eval_strategy": "steps", "eval_steps": max(1, args.steps // 5), "eval_on_start": True}
    flags |= {"max_eval_samples": 200, "generator_layers": 2, "rtd_weight": RTD_WEIGHT}
    return {**flags, "adam_beta2": 0.98}


@dataclass(frozen=True)
class Experiment:
    """What an experiment trains by default, and how a trained model is evaluated."""

    result_file: str
    variants: Variants
    metrics: tuple[str, ...]  # that the result file gets
    steps: int
    length: int
    hidden_size: int
    vocab_size: int
    learning_rate: str = "1e-3"
    seeds: int = 3
    config_fields: str = NO_DROPOUT
    flags: Callable[[argparse.Namespace], dict[str, Any]] = lambda args: {}  # of all variants
    evaluate: Callable[[argparse.Namespace, Path, str], Metrics] | None = None  # by default as the script does
    needs: str = ""  # a flag that must be given
    generator_layers: int = 0  # replaced token detection if there are any, with all evaluations of a run

    @property
    def column(self) -> str:
        """The column of the result file that names the variant."""
        return "embedding_sharing" if self.generator_layers else "variant"


MASKED_METRICS = ("validation_loss", "masked_accuracy")
CAUSAL_METRICS = ("token_perplexity", "word_perplexity", "bits_per_byte")
RTD_METRICS = ("replaced_found", "original_kept", "rtd_loss", "masked_accuracy", "lm_loss")
EXPERIMENTS = {
    "parts": Experiment("ablations.csv", PARTS, MASKED_METRICS, 800, 128, 256, 8000),
    "recipes": Experiment(
        "recipes.csv", RECIPES, (*MASKED_METRICS, "sst2_accuracy"), 1500, 128, 128, 4000, needs="data",
        config_fields="", flags=lambda args: {"gradient_accumulation_steps": 1}, evaluate=evaluate_recipe,
    ),
    "causal": Experiment(
        "causal.csv", CAUSAL, CAUSAL_METRICS, 1000, 128, 128, 4000,
        flags=lambda args: {"perplexity_stride": args.length // 2},
    ),
    "rtd": Experiment(
        "rtd.csv", SHARINGS, RTD_METRICS, 500, 64, 128, 1000, flags=rtd_flags, generator_layers=2,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--train_file", nargs="+", required=True)
    parser.add_argument("--validation_file", nargs="+", required=True)
    parser.add_argument("--data", type=Path, help="for recipes: folder with glue/sst2/train.jsonl")
    for name in ("steps", "length", "hidden_size", "vocab_size", "seeds"):
        parser.add_argument(f"--{name}", type=int, help="default: that of the experiment")
    parser.add_argument("--variants", nargs="+", help="default: all")
    parser.add_argument("--again", action="store_true", help="repeat recorded runs, and print both")
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "ablations")
    experiment = EXPERIMENTS[parser.parse_args().experiment]
    parser.set_defaults(**vars(experiment))
    args = parser.parse_args()
    if experiment.needs and getattr(args, experiment.needs) is None:
        parser.error(f"{args.experiment} needs --{experiment.needs}")
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
    setting = f"{args.steps} steps of {BATCH} x {args.length}, peak {args.learning_rate}"
    if args.generator_layers:
        setting += f", RTD weight {RTD_WEIGHT}, generator of {args.generator_layers} layers"
        return f"{LAYERS} layers of {args.hidden_size}, {args.vocab_size} pieces, {setting}"
    setting += f", {args.vocab_size / 1000:g}k Unigram"
    return setting if args.hidden_size == 256 else f"{setting}, width {args.hidden_size}"  # rows without one have 256


def data_flags(args: argparse.Namespace) -> dict[str, Any]:
    files = {"train_file": args.train_file, "validation_file": args.validation_file}
    return {**files, "max_seq_length": args.length, "tokens_dir": args.work_dir / f"tokens_{args.experiment}"}


def train(args: argparse.Namespace, variant: str, seed: str) -> list[dict[str, str]]:
    """Pretrain one variant; return its metrics on the validation text, for each step if there are several."""
    experiment, folder = EXPERIMENTS[args.experiment], args.work_dir / "run"
    script = "run_rtd.py" if experiment.generator_layers else "run_mlm.py"
    flags = {**data_flags(args), **experiment.flags(args), **experiment.variants[variant], "seed": seed}
    flags |= {"max_steps": args.steps, "per_device_train_batch_size": BATCH}
    flags |= {"learning_rate": args.learning_rate, "warmup_steps": 0.1}
    tokenizer = args.work_dir / f"tokenizer_{args.vocab_size}"
    flags |= new_model(args, flags.get("config_overrides", ""), tokenizer)
    metrics = run_script(script, folder, flags)
    if "train_tokenizer" in flags:
        (folder / "tokenizer").rename(tokenizer)
    if experiment.evaluate is not None:
        metrics = experiment.evaluate(args, folder, seed)
    evaluations = read_evaluations(folder) if experiment.generator_layers else {"": metrics}
    return [
        ({"step": step} if step else {})
        | {name: f"{logged[f'eval_{name}'.replace('validation_', '')]:.4f}" for name in experiment.metrics}
        for step, logged in evaluations.items()
    ]


def new_model(args: argparse.Namespace, changes: str, tokenizer: Path) -> dict[str, Any]:
    """Return the flags of a new model. The first run trains the tokenizer, all runs use it."""
    width = args.hidden_size
    fields = f"hidden_size={width},num_hidden_layers={LAYERS},num_attention_heads={width // HEAD_SIZE}"
    fields += f",intermediate_size={4 * width}"
    words = [fields, *filter(None, (args.config_fields, changes))]
    vocabulary = {"tokenizer_name": tokenizer} if tokenizer.exists() else {"train_tokenizer": args.vocab_size}
    return {"config_preset": "v3-small", "config_overrides": ",".join(words), **vocabulary}


def print_tables(experiment: Experiment, setting: str) -> None:
    """Print means and ranges over seeds, and the mean difference from the complete model with the same seed."""
    rows = [row for row in read_rows(RESULTS / experiment.result_file) if row["setting"] == setting]
    by = (experiment.column, "step") if experiment.generator_layers else (experiment.column,)
    print(f"\n{setting}\n\n{summary(rows, by, experiment.metrics)}")
    first = next(iter(experiment.variants))
    for metric in () if experiment.generator_layers else experiment.metrics:
        print(f"\n{metric} minus that of {first}, mean over the seeds of both:")
        for (variant,), pairs in pairs_by_seed(rows, (), "variant", first, metric).items():
            print(f"- {variant}: {statistics.mean(own - other for own, other in pairs):+.3f}")


if __name__ == "__main__":
    main()
