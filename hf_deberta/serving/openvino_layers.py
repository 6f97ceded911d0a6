"""Encoder layers as OpenVINO graphs, for batches of texts of equal length.

Legend: B batch, N tokens, H heads, d head size, s saturation: the largest distance with a row of its own.

A forward pass of few tokens spends much of its time between operations and reading weights. One graph has no Python
between its operations, and OpenVINO's products of few rows are faster than oneDNN's in PyTorch. The layers are those
of fused_layer.py: query, key and value are one product, which includes the scale, and the projected tables are
constants, laid out by distance -s ... s. Fused layers keep what the graph does not compute: packed rows, causal masks,
subsets of queries, long texts.

    openvino = OpenVinoLayers(fused_layers)
    if openvino.can_compute(states, mask):
        states = openvino(states, mask, len(fused_layers))[-1]            # [B, N, hidden]
"""

import os
import threading
from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import repeat
from typing import Any

import numpy
import torch
from transformers.utils import logging

from hf_deberta.model.attention_sdpa import distance_tables
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import RelativePositions

from .fused_layer import FusedLayer, NoneInCopies
from .fused_linear import int8_weight
from .layer_weights import LayerWeights, NormWeights, WeightAndBias, concatenate_projections

logger = logging.get_logger(__name__)

MASKED_SCORE = -1e30  # added to the scores of padding; finite in bfloat16 too
MAX_SCORES_NUMEL = 2**24  # numbers in the scores of a batch, 64 MB: fused layers need less memory for more
# OpenVINO keeps what it has compiled for each shape: 5000 operations by default, gigabytes after 2000 shapes
MAX_CACHED_OPERATIONS = 256
PRECISION_SETTINGS: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"INFERENCE_PRECISION_HINT": "f32"},
    torch.bfloat16: {"INFERENCE_PRECISION_HINT": "bf16"},
    # only weights have 8 bits: more labels stay the same than with states of 8 bits (docs/benchmarks.md)
    torch.int8: {"INFERENCE_PRECISION_HINT": "bf16", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
}


@lru_cache(maxsize=1)
def has_openvino() -> bool:
    """True if OpenVINO can be used; warns if it is installed and cannot."""
    if find_spec("openvino") is None:
        return False
    try:
        from openvino import opset13  # noqa: F401
    except ImportError as reason:
        logger.warning_once(f"the installed OpenVINO cannot be used, so PyTorch computes all batches: {reason}")
        return False
    return True


@lru_cache(maxsize=1)
def openvino_core() -> Any:
    """The one Core of this process, which is never destroyed.

    Each Core gives the thread that makes it another stack for signal handlers, and takes it away at its end, even
    if an earlier Core has ended meanwhile, whose stack it puts back. The next signal then ends the process.
    """
    import openvino

    return openvino.Core()


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=512)
def distance_index(tokens: int, saturation: int) -> torch.Tensor:
    """The rows of the distances N - 1 ... -N in tables whose first row is that of distance s, [2N]."""
    rows = torch.arange(1 - tokens, tokens + 1, dtype=torch.int32)
    return rows.clamp_(-saturation, saturation).add_(saturation)


class OpenVinoLayers(NoneInCopies):
    """The layers of an encoder as graphs, compiled when first used, for as many threads as PyTorch has then.

    One graph has all layers but the last, of which heads may need only some states; another has the last. Batches of
    one of the `shapes` [B, N] without padding have a graph for that shape, with its own copy of the weights and no
    output but the last states.
    """

    def __init__(self, layers: Sequence[FusedLayer], shapes: Collection[tuple[int, int]] = ()):
        self.layers, self.dtype, self.shapes = layers, layers[0].dtype, shapes
        self.heads, positions = layers[0].weights.heads, layers[0].weights.positions
        self.saturation = 0 if positions is None else positions.saturation
        self.requests: dict[tuple[range, tuple[int, int] | None], Any] = {}  # by layers and shape; None: of any shape
        self.lock = threading.Lock()  # a request computes one batch at a time

    def __call__(
        self, states: torch.Tensor, mask: AttentionMask, layers: int, kept: Collection[int] = ()
    ) -> list[torch.Tensor | None]:
        """States [B, N, hidden] after each of the first `layers` layers, which may leave out the last of the encoder.

        Those of the last of them, and of the layers whose numbers are `kept`; the others are None. The mask hides
        padding or nothing.
        """
        if self.has_graph_for(states, mask, layers, kept):
            return self.compute(range(layers), states, mask, shape=(states.shape[0], states.shape[1]))
        computed: list[Any] = []
        last = len(self.layers) - 1
        for part in filter(None, (range(last), range(last, layers))):
            computed += self.compute(part, states, mask, kept)
            states = computed[-1]
        return computed

    def compute(
        self,
        part: range,
        states: torch.Tensor,
        mask: AttentionMask,
        kept: Collection[int] = (),
        shape: tuple[int, int] | None = None,
    ) -> list[torch.Tensor | None]:
        """States after each layer of a part, by one graph."""
        from openvino import Tensor

        visible = torch.ones(1, 1) if mask.mask is None else mask.mask.float()
        inputs = states.contiguous(), visible, distance_index(states.shape[1], self.saturation)
        with self.lock:
            if (part, shape) not in self.requests:
                self.requests[part, shape] = self.compile(part, shape, torch.get_num_threads())
            request = self.requests[part, shape]
            for i, tensor in enumerate(inputs):
                request.set_input_tensor(i, Tensor(tensor.numpy(), shared_memory=True))
            request.infer()
            if shape is not None:
                return [*repeat(None, len(part) - 1), copy_of(request, 0)]
            return [copy_of(request, i) if n in kept or n == part[-1] else None for i, n in enumerate(part)]

    def has_graph_for(self, states: torch.Tensor, mask: AttentionMask, layers: int, kept: Collection[int]) -> bool:
        """True for batches of one of the `shapes`, without padding, of which no states but the last are `kept`."""
        shape = (states.shape[0], states.shape[1])
        return shape in self.shapes and mask.mask is None and not any(i < layers - 1 for i in kept)

    def can_compute(self, states: torch.Tensor, mask: AttentionMask) -> bool:
        """True for whole texts, with padding between them or none, that are short enough."""
        batch, tokens, _ = states.shape
        plain = mask.is_padding_only or (mask.mask is None and not mask.is_structured)
        return plain and mask.query_positions is None and self.has_room_for(batch, tokens)

    def has_room_for(self, batch: int, tokens: int) -> bool:
        return batch * self.heads * tokens**2 <= MAX_SCORES_NUMEL

    def compile(self, part: range, shape: tuple[int, int] | None, threads: int) -> Any:
        """A request for batches of this shape without padding; None: of any shape."""
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        settings["CPU_RUNTIME_CACHE_CAPACITY"] = MAX_CACHED_OPERATIONS
        # pinned threads of several processes would share some cores and leave others idle
        settings["ENABLE_CPU_PINNING"] = threads == available_cores()
        model = GraphBuilder([self.layers[i] for i in part]).model()
        if shape is not None:
            for result in model.get_results()[:-1]:
                model.remove_result(result)
            states, visible, index = model.inputs
            model.reshape({states: [*shape, states.partial_shape[2]], visible: [1, 1], index: [2 * shape[1]]})
        compiled = openvino_core().compile_model(model, "CPU", settings | PRECISION_SETTINGS[self.dtype])
        return compiled.create_infer_request()


def copy_of(request: Any, index: int) -> torch.Tensor:
    """A copy of a result, which the next call overwrites; by NumPy, which wakes no threads."""
    return torch.from_numpy(request.get_output_tensor(index).data.copy())


class GraphBuilder:
    """The graph of layers, from states [B, N, hidden], visible tokens [B, N] or [1, 1], and `distance_index` [2N]."""

    def __init__(self, layers: Sequence[FusedLayer]):
        from openvino import opset13

        self.op, self.layers, self.dtype = opset13, layers, layers[0].dtype

    def model(self) -> Any:
        import openvino

        op, hidden = self.op, self.layers[0].weights.query[0].shape[1]
        states = op.parameter([-1, -1, hidden], numpy.float32)
        visible = op.parameter([-1, -1], numpy.float32)
        self.distance_index = op.parameter([-1], numpy.int32)
        inputs = [states, visible, self.distance_index]
        self.masked_pairs = op.unsqueeze(
            op.multiply(op.subtract(visible, self.floats(1)), self.floats(-MASKED_SCORE)), self.integers(1, 2)
        )
        self.visible = op.unsqueeze(visible, self.integers(2))
        self.count(states)
        results = []
        for layer in self.layers:
            states = self.layer(states, layer.weights)
            results.append(op.result(states))
        return openvino.Model(results, inputs)

    def count(self, states: Any) -> None:
        """Numbers that depend on the number of tokens, as vectors of length 1."""
        op = self.op
        self.tokens = op.gather(op.shape_of(states), self.integers(1), self.integers(0))
        self.columns = op.multiply(self.tokens, self.integers(2))
        self.skewed_columns = op.subtract(self.columns, self.integers(1))
        self.first = op.subtract(self.tokens, self.integers(1))
        self.end = op.add(self.first, op.multiply(self.tokens, self.skewed_columns))

    def layer(self, states: Any, weights: LayerWeights) -> Any:
        op = self.op
        attended = self.linear(self.attention(states, weights), weights.attention_output)
        middle = self.norm(op.add(attended, states), weights.attention_norm)
        inner = op.gelu(self.linear(middle, weights.intermediate), "erf")
        return self.norm(op.add(self.linear(inner, weights.output), middle), weights.output_norm)

    def attention(self, states: Any, weights: LayerWeights) -> Any:
        """The context [B, N, H d]; zero for padding."""
        op, heads, size = self.op, weights.heads, weights.head_size
        projected = self.linear(states, concatenate_projections(weights.scaled_query(), weights.key, weights.value))
        projected = op.reshape(projected, self.integers(0, 0, 3, heads, size), True)
        by_part = op.transpose(projected, self.integers(2, 0, 3, 1, 4))  # [3, B, H, N, d]
        parts = op.split(by_part, op.constant(0), 3).outputs()
        query, key, value = (op.squeeze(part, self.integers(0)) for part in parts)
        scores = op.add(op.matmul(query, key, False, True), self.masked_pairs)
        if weights.positions is not None:
            for term in self.position_terms(query, key, weights.positions):
                scores = op.add(scores, term)
        context = op.matmul(op.softmax(scores, -1), value, False, False)
        context = op.reshape(op.transpose(context, self.integers(0, 2, 1, 3)), self.integers(0, 0, heads * size), True)
        return op.multiply(context, self.visible)

    def position_terms(self, query: Any, key: Any, positions: RelativePositions) -> list[Any]:
        """c2p, p2c and p2p, each [B or 1, H, N, N]."""
        op, reach = self.op, positions.saturation
        tables = distance_tables(positions, reach)
        terms = []
        if "c2p" in positions.terms:
            terms.append(self.skewed(op.matmul(query, self.in_use(tables.falling), False, True)))
        if "p2c" in positions.terms:
            by_key = self.skewed(op.matmul(key, self.in_use(tables.rising), False, True))
            terms.append(op.transpose(by_key, self.integers(0, 1, 3, 2)))
        if "p2p" in positions.terms:
            assert tables.constant is not None
            constant = tables.constant.flip(1)[None, :, :, None]  # [1, H, 2s + 1, 1]
            by_distance = op.transpose(self.in_use(constant, 2), self.integers(0, 1, 3, 2))
            shape = op.concat([self.integers(1, constant.shape[1]), self.tokens, self.columns], 0)
            terms.append(self.skewed(op.broadcast(by_distance, shape)))
        return terms

    def in_use(self, table: torch.Tensor | None, axis: int = 1) -> Any:
        """The rows of the distances N - 1 ... -N."""
        assert table is not None
        constant = self.floats(table) if self.dtype == torch.float32 else self.bfloat16(table)
        return self.op.gather(constant, self.distance_index, self.op.constant(axis))

    def skewed(self, product: Any) -> Any:
        """Entry (i, j) of the result [.., N, N] is entry (i, N - 1 - i + j) of `product` [.., N, 2N]."""
        op = self.op
        flat = op.reshape(product, self.integers(0, 0, -1), True)
        flat = op.slice(flat, self.first, self.end, self.integers(1), self.integers(2))
        rows = op.reshape(flat, op.concat([self.integers(0, 0), self.tokens, self.skewed_columns], 0), True)
        return op.slice(rows, self.integers(0), self.tokens, self.integers(1), self.integers(3))

    def linear(self, states: Any, layer: WeightAndBias) -> Any:
        op, (weight, bias) = self.op, layer
        constant = self.floats(weight)
        if self.dtype == torch.int8:
            integers, scale = int8_weight(weight.detach())
            constant = op.multiply(
                op.convert(op.constant(integers.numpy()), numpy.float32), self.floats(scale[:, None])
            )
        product = op.matmul(states, constant, False, True)
        return product if bias is None else op.add(product, self.floats(bias))

    def norm(self, states: Any, norm: NormWeights) -> Any:
        op = self.op
        normalised = op.mvn(states, self.integers(-1), True, norm.epsilon, "INSIDE_SQRT")
        return op.add(op.multiply(normalised, self.floats(norm.weight)), self.floats(norm.bias))

    def integers(self, *values: int) -> Any:
        return self.op.constant(numpy.array(values, numpy.int64))

    def bfloat16(self, values: torch.Tensor) -> Any:
        """Values that OpenVINO would round to bfloat16 in each call."""
        import openvino

        bits = values.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        rounded = openvino.Tensor(openvino.Type.bf16, list(bits.shape))
        rounded.data.view(numpy.int16)[...] = bits
        return self.op.convert(self.op.constant(rounded), numpy.float32)

    def floats(self, values: torch.Tensor | float) -> Any:
        return self.op.constant(torch.as_tensor(values, dtype=torch.float32).detach().contiguous().numpy())
