"""Attention of decode and prefill rows over a paged pool, against fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_step import LAYER, NO_BLOCK, assert_close, make_step

from pagerelay.kernels.torch_ops import TorchOps

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
GROUPS = ((2, 2), (3, 1), (8, 2), (8, 1))
BLOCK_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 80, 96, 128, 256)


def edges(block_size: int) -> list[int]:
    return [1, block_size - 1, block_size, block_size + 1, 2 * block_size]


# Every pair of settings meets once; all of them meet in `test_the_full_product`.
SHAPES = [(*group, size) for group in GROUPS for size in BLOCK_SIZES]
DECODE = [(*shape, (FP32, BF16)[n % 2]) for n, shape in enumerate(SHAPES)]
MIXED = [shape for n, shape in enumerate(SHAPES) if n % 3 != n // 3 % 3]
DIMS = [
    (dim, dtype, (1, 17)[(n + m) % 2])
    for n, dim in enumerate(HEAD_DIMS)
    for m, dtype in enumerate((FP32, FP16, BF16))
]


@pytest.mark.parametrize(("heads", "kv_heads", "block_size", "dtype"), DECODE)
def test_decode_rows(
    ops: Any, device: str, heads: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    step = make_step(
        edges(block_size), heads=heads, kv_heads=kv_heads, block_size=block_size, dtype=dtype, device=device
    )
    assert_close(step.attend(ops), step.expected())


@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), MIXED)
def test_prefill_and_decode_rows_in_one_step(
    ops: Any, device: str, heads: int, kv_heads: int, block_size: int
) -> None:
    lengths = [*edges(block_size), 3]
    rows = [1, 7, 1, block_size, min(33, 2 * block_size), 0]
    step = make_step(
        lengths,
        rows,
        heads=heads,
        kv_heads=kv_heads,
        block_size=block_size,
        padding=3,
        device=device,
    )
    got = step.attend(ops)
    assert_close(got, step.expected())
    assert (got[-3:] == 0).all()


@pytest.mark.parametrize(("head_dim", "dtype", "rows"), DIMS)
def test_head_dims(ops: Any, device: str, head_dim: int, dtype: torch.dtype, rows: int) -> None:
    step = make_step([33, 70], [rows, 1], head_dim=head_dim, dtype=dtype, device=device)
    assert_close(step.attend(ops), step.expected())


@pytest.mark.parametrize("head_dim", [64, 256])
def test_as_sm_80_is_given_it(
    make_triton: Callable[..., Any], device: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles are smaller; what they compute is the same."""
    ops = make_triton()
    monkeypatch.setattr(ops, "_device", lambda _: (80, 8))
    step = make_step([33, 70], [33, 5], heads=8, kv_heads=2, head_dim=head_dim, dtype=BF16, device=device)
    assert_close(step.attend(ops), step.expected())
    assert_close(step.attend(ops, window=20), step.expected(window=20))


@pytest.mark.parametrize("rows", [*range(1, 6), 15, 16, 17, 32, 33])
def test_chunks_of_a_long_prompt(ops: Any, device: str, rows: int) -> None:
    step = make_step([rows + 50], [rows], heads=6, kv_heads=2, device=device)
    assert_close(step.attend(ops), step.expected())


@pytest.mark.parametrize("count", [1, 2, 16, 33])
def test_sequences_that_decode(ops: Any, device: str, count: int) -> None:
    step = make_step([1 + 3 * i for i in range(count)], padding=count % 3, device=device)
    assert_close(step.attend(ops), step.expected())


def test_many_heads_to_one_kv_head(ops: Any, device: str) -> None:
    step = make_step([40, 5], [3, 5], heads=71, device=device)
    assert_close(step.attend(ops), step.expected())
    step = make_step([40, 5], heads=71, device=device)
    assert_close(step.attend(ops), step.expected())


@pytest.mark.parametrize("window", [1, 7, 16, 33, 64, 1000])
def test_sliding_window(ops: Any, device: str, window: int) -> None:
    step = make_step([1, 33, 100, 90, 130], [1, 17, 100, 1, 3], device=device)
    assert_close(step.attend(ops, window=window), step.expected(window=window))
    step = make_step([1, 33, 100, 64], device=device)
    assert_close(step.attend(ops, window=window), step.expected(window=window))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("soft_cap", [1.0, 50.0])
def test_soft_cap(ops: Any, device: str, soft_cap: float, window: int | None) -> None:
    step = make_step([1, 33, 100], [1, 20, 1], device=device)
    assert_close(step.attend(ops, 0.5, window, soft_cap), step.expected(0.5, window, soft_cap))


def test_large_scores_neither_overflow_nor_vanish(ops: Any, device: str) -> None:
    step = make_step([100, 64], [4, 1], device=device)
    assert_close(step.attend(ops, scale=8.0), step.expected(scale=8.0))


def test_blocks_behind_the_window_may_be_gone(ops: Any, device: str) -> None:
    step = make_step([100], [3], device=device)
    expected = step.attend(ops, window=20)
    step.tables[0, : (100 - 3 - 20 + 1) // 16] = NO_BLOCK
    assert torch.equal(step.attend(ops, window=20), expected)


def test_an_empty_step_and_a_step_of_padding(ops: Any, device: str) -> None:
    step = make_step([5], [0], device=device)
    assert step.attend(ops).shape == (0, 3, 64)
    for rows in (1, 2):
        assert (replace(step, query=torch.ones(rows, 3, 64, device=device)).attend(ops) == 0).all()


def test_a_sequence_without_tokens_is_padding(make_triton: Callable[..., Any], device: str) -> None:
    step = make_step([20, 20, 20], device=device)
    expected = step.expected()
    expected[1] = 0
    step.seq_lens[1] = 0  # as in the rows that fill up a captured graph
    assert_close(step.attend(make_triton()), expected)
    assert_close(step.attend(make_triton(splits=2)), expected)
    assert_close(step.attend(make_triton(deterministic=True)), expected)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_splits(make_triton: Callable[..., Any], device: str, splits: int, dtype: torch.dtype) -> None:
    ops = make_triton(splits=splits)
    step = make_step([1, 64, 300, 700], heads=4, dtype=dtype, device=device, padding=splits == 3)
    assert_close(step.attend(ops), step.expected())
    assert_close(step.attend(ops, window=270), step.expected(window=270))
    step = make_step([40, 600, 3], [17, 2, 0], heads=4, dtype=dtype, padding=3, device=device)
    assert_close(step.attend(ops), step.expected())


def test_a_long_step_is_cut_where_its_parts_outgrow_the_scratch(
    kernels: SimpleNamespace, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step([90, 600, 20], [60, 2, 1], padding=2, device=device)
    monkeypatch.setattr(kernels.ops, "SCRATCH_BYTES", 1)
    for ops in (kernels.ops.TritonOps(splits=2), kernels.ops.TritonOps(deterministic=True)):
        assert_close(step.attend(ops), step.expected())


def test_other_layouts_of_the_pool(ops: Any, device: str) -> None:
    step = make_step([33, 100], [5, 1], heads=6, kv_heads=2, device=device)
    expected = step.attend(ops)
    for order in ((1, 0, 2, 3, 4, 5), (0, 1, 2, 4, 3, 5), (2, 1, 0, 3, 4, 5)):
        back = [order.index(i) for i in range(6)]
        other = replace(step, pool=step.pool.permute(order).contiguous().permute(back))
        assert torch.equal(other.attend(ops), expected)


def test_blocks_past_two_to_the_31_elements(make_triton: Callable[..., Any], device: str) -> None:
    step = make_step([20, 40], [1, 1], dtype=BF16, device=device)
    far = torch.empty(0, dtype=BF16, device=device).expand(0)
    blocks, block = 2**20 + 64, step.pool[0, LAYER].numel()
    far = torch.empty(blocks * block, dtype=BF16, device=device)  # pages that nobody touches cost nothing
    pool = far.view(blocks, 1, *step.pool.shape[2:])
    shift = blocks - step.pool.shape[0]
    pool[shift:, 0] = step.pool[:, LAYER]
    tables = torch.where(step.tables == NO_BLOCK, NO_BLOCK, step.tables + shift)
    for ops in (TorchOps(), make_triton()):
        got = ops.attend(pool, 0, step.query, tables, step.seq_lens, step.query_starts, 0.125)
        assert_close(got, step.expected())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_full_product(
    make_triton: Callable[..., Any],
    device: str,
    heads: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    shape: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "dtype": dtype,
        "device": device,
    }
    every_edge = sorted({max(1, n * block_size + d) for n, d in itertools.product(range(4), (-1, 0, 1))})
    steps = [
        make_step(every_edge, **shape),
        make_step([n + 40 for n in range(1, 34)], list(range(1, 34)), padding=2, **shape),
        make_step([600, 20], **shape),
    ]
    for step in steps:
        for ops in (make_triton(), make_triton(splits=3), make_triton(deterministic=True)):
            assert_close(step.attend(ops), step.expected())
            assert_close(step.attend(ops, 0.1, 37, 20.0), step.expected(0.1, 37, 20.0))


def test_what_does_not_fit_is_refused(make_triton: Callable[..., Any], device: str) -> None:
    step, ops = make_step([20, 20], [2, 1], device=device), make_triton()
    for wrong in (
        replace(step, seq_lens=step.seq_lens[:1]),
        replace(step, seq_lens=step.seq_lens.long()),
        replace(step, query=step.query[..., :32].contiguous()),
        replace(step, query=step.query.double()),
        replace(step, query=step.query.bfloat16()),
        replace(step, pool=step.pool[0]),
    ):
        with pytest.raises(ValueError, match=r"fit|disagree|expected|int32|not a pool"):
            wrong.attend(ops)
    with pytest.raises(ValueError, match="splits"):
        make_triton(deterministic=True, splits=2)
