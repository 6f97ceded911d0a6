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

from .input_checks import can_read_values, check_tensors, refuse

IGNORED = -100  # the label of items that have no loss
SUM_TOLERANCE = 0.01  # a distribution over thousands of classes in half precision sums to 1 within this


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
    return mean_over_items((predictions - labels).square(), None, num_items_in_batch)


# ---- labels: each function returns them, with -100 where `real` [B, N] is False ----------------------------------


def class_labels(
    labels: torch.Tensor,
    shape: torch.Size,
    classes: int | None = None,
    real: torch.Tensor | None = None,
    name: str = "labels",
) -> torch.Tensor:
    """Return class numbers as int64: below `classes`, or negative to be ignored. For shape [B], [B, 1] is accepted."""
    check_tensors(**{name: labels})
    if len(shape) == 1 and labels.shape[1:] == (1,):
        labels = labels.squeeze(1)
    _check_shape(name, labels, shape)
    if labels.is_floating_point() and can_read_values(labels):
        refuse(labels[labels != labels.round()], f"{name} must be whole numbers, the classes")
    labels = _ignore_padding(labels.long(), real)
    if classes is not None and can_read_values(labels):
        rule = f"{name} must be below {classes}, the number of classes, or negative to be ignored"
        refuse(labels[labels >= classes], rule)
    return labels


def binary_labels(labels: torch.Tensor, shape: torch.Size, real: torch.Tensor | None = None) -> torch.Tensor:
    """Return labels that must be 0, 1, or -100 to be ignored."""
    _check_shape("labels", labels, shape)
    labels = _ignore_padding(labels.long() if labels.dtype in (torch.bool, torch.uint8) else labels, real)
    if can_read_values(labels):
        wrong = labels[(labels != 0) & (labels != 1) & (labels != IGNORED)]
        refuse(wrong, f"labels must be 0 or 1, or {IGNORED} to be ignored")
    return labels


def multi_labels(labels: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return labels that must be probabilities, or -100 to be ignored."""
    _check_shape("labels", labels, shape)
    if can_read_values(labels):
        wrong = labels[~((labels >= 0) & (labels <= 1)) & (labels != IGNORED)]
        refuse(wrong, f"labels of a multi-label classification must lie in [0, 1], or be {IGNORED} to be ignored")
    return labels


def distributions(labels: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return labels that must be one distribution over the classes per row."""
    _check_shape("labels", labels, shape)
    if can_read_values(labels):
        rule = f"labels {tuple(shape)} are distributions over the classes, which must"
        way_out = "; pass class numbers [B], or set config.problem_type to the loss that you want"
        refuse(labels[~(labels >= 0)], f"{rule} not be negative", way_out)
        sums = labels.float().sum(-1)
        refuse(sums[~((sums - 1).abs() <= SUM_TOLERANCE)], f"{rule} sum to 1", way_out)
    return labels


def regression_targets(labels: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return finite numbers in the shape of the predictions; [B] will do for [B, 1]."""
    check_tensors(labels=labels)
    _check_shape("labels", labels, shape[:1] if shape[1] == 1 and labels.dim() == 1 else shape)
    if can_read_values(labels):
        refuse(labels[~labels.isfinite()], "labels of a regression must be finite", "; drop rows without a label")
    return labels


def _ignore_padding(labels: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    return labels if real is None else labels.masked_fill(~real.to(labels.device), IGNORED)


def _check_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    check_tensors(**{name: tensor})
    if tensor.shape != shape:
        raise ValueError(f"{name} must be of shape {tuple(shape)}, not {tuple(tensor.shape)}")
