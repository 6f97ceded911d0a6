"""Cross entropy of a linear layer over a large vocabulary, computed in chunks of tokens.

The logits of all tokens never exist at the same time. Legend: M tokens, h hidden size, V vocabulary size.

    logits = states weight^T + bias
    loss   = sum over labelled tokens of (log(sum of exp(logits)) - logits[label]) / items in the batch

The logits of a chunk are computed once. They give the losses, the predictions and, if needed, the chunk's contribution
to the gradients at once. With residual = softmax(logits) - (1 at the label):

    gradient of states = residual weight      of weight = residual^T states      of bias = sum of residual

The forward pass can compute these gradients because the loss is a single number: backward only scales them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.utils import logging

from ..model.enhanced_mask_decoder import HfDebertaLMHead, sample_tokens, vocabulary_loss
from ..model.input_checks import cast_for_products, in_captured_graph, in_transform, without_autocast
from ..model.losses import loss_divisor
from .attention_auto import Failure, failure_of, is_capturing, own_random_state
from .guards import PLAIN_TENSORS, is_hooked_or_patched, is_unmodified_module, registered_parameter
from .onednn import multiply, multiply_transposed, uses_onednn

# 128 MiB of logits in float32, and the same again for their softmax: together less than the gradient of the weight at
# base size with 128100 tokens. Smaller chunks save little, and each chunk reads and writes that whole gradient once.
MAX_CHUNK_LOGITS = 2**25
MIN_CHUNK_TOKENS = 16  # for any vocabulary: matrix products with fewer rows are slow
MAX_PRODUCT_ELEMENTS = 2**22  # of the weight's gradient per product; 16 MiB fit into a cache or into reused memory
DEVICE_FACTOR = 8  # on devices, which have no such caches and pay for each launch: chunks of 1 GiB of float32 logits

logger = logging.get_logger(__name__)
_kernel_faults: dict[tuple[torch.device, torch.dtype], Failure | None] = {}  # None if the kernel passed its check


class Tokens(NamedTuple):
    """What is known of each token; no samples without a temperature."""

    losses: torch.Tensor  # [M]
    predictions: torch.Tensor  # [M]
    samples: torch.Tensor | None  # [M]


class Gradients(NamedTuple):
    """Gradients of the sum of losses; None for a tensor that needs none."""

    states: torch.Tensor | None  # [M, h]
    weight: torch.Tensor | None  # [V, h]
    bias: torch.Tensor | None  # [V]


def loss_without_logits(
    head: HfDebertaLMHead,
    states: torch.Tensor,  # [M, hidden]
    labels: torch.Tensor,  # [M]
    num_items_in_batch: torch.Tensor | int | None,
    sampling_temperature: float | None,
) -> dict[str, torch.Tensor | None]:
    """Replace `vocabulary_loss`: without the logits, if nothing can observe them."""
    if not can_skip_logits(head):
        return vocabulary_loss.plain(head, states, labels, num_items_in_batch, sampling_temperature)
    loss, losses, predictions, samples = linear_cross_entropy(
        head.transform(states), head.decoder.weight, head.bias, labels, num_items_in_batch, sampling_temperature
    )
    return {"loss": loss, "losses": losses, "predictions": predictions, "samples": samples}


def can_skip_logits(head: HfDebertaLMHead) -> bool:
    """True if the loss may be computed from the weights of the head without calling it.

    False if anything could observe or change the logits: a hook, another class, a patched `forward`, a tracer.
    """
    return (
        not (is_hooked_or_patched(head) or in_captured_graph() or in_transform())
        and type(head) is HfDebertaLMHead
        and type(registered_parameter(head, "bias")) in PLAIN_TENSORS
        and type(head.decoder) is nn.Linear
        and is_unmodified_module(head.decoder)
        and head.decoder.bias is None
    )


def linear_cross_entropy(
    states: torch.Tensor,  # [M, h]
    weight: torch.Tensor,  # [V, h]
    bias: torch.Tensor | None,  # [V]
    labels: torch.Tensor,  # [M], a negative label is ignored
    num_items_in_batch: torch.Tensor | int | None = None,
    sampling_temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the loss, the loss of each token [M] (0 if ignored), its most likely token [M], and a sampled one [M].

    The loss equals `losses.cross_entropy` of `nn.functional.linear(states, weight, bias)`. It has first derivatives
    only; the other results have no gradient. Under autocast, matrix products use the autocast dtype; losses and
    sums are float32, or float64 for float64 states.

    >>> import torch
    >>> from hf_deberta.engines.linear_cross_entropy import linear_cross_entropy
    >>> states, weight = torch.randn(5, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    >>> loss, losses, predictions, _ = linear_cross_entropy(states, weight, None, torch.tensor([3, 99, -100, 0, 7]))
    >>> loss.backward()
    >>> losses.shape, predictions.shape
    (torch.Size([5]), torch.Size([5]))
    """
    labels = labels.to(states.device)
    divisor = loss_divisor(labels >= 0, num_items_in_batch)
    if torch.is_grad_enabled():
        return LinearCrossEntropy.apply(states, weight, bias, labels, divisor, sampling_temperature)
    tokens, _ = compute_in_chunks(states, weight, bias, labels, sampling_temperature, (False, False, False))
    return tokens.losses.sum() / divisor, *tokens


class LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy` with a backward pass that scales the gradients of the forward pass."""

    @staticmethod
    def forward(ctx, states, weight, bias, labels, divisor, sampling_temperature):
        needed = ctx.needs_input_grad[:3]
        tokens, gradients = compute_in_chunks(states, weight, bias, labels, sampling_temperature, needed)
        ctx.save_for_backward(divisor, *gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (states, weight, bias)]
        ctx.mark_non_differentiable(*(tensor for tensor in tokens if tensor is not None))
        ctx.set_materialize_grads(False)
        return tokens.losses.sum() / divisor, *tokens

    @staticmethod
    def backward(ctx, gradient, *_):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss is computed without whole logits and has no second derivatives (create_graph=True); "
                "pass sparse_prediction=False to the model to compute all logits"
            )
        divisor, *gradients = ctx.saved_tensors
        if gradient is None:
            return (None,) * 6
        factor = gradient / divisor
        # the gradient of the weight is large: scale it in place unless the graph is kept for another backward
        scale = torch.mul if torch._C._autograd._get_current_graph_task_keep_graph() else torch.Tensor.mul_
        scaled = [saved if saved is None else scale(saved, factor) for saved in gradients]
        typed = (each if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True))
        return *typed, None, None, None


def compute_in_chunks(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    sampling_temperature: float | None,
    needs_gradient: tuple[bool, bool, bool],  # of states, weight, bias
) -> tuple[Tokens, Gradients]:
    """Return what is known of each token, and the gradients of the sum of losses."""
    inputs = cast_for_products(states)
    dtype = inputs.dtype
    loss_dtype = torch.promote_types(dtype, torch.float32)
    samples = None if sampling_temperature is None else torch.zeros_like(labels)
    tokens = Tokens(states.new_zeros(labels.shape, dtype=loss_dtype), torch.zeros_like(labels), samples)
    gradients = Gradients(
        *(
            torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, loss_dtype))
            if needed and tensor is not None
            else None
            for tensor, needed in zip((states, weight, bias), needs_gradient, strict=True)
        )
    )
    states, weight, bias = inputs, weight.to(dtype), None if bias is None else bias.to(dtype)
    factor = 1 if states.device.type == "cpu" else DEVICE_FACTOR
    size = max(MIN_CHUNK_TOKENS, factor * MAX_CHUNK_LOGITS // weight.shape[0])  # tokens of a chunk
    with without_autocast(states.device):
        for start in range(0, labels.shape[0], size):
            chunk = slice(start, start + size)
            part = gradients._replace(states=None if gradients.states is None else gradients.states[chunk])
            new = compute_chunk(states[chunk], weight, bias, labels[chunk], sampling_temperature, part, loss_dtype)
            for of_all, of_chunk in zip(tokens, new, strict=True):
                if of_all is not None and of_chunk is not None:
                    of_all[chunk] = of_chunk
    return tokens, gradients


def compute_chunk(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    sampling_temperature: float | None,
    gradients: Gradients,
    loss_dtype: torch.dtype,
) -> Tokens:
    """Return what is known of each token of a chunk, and add its contribution to the gradients in place."""
    linear = select_linear(states)
    logits = linear(states, weight, bias)
    needs_residual = any(gradient is not None for gradient in gradients)
    if may_use_kernel(logits):
        from .vocabulary_triton import losses_and_residual  # imported late: only a GPU needs it

        tokens, residual = Tokens(*losses_and_residual(logits, labels, sampling_temperature, needs_residual)), logits
    else:
        tokens, residual = tokens_and_residual(logits, labels, sampling_temperature, needs_residual, loss_dtype)
    if not needs_residual:
        return tokens
    # each product leaves out ignored tokens by its small factor: cheaper than zeroing their rows of the residual
    label_mask = (labels >= 0).to(states.dtype)[:, None]
    if gradients.bias is not None:
        gradients.bias.add_(label_mask[:, 0] @ residual)
    if gradients.states is not None:
        gradients.states.copy_(linear(residual, weight.t(), None) * label_mask)
    if gradients.weight is not None:
        add_product(gradients.weight, residual, states * label_mask, linear)
    return tokens


def tokens_and_residual(
    logits: torch.Tensor,  # [M, V], which may be overwritten
    labels: torch.Tensor,
    sampling_temperature: float | None,
    needs_residual: bool,
    loss_dtype: torch.dtype,
) -> tuple[Tokens, torch.Tensor]:
    """Return what is known of each token, and softmax(logits) - (1 at the label) [M, V] of labelled ones if needed."""
    predictions, dtype = logits.argmax(-1), logits.dtype
    logits = logits.log_softmax(-1, dtype=loss_dtype)
    label_columns = labels[:, None].clamp(min=0)
    losses = -logits.gather(1, label_columns)[:, 0].masked_fill(labels < 0, 0)
    tokens = Tokens(losses, predictions, sample_tokens(logits, sampling_temperature))
    if not needs_residual:
        return tokens, logits
    residual = torch.exp(logits, out=logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype))
    return tokens, residual.scatter_(1, label_columns, torch.expm1(-losses).to(dtype)[:, None])


def may_use_kernel(logits: torch.Tensor) -> bool:
    """True on GPUs where the Triton kernel for the logits has passed its check, which the first call makes."""
    from .attention_triton import DTYPES, unsupported_device  # imported late: it reads what is installed

    kind = logits.device, logits.dtype
    if type(logits) not in PLAIN_TENSORS or unsupported_device(logits.device) or logits.dtype not in DTYPES:
        return False
    if kind not in _kernel_faults and not is_capturing(logits.device):
        fault = kernel_fault(*kind)
        if fault is not None:
            logger.warning(
                f"PyTorch computes the loss over the vocabulary on {logits.device}, since the kernel failed its check: "
                f"{fault.message}"
            )
        if fault is None or not fault.out_of_memory:  # else the next call checks again
            _kernel_faults[kind] = fault
    return _kernel_faults.get(kind, "not checked") is None


def kernel_fault(device: torch.device, dtype: torch.dtype) -> Failure | None:
    """What is wrong with the results of the kernel, compared with those of PyTorch; None if nothing is."""
    logits = torch.randn(5, 9000, generator=torch.Generator().manual_seed(0), device="cpu").mul_(4)
    best = torch.tensor([0, 8999, 4096, 17, 5000], device="cpu")
    logits.scatter_(1, best[:, None], 30.0)
    logits, labels = logits.to(device, dtype), torch.tensor([0, 8999, -100, 4095, 17], device=device)
    try:
        from .vocabulary_triton import losses_and_residual

        with own_random_state(device):
            residual = logits.clone()
            tokens = Tokens(*losses_and_residual(residual, labels, 1e-3, needs_residual=True))
        expected, expected_residual = tokens_and_residual(logits, labels, 0.0, True, torch.float32)
        wrong = [
            name for name in ("predictions", "samples") if not getattr(tokens, name).equal(getattr(expected, name))
        ]
        tolerance = 2 * torch.finfo(dtype).eps + 1e-5  # of the type and of exponents
        close = torch.allclose(tokens.losses, expected.losses, atol=1e-4, rtol=1e-4)
        errors = (residual.float() - expected_residual.float()).abs()[labels >= 0]
        wrong += ["losses"] * (not close) + ["residual"] * (not errors.max() <= tolerance)
    except Exception as error:  # of compilation, launch, ...: whatever a device may answer
        return failure_of(error)
    return Failure(f"other {' and '.join(wrong)} than PyTorch's") if wrong else None


def add_product(
    total: torch.Tensor, residual: torch.Tensor, states: torch.Tensor, linear: Callable[..., torch.Tensor]
) -> None:
    """Add residual^T states to `total` [V, h] without a second tensor of that size."""
    if linear is functional.linear and total.dtype == states.dtype:
        total.addmm_(residual.t(), states)
        return
    # oneDNN and low precision need the product before the sum
    size = max(1, MAX_PRODUCT_ELEMENTS // total.shape[1]) if total.device.type == "cpu" else total.shape[0]
    for start in range(0, total.shape[0], size):
        rows = slice(start, start + size)
        part = residual[:, rows]
        product = multiply_transposed(part, states) if linear is multiply else linear(part.t(), states.t(), None)
        total[rows].add_(product)


def select_linear(states: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the function for states [M, K] times weight [N, K]^T plus bias [N]: oneDNN's where it is faster."""
    plain_float32 = states.device.type == "cpu" and states.dtype == torch.float32
    return multiply if plain_float32 and uses_onednn() else functional.linear
