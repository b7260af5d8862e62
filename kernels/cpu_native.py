"""The compiled library through ctypes: its structures, its functions' types, its status codes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from pagerelay.kernels.cpu_build import KernelUnavailable

INSTRUCTION_SETS = ("avx512", "avx2")

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_STATUS = {-1: "no memory for the kernels' scratch", -2: "an index, length or block id is outside its array"}


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class Weight(ctypes.Structure):
    """struct weight of cpu/kernels.h."""

    _fields_ = [*_fields(_POINTER, "panels", "scales", "bias"), *_fields(_LONG, "n", "k")]


class AttendJob(ctypes.Structure):
    """struct attend_job of cpu/kernels.h."""

    _fields_ = [
        *_fields(_POINTER, "pool", "query", "out", "tables", "seq_lens", "query_starts", "items"),
        *_fields(_LONG, "block_stride", "blocks", "sequences", "max_blocks"),
        *_fields(_LONG, "heads", "kv_heads", "block_size", "head_dim", "window"),
        *_fields(_FLOAT, "scale", "soft_cap"),
        ("max_vectors", _LONG),
    ]


class Layer(ctypes.Structure):
    """struct layer of cpu/stack.c."""

    _fields_ = [
        *_fields(_POINTER, "attention_norm", "mlp_norm"),
        *_fields(Weight, "qkv", "out", "gate_up", "down"),
        *_fields(_FLOAT, "eps", "scale"),
        ("window", _LONG),
    ]


class Step(ctypes.Structure):
    """struct step of cpu/stack.c."""

    _fields_ = [
        *_fields(_POINTER, "cosine", "sine", "slots", "pool"),
        *_fields(_LONG, "layer_stride", "rows"),
        ("attend", AttendJob),
    ]


def load(library: Path) -> ctypes.CDLL:
    """Raises KernelUnavailable where the file is no library of ours."""
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"cannot load {library}: {error}") from error
    p, n = _POINTER, _LONG
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "ops_supports": (_INT, (ctypes.c_char_p,)),
        "ops_open": (p, (ctypes.c_char_p, _INT)),
        "ops_close": (None, (p,)),
        "ops_pack": (None, (p, p, n, n, n)),
        "ops_embed": (_INT, (p, p, p, p, n, n, n)),
        "ops_linear": (_INT, (p, p, p, p, n)),
        "ops_rms_norm": (None, (p, p, p, p, n, n, _FLOAT)),
        "ops_silu_mul": (None, (p, p, p, n, n)),
        "ops_rotate_write": (_INT, (p, p, n, n, n, n, n, n, p, p, p, p, p, n)),
        "ops_write_kv": (_INT, (p, n, n, n, n, n, p, p, p, n)),
        "ops_attend": (_INT, (p, p, n)),
        "ops_layers": (_INT, (p, p, n, p, p)),
        "ops_struct_bytes": (_LONG, (_INT,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    for index, structure in enumerate((Weight, AttendJob, Layer, Step)):
        if lib.ops_struct_bytes(index) != ctypes.sizeof(structure):
            raise RuntimeError(f"{structure.__name__} is not laid out here as in the C sources")
    return lib


def choose(lib: ctypes.CDLL, wanted: str | None) -> str:
    """The instruction set to use; KernelUnavailable where this processor lacks it."""
    for name in (wanted,) if wanted else INSTRUCTION_SETS:
        if lib.ops_supports(name.encode()):
            return name
    raise KernelUnavailable(f"this processor has no {wanted or 'AVX2 with FMA'}")


def check(status: int) -> None:
    """Raises what a call's status means."""
    if status == -1:
        raise MemoryError(_STATUS[status])
    if status != 0:
        raise ValueError(_STATUS[status])


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is not dtype or x.device.type != "cpu":
        raise ValueError(f"expected {dtype} on the CPU, got {x.dtype} on {x.device}")
    return x.contiguous()


def fp32(x: Tensor) -> Tensor:
    return dense(x, torch.float32)


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def pool_shape(pool: Tensor) -> tuple[int, int, int, int]:
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
