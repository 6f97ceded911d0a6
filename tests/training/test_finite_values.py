"""A run whose values are no longer finite stops in one sentence, and its finite checkpoints stay."""

import math
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny_pairs import tiny_pair, tiny_rows, trainer_of
from tiny_trainers import CLASS_ROWS as ROWS
from tiny_trainers import classifier, fine_tuning_arguments, language_model_trainer
from torch import nn
from transformers import Trainer, TrainerCallback, default_data_collator

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.fine_tuning.trainer import FineTuningTrainer
from hf_deberta.training.errors import InputError
from hf_deberta.training.finite_values import has_finite_weights

SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "logging_steps": 100, "max_steps": 12}
DIVERGING = {"learning_rate": 1e30, "max_grad_norm": 0, "optim": "adamw_torch", "lr_scheduler_type": "constant"}


TRAINERS = {
    "masked language model": lambda folder, **fields: language_model_trainer(folder, "mlm", **fields),
    "joint objective": lambda folder, **fields: language_model_trainer(folder, "joint", **fields),
    "replaced token detection": lambda folder, **fields: trainer_of(tiny_pair(), folder, **fields),
    "decoupled": lambda folder, **fields: trainer_of(tiny_pair(), folder, decoupled=True, **fields),
    "classification": classifier,
    "sift": lambda folder, **fields: classifier(folder, sift=True, **fields),
}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def assert_finite(folder: Path) -> None:
    for name, value in load_file(folder / "model.safetensors").items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_diverging_run_stops_and_keeps_its_finite_checkpoint(tmp_path, kind):
    run = TRAINERS[kind](tmp_path, **SAVING, **DIVERGING, gradient_accumulation_steps=2)
    with pytest.raises(InputError, match=r"not finite at step \d+ \(learning rate 1e\+30\), so the run stops: lower"):
        run.train()
    for name in checkpoints(tmp_path):
        assert_finite(tmp_path / name)
    assert len(checkpoints(tmp_path)) <= 1 and run.state.global_step < 12
    with pytest.raises(InputError, match="not finite"):
        run.save_model()
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / "generator").exists()


def spoil(run: Trainer, call: int, name: str) -> None:
    """Make a loss or a gradient NaN, once: in the backward pass with this number."""
    calls = []

    def value_or_nan(value: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return value * math.nan if len(calls) == call else value

    if name == "gradient norm":
        next(iter(run.model.parameters())).register_hook(value_or_nan)
        return
    compute = run.compute_loss
    run.compute_loss = lambda *args, **fields: value_or_nan(compute(*args, **fields))


@pytest.mark.parametrize("logging_steps", [1, 100])
@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_the_message_names_the_first_step_and_its_learning_rate(tmp_path, name, logging_steps):
    """With accumulation, clipping, and a log that comes at that step or never."""
    fields = {**SAVING, "logging_steps": logging_steps, "learning_rate": 1e-3, "gradient_accumulation_steps": 2}
    run = classifier(tmp_path, lr_scheduler_type="constant", **fields)
    spoil(run, 10, name)
    message = rf"the {name} is not finite at step 5 \(learning rate 0\.001\).*another --output_dir, .*-4 is finite, but"
    with pytest.raises(InputError, match=message):
        run.train()
    assert checkpoints(tmp_path) == ["checkpoint-4"]
    assert_finite(tmp_path / "checkpoint-4")
    assert all(math.isfinite(entry.get("loss", 0)) for entry in run.state.log_history)


def test_without_a_checkpoint_the_run_starts_over(tmp_path):
    run = classifier(tmp_path / "run", **{**SAVING, "save_steps": 10}, logging_strategy="no")
    spoil(run, 2, "loss")
    with pytest.raises(InputError, match="step 2 .* no checkpoint was written, so start over"):
        run.train()
    assert not checkpoints(tmp_path / "run")


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_model_with_a_weight_that_is_not_finite_is_not_saved(tmp_path, kind):
    run = TRAINERS[kind](tmp_path, **{**SAVING, "max_steps": 2})
    run.train()
    before = checkpoints(tmp_path)
    assert before == ["checkpoint-2"]
    with torch.no_grad():
        list(run.model.parameters())[-1].view(-1)[0] = math.inf
    run.state.global_step = 4
    for save in (run.save_model, lambda: run._save_checkpoint(run.model, None)):
        with pytest.raises(InputError, match="a weight is not finite at step 4"):
            save()
    assert checkpoints(tmp_path) == before and not list(tmp_path.glob("*.safetensors"))
    assert not (tmp_path / "generator").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_weights(value, dtype):
    """One value among many; the largest finite value is finite."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 0), nn.Linear(3, 3)).to(dtype)
    model.register_parameter("number", nn.Parameter(torch.tensor(7), requires_grad=False))
    nn.init.constant_(model[0].weight, torch.finfo(dtype).max)
    assert has_finite_weights(model)
    with torch.no_grad():
        model[2].bias[1] = value
    assert not has_finite_weights(model)


@pytest.mark.parametrize("kind", ["masked language model", "replaced token detection", "classification"])
def test_evaluation_and_prediction(tmp_path, kind):
    """Also without labels."""
    fields = {"eval_dataset": tiny_rows()} if kind.startswith("replaced") else {}
    run = TRAINERS[kind](tmp_path, **fields)
    torch.nn.init.constant_(next(iter(run.model.parameters())), math.nan)
    unlabelled = ROWS.remove_columns("labels")
    calls = (run.evaluate, lambda: run.predict(unlabelled)) if kind == "classification" else (run.evaluate,)
    for call in calls:
        with pytest.raises(InputError, match="(not finite|eval_loss is nan): weights of the model"):
            call()


@pytest.mark.parametrize("weight", [math.nan, 1e30])
@pytest.mark.parametrize("kind", ["classification", "masked language model"])
def test_an_evaluation_during_training_gives_the_advice_of_a_diverging_run(tmp_path, kind, weight):
    """Before the next log. Weights of 1e30 are finite, but what the model computes from them is not."""
    steps = {"max_steps": 6, "logging_steps": 100, "eval_strategy": "steps", "eval_steps": 2, "do_eval": True}
    fields = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    run = TRAINERS[kind](tmp_path, **steps, **fields)

    class Spoiler(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        parameter.fill_(weight)
                    run.model.deberta.embeddings.word_embeddings.weight.uniform_(-1, 1).mul_(weight)

    run.add_callback(Spoiler())
    diverged = r"(\d+ of \d+ predictions are not finite|eval_loss is \w+)"
    problem = "a weight is not finite" if math.isnan(weight) else diverged
    stop = rf"^{problem} at step 4 \(learning rate 0.001\), so the run stops.*: lower --learning_rate, "
    with pytest.raises(InputError, match=stop) as stopped:
        run.train()
    assert re.search("start over in another --output_dir, .*-2 is finite, but may have begun to", str(stopped.value))


def test_one_nan_loss_is_not_hidden_by_the_log_filter(tmp_path):
    """Without metrics Trainer computes losses alone, and its filter averages those that are finite."""
    rows = Dataset.from_dict({"input_ids": [[1, 5, 2]] * 15 + [[1, 7, 2]], "labels": [0.5] * 16})
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", num_labels=1))
    model.deberta.embeddings.word_embeddings.weight.data[7] = math.nan
    args = fine_tuning_arguments(tmp_path, logging_nan_inf_filter=True, per_device_eval_batch_size=4)
    run = FineTuningTrainer(model, args, default_data_collator, eval_dataset=rows)
    with pytest.raises(InputError, match="eval_loss is nan"):
        run.evaluate()
    assert run.args.logging_nan_inf_filter


def with_scaler(run: Trainer) -> Trainer:
    """Train as with fp16 on a GPU, with a gradient scaler for the CPU."""
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    run.scales_gradients = run.args.logging_nan_inf_filter = True
    return run


@pytest.mark.parametrize("kind", ["classification", "decoupled"])
def test_a_few_steps_of_overflow_are_skipped(tmp_path, kind):
    run = with_scaler(TRAINERS[kind](tmp_path, **{**SAVING, "logging_steps": 1}, max_grad_norm=0))
    for call in (1, 5, 9):
        spoil(run, call, "gradient norm")
    run.train()
    assert run.state.global_step == 12 and run.accelerator.scaler.get_scale() == 2.0**13
    assert all(math.isfinite(entry.get("loss", 0)) for entry in run.state.log_history)
    assert checkpoints(tmp_path) == ["checkpoint-12"]
    assert_finite(tmp_path / "checkpoint-12")


@pytest.mark.parametrize(
    ("kind", "optim"),
    [("classification", "adamw_torch"), ("classification", "adamw_torch_fused"), ("decoupled", "sgd")],
)
def test_a_scale_that_shrinks_to_nothing_stops_the_run(tmp_path, kind, optim):
    """A fused optimizer skips steps by itself, so accelerate does not know."""
    fields = {**SAVING, "max_steps": 60, "save_steps": 50, "logging_steps": 35, "max_grad_norm": 0, "optim": optim}
    run = with_scaler(TRAINERS[kind](tmp_path, **fields))
    next(iter(run.model.parameters())).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(InputError, match=r"overflow in fp16, .* at step \d+ \(learning rate .* train with --bf16"):
        run.train()
    assert run.state.global_step <= 35 and not checkpoints(tmp_path)


def test_a_checkpoint_is_continued_with_another_learning_rate(tmp_path):
    fields = {**SAVING, "logging_steps": 1, "save_total_limit": None, "max_grad_norm": 0}
    first = classifier(tmp_path / "first", learning_rate=1e-2, **fields)
    first.train()
    checkpoint = str(tmp_path / "first" / "checkpoint-6")
    resumed = {}
    for rate in (1e-2, 1e-3):
        run = classifier(tmp_path / str(rate), learning_rate=rate, **fields)
        run.train(resume_from_checkpoint=checkpoint)
        resumed[rate] = [entry["learning_rate"] for entry in run.state.log_history if "loss" in entry]
    expected = [entry["learning_rate"] for entry in first.state.log_history if "loss" in entry]
    assert resumed[1e-2] == expected
    assert resumed[1e-3] == pytest.approx([*expected[:6], *(rate / 10 for rate in expected[6:])])


def test_a_finished_run_that_becomes_longer_has_no_step_at_its_old_rate(tmp_path):
    """The rate of the last checkpoint is zero."""
    fields = {**SAVING, "logging_steps": 1, "save_total_limit": None, "lr_scheduler_type": "linear"}
    rates = []
    for name, steps, checkpoint in (("whole", 9, None), ("first", 6, None), ("longer", 9, "first/checkpoint-6")):
        run = classifier(tmp_path / name, **{**fields, "max_steps": steps})
        run.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        rates.append([entry["learning_rate"] for entry in run.state.log_history if "loss" in entry])
    whole, _, longer = rates
    assert longer[6:] == whole[6:]


def test_an_optimizer_of_the_user_keeps_its_learning_rate(tmp_path):
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    args = fine_tuning_arguments(tmp_path, max_steps=2, logging_steps=1)
    splits = {"train": ROWS, "validation": ROWS}
    run = FineTuningTrainer(model, args, default_data_collator, splits=splits, optimizers=(optimizer, schedule))
    run.train()
    assert [entry["learning_rate"] for entry in run.state.log_history if "loss" in entry] == [1e-2, 1e-2]
