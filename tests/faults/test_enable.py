"""`enable()` and `disable()` called while other threads infer: every pass ends with the code that it began with."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from fault_cases import number_of_cases
from transformers import DebertaConfig, DebertaForMaskedLM, DebertaV2Config, DebertaV2ForMaskedLM

from hf_deberta import disable, enable

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
V2_SIZES = {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"}


def v1_model():
    return DebertaForMaskedLM(DebertaConfig(**SIZES, legacy=True))


def v2_model():
    return DebertaV2ForMaskedLM(DebertaV2Config(**SIZES, **V2_SIZES, conv_kernel_size=3, legacy=True))


def v3_model():
    return DebertaV2ForMaskedLM(DebertaV2Config(**SIZES, **V2_SIZES, legacy=True))


@pytest.mark.parametrize("build", [v1_model, v2_model, v3_model])
def test_toggled_while_threads_infer(build, tally):
    torch.manual_seed(0)
    model, mask = build().eval(), torch.tensor([[1] * 17, [1] * 9 + [0] * 8])
    ids = torch.randint(1, 99, mask.shape) * mask
    stop, switch_interval = Event(), sys.getswitchinterval()

    @torch.no_grad()
    def infer():
        return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]

    def infer_until_stopped(_):
        passes = 0
        while not stop.is_set():
            logits = infer()
            assert min((logits - other).abs().max() for other in (in_tree, enabled)) < 1e-5
            passes += 1
        return passes

    in_tree = infer()
    with enable():
        enabled = infer()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as threads:
            running = [threads.submit(infer_until_stopped, thread) for thread in range(2)]
            try:
                toggles = number_of_cases(60, 1200)
                for _ in range(toggles):
                    with enable():
                        stop.wait(0.003)
                    stop.wait(0.003)
            finally:
                stop.set()
            assert all(thread.result() > 0 for thread in running)
    finally:
        sys.setswitchinterval(switch_interval)
        disable()
    tally.held("enable() toggled while threads infer", toggles)
