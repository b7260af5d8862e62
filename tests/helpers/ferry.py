"""Blocks from a prefill worker's pool to a decode worker's, through the real transports, for tests that are
not coroutines themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from engines import handle_for, make_pool
from msgspec import structs
from transports import serve_blocks, stop

from pagerelay.common.model.runner import ModelFacts
from pagerelay.common.transport.base import Peer, TransferBackend
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.messages import Fetch
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.common.wire.sockets import ServerSocket
from pagerelay.decode_svc.peers import PeerLink


@dataclass(frozen=True)
class Neighbour:
    """A peer on this host: its memory is read, it is never asked."""

    pool: PoolAddress

    async def read(self, lease: int, block_ids: Sequence[int]) -> list[memoryview]:
        raise AssertionError("shared memory needs no messages")


class Ferry:
    """Two pools full of NaN, ``source`` and ``target``, and one transport between them, ``shm`` or ``tcp``.

    It has an event loop of its own, which runs while :meth:`copy` does.
    """

    def __init__(self, kind: str, facts: ModelFacts, block_size: int, num_blocks: int) -> None:
        make: type[ShmBackend] | Any = ShmBackend if kind == "shm" else lambda: TcpBackend(window=16)
        self._backends: tuple[TransferBackend, TransferBackend] = (make(), make())
        owner, self._reader = self._backends
        self.source = make_pool(num_blocks, block_size, facts, owner)
        self.target = make_pool(num_blocks, block_size, facts, self._reader)
        self._loop = asyncio.Runner()
        self._open = AsyncExitStack()
        self._peer: Peer = Neighbour(owner.address())
        self._link: PeerLink | None = None
        if kind == "tcp":
            self._peer = self._link = self._loop.run(self._dial(owner.address()))

    async def _dial(self, pool: PoolAddress) -> PeerLink:
        server = ServerSocket(None)
        self._open.callback(server.close)
        port = server.bind("127.0.0.1", 0, "worker.data_host")
        serving = asyncio.create_task(
            serve_blocks(server, self._backends[0], self.source.blocks, self.source.num_blocks)
        )
        self._open.push_async_callback(stop, serving)
        handle = structs.replace(
            handle_for(1, 1, self.source), data_endpoint=f"tcp://127.0.0.1:{port}", pool=pool
        )
        link = PeerLink(handle, None, asyncio.create_task, lambda: None)
        self._open.push_async_callback(link.close)
        return link

    def copy(self, lease: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._loop.run(self._copy(lease, sources, targets))

    async def _copy(self, lease: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self._link is not None:
            fetch = Fetch(lease=lease, incarnation="", from_block=0, layout=self.source.layout)
            await self._link.open(fetch)
        try:
            moved = await self._reader.fetch(self._peer, lease, sources, self.target.blocks, targets)
        finally:
            if self._link is not None:
                self._link.close_lease(lease)
        assert moved == len(sources) * self.source.layout.block_bytes

    def close(self) -> None:
        self._loop.run(self._open.aclose())
        self._loop.close()
        for backend in self._backends:
            backend.close()
