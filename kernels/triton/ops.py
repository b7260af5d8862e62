"""`TritonOps`: the operations of a model over the Triton kernels. The torch twins are their specification."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from pagerelay.kernels.triton.attend import attend_kernel, merge_kernel
from pagerelay.kernels.triton.attend_plan import SCRATCH_BYTES, plan_attention
from pagerelay.kernels.triton.checks import check_angles, check_rows_dense, check_same, pool_shape
from pagerelay.kernels.triton.launch import (
    attend_constants,
    merge_constants,
    norm_constants,
    silu_constants,
    write_constants,
)
from pagerelay.kernels.triton.rows import rms_norm_kernel, silu_mul_kernel, write_kv_kernel
from pagerelay.kernels.triton.sampling import SampleRows, sample

PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROCESSORS = 132


class TritonOps:
    """Tensors are fp32, fp16 or bf16, of one dtype within a call and with the pool, and on one device: CUDA,
    or the CPU under TRITON_INTERPRET=1. No method waits for the device, so nothing checks the values of
    indices.

    With `deterministic` a row of `attend` has the same bits whatever else is in its step, however its
    sequence was cut into chunks, and wherever its blocks lie; see `plan_attention` for the price. All other
    kernels have that property always; `linear` is the library's, which chooses its algorithm by shape and
    promises nothing.

    splits: programs per context, to measure or test; by default chosen by shape.
    """

    name = "triton"
    min_rows = 1

    def __init__(self, deterministic: bool = False, splits: int | None = None) -> None:
        if splits is not None and (deterministic or splits < 1):
            raise ValueError("splits must be at least 1, and deterministic mode has its own")
        self.deterministic = deterministic
        self._splits = splits
        self._devices: dict[torch.device, tuple[int, int]] = {}

    def unsupported(self, head_dim: int) -> str | None:
        """Tiles are as wide as a head; wider ones than were compiled do not fit shared memory."""
        return None if head_dim <= 256 else f"the Triton kernels need a head_dim up to 256, not {head_dim}"

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """As `TorchOps.write_kv`."""
        rows = self._check_write(pool, key, value, slots)
        constants = write_constants(
            0, key.shape[1], key.shape[2], *_block_and_strides(pool), (0, key.stride(0), value.stride(0))
        )
        if rows:
            groups = triton.cdiv(key.shape[1], constants["SPAN"])
            write_kv_kernel[(rows, groups)](
                *(None, key, value, None, None, slots, pool[:, layer, 0], pool[:, layer, 1], None),
                **constants,
            )

    def rotate_write(
        self, pool: Tensor, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
    ) -> Tensor:
        """As `TorchOps.rotate_write`, in one launch; a row of qkv is contiguous inside."""
        kv_heads = pool_shape(pool)[1]
        heads = qkv.shape[1] - 2 * kv_heads
        if heads < 1:
            raise ValueError(f"qkv {tuple(qkv.shape)} does not fit pool {tuple(pool.shape)}")
        check_rows_dense(qkv)
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        rows = self._check_write(pool, key, value, slots)
        check_angles(qkv, cos, sin)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        row_strides = (qkv.stride(0),) * 3
        constants = write_constants(heads, kv_heads, key.shape[2], *_block_and_strides(pool), row_strides)
        if rows:
            groups = triton.cdiv(kv_heads, constants["SPAN"]) + triton.cdiv(heads, constants["SPAN"])
            write_kv_kernel[(rows, groups)](
                *(query, key, value, cos, sin, slots, pool[:, layer, 0], pool[:, layer, 1], out),
                **constants,
            )
        return out

    @staticmethod
    def _check_write(pool: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> int:
        """The number of rows."""
        _, kv_heads, _, head_dim = pool_shape(pool)
        rows = slots.numel()
        if key.shape != (rows, kv_heads, head_dim) or value.shape != key.shape:
            raise ValueError(f"key {tuple(key.shape)} does not fit pool {tuple(pool.shape)} and {rows} slots")
        check_same(pool, key, value)
        check_rows_dense(key)
        check_rows_dense(value)
        if slots.dtype is not torch.int64 or not slots.is_contiguous():
            raise ValueError(f"slots must be contiguous int64, not {slots.dtype}")
        return rows

    def attend(
        self,
        pool: Tensor,
        layer: int,
        query: Tensor,
        tables: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """As `TorchOps.attend`.

        A step with as many rows as sequences is taken for one of decode rows, any other for one with
        prefill; the result is the same to rounding, whatever the rows are. The table's width bounds the
        contexts.
        """
        _, kv_heads, block_size, head_dim = pool_shape(pool)
        rows, heads, query_dim = query.shape
        sequences = seq_lens.numel()
        if query_dim != head_dim or heads % kv_heads:
            raise ValueError(f"query {tuple(query.shape)} does not fit pool {tuple(pool.shape)}")
        check_same(pool, query)
        if tables.shape[0] != sequences or query_starts.numel() != sequences + 1:
            raise ValueError("tables, seq_lens and query_starts disagree on the number of sequences")
        for tensor in (tables, seq_lens, query_starts):
            if tensor.dtype is not torch.int32 or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
                raise ValueError("tables, seq_lens and query_starts must be int32 and contiguous in rows")
        query = query.contiguous()
        if not rows or not sequences:
            return torch.zeros_like(query)
        arch, wanted = self._device(query.device)
        group = heads // kv_heads
        plan = plan_attention(
            group, head_dim, pool.element_size(), rows == sequences, self.deterministic, arch
        )
        # Rows past the last sequence belong to no program, unless each row has its own.
        out = torch.empty_like(query) if plan.rows == 1 else torch.zeros_like(query)
        programs = plan.programs(rows, sequences)
        context = tables.shape[1] * block_size
        if window and not self.deterministic:
            context = min(context, window + plan.rows)
        splits = self._splits or plan.splits(programs, context, -(-wanted // kv_heads))
        constants = attend_constants(
            plan,
            kv_heads,
            group,
            head_dim,
            *_block_and_strides(pool),
            splits,
            window,
            soft_cap,
            pool.dtype is torch.bfloat16,
        )
        one = splits * kv_heads * plan.merge * head_dim * 4
        chunk = programs if splits == 1 else min(programs, max(1, SCRATCH_BYTES // one))
        part = lse = None
        if splits > 1:
            part = query.new_empty((splits, chunk, kv_heads, plan.merge, head_dim), dtype=torch.float32)
            lse = query.new_empty((splits, chunk, kv_heads, plan.merge), dtype=torch.float32)
        for first in range(0, programs, chunk):
            count = min(chunk, programs - first)
            attend_kernel[(count, kv_heads, splits)](
                *(query, pool[:, layer, 0], pool[:, layer, 1], out, part, lse),
                *(tables, seq_lens, query_starts, scale, sequences, tables.stride(0), splits, first),
                **constants,
            )
            if splits > 1:
                merge_kernel[(count, kv_heads)](
                    *(part, lse, out, query_starts, sequences, splits, first),
                    **merge_constants(plan, kv_heads, group, head_dim),
                )
        return out

    def _device(self, device: torch.device) -> tuple[int, int]:
        """Ten times the compute capability; programs that keep the device busy."""
        if device not in self._devices:
            arch, processors = 90, INTERPRETED_PROCESSORS
            if device.type == "cuda":
                facts = torch.cuda.get_device_properties(device)
                arch, processors = 10 * facts.major + facts.minor, facts.multi_processor_count
            self._devices[device] = arch, PROGRAMS_PER_PROCESSOR * processors
        return self._devices[device]

    def pack(self, weight: Tensor) -> Tensor:
        """As `TorchOps.pack`: the weight itself."""
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `TorchOps.linear`: the library's own product."""
        return functional.linear(x, packed, bias)

    def embed(self, ids: Tensor, packed: Tensor) -> Tensor:
        """As `TorchOps.embed`."""
        return functional.embedding(ids, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `TorchOps.rms_norm`."""
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(`rms_norm` of the sum, the sum x + residual rounded to its dtype), in one pass; x, residual [...,
        n].
        """
        if residual.shape != x.shape:
            raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ")
        check_same(x, residual)
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        if weight.shape != (width,):
            raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
        check_same(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        total = torch.empty_like(x) if residual is not None else out
        if x.numel():
            rms_norm_kernel[(x.numel() // width,)](
                x,
                residual.contiguous() if residual is not None else None,
                weight.contiguous(),
                out,
                total,
                eps,
                **norm_constants(width, residual is not None),
            )
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As `TorchOps.silu_mul`."""
        width, odd = divmod(gate_up.shape[-1], 2)
        if odd:
            raise ValueError(f"gate_up {tuple(gate_up.shape)} does not fit: no two halves")
        check_same(gate_up)
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty((*gate_up.shape[:-1], width))
        if out.numel():
            constants = silu_constants(width)
            silu_mul_kernel[(out.numel() // width, triton.cdiv(width, constants["SPAN"]))](
                gate_up, out, **constants
            )
        return out

    def choose(self, logits: Tensor, *wishes: Tensor) -> Tensor:
        """One token id per row; wishes are the columns of `SampleRows`."""
        return sample(logits, SampleRows(*wishes))

    def stack(self, layers: Sequence[Any]) -> tuple[Any, ...]:
        """The form `run_stack` takes of decoder layers; each as `LayerParts`, with its linears packed."""
        return tuple(layers)

    def run_stack(
        self,
        stack: tuple[Any, ...],
        x: Tensor,
        pool: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        tables: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
    ) -> Tensor:
        """All layers over x [rows, hidden]; sums and the norms that follow them are one launch each."""
        rows, head_dim = x.shape[0], pool.shape[5]
        normed = self.rms_norm(x, stack[0].attention_norm, stack[0].eps)
        for index, layer in enumerate(stack):
            qkv = self.linear(normed, *layer.qkv).view(rows, -1, head_dim)
            query = self.rotate_write(pool, index, qkv, cos, sin, slots)
            context = self.attend(
                *(pool, index, query, tables, seq_lens, query_starts, layer.scale, layer.window)
            )
            attended = self.linear(context.view(rows, -1), *layer.out)
            normed, x = self.add_rms_norm(attended, x, layer.mlp_norm, layer.eps)
            out = self.linear(self.silu_mul(self.linear(normed, *layer.gate_up)), *layer.down)
            if index + 1 < len(stack):
                following = stack[index + 1]
                normed, x = self.add_rms_norm(out, x, following.attention_norm, following.eps)
            else:
                x = x + out
        return x


def _block_and_strides(pool: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Block size, and the distances of blocks, heads and tokens, in elements."""
    return pool.shape[4], (pool.stride(0), pool.stride(3), pool.stride(4))
