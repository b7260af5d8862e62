"""Raw block frames over the data link: works between any two workers, and is what every other way falls back
to.

The fetching side asks for blocks by id (``Read``) and gets one raw frame each (``Blocks``). What it has asked
for and not yet got is its credit in use: never more than ``window`` blocks, so neither side queues without
bound. Blocks in GPU memory go through pinned host buffers on either side.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from pagerelay.common.errors import StartupError, TransferError
from pagerelay.common.kv.memory import DeviceMemory
from pagerelay.common.transport.base import Bytes, DeviceBlocks, Peer, TransferBackend, host_id
from pagerelay.common.transport.cuda_pool import CudaPool
from pagerelay.common.transport.cuda_runtime import CudaRuntime
from pagerelay.common.transport.populate import Populating
from pagerelay.common.transport.staging import PinnedStaging
from pagerelay.common.wire.pools import PoolAddress


class TcpBackend(TransferBackend):
    name: ClassVar[str] = "tcp"

    def __init__(self, window: int, cuda: CudaRuntime | None = None) -> None:
        """``cuda``: pools lie in the memory of that GPU; default: of the host."""
        self._window = window
        self._address: PoolAddress | None = None
        self._cuda = cuda
        self._pool: CudaPool | None = None
        self._populating: Populating | None = None
        self._staging = PinnedStaging(cuda) if cuda is not None else None

    def allocate(self, num_blocks: int, block_bytes: int) -> Bytes | DeviceMemory:
        memory: Bytes | DeviceMemory
        if self._cuda is not None:
            memory = self._pool = CudaPool(self._cuda, num_blocks, block_bytes)
        else:
            memory = self._host_memory(num_blocks * block_bytes)
            self._populating = Populating(memory, write=True)
        self._address = PoolAddress(
            kind="tcp", num_blocks=num_blocks, block_bytes=block_bytes, host_id=host_id()
        )
        return memory

    @staticmethod
    def _host_memory(need: int) -> Bytes:
        try:
            memory = mmap.mmap(-1, need, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StartupError(
                f"the KV pool needs {need >> 20} MiB of memory: {error.strerror}; lower cache.kv_memory_mib"
            ) from error
        return np.frombuffer(memory, dtype=np.uint8)

    def address(self) -> PoolAddress:
        if self._address is None:
            raise TransferError("no pool has been allocated")
        return self._address

    async def frames(self, blocks: Bytes | DeviceBlocks, ids: Sequence[int]) -> list[memoryview]:
        if isinstance(blocks, np.ndarray) or self._staging is None:
            return await super().frames(blocks, ids)
        return await self._staging.frames(blocks, ids)

    async def fetch(
        self,
        peer: Peer,
        lease: int,
        sources: Sequence[int],
        into: Bytes | DeviceBlocks,
        targets: Sequence[int],
        written: int | None = None,
    ) -> int:
        half, at_once = max(1, self._window // 2), min(2, self._window)
        spans = [slice(i, i + half) for i in range(0, len(sources), half)]
        # Two spans in flight: while one is being copied in, the next is on the wire.
        pending: list[tuple[slice, asyncio.Task[list[memoryview]]]] = []
        moved = 0
        try:
            for span in [*spans, None, None]:
                if span is not None:
                    pending.append((span, asyncio.ensure_future(peer.read(lease, sources[span]))))
                if len(pending) == at_once or (span is None and pending):
                    done, task = pending.pop(0)
                    moved += await self._place(await task, into, targets[done])
        finally:
            for _, task in pending:
                task.cancel()
            await asyncio.gather(*(task for _, task in pending), return_exceptions=True)
        return moved

    async def _place(
        self, frames: list[memoryview], into: Bytes | DeviceBlocks, targets: Sequence[int]
    ) -> int:
        due = into.shape[1] if isinstance(into, np.ndarray) else into.block_bytes
        if len(frames) != len(targets):
            raise TransferError(f"asked for {len(targets)} blocks, got {len(frames)}")
        for frame in frames:
            if frame.nbytes != due:
                raise TransferError(f"a block of {frame.nbytes} bytes came where {due} were due")
        if isinstance(into, np.ndarray):
            for frame, target in zip(frames, targets, strict=True):
                into[target] = np.frombuffer(frame, dtype=np.uint8)
        elif self._staging is None:
            raise TransferError("this tcp backend was made for a pool in the host's memory")
        else:
            await self._staging.run(partial(self._staging.write, frames, into, targets))
        return sum(frame.nbytes for frame in frames)

    def close(self) -> None:
        self._address = None
        if self._populating is not None:
            self._populating.stop()
        if self._staging is not None:
            self._staging.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
