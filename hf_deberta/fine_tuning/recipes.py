"""Fine-tuning hyperparameters by (task, model size): the published ones, and our defaults where none were published.

>>> recipe, source = find_recipe("cola", "v3-large")
>>> recipe.learning_rate, recipe.epochs
(5.5e-06, 10.0)

Unless a comment says otherwise, rows come from the released scripts of github.com/microsoft/DeBERTa. These all use
Adam with epsilon 1e-6, weight decay 0.01, gradient clipping at 1 and a linear schedule, which are the defaults of
`FineTuningArguments`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_deberta import PRESETS, HfDebertaConfig

SIZES = ("v1-base", "v1-large", "v1-xlarge", "v2-xlarge", "v2-xxlarge", "v3-large")

# task: maximum input length, then a row for each of SIZES:
# epochs, learning rate, batch size over all devices, warmup, classifier dropout
PUBLISHED: dict[str, tuple] = {
    "mnli": (256, "3 3e-5 64 1000 .1", "3 1e-5 64 1000 .2", "3 5e-6 64 1000 .3",
             "3 4e-6 64 1000 .25", "3 3e-6 64 1000 .3", "2 7e-6 64 500 .3"),
    "cola": (64, "6 2e-5 32 100 .15", "6 7e-6 32 100 .15", "8 5e-6 32 100 .2",
             "8 3e-6 32 100 .2", "10 2.5e-6 32 100 .2", "10 5.5e-6 32 50 .1"),
    "rte": (320, "6 2e-5 32 100 .2", "6 1e-5 32 50 .2", "6 5e-6 48 50 .2",
            "6 4e-6 48 50 .2", "6 3e-6 48 50 .2", "6 1e-5 32 50 .3"),
    "mrpc": (128, "6 2e-5 32 50 .15", "6 1e-5 32 50 .15", "8 7e-6 32 50 .3",
             "6 3.5e-6 32 50 .2", "6 2e-6 32 50 .2", "6 6e-6 32 50 .2"),
    "stsb": (128, "6 2e-5 32 100 .15", "4 7e-6 32 100 .15", "4 7e-6 32 100 .2",
             "4 4e-6 32 100 .2", "4 3e-6 32 100 .2", "4 7e-6 32 50 .1"),
    "sst2": (128, "6 2e-5 32 500 .15", "6 1e-5 32 500 .15", "6 3e-6 32 500 .2",
             "4 4e-6 32 500 .2", "4 3e-6 32 500 .2", "8 6e-6 32 500 .1"),
    "qnli": (512, "4 2e-5 32 500 .15", "4 1e-5 32 500 .15", "4 7e-6 32 500 .2",
             "4 4e-6 64 500 .2", "4 3e-6 64 500 .2", "6 7e-6 64 200 .2"),
    "qqp": (320, "8 2e-5 64 500 .15", "8 1e-5 64 500 .15", "8 7e-6 64 500 .2",
            "10 4e-6 64 1000 .2", "10 3e-6 64 1000 .2", "6 1e-5 64 1000 .2"),
    "conll2003": (512, "15 2e-5 16 .1 0", "15 1e-5 16 .1 0", "15 7e-6 16 .1 0",
                  "15 4e-6 16 .1 0", "15 2.5e-6 16 .1 0", "10 9e-6 16 10 0"),
    "record": (512, "3 2e-5 64 1000 .3", "3 1e-5 64 1000 .3", "3 7e-6 64 1000 .3",
               "3 5e-6 64 1000 .15", "3 3e-6 64 1000 .15", "3 7e-6 64 500 .1"),
    "copa": (136, "3 1e-5 32 50 .1", "4 5e-6 16 30 .1", "4 3e-6 24 30 .1",
             "4 2e-6 24 30 .1", "8 1e-6 24 30 .1", None),
    "race": (320, "6 2e-5 32 100 .2", "6 8e-6 32 100 .2", "6 7e-6 48 100 .2",
             "6 4e-6 48 100 .2", "6 3e-6 48 100 .2", None),
    "anli": (70, "6 2e-5 64 1000 .2", "6 8e-6 64 1000 .2", "6 7e-6 64 1000 .2",
             "6 4e-6 128 1000 .2", "6 8e-6 256 500 .1", "10 7e-6 256 1000 .1"),
}  # fmt: skip
PUBLISHED_SMALL: dict[tuple[str, str | None], str] = {  # the other v3 models: only MNLI was published
    ("mnli", "v3-xsmall"): "3 4.5e-5 64 1000 .1",
    ("mnli", "v3-small"): "3 4.5e-5 64 1500 .2",
    ("mnli", "v3-base"): "3 1.5e-5 64 1000 .1",
}
# v1 and v2 fine-tune these from their MNLI checkpoint (--intermediate); the scripts of v3-large do not
STARTED_FROM_MNLI = {"rte", "mrpc", "stsb", "copa", "race", "anli"}

# SiFT, published for MNLI only: epochs, learning rate, batch size, warmup, dropout; then lambda
PUBLISHED_SIFT: dict[str | None, tuple[str, float]] = {
    "v1-base": ("6 1.5e-5 64 1000 .1", 5.0),
    "v2-xxlarge": ("6 3e-6 64 1000 .3", 5.0),
    "v3-base": ("6 1.5e-5 64 1000 .1", 5.0),
    "v3-small": ("6 3.5e-5 64 1000 .1", 5.0),
    "v3-xsmall": ("10 5e-5 64 1500 .1", 3.0),
}

# our defaults for tasks without a published recipe: maximum input length, v1-base row
DEFAULTS = {
    "squad": (384, "3 3e-5 48 .1 .1"),
    "squad_v2": (384, "3 3e-5 48 .1 .1"),
    "swag": (128, "3 2e-5 32 .1 .1"),
    "wnli": (128, "6 1e-5 32 .1 .1"),
    "boolq": (256, "6 2e-5 32 .1 .1"),
    "cb": (256, "20 2e-5 16 .1 .1"),
    "multirc": (384, "4 2e-5 32 .1 .1"),
    "wic": (128, "6 2e-5 32 .1 .1"),
    "wsc": (128, "20 1e-5 16 .1 .1"),
    "ner": (512, "15 2e-5 16 .1 .1"),
    "own": (256, "4 2e-5 32 .1 .1"),
}
# learning rate of other sizes as a multiple of v1-base's: the average over the released scripts. For the smaller v3
# models it is that of MNLI, the only task released for them; mdeberta-v3-base follows v3-base.
LEARNING_RATE_FACTORS: dict[str | None, float] = {
    "v1-base": 1.0, "v1-large": 0.5, "v1-xlarge": 0.3, "v2-xlarge": 0.2, "v2-xxlarge": 0.15,
    "v3-xsmall": 1.5, "v3-small": 1.5, "v3-base": 0.5, "v3-large": 0.35, "mdeberta-v3-base": 0.5,
}  # fmt: skip

# Half of v1-base's rate, as for MNLI, would be less than the least rate of the DeBERTaV3 paper's grid for most tasks.
LEAST_LEARNING_RATES: dict[str | None, float] = {"v3-base": 1.5e-5, "mdeberta-v3-base": 1.5e-5}

# the released scripts train in float32 here, and in float16 otherwise
FULL_PRECISION = {("v1-large", "rte"), ("v1-large", "race"), ("v1-large", "anli")}
FULL_PRECISION |= {("v1-base", task) for task in PUBLISHED if task != "mnli"}
FULL_PRECISION_SIFT = {"v3-small"}

BASE_WIDTH = 768  # hidden size of the base models
MIN_MULTILINGUAL_VOCAB = 200_000  # a v3-base with a larger vocabulary is mdeberta-v3-base


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one task and model size.

    `batch` counts rows over all devices; `warmup` is a number of steps, or a share of all steps if below 1.
    `half_precision` means that a GPU trains in bfloat16 or float16.
    """

    epochs: float
    learning_rate: float
    batch: int
    warmup: float
    dropout: float
    length: int
    sift_lambda: float | None = None
    half_precision: bool = True

    @classmethod
    def from_row(cls, row: str, length: int) -> "Recipe":
        epochs, rate, batch, warmup, dropout = map(float, row.split())
        return cls(epochs, rate, int(batch), warmup, dropout, length)

    def flags(
        self, devices: int = 1, accumulation: int = 1, precision: Literal["bf16", "fp16"] | None = None
    ) -> dict[str, Any]:
        """The recipe as flags of a script that runs on this many devices.

        Args:
            precision: the flag of half precision on these devices; None if they have none.
        """
        flags: dict[str, Any] = {
            "num_train_epochs": self.epochs,
            "learning_rate": self.learning_rate,
            "per_device_train_batch_size": max(1, round(self.batch / (devices * max(1, accumulation)))),
            "warmup_steps": self.warmup if self.warmup < 1 else int(self.warmup),
            "cls_dropout": self.dropout,
            "max_seq_length": self.length,
        }
        if self.sift_lambda is not None:
            flags["sift_lambda"] = self.sift_lambda
        if precision is not None and self.half_precision:
            flags[precision] = True
        return flags


def published_size(config: HfDebertaConfig) -> str | None:
    """The published model size with this architecture, such as "v3-base"; None if there is none."""
    compared = ("num_hidden_layers", "hidden_size", "position_buckets", "share_att_key", "conv_kernel_size")
    for name, fields in PRESETS.items():
        preset = HfDebertaConfig(**fields)
        if name != "tiny" and all(getattr(config, field) == getattr(preset, field) for field in compared):
            multilingual = name == "v3-base" and config.vocab_size > MIN_MULTILINGUAL_VOCAB
            return "mdeberta-v3-base" if multilingual else name
    return None


def find_recipe(task: str, size: str | None, width: int = BASE_WIDTH, sift: bool = False) -> tuple[Recipe, str]:
    """The recipe of a task and model size, and a description of where it comes from.

    Args:
        task: a key of the tables; any other name is a task of the user's own.
        size: as `published_size` returns it.
        width: hidden size, which scales the learning rate if the size is not a published one.
    """
    if sift and task == "mnli" and size in PUBLISHED_SIFT:
        row, weight = PUBLISHED_SIFT[size]
        recipe = Recipe.from_row(row, PUBLISHED["mnli"][0])
        recipe = replace(recipe, sift_lambda=weight, half_precision=size not in FULL_PRECISION_SIFT)
        return recipe, f"published settings for SiFT on mnli, {size}"
    if task in PUBLISHED:
        length, *rows = PUBLISHED[task]
        row_of_size: dict[str | None, Any] = dict(zip(SIZES, rows, strict=True))
        if published := row_of_size.get(size) or PUBLISHED_SMALL.get((task, size)):
            recipe = replace(Recipe.from_row(published, length), half_precision=(size, task) not in FULL_PRECISION)
            return recipe, f"published settings for {task}, {size}"
        row = row_of_size["v1-base"]
        source = f"no published settings for {task}, {size or 'this model size'}: settings of v1-base"
    else:
        task = task if task in DEFAULTS else "own"
        length, row = DEFAULTS[task]
        source = f"no published settings for {'your own data' if task == 'own' else task}: defaults"
    recipe = Recipe.from_row(row, length)
    if size in LEARNING_RATE_FACTORS:
        factor, reason = LEARNING_RATE_FACTORS[size], f"for {size}"
    else:
        factor, reason = min(4.0, max(1.0, BASE_WIDTH / width)), f"because hidden size {width} is small"
    rate = recipe.learning_rate
    scaled = max(factor * rate, min(rate, LEAST_LEARNING_RATES.get(size, 0.0)))
    if scaled != rate:
        source += f", learning rate x {scaled / rate:.3g} {reason}"
        recipe = replace(recipe, learning_rate=float(f"{scaled:.3g}"))
    return recipe, source
