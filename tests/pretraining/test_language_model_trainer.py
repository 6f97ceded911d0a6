"""The language-model trainer: losses do not depend on micro-batches, and evaluation averages over tokens."""

import json
import math

import numpy as np
import pytest
import torch
from numerics import assert_same_by_name
from tiny_trainers import language_model_trainer as trainer
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_deberta.pretraining import trainer as trainer_module
from hf_deberta.pretraining.arguments import PretrainingArguments
from hf_deberta.pretraining.language_model_trainer import LOSSES, LanguageModelTrainer, predicted_labels
from hf_deberta.pretraining.packing import RowCollator
from hf_deberta.training.errors import InputError
from hf_deberta.training.row_order import EpochSampler


def logged(run: LanguageModelTrainer) -> list[dict]:
    return [entry for entry in run.state.log_history if "loss" in entry]


def test_the_best_perplexity_is_the_lowest():
    assert PretrainingArguments(use_cpu=True, metric_for_best_model="perplexity").greater_is_better is False


@pytest.mark.parametrize("objective", LOSSES)
def test_evaluation_is_the_mean_over_tokens(tmp_path, objective):
    run = trainer(tmp_path, objective, per_device_eval_batch_size=3)
    metrics = run.evaluate()
    model, data = run.model.eval(), run.eval_dataset
    sums = {name: [0.0, 0, 0] for name in LOSSES[objective]}
    for i in range(len(data)):
        for name, given in run.inputs_per_loss(RowCollator(0)([data[i]])).items():
            with torch.no_grad():
                logits = model(**{k: v for k, v in given.items() if k != "labels"}).logits
            labels = predicted_labels(name, given)
            known = labels != -100
            sums[name][0] += torch.nn.functional.cross_entropy(logits[known], labels[known], reduction="sum").item()
            sums[name][1] += (logits.argmax(-1) == labels)[known].sum().item()
            sums[name][2] += known.sum().item()
    assert metrics["eval_loss"] == pytest.approx(sum(loss / number for loss, _, number in sums.values()), rel=1e-5)
    for name, (loss, right, number) in sums.items():
        assert metrics[f"eval_{name}_accuracy"] == pytest.approx(right / number)
        prefix = "causal_" if objective == "joint" and name == "causal" else ""
        assert metrics[f"eval_{prefix}perplexity"] == pytest.approx(math.exp(loss / number), rel=1e-4)


LINEAR = {"num_decay_steps": 4, "decay_type": "linear"}


@pytest.mark.parametrize(
    ("name", "warmup", "kwargs", "expected"),
    [
        ("warmup_stable_decay", 2, None, {1: 0.5, 2: 1, 18: 1, 19: 1 - 0.5**0.5, 20: 0}),
        ("warmup_stable_decay", 2, LINEAR, {2: 1, 16: 1, 17: 0.75, 20: 0}),
        ("warmup_stable_decay", 19, None, {18: 18 / 19, 19: 1, 20: 0}),
        ("cosine_with_min_lr", 2, None, {2: 1, 11: 0.55, 20: 0.1}),
        ("cosine_with_min_lr", 2, {"min_lr_rate": 0.3}, {2: 1, 11: 0.65, 20: 0.3}),
    ],
)
def test_schedules_that_need_settings(tmp_path, name, warmup, kwargs, expected):
    """In the last tenth of the steps by 1 - sqrt, or to a tenth; --lr_scheduler_kwargs gives another."""
    schedule = {"lr_scheduler_type": name, "warmup_steps": warmup, "lr_scheduler_kwargs": kwargs}
    run = trainer(tmp_path, "mlm", **schedule)
    run.create_optimizer_and_scheduler(20)
    rates = {step: run.lr_scheduler.lr_lambdas[0](step) for step in expected}
    assert rates == pytest.approx(expected) and run.args.lr_scheduler_kwargs == kwargs


@pytest.mark.parametrize("pack", [True, False])
def test_joint_loss_is_the_sum_of_both(tmp_path, pack):
    run = trainer(tmp_path, "joint", pack=pack)
    batch = RowCollator(0)([run.train_dataset[i] for i in range(4)])
    batch["input_ids"][0, (batch["labels"][0] != -100).nonzero()[0]] = 0  # --masking official draws [PAD], too
    passes = run.inputs_per_loss(batch)
    masked, causal = passes["masked"], passes["causal"]
    assert (causal["input_ids"] != 4).all() and (masked["input_ids"] == 4).any()
    first = causal["position_ids"] == 0 if pack else torch.arange(causal["labels"].shape[1]) == 0
    assert (causal["labels"] != -100).equal(~first & (causal["input_ids"] != 0))
    losses = [run.model(**given).loss for given in passes.values()]
    items = run._get_num_items_in_batch([batch], torch.device("cpu"))
    assert items.tolist() == [(masked["labels"] != -100).sum(), (causal["labels"] != -100).sum()]
    assert (2 * items).equal(run._get_num_items_in_batch([batch, batch], torch.device("cpu")))  # accumulated
    loss = run.compute_loss(run.model, batch, num_items_in_batch=items)
    assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-5)


def test_every_row_once_an_epoch_with_new_masks(tmp_path):
    """The model's inputs from Trainer's own loader: sampler, epochs and workers."""
    for workers in (0, 2):
        run = trainer(tmp_path, "mlm", max_steps=-1, num_train_epochs=2, dataloader_num_workers=workers)
        loader, data = run.get_train_dataloader(), run.train_dataset
        seen = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            seen.append(torch.cat([batch["input_ids"] for batch in loader]))
            sampler = EpochSampler(len(data), run.args.seed)
            sampler.set_epoch(epoch)
            expected = torch.tensor(np.stack([data[i]["input_ids"] for i in sampler]))
            assert torch.equal(seen[-1], expected)
        assert not torch.equal(seen[0].sort(0).values, seen[1].sort(0).values)


def test_files_that_a_kill_kept_from_being_written(tmp_path, caplog):
    """The model of a finished run comes from the last checkpoint, bit for bit."""
    fields = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    names = ("model.safetensors", "README.md", "trainer_state.json", "train_results.json")

    def run() -> dict[str, bytes]:
        trainer(tmp_path, "mlm", arguments_class=PretrainingArguments, **fields).train_and_evaluate()
        return {name: (tmp_path / name).read_bytes() for name in names}

    before = run()
    for name in names[:3]:
        (tmp_path / name).unlink()
    after = run()
    assert "nothing is trained" not in caplog.text and b"## Training" in after["README.md"]
    assert all(after[name] == before[name] for name in ("model.safetensors", "train_results.json"))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


class StopAt(TrainerCallback):
    def __init__(self, step: int, error: type[Exception] | None = None) -> None:
        self.step, self.error = step, error

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step and self.error is not None:
            raise self.error
        control.should_training_stop |= state.global_step == self.step


def test_a_run_that_stopped_early_goes_on(tmp_path):
    """As after a signal with --enable_jit_checkpoint: the model was saved, but not all steps were made.

    Early stopping has not stopped it: its patience was not over.
    """
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "arguments_class": PretrainingArguments}
    fields |= {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    first, again = (trainer(tmp_path, "mlm", **fields) for _ in range(2))
    first.add_callback(StopAt(2))
    for run in (first, again):
        run.add_callback(EarlyStoppingCallback(9))
        run.train_and_evaluate()
    assert (first.state.global_step, again.state.global_step, again.trained) == (2, 4, True)


def test_a_failed_attempt_leaves_a_finished_run_as_it_is(tmp_path):
    """And a card that the user has written stays when the command is repeated."""
    fields = {"save_strategy": "steps", "save_steps": 2, "arguments_class": PretrainingArguments}
    trainer(tmp_path, "mlm", max_steps=2, **fields).train_and_evaluate()
    (tmp_path / "README.md").write_text("my card")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    failing = trainer(tmp_path, "mlm", max_steps=4, **fields)
    failing.add_callback(StopAt(3, MemoryError))
    with pytest.raises(MemoryError):
        failing.train_and_evaluate()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert {name for name in before if after.get(name) != before[name]} == {"run.json"}
    longer = trainer(tmp_path, "mlm", max_steps=4, **fields)
    longer.train_and_evaluate()
    assert longer.state.global_step == 4 and "## Training" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("my card")
    trainer(tmp_path, "mlm", max_steps=4, **fields).train_and_evaluate()
    assert (tmp_path / "README.md").read_text() == "my card"


def test_a_finished_run_without_checkpoints_is_evaluated_only(tmp_path, caplog):
    def run(**changes) -> LanguageModelTrainer:
        fields = {"learning_rate": 1e-2, "seed": 7, "max_steps": 3, "per_device_train_batch_size": 4, **changes}
        created = trainer(tmp_path, "mlm", arguments_class=PretrainingArguments, **fields)
        created.train_and_evaluate()
        return created

    def files() -> dict[str, bytes]:
        names = (path.name for path in tmp_path.iterdir() if "results" not in path.name)
        return {name: (tmp_path / name).read_bytes() for name in names}

    first, before = run(), files()
    loss = json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"]
    (tmp_path / "eval_results.json").unlink()
    again = run()
    assert not again.trained and "it is finished: nothing is trained" in caplog.text and files() == before
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] == loss
    assert_same_by_name(dict(again.model.named_parameters()), dict(first.model.named_parameters()))
    for changes in ({"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 2}):
        with pytest.raises(InputError, match="finished run of 3 steps without checkpoints, which cannot become longer"):
            run(**changes)
    for changes in ({"max_steps": 2}, {"seed": 8}):
        with pytest.raises(InputError, match="holds a run with other settings: "):
            run(**changes)
    assert files() == before and "becomes longer" not in caplog.text
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"damaged \(no model weights\), and no checkpoint: restore its files"):
        run()
    assert run(resume_from_checkpoint="false").trained and files().keys() == before.keys()
    (tmp_path / "trainer_state.json").unlink()  # killed before its first checkpoint
    assert run(max_steps=4).trained and (tmp_path / "trainer_state.json").exists()


@pytest.mark.parametrize(("reached", "epoch"), [(None, 0), (0.4, 0), (1.0, 1), (1.4, 1)])
def test_a_resumed_epoch_has_its_own_order(tmp_path, reached, epoch):
    run = trainer(tmp_path, "mlm")
    run.get_train_dataloader()
    run.callback_handler.on_epoch_begin(run.args, TrainerState(epoch=reached), TrainerControl())
    assert run.order.epoch == epoch


def test_speed_counts_real_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "peak_operations", lambda device: 1e10)
    run = trainer(tmp_path, "mlm", pack=False, per_device_train_batch_size=4, logging_steps=3, bf16=True)
    counted = []
    operations = run.operations
    run.operations = lambda tokens, predicted: counted.append((tokens, predicted)) or operations(tokens, predicted)
    run.train()
    sampler, data = EpochSampler(len(run.train_dataset), run.args.seed), run.train_dataset
    used = [data[i] for i in list(sampler)[:12]]
    assert counted[0] == (
        sum(len(row["input_ids"]) for row in used),
        sum((row["labels"] != -100).sum() for row in used),
    )
    (entry,) = logged(run)
    assert entry["tokens_per_second"] > 0 and 0 < entry["mfu"] < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("objective", LOSSES)
def test_compiled_graphs_give_the_same_metrics(tmp_path, objective):
    """They return logits at all positions, but no losses and predictions of the labelled ones."""
    results = []
    for backend in (None, "eager"):
        torch._dynamo.reset()
        run = trainer(
            tmp_path, objective, max_steps=1, torch_compile=backend is not None, torch_compile_backend=backend
        )
        run.train()
        results.append({**logged(run)[0], **run.evaluate()})
    names = [name for name in results[0] if name.endswith(("loss", "accuracy", "perplexity"))]
    assert f"eval_{LOSSES[objective][0]}_accuracy" in names and f"{LOSSES[objective][0]}_accuracy" in names
    assert [results[1][name] for name in names] == pytest.approx([results[0][name] for name in names], rel=1e-4)


def test_operations_of_a_joint_step(tmp_path):
    masked, joint = (trainer(tmp_path, objective) for objective in ("mlm", "joint"))
    assert joint.operations(100, 15) == masked.operations(100, 15) + masked.operations(100, 100)


def test_joint_objective_needs_one_process_per_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="both objectives on 2 GPUs: .*accelerate launch"):
        trainer(tmp_path, "joint")
