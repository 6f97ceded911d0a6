"""Disentangled attention in tiles on a GPU: the scores of a tile, and the forward kernel.

Legend: T tokens of a tile, D channels in registers (the head size, rounded up), x = a - b the distance between a
tile's query a (its row) and its key b (its column). In the backward pass the rows of far tiles, the *own* tokens, are
queries or keys, and their columns the *others*. The derivation is in docs/attention_triton.md.

The tile (I, J) stands t = I - J tiles off the diagonal. With tables laid out by distance and cut into blocks of T rows,
block t holding the distances tT ... tT + T - 1, a tile needs block t where b <= a and block t - 1 elsewhere. Products
with these two blocks hold both position terms, but for a rotation:

    c2p[a, b] = M[a, (a - b) mod T]    M[a, r] = q_a . block_t[r] where r <= a,       else q_a . block_{t-1}[r]
    p2c[a, b] = E[(a - b) mod T, b]    E[r, b] = block_t[r] . k_b where r + b < T,    else block_{t-1}[r] . k_b

Past the saturation distance all rows of a side are one, and the terms are a number per query plus a number per key.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # the hardware has 2^x, so exp(score) is exp2(score * log2(e))


@triton.jit
def rotated(x, WAY: tl.constexpr, T: tl.constexpr):
    """Rotate the tile x [T, T]: the result [a, b] is, for each WAY,

        "rows"       x[a, (a - b) mod T]
        "columns"    x[(a - b) mod T, b]
        "back"       x[(a + b) mod T, b]

    For gradients: "rows" undoes itself, and "back" undoes "columns".

    Each number is written to shared memory once and read once. Write an index as c = 8 * (c // 8) + c % 8. Lanes of a
    warp hold rows c % 8 and pairs of columns c % 8 // 2 of a product; these are the lowest bits of an address, so that
    no two lanes use the same memory bank. The part c // 8 of the rotated index is the highest bits of the address, so
    taking the address modulo T * T takes that index modulo T.
    """
    a, b = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    sign: tl.constexpr = 1 if WAY == "back" else -1
    low = a % 8 + sign * (b % 8)
    word = (a // 8 + sign * (b // 8) + (low >> 3)) * (T * 8)
    pieces = tl.reshape(x, [T // 8, 8, T // 8, 4, 2])
    if WAY == "rows":
        laid_out = tl.permute(pieces, [2, 0, 4, 1, 3])
        word += a // 8 * 64 + (low & 1) * 32 + a % 8 * 4 + ((low & 7) >> 1)
    else:
        laid_out = tl.permute(pieces, [0, 2, 4, 1, 3])
        word += b // 8 * 64 + (b & 1) * 32 + (low & 7) * 4 + b % 8 // 2
    turned = tl.gather(tl.reshape(laid_out, [T * T]), tl.reshape(word & (T * T - 1), [T * T]), 0)
    # always true, and absent in machine code; without it Triton reads gradients row by row, and stores them twice
    like_x = (x.to(tl.int32, bitcast=True) & 1) < 2
    return tl.where(like_x, tl.reshape(turned, [T, T]), 0.0)


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x @ y^T in float32."""
    return tl.dot(x, tl.trans(y), input_precision=PRECISION)


@triton.jit
def load_tokens(states, first, length, stride, head_size, T: tl.constexpr, D: tl.constexpr):
    """States [T, D] of the tokens from `first` on; zeros from `length` on."""
    token, channel = first + tl.arange(0, T)[:, None], tl.arange(0, D)[None, :]
    return tl.load(states + token * stride + channel, mask=(token < length) & (channel < head_size), other=0.0)


@triton.jit
def load_numbers(numbers, tokens, length):
    """One number per token; zeros from `length` on."""
    return tl.load(numbers + tokens, mask=tokens < length, other=0.0)


@triton.jit
def load_block(table, t, NEAR, stride, head_size, T: tl.constexpr, D: tl.constexpr):
    """Block t of a head's table, whose rows are the distances from -(NEAR + 1) * T on."""
    row, channel = (NEAR + 1 + t) * T + tl.arange(0, T)[:, None], tl.arange(0, D)[None, :]
    return tl.load(table + row * stride + channel, mask=channel < head_size, other=0.0)


@triton.jit
def near_scores(
    query, key, before, key_table, query_table, t, NEAR, stride, head_size,
    C2P: tl.constexpr, P2C: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, and query @ block_{t-1}^T, the argument `before` of the next tile, at t - 1.

    The conditions b <= a and a + b < T are written with constants on one side and what depends on the lane on the
    other.
    """
    a, b = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    scores = product(query, key, PRECISION)
    if C2P:
        after = product(query, load_block(key_table, t - 1, NEAR, stride, head_size, T, D), PRECISION)
        scores += rotated(tl.where(b // 8 * 8 <= a - b % 8, before, after), "rows", T)
        before = after
    if P2C:
        here = product(load_block(query_table, t, NEAR, stride, head_size, T, D), key, PRECISION)
        below = product(load_block(query_table, t - 1, NEAR, stride, head_size, T, D), key, PRECISION)
        scores += rotated(tl.where(b // 8 * 8 < T - a - b % 8, here, below), "columns", T)
    return scores, before


# no variants of a kernel for sizes that differ from batch to batch
@triton.jit(do_not_specialize=("heads", "rows"))
def far_products_kernel(states, table, out, tokens, heads, rows, head_size, T: tl.constexpr, D: tl.constexpr):
    """Products [2, B, H, N] in float32 of states with the rows of far left keys, the last, and far right, the first."""
    first, head, batch = tl.program_id(0) * T, tl.program_id(1), tl.program_id(2)
    states += (batch.to(tl.int64) * tokens * heads + head) * head_size
    table += head * head_size
    x = load_tokens(states, first, tokens, heads * head_size, head_size, T, D).to(tl.float32)
    channel, token = tl.arange(0, D), first + tl.arange(0, T)
    for side in tl.static_range(2):
        last = 0 if side else rows - 1
        far = tl.load(table + last * heads * head_size + channel, mask=channel < head_size, other=0.0).to(tl.float32)
        target = out + ((side * tl.num_programs(2) + batch) * heads + head).to(tl.int64) * tokens
        tl.store(target + token, tl.sum(x * far[None, :], 1), mask=token < tokens)


@triton.jit
def visible_pairs(mask, queries, keys, length, tokens, MASK: tl.constexpr, CAUSAL: tl.constexpr):
    """Which queries see which keys; one of the two is a column. A mask holds numbers of documents, or pairs."""
    pairs = (queries < length) & (keys < length)
    if MASK == "numbers":  # padding is -1; as a query -2, which no key has
        number = tl.load(mask + queries, mask=queries < length, other=-1)
        pairs = tl.where(number < 0, -2, number) == tl.load(mask + keys, mask=keys < length, other=-1)
    if MASK == "pairs":
        pairs &= tl.load(mask + queries.to(tl.int64) * tokens + keys, mask=pairs, other=0) != 0
    if CAUSAL:
        pairs &= keys <= queries
    return pairs


@triton.jit
def hashed(x):
    """A permutation of the integers of 32 bits: each bit of the result depends on all bits of x (lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_mask(draw, queries, keys, dropout_p):
    """True for probabilities that dropout keeps; hashed from query and key, so that the backward pass draws the same.

    Philox, of which `tl.rand` takes one number in four, would take longer than the rest of a tile. Multiples of 2^32
    times the golden ratio are far from each other: pairs of up to 40,000 tokens have numbers of their own.
    """
    draw = draw.to(tl.uint32)
    pair = queries.to(tl.uint32) * 0x9E3779B9 + keys.to(tl.uint32)
    pair = (pair ^ hashed(draw)) * 0x7FEB352D
    pair = (pair ^ (pair >> 15) ^ hashed(draw + 0x9E3779B9)) * 0x846CA68B
    return pair >= tl.cast(dropout_p * 4294967296.0, tl.uint32)


@triton.jit
def locate_block(program, places, blocks, tokens, PACKED: tl.constexpr):
    """Row of the batch, first token, number of tokens and number of the block: of a document, or of the whole row."""
    if PACKED:
        place = places + 3 * program
        return tl.cast(0, tl.int32), tl.load(place), tl.load(place + 1), tl.load(place + 2)
    return program // blocks, 0, tokens, program % blocks


@triton.jit
def block_ranges(
    spans, row, block, blocks, length, NEAR,
    MASK: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Blocks of others: [begin, near) are far on the left, [near, far) near, [far, end) far on the right."""
    begin, end = 0, tl.cdiv(length, T)
    end = tl.where(block < end, end, 0)  # a program without a block
    if MASK == "numbers" and not PACKED:
        span = spans + 2 * (row * blocks + block)
        begin, end = tl.load(span), tl.load(span + 1)
    if CAUSAL and KEYS:
        begin = tl.maximum(begin, block)
    if CAUSAL and not KEYS:
        end = tl.minimum(end, block + 1)
    near = tl.minimum(tl.maximum(block - NEAR, begin), end)
    far = tl.maximum(tl.minimum(block + NEAR + 1, end), near)
    return begin, near, far, end


@triton.jit
def accumulate(
    scores, factor, pairs, keep, value, sums, top, total, DROPOUT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Contexts [T, D] and totals [T] of exp2(score factor - top) with one more tile; `top` is the largest so far."""
    scores = tl.where(pairs, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key yet
    probability = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(probability, 1)
    if DROPOUT:
        probability = tl.where(keep, probability, 0.0)
    sums = tl.dot(probability.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
    return sums, higher, total


@triton.jit(do_not_specialize=("batch", "heads", "blocks", "NEAR"))
def forward_kernel(
    query, key, value,  # [B, N, H, d]
    key_table, query_table,  # [(2 * NEAR + 2) * T, H, d] by distance: Kr for c2p, Qr for p2c
    far_query, far_key,  # [2, B, H, N]: products with the far rows of Kr and of Qr
    mask, spans,  # [B, N] of numbers or [B, N, N] of bytes; [B, blocks, 2], blocks of others, for numbers
    places,  # [programs, 3] of a packed row: first token and length of the document, block
    seed,  # [1]
    context, log_sum,  # [B, N, H, d], [B, H, N] in base 2
    batch, heads, tokens, head_size, blocks, NEAR, scale, dropout_p,
    C2P: tl.constexpr, P2C: tl.constexpr, FAR: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Contexts and log-sums of one tile of queries of one head."""
    row, start, length, block = locate_block(tl.program_id(0), places, blocks, tokens, PACKED)
    head, stride = tl.program_id(1), heads * head_size
    base = ((row * tokens + start).to(tl.int64) * heads + head) * head_size
    query, key, value, context = query + base, key + base, value + base, context + base
    by_token = (row * heads + head).to(tl.int64) * tokens + start
    far_query, far_key, log_sum = far_query + by_token, far_key + by_token, log_sum + by_token
    side_size = batch.to(tl.int64) * heads * tokens
    key_table, query_table = key_table + head * head_size, query_table + head * head_size
    first = row.to(tl.int64) * tokens + start
    mask += first * tokens + start if MASK == "pairs" else first
    draw = tl.load(seed) + row * heads + head if DROPOUT else 0

    factor = scale * LOG2E
    own = load_tokens(query, block * T, length, stride, head_size, T, D)
    token = block * T + tl.arange(0, T)
    i, b = token[:, None], tl.arange(0, T)[None, :]
    sums = tl.zeros([T, D], tl.float32)
    top = tl.full([T], float("-inf"), tl.float32)
    total = tl.zeros([T], tl.float32)
    begin, near, far, end = block_ranges(spans, row, block, blocks, length, NEAR, MASK, PACKED, CAUSAL, False, T)

    for side in tl.static_range(2 if FAR else 0):
        at = side * side_size
        # c2p of far keys is one number per query, which `top` takes in place of the scores
        shift = load_numbers(far_query + at, token, length) * factor if C2P else token * 0.0
        top -= shift
        for other in range(far if side else begin, end if side else near):
            j = other * T + b
            keys = load_tokens(key, other * T, length, stride, head_size, T, D)
            scores = product(own, keys, PRECISION)
            if P2C:
                scores += load_numbers(far_key + at, j, length)
            pairs = visible_pairs(mask, i, j, length, tokens, MASK, CAUSAL)
            keep = dropout_mask(draw, start + i, start + j, dropout_p) if DROPOUT else True
            values = load_tokens(value, other * T, length, stride, head_size, T, D)
            sums, top, total = accumulate(scores, factor, pairs, keep, values, sums, top, total, DROPOUT, PRECISION)
        top += shift

    before = tl.zeros([T, T], tl.float32)
    if C2P and near < far:
        before = product(own, load_block(key_table, block - near, NEAR, stride, head_size, T, D), PRECISION)
    for other in range(near, far):
        j = other * T + b
        keys = load_tokens(key, other * T, length, stride, head_size, T, D)
        scores, before = near_scores(
            own, keys, before, key_table, query_table, block - other, NEAR, stride, head_size, C2P, P2C, PRECISION, T, D
        )
        pairs = visible_pairs(mask, i, j, length, tokens, MASK, CAUSAL)
        keep = dropout_mask(draw, start + i, start + j, dropout_p) if DROPOUT else True
        values = load_tokens(value, other * T, length, stride, head_size, T, D)
        sums, top, total = accumulate(scores, factor, pairs, keep, values, sums, top, total, DROPOUT, PRECISION)

    fully_masked = total == 0.0
    sums = sums / tl.where(fully_masked, 1.0, total * (1.0 - dropout_p))[:, None]
    channel = tl.arange(0, D)[None, :]
    inside = (i < length) & (channel < head_size)
    tl.store(context + i * stride + channel, sums.to(context.dtype.element_ty), mask=inside)
    tl.store(log_sum + token, tl.where(fully_masked, float("inf"), top + tl.log2(total)), mask=token < length)
