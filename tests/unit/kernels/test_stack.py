"""All decoder layers in one call: the bits of the single operations, in buffers of just their sizes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pagerelay.kernels.cpu_ops import CpuOps, PackedStack, PackedWeight

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, BLOCK_SIZE = 36, 4, 2, 24, 21, 3, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


@dataclass(frozen=True)
class Parts:
    attention_norm: Tensor
    mlp_norm: Tensor
    eps: float
    qkv: tuple[PackedWeight, Tensor | None]
    out: tuple[PackedWeight, Tensor | None]
    gate_up: tuple[PackedWeight, Tensor | None]
    down: tuple[PackedWeight, Tensor | None]
    scale: float
    window: int | None


def make_parts(ops: CpuOps, window: int | None, biased: bool) -> Parts:
    def linear(out: int, width: int) -> tuple[PackedWeight, Tensor | None]:
        return ops.pack(torch.randn(out, width) / 6), torch.randn(out) if biased else None

    return Parts(
        *(torch.randn(HIDDEN), torch.randn(HIDDEN), 1e-5),
        *(linear(QKV, HIDDEN), linear(HIDDEN, HEADS * HEAD_DIM)),
        *(linear(2 * WIDTH, HIDDEN), linear(HIDDEN, WIDTH), 0.2, window),
    )


@dataclass(frozen=True)
class Step:
    """Two sequences: ``rows`` of one, the last token of a longer other, and a padding row."""

    x: Tensor
    pool: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor


def make_step(rows: int) -> Step:
    lengths = (rows, 40)
    tables = torch.tensor([[1, 3, 4], [5, 0, 2]], dtype=torch.int32)
    at = [(0, i) for i in range(rows)] + [(1, 39)]
    slots = [int(tables[s, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for s, i in at] + [-1]
    angle = torch.randn(rows + 2, HEAD_DIM // 2).repeat(1, 2)
    return Step(
        *(torch.randn(rows + 2, HIDDEN), torch.randn(6, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)),
        *(angle.cos(), angle.sin(), torch.tensor(slots), tables),
        *(torch.tensor(lengths, dtype=torch.int32), torch.tensor([0, rows, rows + 1], dtype=torch.int32)),
    )


def run(ops: CpuOps, stack: PackedStack, step: Step, pool: Tensor) -> Tensor:
    return ops.run_stack(
        *(stack, step.x, pool, step.cos, step.sin, step.slots),
        *(step.tables, step.seq_lens, step.query_starts),
    )


def one_by_one(ops: CpuOps, layers: list[Parts], step: Step, pool: Tensor) -> Tensor:
    x = step.x
    for index, layer in enumerate(layers):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, layer.eps), *layer.qkv)
        qkv = qkv.view(x.shape[0], -1, HEAD_DIM)
        query = ops.rotate_write(pool, index, qkv, step.cos, step.sin, step.slots)
        context = ops.attend(
            *(pool, index, query, step.tables, step.seq_lens, step.query_starts),
            *(layer.scale, layer.window),
        )
        x = x + ops.linear(context.view(x.shape[0], -1), *layer.out)
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, layer.eps), *layer.gate_up)
        x = x + ops.linear(ops.silu_mul(gate_up), *layer.down)
    return x


@pytest.mark.parametrize("rows", [1, 2, 17, 40])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("instruction_set", ["avx2", "avx512"])
def test_the_bits_of_the_single_operations(
    make_c: Callable[..., CpuOps], instruction_set: str, int8: bool, rows: int
) -> None:
    torch.manual_seed(0)
    ops = make_c(2, instruction_set, int8_weights=int8)
    layers = [make_parts(ops, window, biased=int8) for window in (None, 7, 1)]
    # What is not dense fp32 is copied, and the copies live as long as the stack.
    layers[0] = replace(layers[0], mlp_norm=torch.randn(2 * HIDDEN)[::2])
    if layers[1].qkv[1] is not None:
        layers[1] = replace(layers[1], qkv=(layers[1].qkv[0], torch.randn(2 * QKV)[::2]))
    step = make_step(rows)
    before, pools = step.x.clone(), (step.pool.clone(), step.pool.clone())
    got = run(ops, ops.stack(layers), step, pools[0])
    assert torch.equal(got, one_by_one(ops, layers, step, pools[1]))
    assert torch.equal(*pools)
    assert torch.equal(step.x, before)
    assert got.isfinite().all()


def test_what_does_not_fit_is_refused(c_ops: CpuOps) -> None:
    parts, step = make_parts(c_ops, None, biased=False), make_step(2)
    stack = c_ops.stack([parts] * LAYERS)
    with pytest.raises(ValueError, match="fit"):
        c_ops.stack([parts, replace(parts, down=parts.out)])
    with pytest.raises(ValueError, match="fit"):
        c_ops.stack([replace(parts, mlp_norm=torch.ones(3))])
    for wrong in (
        replace(step, x=step.x[:, 1:]),
        replace(step, cos=step.cos[1:]),
        replace(step, pool=step.pool[:, 1:]),
        replace(step, slots=step.slots[1:]),
    ):
        with pytest.raises(ValueError, match="fit"):
            run(c_ops, stack, wrong, wrong.pool)
    with pytest.raises(ValueError, match="outside"):
        run(c_ops, stack, replace(step, tables=step.tables + 6), step.pool)
