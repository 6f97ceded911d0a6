"""`attn_implementation="auto"` on a simulated CUDA device: a decided choice costs no launch, no copy and no wait.

Fake tensors cannot be checked or timed, so what was decided is replaced.
"""

from unittest.mock import MagicMock, patch

import pytest
from test_models import MODES, assert_never_waits, padded, run, tiny, tokens

from hf_deberta import HfDebertaModel
from hf_deberta.engines import attention_auto


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
