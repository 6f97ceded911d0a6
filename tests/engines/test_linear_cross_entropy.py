"""Cross entropy in chunks of tokens: the loss and gradients of whole logits, which never exist."""

import pytest
import torch
from numerics import assert_equal_but_for_rounding, assert_same_by_name, assert_within_budget, gradients, largest
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hf_deberta.engines import linear_cross_entropy as module
from hf_deberta.engines import onednn
from hf_deberta.engines.linear_cross_entropy import linear_cross_entropy
from hf_deberta.model.losses import cross_entropy

INPUTS = ("states", "weight", "bias")
SHAPES = [(1, 1, 1), (7, 5, 3), (6, 33, 4), (13, 97, 8)]  # tokens, vocabulary, hidden size


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Use chunks of three tokens, and products of a few rows, except for the smallest vocabulary."""
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 3)
    monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 1)
    monkeypatch.setattr(module, "MAX_PRODUCT_ELEMENTS", 60)


def random_inputs(tokens, vocabulary, width, dtype=torch.float64, bias=True):
    """Return states, weight and bias by name, all requiring gradients."""
    torch.manual_seed(tokens)
    inputs = {"states": torch.randn(tokens, width), "weight": torch.randn(vocabulary, width)}
    if bias:
        inputs["bias"] = torch.randn(vocabulary)
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}


def random_labels(tokens, vocabulary):
    """Return labels of which about one in three is ignored, marked by different negative numbers."""
    labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(vocabulary))
    return labels.masked_fill(torch.arange(tokens) % 3 == 1, -100).masked_fill(torch.arange(tokens) % 6 == 4, -1)


def chunked_loss(inputs, labels, items=None):
    return linear_cross_entropy(inputs["states"], inputs["weight"], inputs.get("bias"), labels, items)[:3]


def whole_loss(inputs, labels, items=None):
    """Return the loss from whole logits, and the logits; unlike `batch_loss`, float64 stays float64."""
    logits = functional.linear(inputs["states"], inputs["weight"], inputs.get("bias"))
    ignored = labels.masked_fill(labels < 0, -100)
    total = functional.cross_entropy(logits, ignored, ignore_index=-100, reduction="sum")
    return total / max(int((labels >= 0).sum()) if items is None else items, 1), logits


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("items", [None, 11, torch.tensor(11), torch.tensor(11.0)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_loss_of_whole_logits(shape, items, bias):
    inputs, labels = random_inputs(*shape, bias=bias), random_labels(*shape[:2])
    loss, losses, predictions = chunked_loss(inputs, labels, items)
    expected, logits = whole_loss(inputs, labels, None if items is None else int(items))
    assert loss.dtype == torch.float64 and loss.dim() == 0
    assert_equal_but_for_rounding(loss, expected)
    assert_same_by_name(gradients(3 * loss, inputs), gradients(3 * expected, inputs), torch.float64)
    each = functional.cross_entropy(logits, labels.masked_fill(labels < 0, -100), reduction="none")
    torch.testing.assert_close(losses, each.detach())
    assert torch.equal(predictions, logits.argmax(-1)) and predictions.dtype == torch.long
    assert not losses.requires_grad and not predictions.requires_grad
    with torch.no_grad():
        for actual, trained in zip(chunked_loss(inputs, labels, items), (loss, losses, predictions), strict=True):
            assert torch.equal(actual, trained)


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 5], ids=str)
def test_without_labels_loss_and_gradients_are_zero(tokens, items):
    inputs = random_inputs(tokens, 9, 4, torch.float32)
    loss, losses, predictions = chunked_loss(inputs, torch.full((tokens,), -100), items)
    assert loss.item() == 0 and not losses.any() and losses.shape == predictions.shape == (tokens,)
    loss.backward()
    assert all(not tensor.grad.any() and tensor.grad.isfinite().all() for tensor in inputs.values())


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if torch.is_tensor(result):
            self.largest = max(self.largest, result.numel())
        return result


def test_whole_logits_never_exist():
    inputs, labels = random_inputs(64, 50, 4), random_labels(64, 50)
    with LargestTensor() as sizes:
        chunked_loss(inputs, labels)[0].backward()
    assert sizes.largest == 64 * 4  # the gradient of the states; that of the weight is 50 * 4, logits are 3 * 50
    with LargestTensor() as sizes:
        whole_loss(inputs, labels)[0].backward()
    assert sizes.largest == 64 * 50


@pytest.mark.parametrize(
    "frozen", [("weight",), ("bias",), ("states",), ("weight", "bias"), ("states", "bias"), INPUTS]
)
def test_frozen_inputs_get_no_gradient_and_no_products(frozen, monkeypatch):
    inputs, labels = random_inputs(7, 9, 4), random_labels(7, 9)
    expected = gradients(whole_loss(inputs, labels)[0], inputs)
    for name in frozen:
        inputs[name].requires_grad_(False)
    calls, add_product = [], module.add_product
    monkeypatch.setattr(module, "add_product", lambda *arguments: calls.append(1) or add_product(*arguments))
    loss, _, _ = chunked_loss(inputs, labels)
    if frozen == INPUTS:
        assert not loss.requires_grad and not calls
        return
    trainable = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    assert_same_by_name(gradients(loss, trainable), {name: expected[name] for name in trainable}, torch.float64)
    assert bool(calls) == ("weight" in trainable)


def test_backward_can_run_again_if_the_graph_is_retained(monkeypatch):
    """The saved gradients are scaled in place, and are those of the inputs, only in the last backward."""
    saved, compute = [], module.compute_in_chunks
    monkeypatch.setattr(module, "compute_in_chunks", lambda *given: saved.append(compute(*given)) or saved[-1])
    inputs, labels = random_inputs(7, 9, 4), random_labels(7, 9)
    loss = 0.5 * chunked_loss(inputs, labels)[0]
    expected = gradients(0.5 * whole_loss(inputs, labels)[0], inputs)
    for retain_graph in (True, True, False):
        actual = torch.autograd.grad(loss, list(inputs.values()), retain_graph=retain_graph)
        assert_same_by_name(dict(zip(inputs, actual, strict=True)), expected, torch.float64)
        in_place = [one.data_ptr() == other.data_ptr() for one, other in zip(actual, saved[0][1], strict=True)]
        assert in_place == [not retain_graph] * 3
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_second_derivatives_are_an_error():
    inputs, labels = random_inputs(7, 9, 4), random_labels(7, 9)
    with pytest.raises(RuntimeError, match=r"second derivatives .*sparse_prediction=False"):
        torch.autograd.grad(chunked_loss(inputs, labels)[0], inputs["states"], create_graph=True)


# ---- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "all tensors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_the_error_of_whole_logits(dtype, autocast):
    inputs, labels = random_inputs(64, 97, 16, torch.float32), random_labels(64, 97)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    loss = whole_loss(exact, labels)[0]
    low_inputs = inputs
    if not autocast:
        low_inputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        low = cross_entropy(functional.linear(*low_inputs.values()), labels)
        actual = chunked_loss(low_inputs, labels)[0]
        assert_equal_but_for_rounding(chunked_loss(exact, labels)[0], loss)  # float64 stays float64
    low_gradients, actual_gradients = gradients(low, low_inputs), gradients(actual, low_inputs)
    assert actual.dtype == torch.float32
    # errors may cancel in the mean of the plain computation: always allow one rounding of each logit
    rounding = torch.finfo(dtype).eps * largest(functional.linear(*exact.values()))
    assert largest(actual - loss) <= 2 * largest(low - loss) + rounding
    for name, gradient in gradients(loss, exact).items():
        assert actual_gradients[name].dtype == (torch.float32 if autocast else dtype)
        assert_within_budget(actual_gradients[name].to(dtype), low_gradients[name], gradient, name)


def test_gradient_of_the_weight_accumulates_in_float32(monkeypatch):
    """bfloat16 would lose the thousands of small contributions."""
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 1)
    states, weight = torch.ones(4096, 1).bfloat16(), torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(states, weight, None, torch.zeros(4096, dtype=torch.long))[0].backward()
    assert weight.grad.flatten().tolist() == [-0.5, 0.5]


@pytest.mark.skipif(not onednn.has_onednn_linear(), reason="this torch has no oneDNN")
def test_uses_onednn_where_it_is_faster(onednn_products):
    inputs, labels = random_inputs(7, 33, 4, torch.float32), random_labels(7, 33)
    loss, _, _ = chunked_loss(inputs, labels)
    assert len(onednn_products) == 3 * (2 + 3)  # three chunks: logits, states, and the weight in three parts
    expected = whole_loss(inputs, labels)[0]
    assert_equal_but_for_rounding(loss, expected)
    assert_same_by_name(gradients(loss, inputs), gradients(expected, inputs))
    onednn_products.clear()
    with torch.backends.mkldnn.flags(enabled=False):
        chunked_loss(inputs, labels)
    chunked_loss(random_inputs(7, 33, 4), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked_loss(inputs, labels)
    assert not onednn_products
