"""Pairs of transfer backends, closed after each test; on GPUs nothing may be left open then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from engines import handle_for, make_pool
from fake_cuda import FakeCuda, Machine
from msgspec import structs
from transports import LEASE, WAYS, HandLink, Pair, gpus, make_backend, seen, serve_blocks, stop

from pagerelay.common.transport.base import Peer, TransferBackend
from pagerelay.common.wire.messages import Fetch
from pagerelay.common.wire.sockets import ServerSocket
from pagerelay.decode_svc.peers import PeerLink

MakePair = Callable[..., Any]


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Checked for leaks and misuse when everything of the test is closed."""
    made = Machine()
    yield made
    made.check()


def close_unless_killed(owner: TransferBackend, cuda: FakeCuda | None) -> None:
    if cuda is None or cuda.alive:
        owner.close()


@pytest.fixture
async def make_pair(machine: Machine) -> AsyncIterator[MakePair]:
    """``await make_pair(way, blocks=8, block_bytes=64, window=4)`` → :class:`Pair`, closed afterwards."""
    async with AsyncExitStack() as stack:

        async def make(
            way: str,
            blocks: int = 8,
            block_bytes: int = 64,
            window: int = 4,
            reader_block_bytes: int | None = None,
        ) -> Pair:
            owner_cuda, reader_cuda = (None if gpu is None else machine.process(gpu) for gpu in gpus(way))
            owner, reader = make_backend(way, 4, owner_cuda), make_backend(way, window, reader_cuda)
            stack.callback(close_unless_killed, owner, owner_cuda)
            stack.callback(reader.close)
            memory = owner.allocate(blocks, block_bytes)
            source, from_ = seen(memory, blocks, block_bytes, owner_cuda)
            source[:] = np.random.default_rng(1).integers(0, 256, source.shape, dtype=np.uint8)
            theirs = reader_block_bytes or block_bytes
            target, into = seen(reader.allocate(blocks, theirs), blocks, theirs, reader_cuda)
            peer: Peer = HandLink(owner.address(), owner, from_)
            if way.endswith("by-socket"):
                server = ServerSocket(None)
                stack.callback(server.close)
                port = server.bind("127.0.0.1", 0, "worker.data_host")
                stack.push_async_callback(
                    stop, asyncio.create_task(serve_blocks(server, owner, from_, blocks))
                )
                pool = make_pool(2)
                handle = structs.replace(
                    handle_for(LEASE, 1, pool), data_endpoint=f"tcp://127.0.0.1:{port}", pool=owner.address()
                )
                link = PeerLink(handle, None, asyncio.create_task, lambda: None)
                stack.push_async_callback(link.close)
                fetch = Fetch(lease=LEASE, incarnation=handle.incarnation, from_block=0, layout=pool.layout)
                await link.open(fetch)
                peer = link
            return Pair(owner, reader, source, target, into, peer, owner_cuda, reader_cuda, memory)

        yield make


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def pair(way: str, make_pair: MakePair) -> Pair:
    made: Pair = await make_pair(way)
    return made
