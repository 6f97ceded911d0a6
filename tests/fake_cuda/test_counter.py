"""The counter sees what makes the host wait: otherwise the tests that nothing waits would pass without a word."""

from contextlib import suppress

import pytest
import torch
from counter import counting, simulated_cuda, with_values

# what makes the host wait, and what it copies to the device
LISTED = {
    "a condition": ("syncs", lambda x: bool((x > 0).all())),
    "a number": ("syncs", lambda x: x.sum().item()),
    "a mask": ("syncs", lambda x: x[x > 0]),
    "indices": ("syncs", lambda x: x.nonzero()),
    "to the host": ("syncs", lambda x: x.cpu()),
    "values": ("syncs", lambda x: with_values([1, 2]).tolist()),
    "to the device": ("copies", lambda x: x + torch.arange(4).to("cuda")),
    "a list as index": ("copies", lambda x: x[[0, 2]]),
    "a list": ("copies", lambda x: torch.tensor([1, 2], device="cuda")),
}


@pytest.mark.parametrize("name", LISTED)
def test_syncs_and_copies_are_listed(name):
    kind, operation = LISTED[name]
    with simulated_cuda():
        x = torch.empty(4, 4, dtype=torch.bfloat16, device="cuda")
        with counting() as counter, suppress(AssertionError):  # what depends on unknown indices cannot go on
            operation(x)
    assert len(getattr(counter, kind)) == 1
