"""Norm, rotary embedding and gate: values against fp64, the C set's bits against themselves."""

import math

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
    assert_close(ops.silu_mul(gate, up), expected)


def test_silu_mul_at_the_ends_of_the_range(ops: Ops) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("nan")])
    got = ops.silu_mul(gate, torch.ones(7))
    assert got[:4].abs().max() < 1e-6 or got[0].isnan()
    assert got[4:6].tolist() == pytest.approx([90.0, 1e30])
    assert math.isnan(got[6])


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_rotary(ops: Ops, head_dim: int) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 9, head_dim), torch.randn(5, 3, head_dim)
    angle = torch.randn(5, head_dim // 2, dtype=torch.float64).repeat(1, 2)
    got = ops.rotary(q, k, angle.cos().float(), angle.sin().float())
    for x, y in zip((q, k), got, strict=True):
        low, high = x.double().chunk(2, -1)
        expected = x * angle.cos()[:, None] + torch.cat((-high, low), -1) * angle.sin()[:, None]
        assert_close(y, expected)


def test_bits_do_not_depend_on_rows(c_ops: CpuOps) -> None:
    torch.manual_seed(0)
    x, up, weight = torch.randn(33, 580), torch.randn(33, 580), torch.randn(580)
    q, k, angle = torch.randn(33, 3, 64), torch.randn(33, 1, 64), torch.randn(33, 64)
    normed, gated = c_ops.rms_norm(x, weight, 1e-6), c_ops.silu_mul(x, up)
    turned = c_ops.rotary(q, k, angle.cos(), angle.sin())
    for row in range(33):
        one = slice(row, row + 1)
        assert torch.equal(c_ops.rms_norm(x[one], weight, 1e-6), normed[one])
        assert torch.equal(c_ops.silu_mul(x[one], up[one]), gated[one])
        alone = c_ops.rotary(q[one], k[one], angle[one].cos(), angle[one].sin())
        assert torch.equal(alone[0], turned[0][one])
        assert torch.equal(alone[1], turned[1][one])


def test_rotary_has_the_bits_of_torch(c_ops: CpuOps) -> None:
    torch.manual_seed(0)
    q, k, angle = torch.randn(5, 9, 64), torch.randn(5, 3, 64), torch.randn(5, 64)
    expected = TorchOps().rotary(q, k, angle.cos(), angle.sin())
    for got, wanted in zip(c_ops.rotary(q, k, angle.cos(), angle.sin()), expected, strict=True):
        assert torch.equal(got, wanted)


def test_bits_do_not_depend_on_the_instruction_set(make_c: object) -> None:
    assert callable(make_c)
    torch.manual_seed(0)
    x, up, weight = torch.randn(5, 580) * 10, torch.randn(5, 580), torch.randn(580)
    old, new = make_c(1, "avx2"), make_c(1, "avx512")
    assert torch.equal(old.rms_norm(x, weight, 1e-6), new.rms_norm(x, weight, 1e-6))
    assert torch.equal(old.silu_mul(x, up), new.silu_mul(x, up))


def test_what_does_not_fit_is_refused(c_ops: CpuOps) -> None:
    x = torch.randn(2, 3, 8)
    for call in (
        lambda: c_ops.rms_norm(x, x[0, 0, :4], 1e-6),
        lambda: c_ops.silu_mul(x, x[:1]),
        lambda: c_ops.rotary(x, x, x[:, 0, :4], x[:, 0, :4]),
    ):
        with pytest.raises(ValueError, match=r"fit|differ"):
            call()
