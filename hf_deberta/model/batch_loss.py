"""Losses that do not depend on how a batch is split under gradient accumulation.

Every loss is a sum over labelled items divided by the number of items. With gradient accumulation the divisor must be
the number of items in the whole optimisation batch, `num_items_in_batch`, which Trainer counts (labels that are not
-100) and passes to the model. Without it, the divisor is the number of items in the call. A batch without any labelled
item has loss 0 and gradients of 0, not NaN.

Mark everything to be ignored with the label -100, so that Trainer's count agrees with the loss. Question answering has
no key "labels", so that Trainer counts nothing and averages the losses of the pieces, which is the same only for pieces
of equal size: count the answers and pass their number, as the trainer of run_squad.py does.
"""

import torch
from torch.nn import functional

IGNORED = -100  # the label of items that have no loss


def mean_over_items(
    losses: torch.Tensor,
    item_mask: torch.Tensor | None = None,  # like losses, True for an item that counts; all if None
    num_items_in_batch: torch.Tensor | int | float | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of the items in the mask, divided by `num_items_in_batch` or by their number."""
    if item_mask is None:
        item_mask = torch.ones_like(losses, dtype=torch.bool)
    return losses.masked_fill(~item_mask, 0).sum() / loss_divisor(item_mask, num_items_in_batch)


def loss_divisor(item_mask: torch.Tensor, num_items_in_batch: torch.Tensor | int | float | None) -> torch.Tensor:
    """Return the number that a sum of losses is divided by, at least 1: a batch may have no labelled item."""
    if num_items_in_batch is None:
        return item_mask.sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(item_mask.device).clamp(min=1)
    return torch.full((), max(num_items_in_batch, 1), device=item_mask.device)  # not a copy from the host


def cross_entropy(
    logits: torch.Tensor,  # [..., C]
    labels: torch.Tensor,  # [...], a negative label is ignored
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return the mean cross entropy over labelled items."""
    losses = cross_entropy_per_item(logits, labels)
    return mean_over_items(losses, labels.to(losses.device) >= 0, num_items_in_batch)


def cross_entropy_per_item(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each item, in the shape of the labels; 0 where the label is negative."""
    labels = labels.to(logits.device)
    flat_labels = labels.masked_fill(labels < 0, IGNORED).reshape(-1)
    flat_logits = logits.reshape(-1, logits.shape[-1]).float()
    losses = functional.cross_entropy(flat_logits, flat_labels, ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape)


def soft_cross_entropy(
    logits: torch.Tensor,  # [B, C]
    labels: torch.Tensor,  # [B, C], a distribution per row
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return the mean over rows of the cross entropy against distributions."""
    _check_same_shape(logits, labels)
    losses = -(logits.float().log_softmax(-1) * labels.to(logits.device)).sum(-1)
    if num_items_in_batch is None:
        return mean_over_items(losses)
    return mean_over_items(losses, None, num_items_in_batch / labels.shape[-1])  # Trainer counts C items per row


def binary_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,  # like logits: 0, 1, or -100 for ignored
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return the mean binary cross entropy over labelled entries."""
    _check_same_shape(logits, labels)
    labels = labels.to(logits.device, torch.float32)
    labelled = labels != IGNORED
    losses = functional.binary_cross_entropy_with_logits(
        logits.float(), labels.masked_fill(~labelled, 0), reduction="none"
    )
    return mean_over_items(losses, labelled, num_items_in_batch)


def mean_squared_error(
    predictions: torch.Tensor,
    labels: torch.Tensor,  # as many numbers as predictions
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return the mean of (prediction - label)^2."""
    predictions = predictions.reshape(-1).float()
    labels = labels.reshape(-1).to(predictions.device, torch.float32)
    _check_same_shape(predictions, labels)
    return mean_over_items((predictions - labels).square(), None, num_items_in_batch)


def _check_same_shape(predictions: torch.Tensor, labels: torch.Tensor) -> None:
    if predictions.shape != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of the predictions {tuple(predictions.shape)}"
        )
