"""Trainer with torch_compile: two graphs for batches of many lengths, and a model without prefixes. CUDA graphs."""

import faster_steps
import pytest
import torch
from recorded_graphs import use_recorded_graphs
from torch._dynamo.utils import counters

from hf_deberta import HfDebertaForSequenceClassification


@pytest.fixture(autouse=True)
def restore_compiler(monkeypatch):
    """TrainingArguments chooses the backend in the environment, where later Accelerators would find it."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.slow  # 8 seconds, of which tracing takes most
def test_it_learns_in_two_graphs(tiny_model, sentiment, capsys):
    flags = ["--model", str(tiny_model), *sentiment[:2], "--max_steps", "40", "--learning_rate", "3e-3"]
    losses = faster_steps.main([*flags, "--backend", "eager"])
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    assert "first two steps" in capsys.readouterr().out
    _, info = HfDebertaForSequenceClassification.from_pretrained("faster_steps", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_graphs_train_the_same_model(tiny_model, sentiment, monkeypatch, caplog):
    flags = ["--model", str(tiny_model), *sentiment[:2], "--max_steps", "6"]
    use_recorded_graphs(monkeypatch)
    eager = faster_steps.main([*flags, "--steps", "eager"])
    # other padding, and so other masks of dropout
    assert faster_steps.main([*flags, "--steps", "graphed"]) == pytest.approx(eager, rel=0.02)
    assert "without CUDA graphs" not in caplog.text
