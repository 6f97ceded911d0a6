"""The operator of disentangled attention in tiles, for PyTorch: its arguments, launches and gradients.

Legend: B batch, H heads, N tokens, d head size, T tokens of a tile, R rows of the relative table.

The kernels are in attention_triton_forward.py and attention_triton_backward.py, the derivation in
docs/attention_triton.md. These three files need torch, triton and the standard library only: hub_kernel.py makes a
kernel for the Hub of them.
"""

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

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
ROWS_OF_PROGRAM = 16  # rows of a table in a program of row_gradients_kernel
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
    compute_once: Callable[[Hashable, Callable[[], Any]], Any] = lambda _, compute: compute(),
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
    if position_key is position_query is None:
        rows_of_distance = None
    elif rows_of_distance is None:
        raise ValueError("tables of positions need rows_of_distance, the row of each distance from -k to k")
    if scale <= 0:  # the kernels look for the largest score before they scale it
        position_query = None if position_query is None else position_query * scale
        query, scale = query * scale, 1.0
    tables = [None if table is None else table.to(query.dtype) for table in (position_key, position_query)]
    trained = [table.shape[1] for table in tables if table is not None and table.requires_grad]
    table_rows = trained[0] if trained and torch.is_grad_enabled() else 0
    in_graph = needs_operator(query)

    def describe() -> "tuple[torch.Tensor | None, tuple[Any, ...] | Plan]":
        tile = launches(query.dtype, query.device)[0]
        batch, _, tokens, _ = query.shape
        rows, ranges, near, furthest = None, None, 0, (tokens - 1) // tile
        if longest is not None and cu_seqlens is None:  # these documents begin anywhere in a tile
            furthest = min(furthest, (longest + tile - 2) // tile)
        elif longest is not None:
            furthest = min(furthest, (longest - 1) // tile)
        if rows_of_distance is not None:
            distance = rows_of_distance.shape[0] // 2 if saturation is None else saturation
            near = min(furthest, (distance + tile - 2) // tile)
            rows = rows_by_distance(rows_of_distance, (near + 1) * tile)
            ranges = ranges_of_rows(rows, table_rows) if table_rows else None
        layout = layout_in_tiles(visible, documents, cu_seqlens, batch, tokens, tile)
        call = (rows, ranges, *layout, scale, dropout_p, causal, near, furthest, table_rows)
        return rows, call if in_graph else Plan(query, *call)

    positions = (rows_of_distance, saturation, table_rows)
    call = (query.shape, query.dtype, query.device, longest, scale, dropout_p, in_graph)
    rows, plan = compute_once(("tiles", *positions, *call), describe)
    # the tables' rows of all distances, [(2 * near + 2) * T, H, d]; their gradient goes to the tables themselves
    by_distance = [None if table is None else table.detach().transpose(0, 1).index_select(0, rows) for table in tables]
    seed = torch.randint(2**31, (1,), device=query.device) if dropout_p > 0 else None
    tensors: tuple[Any, ...] = (query, key, value, *by_distance, seed)
    if in_graph:
        return attention_in_tiles(*tables, *tensors, *plan)[0]
    if not torch.is_grad_enabled():
        return launch_forward(plan, *tensors)[0]
    return AttentionInTiles.apply(*tables, plan, *tensors)


def layout_in_tiles(
    visible: torch.Tensor | None,
    documents: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    batch: int,
    tokens: int,
    tile: int,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Which tokens see each other, as the kernels read it: mask, spans and places of a `Plan`."""
    places = None if cu_seqlens is None else places_in_packed_row(cu_seqlens, tokens, tile)
    if visible is not None and visible.dim() == 3:
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None, :])
        return visible.contiguous().view(torch.uint8), None, places
    if documents is not None:
        numbers = (documents - documents[:, :1]).int().expand(batch, -1).contiguous()
    elif visible is not None:
        numbers = torch.zeros_like(visible, dtype=torch.int32)
    else:
        return None, None, places
    spans = tile_spans(numbers, visible, tile) if places is None else None
    if visible is not None:
        numbers = numbers.masked_fill(~visible, -1)
    return numbers, spans, places


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

    If a tile sees another, that one sees it too: its keys read what its queries wrote in the backward pass.

    Args:
        numbers: [B, N], the number of each token's document, which never decreases along a row.
        real: [B, N] of bool, False for padding. A tile before or after all real tokens has no blocks: its first is not
            below its last.
    """
    tokens = numbers.shape[1]
    first, last = torch.searchsorted(numbers, numbers), torch.searchsorted(numbers, numbers, right=True)
    if real is not None:
        position = torch.arange(tokens, device=numbers.device)
        begin = torch.where(real, position, tokens).amin(1, keepdim=True)
        end = torch.where(real, position + 1, 0).amax(1, keepdim=True)
        inside = (position >= begin) & (position < end)
        first, last = torch.where(inside, first.clamp(begin), tokens), torch.where(inside, last.clamp(max=end), 0)
    missing = -tokens % tile
    first = torch.nn.functional.pad(first, (0, missing), value=ANY_END).unflatten(1, (-1, tile)).amin(2) // tile
    last = (torch.nn.functional.pad(last, (0, missing)).unflatten(1, (-1, tile)).amax(2) + tile - 1) // tile
    return torch.stack([first, last], 2).int()


def rows_by_distance(rows_of_distance: torch.Tensor, reach: int) -> torch.Tensor:
    """The row of each distance in [-reach, reach)."""
    k = (rows_of_distance.shape[0] - 1) // 2
    return rows_of_distance[torch.arange(-reach, reach, device=rows_of_distance.device).clamp(-k, k) + k]


def ranges_of_rows(rows: torch.Tensor, table_rows: int) -> torch.Tensor:
    """Which of `rows` are among each 16 rows of a table: first index, last index from the end, [2, R / 16]."""
    groups = torch.arange(-(-table_rows // ROWS_OF_PROGRAM), device=rows.device)[:, None]
    inside = (rows // ROWS_OF_PROGRAM == groups).int()  # argmax returns the first maximum
    return torch.stack([inside.argmax(1), inside.flip(1).argmax(1)])


class Plan:
    """What all layers of a forward pass share: arguments of the kernels, beside states and tables."""

    def __init__(
        self,
        query: torch.Tensor,
        rows: torch.Tensor | None,  # [(2 * near + 2) * T], the row of each distance
        row_ranges: torch.Tensor | None,  # see `ranges_of_rows`, for gradients of tables
        mask: torch.Tensor | None,  # int32 [B, N], numbers of documents, -1 for padding; or bytes [B, N, N], 1: visible
        spans: torch.Tensor | None,  # int32 [B, blocks, 2], see `tile_spans`
        places: torch.Tensor | None,  # int32 [programs, 3], see `places_in_packed_row`
        scale: float,  # of the scores
        dropout_p: float,
        causal: bool,
        near: int,  # tiles that are further apart share a row, or have none
        furthest: int,  # tiles of one document are at most this far apart
        table_rows: int,  # R, or 0 without gradients of the tables
    ):
        self.rows, self.row_ranges, self.visibility = rows, row_ranges, (mask, spans, places)
        self.scale, self.dropout_p = float(scale), float(dropout_p)  # Triton compiles for the type of a number
        self.near, self.table_rows = near, table_rows
        self.batch, self.heads, self.tokens, self.size = query.shape
        self.device_index = query.get_device()  # -1 for the CPU
        self.nothing = query.new_empty(1)  # stands for None
        self.tile, self.launches = launches(query.dtype, query.device)
        self.blocks = -(-self.tokens // self.tile)
        self.programs = self.batch * self.blocks if places is None else len(places)
        others = self.blocks - 1 if places is None else furthest  # that a tile has at most
        self.slots = min(near if causal else 2 * near, others) + 1  # near tiles of a program
        self.far = furthest > near
        self.parts = min(TABLE_GRADIENT_SPLITS, self.programs)
        self.channels = max(16, 1 << (self.size - 1).bit_length())
        self.sizes = (self.batch, self.heads, self.tokens, self.size, self.blocks, near)
        self.constants = {
            "FAR": self.far,
            "MASK": "none" if mask is None else "numbers" if mask.dim() == 2 else "pairs",
            "CAUSAL": causal,
            "PACKED": places is not None,
            "DROPOUT": self.dropout_p > 0,
            "PRECISION": "tf32" if products_use_tf32() else "ieee",
            "ROWS": ROWS_OF_PROGRAM,
            "T": self.tile,
            "D": self.channels,
        }
        # kernels are compiled for these properties of numbers, beside constants and tensors
        self.key = (self.device_index, self.size, self.tokens % 16 == 0, self.tokens == 1, *self.constants.values())

    def options(self, kernel: int) -> dict[str, int]:
        warps, stages = self.launches[kernel if self.channels <= 64 else -1]
        return {"num_warps": warps, "num_stages": stages}


class Kernel:
    """Launches a Triton kernel; unlike `kernel[grid](...)`, it does not bind and inspect the arguments again each time.

    Compiled kernels are kept by all that Triton compiles for: constants, options, types and alignment of tensors, and
    `Plan.key`.
    """

    def __init__(self, file: str, name: str):
        self.file, self.name = file, name
        self.compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def launch(
        self,
        plan: Plan,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: tuple[float, ...],
        options: dict[str, int],
        **constants: bool,
    ) -> None:
        """Launch the kernel with constants of its own and those of the plan that it has."""
        pointers = [plan.nothing if tensor is None else tensor for tensor in tensors]
        kinds = [(pointer.dtype, pointer.data_ptr() % 16 == 0) for pointer in pointers]
        key = (plan.key, *constants.values(), *options.values(), *kinds)
        if key in self.compiled:
            compiled, values = self.compiled[key]
            stream = torch._C._cuda_getCurrentRawStream(plan.device_index)  # Triton asks the same in more steps
            compiled[grid](*pointers, *numbers, *values, stream=stream)
            return
        function = getattr(import_module(f".{self.file}", __package__), self.name)
        constants = {**plan.constants, **constants}
        values = tuple(constants[name] for name in function.arg_names[len(tensors) + len(numbers) :])
        # triton 3.10 would no longer multiply and add in one
        compiled = function[grid](*pointers, *numbers, *values, **options, enable_fp_fusion=True)
        if compiled is not None and torch.version.hip is None:  # in the interpreter; AMD's depend on sizes in bytes too
            self.compiled[key] = compiled, values


forward_kernel = Kernel("attention_triton_forward", "forward_kernel")
far_products_kernel = Kernel("attention_triton_forward", "far_products_kernel")
own_gradients_kernel = Kernel("attention_triton_backward", "own_gradients_kernel")
table_gradients_kernel = Kernel("attention_triton_backward", "table_gradients_kernel")
row_gradients_kernel = Kernel("attention_triton_backward", "row_gradients_kernel")


def tokens_first(states: torch.Tensor) -> torch.Tensor:
    """[B, N, H, d] in memory, as projections leave it; a copy where it is not."""
    return states.transpose(1, 2).contiguous()


def launch_forward(
    plan: Plan,
    query: torch.Tensor,  # [B, H, N, d]
    key: torch.Tensor,
    value: torch.Tensor,
    key_table: torch.Tensor | None,  # by distance, for c2p
    query_table: torch.Tensor | None,
    seed: torch.Tensor | None,  # [1], with dropout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context [B, H, N, d], and the log-sums [B, H, N] of scores, in base 2, that the backward pass needs."""
    query, key, value = tokens_first(query), tokens_first(key), tokens_first(value)
    context = torch.empty_like(query)
    log_sum = query.new_empty((plan.batch, plan.heads, plan.tokens), dtype=torch.float32)
    with torch.cuda.device_of(query):
        far = far_products(plan, query, key_table), far_products(plan, key, query_table)
        forward_kernel.launch(
            plan, (plan.programs, plan.heads, 1),
            (query, key, value, key_table, query_table, *far, *plan.visibility, seed, context, log_sum),
            (*plan.sizes, plan.scale, plan.dropout_p), plan.options(0),
            C2P=key_table is not None, P2C=query_table is not None,
        )  # fmt: skip
    return context.transpose(1, 2), log_sum


def far_products(plan: Plan, states: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor | None:
    """Products [2, B, H, N] of queries with Kr of far keys, or of keys with Qr."""
    if table is None or not plan.far:
        return None
    products = states.new_empty((2, plan.batch, plan.heads, plan.tokens), dtype=torch.float32)
    sizes = (plan.tokens, plan.heads, len(table), plan.size)
    far_products_kernel.launch(plan, (plan.blocks, plan.heads, plan.batch), (states, table, products), sizes, {})
    return products


class Side(NamedTuple):
    """Queries or keys in the backward pass; its second run exchanges them."""

    states: torch.Tensor  # [B, N, H, d]
    weights: torch.Tensor  # [B, N, H, d]: dO of queries, V of keys
    table: torch.Tensor | None  # by distance: Kr of queries, Qr of keys
    far: torch.Tensor | None  # of `far_products`


def launch_backward(
    plan: Plan,
    gradient: torch.Tensor,  # [B, H, N, d]
    context: torch.Tensor,  # [B, H, N, d]
    log_sum: torch.Tensor,  # [B, H, N]
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_table: torch.Tensor | None,
    query_table: torch.Tensor | None,
    seed: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Gradients of position_key, position_query, query, key and value; None for tables without one."""
    gradient, context, query, key, value = map(tokens_first, (gradient, context, query, key, value))
    for_query, for_key, for_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    delta = torch.empty_like(log_sum)
    for_far = delta.new_empty(2, 2, plan.programs * plan.far, plan.heads, plan.size)
    tiles = query.new_empty(plan.programs, plan.heads, plan.slots, 2, plan.tile, plan.tile)
    with torch.cuda.device_of(query):
        queries = Side(query, gradient, key_table, far_products(plan, query, key_table))
        keys = Side(key, value, query_table, far_products(plan, key, query_table))
        for is_keys, own, other, for_own in ((False, queries, keys, for_query), (True, keys, queries, for_key)):
            own_gradients_kernel.launch(
                plan, (plan.programs, plan.heads, 1),
                (*own, *other, context, log_sum, delta, *plan.visibility, seed,
                 for_own, for_value, for_far[int(is_keys)], tiles),
                (plan.slots, *plan.sizes, plan.scale, plan.dropout_p), plan.options(1),
                OWN=own.table is not None, OTHER=other.table is not None, KEYS=is_keys,
            )  # fmt: skip
        for_tables = table_gradients(plan, queries, keys, tiles, for_far) if plan.table_rows else [None, None]
    return [*for_tables, for_query.transpose(1, 2), for_key.transpose(1, 2), for_value.transpose(1, 2)]


def table_gradients(
    plan: Plan, queries: Side, keys: Side, tiles: torch.Tensor, for_far: torch.Tensor
) -> list[torch.Tensor | None]:
    """Gradients [H, R, d] of the tables, from what `own_gradients_kernel` wrote."""
    sides = [(is_keys, side.states) for is_keys, side in ((False, queries), (True, keys)) if side.table is not None]
    blocks = 2 * plan.near + 2
    pieces = for_far.new_empty(len(sides), plan.parts, blocks, plan.heads, plan.tile, plan.size)  # parts of sums
    for (is_keys, states), piece in zip(sides, pieces, strict=True):
        table_gradients_kernel.launch(
            plan, (blocks, plan.heads, plan.parts), (states, tiles, *plan.visibility[1:], piece),
            (plan.programs, plan.heads, plan.tokens, plan.size, plan.blocks, plan.slots, plan.near),
            plan.options(2), KEYS=is_keys,
        )  # fmt: skip
    gradients = [tiles.new_empty(plan.table_rows, plan.heads, plan.size) for _ in sides]
    row_gradients_kernel.launch(
        plan, (-(-plan.table_rows // ROWS_OF_PROGRAM), plan.heads, len(sides)),
        (pieces, for_far.sum(2) if plan.far else None, plan.rows, plan.row_ranges, gradients[0], gradients[-1]),
        (plan.parts, plan.heads, plan.table_rows, plan.size, plan.near, int(sides[0][0]), plan.scale), {"num_warps": 8},
    )  # fmt: skip
    first, last = gradients[0].transpose(0, 1), gradients[-1].transpose(0, 1)
    return [None if queries.table is None else first, None if keys.table is None else last]


class AttentionInTiles(torch.autograd.Function):
    """Attention outside of graphs and transforms, which takes less time than the operator and its own autograd."""

    @staticmethod
    def forward(ctx, position_key, position_query, plan, *tensors):
        context, log_sum = launch_forward(plan, *tensors)
        # with the mask, so that autograd notices writes to it
        ctx.save_for_backward(context, log_sum, *tensors, *plan.visibility)
        ctx.plan = plan
        return context

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("the kernels have no second derivatives (create_graph=True): use the backend 'eager'")
        for_key_table, for_query_table, *others = launch_backward(ctx.plan, gradient, *ctx.saved_tensors[:8])
        return for_key_table, for_query_table, None, *others, None, None, None


def needs_operator(query: torch.Tensor) -> bool:
    """True where only the operator can be recorded, transformed or intercepted: in graphs, torch.func and modes."""
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None
    is_plain = type(query) in (torch.Tensor, torch.nn.Parameter)
    return in_graph or in_transform or not is_plain or _get_current_dispatch_mode() is not None


# the arguments of `launch_forward`, then those of `Plan`
CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_table, Tensor? query_table, Tensor? seed, Tensor? rows, "
    "Tensor? row_ranges, Tensor? mask, Tensor? spans, Tensor? places, float scale, float dropout_p, bool causal, "
    "SymInt near, SymInt furthest, SymInt table_rows"
)
STATES, TENSORS = 6, 11  # query to seed, query to places


@torch.library.custom_op(
    "hf_deberta::tiled_attention",
    mutates_args=(),
    schema=f"(Tensor? position_key, Tensor? position_query, {CALL}) -> (Tensor, Tensor)",
)
def attention_in_tiles(position_key, position_query, *call) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `launch_forward`."""
    return launch_forward(Plan(call[0], *call[STATES:]), *call[:STATES])


@attention_in_tiles.register_fake
def _(position_key, position_query, query, *_):
    batch, heads, tokens, size = query.shape
    context = query.new_empty(batch, tokens, heads, size).transpose(1, 2)
    return context, query.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op(
    "hf_deberta::tiled_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor context, Tensor log_sum, {CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_in_tiles_backward(gradient, context, log_sum, *call) -> tuple[torch.Tensor, ...]:
    """The results of `launch_backward`, empty for tables without a gradient."""
    gradients = launch_backward(Plan(call[0], *call[STATES:]), gradient, context, log_sum, *call[:STATES])
    return tuple(gradient.new_empty(0) if part is None else part for part in gradients)


@attention_in_tiles_backward.register_fake
def _(gradient, context, log_sum, query, key, value, key_table, query_table, *others):
    batch, heads, tokens, size = query.shape
    table_rows = others[-1]
    tables = (
        query.new_empty(0)
        if table is None or not table_rows
        else query.new_empty(table_rows, heads, size).transpose(0, 1)
        for table in (key_table, query_table)
    )
    return *tables, *(query.new_empty(batch, tokens, heads, size).transpose(1, 2) for _ in range(3))


def _save_for_backward(ctx, inputs, output):
    _, _, *call = inputs
    ctx.save_for_backward(*output, *call[:TENSORS])
    ctx.numbers = call[TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, _):
    gradients = attention_in_tiles_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    needed = (part if need else None for part, need in zip(gradients, ctx.needs_input_grad, strict=False))
    return *needed, *(None,) * (len(ctx.needs_input_grad) - len(gradients))


attention_in_tiles.register_autograd(_backward, setup_context=_save_for_backward)
