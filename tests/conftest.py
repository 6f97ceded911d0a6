import os

import pytest
import torch

from hf_deberta.model import unpadding

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # tiny tensors, and the tests already run in several processes


@pytest.fixture(autouse=True)
def unpad_tiny_models_too(monkeypatch):
    """Models of tests are too narrow for unpadding to pay, and it is to be tested."""
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_CALLS", 0)
