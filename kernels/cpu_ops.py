"""The operations in C for x86-64 with AVX2 or AVX-512: the calls of `TorchOps`, and one promise more.

A row's result is bit for bit the same whatever came with it: the number of rows, its place among them, how a
prompt was cut in chunks, the other sequences, the block ids and size, the number of threads and the
instruction set. Every output of a linear is one chain of fused multiply-adds in ascending order; attention
walks tiles of 32 keys at fixed absolute positions.

ctypes releases the interpreter lock during a call. Calls may come from several threads; while one call has
the pool of helper threads, others run on their own thread.
"""

import ctypes
import platform
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagerelay.kernels.cpu_build import KernelUnavailable, build

PANEL = 16
MAX_HEAD_DIM = 256
MAX_TOKENS = 2**31 - 1  # of a sequence, so a wider window hides nothing
INSTRUCTION_SETS = ("avx512", "avx2")

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_STATUS = {-1: "no memory for the kernels' scratch", -2: "an index, length or block id is outside its array"}


class _AttendJob(ctypes.Structure):
    """struct attend_job of cpu/kernels.h."""

    _fields_ = [
        *(
            (name, _POINTER)
            for name in ("pool", "query", "out", "tables", "seq_lens", "query_starts", "items")
        ),
        *(
            (name, _LONG)
            for name in ("block_stride", "max_blocks", "heads", "kv_heads", "block_size", "head_dim")
        ),
        ("window", _LONG),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
        ("max_vectors", _LONG),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] as panels [ceil(out / 16), in, 16], zero past the last output."""

    panels: Tensor
    out_features: int
    in_features: int


class CpuOps:
    """The operations in C; argument shapes are those of `TorchOps`. Tensors are fp32 on the CPU."""

    name = "c"
    min_rows = 1

    def __init__(
        self, cache_dir: Path, threads: int, instruction_set: str | None = None, library: Path | None = None
    ) -> None:
        """Compiles (or finds in `cache_dir`) the library and starts `threads` - 1 helper threads.

        `instruction_set` forces "avx2" or "avx512" (default: the best there is); `library` takes a ready-made
        library and compiles nothing. Raises KernelUnavailable.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if platform.machine() not in ("x86_64", "AMD64"):
            raise KernelUnavailable(f"the C kernels are for x86-64, this machine is {platform.machine()}")
        self._lib = _load(library or build(cache_dir))
        self.threads = threads
        self.instruction_set = _choose(self._lib, instruction_set)
        self._handle = self._lib.ops_open(self.instruction_set.encode(), threads)
        if not self._handle:
            raise KernelUnavailable("no memory for the kernels' thread pool")
        # Not at exit: a daemon thread may be inside a call then, and the process takes the helpers with it.
        weakref.finalize(self, self._lib.ops_close, self._handle).atexit = False

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """As `TorchOps.write_kv`; ValueError when a slot is outside the pool, and then nothing is written."""
        key, value, slots = _fp32(key), _fp32(value), _dense(slots, torch.int64)
        blocks, kv_heads, block_size, head_dim = _pool_shape(pool)
        if key.shape != (slots.numel(), kv_heads, head_dim) or value.shape != key.shape:
            raise ValueError(
                f"key {tuple(key.shape)} does not fit pool {tuple(pool.shape)} and {slots.numel()} slots"
            )
        _check(
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
        query = _fp32(query)
        tables, seq_lens = _dense(tables, torch.int32), _dense(seq_lens, torch.int32)
        query_starts = _dense(query_starts, torch.int32)
        blocks, kv_heads, block_size, head_dim = _pool_shape(pool)
        rows, heads, query_dim = query.shape
        grouped = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
        if query_dim != head_dim or head_dim % 8 or head_dim > MAX_HEAD_DIM or not grouped:
            raise ValueError(f"query {tuple(query.shape)} does not fit pool {tuple(pool.shape)}")
        if tables.shape[0] != seq_lens.numel() or query_starts.numel() != seq_lens.numel() + 1:
            raise ValueError("tables, seq_lens and query_starts disagree on the number of sequences")
        if window is not None and window < 0:
            raise ValueError(f"window must be a number of keys, not {window}")
        out = torch.empty_like(query)
        job = _AttendJob(
            pool=pool[0, layer].data_ptr(),
            query=query.data_ptr(),
            out=out.data_ptr(),
            tables=tables.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            query_starts=query_starts.data_ptr(),
            block_stride=pool.stride(0),
            max_blocks=tables.shape[1],
            heads=heads,
            kv_heads=kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            window=min(window or 0, MAX_TOKENS),
            scale=scale,
            soft_cap=soft_cap or 0.0,
        )
        _check(self._lib.ops_attend(self._handle, ctypes.byref(job), blocks, seq_lens.numel(), rows))
        return out

    def pack(self, weight: Tensor) -> PackedWeight:
        """weight [out, in] in panels; the caller may drop the weight."""
        weight = _fp32(weight)
        out_features, in_features = weight.shape
        if in_features < 1:
            raise ValueError(f"a weight {tuple(weight.shape)} has no inputs to multiply")
        panels = torch.empty(-(-out_features // PANEL), in_features, PANEL)
        self._lib.ops_pack(weight.data_ptr(), panels.data_ptr(), out_features, in_features)
        return PackedWeight(panels, out_features, in_features)

    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """As `TorchOps.linear`."""
        x, bias = _fp32(x), None if bias is None else _fp32(bias)
        if x.shape[-1] != packed.in_features or (bias is not None and bias.shape != (packed.out_features,)):
            raise ValueError(f"x {tuple(x.shape)} or the bias does not fit a weight {_features(packed)}")
        out = x.new_empty(*x.shape[:-1], packed.out_features)
        _check(
            self._lib.ops_linear(
                *(
                    self._handle,
                    x.data_ptr(),
                    packed.panels.data_ptr(),
                    None if bias is None else bias.data_ptr(),
                ),
                *(out.data_ptr(), x.numel() // packed.in_features, packed.out_features, packed.in_features),
            )
        )
        return out

    def embed(self, ids: Tensor, packed: PackedWeight) -> Tensor:
        """As `TorchOps.embed`; ValueError when an id is outside the weight."""
        ids = _dense(ids, torch.int64)
        out = torch.empty(*ids.shape, packed.in_features)
        _check(
            self._lib.ops_embed(
                *(packed.panels.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.numel()),
                *(packed.out_features, packed.in_features),
            )
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `TorchOps.rms_norm`."""
        x, weight = _fp32(x), _fp32(weight)
        width = x.shape[-1]
        if weight.shape != (width,):
            raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
        out = torch.empty_like(x)
        self._lib.ops_rms_norm(
            self._handle, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps
        )
        return out

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As `TorchOps.rotary`, to the bit."""
        cos, sin = _fp32(cos), _fp32(sin)
        return self._rotate(_fp32(q), cos, sin), self._rotate(_fp32(k), cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        if cos.shape != (rows, dim) or sin.shape != cos.shape or dim % 2:
            raise ValueError(f"cos {tuple(cos.shape)} does not fit {tuple(x.shape)}")
        out = torch.empty_like(x)
        self._lib.ops_rotary(
            *(self._handle, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()), rows, heads, dim
        )
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """As `TorchOps.silu_mul`."""
        gate, up = _fp32(gate), _fp32(up)
        if gate.shape != up.shape:
            raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
        out = torch.empty_like(gate)
        self._lib.ops_silu_mul(self._handle, gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel())
        return out


def _load(library: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"cannot load {library}: {error}") from error
    p, n = _POINTER, _LONG
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "ops_supports": (_INT, (ctypes.c_char_p,)),
        "ops_open": (p, (ctypes.c_char_p, _INT)),
        "ops_close": (None, (p,)),
        "ops_pack": (None, (p, p, n, n)),
        "ops_embed": (_INT, (p, p, p, n, n, n)),
        "ops_linear": (_INT, (p, p, p, p, p, n, n, n)),
        "ops_rms_norm": (None, (p, p, p, p, n, n, _FLOAT)),
        "ops_silu_mul": (None, (p, p, p, p, n)),
        "ops_rotary": (None, (p, p, p, p, p, n, n, n)),
        "ops_write_kv": (_INT, (p, n, n, n, n, n, p, p, p, n)),
        "ops_attend": (_INT, (p, p, n, n, n)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _choose(lib: ctypes.CDLL, wanted: str | None) -> str:
    for name in (wanted,) if wanted else INSTRUCTION_SETS:
        if lib.ops_supports(name.encode()):
            return name
    raise KernelUnavailable(f"this processor has no {wanted or 'AVX2 with FMA'}")


def _check(status: int) -> None:
    if status == -1:
        raise MemoryError(_STATUS[status])
    if status != 0:
        raise ValueError(_STATUS[status])


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is not dtype or x.device.type != "cpu":
        raise ValueError(f"expected {dtype} on the CPU, got {x.dtype} on {x.device}")
    return x.contiguous()


def _fp32(x: Tensor) -> Tensor:
    return _dense(x, torch.float32)


def _pool_shape(pool: Tensor) -> tuple[int, int, int, int]:
    """blocks, kv_heads, block_size, head_dim of a pool whose inner dimensions are dense."""
    if (
        pool.dtype is not torch.float32
        or pool.device.type != "cpu"
        or pool.dim() != 6
        or pool.shape[2] != 2
        or not pool[0].is_contiguous()
    ):
        raise ValueError(f"not a dense fp32 pool: {tuple(pool.shape)} {pool.dtype} strides {pool.stride()}")
    blocks, _, _, kv_heads, block_size, head_dim = pool.shape
    return blocks, kv_heads, block_size, head_dim


def _features(packed: PackedWeight) -> str:
    return f"[{packed.out_features}, {packed.in_features}]"
