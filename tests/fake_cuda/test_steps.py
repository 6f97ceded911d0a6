"""Whole optimizer steps of the trainers, Trainer's own part included, on a simulated GPU: nothing waits for it."""

import pytest
import torch
from accelerate.state import AcceleratorState
from all_trainers import STEPS, TRAINERS
from counter import counting, simulated_cuda
from torch import nn
from transformers import TrainerCallback, TrainingArguments

CUDA = torch.device("cuda", 0)
SETTINGS = {**STEPS, "use_cpu": True, "bf16": True, "max_steps": 4, "logging_steps": 1000, "eval_strategy": "no"}
SETTINGS["logging_nan_inf_filter"] = False  # as in RunArguments: the filter reads each loss


class Marks(TrainerCallback):
    """What was counted before each step."""

    def __init__(self, counter):
        self.counter, self.marks = counter, []

    def on_step_begin(self, *_, **__):
        counter = self.counter
        self.marks.append((counter.launches, len(counter.syncs), len(counter.copies), len(counter.on_host)))


def on_device(value):
    return torch.empty(value.shape, dtype=value.dtype, device=CUDA) if torch.is_tensor(value) else value


@pytest.fixture
def move(monkeypatch):
    """Return a function that moves a trainer to the simulated GPU: its model, its batches and what it counts."""

    def move(trainer, batches):
        with torch.device(CUDA):
            trainer.model = trainer.model_wrapped = type(trainer.model)(trainer.model.config)
        for counts in (trainer, getattr(trainer, "meter", trainer)):  # of language models
            counts.counts = torch.zeros(2, dtype=torch.long, device=CUDA)
        batches = [{name: on_device(value) for name, value in batch.items()} for batch in batches]
        trainer.get_train_dataloader = lambda: trainer._get_train_sampler() and batches
        trainer.accelerator.state.device = CUDA
        monkeypatch.setattr(TrainingArguments, "device", CUDA)
        monkeypatch.setattr(nn.Module, "to", lambda module, *_, **__: module)  # fake weights cannot be moved

    yield move
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("kind", ["classes", "answers", "mlm", "mlm, padded", "causal", "joint", "rtd"])
def test_a_step_never_waits(kind, move, tmp_path):
    """Micro-batches, counting of items, finite values, clipping, optimizer, schedule and callbacks; but for logging."""
    trainer = TRAINERS[kind](tmp_path, **SETTINGS)
    batches = [dict(batch) for _, batch in zip(range(8), trainer.get_train_dataloader(), strict=False)]
    with simulated_cuda():
        move(trainer, batches)
        with counting() as counter:
            callback = Marks(counter)
            trainer.add_callback(callback)
            trainer.train()
    (before, *waits), (after, *later) = callback.marks[1:3]
    assert after > before and waits == later, (counter.syncs, counter.copies, counter.on_host)
