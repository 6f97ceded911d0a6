"""The command line of a fine-tuning script: recipe, inferred actions, the metric of the best model, invalid flags."""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_deberta import HfDebertaConfig
from hf_deberta.fine_tuning.arguments import FineTuningArguments, choose_flags, recipe_flags
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks.glue import GlueArguments
from hf_deberta.training.errors import InputError
from hf_deberta.training.script import run_script


def arguments(folder, **fields) -> FineTuningArguments:
    return FineTuningArguments(str(folder), **{"use_cpu": True, "report_to": "none", **fields})


# Recipe


def flags(folder, size: str, **fields) -> Namespace:
    HfDebertaConfig.from_preset(size).save_pretrained(folder)
    defaults = {"model_name_or_path": str(folder), "intermediate": None, "config_name": None, "cache_dir": None}
    defaults |= {"model_revision": "main", "token": None, "use_cpu": False, "gradient_accumulation_steps": 1}
    defaults |= dict.fromkeys(("per_device_train_batch_size", "learning_rate", "cls_dropout", "bf16", "fp16"))
    defaults |= {"do_train": True, "do_eval": False, "do_predict": False}
    return Namespace(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("size", "task", "fields", "expected"),
    [
        ("v3-large", "cola", {}, {"per_device_train_batch_size": 4}),  # devices share the batch
        ("v3-large", "cola", {"use_cpu": True}, {"per_device_train_batch_size": 32}),
        ("v3-large", "squad_v2", {}, {"cls_dropout": None}),  # a head without dropout
        ("v3-large", "conll2003", {}, {"cls_dropout": 0}),
        ("v1-xlarge", "rte", {}, {"hint": True}),  # starts from MNLI
        ("v2-xlarge", "rte", {}, {"hint": True}),
        ("v3-large", "rte", {}, {"hint": False}),
        ("tiny", "rte", {}, {"hint": False}),
    ],
)
def test_recipe_as_flags(tmp_path, monkeypatch, size, task, fields, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    recipe, source = recipe_flags(flags(tmp_path, size, **fields), task)
    found = {"cls_dropout": None, **recipe, "hint": "--intermediate" in source}
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("has_bf16", "fields", "expected"),
    [
        (True, {}, {"bf16"}),
        (False, {}, {"fp16"}),
        (True, {"use_cpu": True}, set()),
        (True, {"fp16": True}, set()),  # by the user
        (True, {"do_train": False, "do_eval": True}, set()),
    ],
)
def test_precision_of_the_recipe(tmp_path, monkeypatch, has_bf16, fields, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    recipe, _ = recipe_flags(flags(tmp_path, "v3-large", **fields), "cola")
    assert {"bf16", "fp16"} & set(recipe) == expected


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Parses the command line of a script whose task is CoLA; returns its arguments without running anything.

    `trained` are the flags in the config.json of the checkpoint.
    """

    def run(*words: object, model: Path | None = tmp_path / "model", trained: object = None) -> tuple:
        config = HfDebertaConfig.from_preset("tiny")
        config.fine_tuning_flags = trained
        config.save_pretrained(tmp_path / "model")
        classes, parsed = (ModelArguments, GlueArguments, SiftArguments, FineTuningArguments), []
        given = ["--model_name_or_path", model, "--output_dir", tmp_path / "out"] if model else []
        monkeypatch.setattr(sys, "argv", ["run_x.py", *map(str, given), "--use_cpu", *map(str, words)])
        choose = partial(choose_flags, recipe_task=lambda flags: "cola", demo="glue")
        run_script(classes, lambda *instances: parsed.extend(instances), choose)
        return tuple(parsed)

    return run


def test_flags_override_the_recipe(parse, caplog):
    model_args, data_args, _, args = parse("--learning_rate", "1e-4")
    assert (args.learning_rate, args.per_device_train_batch_size, args.warmup_steps) == (1e-4, 32, 100)
    assert (model_args.cls_dropout, data_args.max_seq_length, args.num_train_epochs) == (0.15, 64, 6)
    assert "no published settings for cola" in caplog.text and "x 4 because hidden size 32" in caplog.text
    recipe, _, overridden = caplog.text.partition("Overridden by you:")
    assert "--warmup_steps 100" in recipe and "--learning_rate" not in recipe
    assert overridden.startswith(" --learning_rate. Disable with --recipe none.")


def test_the_recipe_leaves_out_epochs_if_steps_are_given(parse, caplog):
    parse("--max_steps", 5)
    assert "--learning_rate" in caplog.text and "--num_train_epochs" not in caplog.text


def test_no_recipe(parse, caplog):
    args = parse("--recipe", "none")[-1]
    assert (args.learning_rate, args.num_train_epochs) == (5e-5, 3) and not caplog.text


def test_predictions_need_no_message_about_training(parse, caplog):
    _, data_args, _, args = parse("--do_predict")
    assert data_args.max_seq_length == 64 and not caplog.text
    assert (args.do_train, args.do_eval, args.do_predict) == (False, False, True)


# Flags of the training, kept in config.json


COLUMNS = ["premise", "hypothesis"]
TRAINED = {"task_name": "mnli", "text_column_names": COLUMNS, "label_column_name": "verdict", "max_seq_length": 40}


@pytest.mark.parametrize(
    ("words", "columns", "label", "length"),
    [
        (["--do_eval"], COLUMNS, "verdict", 40),
        (["--do_predict", "--recipe", "none"], COLUMNS, "verdict", 40),
        (["--do_eval", "--task_name", "MNLI"], COLUMNS, "verdict", 40),
        (["--do_eval", "--task_name", "rte"], None, "label", 64),
        (["--do_train", "--do_eval"], None, "label", 64),
        ([], None, "label", 64),
        (["--do_eval", "--text_column_names", "c", "--label_column_name", "label"], ["c"], "label", 40),
        (["--do_eval", "--max_seq_length", "20"], COLUMNS, "verdict", 20),
    ],
)
def test_without_training_the_inputs_are_those_of_the_training(parse, words, columns, label, length):
    args = parse(*words, trained=TRAINED)[1]
    assert (args.text_column_names, args.label_column_name, args.max_seq_length) == (columns, label, length)


def test_the_flags_of_the_training_are_logged(parse, caplog):
    parse("--do_eval", "--label_column_name", "gold", trained=TRAINED)
    assert "As the checkpoint was trained: --text_column_names premise hypothesis, --max_seq_length 40." in caplog.text
    assert "Not as the checkpoint was trained: --label_column_name gold." in caplog.text


# Actions and metrics


def test_actions_are_inferred_from_the_splits(tmp_path):
    args = arguments(tmp_path)
    assert args.do_train and args.do_eval and args.do_predict
    args.choose_actions(["train", "test_matched"])
    assert (args.do_train, args.do_eval, args.do_predict) == (True, False, True)
    assert args.eval_strategy == "no" and not args.load_best_model_at_end
    for flag, present in {"do_train": "validation", "do_eval": "train", "do_predict": "train"}.items():
        with pytest.raises(InputError, match=rf"--{flag} needs .*found: {present}"):
            arguments(tmp_path, **{flag: True}).choose_actions([present])
    with pytest.raises(InputError, match="--early_stopping_patience needs validation rows"):
        arguments(tmp_path, early_stopping_patience=1).choose_actions(["train"])
    with pytest.raises(InputError, match="--do_train needs train rows .*add --do_eval or --do_predict"):
        arguments(tmp_path).choose_actions(["validation"])


@pytest.mark.parametrize(
    ("chosen", "metric", "greater"),
    [(None, "eval_f1", True), ("accuracy", "eval_accuracy", True), ("loss", "eval_loss", False),
     ("eval_loss", "eval_loss", False)],
)  # fmt: skip
def test_the_metric_of_the_best_model(tmp_path, chosen, metric, greater):
    args = arguments(tmp_path, metric_for_best_model=chosen)
    args.set_best_metric(("f1", "accuracy"))
    assert args.best_metric == metric and args.greater_is_better == greater and args.load_best_model_at_end
    with pytest.raises(InputError, match="--metric_for_best_model must be one of f1, accuracy, loss .*not acuracy"):
        arguments(tmp_path, metric_for_best_model="acuracy").set_best_metric(("f1", "accuracy"))


@pytest.mark.parametrize(
    ("chosen", "given", "expected"),
    [(None, None, {"mode": "max"}), ("loss", None, None), ("f1", {"mode": "min", "patience": 2}, None)],
)
def test_the_rate_falls_when_the_metric_no_longer_rises(tmp_path, chosen, given, expected):
    fields = {"metric_for_best_model": chosen, "lr_scheduler_kwargs": given}
    args = arguments(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", **fields)
    args.set_best_metric(("f1",))
    assert args.lr_scheduler_kwargs == (expected or given)


def test_evaluation_every_few_steps_saves_as_often(tmp_path):
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=7)
    assert (args.save_strategy, args.save_steps) == ("steps", 7)
    for strategy in ({"save_strategy": "steps"}, {}):  # and the other way around
        args = arguments(tmp_path, save_steps=9, **strategy)
        assert (args.save_strategy, args.eval_strategy, args.eval_steps) == ("steps", "steps", 9)
    assert arguments(tmp_path, save_strategy="steps", load_best_model_at_end=False).eval_strategy == "epoch"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_seeds", 0], "--num_seeds must be at least 1, not 0"),
        (["--early_stopping_patience", 0], "--early_stopping_patience must be at least 1, not 0"),
        (["--num_seeds", 2, "--push_to_hub"], "--push_to_hub pushes one model"),
        (["--train_sampling_strategy", "sequential"], "random or group_by_length, not sequential"),
        (["--prediction_loss_only", "true"], "--prediction_loss_only True is not supported"),
        (["--early_stopping_patience", 1, "--do_train"], "--early_stopping_patience needs evaluations"),
        (["--recipe", "mine"], "argument --recipe: invalid choice: 'mine'"),
    ],
)
def test_invalid_flags_are_shown_in_one_line(parse, words, message):
    with pytest.raises(SystemExit, match=f"run_x.py: .*{message}"):
        parse(*words)


def test_a_missing_checkpoint_is_shown_in_one_line(parse, tmp_path):
    with pytest.raises(SystemExit, match=r"^run_x\.py: .*config\.json"):
        parse(model=tmp_path)
    with pytest.raises(SystemExit, match="--model_name_or_path"):
        parse(model=None)
