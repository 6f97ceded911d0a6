"""`linear_by_onednn` gives the layer's output and gradients, and calls it wherever oneDNN would hide something."""

import pytest
import torch
from numerics import needs_onednn_bfloat16
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from hf_deberta.engines.onednn import OneDNNProduct, linear_by_onednn, onednn_linear, pad_rows, rounded_rows
from hf_deberta.model.slots import reference_mode

if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    pytest.skip("this torch has no oneDNN", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("onednn_products")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 7), (1, 1), (3, 2, 4), (2, 8)])  # 16 rows need no padding
def test_product_and_gradients(shape, bias, onednn_products):
    layer, states = nn.Linear(6, 3, bias=bias), torch.randn(*shape, 6, requires_grad=True)
    leaves = [states, *layer.parameters()]
    actual, expected = linear_by_onednn(layer, states), layer(states)
    torch.testing.assert_close(actual, expected)
    for weight in (torch.randn(*shape, 3), torch.ones(1).expand(*shape, 3)):  # a sum's gradient has strides of zero
        gradients = [torch.autograd.grad(product, leaves, weight, True) for product in (actual, expected)]
        torch.testing.assert_close(*gradients)
    assert len(onednn_products) == 1 + 2 * 2
    with torch.no_grad():
        torch.testing.assert_close(linear_by_onednn(layer, states), layer(states))


def test_all_lengths_need_few_primitives(onednn_products):
    """Forward and backward; also the sizes that are summed over, of which there is one primitive each."""
    allowed = {rounded_rows(rows) for rows in range(1, 4097)}
    assert len(allowed) == 57 and all(rounded_rows(rows) == rows for rows in allowed)
    assert all(rows <= rounded_rows(rows) < rows + max(8, rows / 8) for rows in range(1, 4097))
    layer = nn.Linear(6, 3)
    for length in range(1, 513):
        linear_by_onednn(layer, torch.randn(length, 6, requires_grad=True)).sum().backward()
    sizes = {(*states.shape, *weight.shape) for states, weight, _ in onednn_products}
    assert len(sizes) == 3 * 33


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_onednn_bfloat16)], ids=str)
@pytest.mark.parametrize("rows", [2, 33, 333])
def test_padded_rows_change_nothing(rows, dtype):
    """Each row is a sum of its own: the order of its 64 terms may change, not its values."""
    states, weight = torch.randn(rows, 64).to(dtype), torch.randn(48, 64).to(dtype)
    padded = onednn_linear(pad_rows(states), weight, None)
    assert padded.shape == (rounded_rows(rows), 48)
    assert not padded[rows:].any()
    error = 64 * torch.finfo(torch.float32).eps * (states.double().abs() @ weight.double().abs().t())
    exact = states.double() @ weight.double().t()
    if dtype == torch.bfloat16:
        error = error + exact.abs() * torch.finfo(dtype).eps
    assert ((padded[:rows].double() - exact).abs() <= error).all()


def test_second_derivatives():
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((4, 6), (3, 6), (3,))]
    results = []
    for product in (OneDNNProduct.apply, nn.functional.linear):
        first = torch.autograd.grad(product(*leaves).pow(3).sum(), leaves[:2], create_graph=True)
        results.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-4)  # sums of sixth powers in float32


def test_frozen_layers_save_no_activations_and_compute_no_gradients(onednn_products):
    saved, layer = [], nn.Linear(6, 3).requires_grad_(False)
    record = lambda tensor: saved.append(tuple(tensor.shape)) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        linear_by_onednn(layer, torch.randn(4, 6, requires_grad=True)).sum().backward()
    assert saved == [(3, 6)] and len(onednn_products) == 2


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    "layer, states",
    [
        (hooked(nn.Linear(6, 3)), torch.randn(4, 6)),  # test_guards has other modified modules
        (nn.Linear(6, 3).double(), torch.randn(4, 6).double()),
        (nn.Linear(6, 3).bfloat16(), torch.randn(4, 6).bfloat16()),
        (nn.Linear(6, 3), torch.randn(0, 6)),
        (nn.Linear(6, 3, device="meta"), torch.randn(4, 6, device="meta")),
    ],
    ids=["hook", "float64", "bfloat16", "empty", "meta"],
)
def test_unusual_layers_and_states_call_the_layer(layer, states, onednn_products):
    with torch.no_grad():
        assert linear_by_onednn(layer, states).shape == (states.shape[0], 3)
    assert not onednn_products


def test_the_layer_is_called_in_special_contexts(onednn_products):
    layer, states = nn.Linear(6, 3), torch.randn(4, 6)
    with FlopCounterMode(display=False) as counter:
        linear_by_onednn(layer, states)
    assert counter.get_total_flops() == 2 * 4 * 6 * 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_by_onednn(layer, states).dtype == torch.bfloat16
    per_row = torch.func.vmap(lambda row: linear_by_onednn(layer, row))(states)
    torch.testing.assert_close(per_row, layer(states))
    torch.compile(lambda x: linear_by_onednn(layer, x), backend="eager", fullgraph=True)(states)
    with torch.backends.mkldnn.flags(enabled=False):
        linear_by_onednn(layer, states)
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    linear_by_onednn(layer, states)
    handle.remove()
    assert calls
    with reference_mode():
        linear_by_onednn(layer, states)
    assert not onednn_products
    linear_by_onednn(layer, states)
    assert len(onednn_products) == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_graphs_call_the_layer(gradients, onednn_products):
    """What torch.compile and torch.export capture are plain operations."""
    model, states = nn.Sequential(nn.Linear(6, 3)).eval(), torch.randn(2, 6)
    model.forward = lambda states: linear_by_onednn(model[0], states)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    with torch.set_grad_enabled(gradients):
        result = torch.compile(model.forward, backend=counter, fullgraph=True, dynamic=True)(states)
        torch.testing.assert_close(result, model[0](states))
        graphs = [counter.graphs[-1].graph, torch.export.export(model, (states,)).graph]
    assert not any("mkldnn" in str(node.target) for graph in graphs for node in graph.nodes) and not onednn_products
