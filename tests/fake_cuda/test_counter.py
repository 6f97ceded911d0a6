"""The counter counts what is known: bytes, FLOPs, copies of a bias, and what makes the host wait."""

from contextlib import suppress

import pytest
import torch
from counter import bytes_of, counting, simulated_cuda, with_values
from torch.nn.functional import embedding, scaled_dot_product_attention


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


def test_overlapping_views_are_read_once():
    assert bytes_of(states(100).unfold(0, 10, 1)) == 2 * 100
    assert bytes_of(states(4).expand(1000, 4)) == 2 * 4


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


# bias of scores [2, 3, 64, keys] -> operators beside the attention
BIASES = {
    "none": (None, 64, set()),
    "aligned": (lambda: states(2, 3, 64, 64), 64, set()),
    "expanded": (lambda: states(1, 1, 64, 64), 64, set()),
    "ragged": (lambda: states(2, 3, 64, 65), 65, {"constant_pad_nd"}),
    "boolean": (lambda: states(2, 1, 64, 64, dtype=torch.bool), 64, {"full", "where", "scalar_tensor"}),
}


@pytest.mark.parametrize("name", BIASES)
def test_attention_kernels(name):
    bias, keys, others = BIASES[name]
    kernel = f"_scaled_dot_product_{'flash' if bias is None else 'efficient'}_attention"
    query, key = states(2, 3, 64, 16).requires_grad_(), states(2, 3, keys, 16).requires_grad_()
    with counting() as counter:
        mask = None if bias is None else bias()
        context = scaled_dot_product_attention(query, key, key, attn_mask=mask)
    assert set(counter.launches_by_operator) - others == {kernel}
    assert counter.flops == 4 * 2 * 3 * 64 * keys * 16
    with counting() as counter:
        context.sum().backward()
    assert f"{kernel}_backward" in counter.launches_by_operator
    assert counter.flops == 10 * 2 * 3 * 64 * keys * 16


def test_autocast_applies_to_attention():
    query = states(2, 3, 64, 16, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        assert scaled_dot_product_attention(query, query, query).dtype == torch.bfloat16
