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
    if counted is not None:
        losses = losses.masked_fill(~counted, 0)
    if num_items_in_batch is not None:
        items = torch.as_tensor(num_items_in_batch, device=losses.device)
    elif counted is not None:
        items = counted.sum()
    else:
        items = torch.tensor(losses.numel(), device=losses.device)
    return losses.sum() / items.clamp(min=1)  # an optimisation batch may have no item at all


def cross_entropy(
    logits: torch.Tensor,  # [..., C]
    labels: torch.Tensor,  # [...], a negative label is ignored
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    labels = labels.reshape(-1).to(logits.device)
    counted = labels >= 0
    labels = labels.masked_fill(~counted, IGNORED)
    losses = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels, ignore_index=IGNORED, reduction="none"
    )
    return mean_over_items(losses, counted, num_items_in_batch)


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
