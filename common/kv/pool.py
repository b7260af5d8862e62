"""The bytes of the KV cache: one allocation, block-major, seen as layers by attention and as blocks by
transports."""

from __future__ import annotations

import numpy as np
import torch

from pagerelay.common.errors import StartupError
from pagerelay.common.kv.memory import Bytes, DeviceBlocks, DeviceMemory
from pagerelay.common.wire.messages import Layout

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KvPool:
    """``tensor``: ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``; ``blocks``: the same memory as
    ``[num_blocks, block_bytes]``, a uint8 array or :class:`DeviceBlocks`.

    Both are views of ``memory``, which a transport backend allocated and keeps alive. A block is one
    contiguous span, so shipping block 7 is one copy of ``block_bytes`` at ``7 * block_bytes``.
    """

    def __init__(self, memory: Bytes | DeviceMemory, layout: Layout) -> None:
        self.layout = layout
        size = memory.size if isinstance(memory, np.ndarray) else memory.num_bytes
        self.num_blocks = size // layout.block_bytes
        used = self.num_blocks * layout.block_bytes
        self.blocks: Bytes | DeviceBlocks
        if isinstance(memory, np.ndarray):
            self._device = None
            self.blocks = memory[:used].reshape(self.num_blocks, layout.block_bytes)
            flat = torch.from_numpy(self.blocks).view(-1)
        else:
            self._device = memory
            self.blocks = DeviceBlocks(memory.pointer, self.num_blocks, layout.block_bytes, memory)
            flat = memory.tensor()[:used]
        self.tensor = flat.view(DTYPES[layout.dtype]).view(
            self.num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim
        )

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Blocks within the pool, in order with the steps that compute on it."""
        self.tensor[targets] = self.tensor[sources]

    def mark_written(self) -> int | None:
        """After a step was given to the GPU, on the thread that gave it: the number under which other workers
        can wait for it. ``None`` where a step that has returned is done."""
        return None if self._device is None else self._device.mark_written()

    def settle(self, mark: int | None) -> None:
        """Before what the step marked so has computed is announced, or blocks of it are given back; see
        :class:`DeviceMemory`."""
        if self._device is not None and mark is not None:
            self._device.settle(mark)


def check_fits(num_blocks: int, block_size: int) -> None:
    """A pool too small for anything is refused at start."""
    if num_blocks < 2:
        raise StartupError(
            f"the KV pool has {num_blocks} blocks of {block_size} tokens; "
            "raise cache.kv_memory_mib or cache.num_blocks"
        )
