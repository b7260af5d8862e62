"""Sizes that end in the middle of a vector, in buffers that hold not one element more than they must.

Run as they are, these compare with the torch twin. test_memory.py runs them between guard pages and under
AddressSanitizer, where a touch past any buffer ends the process: so each argument owns its memory, and the
pool is one layer whose first and last block are in use. A new operation is one entry of `CALLS`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagerelay.kernels.torch_ops import TorchOps

Ops = Any  # TorchOps or CpuOps: each has a packed form of its own
ROWS = [*range(1, 34), 96, 97]
WIDTHS = [1, 7, 15, 16, 17, 33, 63, 65, 100]


def own(*shape: int) -> Tensor:
    return torch.randn(*shape)


def linear(ops: Ops, rows: int, width: int, biased: bool) -> Tensor:
    weight = own(width + 3, width)
    return ops.linear(own(rows, width), ops.pack(weight), own(width + 3) if biased else None)


def embed(ops: Ops, rows: int, width: int) -> Tensor:
    ids = torch.arange(rows, dtype=torch.int64).flip(0)
    return ops.embed(ids, ops.pack(own(rows, width)))


def rotate_write(ops: Ops, rows: int, width: int) -> tuple[Tensor, ...]:
    """Into a pool of just as many slots as there are rows, the first row skipped."""
    pool = torch.zeros(rows, 1, 2, 2, 1, 2 * width)
    slots = torch.arange(rows)
    slots[0] = -1
    cos, sin = own(rows, 2 * width), own(rows, 2 * width)
    return ops.rotate_write(pool, 0, own(rows, 7, 2 * width), cos, sin, slots), pool


CALLS: dict[str, Callable[[Ops, int, int], Tensor | tuple[Tensor, ...]]] = {
    "linear": lambda ops, rows, width: linear(ops, rows, width, False),
    "linear with bias": lambda ops, rows, width: linear(ops, rows, width, True),
    "embed": embed,
    "rms_norm": lambda ops, rows, width: ops.rms_norm(own(rows, width), own(width), 1e-5),
    "silu_mul": lambda ops, rows, width: ops.silu_mul(own(rows, 2 * width)),
    "rotate_write": lambda ops, rows, width: rotate_write(ops, rows, width),
}


def assert_twins(call: Callable[[Ops], Tensor | tuple[Tensor, ...]], ops: Ops) -> None:
    """The same values from `ops` and from its specification, on inputs drawn alike."""
    torch.manual_seed(0)
    got = call(ops)
    torch.manual_seed(0)
    torch.testing.assert_close(got, call(TorchOps()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_rows_and_widths(ops: Ops, call: Callable[[Ops, int, int], Tensor]) -> None:
    for rows in ROWS:
        for width in WIDTHS if rows in (1, 13, 33) else (33,):
            assert_twins(lambda o, rows=rows, width=width: call(o, rows, width), ops)


def poisoned_pool(blocks: int, kv_heads: int, block_size: int, head_dim: int) -> Tensor:
    return torch.full((blocks, 1, 2, kv_heads, block_size, head_dim), float("nan"))


@pytest.mark.parametrize("window", [None, 1, 21])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_write_and_attend(ops: Ops, head_dim: int, block_size: int, window: int | None) -> None:
    """Two sequences and padding rows; tables as wide as the longest needs, all other slots NaN."""
    heads, kv_heads, layer = 3, 1, 0
    soft_cap = 20.0 if head_dim == 80 else None
    for length, rows in ((1, 1), (block_size, 2), (block_size + 1, block_size + 1), (3 * block_size - 5, 33)):

        def call(o: Ops, length: int = length, rows: int = rows) -> Tensor:
            blocks = -(-length // block_size)
            pool = poisoned_pool(2 * blocks, kv_heads, block_size, head_dim)
            tables = torch.arange(2 * blocks, dtype=torch.int32).flip(0).view(2, blocks).contiguous()
            for table in tables.tolist():
                slots = [table[i // block_size] * block_size + i % block_size for i in range(length)]
                key, value = own(length + 1, kv_heads, head_dim), own(length + 1, kv_heads, head_dim)
                o.write_kv(pool, layer, key, value, torch.tensor([*slots, -1]))
            assert int((~pool.isnan()).sum()) == 2 * length * 2 * kv_heads * head_dim
            query = own(rows + 1 + 2, heads, head_dim)
            lengths = torch.tensor([length, length], dtype=torch.int32)
            starts = torch.tensor([0, rows, rows + 1], dtype=torch.int32)
            out = o.attend(pool, layer, query, tables, lengths, starts, 0.125, window, soft_cap)
            assert out.isfinite().all()
            assert (out[-2:] == 0).all()
            return out

        assert_twins(call, ops)
