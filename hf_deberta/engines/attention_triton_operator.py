"""The operator of disentangled attention in tiles, for PyTorch: its arguments, launches and gradients.

Legend: B batch, H heads, N tokens, d head size, T tokens of a tile, R rows of the relative table.

The kernels are in attention_triton_forward.py and attention_triton_backward.py, the derivation in
docs/attention_triton.md. These three files need torch, triton and the standard library only: hub_kernel.py makes a
kernel for the Hub of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# tokens of a tile; warps and stages of the kernels: forward, own_gradients, table_gradients, and any kernel if a head
# has more than 64 channels. More warps than a sixteenth of the tokens compute products twice, or read factors twice:
# `times_computed` and `near_shared_cycles` in benchmarks/results/attention_triton_aot.csv
LAUNCHES = {
    "Hopper": (64, ((4, 2), (4, 1), (4, 1), (4, 1))),
    "Blackwell": (64, ((8, 2), (8, 2), (8, 1), (8, 1))),
    "AMD": (32, ((4, 1), (4, 1), (4, 1), (4, 1))),
    "others": (32, ((2, 2), (2, 1), (2, 1), (4, 1))),
    "float32": (32, ((8, 1), (8, 1), (8, 1), (8, 1))),
    "interpreter": (16, ((1, 1), (1, 1), (1, 1), (1, 1))),
}
CHIPS = {9: "Hopper", 10: "Blackwell"}  # by the first number of the compute capability
TABLE_GRADIENT_SPLITS = 8  # programs that share a block of distances in table_gradients_kernel
ANY_END = 2**31 - 1  # no row is longer; padding with the number of tokens would tie a graph to it


@torch.compiler.assume_constant_result
def launches(dtype: torch.dtype, device: torch.device) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Tokens of a tile, and warps and stages of each kernel."""
    if device.type != "cuda":
        return LAUNCHES["interpreter"]
    if dtype == torch.float32:
        return LAUNCHES["float32"]
    if torch.version.hip is not None:
        return LAUNCHES["AMD"]
    return LAUNCHES[CHIPS.get(torch.cuda.get_device_capability(device)[0], "others")]


def products_use_tf32() -> bool:
    """True if PyTorch's own products of float32 on GPUs use TF32.

    torch.get_float32_matmul_precision() fails once the setting was changed directly.
    """
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):  # before PyTorch 2.9
        return products.allow_tf32
    return products.fp32_precision == "tf32"


def compute_each_time(_key: Hashable, compute: Callable[[], Any]) -> Any:
    return compute()


def tiled_attention(
    query: torch.Tensor,  # [B, H, N, d]
    key: torch.Tensor,
    value: torch.Tensor,
    position_key: torch.Tensor | None = None,  # [H, R, d], for the term c2p
    position_query: torch.Tensor | None = None,  # [H, R, d], for p2c
    rows_of_distance: torch.Tensor | None = None,  # [2k + 1]
    *,
    visible: torch.Tensor | None = None,  # bool [B, N] or [B, N, N]
    documents: torch.Tensor | None = None,  # int [B, N]
    cu_seqlens: torch.Tensor | None = None,  # [documents + 1]
    longest: int | None = None,
    saturation: int | None = None,
    causal: bool = False,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    compute_once: Callable[[Hashable, Callable[[], Any]], Any] = compute_each_time,
) -> torch.Tensor:
    """Context [B, H, N, d] of queries that see keys by content and by relative position.

    The score of query i and key j is (q_i k_j + q_i position_key[row] + position_query[row] k_j) * scale, multiplied by
    `scale` in float32: in half precision scaled queries would be rounded once more.

    Args:
        rows_of_distance: the row of each distance i - j from -k to k; further ones share the last row of their side.
        visible: False for padding, which sees nothing; or with three dimensions, True where a query sees a key.
        documents: the number of each token's document, which never decreases along a row.
        cu_seqlens: the boundaries of the documents of a single row, instead of `documents`.
        longest: the largest number of tokens of a document, or a bound for it.
        saturation: the distance from which on all distances of a side share a row, by default k.
        compute_once: computes what does not differ between layers, by its key.
    """
    if rows_of_distance is None and not (position_key is position_query is None):
        raise ValueError("tables of positions need rows_of_distance, the row of each distance from -k to k")
    if scale <= 0:  # the kernels look for the largest score before they scale it
        position_query = None if position_query is None else position_query * scale
        query, scale = query * scale, 1.0
    tile = launches(query.dtype, query.device)[0]
    batch, _, tokens, _ = query.shape
    tables = [None if table is None else table.to(query.dtype) for table in (position_key, position_query)]
    by_distance: list[torch.Tensor | None] = [None, None]
    rows, near = None, ((tokens if longest is None else longest) - 1) // tile
    furthest = near
    if rows_of_distance is not None:
        distance = rows_of_distance.shape[0] // 2 if saturation is None else saturation
        near = min(near, (distance + tile - 2) // tile)
        reach = (near + 1) * tile
        rows = compute_once(("rows", rows_of_distance, reach), lambda: rows_by_distance(rows_of_distance, reach))
        by_distance = [None if table is None else table.detach().index_select(1, rows) for table in tables]
    layout = compute_once(
        ("layout", batch, tokens, tile), lambda: layout_in_tiles(visible, documents, cu_seqlens, batch, tokens, tile)
    )
    seed = torch.randint(2**31, (1,), device=query.device) if dropout_p > 0 else None
    attend = attention_in_tiles if in_graph_or_transform() else AttentionInTiles.apply
    return attend(
        query, key, value, *tables, *by_distance, rows, *layout, seed, scale, dropout_p, causal, near, furthest
    )[0]


class TileLayout(NamedTuple):
    """Which tokens see each other, for the kernels."""

    mask: torch.Tensor | None  # int32 [B, N], numbers of documents, -1 for padding; or bytes [B, N, N], 1 for visible
    spans: torch.Tensor | None  # int32 [B, blocks, 2], see `tile_spans`
    places: torch.Tensor | None  # int32 [programs, 3] of a packed row: first token and length of the document, block


def layout_in_tiles(
    visible: torch.Tensor | None,
    documents: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    batch: int,
    tokens: int,
    tile: int,
) -> TileLayout:
    """Return the visible tokens, which have the arguments of `tiled_attention`, as the kernels read them."""
    spans = places = None
    if cu_seqlens is not None:
        places = places_in_packed_row(cu_seqlens, tokens, tile)
    if visible is not None and visible.dim() == 3:
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None, :])
        return TileLayout(visible.contiguous().view(torch.uint8), spans, places)
    if documents is not None:
        numbers = (documents - documents[:, :1]).int().expand(batch, -1).contiguous()
    elif visible is not None:
        numbers = torch.zeros_like(visible, dtype=torch.int32)
    else:
        return TileLayout(None, spans, places)
    if places is None:
        spans = tile_spans(numbers, visible, tile)
    if visible is not None:
        numbers = numbers.masked_fill(~visible, -1)
    return TileLayout(numbers, spans, places)


def places_in_packed_row(cu_seqlens: torch.Tensor, tokens: int, tile: int) -> torch.Tensor:
    """First token and length of the document of each program, and its block, int32 [programs, 3].

    Tokens after the last document are one more, and boundaries stop at the row's end. There are as many programs as
    the lengths of that many documents may need.
    """
    ends = torch.nn.functional.pad(cu_seqlens[1:].to(torch.int32), (0, 1), value=ANY_END).clamp(max=tokens)
    bounds = torch.nn.functional.pad(ends, (1, 0))
    lengths = bounds.diff()
    blocks = (lengths + tile - 1) // tile
    last = blocks.cumsum(0)
    programs = torch.arange(tokens // tile + len(lengths), device=last.device)
    document = torch.searchsorted(last, programs, right=True).clamp(max=len(lengths) - 1)
    block = programs - (last - blocks)[document]
    return torch.stack([bounds[document], lengths[document], block.int()], 1)


def tile_spans(numbers: torch.Tensor, real: torch.Tensor | None, tile: int) -> torch.Tensor:
    """The blocks [first, last) with tokens that a token of each tile may see, int32 [B, blocks, 2].

    Args:
        numbers: [B, N], the number of each token's document, which never decreases along a row.
        real: [B, N] of bool, False for padding. A tile of padding only has no blocks: its first is not below its last.
    """
    tokens = numbers.shape[1]
    first, last = torch.searchsorted(numbers, numbers), torch.searchsorted(numbers, numbers, right=True)
    if real is not None:
        position = torch.arange(tokens, device=numbers.device)
        first = torch.maximum(first, torch.where(real, position, tokens).amin(1, keepdim=True))
        last = torch.minimum(last, torch.where(real, position + 1, 0).amax(1, keepdim=True))
        first, last = torch.where(real, first, tokens), torch.where(real, last, 0)
    missing = -tokens % tile
    first = torch.nn.functional.pad(first, (0, missing), value=ANY_END).unflatten(1, (-1, tile)).amin(2) // tile
    last = (torch.nn.functional.pad(last, (0, missing)).unflatten(1, (-1, tile)).amax(2) + tile - 1) // tile
    return torch.stack([first, last], 2).int()


def rows_by_distance(rows_of_distance: torch.Tensor, reach: int) -> torch.Tensor:
    """The row of each distance in [-reach, reach)."""
    k = (rows_of_distance.shape[0] - 1) // 2
    return rows_of_distance[torch.arange(-reach, reach, device=rows_of_distance.device).clamp(-k, k) + k]


# the fields of `Call`, as both operators take them
CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? position_key, Tensor? position_query, Tensor? key_by_distance, "
    "Tensor? query_by_distance, Tensor? rows, Tensor? mask, Tensor? spans, Tensor? places, Tensor? dropout_seed, "
    "float scale, float dropout_p, bool causal, SymInt near, SymInt furthest"
)


@torch.library.custom_op("hf_deberta::attention_in_tiles", mutates_args=(), schema=f"({CALL}) -> (Tensor, Tensor)")
def attention_in_tiles(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Context [B, H, N, d], and the log-sums [B, H, N] of scores, in base 2, that the backward pass needs."""
    from .attention_triton_forward import forward_kernel

    call = Call(*arguments)
    shape = (call.batch, call.heads, call.tokens)
    context = torch.empty_like(call.query)
    log_sum = torch.empty(shape, dtype=torch.float32, device=context.device)
    with torch.cuda.device_of(context):
        forward_kernel[(call.programs, call.heads)](
            call.query, call.key, call.value, *call.tables, *call.far_products(), *call.visibility, call.seed,
            context, log_sum, *call.sizes, call.scale, call.dropout_p,
            C2P=call.c2p, P2C=call.p2c, FAR=call.far, **call.constants(), **call.launch(0),
        )  # fmt: skip
    return context.transpose(1, 2), log_sum


@attention_in_tiles.register_fake
def _(query, *_):
    batch, heads, tokens, size = query.shape
    context = query.new_empty(batch, tokens, heads, size).transpose(1, 2)
    return context, query.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op(
    "hf_deberta::attention_in_tiles_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor context, Tensor log_sum, bool train_tables, {CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_in_tiles_backward(
    gradient: torch.Tensor, context: torch.Tensor, log_sum: torch.Tensor, train_tables: bool, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value, position_key and position_query, empty for tables that are None."""
    call = Call(*arguments)
    delta = torch.empty_like(log_sum)
    states = [torch.empty_like(part) for part in (call.query, call.key, call.value)]
    for_tables = []
    with torch.cuda.device_of(delta):
        inputs = (tokens_first(context), tokens_first(gradient), log_sum, delta, call.tables, call.far_products())
        for keys, table in ((False, call.position_key), (True, call.position_query)):
            keep = train_tables and table is not None
            far, band, kept = own_gradients(call, keys, keep, *inputs, states[keys], states[2])
            for_table = call.query.new_empty(0)
            if keep and table is not None:
                for_table = table_gradients(call, keys, far, band, kept, table)
            for_tables.append(for_table)
            del band  # several hundred megabytes, which the next run uses again
    for_query, for_key, for_value = (part.transpose(1, 2) for part in states)
    return for_query, for_key, for_value, for_tables[0], for_tables[1]


def own_gradients(
    call: "Call",
    keys: bool,
    keep: bool,
    context: torch.Tensor,  # [B, N, H, d]
    gradient: torch.Tensor,  # [B, N, H, d]
    log_sum: torch.Tensor,  # [B, H, N]
    delta: torch.Tensor,  # [B, H, N]
    tables: list[torch.Tensor],
    far: list[torch.Tensor],
    for_own: torch.Tensor,  # [B, N, H, d]
    for_value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write gradients of queries, or of keys and values; return those of far rows, and what `table_gradients` needs.

    The run for queries writes `delta` [B, H, N], the sums of gradient * context, for the run for keys. With `keep`,
    gradients of near scores are returned: [programs, H, slots, T, T] by block of distances, and [programs, 2], the
    first and last block of each program.
    """
    from .attention_triton_backward import own_gradients_kernel

    far_gradient = delta.new_empty(2, call.programs * call.far, call.heads, call.size)
    band = call.query.new_empty((call.programs, call.heads, call.slots, call.tile, call.tile) if keep else 1)
    kept = torch.empty((call.programs, 2) if keep else 1, dtype=torch.int32, device=band.device)
    own, other = (call.key, call.query) if keys else (call.query, call.key)
    own_weights, other_weights = (call.value, gradient) if keys else (gradient, call.value)
    own_first = slice(None, None, -1 if keys else 1)
    own_gradients_kernel[(call.programs, call.heads)](
        own, other, own_weights, other_weights, context, *tables[own_first], *far[own_first], log_sum, delta,
        *call.visibility, call.seed, for_own, for_value, far_gradient, band, kept, call.slots, *call.sizes,
        call.scale, call.dropout_p,
        OWN=call.p2c if keys else call.c2p, OTHER=call.c2p if keys else call.p2c, KEYS=keys, KEEP=keep, FAR=call.far,
        **call.constants(), **call.launch(1),
    )  # fmt: skip
    return far_gradient, band, kept


def table_gradients(
    call: "Call", keys: bool, far: torch.Tensor, band: torch.Tensor, kept: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """The gradient of a table [H, R, d]: of position keys, or of position queries with `keys`."""
    from .attention_triton_backward import row_gradients_kernel, table_gradients_kernel

    parts, blocks = min(TABLE_GRADIENT_SPLITS, call.programs), 2 * call.near + 2
    near = far.new_empty(parts, blocks, call.heads, call.tile, call.size)
    constants = call.constants()
    table_gradients_kernel[(blocks, call.heads, parts)](
        call.key if keys else call.query, band, kept, call.visibility[2], near, call.programs, call.heads,
        call.tokens, call.size, call.blocks, call.slots, call.near,
        **{name: constants[name] for name in ("PACKED", "PRECISION", "T", "D")}, **call.launch(2),
    )  # fmt: skip
    count, few = table.shape[1], 16
    gradient = table_gradient_like(table)
    row_gradients_kernel[(-(-count // few), call.heads)](
        near, far.sum(1) if call.far else call.nothing, call.rows, gradient, parts, call.heads, count, call.size,
        call.near, call.scale, KEYS=keys, FAR=call.far, ROWS=few, T=call.tile, D=call.channels, num_warps=8,
    )  # fmt: skip
    return gradient


def table_gradient_like(table: torch.Tensor) -> torch.Tensor:
    """An empty gradient [H, R, d] of a table, [R, H, d] in memory, as projections read it."""
    return table.new_empty(table.shape[1], table.shape[0], table.shape[2]).transpose(0, 1)


@attention_in_tiles_backward.register_fake
def _(gradient, context, log_sum, train_tables, query, key, value, position_key, position_query, *_):
    batch, heads, tokens, size = query.shape
    states = (query.new_empty(batch, tokens, heads, size).transpose(1, 2) for _ in range(3))
    tables = [table if train_tables else None for table in (position_key, position_query)]
    return *states, *(query.new_empty(0) if table is None else table_gradient_like(table) for table in tables)


def _save_for_backward(ctx, inputs, output):
    tensors, ctx.numbers = inputs[:12], inputs[12:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, _):
    if gradient is None:
        return (None,) * 17
    context, log_sum, *tensors = ctx.saved_tensors
    train_tables = any(ctx.needs_input_grad[3:5])
    gradients = attention_in_tiles_backward(gradient, context, log_sum, train_tables, *tensors, *ctx.numbers)
    needed = (part if need else None for part, need in zip(gradients, ctx.needs_input_grad[:5], strict=True))
    return *needed, *(None,) * 12


attention_in_tiles.register_autograd(_backward, setup_context=_save_for_backward)


class AttentionInTiles(torch.autograd.Function):
    """The operator with the same gradients; its own autograd reads the schema in each call, which takes longer."""

    @staticmethod
    def forward(ctx, *arguments):  # a `setup_context` would have its arguments bound by name in each call
        output = attention_in_tiles(*arguments)
        _save_for_backward(ctx, arguments, output)
        return output

    backward = staticmethod(_backward)


def in_graph_or_transform() -> bool:
    """True where only the operator itself can be recorded or transformed; without the package, for the Hub's kernel."""
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return in_graph or torch._C._functorch.peek_interpreter_stack() is not None


def tokens_first(states: torch.Tensor) -> torch.Tensor:
    """[B, N, H, d] in memory, as projections leave it; a copy where it is not."""
    return states.transpose(1, 2).contiguous()


@dataclass
class Call:
    """One call of the operator, and what its two passes give to the kernels."""

    query: torch.Tensor  # [B, H, N, d], then [B, N, H, d] like key and value
    key: torch.Tensor
    value: torch.Tensor
    position_key: torch.Tensor | None  # [H, R, d]
    position_query: torch.Tensor | None
    key_by_distance: torch.Tensor | None  # [H, (2 * near + 2) * T, d], the tables' rows of all distances
    query_by_distance: torch.Tensor | None
    rows: torch.Tensor | None  # [(2 * near + 2) * T], the row of each distance
    mask: torch.Tensor | None  # these four are a `TileLayout`
    spans: torch.Tensor | None
    places: torch.Tensor | None
    dropout_seed: torch.Tensor | None  # [1], with dropout
    scale: float  # of the scores
    dropout_p: float
    causal: bool
    near: int  # tiles that are further apart share a row
    furthest: int  # tiles of one document are at most this far apart

    def __post_init__(self) -> None:
        self.batch, self.heads, self.tokens, self.size = self.query.shape
        self.query, self.key, self.value = map(tokens_first, (self.query, self.key, self.value))
        self.c2p, self.p2c = self.position_key is not None, self.position_query is not None
        self.nothing = self.query.new_empty(1)
        self.tables, self.visibility = (
            [self.nothing if tensor is None else tensor for tensor in tensors]
            for tensors in ((self.key_by_distance, self.query_by_distance), (self.mask, self.spans, self.places))
        )
        self.tile, self.launches = launches(self.query.dtype, self.query.device)
        self.blocks = -(-self.tokens // self.tile)
        self.programs = self.batch * self.blocks if self.places is None else len(self.places)
        self.slots = min(2 * self.near, self.furthest) + 2  # blocks of distances of a program
        self.far = self.furthest > self.near and (self.c2p or self.p2c)
        self.seed = self.nothing if self.dropout_seed is None else self.dropout_seed
        self.channels = max(16, 1 << (self.size - 1).bit_length())
        self.sizes = (self.batch, self.heads, self.tokens, self.size, self.blocks, self.near)

    def constants(self) -> dict[str, object]:
        mask = "none" if self.mask is None else "numbers" if self.mask.dim() == 2 else "pairs"
        precision = "tf32" if products_use_tf32() else "ieee"
        kinds = {"MASK": mask, "CAUSAL": self.causal, "PACKED": self.places is not None, "DROPOUT": self.dropout_p > 0}
        return {**kinds, "PRECISION": precision, "T": self.tile, "D": self.channels}

    def launch(self, kernel: int) -> dict[str, int]:
        warps, stages = self.launches[kernel if self.channels <= 64 else -1]
        # triton 3.10 would no longer multiply and add in one
        return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}

    def far_products(self) -> list[torch.Tensor]:
        """Products [2, B, H, N] of queries with Kr of far keys, and of keys with Qr."""
        from .attention_triton_forward import far_products_kernel

        products = []
        for states, table in zip((self.query, self.key), self.tables, strict=True):
            if table is self.nothing or not self.far:
                products.append(self.nothing)
                continue
            shape = (2, self.batch, self.heads, self.tokens)
            products.append(torch.empty(shape, dtype=torch.float32, device=states.device))
            far_products_kernel[(self.blocks, self.heads, self.batch)](
                states, table, products[-1], self.tokens, self.heads, table.shape[1], self.size,
                T=self.tile, D=self.channels,
            )  # fmt: skip
        return products
