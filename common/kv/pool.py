"""The bytes of the KV cache: one allocation, block-major, seen as layers by attention and as blocks by
transports."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagerelay.common.wire.messages import Layout

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KvPool:
    """``tensor``: ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``; ``blocks``: ``uint8
    [num_blocks, block_bytes]``.

    Both are views of ``memory``, which a transport backend allocated and keeps alive. A block is one
    contiguous span, so shipping block 7 is one copy of ``block_bytes`` at ``7 * block_bytes``.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], layout: Layout) -> None:
        self.layout = layout
        self.num_blocks = memory.size // layout.block_bytes
        self.blocks = memory[: self.num_blocks * layout.block_bytes].reshape(
            self.num_blocks, layout.block_bytes
        )
        self.tensor = (
            torch.from_numpy(self.blocks)
            .view(-1)
            .view(DTYPES[layout.dtype])
            .view(
                self.num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim
            )
        )
