"""Published pretraining settings as flags: their figures, the batch on several devices, and what the user changes."""

import sys
from functools import partial

import pytest

from hf_deberta.pretraining.arguments import MaskingArguments, NewModelArguments, PretrainingArguments, choose_flags
from hf_deberta.pretraining.corpus import CorpusArguments
from hf_deberta.pretraining.recipes import PUBLISHED, find_recipe
from hf_deberta.training.errors import InputError
from hf_deberta.training.script import run_script


@pytest.mark.parametrize(
    ("source", "objective", "model", "expected"),
    [
        ("paper", "mlm", "v2-xxlarge", (1.5e-4, 2048, 10_000, 1_000_000, 0.999)),
        ("paper", "rtd", "v3-base", (6e-4, 8192, 10_000, 500_000, 0.98, 50)),
        ("paper", "rtd", "v3-base-ablation", (5e-4, 2048, 10_000, 125_000, None, 50)),
        ("paper", "rtd", "mdeberta-v3-base", (None, 8192, None, 500_000, None, None)),
        ("released", "mlm", "v2-xlarge", (1e-4, 32, 1000, 1_000_000, 0.999)),
        ("released", "rtd", "v3-xsmall", (3e-4, 64, 10_000, 1_000_000, 0.999, 10)),
        ("modern", "mlm", "modernbert-base", (8e-4, 4608, 636, 364_304, 0.98)),
        ("modern", "rtd", "long", (5e-5, 64, 10_000, 100_000, 0.999, 10)),
    ],
)
def test_figures(source, objective, model, expected):
    recipe = find_recipe(source, objective, model)
    names = ["learning_rate", "warmup_steps", "max_steps", "adam_beta2", *["rtd_weight"] * (objective == "rtd")]
    rate, *rest = map(recipe.settings.get, names)
    assert (rate, recipe.batch, *rest) == expected
    assert bool(recipe.missing) == (None in expected)


def test_modern_recipes_mask_more_without_dropout_at_a_constant_rate(parse):
    words = ("--recipe", "modern", "--config_preset", "v3-small")
    training, log = parse(*words, "--config_overrides", "hidden_size=256,hidden_dropout_prob=0.2", objective="mlm")
    assert (training.learning_rate, training.weight_decay, training.total_batch) == (8e-4, 0.0125, 4608)
    assert training.lr_scheduler_type == "warmup_stable_decay"
    assert "settings of modernbert-base (" in log and "Overridden" not in log
    flags = training.identifying_flags
    assert (flags["mlm_probability"], flags["mask_prob"], flags["random_prob"]) == (0.3, 1.0, 0.0)
    fields = NewModelArguments(config_overrides=flags["config_overrides"]).config_fields()
    assert fields == {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0, "hidden_size": 256}
    training, log = parse(*words)
    assert training.learning_rate == 6e-4 and "settings of v3-small (" in log and "our choice" in log
    training, log = parse("--recipe", "modern:neobert", objective="mlm")
    assert (training.adam_beta2, training.lr_scheduler_type) == (0.95, "cosine_with_min_lr")


@pytest.mark.parametrize("devices", [1, 8, 64])
def test_the_batch_is_split_over_devices_and_accumulation(devices):
    for (source, objective), rows in PUBLISHED.items():
        for model in rows:
            recipe = find_recipe(source, objective, model)
            flags = recipe.flags(devices, rows_per_device=32)
            rows = devices * flags["per_device_train_batch_size"]
            total = rows * flags["gradient_accumulation_steps"]
            assert total == max(recipe.batch, devices) or recipe.batch % rows  # 4,608 on 64 devices
            assert abs(total - max(recipe.batch, devices)) <= rows / 2


CLASSES = (NewModelArguments, CorpusArguments, MaskingArguments, PretrainingArguments)


@pytest.fixture
def parse(tmp_path, monkeypatch, caplog):
    """Return the training arguments of a command line, and what was logged."""
    monkeypatch.setenv("WORLD_SIZE", "1")

    def parse(*words: str, objective: str = "rtd") -> tuple[PretrainingArguments, str]:
        arguments = ["script", "--train_file", "a", "--use_cpu", "--output_dir", str(tmp_path), *words]
        monkeypatch.setattr(sys, "argv", arguments)
        caplog.clear()
        choose = partial(choose_flags, objective=objective)
        training = run_script(CLASSES, lambda *arguments: arguments[-1], choose)
        return training, caplog.text

    return parse


def test_a_recipe_sets_flags_and_flags_of_the_user_win(parse):
    training, log = parse("--recipe", "paper", "--config_preset", "v3-base", "--adam_beta2", "0.97")
    assert (training.learning_rate, training.max_steps, training.warmup_steps) == (6e-4, 500_000, 10_000)
    assert (training.adam_beta2, training.total_batch) == (0.97, 8192)
    assert training.identifying_flags["learning_rate"] == 6e-4
    assert "table 14" in log and "Overridden by you: --adam_beta2." in log
    assert "Rows per step: 8,192 = 1 device(s) x 32 x 256, published: 8,192" in log


def test_rows_per_device_of_the_user_change_the_accumulation(parse):
    words = ("--recipe", "released:v3-xsmall", "--per_device_train_batch_size", "4")
    training, log = parse(*words)
    assert (training.gradient_accumulation_steps, training.total_batch) == (16, 64)
    training, log = parse(*words, "--gradient_accumulation_steps", "2")
    assert training.total_batch == 8 and "Rows per step: 8 = " in log
    assert "Overridden by you: --gradient_accumulation_steps." in log


def test_a_length_in_epochs_replaces_the_steps_of_the_recipe(parse):
    training, log = parse("--recipe", "released:v1-base", "--num_train_epochs", "1", objective="mlm")
    assert (training.num_train_epochs, training.max_steps) == (1.0, -1)
    assert "Overridden by you: --max_steps." in log


def test_unknown_figures_are_named(parse):
    training, log = parse("--recipe", "paper:mdeberta-v3-base")
    assert training.learning_rate == 2e-4
    assert "No figure is known for --adam_beta2, --adam_epsilon, --learning_rate" in log


@pytest.mark.parametrize(
    ("words", "objective", "message"),
    [
        (["--recipe", "best"], "mlm", "--recipe must be none, paper, released, modern"),
        (["--recipe", "paper", "--config_preset", "v3-base"], "mlm", "no published MLM settings for v3-base"),
        (["--recipe", "released", "--config_preset", "v3-small"], "rtd", "no released RTD settings for v3-small"),
        (["--recipe", "paper"], "rtd", "no published RTD settings for this model"),
    ],
)
def test_recipes_that_do_not_exist(parse, words, objective, message):
    with pytest.raises(SystemExit, match=message) as info:
        parse(*words, objective=objective)
    assert isinstance(info.value.__cause__, InputError)
