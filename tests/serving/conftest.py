import pytest
import torch

import hf_deberta


@pytest.fixture(autouse=True)
def seeded_and_disabled_afterwards():
    torch.manual_seed(0)
    yield
    hf_deberta.disable()
