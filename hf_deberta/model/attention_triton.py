"""The Triton backend: disentangled attention on a GPU without an [N, N] table, forward and backward.

Legend: B batch, H heads, N tokens, d head size, T tokens of a tile, R rows of the relative table.

The kernels are in attention_triton_forward.py and attention_triton_backward.py, the derivation in
docs/attention_triton.md. Here are the operator that PyTorch sees, its launches, and what it does not do.
"""

import math
import os
import re
from importlib.util import find_spec

import torch

from .fast_path_guards import in_functorch_transform, is_tracing_or_compiling

TRITON_IS_THERE = find_spec("triton") is not None
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs kernels in Python, on the CPU: for tests

# tokens of a tile; warps and stages of the kernels: forward, own_gradients, and table_gradients or any kernel where a
# head has more than 64 channels. On Hopper, more warps than a sixteenth of the tokens compute products twice:
# `times_computed` in benchmarks/attention_triton_aot.py
LAUNCHES = {
    "Hopper": (64, ((4, 2), (4, 1), (4, 1))),
    "Blackwell": (64, ((8, 2), (8, 2), (8, 1))),
    "others": (32, ((4, 2), (4, 1), (4, 1))),
    "float32": (32, ((8, 1), (8, 1), (8, 1))),
    "interpreter": (16, ((1, 1), (1, 1), (1, 1))),
}
CHIPS = {9: "Hopper", 10: "Blackwell"}  # by the first number of the compute capability
TABLE_GRADIENT_SPLITS = 4  # programs that share a distance in table_gradients_kernel
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 128
# a copy of this file, loaded from the Hub beside the package, must not answer the package's calls
OPERATORS = re.sub(r"\W", "_", __name__.rpartition(".")[0])


def is_applicable(query: torch.Tensor, query_positions: torch.Tensor | None) -> bool:
    """Whether a call is this backend's: every position a query. Few queries are sdpa's by design."""
    return query_positions is None and query.numel() > 0


def unsupported_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: tuple[str, ...],
    scale: float,
    dropout_p: float = 0.0,
) -> str | None:
    """What keeps this backend from answering a call that is meant for it, or None."""
    if not (query.is_cuda or INTERPRETING):
        return f"it runs on GPUs, and this is on {query.device.type}"
    if not TRITON_IS_THERE:
        return "triton is not installed"
    if torch.version.hip:
        return "its kernels are for NVIDIA GPUs"
    if query.is_cuda and capability(query.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if query.dtype not in DTYPES:
        return f"it knows float16, bfloat16 and float32, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are of different types: {query.dtype}, {key.dtype}, {value.dtype}"
    if query.shape[-1] > LARGEST_HEAD:
        return f"heads of {query.shape[-1]} channels are larger than {LARGEST_HEAD}"
    if dropout_p >= 1:
        return "a dropout of 1 keeps no probability"
    if scale <= 0:
        return f"it knows scales above zero, not {scale}"
    if "p2p" in terms:
        return "it has no p2p term"
    if in_functorch_transform() and not is_tracing_or_compiling():
        return "torch.func and forward-mode differentiation pass through PyTorch's own operations only"
    return None


@torch.compiler.assume_constant_result
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@torch.compiler.assume_constant_result
def launches(dtype: torch.dtype, device: torch.device) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Tokens of a tile, and warps and stages of each kernel."""
    if device.type != "cuda":
        return LAUNCHES["interpreter"]
    if dtype == torch.float32:
        return LAUNCHES["float32"]
    return LAUNCHES[CHIPS.get(torch.cuda.get_device_capability(device)[0], "others")]


def triton_attention(
    query: torch.Tensor,  # [B, H, N, d]
    key: torch.Tensor,
    value: torch.Tensor,
    position_key: torch.Tensor | None,  # [H, R, d]
    position_query: torch.Tensor | None,
    rows_of_distance: torch.Tensor | None,  # [2k + 1]
    first_row: int,
    saturation: int | None,  # from this distance on, rows are those of the ends
    mask: torch.Tensor | None,  # bool, [B, N] or [B, N, N]
    cu_seqlens: torch.Tensor | None,  # [documents + 1]
    lengths: tuple[int, ...] | None,  # of these documents, if they are known
    scale: float,
    terms: tuple[str, ...],
    dropout_p: float = 0.0,
    causal: bool = False,
) -> torch.Tensor:
    """Context [B, H, N, d]; zeros for who sees nothing. `causal`: no token sees those after it."""
    tile = launches(query.dtype, query.device)[0]
    position_key = position_key if "c2p" in terms else None
    position_query = position_query if "p2c" in terms else None
    tokens, bounds, rows = query.shape[2], None, None
    longest = max(*lengths, tokens - sum(lengths)) if lengths else tokens
    near = furthest = (longest - 1) // tile
    if terms:
        near = min(near, (saturation + tile - 2) // tile)
        rows = rows_by_distance(rows_of_distance, first_row, (position_key, position_query), (near + 1) * tile)
    seed = torch.randint(2**31, (1,), device=query.device) if dropout_p > 0 else None
    if cu_seqlens is not None:  # what is left after the last document is one more, and nothing lies outside of the row
        ends = torch.nn.functional.pad(cu_seqlens[1:].to(torch.int32).clamp(max=tokens), (0, 1), value=tokens)
        bounds = torch.nn.functional.pad(ends, (1, 0))
    tables = (None if table is None else table.to(query.dtype) for table in (position_key, position_query))
    return attention_in_tiles(
        query, key, value, *tables, rows, mask, bounds, seed, scale, dropout_p, causal, near, furthest
    )[0]  # fmt: skip


def rows_by_distance(rows_of_distance: torch.Tensor, first_row: int, tables, reach: int) -> torch.Tensor:
    """The row of each distance in [-reach, reach), counted from `first_row`."""
    k = (rows_of_distance.shape[0] - 1) // 2
    distance = torch.arange(-reach, reach, device=rows_of_distance.device)
    in_use = next(table.shape[1] for table in tables if table is not None)
    # pairs that no document holds may be further apart than any row in use; they are masked
    return (rows_of_distance[distance.clamp(-k, k) + k] - first_row).clamp(0, in_use - 1)


@torch.library.custom_op(f"{OPERATORS}::attention_in_tiles", mutates_args=())
def attention_in_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    rows: torch.Tensor | None,
    mask: torch.Tensor | None,
    bounds: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    causal: bool,
    near: int,
    furthest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context [B, H, N, d], and the log-sums [B, H, N] of scores, in base 2, that the backward pass needs.

    Tiles of one document are up to `furthest` apart, and those more than `near` apart share a row.
    """
    from .attention_triton_forward import forward_kernel

    who = (mask, bounds, seed, dropout_p, causal, near, furthest)
    call = Call(query, key, value, position_key, position_query, rows, *who)
    context = torch.empty_like(call.query)
    log_sum = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        forward_kernel[(call.programs, call.heads)](
            call.query, call.key, call.value, *call.tables(), *call.far_products(), *call.who_sees_whom(), call.seed,
            context, log_sum, *call.sizes(), scale * math.log2(math.e), dropout_p,
            C2P=call.c2p, P2C=call.p2c, FAR=call.far, **call.constants(), **call.launch(0),
        )  # fmt: skip
    return context.transpose(1, 2), log_sum


@attention_in_tiles.register_fake
def _(query, *_):
    batch, heads, tokens, size = query.shape
    context = query.new_empty(batch, tokens, heads, size).transpose(1, 2)
    return context, query.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op(f"{OPERATORS}::attention_in_tiles_backward", mutates_args=())
def attention_in_tiles_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    rows: torch.Tensor | None,
    mask: torch.Tensor | None,
    bounds: torch.Tensor | None,
    seed: torch.Tensor | None,
    context: torch.Tensor,
    log_sum: torch.Tensor,
    scale: float,
    dropout_p: float,
    causal: bool,
    near: int,
    furthest: int,
    for_tables: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value, position_key and position_query; of tables that are not there, nothing."""
    who = (mask, bounds, seed, dropout_p, causal, near, furthest)
    call = Call(query, key, value, position_key, position_query, rows, *who)
    delta = torch.empty_like(log_sum)
    inputs = (tokens_first(gradient), log_sum, delta, call.tables(), call.who_sees_whom())
    scales = (scale * math.log2(math.e), scale, dropout_p)
    with torch.cuda.device_of(query):
        states, far_rows = own_gradients(call, tokens_first(context), *inputs, scales)
        tables = [query.new_empty(0), query.new_empty(0)]
        if for_tables:
            near_rows = table_gradients(call, *inputs, scales)
            for index, table in enumerate((position_key, position_query)):
                if table is not None:
                    tables[index] = row_gradients(call, near_rows[index], far_rows[index].sum(1), rows, table)
    return *(part.transpose(1, 2) for part in states), *tables


def own_gradients(call: "Call", context, gradient, log_sum, delta, tables, whom, scales) -> tuple[list, list]:
    """Gradients [B, N, H, d] of query, key and value, and [2, programs, H, d] of the far rows of both tables.

    Writes `delta` [B, H, N], the sums of gradient * context.
    """
    from .attention_triton_backward import own_gradients_kernel

    for_query, for_key, for_value = (torch.empty_like(states) for states in (call.query, call.key, call.value))
    far_shape = (2, call.programs * call.far, call.heads, call.size)
    far_rows = [delta.new_empty(far_shape), delta.new_empty(far_shape)]
    far = call.far_products()
    for keys in (False, True):
        own, other = (call.key, call.query) if keys else (call.query, call.key)
        own_weights, other_weights = (call.value, gradient) if keys else (gradient, call.value)
        own_first = slice(None, None, -1 if keys else 1)
        own_gradients_kernel[(call.programs, call.heads)](
            own, other, own_weights, other_weights, context, *tables[own_first], *far[own_first], log_sum, delta, *whom,
            call.seed, for_key if keys else for_query, for_value, far_rows[keys], *call.sizes(), *scales,
            OWN=call.p2c if keys else call.c2p, OTHER=call.c2p if keys else call.p2c, KEYS=keys, FAR=call.far,
            **call.constants(), **call.launch(1),
        )  # fmt: skip
    return [for_query, for_key, for_value], far_rows


def table_gradients(call: "Call", gradient, log_sum, delta, tables, whom, scales) -> list[torch.Tensor]:
    """Gradients [parts, 2 * NEAR + 1, 2, H, T, d] that the tiles of each distance give to two blocks of each table."""
    from .attention_triton_backward import table_gradients_kernel

    documents = call.batch if call.bounds is None else call.bounds.shape[0] - 1
    row_step = min(documents, TABLE_GRADIENT_SPLITS)
    parts = row_step * (TABLE_GRADIENT_SPLITS // row_step)
    shape = (parts, 2 * call.near + 1, 2, call.heads, call.tile, call.size)
    found = [delta.new_empty(shape if wanted else 0) for wanted in (call.c2p, call.p2c)]
    table_gradients_kernel[(2 * call.near + 1, call.heads, parts)](
        call.query, call.key, call.value, gradient, *tables, log_sum, delta, whom[0], whom[-1], call.seed,
        *found, documents, row_step, call.heads, call.tokens, call.size, call.near, *scales,
        C2P=call.c2p, P2C=call.p2c, **call.constants(), **call.launch(2),
    )  # fmt: skip
    return found


@attention_in_tiles_backward.register_fake
def _(gradient, query, key, value, position_key, position_query, *rest):
    batch, heads, tokens, size = query.shape
    states = (query.new_empty(batch, tokens, heads, size).transpose(1, 2) for _ in range(3))
    tables, for_tables = (position_key, position_query), rest[-1]
    return *states, *(query.new_empty(table.shape if for_tables and table is not None else 0) for table in tables)


def row_gradients(call: "Call", near, far, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The gradient of a table [H, R, d] from `table_gradients` and that of far keys [2, H, d]."""
    from .attention_triton_backward import row_gradients_kernel

    count, few = table.shape[1], 16
    found = table.new_empty(table.shape)
    row_gradients_kernel[(-(-count // few), call.heads)](
        near, far, rows, found, near.shape[0], call.heads, count, call.size, call.near,
        ROWS=few, T=call.tile, D=call.channels, num_warps=8,
    )  # fmt: skip
    return found


def _remember(ctx, inputs, output):
    *tensors, ctx.scale, ctx.dropout_p, ctx.causal, ctx.near, ctx.furthest = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, _):
    if gradient is None:
        return (None,) * 14
    for_tables = any(ctx.needs_input_grad[3:5])
    arguments = (ctx.scale, ctx.dropout_p, ctx.causal, ctx.near, ctx.furthest, for_tables)
    found = attention_in_tiles_backward(gradient, *ctx.saved_tensors, *arguments)
    return *(part if need else None for part, need in zip(found, ctx.needs_input_grad[:5], strict=True)), *(None,) * 9


attention_in_tiles.register_autograd(_backward, setup_context=_remember)


def tokens_first(states: torch.Tensor) -> torch.Tensor:
    """[B, N, H, d] in memory, as projections leave it; a copy where it is not."""
    return states.transpose(1, 2).contiguous()


class Call:
    """What both passes hand to their kernels."""

    def __init__(
        self, query, key, value, position_key, position_query, rows, mask, bounds, seed, dropout_p, causal, near,
        furthest,
    ):  # fmt: skip
        self.batch, self.heads, self.tokens, self.size = query.shape
        self.query, self.key, self.value = map(tokens_first, (query, key, value))
        self.c2p, self.p2c = position_key is not None, position_query is not None
        self.by_distance = [t if t is None else t.index_select(1, rows) for t in (position_key, position_query)]
        self.mask, self.bounds, self.near, self.causal, self.dropout_p = mask, bounds, near, causal, dropout_p
        self.tile, self.launches = launches(query.dtype, query.device)
        self.blocks = -(-self.tokens // self.tile)
        self.programs = self.batch * self.blocks
        if bounds is not None:
            self.programs = self.tokens // self.tile + bounds.shape[0] - 1  # as many as there may be
        self.far = furthest > near and (self.c2p or self.p2c)
        self.nothing = query.new_empty(1)
        self.seed = self.nothing if seed is None else seed
        self.channels = max(16, 1 << (self.size - 1).bit_length())

    def tables(self) -> list[torch.Tensor]:
        return [self.nothing if table is None else table for table in self.by_distance]

    def sizes(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.tokens, self.size, self.blocks, self.near

    def constants(self) -> dict[str, object]:
        mask = "none" if self.mask is None else "tokens" if self.mask.dim() == 2 else "pairs"
        # as PyTorch's own products; torch.get_float32_matmul_precision() fails once this was set directly
        precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
        kinds = {"MASK": mask, "CAUSAL": self.causal, "PACKED": self.bounds is not None, "DROPOUT": self.dropout_p > 0}
        return {**kinds, "PRECISION": precision, "T": self.tile, "D": self.channels}

    def launch(self, kernel: int) -> dict[str, int]:
        warps, stages = self.launches[kernel if self.channels <= 64 else -1]
        # triton 3.10 would no longer multiply and add in one
        return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}

    def far_products(self) -> list[torch.Tensor]:
        """Products [2, B, H, N] of queries with Kr of far keys, and of keys with Qr."""
        from .attention_triton_forward import far_products_kernel

        found = []
        for states, table in zip((self.query, self.key), self.by_distance, strict=True):
            if table is None or not self.far:
                found.append(self.nothing)
                continue
            shape = (2, self.batch, self.heads, self.tokens)
            found.append(torch.empty(shape, dtype=torch.float32, device=states.device))
            far_products_kernel[(self.blocks, self.heads, self.batch)](
                states, table, found[-1], self.tokens, self.heads, table.shape[1], self.size,
                T=self.tile, D=self.channels,
            )  # fmt: skip
        return found

    def who_sees_whom(self) -> list[torch.Tensor]:
        """mask, ends, documents, first_block and bounds, as `forward_kernel` takes them."""
        mask = ends = documents = first_block = self.nothing
        if self.mask is not None:
            mask = self.mask.contiguous().view(torch.uint8)
            if self.mask.dim() == 2:
                ends = (mask * torch.arange(1, self.tokens + 1, device=mask.device)).amax(-1).int()
        if self.bounds is None:
            return [mask, ends, documents, first_block, self.nothing]
        blocks = (self.bounds.diff() + self.tile - 1) // self.tile
        last = blocks.cumsum(0)
        programs = torch.arange(self.programs, device=last.device)
        documents = torch.searchsorted(last, programs, right=True).clamp(max=len(last) - 1).int()
        return [mask, ends, documents, (last - blocks).int(), self.bounds]
