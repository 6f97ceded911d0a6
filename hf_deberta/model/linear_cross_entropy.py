"""Cross entropy of a linear layer over a large vocabulary, some tokens at a time: its logits never exist for all.

Legend: M tokens, h width of a state, V words.

    logits = states weight^T + bias
    loss   = sum over labelled tokens of log(sum of exp(logits)) - logits[label], over the items of the batch

A chunk of tokens makes its logits once. They become losses, best words, and, where gradients are wanted, at once the
chunk's part of these, d = softmax(logits) - (1 at the label): d weight for the states, d^T states for the weight, the
sum of d for the bias. That is possible because the loss is one number: whatever follows it multiplies all gradients
alike.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from .batch_loss import items_in_batch
from .dense import multiply, uses_onednn
from .private_apis import backward_keeps_graph

# Logits of a chunk, 128 MiB in float32, and the softmax as much again: together less than the gradient of the weight at
# base size with 128100 words. Fewer would save little, and each chunk reads and writes that whole gradient once.
LOGITS_AT_ONCE = 2**25
LEAST_TOKENS = 16  # of a chunk, whatever the vocabulary: products with fewer are slow
ADDED_AT_ONCE = 2**22  # numbers of that gradient; 16 MiB stay in a cache, or at least in memory that is used again


def linear_cross_entropy(
    states: torch.Tensor,  # [M, h]
    weight: torch.Tensor,  # [V, h]
    bias: torch.Tensor | None,  # [V]
    labels: torch.Tensor,  # [M], a negative label is ignored
    num_items_in_batch: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss; and, without gradients, the loss of each token [M], 0 where ignored, and its best word [M].

    The loss is `batch_loss.cross_entropy` of `nn.functional.linear(states, weight, bias)`, with first derivatives only.
    Under autocast products are of its type; losses and sums are of float32 at least.

    >>> states, weight = torch.randn(5, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    >>> loss, losses, words = linear_cross_entropy(states, weight, None, torch.tensor([3, 99, -100, 0, 7]))
    >>> loss.backward()
    """
    labels = labels.to(states.device)
    items = items_in_batch(labels >= 0, num_items_in_batch)
    if torch.is_grad_enabled():
        return LinearCrossEntropy.apply(states, weight, bias, labels, items)
    losses, words, _ = walk(states, weight, bias, labels, (False, False, False))
    return losses.sum() / items, losses, words


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, bias, labels, items):
        losses, words, gradients = walk(states, weight, bias, labels, ctx.needs_input_grad[:3])
        ctx.save_for_backward(items, *gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (states, weight, bias)]
        ctx.mark_non_differentiable(losses, words)
        ctx.set_materialize_grads(False)
        return losses.sum() / items, losses, words

    @staticmethod
    def backward(ctx, gradient, *_):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss that never made its logits has no second derivatives (create_graph=True); ask the model for "
                "all logits with sparse_prediction=False"
            )
        items, *gradients = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None, None
        factor = gradient / items
        # the weight's gradient is large: where nobody comes back for it, it is multiplied in place
        kept = backward_keeps_graph()
        scaled = [found if found is None else found * factor if kept else found.mul_(factor) for found in gradients]
        typed = (found if found is None else found.to(t) for found, t in zip(scaled, ctx.dtypes, strict=True))
        return *typed, None, None


def walk(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """Losses [M], best words [M], and the gradients that are wanted of the sum of losses."""
    sources = states, weight, bias
    dtype = dtype_of_products(states)
    wide = torch.promote_types(dtype, torch.float32)
    losses, words = states.new_zeros(labels.shape, dtype=wide), torch.zeros_like(labels)
    gradients = [
        torch.zeros_like(source, dtype=torch.promote_types(source.dtype, wide)) if want else None
        for source, want in zip(sources, wanted, strict=True)
    ]
    states, weight, bias = (source if source is None else source.to(dtype) for source in sources)
    size = max(LEAST_TOKENS, LOGITS_AT_ONCE // weight.shape[0])
    with torch.autocast(states.device.type, enabled=False):
        for start in range(0, labels.shape[0], size):
            chunk = slice(start, start + size)
            given = states[chunk], weight, bias, labels[chunk]
            losses[chunk], words[chunk] = score(*given, gradients, chunk, wide)
    return losses, words, gradients


def score(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    gradients: list[torch.Tensor | None],
    chunk: slice,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and best words of a chunk of tokens; its part of each gradient is added."""
    for_states, for_weight, for_bias = gradients
    product = product_of(states)
    logits = product(states, weight, bias)
    words = logits.argmax(-1)
    logits = logits.log_softmax(-1, dtype=wide)
    counted, at_label = labels >= 0, labels[:, None].clamp(min=0)
    losses = -logits.gather(1, at_label)[:, 0].masked_fill(~counted, 0)
    if for_states is for_weight is for_bias is None:
        return losses, words
    residual = logits.exp_().scatter_add_(1, at_label, -torch.ones_like(at_label, dtype=wide))
    # ignored tokens are left out of each product, which takes less than zeros in all their words
    if for_bias is not None:
        for_bias += counted.to(wide) @ residual
    residual, counted = residual.to(states.dtype), counted.to(states.dtype)[:, None]
    if for_states is not None:
        for_states[chunk] = product(residual, weight.t(), None) * counted
    if for_weight is not None:
        add_product(for_weight, residual, states * counted, product)
    return losses, words


def add_product(total: torch.Tensor, residual: torch.Tensor, states: torch.Tensor, product: Callable) -> None:
    """total [V, h] += residual^T states, without a second [V, h]."""
    if product is functional.linear and total.dtype == states.dtype:
        total.addmm_(residual.t(), states)
        return
    size = max(1, ADDED_AT_ONCE // total.shape[1])  # oneDNN and lower precisions multiply first, add then
    for start in range(0, total.shape[0], size):
        words = slice(start, start + size)
        total[words] += product(residual[:, words].t(), states.t(), None)


def product_of(states: torch.Tensor) -> Callable[..., torch.Tensor]:
    """What multiplies states [M, K] with a weight [N, K] and adds a bias [N], as `dense` would."""
    plain_float32 = states.device.type == "cpu" and states.dtype == torch.float32
    return multiply if plain_float32 and uses_onednn() else functional.linear


def dtype_of_products(states: torch.Tensor) -> torch.dtype:
    device = states.device.type
    autocasts = torch.is_autocast_enabled(device) and states.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocasts else states.dtype
