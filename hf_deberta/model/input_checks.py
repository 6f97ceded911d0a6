"""Checks of inputs: each raises a ValueError that names the rule, the value and the way out. Labels: losses.py.

Shapes and types are always checked. Values are checked where reading them costs nothing: on the CPU, outside of
captured graphs and transforms (`can_read_values`). On a GPU the check would have to wait for the device.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .configuration_hf_deberta import HfDebertaConfig


class EncoderKwargs(TypedDict, total=False):
    """What every model takes beside its tokens; `HfDebertaModel.forward` describes it."""

    output_attentions: bool | None
    output_hidden_states: bool | int | list[int] | None
    cu_seq_lens_q: torch.Tensor | None
    max_length_q: int | None
    num_real_tokens: int | None


def require_tokens(
    config: HfDebertaConfig,
    vocabulary: int,
    input_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
) -> torch.Tensor:
    """Return ids [B, N] or embeddings [B, N, embedding], or raise a ValueError if the model cannot take them.

    `vocabulary` is the number of word embeddings.
    """
    check_tensors(input_ids=input_ids, token_type_ids=token_type_ids, inputs_embeds=inputs_embeds)
    if input_ids is not None and inputs_embeds is None:
        tokens, name, shape = input_ids, "input_ids", "[B, N]"
        check_integers(name, tokens)
    elif inputs_embeds is not None and input_ids is None:
        tokens, name, shape = inputs_embeds, "inputs_embeds", "[B, N, embedding]"
    else:
        number = "neither" if input_ids is None else "both"
        raise ValueError(f"pass either input_ids or inputs_embeds, not {number}")
    if tokens.dim() != shape.count(",") + 1 or tokens.numel() == 0:
        raise ValueError(f"{name} must be {shape} with at least one row and one token, not {tuple(tokens.shape)}")
    width = config.embedding_size
    if inputs_embeds is not None and inputs_embeds.shape[-1] != width:
        raise ValueError(f"inputs_embeds must be [B, N, {width}], the embedding size, not {tuple(tokens.shape)}")
    if input_ids is not None and any_outside(input_ids, vocabulary):
        raise ValueError(
            f"input_ids must lie in [0, {vocabulary}), the vocabulary of this model, and range from "
            f"{int(input_ids.min())} to {int(input_ids.max())}; use the model's own tokenizer, or "
            "resize_token_embeddings"
        )
    types = config.type_vocab_size
    if token_type_ids is not None and types > 0:
        batch, length = tokens.shape[:2]
        check_integers("token_type_ids", token_type_ids)
        if tuple(token_type_ids.shape) not in ((batch, length), (1, length)):
            raise ValueError(f"token_type_ids must be [B, N] = {(batch, length)}, not {tuple(token_type_ids.shape)}")
        if any_outside(token_type_ids, types):
            raise ValueError(f"token_type_ids must lie in [0, {types}), and range up to {int(token_type_ids.max())}")
    return tokens


def check_positions(position_ids: torch.Tensor | None, length: int, limit: int) -> None:
    """Raise a ValueError if absolute positions lie outside their table; None: they are 0, 1, ... in each row."""
    too_long = position_ids is None and length > limit
    if too_long or (position_ids is not None and any_outside(position_ids, limit)):
        longest = length if position_ids is None else int(position_ids.max()) + 1
        raise ValueError(
            f"this input has {longest} positions, and max_position_embeddings is {limit}; shorten the input, or train "
            "with a larger max_position_embeddings"
        )


def refuse(wrong: torch.Tensor, rule: str, way_out: str = "") -> None:
    """Raise a ValueError with the rule and the first value that breaks it, if there is one."""
    if wrong.numel() > 0:
        raise ValueError(f"{rule}, not {wrong[0].item():g}{way_out}")


def check_tensors(**inputs: object) -> None:
    """Raise a ValueError for an input that is neither a tensor nor None, such as a list or a NumPy array."""
    for name, value in inputs.items():
        if value is not None and not torch.is_tensor(value):
            raise ValueError(f"{name} must be a tensor, not {type(value).__name__}; pass torch.tensor({name})")


def any_outside(ids: torch.Tensor, size: int) -> bool:
    """True if at least one id is outside [0, size). False if the ids cannot be read without waiting for a device."""
    return can_read_values(ids) and (bool((ids < 0).any()) or bool((ids >= size).any()))


def check_integers(name: str, ids: torch.Tensor) -> None:
    """Raise a ValueError unless `ids` may index an embedding."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be of type int64 or int32, not {ids.dtype}; pass {name}.long()")


# ---- what can be known of a tensor ---------------------------------------------------------------------------------


def in_captured_graph() -> bool:
    """True while torch.compile, torch.export or torch.jit.trace builds a graph, which must hold for other inputs."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def has_no_values(tensor: torch.Tensor) -> bool:
    """True for a fake tensor, and where operations give fake or symbolic tensors."""
    return isinstance(tensor, FakeTensor) or any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def in_transform() -> bool:
    """True in transforms of torch.func (vmap, grad, ...) and in forward-mode differentiation."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in which products have the types of their inputs. The meta device knows no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def cast_for_products(states: torch.Tensor) -> torch.Tensor:
    """The states in the type of their products: that of autocast if it is on (float64 is left alone)."""
    device = states.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device) and states.dtype != torch.float64
    return states.to(torch.get_autocast_dtype(device)) if autocasts else states


def can_read_values(tensor: torch.Tensor) -> bool:
    """True if Python may read the tensor's values: it has some, and reading them does not wait for a device."""
    return tensor.device.type == "cpu" and not (in_captured_graph() or in_transform() or has_no_values(tensor))
