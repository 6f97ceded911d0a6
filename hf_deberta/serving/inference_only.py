"""What a model can do after `hf_deberta.optimize()`: compute. Everything else is one sentence with the way out.

Its layers have no ordinary weights any more, so no number can become stale. Each module that holds such a layer refuses
methods that need these weights, before they change or write anything, and a layer refuses calls that it cannot compute.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import nn

from hf_deberta.model.input_checks import in_captured_graph, in_transform
from hf_deberta.model.slots import in_reference_mode

ORIGINAL = ": use the original model for that, which optimize(model, inplace=False) keeps"
REFUSED_METHODS = {
    f"its weights can neither be read nor saved{ORIGINAL}": ("state_dict", "save_pretrained", "save", "push_to_hub"),
    f"no weights can be loaded into it{ORIGINAL}": ("_load_from_state_dict",),
    f"it cannot be trained{ORIGINAL}": ("gradient_checkpointing_enable", "activation_checkpointing_enable"),
    # of Transformers' encoders, which call it without `enable()` and while they are exported
    f"it computes under enable() only (call that again), and is not exported{ORIGINAL}": ("get_rel_embedding",),
}


def refuse(reason: str, *ignored: Any, **also_ignored: Any) -> NoReturn:
    raise RuntimeError(f"this model was prepared for inference by hf_deberta.optimize(), and {reason}")


def refuse_methods(module: nn.Module) -> None:
    """Let the methods of this module that need ordinary weights raise an error."""
    for reason, names in REFUSED_METHODS.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, partial(refuse, reason))
    vars(module).update(_apply=partial(apply_if_same, weakref.ref(module)), peft_config=NoAdapters())


def apply_if_same(reference: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call the `_apply` of a module, by which it is moved and cast, if that leaves it in float32 on the CPU."""
    moved = fn(torch.empty(0, dtype=torch.float32, device="cpu"))
    if moved.dtype != torch.float32 or moved.device.type != "cpu":
        way_out = "move the original model, or pass torch.bfloat16 or torch.int8 to optimize()"
        refuse(f"it cannot be moved to {moved.dtype} on {moved.device}: {way_out}")
    module = reference()
    return type(module)._apply(module, fn, *args, **kwargs)


class NoAdapters(dict):
    """In the place of PEFT's configurations of a module: PEFT adds one before it adds an adapter."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("it takes no adapters: merge them into the original model, and call optimize() after that")

    __setitem__ = update


class InferenceOnly(nn.Module):
    """Base of a layer whose matrices are laid out for this processor, and are no parameters."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(f"it can neither be copied nor pickled{ORIGINAL}")

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: a trainer of a head calls `train` on the whole model, and gradients are refused later."""
        return super().train(False)

    def check_call(self, states: torch.Tensor, output_attentions: bool) -> None:
        """Raise an error for a call in which the layer does not give what the original layer gives."""
        if in_captured_graph() or in_transform():
            refuse(f"it can neither be compiled, exported, traced nor transformed{ORIGINAL}")
        if output_attentions:
            refuse(f"it has no attention probabilities{ORIGINAL}")
        if torch.is_autocast_enabled("cpu"):
            refuse("autocast has no effect on it: call it outside, and pass torch.bfloat16 to optimize() instead")
        if in_reference_mode():
            refuse(f"it has no reference mode{ORIGINAL}")
        if states.dtype != torch.float32 or states.device.type != "cpu":
            given = f"{states.dtype} on {states.device}"
            refuse(f"it reads states of float32 on the CPU, not of {given}: keep embeddings and inputs_embeds so")


class WithoutGradient(torch.autograd.Function):
    """The result as it is; a gradient that would have to pass through the layer is an error, and not zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        refuse(
            "it has no gradients: train the original model, or a head and freeze the embeddings: requires_grad_(False)"
        )
