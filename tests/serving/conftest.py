import pytest
import torch

import hf_deberta
from hf_deberta.serving import fused_layers


@pytest.fixture(autouse=True)
def seeded_and_disabled_afterwards():
    torch.manual_seed(0)
    yield
    hf_deberta.disable()


@pytest.fixture
def fused_layers_for_all_batches(monkeypatch):
    """Compute all batches with fused layers, unless a test asks for OpenVINO."""
    monkeypatch.setattr(fused_layers, "choose_max_openvino_tokens", lambda *_: 0)
