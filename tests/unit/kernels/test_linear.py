"""Linears and the embedding of packed weights: values against fp64, the C set's bits against themselves."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagerelay.kernels.cpu_ops import CpuOps

SHAPES = [(192, 576), (576, 1536), (1000, 96), (7, 33), (49, 1), (16, 1100)]  # out, in
ROWS = [1, 2, 3, 5, 12, 16, 33, 100]


def weights(shape: tuple[int, int], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(ops: Any, shape: tuple[int, int], rows: int, biased: bool) -> None:
    x, weight, bias = weights(shape, rows)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    got = ops.linear(x, ops.pack(weight), bias if biased else None)
    assert got.shape == (rows, shape[0])
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_leading_dimensions_are_kept(ops: Any) -> None:
    x, weight, _ = weights((20, 24), 6)
    packed = ops.pack(weight)
    assert torch.equal(ops.linear(x.view(2, 3, 24), packed), ops.linear(x, packed).view(2, 3, 20))
    assert ops.linear(x[0], packed).shape == (20,)
    assert ops.linear(x[:0], packed).shape == (0, 20)


def test_embed_gives_the_exact_rows(ops: Any) -> None:
    _, weight, _ = weights((100, 48), 1)
    ids = torch.tensor([0, 99, 17, 17, 16, 15])
    assert torch.equal(ops.embed(ids, ops.pack(weight)), weight[ids])


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_rows_threads_or_instruction_set(
    make_c: Callable[..., CpuOps], shape: tuple[int, int]
) -> None:
    x, weight, bias = weights(shape, 512)
    packed = make_c().pack(weight)
    one = make_c(1, "avx2")
    expected = torch.cat([one.linear(row[None], packed, bias) for row in x])
    for ops in (one, make_c(1), make_c(2)):
        for rows in (*ROWS, 512):
            assert torch.equal(ops.linear(x[:rows], packed, bias), expected[:rows])
            assert torch.equal(ops.linear(x[-rows:], packed, bias), expected[-rows:])


def rounded(weight: Tensor) -> Tensor:
    """weight [out, in] as int8 with one scale per output stands for it, in fp64."""
    scales = weight.double().abs().amax(1, keepdim=True) / 127
    return (weight.double() / scales.clamp(min=1e-30)).round() * scales


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_linear(make_c: Callable[..., CpuOps], shape: tuple[int, int], rows: int, biased: bool) -> None:
    x, weight, bias = weights(shape, rows)
    weight[0] = 0  # an output without weights has no scale
    expected = x.double() @ rounded(weight).T + (bias.double() if biased else 0)
    ops = make_c(2, int8_weights=True)
    got = ops.linear(x, ops.pack(weight), bias if biased else None)
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_int8_weights_of_odd_sizes(make_c: Callable[..., CpuOps]) -> None:
    """Rows too small to be divided by their scale count as none; what is not finite has no scale."""
    ops = make_c(1, int8_weights=True)
    weight = torch.tensor([[1e-40, 0.0], [3.0, -4.0], [0.0, 0.0]])
    assert ops.linear(torch.ones(1, 2), ops.pack(weight)).tolist()[0] == pytest.approx([0, -1, 0], abs=0.02)
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            ops.pack(torch.tensor([[1.0, bad]]))


def test_int8_embed_gives_the_rounded_rows(make_c: Callable[..., CpuOps]) -> None:
    _, weight, _ = weights((100, 48), 1)
    ids = torch.tensor([0, 99, 17, 17, 16, 15])
    ops = make_c(1, int8_weights=True)
    packed = ops.pack(weight)
    assert packed.panels.dtype is torch.int8
    assert torch.allclose(ops.embed(ids, packed).double(), rounded(weight)[ids], rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_bits_do_not_depend_on_rows_threads_or_instruction_set(
    make_c: Callable[..., CpuOps], shape: tuple[int, int]
) -> None:
    x, weight, bias = weights(shape, 100)
    one = make_c(1, "avx2", int8_weights=True)
    packed = one.pack(weight)
    expected = torch.cat([one.linear(row[None], packed, bias) for row in x])
    for ops in (one, make_c(1, int8_weights=True), make_c(2, int8_weights=True)):
        for rows in ROWS:
            assert torch.equal(ops.linear(x[:rows], packed, bias), expected[:rows])


def test_calls_from_several_threads(make_c: Callable[..., CpuOps]) -> None:
    ops = make_c(2)
    x, weight, _ = weights((576, 576), 16)
    packed = ops.pack(weight)
    expected = ops.linear(x, packed)
    equal: list[bool] = []

    def work() -> None:
        equal.extend(torch.equal(ops.linear(x, packed), expected) for _ in range(100))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 300


def test_what_does_not_fit_is_refused(c_ops: CpuOps) -> None:
    x, weight, bias = weights((20, 24), 2)
    packed = c_ops.pack(weight)
    with pytest.raises(ValueError, match="fit"):
        c_ops.linear(x[:, :20], packed)
    with pytest.raises(ValueError, match="fit"):
        c_ops.linear(x, packed, bias[:3])
    with pytest.raises(ValueError, match="float32"):
        c_ops.linear(x.double(), packed)
    with pytest.raises(ValueError, match="no inputs"):
        c_ops.pack(weight[:, :0])
    for bad in (-1, 20):
        with pytest.raises(ValueError, match="outside"):
            c_ops.embed(torch.tensor([0, bad]), packed)
