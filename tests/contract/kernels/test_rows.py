"""Norm, rotary embedding, gate and KV writes, against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_step import LAYER, LAYERS, assert_close
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def made(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(device)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.cpu().double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.cpu().double()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.cpu().double().chunk(2, -1)
    cos, sin = cos.cpu().double()[:, None], sin.cpu().double()[:, None]
    return torch.cat((low, high), -1) * cos + torch.cat((-high, low), -1) * sin


def angles(rows: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    angle = torch.randn(rows, head_dim // 2).repeat(1, 2)
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 40, 576, 577, 2048])
def test_rms_norm(ops: Any, device: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (made(n, width, dtype=dtype, device=device, scale=3) for n in (5, 1))
    assert_close(ops.rms_norm(x, weight[0], 1e-5), normed(x, weight[0], 1e-5))
    assert ops.rms_norm(x.view(5, 1, width), weight[0], 1e-5).shape == (5, 1, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 576])
def test_add_rms_norm(make_triton: Callable[..., Any], device: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (made(n, width, dtype=dtype, device=device) for n in (5, 5, 1))
    out, total = make_triton().add_rms_norm(x, residual, weight[0], 1e-5)
    # To one unit in the last place: the interpreter does not round to the nearest bf16.
    torch.testing.assert_close(total, x + residual, rtol=torch.finfo(dtype).eps, atol=0)
    assert_close(out, normed(total, weight[0], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (5, 1536), (33, 1000)])
def test_silu_mul(ops: Any, device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate = made(*shape, dtype=dtype, device=device, scale=8)
    up = made(*shape, dtype=dtype, device=device)
    wide = gate.cpu().double()
    assert_close(ops.silu_mul(torch.cat((gate, up), -1)), wide * torch.sigmoid(wide) * up.cpu().double())


def test_silu_mul_at_the_ends_of_the_range(ops: Any, device: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("nan")], device=device)
    got = ops.silu_mul(torch.cat((gate, torch.ones(7, device=device)))).cpu()
    assert got[:4].abs().max() < 1e-6
    assert got[4:6].tolist() == pytest.approx([90.0, 1e30])
    assert math.isnan(got[6])


def poisoned_pool(head_dim: int, block_size: int, dtype: torch.dtype, device: str) -> Tensor:
    shape = (5, LAYERS + 1, 2, 3, block_size, head_dim)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)[:, :LAYERS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 32), (256, 64)])
def test_write_kv(ops: Any, device: str, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = poisoned_pool(head_dim, block_size, dtype, device)
    key, value = (made(4, 3, head_dim, dtype=dtype, device=device) for _ in range(2))
    slots = torch.tensor([4 * block_size - 1, -1, 0, 4 * block_size + 2], device=device)
    ops.write_kv(pool, LAYER, key, value, slots)
    for row, (block, offset) in {0: (3, block_size - 1), 2: (0, 0), 3: (4, 2)}.items():
        assert torch.equal(pool[block, LAYER, 0, :, offset], key[row])
        assert torch.equal(pool[block, LAYER, 1, :, offset], value[row])
    assert (~pool.isnan()).sum() == 3 * 2 * 3 * head_dim


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(9, 8), (3, 64), (9, 80), (24, 96), (4, 256)])
def test_rotate_write(ops: Any, device: str, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Of the fused projection's rows, which may lie apart."""
    torch.manual_seed(0)
    fused = made(4, heads + 7, head_dim, dtype=dtype, device=device)[:, 1:]
    cos, sin = angles(4, head_dim, dtype, device)
    slots = torch.tensor([16, -1, 31, 79], device=device)
    pool = poisoned_pool(head_dim, 16, dtype, device)
    got = ops.rotate_write(pool, LAYER, fused, cos, sin, slots)
    assert got.is_contiguous()
    expected = turned(fused, cos, sin)
    assert_close(got, expected[:, :heads])
    for row, (block, offset) in {0: (1, 0), 2: (1, 15), 3: (4, 15)}.items():
        assert_close(pool[block, LAYER, 0, :, offset], expected[row, heads : heads + 3])
        assert torch.equal(pool[block, LAYER, 1, :, offset], fused[row, heads + 3 :])
    assert (~pool.isnan()).sum() == 3 * 2 * 3 * head_dim


def test_a_step_without_rows(make_triton: Callable[..., Any], device: str) -> None:
    ops, none = make_triton(), torch.empty(0, 3, 64, device=device)
    pool = poisoned_pool(64, 16, torch.float32, device)
    no_slots = torch.empty(0, dtype=torch.int64, device=device)
    ops.write_kv(pool, LAYER, none, none, no_slots)
    assert pool.isnan().all()
    assert ops.silu_mul(none).shape == (0, 3, 32)
    assert ops.rms_norm(none, torch.ones(64, device=device), 1e-5).shape == none.shape
    qkv, angle = torch.empty(0, 9, 64, device=device), none[:, 0].contiguous()
    assert ops.rotate_write(pool, LAYER, qkv, angle, angle, no_slots).shape == none.shape


def test_what_does_not_fit_is_refused(make_triton: Callable[..., Any], device: str) -> None:
    ops, x = make_triton(), torch.randn(2, 3, 8, device=device)
    pool, slots = poisoned_pool(8, 16, torch.float32, device), torch.zeros(2, dtype=torch.int64).to(device)
    qkv, angle = torch.randn(2, 9, 8, device=device), torch.randn(2, 8, device=device)
    turn = angle, angle, slots
    for call in (
        lambda: ops.rms_norm(x, x[0, 0, :4], 1e-6),
        lambda: ops.add_rms_norm(x, x[:1], x[0, 0], 1e-6),
        lambda: ops.silu_mul(x[..., :7]),
        lambda: ops.silu_mul(x.double()),
        lambda: ops.rotate_write(pool, LAYER, qkv, angle[:, :4], angle[:, :4], slots),
        lambda: ops.rotate_write(pool, LAYER, qkv, angle, angle.T.contiguous().T, slots),
        lambda: ops.rotate_write(pool, LAYER, qkv[:, :6], angle, angle, slots),
        lambda: ops.rotate_write(pool, LAYER, qkv.transpose(1, 2).contiguous().transpose(1, 2), *turn),
        lambda: ops.rotate_write(pool, LAYER, qkv[:1], angle, angle, slots),
        lambda: ops.write_kv(pool, LAYER, x[:, :2], x[:, :2], slots),
        lambda: ops.write_kv(pool, LAYER, x, x, slots.int()),
        lambda: ops.write_kv(pool.half(), LAYER, x, x, slots),
    ):
        with pytest.raises(ValueError, match=r"fit|differ|expected|contiguous"):
            call()
