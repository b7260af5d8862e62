"""Host arrays to the model's device: all of a step by one copy out of pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
_FIRST_BYTES = 1 << 16
_TYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}

Arrays = Sequence[NDArray[Any]]


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one of the calling thread; kernels are launched there. Nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def packed_bytes(arrays: Arrays) -> int:
    """Bytes of ``arrays`` behind each other, each at an aligned place."""
    return sum(_aligned(array.nbytes) for array in arrays)


def views(packed: Tensor, arrays: Arrays) -> list[Tensor]:
    """Of ``packed`` (uint8), tensors of the arrays' types and shapes at their places in it."""
    found, at = [], 0
    for array in arrays:
        piece = packed[at : at + array.nbytes].view(_TYPES[array.dtype.name])
        found.append(piece.view(array.shape))
        at += _aligned(array.nbytes)
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True)
class _Side:
    """One of two host buffers, and the CUDA event after which it may be filled anew."""

    host: Tensor
    read: Any = None


class Feed:
    """Belongs to one thread at a time. Two host buffers take turns, so that one can be filled while the other
    is still being read; nothing waits for the device unless it is two steps behind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sides = [self._side(_FIRST_BYTES), self._side(_FIRST_BYTES)]

    def _side(self, num_bytes: int) -> _Side:
        pinned = self.device.type == "cuda"
        return _Side(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def send(self, arrays: Arrays, into: Tensor | None = None) -> list[Tensor]:
        """The arrays (int32, int64 or fp64) on the device, as views of ``into`` (uint8, of at least
        :func:`packed_bytes`) or of memory of their own. Ordered on the thread's current stream."""
        num_bytes = packed_bytes(arrays)
        self._sides.reverse()
        side = self._sides[0]
        if side.read is not None:
            side.read.synchronize()
        if side.host.numel() < num_bytes:
            side = self._sides[0] = self._side(1 << (num_bytes - 1).bit_length())
        host, at = side.host.numpy(), 0
        for array in arrays:
            host[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += _aligned(array.nbytes)
        if into is None:
            into = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        into[:num_bytes].copy_(side.host[:num_bytes], non_blocking=True)
        if self.device.type == "cuda":
            side.read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            side.read.record()
        return views(into, arrays)
