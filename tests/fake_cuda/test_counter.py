"""The counter counts what is known: bytes, FLOPs, and what makes the host wait; test_limits has attention."""

from contextlib import suppress

import pytest
import torch
from counter import counting, simulated_cuda, with_values
from torch.nn.functional import embedding


@pytest.fixture(autouse=True)
def device():
    with simulated_cuda():
        yield


def states(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


# operation -> bytes, FLOPs
OPERATIONS = {
    "product": (lambda: states(8, 16) @ states(16, 32), 2 * (8 * 16 + 16 * 32 + 8 * 32), 2 * 8 * 16 * 32),
    "sum": (lambda: states(8, 16) + states(8, 16), 2 * 3 * 8 * 16, 0),
    "expanded": (lambda: states(8, 16) + states(16), 2 * (2 * 8 * 16 + 16), 0),
    "view": (lambda: states(8, 16).view(16, 8).mT[2:], 0, 0),
    "fill": (lambda: torch.zeros(8, 16, device="cuda"), 4 * 8 * 16, 0),
    "noise": (lambda: states(8, 16).exponential_(), 2 * 8 * 16, 0),
    "scatter": (
        lambda: states(8, 16).scatter_(1, states(8, 1, dtype=torch.long), states(8, 1)),
        8 * 8 + 3 * 2 * 8,
        0,
    ),
    "copy": (lambda: states(8, 16).copy_(states(16)), 2 * (8 * 16 + 16), 0),
    "lookup": (lambda: embedding(states(3, dtype=torch.long), states(99, 4)), 3 * (8 + 2 * 8), 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_and_flops(name):
    operation, moved, flops = OPERATIONS[name]
    with counting() as counter:
        operation()
    assert (counter.bytes, counter.flops) == (moved, flops)
    assert (counter.syncs, counter.copies, counter.on_host) == ([], [], [])


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
    x = states(4, 4)
    with counting() as counter, suppress(AssertionError):  # what depends on unknown indices cannot go on
        operation(x)
    assert len(getattr(counter, kind)) == 1
