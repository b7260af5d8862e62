"""Transfer backends in pairs with a link between them: every way of blocks from one pool to another.

Pools in GPU memory lie on a fake machine, whose bytes tests see as arrays too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fake_cuda import FakeCuda

from pagerelay.common.errors import TransferError
from pagerelay.common.transport.base import Bytes, DeviceBlocks, Peer, TransferBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.messages import Blocks, LeaseLost, Read, ToPrefill
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.common.wire.sockets import ServerSocket

GPU_WAYS = {"cuda_ipc": (0, 0), "cuda_ipc-peer": (0, 1), "tcp-from-gpu": (0, None), "tcp-to-gpu": (None, 0)}
"""Way → GPU of the owner's pool and of the reader's, ``None`` for the host's memory."""
WAYS = ("shm", "tcp-by-hand", "tcp-by-socket", "tcp-gpu-by-socket", *GPU_WAYS)
LEASE = 1


class HandLink:
    """The owner's side of ``Read`` without a socket. ``pool`` may lie, as a peer might."""

    def __init__(self, pool: PoolAddress, owner: TransferBackend, blocks: Bytes | DeviceBlocks) -> None:
        self.pool = pool
        self.owner = owner
        self.blocks = blocks
        self.num_blocks = pool.num_blocks
        self.in_flight = 0
        self.most_in_flight = 0
        self.gate = asyncio.Event()
        """While it is clear, nobody gets an answer."""
        self.gate.set()
        self.lost: str | None = None

    async def read(self, lease: int, block_ids: Sequence[int]) -> list[memoryview]:
        self.in_flight += len(block_ids)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
            if self.lost is not None:
                raise TransferError(self.lost)
            if not set(block_ids) <= set(range(self.num_blocks)):
                raise TransferError("no such lease")
            frames = await self.owner.frames(self.blocks, block_ids)
            return [memoryview(frame.tobytes()) for frame in frames]
        finally:
            self.in_flight -= len(block_ids)


async def serve_blocks(
    server: ServerSocket, owner: TransferBackend, blocks: Bytes | DeviceBlocks, num_blocks: int
) -> None:
    """A prefill worker's answer to Read, as far as bytes go."""
    decode: Decoder[ToPrefill] = Decoder(ToPrefill)
    while True:
        peer, frames = await server.receive()
        message = decode(frames[0])
        if not isinstance(message, Read):
            continue
        if not set(message.block_ids) <= set(range(num_blocks)):
            await server.send(peer, encode(LeaseLost(lease=message.lease, reason="no such lease")))
            continue
        header = encode(Blocks(lease=message.lease, block_ids=message.block_ids))
        frames = await owner.frames(blocks, message.block_ids)
        await server.send(peer, header, *frames, copy=False)


async def stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@dataclass
class Pair:
    """``source`` and ``target``: uint8 [blocks, block_bytes], the source full of random bytes; ``into`` is
    the target as a backend is given it."""

    owner: TransferBackend
    reader: TransferBackend
    source: Bytes
    target: Bytes
    into: Bytes | DeviceBlocks
    peer: Peer
    owner_cuda: FakeCuda | None = None
    reader_cuda: FakeCuda | None = None
    pool: Any = None
    """The owner's, in GPU memory."""

    async def fetch(self, sources: list[int], targets: list[int], written: int | None = None) -> int:
        return await self.reader.fetch(self.peer, LEASE, sources, self.into, targets, written)


def gpus(way: str) -> tuple[int | None, int | None]:
    return (0, 0) if way == "tcp-gpu-by-socket" else GPU_WAYS.get(way, (None, None))


def make_backend(way: str, window: int = 4, cuda: FakeCuda | None = None) -> TransferBackend:
    if way.startswith("cuda_ipc"):
        assert cuda is not None
        return CudaIpcBackend(cuda, cuda.place)
    return ShmBackend() if way == "shm" else TcpBackend(window, cuda)


def seen(memory: Any, blocks: int, block_bytes: int, cuda: FakeCuda | None) -> tuple[Bytes, Any]:
    """An allocated pool as an array, and as a backend is given it."""
    if cuda is None:
        view = memory.reshape(blocks, block_bytes)
        return view, view
    view = cuda.view(memory.pointer, memory.num_bytes).reshape(blocks, block_bytes)
    return view, DeviceBlocks(memory.pointer, blocks, block_bytes, memory)
