"""Which recipe a task and a model size get."""

import re
from pathlib import Path

import pytest

from hf_deberta import PRESETS, HfDebertaConfig
from hf_deberta.fine_tuning.arguments import RECIPE_FLAGS
from hf_deberta.fine_tuning.recipes import (
    DEFAULTS,
    LEARNING_RATE_FACTORS,
    PUBLISHED,
    SIZES,
    find_recipe,
    published_size,
)


@pytest.mark.parametrize("size", PRESETS)
def test_published_sizes_are_recognised(size):
    assert published_size(HfDebertaConfig.from_preset(size)) == (None if size == "tiny" else size)
    assert published_size(HfDebertaConfig.from_preset(size, num_hidden_layers=11)) is None


@pytest.mark.parametrize(
    ("task", "size", "expected"),
    [
        ("mnli", "v1-base", (3, 3e-5, 64, 1000, 0.1, 256)),
        ("cola", "v2-xxlarge", (10, 2.5e-6, 32, 100, 0.2, 64)),
        ("conll2003", "v3-large", (10, 9e-6, 16, 10, 0, 512)),
        ("anli", "v3-large", (10, 7e-6, 256, 1000, 0.1, 70)),
    ],
)
def test_published_recipes(task, size, expected):
    recipe, source = find_recipe(task, size)
    values = (recipe.epochs, recipe.learning_rate, recipe.batch, recipe.warmup, recipe.dropout, recipe.length)
    assert values == expected
    assert source == f"published settings for {task}, {size}"


@pytest.mark.parametrize(
    ("task", "size", "rate", "source"),
    [
        ("squad", "v1-base", 3e-5, "no published settings for squad"),
        ("copa", "v3-large", 3.5e-6, "x 0.35 for v3-large"),  # no released row: v1-base's, at the rate of large
        ("cola", None, 6e-5, "for cola, this model size: settings of v1-base"),
        ("mine", "v3-base", 1.5e-5, "your own data"),
        # v3-base follows its published rate, but not below the smallest rate of the papers
        ("squad", "v3-base", 1.5e-5, "x 0.5 for v3-base"),
        ("cola", "v3-base", 1.5e-5, "x 0.75 for v3-base"),
        ("copa", "v3-base", 1e-5, "settings of v1-base"),
    ],
)
def test_rates_that_were_not_published(task, size, rate, source):
    """The source says what is not published and how the rate was scaled."""
    recipe, found = find_recipe(task, size, width=256)
    assert recipe.learning_rate == pytest.approx(rate) and source in found


@pytest.mark.parametrize(
    ("task", "size", "sift", "is_half"),
    [
        ("mnli", "v1-base", False, True),
        ("cola", "v1-base", False, False),
        ("mnli", "v3-small", False, True),
        ("mnli", "v3-small", True, False),
        ("mnli", "v3-base", True, True),
    ],
)
def test_precision_as_released(task, size, sift, is_half):
    recipe, _ = find_recipe(task, size, sift=sift)
    for precision in ("bf16", "fp16"):
        assert recipe.flags(precision=precision).get(precision, False) == is_half
    assert not {"bf16", "fp16"} & set(recipe.flags())


def test_sift_has_its_own_recipes():
    recipe, _ = find_recipe("mnli", "v3-xsmall", sift=True)
    assert (recipe.epochs, recipe.learning_rate, recipe.sift_lambda) == (10, 5e-5, 3)
    assert "sift_lambda" not in find_recipe("mnli", "v3-xsmall")[0].flags()


def test_every_row_parses():
    for size in (*SIZES, *LEARNING_RATE_FACTORS, None):
        for task in (*PUBLISHED, *DEFAULTS):
            recipe, source = find_recipe(task, size)
            assert 1e-7 < recipe.learning_rate < 1e-4 and recipe.batch and source


def test_the_batch_is_shared_among_devices():
    recipe, _ = find_recipe("mnli", "v3-base")
    assert recipe.flags()["per_device_train_batch_size"] == 64
    assert recipe.flags(devices=8, accumulation=2)["per_device_train_batch_size"] == 4
    assert isinstance(recipe.flags()["warmup_steps"], int)


def test_the_help_lists_the_flags_of_recipes():
    recipe, _ = find_recipe("mnli", "v3-base")
    flags = {**recipe.flags(precision="bf16"), **recipe.flags(precision="fp16")}
    assert set(flags) == set(RECIPE_FLAGS)


def test_the_page_on_checkpoints_has_the_learning_rates():
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (m?)deberta-(\S+)( \(v1\))? \| .* \| (\S+) \|$", page, re.MULTILINE)
    assert len(rows) == len(LEARNING_RATE_FACTORS)
    for multilingual, size, v1, rate in rows:
        size = f"mdeberta-{size}" if multilingual else f"v1-{size}" if v1 else size
        assert find_recipe("own", size)[0].learning_rate == float(rate), size
