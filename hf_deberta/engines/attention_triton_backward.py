"""Gradients of the disentangled attention kernel.

Legend: see attention_triton_forward.py. Own tokens are queries or keys, others the other kind.

Each output is written by exactly one program, so results do not depend on the order in which programs run. One kernel
handles a tile of own tokens; it runs with queries as own tokens (dq), then with keys as own tokens (dk, dv). The first
run computes the scores of near tiles again, and writes their probabilities P and the gradients dS of their scores,
which the second run and the tables' kernel read. Both runs compute the scores of far tiles. Up to the scale, which is
applied last, and with * for the row of far keys:

    dq_i = sum_j dS_ij (k_j + Kr[i - j])     near: dS @ K + G_t @ block_t;  far: dS @ K, and Kr* times the sum of dS
    dk_j = sum_i dS_ij (q_i + Qr[i - j])     near: dS^T @ Q + F_t^T @ block_t;  far: likewise with Qr*
    dKr_t = sum over tiles of G_t^T @ Q      far: the sum over i of q_i times the sum of its far dS
    dQr_t = sum over tiles of F_t @ K        far: likewise with keys

Here G_t[a, r] is dS rotated by "rows", of tile t where r <= a and of tile t + 1 elsewhere, and F_t[r, b] is dS rotated
by "back", of tile t where r + b < T and of tile t + 1 elsewhere. The gradient of a row is the sum over its distances.
"""

import triton
import triton.language as tl

from .attention_triton_forward import (
    LOG2E,
    block_ranges,
    dropout_mask,
    load_block,
    load_numbers,
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
        factor_of_kept = 1.0 / (1.0 - dropout_p)
        from_above = tl.where(keep, from_above * factor_of_kept, 0.0)
        dropped = tl.where(keep, probability * factor_of_kept, 0.0)
    return dropped, probability * (from_above - delta)


@triton.jit
def tile_offset(program, block, tile, head, heads, slots, KEYS: tl.constexpr, T: tl.constexpr):
    """Where P and dS of a near tile are: at its queries' program, by its block of keys; `tile` is the others' block."""
    queries, key_block = (program - block + tile, block) if KEYS else (program, tile)
    return ((tl.cast(queries, tl.int64) * heads + head) * slots + key_block % slots) * 2 * T * T


@triton.jit
def add_position_rows(
    gradient, here, before, table, block, tile, NEAR, stride, head_size,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add G_t @ block_t, or F_t^T @ block_t with KEYS, from dS of a tile, `here`, and of the one before, rotated."""
    a, b = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    of_block = tl.where(a + b < T, before, here) if KEYS else tl.where(b <= a, here, before)
    rows = load_block(table, tile - block - 1 if KEYS else block - tile, NEAR, stride, head_size, T, D)
    return tl.dot(tl.trans(of_block) if KEYS else of_block, rows, gradient, input_precision=PRECISION)


@triton.jit(do_not_specialize=("slots", "batch", "heads", "blocks", "NEAR"))
def own_gradients_kernel(
    # of own tokens and of others: [B, N, H, d] twice, weights are dO of queries and V of keys; table by distance,
    # [(2 * NEAR + 2) * T, H, d]; [2, B, H, N]
    own_states, own_weights, own_table, far_own, other_states, other_weights, other_table, far_other,
    context,  # [B, N, H, d]
    log_sum, delta,  # [B, H, N] of queries: base 2; sum of dO * context, written here, read with KEYS
    mask, spans, places, seed,  # as in forward_kernel
    own_gradient, value_gradient,  # [B, N, H, d]; the second with KEYS
    far_gradient,  # [2, programs, H, d] of the far rows of own_table
    tiles,  # [query programs, H, slots, 2, T, T]: P after dropout and dS of near tiles, written here, read with KEYS
    slots, batch, heads, tokens, head_size, blocks, NEAR, scale, dropout_p,
    OWN: tl.constexpr, OTHER: tl.constexpr, KEYS: tl.constexpr, FAR: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head; with KEYS, dk and dv of one tile of keys."""
    row, start, length, block = locate_block(tl.program_id(0), places, blocks, tokens, PACKED)
    head, stride = tl.program_id(1), heads * head_size
    base = ((row * tokens + start).to(tl.int64) * heads + head) * head_size
    own_states, other_states = own_states + base, other_states + base
    own_weights, other_weights = own_weights + base, other_weights + base
    by_token = (row * heads + head).to(tl.int64) * tokens + start
    far_own, far_other, log_sum, delta = far_own + by_token, far_other + by_token, log_sum + by_token, delta + by_token
    side_size = batch.to(tl.int64) * heads * tokens
    own_table, other_table = own_table + head * head_size, other_table + head * head_size
    first = row.to(tl.int64) * tokens + start
    mask += first * tokens + start if MASK == "pairs" else first
    draw = tl.load(seed) + row * heads + head if DROPOUT else 0

    factor = scale * LOG2E
    own = load_tokens(own_states, block * T, length, stride, head_size, T, D)
    own_weight = load_tokens(own_weights, block * T, length, stride, head_size, T, D)
    a, b = block * T + tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    channel = tl.arange(0, D)
    gradient = tl.zeros([T, D], tl.float32)
    for_values = tl.zeros([T, D], tl.float32)
    if not KEYS:
        log_sums = tl.load(log_sum + a, mask=a < length, other=float("inf"))
        weighted = own_weight.to(tl.float32) * load_tokens(context + base, block * T, length, stride, head_size, T, D)
        deltas = tl.sum(weighted, 1)[:, None]
        tl.store(delta + a, deltas, mask=a < length)
    begin, near, far, end = block_ranges(spans, row, block, blocks, length, NEAR, MASK, PACKED, CAUSAL, KEYS, T)

    for side in tl.static_range(2 if FAR else 0):
        at_end = 1 - side if KEYS else side  # left of a query is right of a key
        at = at_end * side_size
        # the term of own tokens is one number per own token, which the log-sums take in place of the scores
        shift = load_numbers(far_own + at, a, length) * factor if OWN else a * 0.0
        total = tl.zeros([T], tl.float32)
        for tile in range(far if side else begin, end if side else near):
            other_token = tile * T + b
            other = load_tokens(other_states, tile * T, length, stride, head_size, T, D)
            other_weight = load_tokens(other_weights, tile * T, length, stride, head_size, T, D)
            scores = product(own, other, PRECISION)
            if OTHER:
                scores += load_numbers(far_other + at, other_token, length)
            i, j = (other_token, a) if KEYS else (a, other_token)
            pairs = visible_pairs(mask, i, j, length, tokens, MASK, CAUSAL)
            if KEYS:
                log_sums = tl.load(log_sum + i, mask=i < length, other=float("inf"))
                deltas = load_numbers(delta, i, length)
            keep = dropout_mask(draw, start + i, start + j, dropout_p) if DROPOUT else True
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
            last = tl.where(at_end == 1, 0, (2 * NEAR + 2) * T - 1)
            shared = tl.load(own_table + last * stride + channel, mask=channel < head_size, other=0.0).to(tl.float32)
            gradient += total[:, None] * shared[None, :]
            for_shared = tl.sum(total[:, None] * own.to(tl.float32), 0)
            target = far_gradient + ((at_end * tl.num_programs(0) + tl.program_id(0)) * heads + head) * head_size
            tl.store(target + channel, for_shared, mask=channel < head_size)

    before = tl.zeros([T, T], own.dtype)  # dS of the last tile, rotated
    inside_tile = tl.arange(0, T)[:, None] * T + b
    # with keys few registers are in use, so what comes next is read ahead, if shared memory has room for two programs
    for tile in tl.range(near, far, num_stages=(2 if D <= 64 else 1) if KEYS else None):
        other = load_tokens(other_states, tile * T, length, stride, head_size, T, D)
        other_weight = load_tokens(other_weights, tile * T, length, stride, head_size, T, D)
        if KEYS:
            written = tiles + tile_offset(tl.program_id(0), block, tile, head, heads, slots, KEYS, T)
            probability, for_scores = tl.load(written + inside_tile), tl.load(written + T * T + inside_tile)
            for_values = tl.dot(tl.trans(probability), other_weight, for_values, input_precision=PRECISION)
            gradient = tl.dot(tl.trans(for_scores), other, gradient, input_precision=PRECISION)
        else:
            j = tile * T + b
            c2p = tl.zeros([T, T], tl.float32)
            if OWN:  # not kept from the tile before, as in forward_kernel: registers are scarcer than products here
                c2p = product(own, load_block(own_table, block - tile, NEAR, stride, head_size, T, D), PRECISION)
            scores, _ = near_scores(
                own, other, c2p, own_table, other_table, block - tile, NEAR, stride, head_size, OWN, OTHER,
                PRECISION, T, D,
            )  # fmt: skip
            pairs = visible_pairs(mask, a, j, length, tokens, MASK, CAUSAL)
            keep = dropout_mask(draw, start + a, start + j, dropout_p) if DROPOUT else True
            probability, for_scores = score_gradients(
                scores, factor, own_weight, other_weight, log_sums, deltas, pairs, keep, dropout_p, DROPOUT, PRECISION
            )
            written = tiles + tile_offset(tl.program_id(0), block, tile, head, heads, slots, KEYS, T)
            tl.store(written + inside_tile, probability.to(own.dtype))
            tl.store(written + T * T + inside_tile, for_scores.to(own.dtype))
            gradient = tl.dot(for_scores.to(own.dtype), other, gradient, input_precision=PRECISION)
        if OWN:
            here = rotated(for_scores.to(tl.float32), "back" if KEYS else "rows", T).to(own.dtype)
            gradient = add_position_rows(
                gradient, here, before, own_table, block, tile, NEAR, stride, head_size, KEYS, PRECISION, T, D
            )
            before = here
    if OWN and near < far:
        gradient = add_position_rows(
            gradient, tl.zeros_like(before), before, own_table, block, far, NEAR, stride, head_size,
            KEYS, PRECISION, T, D,
        )  # fmt: skip

    inside = (a < length) & (channel[None, :] < head_size)
    target = base + a * stride + channel[None, :]
    tl.store(own_gradient + target, (gradient * scale).to(own.dtype), mask=inside)
    if KEYS:
        tl.store(value_gradient + target, for_values.to(own.dtype), mask=inside)


@triton.jit(do_not_specialize=("programs", "heads", "blocks", "slots", "NEAR"))
def table_gradients_kernel(
    states,  # [B, N, H, d] of queries; of keys with KEYS
    tiles, spans, places,  # as in own_gradients_kernel
    gradient,  # [parts, 2 * NEAR + 2, H, T, d]
    programs, heads, tokens, head_size, blocks, slots, NEAR,
    KEYS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One block of a table's gradient, from every n-th tile of own tokens: the sum of G_t^T @ Q, with KEYS of F_t @ K.

    Before it is rotated, G_t or F_t is dS of tile t where b <= a, and of tile t + 1 elsewhere.
    """
    t, head, part, stride = tl.program_id(0) - NEAR - 1, tl.program_id(1), tl.program_id(2), heads * head_size
    a, b, channel = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, D)[None, :]
    inside, eight = a * T + b, b // 8 * 8  # numbers are read by eight, so masks are equal for as many
    total = tl.zeros([T, D], tl.float32)
    for program in range(part, programs, tl.num_programs(2)):
        row, start, length, block = locate_block(program, places, blocks, tokens, PACKED)
        _, near, far, _ = block_ranges(spans, row, block, blocks, length, NEAR, MASK, PACKED, CAUSAL, KEYS, T)
        here, beyond = (block + t, block + t + 1) if KEYS else (block - t, block - t - 1)
        first = tile_offset(program, block, here, head, heads, slots, KEYS, T)
        second = tile_offset(program, block, beyond, head, heads, slots, KEYS, T)
        if (near <= tl.maximum(here, beyond)) & (tl.minimum(here, beyond) < far):
            base = ((row * tokens + start).to(tl.int64) * heads + head) * head_size
            own = load_tokens(states + base, block * T, length, stride, head_size, T, D)
            in_first = eight <= tl.where((near <= here) & (here < far), a, -1)
            in_second = eight + 7 > tl.where((near <= beyond) & (beyond < far), a, T)
            for_scores = tl.where(
                b <= a,
                tl.load(tiles + first + T * T + inside, mask=in_first, other=0.0),
                tl.load(tiles + second + T * T + inside, mask=in_second, other=0.0),
            ).to(tl.float32)
            if KEYS:
                of_block = rotated(for_scores, "back", T).to(own.dtype)
            else:
                of_block = tl.trans(rotated(for_scores, "rows", T).to(own.dtype))
            total = tl.dot(of_block, own, total, input_precision=PRECISION)
    target = ((part * tl.num_programs(0) + tl.program_id(0)) * heads + head).to(tl.int64) * T + a
    tl.store(gradient + target * head_size + channel, total, mask=channel < head_size)


@triton.jit(do_not_specialize=("parts", "heads", "count", "NEAR", "FIRST"))
def row_gradients_kernel(
    near,  # [tables, parts, 2 * NEAR + 2, H, T, d] of table_gradients_kernel
    far,  # [2, 2, H, d] of both tables' last row and first row
    rows,  # [(2 * NEAR + 2) * T] of distances
    ranges,  # [2, R / ROWS], first index of `rows` with one of a program's rows, and last one counted from the end
    first_gradient, last_gradient,  # [R, H, d] of each table, or twice the same
    parts, heads, count, head_size, NEAR, FIRST, scale, FAR: tl.constexpr, ROWS: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Some rows of the gradient of one head's table, each the sum over its distances, times `scale`.

    Tables from `FIRST` on: 0 is the queries' table, 1 the keys'.
    """
    head, blocks, table = tl.program_id(1), 2 * NEAR + 2, tl.program_id(2)
    row, x, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, T), tl.arange(0, D)[None, :]
    inside = channel < head_size
    first = tl.load(ranges + tl.program_id(0)).to(tl.int32)
    last = blocks * T - 1 - tl.load(ranges + tl.num_programs(0) + tl.program_id(0)).to(tl.int32)
    total = tl.zeros([ROWS, D], tl.float32)
    for block in range(first // T, last // T + 1):
        chosen = (tl.load(rows + block * T + x)[None, :] == row).to(tl.float32)
        of_block = tl.zeros([T, D], tl.float32)
        for part in range(0, parts):
            piece = (((table * parts + part) * blocks + block) * heads + head).to(tl.int64) * T + x[:, None]
            of_block += tl.load(near + piece * head_size + channel, mask=inside, other=0.0)
        total = tl.dot(chosen, of_block, total, input_precision="ieee")
    if FAR:
        for side in tl.static_range(2):
            end_row = tl.load(rows + (0 if side else blocks * T - 1))
            shared = far + (((table + FIRST) * 2 + side) * heads + head) * head_size + channel
            total += tl.where(row == end_row, tl.load(shared, mask=inside, other=0.0), 0.0)
    gradient = last_gradient if table > 0 else first_gradient
    target = (row * heads + head) * head_size + channel
    tl.store(gradient + target, (total * scale).to(gradient.dtype.element_ty), mask=inside & (row < count))
