"""Work on single rows: norm, rotary embedding, gate, KV writes. All arithmetic is fp32, rounded once on
storing.

A row's bits depend on the row alone: each program owns whole rows, or (row, heads) of them.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid (rows,). x [rows, WIDTH] normed to out. With ADD x + residual is normed, as rounded in sum."""
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + places, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, SPAN: tl.constexpr):
    """Grid (rows, cdiv(WIDTH, SPAN)). gate * sigmoid(gate) * up of gate_up [rows, 2 WIDTH], gate first."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = columns < WIDTH
    gate_up_ptr += row * (2 * WIDTH)
    gate = tl.load(gate_up_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    # exp of a negative number: it never overflows, which the interpreter would report.
    decay = tl.exp(-tl.abs(gate))
    gated = gate * tl.where(gate < 0, decay, 1.0) / (1 + decay)
    tl.store(out_ptr + row * WIDTH + columns, (gated * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(x_ptr, cos_ptr, sin_ptr, heads, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Both halves [len(heads), HALF] of one row's heads, turned, in fp32; cos_ptr and sin_ptr at the row."""
    pairs = tl.arange(0, HALF)
    inside = pairs < HEAD_DIM // 2
    cos = tl.load(cos_ptr + pairs, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + pairs, mask=inside, other=0.0).to(tl.float32)[None, :]
    mask = (heads < HEADS)[:, None] & inside[None, :]
    places = heads[:, None] * HEAD_DIM + pairs[None, :]
    low = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + HEAD_DIM // 2 + places, mask=mask, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin, places, mask


@triton.jit
def write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    out_ptr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Grid (rows, groups of SPAN heads): KV heads first, then with ROTARY the query's.

    Stores k and v [rows, KV_HEADS, HEAD_DIM] at their slots in one layer of the pool; slot -1 skips a row.
    With ROTARY k is turned on the way, and q [rows, HEADS, HEAD_DIM] is turned into out. Rows of q, k, v
    lie their stride apart.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    kv_groups = tl.cdiv(KV_HEADS, SPAN)
    slot = tl.load(slots_ptr + row)
    angle = row * HEAD_DIM
    half = HEAD_DIM // 2
    if group < kv_groups:
        if slot >= 0:
            heads = group * SPAN + tl.arange(0, SPAN)
            place = (slot // BLOCK) * STRIDE_BLOCK + (slot % BLOCK) * STRIDE_TOKEN
            dims = tl.arange(0, PADDED_DIM)[None, :]
            mask = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)
            source = row * K_STRIDE + heads[:, None] * HEAD_DIM + dims
            target = place + heads[:, None] * STRIDE_HEAD + dims
            value = tl.load(v_ptr + row * V_STRIDE + heads[:, None] * HEAD_DIM + dims, mask=mask)
            tl.store(v_pool_ptr + target, value, mask=mask)
            if ROTARY:
                low, high, places, inside = _rotate(
                    k_ptr + row * K_STRIDE,
                    cos_ptr + angle,
                    sin_ptr + angle,
                    heads,
                    KV_HEADS,
                    HEAD_DIM,
                    PADDED_DIM // 2,
                )
                pairs = tl.arange(0, PADDED_DIM // 2)[None, :]
                target = place + heads[:, None] * STRIDE_HEAD + pairs
                tl.store(k_pool_ptr + target, low.to(k_pool_ptr.dtype.element_ty), mask=inside)
                tl.store(k_pool_ptr + half + target, high.to(k_pool_ptr.dtype.element_ty), mask=inside)
            else:
                tl.store(k_pool_ptr + target, tl.load(k_ptr + source, mask=mask), mask=mask)
    elif ROTARY:
        heads = (group - kv_groups) * SPAN + tl.arange(0, SPAN)
        low, high, places, inside = _rotate(
            q_ptr + row * Q_STRIDE,
            cos_ptr + angle,
            sin_ptr + angle,
            heads,
            HEADS,
            HEAD_DIM,
            PADDED_DIM // 2,
        )
        target = row * HEADS * HEAD_DIM + places
        tl.store(out_ptr + target, low.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + half + target, high.to(out_ptr.dtype.element_ty), mask=inside)
