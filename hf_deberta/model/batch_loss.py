"""Losses that come out the same however a batch is cut into pieces.

A loss is a sum over items divided by their number. Under gradient accumulation the number must be that of all
pieces, `num_items_in_batch`, which Trainer counts (labels that are not -100) and hands to the model. Without it,
the items at hand are counted. No labelled item at all gives 0 with a gradient of 0, not NaN.

What Trainer counts must be what counts: mark whatever is to be ignored with -100, padded entities and unlabelled rows
too. Question answering has no key "labels", so Trainer averages its pieces, which is the same for equal pieces.
"""

import torch
from torch.nn import functional

IGNORED = -100


def mean_over_items(
    losses: torch.Tensor,
    counted: torch.Tensor | None = None,  # like losses, True for an item that counts
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Sum of the counted losses over `num_items_in_batch`, or over how many were counted."""
    if counted is None:
        counted = torch.ones_like(losses, dtype=torch.bool)
    return losses.masked_fill(~counted, 0).sum() / items_in_batch(counted, num_items_in_batch)


def items_in_batch(counted: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """What a sum of losses is divided by; at least 1, since an optimisation batch may have no item at all."""
    if num_items_in_batch is None:
        return counted.sum().clamp(min=1)
    return torch.as_tensor(num_items_in_batch, device=counted.device).clamp(min=1)


def cross_entropy(
    logits: torch.Tensor,  # [..., C]
    labels: torch.Tensor,  # [...], a negative label is ignored
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    losses = cross_entropies(logits, labels)
    return mean_over_items(losses, labels.to(losses.device) >= 0, num_items_in_batch)


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each item, like labels; 0 where the label is negative."""
    labels = labels.to(logits.device)
    known = labels.masked_fill(labels < 0, IGNORED).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return functional.cross_entropy(flat, known, ignore_index=IGNORED, reduction="none").view(labels.shape)


def soft_cross_entropy(
    logits: torch.Tensor,  # [B, C]
    labels: torch.Tensor,  # [B, C], a distribution per row
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The mean over rows; Trainer counts every entry of `labels`, C per row."""
    _check_same_shape(logits, labels)
    losses = -(logits.float().log_softmax(-1) * labels.to(logits.device)).sum(-1)
    if num_items_in_batch is not None:
        num_items_in_batch = num_items_in_batch / labels.shape[-1]
    return mean_over_items(losses, None, num_items_in_batch)


def binary_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,  # like logits: 0, 1, or -100 for ignored
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    _check_same_shape(logits, labels)
    labels = labels.to(logits.device, torch.float32)
    counted = labels != IGNORED
    losses = functional.binary_cross_entropy_with_logits(
        logits.float(), labels.masked_fill(~counted, 0), reduction="none"
    )
    return mean_over_items(losses, counted, num_items_in_batch)


def squared_error(
    predictions: torch.Tensor,
    labels: torch.Tensor,  # as many numbers as predictions
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    predictions = predictions.reshape(-1).float()
    labels = labels.reshape(-1).to(predictions.device, torch.float32)
    _check_same_shape(predictions, labels)
    return mean_over_items((predictions - labels).square(), None, num_items_in_batch)


def _check_same_shape(predictions: torch.Tensor, labels: torch.Tensor) -> None:
    if predictions.shape != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of the predictions {tuple(predictions.shape)}"
        )
