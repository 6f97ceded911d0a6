"""Two processes train and evaluate as one, also when their last batch is not full, and stop together.

Accumulation changes nothing either.
"""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from numerics import assert_same_by_name
from tiny_pairs import tiny_pair, tiny_rows, trainer_of
from tiny_trainers import collate_padded, fine_tuning_arguments, language_model_trainer
from transformers import Trainer
from two_processes import fork_two, run_script

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from hf_deberta.engines import unpadding
from hf_deberta.fine_tuning import sift
from hf_deberta.fine_tuning.trainer import FineTuningTrainer
from hf_deberta.training.errors import InputError

TRAINING = {
    "max_steps": -1,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "weight_decay": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}
# rows, and rows per step: the second of two processes has one row or none of its own in the last batch
SIZES = {"one row": (13, 8), "no row": (10, 8), "no full batch": (3, 8), "full": (16, 8), "dropped": (13, 8)}
ACCUMULATION = {"one row": 1, "no row": 1, "no full batch": 2, "full": 2, "dropped": 1}
FLAGS = {
    "dataloader_drop_last": [True],
    "dataloader_num_workers": [0, 1],
    "eval_accumulation_steps": [None, 1],
    "accelerator_config": [None, {"split_batches": True}, {"even_batches": False}],
}


def task_rows(head: str, number: int) -> tuple[type, dict[str, Any], dict[str, list]]:
    """Return the model class, fields of its configuration, and columns of rows of different lengths."""
    ids = [[1, *(5 + (n * 7 + k) % 90 for k in range(2 + n * 5 % 7)), 2] for n in range(number)]
    numbers, sequences = range(number), HfDebertaForSequenceClassification
    several = {"num_labels": 2, "problem_type": "multi_label_classification"}
    ends = [50 if n % 4 == 3 else len(row) - 1 for n, row in enumerate(ids)]  # some outside the window
    tags = [[-100, *(token % 4 for token in row[1:-1]), -100] for row in ids]
    choices = {"input_ids": [[row, [1, 9, 2]] for row in ids], "labels": [n % 2 for n in numbers]}
    entities = {"entity_indices": [[[1, 2], [3, 0]]] * number, "labels": [[n % 2, 1] for n in numbers]}
    model_class, fields, columns = {
        "classes": (sequences, {"num_labels": 3}, {"labels": [n % 3 for n in numbers]}),
        "a number": (sequences, {"num_labels": 1}, {"labels": [n / 4 for n in numbers]}),
        "several labels": (sequences, several, {"labels": [[n % 2, 1.0] for n in numbers]}),
        "tokens": (HfDebertaForTokenClassification, {"num_labels": 4}, {"labels": tags}),
        "answers": (
            HfDebertaForQuestionAnswering, {}, {"start_positions": [n % 2 for n in numbers], "end_positions": ends}
        ),
        "choices": (HfDebertaForMultipleChoice, {}, choices),
        "entities": (HfDebertaForEntityChoice, {}, entities),
    }[head]  # fmt: skip
    return model_class, fields, {"input_ids": ids, **columns}


HEADS = ("classes", "a number", "several labels", "tokens", "answers", "choices", "entities")


def fixed_noise(self: sift.PerturbedEmbeddings, x: torch.Tensor) -> torch.Tensor:
    """Noise that does not depend on how rows are split."""
    return 1e-2 * (100 * x.detach()).sin()


def make_trainer(kind: str, folder: Path, rows: int, **fields: Any) -> Trainer:
    fields = {**TRAINING, **fields}
    if kind in ("mlm", "causal", "joint"):
        return language_model_trainer(folder, kind, pack=rows % 2 == 0, rows=rows, **fields)
    if kind in ("pair", "decoupled"):
        lengths = [3 + n * 5 % 9 for n in range(rows)]
        data = tiny_rows(lengths)
        return trainer_of(tiny_pair(), folder, kind == "decoupled", train_dataset=data, eval_dataset=data, **fields)
    head, _, with_sift = kind.partition(" with ")
    model_class, config, columns = task_rows(head, rows)
    torch.manual_seed(0)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = model_class(HfDebertaConfig.from_preset("tiny", **still, **config))
    data = Dataset.from_dict(columns)
    args = fine_tuning_arguments(folder, **fields)
    settings = sift.SiftArguments(sift=bool(with_sift))
    return FineTuningTrainer(model, args, collate_padded, splits={"train": data, "validation": data}, sift=settings)


def run(kind: str, size: str, folder: Path, processes: int, pieces: int) -> dict[str, Any]:
    """Return the logged losses, the loss of evaluation, and the weights."""
    rows, batch = SIZES[size]
    per_device = batch // processes // pieces
    trainer = make_trainer(
        kind,
        folder,
        rows,
        per_device_train_batch_size=per_device,
        per_device_eval_batch_size=batch // processes,
        gradient_accumulation_steps=pieces,
        dataloader_drop_last=size == "dropped",
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = [name for name in logs[0] if name.endswith(("loss", "accuracy", "found", "kept")) or name == "grad_norm"]
    evaluated = {name: value for name, value in trainer.evaluate().items() if name.endswith(("loss", "accuracy"))}
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return {"logs": [[entry[name] for name in names] for entry in logs], "eval": evaluated, "weights": weights}


KINDS = ("mlm", "causal", "joint", "pair", "decoupled", *HEADS, "classes with sift", "answers with sift")
CASES = [(kind, "no row") for kind in KINDS if kind not in ("causal", "several labels", "entities")]
CASES += [(kind, size) for kind in ("decoupled", "a number") for size in SIZES if size != "no row"]


@pytest.fixture(autouse=True)
def no_randomness(monkeypatch):
    monkeypatch.setattr(sift.PerturbedEmbeddings, "draw_noise", fixed_noise)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(found["logs"], expected["logs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert found["eval"] == pytest.approx(expected["eval"], rel=1e-4)
    assert_same_by_name(found["weights"], expected["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_changes_nothing(kind, tmp_path):
    for size in ("one row", "no full batch"):
        assert_same(run(kind, size, tmp_path, 1, 4), run(kind, size, tmp_path, 1, 1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "causal"])
def test_unpadding_changes_nothing(kind, unpad_tiny_models, values_are_not_read, monkeypatch, tmp_path):
    """Also in a last batch that is not full."""
    unpadded, unpad = [], unpadding.unpadding_of_counted_mask

    def unpad_and_note(*inputs: Any) -> unpadding.Unpadding | None:
        unpadded.append(unpad(*inputs))
        return unpadded[-1]

    monkeypatch.setattr(unpadding, "unpadding_of_counted_mask", unpad_and_note)
    found = run(kind, "one row", tmp_path, 1, 2)
    assert any(unpadded)
    monkeypatch.setattr(unpadding, "unpadding_of_counted_mask", lambda *inputs: None)
    assert_same(found, run(kind, "one row", tmp_path, 1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_training_do_not_reach_evaluation(kind, tmp_path):
    """It has all rows of its split, and no others."""
    rng = random.Random(kind)
    flags = {name: rng.choice(values) for name, values in FLAGS.items()}
    flags["dataloader_persistent_workers"] = flags["dataloader_num_workers"] > 0
    losses = []
    for others in (flags, {}):
        trainer = make_trainer(kind, tmp_path, 8, per_device_eval_batch_size=3, **others)
        rows = make_trainer(kind, tmp_path, 5).eval_dataset
        losses.append([trainer.evaluate()["eval_loss"], trainer.evaluate(rows)["eval_loss"]])
        losses[-1].append(trainer.predict(rows).metrics["test_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), flags


def test_a_training_without_a_full_batch(tmp_path):
    with pytest.raises(InputError, match="--dataloader_drop_last leaves no batch of 8 rows .*5 training rows: leave"):
        make_trainer("mlm", tmp_path, 5, per_device_train_batch_size=8, dataloader_drop_last=True).train()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> dict[tuple[str, str], Any]:
    folder = tmp_path_factory.mktemp("two")
    run_script(__file__, folder)
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_two_processes_are_one(two_processes, kind, size, tmp_path):
    assert_same(two_processes[kind, size], run(kind, size, tmp_path, 1, ACCUMULATION[size]))


@pytest.mark.slow
def test_two_processes_stop_together(two_processes):
    """The loss of one of them is NaN."""
    message, other = two_processes["messages"]
    assert message == other and "the loss is not finite at step 3 (learning rate 0.01), so the run stops" in message
    assert "checkpoint-2 is finite" in message


def message_of_stopped_run(rank: int, folder: Path) -> str:
    fields = {"max_steps": 9, "save_strategy": "steps", "save_steps": 2, "logging_steps": 100}
    trainer = make_trainer("classes", folder / "stopped", 40, per_device_train_batch_size=2, **fields)
    compute, calls = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(rank)
        return compute(*args, **kwargs) * (math.nan if rank == 1 and len(calls) == 3 else 1)

    trainer.compute_loss = compute_loss
    with pytest.raises(InputError) as stopped:
        trainer.train()
    return str(stopped.value)


def one_of_two(rank: int, folder: Path) -> None:
    sift.PerturbedEmbeddings.draw_noise = fixed_noise
    results = {(kind, size): run(kind, size, folder, 2, ACCUMULATION[size]) for kind, size in CASES}
    messages = [None, None]
    torch.distributed.all_gather_object(messages, message_of_stopped_run(rank, folder))
    if rank == 0:
        torch.save({**results, "messages": messages}, folder / "results.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    fork_two(one_of_two)
