"""Pretraining hyperparameters: of the papers, of the released scripts, which differ, and of newer encoders.

>>> find_recipe("paper", "rtd", "v3-base").settings["learning_rate"]
0.0006
>>> find_recipe("released", "rtd", "v3-base").settings["learning_rate"]
0.0001

A figure that could not be read in a source is missing from its row, and the flag keeps its default.

The modern recipes train without dropout, mostly at a constant rate that falls in the last tenth of the steps, and mask
more tokens, all by [MASK]. For RTD nobody has published such settings: those of the DeBERTaV3 paper with this schedule
and these masks are our own. "long" is another one: the released settings on longer rows.
"""

from dataclasses import dataclass
from typing import Any

from hf_deberta.training.errors import InputError

SOURCES = ("paper", "released", "modern")
PAPER_V1, PAPER_V3 = "DeBERTa paper, table 8", "DeBERTaV3 paper, table 14, as cited by others"
PAPER_ABLATION = "DeBERTaV3 paper, table 6, as cited by others"
PAPER_MULTILINGUAL = "DeBERTaV3 paper, mDeBERTa, as cited by others"
PAPER_NEOBERT = (
    "NeoBERT paper, arXiv:2502.19587, as cited by others; the rate falls to a tenth as in its repository, there within "
    "900,000 steps"
)
MODERNBERT_CONFIG = (
    "modernbert-base-pretrain.yaml of github.com/AnswerDotAI/ModernBERT, tokens divided by those of a step; AdamW and "
    "clipping in place of StableAdamW, whose weight decay of 1e-5 is not multiplied by the rate; a falling rate, no "
    "dropout, [MASK] alone: our choice"
)
MODERN_RTD = f"{PAPER_V3}; schedule, masks and dropout: our choice, after ModernBERT and NeoBERT"
MLM_SCRIPT, RTD_SCRIPT = "mlm.sh of github.com/microsoft/DeBERTa", "rtd.sh of github.com/microsoft/DeBERTa"

# what a row has besides the columns of PUBLISHED
REST = {"adam_epsilon": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
MASKING_OF_PAPERS = {"max_seq_length": 512, "mlm_probability": 0.15}
MLM_OF_PAPER = {**REST, **MASKING_OF_PAPERS, "max_ngram": 3, "adam_beta2": 0.999}
RTD_OF_PAPER = {**MASKING_OF_PAPERS, "max_ngram": 1, "mask_prob": 1.0}
V3_OF_PAPER = {**REST, **RTD_OF_PAPER, "adam_beta2": 0.98, "rtd_weight": 50.0}
MLM_OF_SCRIPT = {**REST, "adam_beta2": 0.999, "masking": "official"}
RTD_OF_SCRIPT = {**MLM_OF_SCRIPT, "max_ngram": 1, "mask_prob": 1.0, "rtd_weight": 10.0, "decoupled": True}
MASKS_ALONE = {"max_ngram": 1, "mask_prob": 1.0, "random_prob": 0.0}
NO_DROPOUT = {"config_overrides": "hidden_dropout_prob=0,attention_probs_dropout_prob=0"}
MODERN = {**MASKS_ALONE, **NO_DROPOUT, "mlm_probability": 0.3, "lr_scheduler_type": "warmup_stable_decay"}
MODERNBERT = {**MODERN, "max_seq_length": 1024, "adam_beta2": 0.98, **REST, "weight_decay": 0.0125}
NEOBERT = {
    **MASKS_ALONE, **NO_DROPOUT, "max_seq_length": 1024, "mlm_probability": 0.2,
    "lr_scheduler_type": "cosine_with_min_lr", "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}  # fmt: skip
LONG_ROWS = {"max_seq_length": 2048, "sample_by": "document", "emd_steps": 0}
LONG_CHOICE = "rows of 2,048 tokens, a quarter as many, and no decoder in the generator: our choice"

# (source, objective) -> model -> learning rate, rows per step, warmup steps, steps (None: not known); the rest; where
# it is printed. "2k" rows in the DeBERTa paper are read as 2,048.
PUBLISHED: dict[tuple[str, str], dict[str, tuple[tuple, dict[str, Any], str]]] = {
    ("paper", "mlm"): {
        "v1-base": ((2e-4, 2048, 10_000, 1_000_000), MLM_OF_PAPER, PAPER_V1),
        "v1-base-ablation": ((1e-4, 256, 10_000, 1_000_000), MLM_OF_PAPER, PAPER_V1),
        "v1-large": ((2e-4, 2048, 10_000, 1_000_000), MLM_OF_PAPER, PAPER_V1),
        "v2-xxlarge": ((1.5e-4, 2048, 10_000, 1_000_000), MLM_OF_PAPER, PAPER_V1),
    },
    ("paper", "rtd"): {
        "v3-small": ((6e-4, 8192, 10_000, 500_000), V3_OF_PAPER, PAPER_V3),
        "v3-base": ((6e-4, 8192, 10_000, 500_000), V3_OF_PAPER, PAPER_V3),
        "v3-base-ablation": ((5e-4, 2048, 10_000, 125_000), {**RTD_OF_PAPER, "rtd_weight": 50.0}, PAPER_ABLATION),
        "v3-large": ((3e-4, 8192, 10_000, 500_000), V3_OF_PAPER, PAPER_V3),
        "mdeberta-v3-base": ((None, 8192, None, 500_000), RTD_OF_PAPER, PAPER_MULTILINGUAL),
    },
    ("released", "mlm"): {
        "v1-base": ((1e-4, 256, 10_000, 1_000_000), MLM_OF_SCRIPT, MLM_SCRIPT),
        "v2-xlarge": ((1e-4, 32, 1000, 1_000_000), MLM_OF_SCRIPT, MLM_SCRIPT),
        "v2-xxlarge": ((1e-4, 32, 1000, 1_000_000), MLM_OF_SCRIPT, MLM_SCRIPT),
    },
    ("released", "rtd"): {
        "v3-xsmall": ((3e-4, 64, 10_000, 1_000_000), RTD_OF_SCRIPT, RTD_SCRIPT),
        "v3-base": ((1e-4, 256, 10_000, 1_000_000), RTD_OF_SCRIPT, RTD_SCRIPT),
        "v3-large": ((1e-4, 256, 10_000, 1_000_000), RTD_OF_SCRIPT, RTD_SCRIPT),
        "continue": ((5e-5, 256, 10_000, 100_000), RTD_OF_SCRIPT, RTD_SCRIPT),
    },
    ("modern", "mlm"): {
        "modernbert-base": ((8e-4, 4608, 636, 364_304), MODERNBERT, MODERNBERT_CONFIG),
        "neobert": ((6e-4, 2048, 2000, 1_000_000), NEOBERT, PAPER_NEOBERT),
    },
    ("modern", "rtd"): {
        "v3-small": ((6e-4, 8192, 10_000, 500_000), {**V3_OF_PAPER, **MODERN}, MODERN_RTD),
        "v3-base": ((6e-4, 8192, 10_000, 500_000), {**V3_OF_PAPER, **MODERN}, MODERN_RTD),
        "v3-large": ((3e-4, 8192, 10_000, 500_000), {**V3_OF_PAPER, **MODERN}, MODERN_RTD),
        "long": ((5e-5, 64, 10_000, 100_000), {**RTD_OF_SCRIPT, **LONG_ROWS}, f"{RTD_SCRIPT}, continue; {LONG_CHOICE}"),
    },
}  # fmt: skip
# (source, objective, "new" or "continued") -> the row for a model whose size has none
DEFAULT_ROWS = {
    ("released", "rtd", "continued"): "continue",
    ("modern", "mlm", "new"): "modernbert-base",
    ("modern", "rtd", "new"): "v3-base",
}
# every flag that a complete row sets besides the batch, and for RTD rtd_weight
COMPLETE = {"learning_rate", "warmup_steps", "max_steps", "adam_beta2", *REST}


@dataclass(frozen=True)
class Recipe:
    """Flags of a published pretraining run; `batch` counts rows per step over all devices."""

    settings: dict[str, Any]
    batch: int
    source: str
    missing: tuple[str, ...]  # flags whose figure is not known

    def flags(self, devices: int = 1, rows_per_device: int = 32) -> dict[str, Any]:
        """Return the flags of a script on this many devices: the batch becomes rows per device and accumulation.

        >>> find_recipe("paper", "rtd", "v3-base").flags(devices=8)["gradient_accumulation_steps"]
        32
        """
        rows = min(rows_per_device, max(1, self.batch // devices))
        accumulation = max(1, round(self.batch / (devices * rows)))
        batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
        return {**self.settings, **batch}


def find_recipe(source: str, objective: str, model: str | None) -> Recipe:
    """Return the settings of a row of the table, by source, "mlm" or "rtd", and model."""
    rows = PUBLISHED[source, objective]
    if model not in rows:
        kind = "published" if source == "paper" else source
        raise InputError(
            f"--recipe {source}: there are no {kind} {objective.upper()} settings for {model or 'this model'}: name "
            f"a model that has some with --recipe {source}:MODEL, where MODEL is {', '.join(rows)}"
        )
    (rate, batch, warmup, steps), rest, printed_in = rows[model]
    settings = {"learning_rate": rate, "warmup_steps": warmup, "max_steps": steps}
    settings = {name: value for name, value in settings.items() if value is not None} | rest
    missing = COMPLETE.union(["rtd_weight"] * (objective == "rtd")) - settings.keys()
    return Recipe(settings, batch, f"{source} settings of {model} ({printed_in})", tuple(sorted(missing)))


def parse_name(name: str) -> tuple[str, str | None]:
    """Parse --recipe into source and model: "paper", or "paper:v3-base"."""
    source, _, model = name.partition(":")
    if source not in SOURCES:
        raise InputError(f"--recipe must be none, {', '.join(SOURCES)}, or one of these with :MODEL, not {name!r}")
    return source, model or None
