"""Losses equal torch's. That a batch may be split, or have no labels, is tested for every head: test_modeling_heads."""

import pytest
import torch
from numerics import assert_equal_but_for_rounding, assert_same_by_name, gradients
from torch.nn import functional

from hf_deberta.model.losses import (
    binary_cross_entropy,
    cross_entropy,
    mean_over_items,
    mean_squared_error,
    soft_cross_entropy,
)


def random_like(labels, classes=None):
    torch.manual_seed(0)
    shape = labels.shape if classes is None else (*labels.shape, classes)
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


DISTRIBUTIONS = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
# name: (loss, number of classes, labels, torch's mean loss)
FUNCTIONS = {
    "cross entropy": (cross_entropy, 4, torch.tensor([0, 3, 1, 2, 2, 0]), functional.cross_entropy),
    "cross entropy per token": (
        cross_entropy,
        4,
        torch.tensor([[0, -100, 3], [1, 1, 2], [-100, -100, -100], [0, 2, 1], [3, -100, 1], [2, 2, 2]]),
        lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100),
    ),
    "soft cross entropy": (soft_cross_entropy, None, DISTRIBUTIONS, functional.cross_entropy),
    "binary cross entropy": (
        binary_cross_entropy,
        None,
        torch.tensor([[0, 1, 1]] * 3 + [[1, 0, 0]] * 3),
        lambda logits, labels: functional.binary_cross_entropy_with_logits(logits, labels.double()),
    ),
    "binary cross entropy with ignored labels": (
        binary_cross_entropy,
        None,
        torch.tensor([[0, 1, -100]] * 2 + [[-100, -100, 0]] * 3 + [[-100] * 3]),
        lambda logits, labels: functional.binary_cross_entropy_with_logits(
            logits[labels >= 0], labels[labels >= 0].double()
        ),
    ),
    "squared error": (
        mean_squared_error,
        None,
        torch.linspace(-1, 2, 6),
        lambda logits, labels: functional.mse_loss(logits, labels.double()),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mean_equals_torch(name):
    loss, classes, labels, torch_mean = FUNCTIONS[name]
    logits = random_like(labels, classes)
    actual, expected = loss(logits, labels), torch_mean(logits, labels)
    assert actual.dim() == 0
    assert_equal_but_for_rounding(actual, expected)
    assert_same_by_name(gradients(actual, {"logits": logits}), gradients(expected, {"logits": logits}))


def test_loss_of_half_precision_logits_is_float32():
    labels = torch.tensor([0, 3, 1, 2, 2, 0])
    logits = random_like(labels, 4).detach().bfloat16().requires_grad_()
    actual = cross_entropy(logits, labels)
    assert actual.dtype == torch.float32
    assert_equal_but_for_rounding(actual, functional.cross_entropy(logits.float(), labels))
    actual.backward()
    assert logits.grad.dtype == torch.bfloat16


def test_every_negative_label_is_ignored():
    labels = torch.tensor([0, -1, 1, -100, 2, -7])
    logits = random_like(labels, 4)
    assert_equal_but_for_rounding(
        cross_entropy(logits, labels), cross_entropy(logits[labels >= 0], labels[labels >= 0])
    )


def test_mean_over_items_ignores_items_outside_the_mask():
    losses = torch.tensor([1.0, float("nan"), 3.0])
    item_mask = torch.tensor([True, False, True])
    assert mean_over_items(losses, item_mask).item() == 2
    assert mean_over_items(losses, item_mask, 8).item() == 0.5
