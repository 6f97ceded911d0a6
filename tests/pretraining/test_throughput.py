"""Operations compared with PyTorch's counter, peaks of devices, and the meter of tokens and time."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.pretraining import throughput
from hf_deberta.pretraining.throughput import ThroughputMeter, peak_operations, training_operations


@pytest.mark.parametrize(
    "fields", [{}, {"emd_steps": 0}, {"pos_att_type": ["c2p"]}, {"relative_attention": False}], ids=str
)
def test_operations_of_a_forward_pass(fields):
    """Equal without position terms; their tables and gathers are not counted by definition."""
    config = HfDebertaConfig.from_preset("tiny", **{"vocab_size": 1000, **fields})
    model = HfDebertaForMaskedLM(config).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 1000, (4, 32))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counted = counter.get_total_flops()
    ours = training_operations(config, tokens=128, context_length=32, predictions=128) / 3
    if fields.get("relative_attention", True):
        assert 0.8 * counted < ours <= counted
    else:
        assert ours == counted


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_of_data_sheets(monkeypatch, name, peak):
    """One name may be the beginning of another."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_operations(torch.device("cuda")) == peak


def test_meter_leaves_out_evaluating_and_saving(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    meter = ThroughputMeter(pad_token_id=0)

    def after(seconds, event):
        now[0] += seconds
        return event()

    after(5, meter.on_train_begin)
    batch = {"input_ids": torch.tensor([[1, 7, 9, 0]]), "labels": torch.tensor([[-100, 3, -100, -100]])}
    meter.add(batch)
    meter.add(batch)
    after(2, meter.on_step_end)
    after(10, meter.on_evaluate)
    after(20, meter.on_save)
    after(1, meter.on_step_end)
    seconds, counts = after(0.5, meter.read_and_reset)
    assert (seconds, counts.tolist()) == (3.5, [6, 2])
    after(10, meter.on_evaluate)  # right after a log
    after(4, meter.on_step_end)
    seconds, counts = meter.read_and_reset()
    assert (seconds, counts.tolist()) == (4, [0, 0])
