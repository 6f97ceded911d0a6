"""`hf_deberta.optimize()`: prepare a model for inference on this computer's processor.

    >>> model = AutoModelForSequenceClassification.from_pretrained("cross-encoder/nli-deberta-v3-base").eval()
    >>> model = hf_deberta.optimize(model)                   # float32: the same numbers to 1e-5
    >>> model = hf_deberta.optimize(model, torch.bfloat16)   # half the bits; for processors with bfloat16 instructions
    >>> model = hf_deberta.optimize(model, torch.int8)       # a quarter of the bits, if a small loss is acceptable

This is a conversion: layers that own the weights, laid out for this processor (fused_layer.py), replace the encoder's
layers and its position table, whose weights are freed. The model keeps its class and is called as before. All that
needs ordinary weights is an error that says what to do (inference_only.py): training (but of a head on the frozen
encoder), saving, loading, copies, adapters, other types and devices, attention probabilities, autocast, export.

In bfloat16 and int8 only the factors of products have fewer bits: sums, residuals, LayerNorm and softmax are in
float32. With int8, states are rounded to 8 bits, and weights too (to 7 without VNNI); attention is then in bfloat16 if
a timing shows that it is faster, so another computer may give slightly different numbers.

Models of Transformers' own classes are converted too: this calls `hf_deberta.enable()`, and works until `disable()`.
"""

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.models.deberta.modeling_deberta import DebertaEncoder, DebertaLayerNorm
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

from hf_deberta.engines.guards import is_hooked_or_patched, is_unmodified_module
from hf_deberta.engines.onednn import has_onednn_bfloat16, has_onednn_linear
from hf_deberta.in_tree.enable import enable, is_enabled
from hf_deberta.in_tree.encoder import present_options
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder
from hf_deberta.model.relative_position import TableWindow

from .fused_layer import FusedInTreeLayer, FusedLayer, position_table
from .inference_only import ORIGINAL, InferenceOnly, refuse, refuse_methods

Model = TypeVar("Model", bound=nn.Module)
ENCODERS = (HfDebertaEncoder, DebertaEncoder, DebertaV2Encoder)
OTHER_PLAIN_MODULES = (DebertaLayerNorm, nn.PReLU)  # their weights are not those of a layer that they wrap
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
MAX_CACHED_PRIMITIVES = 256  # about 0.6 MB each, and half a millisecond to compile again


def optimize(model: Model, dtype: torch.dtype = torch.float32, inplace: bool = True) -> Model:
    """Return the model in eval mode, converted for inference on this CPU; with `inplace=False` a converted copy.

    Train, merge adapters and save before: the converted model can neither be trained nor saved.
    `dtype` is that of the factors of matrix products: torch.float32, torch.bfloat16 or torch.int8.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype}")
    if not has_onednn_linear():
        raise RuntimeError("hf_deberta.optimize needs a PyTorch with oneDNN; on this one, use the model without it")
    if dtype == torch.bfloat16 and not has_onednn_bfloat16():
        raise RuntimeError("this processor has no products in bfloat16; take torch.float32 or torch.int8")
    modules = model.modules() if isinstance(model, nn.Module) else ()
    encoders = [module for module in modules if isinstance(module, ENCODERS)]
    if not encoders:
        raise ValueError(
            f"{type(model).__name__} has no DeBERTa encoder: pass a model, of a pipeline its model; import hf_deberta "
            "before you load one with trust_remote_code"
        )
    for encoder in encoders:
        check_encoder(encoder)
    limit_onednn_caches()
    # OpenMP's threads end with the thread that started them; the caller's would be missing after a fork, which hangs
    with ThreadPoolExecutor(1) as thread:
        if not inplace:
            return optimize(thread.submit(copy.deepcopy, model).result(), dtype)
        thread.submit(convert_encoders, model, encoders, dtype).result()
    return model


@torch.no_grad()
def convert_encoders(model: nn.Module, encoders: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Convert a model in eval mode, and let its modules that hold an encoder refuse what needs ordinary weights."""
    tables = [position_table(encoder) for encoder in encoders]  # first: one may be refused
    model.eval()
    for module in model.modules():
        if any(isinstance(each, ENCODERS) for each in module.modules()):
            refuse_methods(module)
        if isinstance(getattr(module, "encoder", None), ENCODERS):
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0  # a trainer of the head calls train() on it
    for encoder, table in zip(encoders, tables, strict=True):
        convert(encoder, *table, dtype)


def limit_onednn_caches() -> None:
    """Keep fewer compiled primitives: one for each new length would take a gigabyte.

    The limits are read at oneDNN's first use in the process; values that the user set stay.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and PyTorch's beside it
        os.environ.setdefault(name, str(MAX_CACHED_PRIMITIVES))


def convert(encoder: Any, table: torch.Tensor | None, rows: TableWindow | None, dtype: torch.dtype) -> None:
    """Replace the encoder's layers, one after the other, so that memory holds the weights of one twice."""
    refuse_methods(encoder.layer)
    is_ours = isinstance(encoder, HfDebertaEncoder)
    for i in range(len(encoder.layer)):
        encoder.layer[i] = (FusedLayer if is_ours else FusedInTreeLayer)(encoder, i, table, rows, dtype).eval()
    for name in ("rel_embeddings", "LayerNorm"):
        if hasattr(encoder, name):
            setattr(encoder, name, None)
    if not is_ours:
        enable(*(present_options() if is_enabled() else ()))  # a with block may end the caller's


def check_encoder(encoder: nn.Module) -> None:
    """Raise a ValueError for layers that are not plain float32 layers on the CPU, or whose hooks would be bypassed."""
    for name, module in encoder.named_modules():
        if isinstance(module, InferenceOnly):
            refuse(f"a second call has no weights to convert{ORIGINAL}")
        if not name.startswith("layer."):
            continue
        has_weight = hasattr(module, "weight")  # an adapter has the weight of the layer that it wraps
        plain = isinstance(module, OTHER_PLAIN_MODULES) or is_unmodified_module(module) or not has_weight
        if not plain or is_hooked_or_patched(module):
            raise ValueError(
                f"{name} was hooked, patched or replaced: merge adapters before optimize(), and hook layers after it"
            )
        for weight in module.parameters(recurse=False):
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise ValueError(
                    f"{name} has weights of {weight.dtype} on {weight.device}; pass a float32 model on the CPU, which "
                    "is model.float().cpu() (and the type of its products as dtype)"
                )
