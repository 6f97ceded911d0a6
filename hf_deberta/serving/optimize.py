"""`hf_deberta.optimize()`: prepare a model for inference on this computer's processor.

    >>> model = AutoModelForSequenceClassification.from_pretrained("cross-encoder/nli-deberta-v3-base").eval()
    >>> model = hf_deberta.optimize(model)                   # float32: the same numbers to 1e-5
    >>> model = hf_deberta.optimize(model, torch.bfloat16)   # half the bits; for processors with bfloat16 instructions
    >>> model = hf_deberta.optimize(model, torch.int8)       # a quarter of the bits, if a small loss is acceptable

The model keeps its class, parameters and saved files, and is used as before, under `torch.no_grad()`. Its layers get
copies of their weights, packed for the processor (packed_linear.py, packed_layer.py): weights are in memory twice. In
bfloat16 and int8 only the factors of products have fewer bits: sums, residuals, LayerNorm and softmax are in float32.
With int8, a short timing decides whether attention multiplies in bfloat16 or in float32, so another computer may give
slightly different numbers.

`model.train()` undoes it (in models of Transformers, the next forward pass in training mode), a second call starts anew
with the present weights, and copies of the model are not prepared.
Where prepared layers cannot be used (gradients, autocast, attention probabilities, hooks inside a layer,
`reference_mode`, torch.compile), the plain ones compute, with a warning where the caller would not expect it. Weights
that were written since are noticed, except through `weight.data`, and except weights made in `torch.inference_mode`.

Models of Transformers' own classes are prepared too: this calls `hf_deberta.enable()`, and works until `disable()`.
"""

import copy
import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.utils import logging

from hf_deberta.model.attention_mask import AttentionMask
from hf_deberta.model.fast_path_guards import is_unmodified_module
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer
from hf_deberta.model.private_apis import has_onednn_linear, is_hooked_or_patched
from hf_deberta.model.relative_table import relative_table, table_modules

from .in_tree_layers import is_in_tree_encoder, prepare_in_tree
from .packed_attention import PackedAttention
from .packed_layer import LayerWeights, NormWeights, PackedLayer
from .packed_linear import PackedLinear
from .prepared_layers import PreparedLayers

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=nn.Module)
OTHER_PLAIN_MODULES = (DebertaLayerNorm, nn.PReLU)  # their weights are not those of a layer that they wrap
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
CACHED_PRIMITIVES = 256  # about 0.6 MB each, and half a millisecond to compile again
ROWS, HEADS, HEAD_SIZE = 128, 12, 64  # of the products that are timed
TURNS = 15
CLEARLY_SLOWER = 1.25  # less may be other work on the computer


def optimize(model: Model, dtype: torch.dtype = torch.float32, inplace: bool = True) -> Model:
    """Return the model in eval mode, prepared for inference on this CPU; with `inplace=False` a copy of it.

    `dtype` is that of the factors of matrix products: torch.float32, torch.bfloat16 or torch.int8.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype}")
    if not has_onednn_linear():
        raise RuntimeError("hf_deberta.optimize needs a PyTorch with oneDNN; on this one, use the model without it")
    encoders = [module for module in model.modules() if is_ours(module) or is_in_tree_encoder(module)]
    if not encoders:
        name = type(model).__name__
        raise ValueError(f"{name} has no DeBERTa encoder; pass a model of this package or of Transformers")
    for encoder in encoders:
        check_encoder(encoder)
    if not inplace:
        return optimize(copy.deepcopy(model), dtype)
    model.eval()
    limit_onednn_caches()
    warn_if_slower(dtype)
    with torch.no_grad():
        for encoder in encoders:
            prepare = prepare_ours if is_ours(encoder) else prepare_in_tree
            prepare(encoder, dtype, attention_dtype(dtype))
    return model


def limit_onednn_caches() -> None:
    """Keep fewer compiled primitives: one for each new length would take a gigabyte (benchmarks/mixed_lengths.py).

    The limits are read at oneDNN's first use in the process; values that the user set stay.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and PyTorch's beside it
        os.environ.setdefault(name, str(CACHED_PRIMITIVES))


def is_ours(module: nn.Module) -> bool:
    return isinstance(module, HfDebertaEncoder)


def prepare_ours(encoder: Any, dtype: torch.dtype, dtype_of_attention: torch.dtype) -> None:
    """Prepare each layer of an encoder of this package."""
    rows = encoder.whole_table()
    table = None if rows is None else relative_table(table_modules(encoder), rows, None)
    for layer in encoder.layer:
        layer.prepared = PackedLayer(weights_of(layer), table, rows, dtype, dtype_of_attention)
    inside = [module for layer in encoder.layer for module in list(layer.modules())[1:]]
    encoder.prepared = PreparedLayers(encoder, [layer.prepared for layer in encoder.layer], inside)


def weights_of(layer: HfDebertaLayer) -> LayerWeights:
    attention = layer.attention.self
    return LayerWeights(
        query=(attention.query_proj.weight, attention.query_proj.bias),
        key=(attention.key_proj.weight, attention.key_proj.bias),
        value=(attention.value_proj.weight, attention.value_proj.bias),
        attention_output=layer.attention.output.dense,
        attention_norm=NormWeights.from_module(layer.attention.output.LayerNorm),
        intermediate=layer.intermediate.dense,
        activation=layer.intermediate.activation,
        output=layer.output.dense,
        output_norm=NormWeights.from_module(layer.output.LayerNorm),
        table_projection=attention.table_projection() if attention.terms else None,
        heads=attention.config.num_attention_heads,
        scale=attention.scale,
    )


def check_encoder(encoder: nn.Module) -> None:
    """Raise a ValueError for layers that are not plain float32 layers on the CPU, or whose hooks would be bypassed."""
    for name, module in encoder.named_modules():
        if not name.startswith("layer."):
            continue
        has_weight = hasattr(module, "weight")  # an adapter has the weight of the layer that it wraps
        plain = isinstance(module, OTHER_PLAIN_MODULES) or is_unmodified_module(module) or not has_weight
        called = is_ours(encoder) and name.count(".") == 1  # a layer itself, which prepared layers do not bypass
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


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of attention's products: that of the linear layers, or beside int8 the faster floating type."""
    if dtype != torch.int8:
        return dtype
    return torch.bfloat16 if attention_is_faster_in_bfloat16(torch.get_num_threads()) else torch.float32


@lru_cache(maxsize=8)
def attention_is_faster_in_bfloat16(threads: int) -> bool:
    """Time attention of one text with products in float32 and in bfloat16."""
    projected = torch.randn(ROWS, 3 * HEADS * HEAD_SIZE)

    def attend(dtype: torch.dtype) -> Callable[[], object]:
        attention = PackedAttention(None, HEADS, HEAD_SIZE, dtype)
        return lambda: attention.attend_all(projected, AttentionMask(), (1, ROWS), "sdpa")

    return time_ratio(attend(torch.bfloat16), attend(torch.float32)) < 1


def warn_if_slower(dtype: torch.dtype) -> None:
    """Warn if products of fewer bits take longer on this processor."""
    if dtype != torch.float32 and not is_as_fast_as_float32(dtype, torch.get_num_threads()):
        logger.warning_once(
            f"products in {dtype} take longer than in float32 on this processor: hf_deberta.optimize(model) would be "
            "faster"
        )


@lru_cache(maxsize=8)
def is_as_fast_as_float32(dtype: torch.dtype, threads: int) -> bool:
    """Time one product of each type."""
    width = HEADS * HEAD_SIZE
    states, weight = torch.randn(ROWS, width), torch.randn(4 * width, width)

    def multiply(dtype: torch.dtype) -> Callable[[], object]:
        packed = PackedLinear.from_weight(weight, None, dtype)
        return lambda: packed(states)

    return time_ratio(multiply(dtype), multiply(torch.float32)) < CLEARLY_SLOWER


def time_ratio(call: Callable[[], object], other: Callable[[], object]) -> float:
    """Time of `call` divided by that of `other`; they take turns, and the shortest time of each counts."""
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(TURNS + 1):
            for turns, each in zip(times, (call, other), strict=True):
                start = time.perf_counter()
                each()
                turns.append(time.perf_counter() - start)
    return min(times[0][1:]) / min(times[1][1:])
