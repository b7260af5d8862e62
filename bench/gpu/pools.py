"""Pools of both sides of a hand-over: CUDA IPC on a GPU, shared memory in a dry run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagerelay.common.transport.base import DirectBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.cupy_runtime import open_runtime
from pagerelay.common.transport.shm import ShmBackend


def make_backend(device: torch.device) -> DirectBackend:
    return ShmBackend() if device.type == "cpu" else CudaIpcBackend(open_runtime(device.index or 0))


def seen(memory: Any) -> Tensor:
    """A pool's bytes as torch sees them."""
    return torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory.tensor()


def fill_by_seed(content: Tensor, seed: int = 7) -> None:
    """The same bytes in every process with the same kind of device."""
    generator = torch.Generator(content.device).manual_seed(seed)
    content.random_(0, 256, generator=generator)
