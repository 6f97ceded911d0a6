"""`attn_implementation="auto"` on a simulated CUDA device: a decided choice costs no launch, no copy and no wait.

Fake tensors cannot be checked or timed, so what was decided is replaced.
"""

from unittest.mock import patch

import pytest
from test_models import MODES, assert_never_waits, padded, run, tiny, tokens

from hf_deberta import HfDebertaModel
from hf_deberta.engines import attention_auto

INPUTS = {"no mask": tokens, "padding": padded}


class Decided(dict):
    """The same choice for every workload."""

    def __init__(self, choice):
        self.choice, self.lookups = choice, 0

    def __contains__(self, workload):
        return True

    def __getitem__(self, workload):
        self.lookups += 1
        return self.choice


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", ["sdpa", "triton"])
def test_auto_costs_what_its_choice_costs(choice, mode, inputs):
    decided = Decided(choice)
    with (
        patch.object(attention_auto, "may_use_triton", lambda query: query.is_cuda),
        patch.object(attention_auto, "_choices", decided),
    ):
        automatic = run(HfDebertaModel, tiny(), INPUTS[inputs], **MODES[mode], backend="auto")
    explicit = run(HfDebertaModel, tiny(), INPUTS[inputs], **MODES[mode], backend=choice)
    assert decided.lookups == tiny().num_hidden_layers
    assert_never_waits(automatic)
    assert automatic.launches_by_operator == explicit.launches_by_operator
    assert (automatic.triton_launches > 0) == (choice == "triton")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", [None, attention_auto.Failure("the context is off")])
def test_fake_tensors_are_neither_checked_nor_timed(fault, mode):
    """Kernels that passed their check are used, others are not."""

    class Checked(dict):
        def get(self, kernel, default=None):
            return fault

    with (
        patch.object(attention_auto, "may_use_triton", lambda query: query.is_cuda),
        patch.object(attention_auto, "_faults", Checked()),
        patch.object(attention_auto, "_choices", {}) as choices,
    ):
        counter = run(HfDebertaModel, tiny(), tokens, **MODES[mode], backend="auto")
    assert_never_waits(counter)
    assert (counter.triton_launches > 0) == (fault is None) and not choices
