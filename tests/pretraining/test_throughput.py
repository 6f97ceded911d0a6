"""The count of operations against one made by PyTorch, and the peaks."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.pretraining.throughput import measured_peak, peak_operations, training_operations


@pytest.mark.parametrize(
    "fields", [{}, {"emd_steps": 0}, {"pos_att_type": ["c2p"]}, {"relative_attention": False}], ids=str
)
def test_operations_of_a_forward_pass(fields):
    """Without position terms the products are all there are; tables and bands are left out by definition."""
    config = HfDebertaConfig.from_preset("tiny", **{"vocab_size": 1000, **fields})
    model = HfDebertaForMaskedLM(config).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 1000, (4, 32))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counted = counter.get_total_flops()
    ours = training_operations(config, tokens=128, context=32, predicted=128) / 3
    if fields.get("relative_attention", True):
        assert 0.8 * counted < ours <= counted
    else:
        assert ours == counted


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12),
    ],
)
def test_peaks_of_data_sheets(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_operations(torch.device("cuda"), torch.bfloat16) == peak


def test_a_peak_that_is_measured():
    state = torch.random.get_rng_state()
    assert measured_peak(torch.device("cpu"), torch.float32, size=128) > 1e6
    assert torch.equal(torch.random.get_rng_state(), state)  # or a run that is resumed would draw other numbers
