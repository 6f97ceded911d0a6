"""`hf_deberta.optimize()`: prepare a model for inference on this computer's processor.

    >>> model = AutoModelForSequenceClassification.from_pretrained("cross-encoder/nli-deberta-v3-base").eval()
    >>> model = hf_deberta.optimize(model)                   # float32: the same numbers to 1e-5
    >>> model = hf_deberta.optimize(model, torch.bfloat16)   # half the bits; for processors with bfloat16 instructions
    >>> model = hf_deberta.optimize(model, torch.int8)       # a quarter of the bits, if a small loss is acceptable

The model keeps its class, parameters and saved files, and is used as before, under `torch.no_grad()`. Its layers are
computed from a copy of their weights that is laid out for the processor (fused_layer.py).

In bfloat16 and int8 only the factors of products have fewer bits: sums, residuals, LayerNorm and softmax are in
float32. With int8, states are rounded to 8 bits, and weights too (to 7 without VNNI); attention is then in bfloat16 if
a timing shows that it is faster, so another computer may give slightly different numbers.

`model.train()` undoes it (in models of Transformers, the next forward pass in training mode), a second call starts anew
with the present weights, and copies of the model are not prepared.
Where fused layers cannot be used (gradients, autocast, attention probabilities, hooks inside a layer,
`reference_mode`, torch.compile), the plain ones compute, with a warning where the caller would not expect it. So
they do when a weight has changed since: a merged adapter, a step of an optimizer, a loaded state. Not noticed are
writes to a part of a weight that autograd does not count (through `weight.data[...]` or NumPy), and changed settings of
a module, such as `LayerNorm.eps`: call `optimize()` again after them.

Models of Transformers' own classes are prepared too: this calls `hf_deberta.enable()`, and works until `disable()`.
"""

import copy
import os
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.models.deberta.modeling_deberta import DebertaEncoder, DebertaLayerNorm
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

from hf_deberta.engines.guards import is_hooked_or_patched, is_unmodified_module
from hf_deberta.engines.onednn import has_onednn_bfloat16, has_onednn_linear
from hf_deberta.in_tree.enable import enable, is_enabled
from hf_deberta.in_tree.encoder import distance_parameters, prepared_encoders
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder

from .choices import attention_dtype
from .fused_layer import FusedLayer
from .fused_layers import FusedLayers
from .layer_weights import layer_weights, position_table
from .optimized_model import OptimizedEncoder, OptimizedLayer

Model = TypeVar("Model", bound=nn.Module)
ENCODERS = (HfDebertaEncoder, DebertaEncoder, DebertaV2Encoder)
OTHER_PLAIN_MODULES = (DebertaLayerNorm, nn.PReLU)  # their weights are not those of a layer that they wrap
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
MAX_CACHED_PRIMITIVES = 256  # about 0.6 MB each, and half a millisecond to compile again


def optimize(model: Model, dtype: torch.dtype = torch.float32, inplace: bool = True) -> Model:
    """Return the model in eval mode, prepared for inference on this CPU; with `inplace=False` a copy of it.

    `dtype` is that of the factors of matrix products: torch.float32, torch.bfloat16 or torch.int8.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype}")
    if not has_onednn_linear():
        raise RuntimeError("hf_deberta.optimize needs a PyTorch with oneDNN; on this one, use the model without it")
    if dtype == torch.bfloat16 and not has_onednn_bfloat16():
        raise RuntimeError("this processor has no products in bfloat16; take torch.float32 or torch.int8")
    if not inplace:
        model = copy.deepcopy(model)
    encoders = [module for module in model.modules() if isinstance(module, ENCODERS)]
    if not encoders:
        name = type(model).__name__
        raise ValueError(f"{name} has no DeBERTa encoder; pass a model of this package or of Transformers")
    for encoder in encoders:
        check_encoder(encoder)
    model.eval()
    limit_onednn_caches()
    with torch.no_grad():
        fused = [fuse_layers(encoder, dtype) for encoder in encoders]
    for encoder, layers in zip(encoders, fused, strict=True):  # only now: one may be refused
        use_fused_layers(encoder, layers)
    return model


def limit_onednn_caches() -> None:
    """Keep fewer compiled primitives: one for each new length would take a gigabyte.

    The limits are read at oneDNN's first use in the process; values that the user set stay.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and PyTorch's beside it
        os.environ.setdefault(name, str(MAX_CACHED_PRIMITIVES))


def is_ours(module: nn.Module) -> bool:
    return isinstance(module, HfDebertaEncoder)


def fuse_layers(encoder: Any, dtype: torch.dtype) -> FusedLayers:
    """The fused layers of an encoder of this package or of Transformers."""
    table, rows = position_table(encoder)
    layers = [
        FusedLayer(layer_weights(layer, before, table, rows), dtype, attention_dtype(dtype))
        for before, layer in zip([None, *encoder.layer], encoder.layer, strict=False)
    ]
    inside = [m for layer in encoder.layer for m in layer.modules() if m is not layer or not is_ours(encoder)]
    return FusedLayers(encoder, layers, inside)


def use_fused_layers(encoder: Any, fused: FusedLayers) -> None:
    """Let the fused layers compute in place of the encoder's; for an encoder of Transformers, `enable()` is on."""
    if is_ours(encoder):
        encoder.__class__, encoder.fused_layers = OptimizedEncoder, fused
        for layer, fused_layer in zip(encoder.layer, fused.layers, strict=True):
            layer.__class__, layer.fused_layer = OptimizedLayer, fused_layer
    else:
        prepared_encoders[encoder] = fused, distance_parameters(encoder)
        if not is_enabled():
            enable()
    fused.state = fused.present_state(encoder)


def check_encoder(encoder: nn.Module) -> None:
    """Raise a ValueError for layers that are not plain float32 layers on the CPU, or whose hooks would be bypassed."""
    for name, module in encoder.named_modules():
        if not name.startswith("layer."):
            continue
        has_weight = hasattr(module, "weight")  # an adapter has the weight of the layer that it wraps
        plain = isinstance(module, OTHER_PLAIN_MODULES) or is_unmodified_module(module) or not has_weight
        called = is_ours(encoder) and name.count(".") == 1  # a layer itself, which fused layers do not bypass
        if not plain or (is_hooked_or_patched(module) and not called):
            raise ValueError(
                f"{name} was hooked, patched or replaced; merge adapters and remove hooks before optimize()"
            )
        for weight in module.parameters(recurse=False):
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise ValueError(
                    f"{name} has weights of {weight.dtype} on {weight.device}; pass a float32 model on the CPU (and "
                    "the type of its products as dtype)"
                )
