"""The backward pass of attention_triton_forward.py: gradients of queries, keys and values, and of the two tables.

Legend: T tokens of a tile; a tile's *own* tokens are its rows, the *other* tokens its columns (see the forward file).

The scores of every tile are computed again, three times in all. Each output is written by exactly one program, so
results do not depend on the order in which programs run. One kernel handles a tile of own tokens; it runs once with
queries as own tokens (dq) and once with keys as own tokens (dk, dv). Another handles one distance (the tables). With dS
the gradient of the scaled scores, R its rotation by rows, and * marking the row of far keys, up to the scale, which is
applied last:

    dq_i = sum_j dS_ij (k_j + Kr[i - j])    near: dS @ K + G_t @ block_t, G_t[a, r] = R[a, r] of tile t where r <= a, of
                                            tile t + 1 elsewhere;  far: dS @ K, and Kr* times the sum of dS
    dk_j = sum_i dS_ij (q_i + Qr[i - j])    the same with queries and keys exchanged and distances negated
    dKr_t = sum over tiles of R^T @ Q       dQr_t likewise;  far: the sum over i of q_i times the sum of its far dS

and the gradient of a row is the sum over its distances.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels of hf_deberta need triton, which comes with PyTorch for CUDA") from error

from .attention_triton_forward import (
    LOG2E,
    block_ranges,
    dropout_mask,
    far_scores,
    far_shift,
    load_block,
    load_tokens,
    locate_block,
    near_scores,
    product,
    rotated,
    visible_pairs,
)


@triton.jit
def score_gradients(
    scores, factor, own_weight, other_weight, log_sum, delta, pairs, keep, dropout_p,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Probabilities after dropout, and gradients of scaled scores; weights are dO and V, or V and dO with KEYS."""
    probability = tl.exp2(tl.where(pairs, scores * factor - log_sum, float("-inf")))
    from_above = product(own_weight, other_weight, PRECISION)
    dropped = probability
    if DROPOUT:
        from_above = tl.where(keep, from_above / (1.0 - dropout_p), 0.0)
        dropped = tl.where(keep, probability / (1.0 - dropout_p), 0.0)
    return dropped, probability * (from_above - delta)


@triton.jit(do_not_specialize=("batch", "heads", "blocks", "NEAR"))
def own_gradients_kernel(
    own_states, other_states, own_weights, other_weights,  # [B, N, H, d]; weights: dO and V, or V and dO with KEYS
    context,  # [B, N, H, d]
    own_table, other_table,  # [H, (2 * NEAR + 2) * T, d] by distance
    far_own, far_other,  # [2, B, H, N]
    log_sum, delta,  # [B, H, N] of queries: base 2; sum of dO * context, written here, read with KEYS
    mask, spans, places, seed,  # as in forward_kernel
    own_gradient, value_gradient,  # [B, N, H, d]; the second with KEYS
    far_gradient,  # [2, programs, H, d] of the far rows of own_table
    batch, heads, tokens, head_size, blocks, NEAR, scale, dropout_p,
    OWN: tl.constexpr, OTHER: tl.constexpr, KEYS: tl.constexpr, FAR: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head; with KEYS, dk and dv of one tile of keys."""
    row, start, length, block = locate_block(places, blocks, tokens, PACKED)
    head, stride = tl.program_id(1), heads * head_size
    base = ((row * tokens + start).to(tl.int64) * heads + head) * head_size
    own_states, other_states = own_states + base, other_states + base
    own_weights, other_weights = own_weights + base, other_weights + base
    by_token = (row * heads + head).to(tl.int64) * tokens + start
    far_own, far_other, log_sum, delta = far_own + by_token, far_other + by_token, log_sum + by_token, delta + by_token
    side_size = batch.to(tl.int64) * heads * tokens
    table_rows = (2 * NEAR + 2) * T
    own_table += head * table_rows * head_size
    other_table += head * table_rows * head_size
    if MASK == "numbers":
        mask += row.to(tl.int64) * tokens + start
    if MASK == "pairs":
        mask += (row.to(tl.int64) * tokens + start) * tokens + start
    draw = 0
    if DROPOUT:
        draw = tl.load(seed) + row * heads + head

    factor = scale * LOG2E
    own = load_tokens(own_states, block * T, length, stride, head_size, T, D)
    own_weight = load_tokens(own_weights, block * T, length, stride, head_size, T, D)
    a, b = block * T + tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    r = tl.arange(0, T)[None, :]
    channel = tl.arange(0, D)
    gradient = tl.zeros([T, D], tl.float32)
    for_values = tl.zeros([T, D], tl.float32)
    keep = tl.full([T, T], True, tl.int1)
    if not KEYS:
        log_sums = tl.load(log_sum + a, mask=a < length, other=float("inf"))
        weighted = own_weight.to(tl.float32) * load_tokens(context + base, block * T, length, stride, head_size, T, D)
        deltas = tl.sum(weighted, 1)[:, None]
        tl.store(delta + a, deltas, mask=a < length)
    spanned: tl.constexpr = MASK == "numbers" and not PACKED
    begin, near, far, end = block_ranges(spans, row, block, blocks, length, NEAR, spanned, CAUSAL, KEYS, T)

    for side in tl.static_range(2 if FAR else 0):
        at_end = 1 - side if KEYS else side  # left of a query is right of a key
        at = at_end * side_size
        shift = far_shift(far_own + at, a, length, factor, OWN)
        total = tl.zeros([T], tl.float32)
        for tile in range(far if side else begin, end if side else near):
            other_token = tile * T + b
            other = load_tokens(other_states, tile * T, length, stride, head_size, T, D)
            other_weight = load_tokens(other_weights, tile * T, length, stride, head_size, T, D)
            scores = far_scores(own, other, far_other + at, other_token, length, OTHER, PRECISION)
            i, j = (other_token, a) if KEYS else (a, other_token)
            pairs = visible_pairs(mask, i, j, length, tokens, MASK, CAUSAL)
            if KEYS:
                log_sums = tl.load(log_sum + i, mask=i < length, other=float("inf"))
                deltas = tl.load(delta + i, mask=i < length, other=0.0)
            if DROPOUT:
                keep = dropout_mask(draw, start + i, start + j, tokens, dropout_p)
            probability, for_scores = score_gradients(
                scores, factor, own_weight, other_weight, log_sums - shift, deltas, pairs, keep, dropout_p,
                DROPOUT, PRECISION,
            )  # fmt: skip
            if KEYS:
                probability = probability.to(own.dtype)
                for_values = tl.dot(probability, other_weight, for_values, input_precision=PRECISION)
            if OWN:
                total += tl.sum(for_scores, 1)
            gradient = tl.dot(for_scores.to(own.dtype), other, gradient, input_precision=PRECISION)
        if OWN:
            last = tl.where(at_end == 1, 0, table_rows - 1)
            shared = tl.load(own_table + last * head_size + channel, mask=channel < head_size, other=0.0).to(tl.float32)
            gradient += total[:, None] * shared[None, :]
            for_shared = tl.sum(total[:, None] * own.to(tl.float32), 0)
            target = far_gradient + ((at_end * tl.num_programs(0) + tl.program_id(0)) * heads + head) * head_size
            tl.store(target + channel, for_shared, mask=channel < head_size)

    turned = tl.zeros([T, T], own.dtype)
    for tile in range(near, far):
        other_token = tile * T + b
        other = load_tokens(other_states, tile * T, length, stride, head_size, T, D)
        other_weight = load_tokens(other_weights, tile * T, length, stride, head_size, T, D)
        before = tl.zeros([T, T], tl.float32)
        if OWN:  # not kept from the tile before, as in forward_kernel: registers are scarcer than products here
            before = product(own, load_block(own_table, block - tile, NEAR, head_size, KEYS, T, D), PRECISION)
        scores, _ = near_scores(
            own, other, before, own_table, other_table, block - tile, NEAR, head_size, OWN, OTHER, KEYS, PRECISION, T, D
        )
        i, j = (other_token, a) if KEYS else (a, other_token)
        pairs = visible_pairs(mask, i, j, length, tokens, MASK, CAUSAL)
        if KEYS:
            log_sums = tl.load(log_sum + i, mask=i < length, other=float("inf"))
            deltas = tl.load(delta + i, mask=i < length, other=0.0)
        if DROPOUT:
            keep = dropout_mask(draw, start + i, start + j, tokens, dropout_p)
        probability, for_scores = score_gradients(
            scores, factor, own_weight, other_weight, log_sums, deltas, pairs, keep, dropout_p, DROPOUT, PRECISION
        )
        if KEYS:
            probability = probability.to(own.dtype)
            for_values = tl.dot(probability, other_weight, for_values, input_precision=PRECISION)
        gradient = tl.dot(for_scores.to(own.dtype), other, gradient, input_precision=PRECISION)
        if OWN:
            here = rotated(for_scores, "rows", T).to(own.dtype)
            of_block = tl.where(r <= tl.arange(0, T)[:, None], here, turned)
            rows = load_block(own_table, block - tile, NEAR, head_size, KEYS, T, D)
            gradient = tl.dot(of_block, rows, gradient, input_precision=PRECISION)
            turned = here
    if OWN and near < far:
        of_block = tl.where(r <= tl.arange(0, T)[:, None], 0.0, turned).to(own.dtype)
        rows = load_block(own_table, block - far, NEAR, head_size, KEYS, T, D)
        gradient = tl.dot(of_block, rows, gradient, input_precision=PRECISION)

    inside = (a < length) & (channel[None, :] < head_size)
    target = base + a * stride + channel[None, :]
    tl.store(own_gradient + target, (gradient * scale).to(own.dtype), mask=inside)
    if KEYS:
        tl.store(value_gradient + target, for_values.to(own.dtype), mask=inside)


@triton.jit(do_not_specialize=("rows", "row_step", "heads", "NEAR"))
def table_gradients_kernel(
    query, key, value, context_gradient,  # [B, N, H, d]
    key_table, query_table,  # [H, (2 * NEAR + 2) * T, d]
    log_sum, delta,  # [B, H, N]
    mask, spans, bounds, seed,  # bounds of a packed row: [documents + 1]
    key_gradient, query_gradient,  # [strides of rows * strides of tiles, 2 * NEAR + 1, 2, H, T, d]
    rows, row_step, heads, tokens, head_size, NEAR, scale, dropout_p,
    C2P: tl.constexpr, P2C: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Contributions of the tiles at distance t from the diagonal to the gradients of blocks t and t - 1.

    Programs share the work: each processes every `row_step`-th row, or document, and there every n-th tile.
    """
    t, head, part = tl.program_id(0) - NEAR, tl.program_id(1), tl.program_id(2)
    tile_step = tl.num_programs(2) // row_step
    factor = scale * LOG2E
    stride = heads * head_size
    table_size = (2 * NEAR + 2) * T * head_size
    key_table, query_table = key_table + head * table_size, query_table + head * table_size
    a, b = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    keep = tl.full([T, T], True, tl.int1)
    spanned: tl.constexpr = MASK == "numbers" and not PACKED
    key_here = tl.zeros([T, D], tl.float32)
    key_below = tl.zeros([T, D], tl.float32)
    query_here = tl.zeros([T, D], tl.float32)
    query_below = tl.zeros([T, D], tl.float32)
    for row in range(part % row_step, rows, row_step):
        batch_row, start, length = tl.cast(row, tl.int32), 0, tokens
        if PACKED:
            batch_row, start = tl.cast(0, tl.int32), tl.load(bounds + row)
            length = tl.load(bounds + row + 1) - start
        base = ((batch_row * tokens + start).to(tl.int64) * heads + head) * head_size
        by_token = (batch_row * heads + head).to(tl.int64) * tokens + start
        row_mask = mask
        if MASK == "numbers":
            row_mask = mask + batch_row.to(tl.int64) * tokens + start
        if MASK == "pairs":
            row_mask = mask + (batch_row.to(tl.int64) * tokens + start) * tokens + start
        draw = 0
        if DROPOUT:
            draw = tl.load(seed) + batch_row * heads + head
        blocks = tl.cdiv(length, T)
        end = tl.minimum(blocks, blocks + t)
        if CAUSAL:
            end = tl.where(t < 0, 0, end)
        first = tl.maximum(t, 0) + part // row_step
        for block in range(first, end, tile_step):
            see_each_other = True
            if spanned:
                span = spans + 2 * (batch_row * blocks + block)
                see_each_other = (tl.load(span) <= block - t) & (block - t < tl.load(span + 1))
            if see_each_other:
                i, j = block * T + a, (block - t) * T + b
                queries = load_tokens(query + base, block * T, length, stride, head_size, T, D)
                keys = load_tokens(key + base, (block - t) * T, length, stride, head_size, T, D)
                values = load_tokens(value + base, (block - t) * T, length, stride, head_size, T, D)
                above = load_tokens(context_gradient + base, block * T, length, stride, head_size, T, D)
                before = tl.zeros([T, T], tl.float32)
                if C2P:
                    before = product(queries, load_block(key_table, t, NEAR, head_size, False, T, D), PRECISION)
                scores, _ = near_scores(
                    queries, keys, before, key_table, query_table, t, NEAR, head_size, C2P, P2C, False, PRECISION, T, D
                )
                pairs = visible_pairs(row_mask, i, j, length, tokens, MASK, CAUSAL)
                if DROPOUT:
                    keep = dropout_mask(draw, start + i, start + j, tokens, dropout_p)
                log_sums = tl.load(log_sum + by_token + i, mask=i < length, other=float("inf"))
                deltas = tl.load(delta + by_token + i, mask=i < length, other=0.0)
                _, for_scores = score_gradients(
                    scores, factor, above, values, log_sums, deltas, pairs, keep, dropout_p, DROPOUT, PRECISION
                )
                if C2P:
                    turned = tl.trans(rotated(for_scores, "rows", T).to(query.dtype.element_ty))  # [r, a]
                    here = tl.where(a <= b, turned, 0.0).to(query.dtype.element_ty)
                    below = tl.where(a <= b, 0.0, turned).to(query.dtype.element_ty)
                    key_here = tl.dot(here, queries, key_here, input_precision=PRECISION)
                    key_below = tl.dot(below, queries, key_below, input_precision=PRECISION)
                if P2C:
                    turned = rotated(for_scores, "back", T).to(query.dtype.element_ty)  # [r, b]
                    here = tl.where(a + b < T, turned, 0.0).to(query.dtype.element_ty)
                    below = tl.where(a + b < T, 0.0, turned).to(query.dtype.element_ty)
                    query_here = tl.dot(here, keys, query_here, input_precision=PRECISION)
                    query_below = tl.dot(below, keys, query_below, input_precision=PRECISION)
    channel = tl.arange(0, D)[None, :]
    first = ((part * tl.num_programs(0) + tl.program_id(0)) * 2 * heads + head).to(tl.int64) * T
    target = (first + a) * head_size + channel
    second = heads * T * head_size
    inside = channel < head_size
    if C2P:
        tl.store(key_gradient + target, key_here, mask=inside)
        tl.store(key_gradient + target + second, key_below, mask=inside)
    if P2C:
        tl.store(query_gradient + target, query_here, mask=inside)
        tl.store(query_gradient + target + second, query_below, mask=inside)


@triton.jit(do_not_specialize=("parts", "heads", "count", "NEAR"))
def row_gradients_kernel(
    near, far,  # [parts, 2 * NEAR + 1, 2, H, T, d] of table_gradients_kernel; [2, H, d] of the last row and the first
    rows,  # [(2 * NEAR + 2) * T] of distances
    gradient,  # [H, R, d]
    parts, heads, count, head_size, NEAR, scale, ROWS: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Some rows of the gradient of one head's table, each the sum over its distances, times `scale`."""
    head, tiles = tl.program_id(1), 2 * NEAR + 1
    row, x, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, T), tl.arange(0, D)[None, :]
    inside = channel < head_size
    total = tl.zeros([ROWS, D], tl.float32)
    for block in range(0, tiles + 1):
        at = block * T + x
        chosen = (tl.load(rows + at)[None, :] == row).to(tl.float32)
        if tl.max(chosen) > 0:
            of_block = tl.zeros([T, D], tl.float32)
            for part in range(0, parts):
                pair = (part * tiles + block).to(tl.int64) * 2  # "here" of the tile before, "below" of this one
                here = (((pair - 2) * heads + head) * T + x[:, None]) * head_size + channel
                below = (((pair + 1) * heads + head) * T + x[:, None]) * head_size + channel
                of_block += tl.load(near + here, mask=inside & (at >= T)[:, None], other=0.0)
                of_block += tl.load(near + below, mask=inside & (at < tiles * T)[:, None], other=0.0)
            total = tl.dot(chosen, of_block, total, input_precision="ieee")
    for side in tl.static_range(2):
        end = tl.load(rows + (0 if side else (tiles + 1) * T - 1))
        shared = tl.load(far + (side * heads + head) * head_size + channel, mask=inside, other=0.0)
        total += tl.where(row == end, shared, 0.0)
    target = (head * count + row) * head_size + channel
    tl.store(gradient + target, (total * scale).to(gradient.dtype.element_ty), mask=inside & (row < count))
