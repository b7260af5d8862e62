"""The operations in C for x86-64 with AVX2 or AVX-512: the calls of `TorchOps`, and one promise more.

A row's result is bit for bit the same whatever came with it: the number of rows, its place among them, how a
prompt was cut in chunks, the other sequences, the block ids and size, the number of threads and the
instruction set. Every output of a linear is one chain of fused multiply-adds in ascending order; attention
walks tiles of 32 keys at fixed absolute positions.

ctypes releases the interpreter lock during a call. Calls may come from several threads; while one call has
the pool of helper threads, others run on their own thread.
"""

from __future__ import annotations

import ctypes
import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagerelay.kernels.cpu_build import KernelUnavailable, build
from pagerelay.kernels.cpu_native import (
    AttendJob,
    Layer,
    Step,
    Weight,
    check,
    choose,
    dense,
    fp32,
    load,
    pointer,
    pool_shape,
)

PANEL = 16
MAX_HEAD_DIM = 256
MAX_TOKENS = 2**31 - 1  # of a sequence, so a wider window hides nothing


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] as panels [ceil(out / 16), in, 16], zero past the last output.

    fp32, or int8 where `scales` [ceil(out / 16) * 16] give what one step of each output's weights is worth.
    """

    panels: Tensor
    scales: Tensor | None
    out_features: int
    in_features: int

    def native(self, bias: Tensor | None) -> Weight:
        """As the library takes it; ValueError when the bias does not fit."""
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias {tuple(bias.shape)} does not fit {self}")
        return Weight(
            *(pointer(self.panels), pointer(self.scales), pointer(bias), self.out_features, self.in_features)
        )

    def __str__(self) -> str:
        return f"a weight [{self.out_features}, {self.in_features}]"


class LayerParts(Protocol):
    """A decoder layer: x += out(attend(qkv(norm(x)))); x += down(silu_mul(gate_up(norm(x))))."""

    attention_norm: Tensor
    mlp_norm: Tensor
    eps: float
    qkv: tuple[PackedWeight, Tensor | None]
    """Weight and bias, as of the three below."""
    out: tuple[PackedWeight, Tensor | None]
    gate_up: tuple[PackedWeight, Tensor | None]
    down: tuple[PackedWeight, Tensor | None]
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedStack:
    """Decoder layers as the library takes them; `kept` is the memory that they point to."""

    layers: ctypes.Array[Layer]
    hidden: int
    inner: int
    qkv: int
    kept: list[object]


class CpuOps:
    """The operations in C; argument shapes are those of `TorchOps`. Tensors are fp32 on the CPU."""

    name = "c"
    min_rows = 1

    def __init__(
        self,
        cache_dir: Path,
        threads: int,
        instruction_set: str | None = None,
        library: Path | None = None,
        int8_weights: bool = False,
    ) -> None:
        """Compiles (or finds in `cache_dir`) the library and starts `threads` - 1 helper threads.

        With `int8_weights` linears round each output's weights to 255 steps: a quarter of the memory and of
        its traffic, and other results, though these too do not depend on what else is in the batch.
        `instruction_set` forces "avx2" or "avx512" (default: the best there is); `library` takes a ready-made
        library and compiles nothing. Raises KernelUnavailable.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if platform.machine() not in ("x86_64", "AMD64"):
            raise KernelUnavailable(f"the C kernels are for x86-64, this machine is {platform.machine()}")
        self._lib = load(library or build(cache_dir))
        self.threads, self._int8 = threads, int8_weights
        self.instruction_set = choose(self._lib, instruction_set)
        self._handle = self._lib.ops_open(self.instruction_set.encode(), threads)
        if not self._handle:
            raise KernelUnavailable("no memory for the kernels' thread pool")
        # Not at exit: a daemon thread may be inside a call then, and the process takes the helpers with it.
        weakref.finalize(self, self._lib.ops_close, self._handle).atexit = False

    def unsupported(self, head_dim: int) -> str | None:
        """Heads are read in runs of 8 numbers into scratch of a fixed width."""
        if head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM:
            return None
        return f"the C kernels need a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, not {head_dim}"

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """As `TorchOps.write_kv`; ValueError when a slot is outside the pool, and then nothing is written."""
        key, value, slots = fp32(key), fp32(value), dense(slots, torch.int64)
        blocks, kv_heads, block_size, head_dim = pool_shape(pool)
        if key.shape != (slots.numel(), kv_heads, head_dim) or value.shape != key.shape:
            raise ValueError(
                f"key {tuple(key.shape)} does not fit pool {tuple(pool.shape)} and {slots.numel()} slots"
            )
        check(
            self._lib.ops_write_kv(
                pool[0, layer].data_ptr(),
                *(pool.stride(0), blocks, kv_heads, block_size, head_dim),
                *(key.data_ptr(), value.data_ptr(), slots.data_ptr(), slots.numel()),
            )
        )

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
        """As `TorchOps.attend`; head_dim is a multiple of 8 up to 256.

        ValueError when lengths, starts and tables do not fit each other or name a block outside the pool.
        """
        query, out = fp32(query), torch.empty_like(query, memory_format=torch.contiguous_format)
        job, kept = _attention(pool, query.shape[1], tables, seq_lens, query_starts)
        if query.shape[2] != job.head_dim:
            raise ValueError(f"query {tuple(query.shape)} does not fit pool {tuple(pool.shape)}")
        job.pool, job.query, job.out = pool[0, layer].data_ptr(), query.data_ptr(), out.data_ptr()
        job.scale, job.window, job.soft_cap = scale, _window(window), soft_cap or 0.0
        check(self._lib.ops_attend(self._handle, ctypes.byref(job), query.shape[0]))
        del kept
        return out

    def pack(self, weight: Tensor) -> PackedWeight:
        """weight [out, in] in panels; the caller may drop the weight."""
        weight, scales = fp32(weight), None
        out_features, in_features = weight.shape
        if in_features < 1:
            raise ValueError(f"a weight {tuple(weight.shape)} has no inputs to multiply")
        panels = -(-out_features // PANEL)
        if self._int8:
            scales = torch.zeros(panels * PANEL)
            own = torch.maximum(weight.amax(1), -weight.amin(1)) / 127
            if not own.isfinite().all():
                raise ValueError(f"a weight {tuple(weight.shape)} has numbers that are not finite: no int8")
            # Below, a division by the scale would no longer undo the product with it.
            scales[:out_features] = own.where(own >= torch.finfo(torch.float32).tiny, 0)
            steps = weight / scales[:out_features, None].where(scales[:out_features, None] > 0, 1)
            weight = steps.round_().to(torch.int8)
        packed = torch.empty(panels, in_features, PANEL, dtype=weight.dtype)
        self._lib.ops_pack(
            weight.data_ptr(), packed.data_ptr(), out_features, in_features, weight.element_size()
        )
        return PackedWeight(packed, scales, out_features, in_features)

    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """As `TorchOps.linear`."""
        x, bias = fp32(x), None if bias is None else fp32(bias)
        if x.shape[-1] != packed.in_features:
            raise ValueError(f"x {tuple(x.shape)} does not fit {packed}")
        weight = packed.native(bias)
        out = x.new_empty(*x.shape[:-1], packed.out_features)
        rows = x.numel() // packed.in_features
        check(self._lib.ops_linear(self._handle, x.data_ptr(), ctypes.byref(weight), out.data_ptr(), rows))
        return out

    def embed(self, ids: Tensor, packed: PackedWeight) -> Tensor:
        """As `TorchOps.embed`; ValueError when an id is outside the weight."""
        ids = dense(ids, torch.int64)
        out = torch.empty(*ids.shape, packed.in_features)
        check(
            self._lib.ops_embed(
                *(packed.panels.data_ptr(), pointer(packed.scales), ids.data_ptr(), out.data_ptr()),
                *(ids.numel(), packed.out_features, packed.in_features),
            )
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `TorchOps.rms_norm`."""
        x, weight = fp32(x), fp32(weight)
        width = x.shape[-1]
        if weight.shape != (width,):
            raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
        out = torch.empty_like(x)
        self._lib.ops_rms_norm(
            self._handle, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps
        )
        return out

    def rotate_write(
        self, pool: Tensor, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
    ) -> Tensor:
        """As `TorchOps.rotate_write`, to the bit; ValueError as `write_kv`."""
        qkv, cos, sin, slots = fp32(qkv), fp32(cos), fp32(sin), dense(slots, torch.int64)
        blocks, kv_heads, block_size, head_dim = pool_shape(pool)
        rows, heads, dim = qkv.shape
        heads -= 2 * kv_heads
        fits = dim == head_dim and heads > 0 and head_dim % 2 == 0 and rows == slots.numel()
        if not fits or cos.shape != (rows, dim) or sin.shape != cos.shape:
            raise ValueError(
                f"qkv {tuple(qkv.shape)} does not fit pool {tuple(pool.shape)}, cos {tuple(cos.shape)} and "
                f"{slots.numel()} slots"
            )
        query = qkv.new_empty(rows, heads, dim)
        check(
            self._lib.ops_rotate_write(
                *(self._handle, pool[0, layer].data_ptr(), pool.stride(0), blocks),
                *(heads, kv_heads, block_size, head_dim, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr()),
                *(slots.data_ptr(), query.data_ptr(), rows),
            )
        )
        return query

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As `TorchOps.silu_mul`."""
        gate_up = fp32(gate_up)
        width = gate_up.shape[-1]
        if width % 2:
            raise ValueError(f"gate and up do not fit {tuple(gate_up.shape)}: its last dimension is odd")
        out = gate_up.new_empty(*gate_up.shape[:-1], width // 2)
        self._lib.ops_silu_mul(
            self._handle, gate_up.data_ptr(), out.data_ptr(), out.numel() // (width // 2 or 1), width // 2
        )
        return out

    def stack(self, layers: Sequence[LayerParts]) -> PackedStack:
        """Decoder layers of one shape, to be run in one call; ValueError where their shapes differ."""
        first = layers[0]
        shapes = {
            tuple((w.out_features, w.in_features) for w, _ in (p.qkv, p.out, p.gate_up, p.down))
            for p in layers
        }
        qkv, hidden = first.qkv[0].out_features, first.qkv[0].in_features
        inner, width = first.out[0].in_features, first.down[0].in_features
        if shapes != {((qkv, hidden), (hidden, inner), (2 * width, hidden), (hidden, width))}:
            raise ValueError(f"these layers' weights do not fit each other: {sorted(shapes)}")
        array, kept = (Layer * len(layers))(), list[object](layers)

        def weight(linear: tuple[PackedWeight, Tensor | None]) -> Weight:
            bias = None if linear[1] is None else fp32(linear[1])
            kept.append(bias)
            return linear[0].native(bias)

        for native, parts in zip(array, layers, strict=True):
            norms = (fp32(parts.attention_norm), fp32(parts.mlp_norm))
            if any(norm.shape != (hidden,) for norm in norms):
                raise ValueError(f"a norm does not fit hidden size {hidden}")
            native.attention_norm, native.mlp_norm = (norm.data_ptr() for norm in norms)
            kept.extend(norms)
            native.qkv, native.out = weight(parts.qkv), weight(parts.out)
            native.gate_up, native.down = weight(parts.gate_up), weight(parts.down)
            native.eps, native.scale, native.window = parts.eps, parts.scale, _window(parts.window)
        return PackedStack(array, hidden, inner, qkv, kept)

    def run_stack(
        self,
        stack: PackedStack,
        x: Tensor,
        pool: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        tables: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
    ) -> Tensor:
        """x [rows, hidden] through all layers, with the bits of the single operations; other arguments as for
        `rotate_write` and `attend`. ValueError as theirs; the pool's content is then undefined."""
        x, cos, sin, slots = fp32(x).clone(), fp32(cos), fp32(sin), dense(slots, torch.int64)
        rows, head_dim = x.shape[0], pool.shape[5]
        job, kept = _attention(pool, stack.inner // head_dim, tables, seq_lens, query_starts)
        if (
            (x.shape, cos.shape, sin.shape, slots.shape)
            != ((rows, stack.hidden), (rows, head_dim), (rows, head_dim), (rows,))
            or pool.shape[1] != len(stack.layers)
            or stack.inner != job.heads * head_dim
            or stack.qkv != stack.inner + 2 * job.kv_heads * head_dim
        ):
            raise ValueError(f"x {tuple(x.shape)}, pool {tuple(pool.shape)} and the layers do not fit")
        step = Step(
            *(cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), pool.data_ptr(), pool.stride(1), rows, job)
        )
        check(
            self._lib.ops_layers(
                self._handle, stack.layers, len(stack.layers), ctypes.byref(step), x.data_ptr()
            )
        )
        del kept
        return x


def _window(window: int | None) -> int:
    """As the library takes it, 0 for none; ValueError when negative."""
    if window is not None and window < 0:
        raise ValueError(f"window must be a number of keys, not {window}")
    return min(window or 0, MAX_TOKENS)


def _attention(
    pool: Tensor, heads: int, tables: Tensor, seq_lens: Tensor, query_starts: Tensor
) -> tuple[AttendJob, tuple[Tensor, ...]]:
    """What all layers' attention has in common, and the tensors it points to; ValueError where they do not
    fit."""
    tables, seq_lens = dense(tables, torch.int32), dense(seq_lens, torch.int32)
    query_starts = dense(query_starts, torch.int32)
    blocks, kv_heads, block_size, head_dim = pool_shape(pool)
    grouped = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
    if head_dim % 8 or head_dim > MAX_HEAD_DIM or not grouped:
        raise ValueError(f"{heads} heads of {head_dim} do not fit pool {tuple(pool.shape)}")
    if tables.shape[0] != seq_lens.numel() or query_starts.numel() != seq_lens.numel() + 1:
        raise ValueError("tables, seq_lens and query_starts disagree on the number of sequences")
    job = AttendJob(
        tables=tables.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_starts=query_starts.data_ptr(),
        block_stride=pool.stride(0),
        blocks=blocks,
        sequences=seq_lens.numel(),
        max_blocks=tables.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
    )
    return job, (tables, seq_lens, query_starts)
