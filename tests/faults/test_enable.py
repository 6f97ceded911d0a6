"""`enable()` and `disable()` called while other threads infer: every pass ends with the code that it began with."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from fault_cases import number_of_cases
from test_parity_with_transformers import batch, in_tree

from hf_deberta import disable, enable


@pytest.mark.parametrize("shape", ["v1", "v2", "v3"])
def test_toggled_while_threads_infer(shape, tally):
    model, inputs = in_tree(shape, "ForMaskedLM"), batch(lengths=(17, 9))
    stop, switch_interval = Event(), sys.getswitchinterval()

    @torch.no_grad()
    def infer():
        return model(**inputs).logits[inputs["attention_mask"].bool()]

    def infer_until_stopped(_):
        passes = 0
        while not stop.is_set():
            logits = infer()
            assert min((logits - other).abs().max() for other in (plain, enabled)) < 1e-5
            passes += 1
        return passes

    plain = infer()
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
