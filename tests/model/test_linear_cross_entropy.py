"""The loss of a large vocabulary by chunks: torch's own on the whole logits, with its gradients, without the logits."""

import pytest
import torch
from numerics import assert_equal_but_for_rounding, assert_same_by_name, assert_within_budget, gradients, largest
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hf_deberta.model import linear_cross_entropy as module
from hf_deberta.model.batch_loss import cross_entropy
from hf_deberta.model.linear_cross_entropy import linear_cross_entropy

SHAPES = [(1, 1, 1), (7, 5, 3), (6, 33, 4), (13, 97, 8)]  # tokens, words, width


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three tokens and a few words at a time, but for the smallest vocabulary."""
    monkeypatch.setattr(module, "LEAST_TOKENS", 3)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(module, "ADDED_AT_ONCE", 60)


def leaves(tokens, words, width, dtype=torch.float64, bias=True):
    torch.manual_seed(tokens)
    made = {"states": torch.randn(tokens, width), "weight": torch.randn(words, width)}
    if bias:
        made["bias"] = torch.randn(words)
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in made.items()}


def some_labels(tokens, words):
    """About one in three is ignored, by several negative numbers."""
    labels = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(words))
    return labels.masked_fill(torch.arange(tokens) % 3 == 1, -100).masked_fill(torch.arange(tokens) % 6 == 4, -1)


def chunked(given, labels, items=None):
    return linear_cross_entropy(given["states"], given["weight"], given.get("bias"), labels, items)


def whole(given, labels, items=None):
    """In float32 at least, as batch_loss has it, but float64 stays float64."""
    logits = functional.linear(given["states"], given["weight"], given.get("bias"))
    known = labels.masked_fill(labels < 0, -100)
    total = functional.cross_entropy(logits, known, ignore_index=-100, reduction="sum")
    return total / max(int((labels >= 0).sum()) if items is None else items, 1), logits


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("items", [None, 11, torch.tensor(11), torch.tensor(11.0)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_words_and_gradients_are_those_of_whole_logits(shape, items, bias):
    given, labels = leaves(*shape, bias=bias), some_labels(*shape[:2])
    loss, losses, words = chunked(given, labels, items)
    expected, logits = whole(given, labels, None if items is None else int(items))
    assert loss.dtype == torch.float64 and loss.dim() == 0
    assert_equal_but_for_rounding(loss, expected)
    assert_same_by_name(gradients(3 * loss, given), gradients(3 * expected, given), torch.float64)
    each = functional.cross_entropy(logits, labels.masked_fill(labels < 0, -100), reduction="none")
    torch.testing.assert_close(losses, each.detach())
    assert torch.equal(words, logits.argmax(-1)) and words.dtype == torch.long
    assert not losses.requires_grad and not words.requires_grad
    with torch.no_grad():
        for found, trained in zip(chunked(given, labels, items), (loss, losses, words), strict=True):
            assert torch.equal(found, trained)


def test_it_is_the_loss_of_the_heads():
    given, labels = leaves(13, 97, 8, torch.float32), some_labels(13, 97)
    logits = functional.linear(*given.values())
    for items in (None, 5, torch.tensor(20)):
        found, expected = chunked(given, labels, items)[0], cross_entropy(logits, labels, items)
        assert_equal_but_for_rounding(found, expected)
        found, expected = (gradients(loss, given) for loss in (found, cross_entropy(logits.clone(), labels, items)))
        assert_same_by_name(found, expected)
        logits = functional.linear(*given.values())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 100])
def test_chunks_of_any_size(size, monkeypatch):
    given, labels = leaves(7, 9, 4), some_labels(7, 9)
    expected = whole(given, labels)[0]
    monkeypatch.setattr(module, "LEAST_TOKENS", 1)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", size * 9)
    loss, _, words = chunked(given, labels)
    assert_equal_but_for_rounding(loss, expected)
    assert_same_by_name(gradients(loss, given), gradients(expected, given), torch.float64)
    assert torch.equal(words, functional.linear(*given.values()).argmax(-1))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_gradcheck(shape):
    given, labels = leaves(*shape), some_labels(*shape[:2])
    assert torch.autograd.gradcheck(lambda *tensors: linear_cross_entropy(*tensors, labels)[0], tuple(given.values()))


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 5], ids=str)
def test_nothing_labelled_loses_nothing_and_learns_nothing(tokens, items):
    given = leaves(tokens, 9, 4, torch.float32)
    loss, losses, words = chunked(given, torch.full((tokens,), -100), items)
    assert loss.item() == 0 and not losses.any() and losses.shape == words.shape == (tokens,)
    loss.backward()
    assert all(not tensor.grad.any() and tensor.grad.isfinite().all() for tensor in given.values())


class Sizes(TorchDispatchMode):
    """How many numbers the largest new tensor holds."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if torch.is_tensor(result):
            self.largest = max(self.largest, result.numel())
        return result


def test_whole_logits_never_exist():
    given, labels = leaves(64, 50, 4), some_labels(64, 50)
    with Sizes() as sizes:
        chunked(given, labels)[0].backward()
    assert sizes.largest == 64 * 4  # the gradient of the states; that of the weight is 50 * 4, logits are 3 * 50
    with Sizes() as sizes:
        whole(given, labels)[0].backward()
    assert sizes.largest == 64 * 50


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("states",), ("weight", "bias"), ("states", "bias")])
def test_what_is_frozen_costs_nothing(frozen, monkeypatch):
    given, labels = leaves(7, 9, 4), some_labels(7, 9)
    expected = gradients(whole(given, labels)[0], given)
    for name in frozen:
        given[name].requires_grad_(False)
    added, add_product = [], module.add_product
    monkeypatch.setattr(module, "add_product", lambda *of: added.append(1) or add_product(*of))
    loss, _, _ = chunked(given, labels)
    learning = {name: tensor for name, tensor in given.items() if tensor.requires_grad}
    assert_same_by_name(gradients(loss, learning), {name: expected[name] for name in learning}, torch.float64)
    assert bool(added) == ("weight" in learning)


def test_all_frozen_is_an_ordinary_number():
    given, labels = leaves(7, 9, 4), some_labels(7, 9)
    frozen = {name: tensor.detach() for name, tensor in given.items()}
    loss = chunked(frozen, labels)[0]
    assert not loss.requires_grad
    assert_equal_but_for_rounding(loss, whole(given, labels)[0])


def test_a_weight_that_is_the_embedding_too_gets_both_gradients():
    labels, ids = some_labels(7, 9), torch.tensor([3, 3, 0, 8, 1, 2, 3])
    found, expected = nn.Parameter(leaves(7, 9, 4)["weight"].detach()), leaves(7, 9, 4)["weight"]
    linear_cross_entropy(functional.embedding(ids, found).tanh(), found, None, labels)[0].backward()
    whole({"states": functional.embedding(ids, expected).tanh(), "weight": expected}, labels)[0].backward()
    torch.testing.assert_close(found.grad, expected.grad)


def test_gradients_can_be_asked_for_again():
    """Only where they cannot is the weight's gradient multiplied in place."""
    given, labels = leaves(7, 9, 4), some_labels(7, 9)
    loss = 0.5 * chunked(given, labels)[0]
    expected = gradients(0.5 * whole(given, labels)[0], given)
    for kept in (True, True, False):
        found = torch.autograd.grad(loss, list(given.values()), retain_graph=kept)
        assert_same_by_name(dict(zip(given, found, strict=True)), expected, torch.float64)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_the_gradient_of_the_weight_is_made_once(monkeypatch):
    made, walk = [], module.walk

    def watched_walk(*of):
        *found, gradients = walk(*of)
        made.extend(gradient.data_ptr() for gradient in gradients)
        return *found, gradients

    monkeypatch.setattr(module, "walk", watched_walk)
    given, labels = leaves(7, 9, 4, torch.float32), some_labels(7, 9)
    chunked(given, labels)[0].backward()
    assert [tensor.grad.data_ptr() for tensor in given.values()] == made


def test_second_derivatives_are_refused():
    given, labels = leaves(7, 9, 4), some_labels(7, 9)
    with pytest.raises(RuntimeError, match=r"no second derivatives .* sparse_prediction=False"):
        torch.autograd.grad(chunked(given, labels)[0], given["states"], create_graph=True)


def test_labels_beyond_the_vocabulary_are_an_error():
    given = leaves(7, 9, 4)
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        chunked(given, torch.tensor([0, 1, 2, 3, 9, 5, 6]))


# ---- precision ---------------------------------------------------------------------------------------------------


def in_precision(given, dtype, how, loss_of):
    """Loss and gradients, by autocast or with everything in `dtype`."""
    if how == "autocast":
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(given)
    else:
        given = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items()}
        loss = loss_of(given)
    return loss.detach(), {name: gradient.detach() for name, gradient in gradients(loss, given).items()}


@pytest.mark.parametrize("how", ["autocast", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_plain_low_precision(dtype, how):
    given, labels = leaves(64, 97, 16, torch.float32), some_labels(64, 97)
    found, found_gradients = in_precision(given, dtype, how, lambda tensors: chunked(tensors, labels)[0])
    plain = lambda tensors: cross_entropy(functional.linear(*tensors.values()), labels)  # noqa: E731
    low, low_gradients = in_precision(given, dtype, how, plain)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    loss = whole(exact, labels)[0]
    assert found.dtype == torch.float32
    # plain arithmetic may be lucky in a mean; one rounding of each logit is allowed in any case
    rounding = torch.finfo(dtype).eps * largest(functional.linear(*exact.values()))
    assert largest(found - loss) <= 2 * largest(low - loss) + rounding
    for name, gradient in gradients(loss, exact).items():
        assert found_gradients[name].dtype == (torch.float32 if how == "autocast" else dtype)
        assert_within_budget(found_gradients[name].to(dtype), low_gradients[name], gradient, name)


def test_float64_stays_float64_under_autocast():
    given, labels = leaves(7, 9, 4), some_labels(7, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked(given, labels)[0]
    assert_equal_but_for_rounding(loss, whole(given, labels)[0])


def test_the_weight_s_gradient_is_added_up_in_float32(monkeypatch):
    """Thousands of small parts, which bfloat16 would lose."""
    monkeypatch.setattr(module, "LEAST_TOKENS", 1)
    states, weight = torch.ones(4096, 1).bfloat16(), torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(states, weight, None, torch.zeros(4096, dtype=torch.long))[0].backward()
    assert weight.grad.flatten().tolist() == [-0.5, 0.5]


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")
def test_products_are_onednn_s_where_dense_takes_it(monkeypatch):
    monkeypatch.setattr("hf_deberta.model.dense.prefers_onednn", lambda: True)
    made, multiply = [], module.multiply
    monkeypatch.setattr(module, "multiply", lambda *of: made.append(1) or multiply(*of))
    given, labels = leaves(7, 33, 4, torch.float32), some_labels(7, 33)
    loss, _, _ = chunked(given, labels)
    assert len(made) == 3 * (2 + 3)  # three chunks: logits, the states' gradient, and the weight's in three parts
    expected = whole(given, labels)[0]
    assert_equal_but_for_rounding(loss, expected)
    assert_same_by_name(gradients(loss, given), gradients(expected, given))
    made.clear()
    with torch.backends.mkldnn.flags(enabled=False):
        chunked(given, labels)
    chunked(leaves(7, 33, 4), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked(given, labels)
    assert not made
