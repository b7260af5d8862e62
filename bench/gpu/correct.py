"""Every kernel against the torch twins in fp64, over poisoned memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pagerelay.bench.gpu.bench import Bench
from pagerelay.common.model.device_sampler import DeviceSampler
from pagerelay.common.model.sampler import SampleRequest, sample
from pagerelay.common.wire.messages import SamplingParams
from pagerelay.kernels.torch_ops import TorchOps
from pagerelay.kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks
from pagerelay.kernels.triton.ops import TritonOps

BARS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = {
    torch.bfloat16: [(128, 4, 16), (128, 8, 64), (64, 3, 16), (80, 1, 16), (256, 2, 32)],
    torch.float16: [(128, 4, 16), (64, 1, 64)],
    torch.float32: [(64, 3, 16), (128, 4, 64), (16, 2, 16)],
}
"""Head dimension, query heads of a KV head, block size."""
LAYERS, LAYER = 3, 1
Shape = dict[str, Any]


def kernels(bench: Bench) -> None:
    dtypes = bench.sized(list(SHAPES), [torch.float32])
    for dtype in dtypes:
        worst: dict[str, float] = {}
        for name, shape, lengths, rows in _attentions(bench, dtype):
            step = Step(bench.device, dtype, lengths, rows, **shape)
            for kind, ops in _sets(bench):
                bench.go_on()
                error = step.error(ops)
                key = f"{name}, {kind}"
                worst[key] = max(worst.get(key, 0.0), error)
        for key, error in worst.items():
            bench.check(f"{key} {_short(dtype)}", error <= BARS[dtype], f"error {error:.1e}")
        for name, error in _rows(bench, dtype):
            bench.check(f"{name} {_short(dtype)}", error <= BARS[dtype], f"error {error:.1e}")
    _blocks(bench)
    _sampling(bench)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sets(bench: Bench) -> list[tuple[str, TritonOps]]:
    made = [("splits by shape", TritonOps()), ("deterministic", TritonOps(deterministic=True))]
    more = [(f"{n} splits", TritonOps(splits=n)) for n in bench.sized((1, 3, 16), (3,))]
    return made + more


def _attentions(
    bench: Bench, dtype: torch.dtype
) -> Iterator[tuple[str, Shape, Sequence[int], Sequence[int] | None]]:
    """Each shape is compiled some six times, so they are few, most of them for bf16; the interpreter has the
    full product of them."""
    lengths = bench.sized([1, 15, 16, 17, 63, 64, 65, 1000, 4097], [1, 17, 40])
    for head_dim, group, block_size in bench.sized(SHAPES[dtype], [(16, 2, 16)]):
        shape = {"heads": 2 * group, "kv_heads": 2, "head_dim": head_dim, "block_size": block_size}
        yield "decode", shape, lengths, None
        yield "prefill and decode", shape, [*lengths, 300], [min(n, 33) for n in lengths] + [1]


class Step:
    """A step over a pool in which whatever no sequence owns is NaN, blocks shuffled."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        lengths: Sequence[int],
        rows: Sequence[int] | None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> None:
        rows = [1] * len(lengths) if rows is None else rows
        needed = [-(-length // block_size) for length in lengths]
        shape = (sum(needed) + 3, LAYERS, 2, kv_heads, block_size, head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.tables = torch.full((len(lengths), max(needed)), 2**30, dtype=torch.int32)
        free = torch.randperm(shape[0]).tolist()
        for s, length in enumerate(lengths):
            for b in range(needed[s]):
                self.tables[s, b] = block = free.pop()
                used = min(block_size, length - b * block_size)
                self.pool[block, LAYER, :, :, :used] = torch.randn(
                    2, kv_heads, used, head_dim, device=device
                ).to(dtype)
        self.tables = self.tables.to(device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32, device=device)
        self.query = torch.randn(sum(rows), heads, head_dim, device=device).to(dtype)

    def error(self, ops: TritonOps, window: int | None = None) -> float:
        """Largest error in units of the largest value; infinite for what is not finite."""
        there = self.tables, self.lengths, self.starts, 0.125, window
        got = ops.attend(self.pool, LAYER, self.query, *there)
        expected = TorchOps().attend(self.pool.double(), LAYER, self.query.double(), *there)
        return _error(got, expected)


def _error(got: Tensor, expected: Tensor) -> float:
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - expected).abs().max() / expected.abs().max())


def _rows(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    ops, twins = TritonOps(), TorchOps()
    rows, width, heads, kv_heads, dim = bench.sized((257, 4096, 32, 8, 128), (3, 40, 4, 2, 16))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=bench.device).to(dtype)

    x, residual, weight, gate_up = made(rows, width), made(rows, width), made(width), made(rows, 2 * width)
    yield "rms norm", _error(ops.rms_norm(x, weight, 1e-5), twins.rms_norm(x.double(), weight.double(), 1e-5))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    yield "add, rms norm", _error(normed, twins.rms_norm(total.double(), weight.double(), 1e-5))
    yield "silu mul", _error(ops.silu_mul(gate_up), twins.silu_mul(gate_up.double()))
    qkv, angle = made(rows, heads + 2 * kv_heads, dim), torch.randn(rows, dim // 2, device=bench.device)
    cos, sin = (f(angle).repeat(1, 2).to(dtype) for f in (torch.cos, torch.sin))
    slots = torch.randperm(rows + 20, device=bench.device)[:rows]
    slots[::7] = -1
    pool = torch.full((rows // 16 + 3, LAYERS, 2, kv_heads, 16, dim), float("nan"), device=bench.device)
    mine, theirs = pool.to(dtype), pool.double()
    got = ops.rotate_write(mine, LAYER, qkv, cos, sin, slots)
    expected = twins.rotate_write(theirs, LAYER, qkv.double(), cos.double(), sin.double(), slots)
    yield "rotary embedding", _error(got, expected)
    untouched = torch.equal(mine.isnan(), theirs.isnan())
    yield "rotary and KV write", _error(mine.nan_to_num(), theirs.nan_to_num()) if untouched else float("inf")


def _blocks(bench: Bench) -> None:
    shape = bench.sized((64, 32, 2, 8, 16, 128), (6, 2, 2, 2, 16, 16))
    pool = torch.randn(shape, device=bench.device)
    ids = torch.randperm(shape[0], device=bench.device)
    half = shape[0] // 2
    sources, targets = ids[:half], ids[half : 2 * half]
    staged = torch.full((half, *shape[1:]), float("nan"), device=bench.device)
    gather_blocks(pool, sources, staged)
    bench.check("gather blocks", torch.equal(staged, pool[sources]))
    expected = pool.clone()
    expected[targets] = pool[sources]
    other = pool.clone()
    scatter_blocks(staged, other, targets)
    bench.check("scatter blocks", torch.equal(other, expected))
    copy_blocks(pool, pool, sources, targets)
    bench.check("copy blocks", torch.equal(pool, expected))


def _sampling(bench: Bench) -> None:
    rows, vocab = bench.sized((64, 128_256), (4, 300))
    ops = TritonOps()
    choose = DeviceSampler(ops)
    logits = 3 * torch.randn(rows, vocab)
    wishes: list[Shape] = [
        {"temperature": 0.0},
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    ]
    for wish in wishes:
        bench.go_on()
        asked = [
            SampleRequest(SamplingParams(max_tokens=1, seed=row, **wish), position=row) for row in range(rows)
        ]
        here, there = sample(logits.clone(), asked), choose(logits.to(bench.device), asked)
        differ = sum(a != b for a, b in zip(here, there, strict=True))
        # A uniform number may fall between two roundings of a sum, and then picks the neighbour.
        bench.check(f"sampler {wish or 'plain'}", differ <= rows // 64, f"{differ} of {rows} tokens differ")
    draws, kinds = bench.sized((1_000_000, 64), (200, 8))
    one = torch.randn(kinds, device=bench.device)
    row = one.expand(draws, kinds).contiguous()
    column = torch.ones(draws, dtype=torch.float64, device=bench.device)
    none = torch.zeros(draws, dtype=torch.int32, device=bench.device)
    drawn = torch.rand(draws, dtype=torch.float64, device=bench.device)
    counts = torch.bincount(
        ops.choose(row, column, none, column, 0 * column, drawn), minlength=kinds
    ).double()
    wanted = one.double().softmax(0) * draws
    chi = float(((counts - wanted) ** 2 / wanted).sum())
    bound = kinds - 1 + 6 * (2 * (kinds - 1)) ** 0.5
    bench.check(
        f"{draws} draws follow the distribution", chi <= bound, f"chi2 {chi:.0f}, at most {bound:.0f}"
    )
