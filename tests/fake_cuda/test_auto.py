"""`attn_implementation="auto"` on a simulated CUDA device: a checked kernel costs no launch, no copy and no wait.

Fake tensors cannot be checked, so the results of checks are replaced.
"""

from unittest.mock import MagicMock, patch

import pytest
import torch
from counter import simulated_cuda
from test_models import MODES, assert_never_waits, padded, run, tiny, tokens

from hf_deberta import HfDebertaModel
from hf_deberta.engines import attention_auto, attention_triton, attention_triton_operator
from hf_deberta.engines.attention_auto import may_use_triton
from hf_deberta.model.batch_layout import AttentionMask


@pytest.fixture(autouse=True)
def fake_tensors_may_use_triton():
    with patch.object(attention_auto, "may_use_triton", lambda query: query.is_cuda):
        yield


@pytest.mark.parametrize("inputs", [tokens, padded])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", [None, attention_auto.Failure("the context is off")])
def test_auto_costs_what_its_choice_costs(fault, mode, inputs):
    """Kernels that passed their check are used, others are not."""
    faults = MagicMock()  # the same for every kernel
    faults.__contains__.return_value, faults.__getitem__.return_value = True, fault
    dtypes = (*attention_auto.DTYPES, torch.float32)
    with patch.object(attention_auto, "_faults", faults), patch.object(attention_auto, "DTYPES", dtypes):
        automatic = run(HfDebertaModel, tiny(), inputs, **MODES[mode], backend="auto")
    explicit = run(HfDebertaModel, tiny(), inputs, **MODES[mode], backend="triton" if fault is None else "sdpa")
    assert faults.__getitem__.call_count == tiny().num_hidden_layers
    assert_never_waits(automatic)
    assert automatic.launches_by_operator == explicit.launches_by_operator
    assert (automatic.triton_launches > 0) == (fault is None)


def test_tensors_without_values_are_left_to_sdpa():
    with simulated_cuda():
        assert not may_use_triton(torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda"))


def states_of(heads, dtype):
    states = torch.empty(1, 2, 8, heads, dtype=dtype, device="cuda")
    return states, states, states, None, AttentionMask()


def test_wide_heads_in_float32_go_to_sdpa():
    """Their kernels need nearly all shared memory of small GPUs, and spill registers."""
    with simulated_cuda():
        assert "larger than 64 in torch.float32" in attention_triton.unsupported_reason(*states_of(128, torch.float32))
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
