"""The loop with accelerate learns, accumulates gradients, and saves a model that can be loaded."""

import accelerate_loop
import pytest
import torch
from accelerate.state import GradientState

from hf_deberta import HfDebertaForSequenceClassification


@pytest.fixture(autouse=True)
def restore_gradient_state():
    """accelerate shares the number of accumulation steps between all Accelerators of a process."""
    yield
    GradientState._reset_state()


def test_it_learns(tiny_model, sentiment, capsys, monkeypatch):
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *inputs: steps.append(1) or step(*inputs))
    flags = ["--model", str(tiny_model), *sentiment, "--learning_rate", "3e-3", "--epochs", "3", "--accumulate", "2"]
    accuracy = accelerate_loop.main([*flags, "--batch_size", "8"])
    assert len(steps) == 3 * 320 / 8 / 2
    printed = capsys.readouterr().out.splitlines()
    assert accuracy > 0.9 and len(printed) == 3 and printed[-1].endswith(f"accuracy {accuracy:.3f}")
    assert HfDebertaForSequenceClassification.from_pretrained("accelerate_loop").num_labels == 2
