"""Norm, rotary embedding and gate: values against fp64, the C set's bits against themselves."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagerelay.kernels.cpu_ops import CpuOps
from pagerelay.kernels.torch_ops import TorchOps

Ops = TorchOps | CpuOps


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("width", [1, 16, 40, 64, 576, 577])
def test_rms_norm(ops: Ops, width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, width) * 3, torch.randn(width)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    assert ops.rms_norm(x.view(5, 1, width), weight, 1e-5).shape == (5, 1, width)


@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (5, 1536)])
def test_silu_mul(ops: Ops, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(shape) * 8, torch.randn(shape)
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert_close(ops.silu_mul(torch.cat((gate, up), -1)), expected)


def test_silu_mul_at_the_ends_of_the_range(ops: Ops) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("nan")])
    got = ops.silu_mul(torch.cat((gate, torch.ones(7))))
    assert got[1:4].abs().max() < 1e-6
    assert got[0].isnan() or got[0].abs() < 1e-6
    assert got[4:6].tolist() == pytest.approx([90.0, 1e30])
    assert math.isnan(got[6])


def rotation(head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An empty pool of NaN, 5 rows of 9 queries, 3 keys and 3 values, cos, sin, and slots, one of them -1."""
    torch.manual_seed(0)
    angle = torch.randn(5, head_dim // 2, dtype=torch.float64).repeat(1, 2)
    pool = torch.full((4, 2, 2, 3, 16, head_dim), float("nan"))
    return pool, torch.randn(5, 15, head_dim), angle.cos(), angle.sin(), torch.tensor([17, 3, -1, 63, 40])


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_rotate_write(ops: Ops, head_dim: int) -> None:
    pool, qkv, cos, sin, slots = rotation(head_dim)
    query = ops.rotate_write(pool, 1, qkv, cos.float(), sin.float(), slots)
    low, high = qkv.double().chunk(2, -1)
    turned = qkv * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
    assert_close(query, turned[:, :9])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_close(pool[slot // 16, 1, 0, :, slot % 16], turned[row, 9:12])
            assert torch.equal(pool[slot // 16, 1, 1, :, slot % 16], qkv[row, 12:])
    assert int((~pool.isnan()).sum()) == 4 * 2 * 3 * head_dim  # nothing else was touched


def test_bits_do_not_depend_on_rows(c_ops: CpuOps) -> None:
    torch.manual_seed(0)
    x, gate_up, weight = torch.randn(33, 580), torch.randn(33, 1160), torch.randn(580)
    normed, gated = c_ops.rms_norm(x, weight, 1e-6), c_ops.silu_mul(gate_up)
    for row in range(33):
        one = slice(row, row + 1)
        assert torch.equal(c_ops.rms_norm(x[one], weight, 1e-6), normed[one])
        assert torch.equal(c_ops.silu_mul(gate_up[one]), gated[one])


def test_rotate_write_has_the_bits_of_torch(c_ops: CpuOps) -> None:
    pool, qkv, cos, sin, slots = rotation(64)
    other = pool.clone()
    expected = TorchOps().rotate_write(pool, 0, qkv, cos.float(), sin.float(), slots)
    assert torch.equal(c_ops.rotate_write(other, 0, qkv, cos.float(), sin.float(), slots), expected)
    assert torch.equal(other.nan_to_num(9.0), pool.nan_to_num(9.0))


def test_bits_do_not_depend_on_the_instruction_set(make_c: Callable[..., CpuOps]) -> None:
    torch.manual_seed(0)
    x, gate_up, weight = torch.randn(5, 580) * 10, torch.randn(5, 1160) * 10, torch.randn(580)
    old, new = make_c(1, "avx2"), make_c(1, "avx512")
    assert torch.equal(old.rms_norm(x, weight, 1e-6), new.rms_norm(x, weight, 1e-6))
    assert torch.equal(old.silu_mul(gate_up), new.silu_mul(gate_up))


def test_what_does_not_fit_is_refused(c_ops: CpuOps) -> None:
    pool, qkv, cos, sin, slots = rotation(8)
    cos, sin = cos.float(), sin.float()
    for call in (
        lambda: c_ops.rms_norm(cos, cos[0, :4], 1e-6),
        lambda: c_ops.silu_mul(cos[:, :5]),
        lambda: c_ops.rotate_write(pool, 0, qkv, cos[:4], sin, slots),
        lambda: c_ops.rotate_write(pool, 0, qkv[:, :6], cos, sin, slots),
        lambda: c_ops.rotate_write(pool, 0, qkv, cos, sin, slots[:2]),
    ):
        with pytest.raises(ValueError, match="fit"):
            call()
    for bad in (-2, 64):
        with pytest.raises(ValueError, match="outside"):
            c_ops.rotate_write(pool, 0, qkv, cos, sin, torch.tensor([0, 1, 2, 3, bad]))
    assert pool.isnan().all()
