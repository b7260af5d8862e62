"""Blocks from place to place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor


def pool_of(
    blocks: int, dtype: torch.dtype, device: str, inner: tuple[int, ...] = (2, 2, 3, 16, 40)
) -> Tensor:
    """Blocks that lie apart, as in a pool that is a slice of another."""
    torch.manual_seed(blocks)
    whole = torch.randn(blocks, inner[0] + 1, *inner[1:]).to(dtype).to(device)
    return whole[:, : inner[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gather_then_scatter(kernels: SimpleNamespace, device: str, dtype: torch.dtype) -> None:
    pool, other = pool_of(9, dtype, device), pool_of(7, dtype, device)
    before = other.clone()
    staging = torch.empty(4, *pool.shape[1:], dtype=dtype, device=device)
    ids = torch.tensor([8, 0, 3, 5], device=device)
    kernels.blocks.gather_blocks(pool, ids, staging)
    assert torch.equal(staging, pool[ids])
    targets = torch.tensor([6, 1, 0, 4], dtype=torch.int32, device=device)
    kernels.blocks.scatter_blocks(staging, other, targets)
    assert torch.equal(other[targets.long()], pool[ids])
    untouched = [2, 3, 5]
    assert torch.equal(other[untouched], before[untouched])


@pytest.mark.parametrize("inner", [(1, 1, 1, 1, 3), (1, 2, 3, 16, 64), (1, 5)])
def test_copy_inside_a_pool(kernels: SimpleNamespace, device: str, inner: tuple[int, ...]) -> None:
    pool = pool_of(9, torch.float32, device, inner)
    expected = pool.clone()
    expected[[1, 7, 2]] = pool[[0, 8, 4]]
    ids = torch.tensor([[0, 8, 4], [1, 7, 2]], device=device)
    kernels.blocks.copy_blocks(pool, pool, ids[0], ids[1])
    assert torch.equal(pool, expected)


def test_bytes_are_copied_as_they_are(kernels: SimpleNamespace, device: str) -> None:
    """Not as numbers: the payload of a NaN and the sign of a zero survive."""
    words = torch.tensor([[0x7FC00001, -1, -(2**31), 1]], dtype=torch.int32, device=device).repeat(3, 4)
    out = torch.zeros(2, 16, dtype=torch.int32, device=device)
    kernels.blocks.gather_blocks(words, torch.tensor([0, 2], device=device), out)
    assert torch.equal(out, words[[0, 2]])


def test_no_blocks(kernels: SimpleNamespace, device: str) -> None:
    pool = pool_of(3, torch.float32, device)
    kernels.blocks.gather_blocks(pool, torch.empty(0, dtype=torch.int64, device=device), pool[:0])


def test_what_does_not_fit_is_refused(kernels: SimpleNamespace, device: str) -> None:
    pool, ids = pool_of(4, torch.float32, device), torch.tensor([0, 1], device=device)
    odd = torch.zeros(4, 3, dtype=torch.float16, device=device)
    blocks = kernels.blocks
    for call in (
        lambda: blocks.gather_blocks(pool, ids, pool[:3]),
        lambda: blocks.scatter_blocks(pool[:3], pool, ids),
        lambda: blocks.copy_blocks(pool, pool.half(), ids, ids),
        lambda: blocks.copy_blocks(pool, pool[:, :1], ids, ids),
        lambda: blocks.copy_blocks(pool, pool, ids, ids[:1]),
        lambda: blocks.copy_blocks(pool.transpose(3, 4), pool.transpose(3, 4), ids, ids),
        lambda: blocks.copy_blocks(odd, odd, ids, ids),
        lambda: blocks.gather_blocks(pool, torch.arange(4, device=device)[::2], pool[:2]),
    ):
        with pytest.raises(ValueError, match=r"fit|cannot become|to write|contiguous|multiples"):
            call()
