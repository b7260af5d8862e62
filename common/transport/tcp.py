"""Raw block frames over the data link: works between any two workers, and is what every other way falls back
to.

The fetching side asks for blocks by id (``Read``) and gets one raw frame each (``Blocks``). What it has asked
for and not yet got is its credit in use: never more than ``window`` blocks, so neither side queues without
bound.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pagerelay.common.errors import StartupError, TransferError
from pagerelay.common.transport.base import Bytes, Peer, TransferBackend, host_id
from pagerelay.common.wire.messages import PoolAddress


class TcpBackend(TransferBackend):
    name: ClassVar[str] = "tcp"

    def __init__(self, window: int) -> None:
        self._window = window
        self._address: PoolAddress | None = None

    def allocate(self, num_blocks: int, block_bytes: int) -> Bytes:
        need = num_blocks * block_bytes
        try:
            memory = mmap.mmap(-1, need, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StartupError(
                f"the KV pool needs {need >> 20} MiB of memory: {error.strerror}; lower cache.kv_memory_mib"
            ) from error
        self._address = PoolAddress(
            kind="tcp", num_blocks=num_blocks, block_bytes=block_bytes, host_id=host_id()
        )
        return np.frombuffer(memory, dtype=np.uint8)

    def address(self) -> PoolAddress:
        if self._address is None:
            raise TransferError("no pool has been allocated")
        return self._address

    async def fetch(
        self, peer: Peer, lease: int, sources: Sequence[int], into: Bytes, targets: Sequence[int]
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
                    moved += self._place(await task, into, targets[done])
        finally:
            for _, task in pending:
                task.cancel()
            await asyncio.gather(*(task for _, task in pending), return_exceptions=True)
        return moved

    @staticmethod
    def _place(frames: list[memoryview], into: Bytes, targets: Sequence[int]) -> int:
        if len(frames) != len(targets):
            raise TransferError(f"asked for {len(targets)} blocks, got {len(frames)}")
        for frame, target in zip(frames, targets, strict=True):
            if frame.nbytes != into.shape[1]:
                raise TransferError(f"a block of {frame.nbytes} bytes came where {into.shape[1]} were due")
            into[target] = np.frombuffer(frame, dtype=np.uint8)
        return sum(frame.nbytes for frame in frames)

    def close(self) -> None:
        self._address = None
