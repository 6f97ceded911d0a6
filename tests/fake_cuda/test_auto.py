"""`attn_implementation="auto"` on a simulated CUDA device: a decided choice costs no launch, no copy and no wait.

Fake tensors cannot be checked or timed, so what was decided is replaced.
"""

from unittest.mock import MagicMock, patch

import pytest
import torch
from counter import simulated_cuda
from test_models import MODES, assert_never_waits, padded, run, tiny, tokens

from hf_deberta import HfDebertaModel
from hf_deberta.engines import attention_auto, attention_triton, attention_triton_operator
from hf_deberta.model.batch_layout import AttentionMask


@pytest.fixture(autouse=True)
def fake_tensors_may_use_triton():
    with patch.object(attention_auto, "may_use_triton", lambda query: query.is_cuda):
        yield


@pytest.mark.parametrize("inputs", [tokens, padded])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", ["sdpa", "triton"])
def test_auto_costs_what_its_choice_costs(choice, mode, inputs):
    decided = MagicMock()  # the same choice for every workload
    decided.__contains__.return_value, decided.__getitem__.return_value = True, choice
    with patch.object(attention_auto, "_choices", decided):
        automatic = run(HfDebertaModel, tiny(), inputs, **MODES[mode], backend="auto")
    explicit = run(HfDebertaModel, tiny(), inputs, **MODES[mode], backend=choice)
    assert decided.__getitem__.call_count == tiny().num_hidden_layers
    assert_never_waits(automatic)
    assert automatic.launches_by_operator == explicit.launches_by_operator
    assert (automatic.triton_launches > 0) == (choice == "triton")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", [None, attention_auto.Failure("the context is off")])
def test_fake_tensors_are_neither_checked_nor_timed(fault, mode):
    """Kernels that passed their check are used, others are not."""

    checked = MagicMock(get=lambda kernel, default=None: fault)
    with patch.object(attention_auto, "_faults", checked), patch.object(attention_auto, "_choices", {}) as choices:
        counter = run(HfDebertaModel, tiny(), tokens, **MODES[mode], backend="auto")
    assert_never_waits(counter)
    assert (counter.triton_launches > 0) == (fault is None) and not choices


def states_of(heads, dtype):
    states = torch.empty(1, 2, 8, heads, dtype=dtype, device="cuda")
    return states, states, states, None, AttentionMask()


def test_wide_heads_in_float32_go_to_sdpa():
    """Their kernels need nearly all shared memory of small GPUs, and spill registers."""
    with simulated_cuda():
        assert "do not fit" in attention_triton.unsupported_reason(*states_of(128, torch.float32))
        for heads, dtype in ((64, torch.float32), (128, torch.bfloat16)):
            assert attention_triton.unsupported_reason(*states_of(heads, dtype)) is None


@pytest.mark.parametrize(("hip", "launch"), [(None, "others"), ("6.4", "AMD")])
def test_gpus_of_amd_have_no_compute_capability_of_nvidia(hip, launch):
    with simulated_cuda(capability=(8, 6) if hip is None else (7, 0)), patch.object(torch.version, "hip", hip):
        assert attention_triton.unsupported_reason(*states_of(64, torch.bfloat16)) is None
        assert (
            attention_triton_operator.launches(torch.bfloat16, torch.device("cuda"))
            == attention_triton_operator.LAUNCHES[launch]
        )
