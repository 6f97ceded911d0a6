"""Which recipe a task and a model size get."""

import pytest

from hf_deberta import PRESETS, HfDebertaConfig
from hf_deberta.fine_tuning.recipes import (
    DEFAULTS,
    LEARNING_RATE_FACTORS,
    PUBLISHED,
    SIZES,
    find_recipe,
    published_size,
)


@pytest.mark.parametrize("size", [name for name in PRESETS if name != "tiny"])
def test_published_sizes_are_recognised(size):
    assert published_size(HfDebertaConfig.from_preset(size)) == size


def test_other_sizes_have_no_name():
    assert published_size(HfDebertaConfig.from_preset("tiny")) is None
    assert published_size(HfDebertaConfig.from_preset("v3-base", num_hidden_layers=11)) is None


@pytest.mark.parametrize(
    ("task", "size", "expected"),
    [
        ("mnli", "v1-base", (3, 3e-5, 64, 1000, 0.1, 256)),
        ("mnli", "v3-large", (2, 7e-6, 64, 500, 0.3, 256)),
        ("mnli", "v3-small", (3, 4.5e-5, 64, 1500, 0.2, 256)),
        ("cola", "v2-xxlarge", (10, 2.5e-6, 32, 100, 0.2, 64)),
        ("qqp", "v2-xlarge", (10, 4e-6, 64, 1000, 0.2, 320)),
        ("conll2003", "v3-large", (10, 9e-6, 16, 10, 0, 512)),
        ("conll2003", "v1-large", (15, 1e-5, 16, 0.1, 0, 512)),
        ("race", "v1-large", (6, 8e-6, 32, 100, 0.2, 320)),
        ("anli", "v3-large", (10, 7e-6, 256, 1000, 0.1, 70)),
    ],
)
def test_published_recipes(task, size, expected):
    recipe, source = find_recipe(task, size)
    values = (recipe.epochs, recipe.learning_rate, recipe.batch, recipe.warmup, recipe.dropout, recipe.length)
    assert values == expected
    assert source == f"published settings for {task}, {size}"


def test_the_source_says_if_nothing_was_published():
    recipe, source = find_recipe("squad", "v1-base")
    assert recipe.learning_rate == 3e-5 and "no published settings for squad" in source
    recipe, source = find_recipe("copa", "v3-large")  # no released row: v1-base's, at the rate of large
    assert recipe.learning_rate == pytest.approx(0.35e-5) and "x 0.35 for v3-large" in source
    recipe, source = find_recipe("cola", None, width=256)
    assert (
        recipe.learning_rate == pytest.approx(6e-5)
        and "settings for cola, this model size: settings of v1-base" in source
    )
    assert "your own data" in find_recipe("mine", "v3-base")[1]


def test_v3_base_follows_its_published_rate_within_the_grid():
    recipe, source = find_recipe("squad", "v3-base")
    assert recipe.learning_rate == 1.5e-5 and "x 0.5 for v3-base" in source
    recipe, source = find_recipe("cola", "v3-base")
    assert recipe.learning_rate == 1.5e-5 and "x 0.75 for v3-base" in source and "outside" not in source
    recipe, source = find_recipe("copa", "v3-base")
    assert recipe.learning_rate == 1e-5 and "outside the papers' search grid: learning rate 1e-05" in source


def test_the_source_says_what_leaves_the_grid():
    assert (
        "outside the papers' search grid: learning rate 1.5e-05 (5e-06 to 1e-05)" in find_recipe("squad", "v1-large")[1]
    )
    assert "outside the papers' search grid: 20 epochs (at most 10)" in find_recipe("cb", "v3-small")[1]
    for task, size in (("squad", "v1-base"), ("boolq", "v3-large"), ("own", None)):
        assert "outside" not in find_recipe(task, size)[1]


@pytest.mark.parametrize(
    ("task", "size", "sift", "is_half"),
    [
        ("mnli", "v1-base", False, True),
        ("cola", "v1-base", False, False),
        ("rte", "v1-large", False, False),
        ("rte", "v3-large", False, True),
        ("mnli", "v3-small", False, True),
        ("mnli", "v3-small", True, False),
        ("mnli", "v3-base", True, True),
        ("squad", "v3-base", False, True),
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
    from hf_deberta.fine_tuning.arguments import RECIPE_FLAGS

    recipe, _ = find_recipe("mnli", "v3-base")
    flags = {**recipe.flags(precision="bf16"), **recipe.flags(precision="fp16")}
    assert set(flags) == set(RECIPE_FLAGS)
