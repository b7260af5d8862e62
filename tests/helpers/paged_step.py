"""One step over a paged pool, with what its attention must give; whatever no sequence owns is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LAYERS, LAYER = 3, 1
NO_BLOCK = 2**30
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Step:
    """keys and values [length, kv_heads, head_dim] of each sequence as they went into the pool."""

    pool: Tensor
    query: Tensor
    tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def attend(
        self, ops: Any, scale: float = 0.125, window: int | None = None, soft_cap: float | None = None
    ) -> Tensor:
        out: Tensor = ops.attend(
            *(self.pool, LAYER, self.query, self.tables, self.seq_lens, self.query_starts),
            scale,
            window,
            soft_cap,
        )
        return out

    def only(self, sequence: int, start: int, end: int) -> Step:
        """One sequence's query rows start:end (of those it has) as if that were the whole step."""
        first, last = self.query_starts[sequence : sequence + 2].tolist()
        length = int(self.seq_lens[sequence]) - (last - first) + end
        device = self.pool.device
        return replace(
            self,
            query=self.query[first + start : first + end],
            tables=self.tables[sequence : sequence + 1],
            seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        )

    def expected(
        self, scale: float = 0.125, window: int | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Row by row in fp64."""
        query = self.query.double().cpu()
        out = torch.zeros_like(query)
        starts = self.query_starts.tolist()
        for s, length in enumerate(self.seq_lens.tolist()):
            shared = query.shape[1] // self.keys[s].shape[1]
            for row in range(starts[s], starts[s + 1]):
                end = length - starts[s + 1] + row + 1
                seen = slice(max(0, end - window) if window else 0, end)
                key = self.keys[s][seen].double().repeat_interleave(shared, 1)
                value = self.values[s][seen].double().repeat_interleave(shared, 1)
                scores = torch.einsum("hd,lhd->hl", query[row], key) * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), value)
        return out


def make_step(
    lengths: Sequence[int],
    rows: Sequence[int] | None = None,
    *,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spare_columns: int = 2,
    seed: int = 0,
) -> Step:
    """Sequence i has lengths[i] tokens, the last rows[i] of them queries (by default one); blocks are
    shuffled.

    Unused slots, blocks and layers hold NaN; unused table entries name no block.
    """
    rows = [1] * len(lengths) if rows is None else rows
    torch.manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 3
    shape = (blocks, LAYERS + 1, 2, kv_heads, block_size, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype)[:, :LAYERS]  # strided in its first dimension
    free = torch.randperm(blocks).tolist()
    tables = torch.full((len(lengths), max(needed) + spare_columns), NO_BLOCK, dtype=torch.int32)
    keys, values = [], []
    for s, length in enumerate(lengths):
        key, value = torch.randn(2, length, kv_heads, head_dim).to(dtype)
        for b in range(needed[s]):
            tables[s, b] = block = free.pop()
            part = slice(b * block_size, (b + 1) * block_size)
            used = len(key[part])
            pool[block, LAYER, 0, :, :used] = key[part].transpose(0, 1)
            pool[block, LAYER, 1, :, :used] = value[part].transpose(0, 1)
        keys.append(key)
        values.append(value)
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    query = torch.randn(int(starts[-1]) + padding, heads, head_dim).to(dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    there = (tensor.to(device) for tensor in (pool, query, tables, seq_lens, starts))
    return Step(*there, keys, values)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Largest error in units of the largest value, against a bound by dtype; nothing that is not finite."""
    bound = TOLERANCE[got.dtype]
    got = got.cpu()
    assert torch.isfinite(got).all()
    assert (got.double() - expected).abs().max() <= bound * expected.abs().max()
