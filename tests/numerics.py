"""Helpers of tests: rounding budgets instead of tolerances, gradients by name, tiny models with every mechanism on."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from hf_deberta import HfDebertaConfig
from hf_deberta.engines.onednn import has_onednn_bfloat16
from hf_deberta.model.attention import disentangled_attention
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import RelativePositions, TableWindow, may_be_pruned, saturation_of

TERMS = {
    "all": ("c2p", "p2c", "p2p"),
    "both": ("c2p", "p2c"),
    "c2p": ("c2p",),
    "p2c": ("p2c",),
    "p2p": ("p2p",),
    "none": (),
}

# every mechanism is on; tests switch off what they do not want
EVERYTHING_ON = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.15,
    "conv_kernel_size": 3,
}
V1_ATTENTION = {"share_att_key": False, "position_buckets": 0, "norm_rel_ebd": "none", "attention_key_bias": False}
needs_onednn_bfloat16 = pytest.mark.skipif(
    not has_onednn_bfloat16(), reason="this processor has no products in bfloat16"
)
graphs_may_have_operators = pytest.mark.skipif(
    torch.__version__ < (2, 9), reason="PyTorch takes torch.compile for torch.export"
)


def attend(
    query, key, value, position_key=None, position_query=None, rows_of_distance=None, terms=None, first_row=0, **options
):
    """`disentangled_attention` with the fields of `RelativePositions` and `AttentionMask` as arguments."""
    fields = ("mask", "documents", "causal", "cu_seqlens", "lengths", "longest", "query_positions")
    mask = AttentionMask(**{name: options.pop(name) for name in fields if name in options})
    positions = None
    if rows_of_distance is not None:
        positions = relative_positions(position_key, position_query, rows_of_distance, terms, first_row)
    return disentangled_attention(query, key, value, positions, mask, **options)


def whole_window(rows_of_distance):
    span = int(rows_of_distance[len(rows_of_distance) // 2])
    can_shrink = may_be_pruned(rows_of_distance, span)
    return TableWindow(0, 2 * span, rows_of_distance, saturation_of(rows_of_distance), can_shrink)


def relative_positions(position_key, position_query, rows_of_distance, terms=None, first_row=0):
    """`RelativePositions.from_tables`, also for tables that begin at `first_row` of the whole table."""
    positions = RelativePositions.from_tables(position_key, position_query, rows_of_distance, terms)
    if first_row == 0:
        return positions
    whole = whole_window(rows_of_distance)
    return replace(positions, window=whole.for_length(whole.end // 2 - first_row + 1))


def tiny_config(**fields):
    """The preset "tiny" (2 layers, 16 log buckets, 64 positions) with convolution, weights that matter, no dropout."""
    return HfDebertaConfig.from_preset("tiny", **{**EVERYTHING_ON, **fields})


def tiny_model(model_class, seed=0, dtype=torch.float64, **fields):
    """A training model whose biases and norms are not the identity; only losses are computed in float32."""
    torch.manual_seed(seed)
    return move_off_identity(model_class(tiny_config(**fields)).to(dtype)).train()


def move_off_identity(model):
    """Change biases and norms, which begin as 0 and 1, at random; return the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            assert parameter.is_floating_point(), name
    return model


def lengths_mask(*lengths):
    """The real tokens [B, N] of rows of these lengths, padded on the right."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def tiny_inputs(lengths=(9, 5, 7), vocab=128, seed=1):
    """Right-padded input_ids and attention_mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = lengths_mask(*lengths).long()
    ids = torch.randint(1, vocab, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}


def at_real_tokens(tensor, attention_mask):
    """[B, N, ...] with zeros at padding, whose states have no meaning; other tensors unchanged."""
    if tensor.shape[:2] != attention_mask.shape[:2]:
        return tensor
    return tensor * attention_mask.reshape(*attention_mask.shape, *[1] * (tensor.dim() - 2)).to(tensor.dtype)


def gradients(output, tensors):
    """Gradients of the sum of `output` by name; zeros where it does not depend on a tensor."""
    found = torch.autograd.grad(output.sum(), list(tensors.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(tensors.items(), found, strict=True)
    }


def import_again(module):
    """Another copy of a module, which reads the environment as it is now."""
    specification = importlib.util.find_spec(module.__name__)
    copy = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(copy)
    return copy


def gradients_of(model):
    """Copies of the gradients by name of all parameters that have one."""
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def train_step(model, **inputs):
    """The output of a training step, and its gradients by name."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, gradients_of(model)


def largest(tensor):
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def assert_equal_but_for_rounding(found, expected, dtype=None, message=""):
    """Assert equality up to the order of some additions in `dtype`, by default the coarser of the two."""
    assert found.shape == expected.shape, (message, found.shape, expected.shape)
    if dtype is None:
        dtype = max(found.dtype, expected.dtype, key=lambda t: torch.finfo(t).eps)
    error = largest(found.double() - expected.double())
    allowed = 64 * torch.finfo(dtype).eps * max(largest(expected), torch.finfo(dtype).tiny)
    assert error <= allowed, f"{message}: off by {error:.2e}, rounding explains {allowed:.2e}"


def assert_same_by_name(found, expected, dtype=torch.float32):
    """Assert equal gradients or weights of a loss in `dtype`; one that cancels to zero is compared to the largest."""
    assert found.keys() == expected.keys()
    eps = torch.finfo(dtype).eps
    overall = max(map(largest, expected.values()))
    for name, tensor in expected.items():
        error, allowed = largest(found[name] - tensor), 64 * eps * largest(tensor) + eps * overall
        assert error <= allowed, f"{name} is off by {error:.2e}, rounding explains {allowed:.2e}"


def assert_within_budget(found, low_precision, exact, message=""):
    """Assert at most twice the error of plain arithmetic in the same precision, plus one rounding of the result."""
    error, budget = (largest(tensor.double() - exact) for tensor in (found, low_precision))
    allowed = 2 * budget + torch.finfo(found.dtype).eps * largest(exact)
    assert error <= allowed, (
        f"{message}: error {error:.2e}, plain {found.dtype} has {budget:.2e}: allowed {allowed:.2e}"
    )
