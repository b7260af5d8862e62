"""What a pool's bytes lie in: an array of the host's memory, or addresses on a GPU. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """Blocks in GPU memory, as transports see them: ``[num_blocks, block_bytes]`` from ``pointer`` on.

    ``memory``: that of our own pool; a peer's has none.
    """

    pointer: int
    num_blocks: int
    block_bytes: int
    memory: DeviceMemory | None = field(default=None, compare=False)

    def at(self, block: int) -> int:
        """Address of a block."""
        return self.pointer + block * self.block_bytes


class DeviceMemory(Protocol):
    """A pool's memory on a GPU. The transport backend that allocated it keeps it alive, and frees it."""

    @property
    def pointer(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def tensor(self) -> torch.Tensor:
        """``uint8 [num_bytes]`` on the device, not copied."""
        ...

    def mark_written(self) -> int:
        """Marks what the calling thread has queued on the GPU until now; returns the mark's number, for
        ``Ready``."""
        ...

    def settle(self, mark: int) -> None:
        """The step that was marked so has been applied: what is announced from now on can be read, and blocks
        that are given back can be written by others, once its mark has passed."""
        ...

    @property
    def settled_mark(self) -> int | None:
        """CUDA event after which announced blocks can be read and free ones written. It passed long ago where
        steps are waited for, and is never that of a step that has still to be applied."""
        ...
