"""Paged attention: one kernel for decode and prefill rows, a second one that merges splits.

A program owns ROWS consecutive tokens of one sequence times the GROUP query heads that share a KV head: the
rows of its `tl.dot`. It walks the context in tiles of TILE keys at absolute positions, reading each tile's
blocks through the table. ROWS is 1 for decoding. With `splits` > 1 several programs share a context (flash
decoding); each leaves a normalised part and the log2 of its sum of exponentials, and `merge_kernel` joins
them in ascending order.

Each tile's block ids are loaded one tile ahead and carried through the loop: a load whose address depends
on a load of the same iteration would halve the depth of Triton's pipeline.

Keys at and past a sequence's length, and before its window, are never read. The pool holds the query's
dtype; an int8 or fp8 pool would be scaled where `_walk` has loaded a tile.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_block(starts_ptr, s, ROWS: tl.constexpr):
    """Number of the first program of sequence s over all sequences; dead programs may lie between."""
    start = tl.load(starts_ptr + s)
    if ROWS > 1:
        start = start // ROWS + s
    return start


@triton.jit
def _sequence_of(starts_ptr, sequences, block, ROWS: tl.constexpr):
    """The last sequence whose first program is not past `block`. The guess is right when all rows decode."""
    guess = tl.minimum(block, sequences - 1)
    hit = (_first_block(starts_ptr, guess, ROWS) <= block) & (
        block < _first_block(starts_ptr, guess + 1, ROWS)
    )
    low = tl.where(hit, guess, 0)
    high = tl.where(hit, guess + 1, sequences)
    while high - low > 1:
        middle = (low + high) // 2
        right = _first_block(starts_ptr, middle, ROWS) <= block
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def _block_ids(table_ptr, tile, end, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Block ids of a tile: one where the tile lies within a block, else one per key."""
    if BLOCK % TILE == 0:
        ids = tl.load(table_ptr + tile * TILE // BLOCK, mask=tile * TILE < end, other=0)
    else:
        keys = tile * TILE + tl.arange(0, TILE)
        ids = tl.load(table_ptr + keys // BLOCK, mask=keys < end, other=0)
    return ids


@triton.jit
def _load_tile(pointers, seen, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, EDGE: tl.constexpr):
    """Keys or values [TILE, PADDED_DIM]; zero where nothing is seen, and in the padding."""
    dims = tl.arange(0, PADDED_DIM)[None, :]
    if EDGE:
        mask = seen[:, None] & (dims < HEAD_DIM)
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_DIM != PADDED_DIM:
        tile = tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _tanh(x):
    """From exp2 alone, so that it runs everywhere; a series near zero, where the quotient would cancel."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2 * LOG2_E))
    square = x * x
    series = size * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    tanh = tl.where(size < 0.1, series, (1 - decay) / (1 + decay))
    return tl.where(x < 0, -tanh, tanh)


@triton.jit
def _walk(
    state,
    low,
    high,
    q,
    at,
    first,
    end,
    k_ptr,
    v_ptr,
    table_ptr,
    scale,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    EDGE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over tiles low..high. Without EDGE every row sees every key of them.

    state: sums of values [M, PADDED_DIM], row maxima (log2), sums of exponentials [M], block ids of tile
    `low`.
    """
    acc, best, total, ids = state
    dims = tl.arange(0, PADDED_DIM)[None, :]
    for tile in tl.range(low, high, num_stages=STAGES):
        keys = tile * TILE + tl.arange(0, TILE)
        places = ids.to(tl.int64) * STRIDE_BLOCK + (keys % BLOCK) * STRIDE_TOKEN
        ids = _block_ids(table_ptr, tile + 1, end, TILE, BLOCK)
        seen = (keys >= first) & (keys < end)
        k = _load_tile(k_ptr + places[:, None] + dims, seen, HEAD_DIM, PADDED_DIM, EDGE)
        v = _load_tile(v_ptr + places[:, None] + dims, seen, HEAD_DIM, PADDED_DIM, EDGE)
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFT_CAP > 0:
            scores = (SOFT_CAP * LOG2_E) * _tanh(scores * (scale / SOFT_CAP))
        else:
            scores = scores * (scale * LOG2_E)
        if EDGE:
            visible = keys[None, :] <= at[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > at[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        raised = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(raised == float("-inf"), 0.0, raised) if EDGE else raised
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(best - shift)
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(v.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
        best = raised
    return acc, best, total, ids


@triton.jit(do_not_specialize=["sequences", "table_stride", "splits", "first_block"])
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    tables_ptr,
    lens_ptr,
    starts_ptr,
    scale,
    sequences,
    table_stride,
    splits,
    first_block,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    MERGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (programs over rows, KV heads, splits). q, out [rows, heads, HEAD_DIM]; k_ptr, v_ptr at one layer.

    SPLIT_TILES > 0 cuts every context at the same absolute places; 0 cuts each evenly. Without SPLIT the
    result is written at once. WINDOW and SOFT_CAP 0 mean none.
    """
    block = first_block + tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    s = _sequence_of(starts_ptr, sequences, block, ROWS)
    start = tl.load(starts_ptr + s)
    stop = tl.load(starts_ptr + s + 1)
    before = tl.load(lens_ptr + s) - (stop - start)  # tokens in front of this step's
    if ROWS > 1:
        row0 = start + (block - (start // ROWS + s)) * ROWS
        if row0 >= stop:
            return
        end = before + tl.minimum(row0 + ROWS, stop) - start
    else:
        row0 = block
        end = tl.where(row0 < stop, before + row0 + 1 - start, 0)  # padding attends to nothing

    m = tl.arange(0, M)
    row = row0 + m // GROUP
    live = m < ROWS * GROUP
    if ROWS > 1:
        live = live & (row < stop)
    at = before + row - start
    first = 0
    if WINDOW > 0:
        first = tl.maximum(before + row0 - start - WINDOW + 1, 0)
    low = first // TILE
    high = tl.cdiv(end, TILE)
    if SPLIT_TILES > 0:
        low = tl.maximum(low, split * SPLIT_TILES)
        high = tl.minimum(high, (split + 1) * SPLIT_TILES)
    elif SPLIT:
        share = tl.maximum(tl.cdiv(high - low, splits), MIN_SPLIT_TILES)
        low += split * share
        high = tl.minimum(high, low + share)

    dims = tl.arange(0, PADDED_DIM)[None, :]
    inside = live[:, None] & (dims < HEAD_DIM)
    q_at = (row * KV_HEADS + kv_head) * GROUP + m % GROUP
    q = tl.load(q_ptr + q_at[:, None] * HEAD_DIM + dims, mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    table_ptr = tables_ptr + s.to(tl.int64) * table_stride
    k_ptr += kv_head * STRIDE_HEAD
    v_ptr += kv_head * STRIDE_HEAD
    state = (
        tl.zeros([M, PADDED_DIM], tl.float32),
        tl.full([M], float("-inf"), tl.float32),
        tl.zeros([M], tl.float32),
        _block_ids(table_ptr, low, end, TILE, BLOCK),
    )
    edge = low
    if ROWS > 1 and WINDOW == 0:  # the tiles that every row sees in full need no masks
        edge = tl.minimum(tl.maximum((before + row0 - start + 1) // TILE, low), tl.maximum(high, low))
        state = _walk(
            state, low, edge, q, at, first, end, k_ptr, v_ptr, table_ptr, scale, STRIDE_BLOCK, STRIDE_TOKEN,
            BLOCK, TILE, HEAD_DIM, PADDED_DIM, WINDOW, SOFT_CAP, False, UPCAST, STAGES,
        )  # fmt: skip
    acc, best, total, _ = _walk(
        state, edge, high, q, at, first, end, k_ptr, v_ptr, table_ptr, scale, STRIDE_BLOCK, STRIDE_TOKEN,
        BLOCK, TILE, HEAD_DIM, PADDED_DIM, WINDOW, SOFT_CAP, True, UPCAST, STAGES,
    )  # fmt: skip

    nonzero = tl.where(total > 0, total, 1.0)
    out = acc / nonzero[:, None]
    if SPLIT:
        blocks = tl.num_programs(0)
        part = ((split * blocks + tl.program_id(0)).to(tl.int64) * KV_HEADS + kv_head) * MERGE + m
        tl.store(lse_ptr + part, best + tl.log2(nonzero), mask=m < MERGE)
        tl.store(
            part_ptr + part[:, None] * HEAD_DIM + dims, out, mask=inside & (best > float("-inf"))[:, None]
        )
    else:
        tl.store(out_ptr + q_at[:, None] * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "splits", "first_block"])
def merge_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    starts_ptr,
    sequences,
    splits,
    first_block,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Grid (programs over rows, KV heads): joins the parts [splits, programs, KV heads, MERGE, HEAD_DIM].

    In ascending order of split, one after the other; a split that saw no key adds exact zeros. So the bits
    depend on the splits that saw keys and not on how many there were.
    """
    block = first_block + tl.program_id(0)
    kv_head = tl.program_id(1)
    row0 = block
    stop = block + 1
    if ROWS > 1:
        s = _sequence_of(starts_ptr, sequences, block, ROWS)
        start = tl.load(starts_ptr + s)
        stop = tl.load(starts_ptr + s + 1)
        row0 = start + (block - (start // ROWS + s)) * ROWS
        if row0 >= stop:
            return
    m = tl.arange(0, MERGE)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    row = row0 + m // GROUP
    live = (m < ROWS * GROUP) & (row < stop)
    inside = live[:, None] & (dims < HEAD_DIM)
    part = (tl.program_id(0).to(tl.int64) * KV_HEADS + kv_head) * MERGE + m
    step = tl.num_programs(0).to(tl.int64) * KV_HEADS * MERGE
    best = tl.full([MERGE], float("-inf"), tl.float32)
    for split in range(splits):
        best = tl.maximum(best, tl.load(lse_ptr + split * step + part, mask=live, other=float("-inf")))
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros([MERGE], tl.float32)
    acc = tl.zeros([MERGE, PADDED_DIM], tl.float32)
    for split in range(splits):
        lse = tl.load(lse_ptr + split * step + part, mask=live, other=float("-inf"))
        weight = tl.exp2(lse - shift)
        values = tl.load(
            part_ptr + (split * step + part)[:, None] * HEAD_DIM + dims,
            mask=inside & (lse > float("-inf"))[:, None],
            other=0.0,
        )
        total += weight
        acc += weight[:, None] * values
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    q_at = (row * KV_HEADS + kv_head) * GROUP + m % GROUP
    tl.store(out_ptr + q_at[:, None] * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=inside)
