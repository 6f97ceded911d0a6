"""How the published DeBERTas were fine-tuned: a table of (task, size), and what we take where nothing was published.

>>> recipe, origin = find_recipe("cola", "v3-large")
>>> recipe.learning_rate, recipe.epochs
(5.5e-06, 10.0)

The released scripts of github.com/microsoft/DeBERTa are the source unless a row says otherwise. All of them use Adam
with epsilon 1e-6, weight decay 0.01, clipping at 1 and a linear schedule, which are the defaults of
`FineTuningArguments`.
"""

from dataclasses import dataclass, replace
from typing import Any

from hf_deberta import PRESETS, HfDebertaConfig

SIZES = ("v1-base", "v1-large", "v1-xlarge", "v2-xlarge", "v2-xxlarge", "v3-large")

# task: longest input, then for each of SIZES: epochs, learning rate, batch of all devices, warmup, classifier dropout
RELEASED = {
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
}  # fmt: skip
SMALL = {  # the small v3 models, of which only MNLI is published
    ("mnli", "v3-xsmall"): "3 4.5e-5 64 1000 .1",
    ("mnli", "v3-small"): "3 4.5e-5 64 1500 .2",
    ("mnli", "v3-base"): "3 1.5e-5 64 1000 .1",
}
# v1 and v2 start these from their MNLI checkpoint (--intermediate); the scripts of v3-large do not
FROM_MNLI = {"rte", "mrpc", "stsb", "copa", "race"}

# SiFT, released for MNLI alone: epochs, learning rate, batch, warmup, dropout, then lambda
SIFT = {
    "v1-base": ("6 1.5e-5 64 1000 .1", 5.0),
    "v2-xxlarge": ("6 3e-6 64 1000 .3", 5.0),
    "v3-base": ("6 1.5e-5 64 1000 .1", 5.0),
    "v3-small": ("6 3.5e-5 64 1000 .1", 5.0),
    "v3-xsmall": ("10 5e-5 64 1500 .1", 3.0),
}

# tasks without a published recipe: longest input, and ours for v1-base, within the papers' grid
OURS = {
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
# their learning rate at other sizes, over that of base: as the released scripts have it, on average
RATE = {
    "v1-base": 1.0, "v1-large": 0.5, "v1-xlarge": 0.3, "v2-xlarge": 0.2, "v2-xxlarge": 0.15,
    "v3-xsmall": 1.5, "v3-small": 1.5, "v3-base": 1.0, "v3-large": 0.35, "mdeberta-v3-base": 1.0,
}  # fmt: skip


MULTILINGUAL = 200_000  # words, from which on a base of v3 is the multilingual one


@dataclass(frozen=True)
class Recipe:
    """Batch is that of all devices; warmup is steps, or a share of them if below 1."""

    epochs: float
    learning_rate: float
    batch: int
    warmup: float
    dropout: float
    length: int
    sift_lambda: float | None = None

    @classmethod
    def of(cls, row: str, length: int, sift_lambda: float | None = None) -> "Recipe":
        epochs, rate, batch, warmup, dropout = map(float, row.split())
        return cls(epochs, rate, int(batch), warmup, dropout, length, sift_lambda)

    def flags(self, devices: int = 1, accumulation: int = 1) -> dict[str, Any]:
        """As flags of a script, for so many devices."""
        flags = {
            "num_train_epochs": self.epochs,
            "learning_rate": self.learning_rate,
            "per_device_train_batch_size": max(1, round(self.batch / (devices * accumulation))),
            "warmup_steps": self.warmup if self.warmup < 1 else int(self.warmup),
            "cls_dropout": self.dropout,
            "max_seq_length": self.length,
        }
        return flags | ({} if self.sift_lambda is None else {"sift_lambda": self.sift_lambda})


def size_of(config: HfDebertaConfig) -> str | None:
    """Which published model a configuration is; None if none."""
    looked_at = ("num_hidden_layers", "hidden_size", "position_buckets", "share_att_key", "conv_kernel_size")
    for name, fields in PRESETS.items():
        published = HfDebertaConfig(**fields)
        if name != "tiny" and all(getattr(config, field) == getattr(published, field) for field in looked_at):
            return "mdeberta-v3-base" if name == "v3-base" and config.vocab_size > MULTILINGUAL else name
    return None


def find_recipe(task: str, size: str | None, width: int = 768, sift: bool = False) -> tuple[Recipe, str]:
    """The recipe of a task, and where it is from.

    Args:
        size: as `size_of` names it.
        width: hidden size, where the size is none of the published ones.
    """
    if sift and task == "mnli" and size in SIFT:
        row, weight = SIFT[size]
        return Recipe.of(row, RELEASED["mnli"][0], weight), f"published for SiFT, MNLI, {size}"
    if (task, size) in SMALL:
        return Recipe.of(SMALL[task, size], RELEASED[task][0]), f"published for {task}, {size}"
    if task in RELEASED:
        length, *rows = RELEASED[task]
        by_size = dict(zip(SIZES, rows, strict=True))
        if by_size.get(size):
            return Recipe.of(by_size[size], length), f"published for {task}, {size}"
        row, nearest = by_size["v1-base"], f"ours: none was published for {task}, {size or 'this size'}; as v1-base"
    else:
        length, row = OURS.get(task, OURS["own"])
        nearest = f"ours: none was published for {task if task in OURS else 'a task of your own'}"
    base = Recipe.of(row, length)
    if size in RATE:
        factor = RATE[size]
        why = "" if factor == 1 else f"; learning rate times {factor:g} for {size}"
    else:
        factor = min(4.0, max(1.0, 768 / width))
        why = f"; learning rate times {factor:g} for a width of {width}" if factor > 1 else ""
    return replace(base, learning_rate=float(f"{base.learning_rate * factor:.3g}")), nearest + why
