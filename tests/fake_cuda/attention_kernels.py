"""The fused attention kernels that PyTorch calls on an NVIDIA GPU, for simulated tensors.

`scaled_dot_product_attention` of a fake tensor is computed by plain products, because a PyTorch without CUDA cannot
choose a fused kernel. `fused_attention` chooses as PyTorch does on a GPU of compute capability 8, and calls the same
operators, which have shapes, derivatives and FLOP formulas without a GPU too. It knows neither cuDNN's kernel, which
capability 9 and 10 prefer if the bias has no gradient, nor the plain products of heads that are no multiple of 8.
Importing this file registers it for device "cuda".
"""

import torch
from torch.nn.functional import pad

BIAS_ALIGNMENT = 8  # elements; the memory-efficient kernel copies a bias whose rows begin elsewhere
HALF = (torch.float16, torch.bfloat16)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the context by FlashAttention if there is no mask, by the memory-efficient kernel otherwise."""
    aten, bias = torch.ops.aten, attn_mask
    if bias is not None:  # else cuDNN may compute wrong numbers (pytorch pull request 191612, cudnn-frontend 823)
        assert bias.dtype in (torch.bool, query.dtype), f"a bias of {bias.dtype} for {query.dtype}"
        assert bias.stride(-1) == 1 or bias.shape[-1] == 1, f"strides of the bias: {bias.stride()}"
    if query.dtype == torch.float64:
        return aten._scaled_dot_product_attention_math(query, key, value, bias, dropout_p, is_causal, scale=scale)[0]
    if bias is None and query.dtype in HALF:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if bias is not None:
        bias = aligned_bias(bias, query).expand(*query.shape[:3], key.shape[2])
    needs_log_sum = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        assert needs_log_sum, "on a GPU the gradient of a bias alone reads log sums that were not computed"
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_log_sum, dropout_p, is_causal, scale=scale
    )[0]


def aligned_bias(bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the bias as the memory-efficient kernel takes it: additive, and each row at a multiple of 8 elements."""
    if bias.dtype == torch.bool:
        lowest = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
        bias = torch.where(bias, 0.0, lowest)
    aligned = bias.stride(-1) == 1 and all(stride % BIAS_ALIGNMENT == 0 for stride in bias.stride()[:-1])
    if aligned:
        return bias
    keys = bias.shape[-1]
    return pad(bias, (0, BIAS_ALIGNMENT - keys % BIAS_ALIGNMENT))[..., :keys]


# for tensors on "cuda", with autograd or without, after autocast
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("scaled_dot_product_attention", fused_attention, "AutogradCUDA")
LIBRARY.impl("scaled_dot_product_attention", fused_attention, "CUDA")
