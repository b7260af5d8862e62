"""A row's bits do not depend on what else is in its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_step import LAYER, make_step

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 16, 33, 100, 70, 600)
ROWS = (1, 15, 1, 40, 5, 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"),
    [(3, 1, torch.float32), (8, 2, torch.float16), (3, 1, torch.bfloat16)],
)
def test_rows_beside_others_and_alone(
    make_triton: Callable[..., Any], device: str, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    ops = make_triton(deterministic=True)
    step = make_step(LENGTHS, ROWS, heads=heads, kv_heads=kv_heads, padding=3, dtype=dtype, device=device)
    together = step.attend(ops)
    for s, count in enumerate(ROWS):
        first = int(step.query_starts[s])
        # As a decode step where there is one row, else as a prefill step.
        assert torch.equal(step.only(s, 0, count).attend(ops), together[first : first + count])


@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("chunk", [1, 5])
def test_rows_in_chunks(make_triton: Callable[..., Any], device: str, chunk: int, window: int | None) -> None:
    ops = make_triton(deterministic=True)
    step = make_step([530], [12], heads=4, device=device)
    whole = step.attend(ops, 0.125, window, 30.0)
    for start in range(0, 12, chunk):
        end = min(start + chunk, 12)
        part = step.only(0, start, end).attend(ops, 0.125, window, 30.0)
        assert torch.equal(part, whole[start:end])


def test_wider_tables_and_other_blocks(make_triton: Callable[..., Any], device: str) -> None:
    """Wider tables mean more splits; blocks lie elsewhere and are of another size."""
    ops = make_triton(deterministic=True)
    step = make_step([700, 33, 1], [1, 20, 1], heads=4, device=device)
    expected = step.attend(ops)
    wide = torch.nn.functional.pad(step.tables, (0, 100), value=2**30)
    assert torch.equal(replace(step, tables=wide).attend(ops), expected)
    other = make_step([700, 33, 1], [1, 20, 1], heads=4, block_size=64, device=device)
    for s, table in enumerate(other.tables.tolist()):  # the same keys and values, stored in other blocks
        for i, (key, value) in enumerate(zip(step.keys[s], step.values[s], strict=True)):
            other.pool[table[i // 64], LAYER, :, :, i % 64] = torch.stack((key, value)).to(device)
    assert torch.equal(replace(other, query=step.query).attend(ops), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_gate_and_rotary(make_triton: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ops = make_triton()
    x, gate_up, weight = (
        torch.randn(rows, width).to(dtype).to(device) for rows, width in ((33, 580), (33, 1160), (1, 580))
    )
    qkv, angle = (torch.randn(33, n, 64).to(dtype).to(device) for n in (5, 1))
    cos, sin = angle[:, 0].cos(), angle[:, 0].sin()
    slots = torch.arange(33, device=device)
    pool, alone = (torch.zeros(3, 1, 2, 1, 16, 64, dtype=dtype, device=device) for _ in range(2))
    normed, gated = ops.rms_norm(x, weight[0], 1e-6), ops.silu_mul(gate_up)
    turned = ops.rotate_write(pool, 0, qkv, cos, sin, slots)
    for row in (0, 7, 32):
        one = slice(row, row + 1)
        assert torch.equal(ops.rms_norm(x[one], weight[0], 1e-6), normed[one])
        assert torch.equal(ops.silu_mul(gate_up[one]), gated[one])
        got = ops.rotate_write(alone, 0, qkv[one], cos[one], sin[one], slots[one])
        assert torch.equal(got, turned[one])
        assert torch.equal(alone[row // 16, 0, :, 0, row % 16], pool[row // 16, 0, :, 0, row % 16])
