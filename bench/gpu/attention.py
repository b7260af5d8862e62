"""Speed of paged attention: decode beside a device copy, prefill beside a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from pagerelay.bench.gpu.bench import Bench, copy_gb_s, matmul_tflop_s
from pagerelay.kernels.triton.ops import TritonOps

SHAPE, DRY = (32, 8, 128, 4), (4, 2, 16, 1)
"""Heads, KV heads, head dimension, layers that take turns; of Llama-3.1-8B, and of a dry run."""
MOST_BYTES = 24 << 30
WANTED_SHARE = 0.8
"""Of copy bandwidth, at contexts from 4k and batches from 32 on."""


def decode_and_prefill(bench: Bench) -> None:
    dtype = bench.sized(torch.bfloat16, torch.float32)
    copy = copy_gb_s(bench, bench.sized(4 << 30, 1 << 20))
    bench.figure("device copy", copy, "GB/s", "read + write")
    shapes = bench.sized(
        [(32, 4096), (64, 4096), (1, 4096), (1, 32768), (16, 4096), (64, 1024), (256, 1024), (128, 8192)],
        [(2, 40)],
    )
    for batch, context in shapes:
        for block_size in bench.sized((16, 64), (16,)):
            bench.go_on()
            share = _decode(bench, dtype, batch, context, block_size, copy)
            if batch >= 32 and context >= 4096 and block_size == 64:
                bench.check(
                    f"decode {batch} x {context} reaches {WANTED_SHARE:.0%} of copy",
                    share >= WANTED_SHARE,
                    f"{share:.0%}",
                )
    batch, context = bench.sized((64, 4096), (1, 20))
    for kind, ops in (("deterministic", TritonOps(deterministic=True)), ("no splits", TritonOps(splits=1))):
        bench.go_on()
        _decode(bench, dtype, batch, context, 16, copy, ops, kind)
    bench.go_on()
    _decode(bench, dtype, batch, context, 16, copy, layer_major=True)
    ceiling = matmul_tflop_s(bench, bench.sized(8192, 64), dtype)
    bench.figure("matmul", ceiling, "TFLOP/s")
    for rows, before in bench.sized(((2048, 0), (8192, 0), (512, 8192), (2048, 30720)), ((20, 10),)):
        for kind, ops in (("", TritonOps()), (" deterministic", TritonOps(deterministic=True))):
            bench.go_on()
            _prefill(bench, dtype, rows, before, ceiling, ops, kind)


def make_pool(
    bench: Bench, dtype: torch.dtype, blocks: int, block_size: int, layer_major: bool = False
) -> Tensor:
    _, kv_heads, head_dim, layers = bench.sized(SHAPE, DRY)
    shape = [blocks, layers, 2, kv_heads, block_size, head_dim]
    if layer_major:
        shape[0], shape[1] = shape[1], shape[0]
    pool = torch.empty(shape, dtype=dtype, device=bench.device).normal_()
    return pool.transpose(0, 1) if layer_major else pool


def _decode(
    bench: Bench,
    dtype: torch.dtype,
    batch: int,
    context: int,
    block_size: int,
    copy: float,
    ops: TritonOps | None = None,
    kind: str = "",
    layer_major: bool = False,
) -> float:
    """The share of ``copy`` that is reached, from one layer's bytes; layers take turns, so that no cache
    helps."""
    ops = ops or TritonOps()
    per_sequence = -(-context // block_size)
    name = f"decode {batch} x {context}, block {block_size}" + (f", {kind}" if kind else "")
    name += ", layer-major pool" if layer_major else ""
    heads, kv_heads, head_dim, layers = bench.sized(SHAPE, DRY)
    row = 2 * kv_heads * head_dim * dtype.itemsize
    if batch * per_sequence * block_size * row * layers > MOST_BYTES:
        bench.skip(name, "the pool would be too large")
        return 0.0
    pool = make_pool(bench, dtype, batch * per_sequence, block_size, layer_major)
    tables = torch.randperm(batch * per_sequence, dtype=torch.int32).view(batch, -1).to(bench.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)
    query = torch.randn(batch, heads, head_dim, device=bench.device).to(dtype)

    def step() -> None:
        for layer in range(pool.shape[1]):
            ops.attend(pool, layer, query, tables, lengths, starts, 0.1)

    play = step
    if not bench.dry:  # without the host's time for the launches
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        play = graph.replay
    spent = bench.milliseconds(play) / pool.shape[1]
    reached: float = batch * context * row / spent / 1e6
    bench.figure(name, reached, "GB/s", f"{1000 * spent:.1f} us a layer, {reached / copy:.0%} of copy")
    return reached / copy


def _prefill(
    bench: Bench, dtype: torch.dtype, rows: int, before: int, ceiling: float, ops: TritonOps, kind: str
) -> None:
    block_size = 16
    heads, _, head_dim, _ = bench.sized(SHAPE, DRY)
    blocks = -(-(rows + before) // block_size)
    pool = make_pool(bench, dtype, blocks, block_size)
    tables = torch.randperm(blocks, dtype=torch.int32)[None].to(bench.device)
    length = torch.tensor([rows + before], dtype=torch.int32, device=bench.device)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=bench.device)
    query = torch.randn(rows, heads, head_dim, device=bench.device).to(dtype)
    spent = bench.milliseconds(lambda: ops.attend(pool, 0, query, tables, length, starts, 0.1), 10)
    flops = 4 * heads * head_dim * rows * (before + (rows + 1) / 2)
    reached = flops / spent / 1e9
    bench.figure(
        f"prefill {rows} after {before}{kind}", reached, "TFLOP/s", f"{reached / ceiling:.0%} of matmul"
    )
