"""What a run says: its losses, and no warning about what is right."""

import logging
import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tiny_trainers import classifier, language_model_trainer
from torch._dynamo.utils import counters
from transformers.trainer_utils import align_special_tokens

from hf_deberta.model import batch_layout
from hf_deberta.training.checkpoints import last_checkpoint
from hf_deberta.training.run_identity import RunArguments


@pytest.mark.parametrize(("steps", "given", "expected"), [(45, {}, 2), (3, {}, 1), (45, {"logging_steps": 9}, 9)])
def test_a_short_run_logs_its_loss_at_least_twenty_times(steps, given, expected, tmp_path):
    run = classifier(tmp_path, max_steps=steps, save_strategy="no", **given)
    run.train()
    logged = [entry["step"] for entry in run.state.log_history if "loss" in entry]
    assert logged == list(range(expected, steps + 1, expected))


@pytest.mark.slow
def test_compiled_layers_leave_out_padding(tmp_path, monkeypatch):
    """A graph of each layer serves all lengths."""
    layouts, unpadded = [], batch_layout.unpadded.faster
    monkeypatch.setattr("hf_deberta.engines.unpadding.COST_OF_EXTRA_CALLS", 0)
    monkeypatch.setattr(batch_layout.unpadded, "faster", lambda *args: layouts.append(unpadded(*args)) or layouts[-1])
    losses, options = [], {"pack": False, "arguments_class": RunArguments, "max_steps": 5}
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        counters.clear()
        with patch.dict(os.environ):
            run = language_model_trainer(
                tmp_path, "mlm", torch_compile=backend is not None, torch_compile_backend=backend, **options
            )
            run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(layouts) == 10 and all(layout.unpadding is not None for layout in layouts)
    assert counters["stats"]["unique_graphs"] == 5  # embeddings, a layer, the last one, two of the head


def test_a_resumed_run_warns_of_nothing(tmp_path, caplog):
    """Its tied weights are not missing, and its intervals are the same."""
    for steps in (2, 3):
        run = language_model_trainer(
            tmp_path, "mlm", arguments_class=RunArguments, max_steps=steps, save_strategy="steps", save_steps=1
        )
        run.train(resume_from_checkpoint=last_checkpoint(run.args))
    assert run.state.global_step == 3
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_warm_up_that_is_longer_than_the_run(tmp_path, caplog):
    run = classifier(tmp_path, warmup_steps=100)
    run.create_scheduler(101, torch.optim.SGD(run.model.parameters()))
    assert not caplog.text
    run.lr_scheduler = None
    run.create_scheduler(100, torch.optim.SGD(run.model.parameters()))
    assert "--warmup_steps 100 is not less than the 100 steps of this run" in caplog.text


def test_special_tokens_are_completed_without_a_warning(tmp_path, caplog):
    run = language_model_trainer(tmp_path, "causal")
    run.processing_class = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    run._set_special_tokens()
    align_special_tokens(run.model, run.processing_class)
    assert run.model.config.bos_token_id == 1 and run.model.generation_config.eos_token_id in (2, [2])
    assert not caplog.records
