"""Pairs of transfer backends with a link between them: every way of blocks from one pool to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from engines import handle_for, make_pool
from ferry import serve_blocks, stop
from msgspec import structs

from pagerelay.common.errors import TransferError
from pagerelay.common.transport.base import Bytes, Peer, TransferBackend
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.messages import Fetch, PoolAddress
from pagerelay.common.wire.sockets import ServerSocket
from pagerelay.decode_svc.peers import PeerLink

WAYS = ("shm", "tcp-by-hand", "tcp-by-socket")
LEASE = 1


class HandLink:
    """The owner's side of ``Read`` without a socket. ``pool`` may lie, as a peer might."""

    def __init__(self, pool: PoolAddress, blocks: Bytes) -> None:
        self.pool = pool
        self.blocks = blocks
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
            if not set(block_ids) <= set(range(len(self.blocks))):
                raise TransferError("no such lease")
            return [memoryview(self.blocks[block].tobytes()) for block in block_ids]
        finally:
            self.in_flight -= len(block_ids)


@dataclass
class Pair:
    """``source`` and ``target``: uint8 [blocks, block_bytes], the source full of random bytes."""

    owner: TransferBackend
    reader: TransferBackend
    source: Bytes
    target: Bytes
    peer: Peer

    async def fetch(self, sources: list[int], targets: list[int]) -> int:
        return await self.reader.fetch(self.peer, LEASE, sources, self.target, targets)


def make_backend(way: str, window: int = 4) -> TransferBackend:
    return ShmBackend() if way == "shm" else TcpBackend(window)


MakePair = Callable[..., Any]


@pytest.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    """``await make_pair(way, blocks=8, block_bytes=64, window=4)`` → :class:`Pair`, closed afterwards."""
    async with AsyncExitStack() as stack:

        async def make(
            way: str,
            blocks: int = 8,
            block_bytes: int = 64,
            window: int = 4,
            reader_block_bytes: int | None = None,
        ) -> Pair:
            owner, reader = make_backend(way), make_backend(way, window)
            stack.callback(owner.close)
            stack.callback(reader.close)
            source = owner.allocate(blocks, block_bytes).reshape(blocks, block_bytes)
            source[:] = np.random.default_rng(1).integers(0, 256, source.shape, dtype=np.uint8)
            theirs = reader_block_bytes or block_bytes
            target = reader.allocate(blocks, theirs).reshape(blocks, theirs)
            peer: Peer = HandLink(owner.address(), source)
            if way == "tcp-by-socket":
                server = ServerSocket(None)
                stack.callback(server.close)
                port = server.bind("127.0.0.1", 0, "worker.data_host")
                stack.push_async_callback(stop, asyncio.create_task(serve_blocks(server, source)))
                pool = make_pool(2)
                handle = structs.replace(
                    handle_for(LEASE, 1, pool), data_endpoint=f"tcp://127.0.0.1:{port}", pool=owner.address()
                )
                link = PeerLink(handle, None, asyncio.create_task, lambda: None)
                stack.push_async_callback(link.close)
                fetch = Fetch(lease=LEASE, incarnation=handle.incarnation, from_block=0, layout=pool.layout)
                await link.open(fetch)
                peer = link
            return Pair(owner, reader, source, target, peer)

        yield make


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def pair(way: str, make_pair: MakePair) -> Pair:
    made: Pair = await make_pair(way)
    return made
