"""The serving end of the data link: the talk about leases, and the blocks themselves.

It hears three kinds of messages from the workers that fetch: Fetch, Renew and Release; from those that cannot
map this worker's memory Read, which is answered with the blocks; and from those that map a GPU's Attach and
Detached, so that it is not freed before they have closed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pagerelay.common.aside import run_aside
from pagerelay.common.config import WorkerConfig
from pagerelay.common.engine.leasing import LeasingEngine
from pagerelay.common.errors import WireError
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.wire import address
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.codec import MAX_DATA_REQUEST_BYTES, Decoder, encode
from pagerelay.common.wire.messages import (
    Attach,
    Blocks,
    Detach,
    Detached,
    Fetch,
    Message,
    Read,
    Release,
    Renew,
    ToPrefill,
)
from pagerelay.common.wire.sockets import PeerUnreachable, ServerSocket

log = logging.getLogger(__name__)

RECALL_S = 2.0
"""Longest wait at the end for those that have our GPU memory open."""
_decode: Decoder[ToPrefill] = Decoder(ToPrefill, MAX_DATA_REQUEST_BYTES)


class DataLink:
    """``changed`` is called after each message: blocks may have come free, and answers wait in the outbox."""

    def __init__(
        self,
        settings: WorkerConfig,
        keys: CurveKeys | None,
        engine: LeasingEngine,
        backend: TransferBackend,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        on_dropped: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._backend = backend
        self._clock = clock
        self._changed = changed
        self._on_dropped = on_dropped
        self._socket = ServerSocket(keys, MAX_DATA_REQUEST_BYTES)
        self._port = 0
        self.endpoint = ""

    def start(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Binds and serves until :meth:`stop`. Raises ConfigError or StartupError naming the setting."""
        self._port = self._socket.bind(self._settings.data_host, self._settings.data_port, "worker.data_host")
        self.refresh_endpoint()
        self._task = spawn(self._serve())

    def refresh_endpoint(self) -> None:
        """What the workers that fetch are told. Looked up again with every Hello: a router's name may not
        resolve at start."""
        host = self._settings.advertise_host
        if host is None and not address.is_loopback(self._settings.data_host):
            host = address.address_towards(self._settings.routers[0])
        self.endpoint = address.join(host or self._settings.data_host, self._port)

    async def stop(self) -> None:
        """The pool may be freed afterwards: whoever had it open has closed it, or is noted as an importer."""
        await self._recall_pool()
        if self._port:
            self._task.cancel()
        self._socket.close()

    async def _recall_pool(self) -> None:
        """Whoever has our GPU memory open is asked to close it: freeing it before is undefined."""
        if not isinstance(self._backend, CudaIpcBackend):
            return
        importers = self._backend.importers
        for peer in list(importers):
            try:
                await self._socket.send(peer, encode(Detach()))
            except PeerUnreachable:
                importers.discard(peer)  # it is gone, and what it had open with it
        deadline = self._clock() + RECALL_S
        while importers and self._clock() < deadline:
            await asyncio.sleep(0.01)

    async def _serve(self) -> None:
        while True:
            peer, frames = await self._socket.receive()
            try:
                message = _decode(frames[0] if frames else b"")
            except WireError as error:
                self._on_dropped("unknown", "malformed")
                log.warning("dropped a message on the data link: %s", error)
                continue
            engine, now = self._engine, self._clock()
            match message:
                case Read():
                    await self._send_blocks(peer, message, now)
                    continue
                case Attach() | Detached():
                    self._note_importer(peer, message)
                    continue
                case Fetch():
                    if engine.owes_sums(message.lease):
                        await run_aside(partial(engine.make_sums, message.lease))
                    engine.fetch(peer, message, now)
                case Renew():
                    engine.renew(message.tickets, now)
                case Release():
                    engine.release(peer, message.lease, message.received, message.corrupt)
            self._changed()

    def _note_importer(self, peer: bytes, message: Attach | Detached) -> None:
        if not isinstance(self._backend, CudaIpcBackend):
            self._on_dropped(type(message).__name__, "refused")
        elif isinstance(message, Attach):
            self._backend.importers.add(peer)
        else:
            self._backend.importers.discard(peer)

    async def _send_blocks(self, peer: bytes, message: Read, now: float) -> None:
        """Sends blocks from the pool, out of the host's memory without a copy: the lease keeps them, and a
        copy made of a block that was given up meanwhile never counts, because its lease is not confirmed."""
        if not self._engine.may_read(peer, message.lease, message.block_ids, now):
            self._changed()  # the answer is in the outbox
            return
        header = encode(Blocks(lease=message.lease, block_ids=message.block_ids))
        try:
            blocks = await self._backend.frames(self._engine.pool.blocks, message.block_ids)
            await self._socket.send(peer, header, *blocks, copy=False)
        except PeerUnreachable:
            self._on_dropped("Blocks", "unreachable")

    async def send(self, peer: bytes, message: Message) -> None:
        """What cannot be delivered is dropped: the peer's lease will run out."""
        try:
            await self._socket.send(peer, encode(message))
        except PeerUnreachable:
            self._on_dropped(type(message).__name__, "unreachable")
