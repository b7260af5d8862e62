"""The serving end of the data link: the talk about leases, and the blocks themselves.

It serves two kinds of messages to the workers that fetch: Fetch, Renew and Release, and for those that
cannot map this worker's memory Read, which is answered straight from the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from pagerelay.common.config import WorkerConfig
from pagerelay.common.engine.leasing import LeasingEngine
from pagerelay.common.errors import WireError
from pagerelay.common.wire import address
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.codec import MAX_DATA_REQUEST_BYTES, Decoder, encode
from pagerelay.common.wire.messages import (
    Blocks,
    Fetch,
    LeaseLost,
    Message,
    Read,
    Release,
    Renew,
    ToPrefill,
)
from pagerelay.common.wire.sockets import PeerUnreachable, ServerSocket

log = logging.getLogger(__name__)
_decode: Decoder[ToPrefill] = Decoder(ToPrefill, MAX_DATA_REQUEST_BYTES)


class DataLink:
    """``changed`` is called after each message: blocks may have come free, and answers wait in the outbox."""

    def __init__(
        self,
        settings: WorkerConfig,
        keys: CurveKeys | None,
        engine: LeasingEngine,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        on_dropped: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._engine = engine
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

    def refresh_endpoint(self) -> str:
        """What the workers that fetch are told. Looked up again with every Hello: a router's name may not
        resolve at start."""
        host = self._settings.advertise_host
        if host is None and not address.is_loopback(self._settings.data_host):
            host = address.address_towards(self._settings.routers[0])
        self.endpoint = address.join(host or self._settings.data_host, self._port)
        return self.endpoint

    def stop(self) -> None:
        if self._port:
            self._task.cancel()
        self._socket.close()

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
                case Fetch():
                    engine.fetch(peer, message, now)
                case Renew():
                    engine.renew(message.tickets, now)
                case Release():
                    engine.release(peer, message.lease, message.received, message.corrupt)
            self._changed()

    async def _send_blocks(self, peer: bytes, message: Read, now: float) -> None:
        """Sends blocks from the pool without a copy: the lease keeps them, and a copy made of a block that
        was given up meanwhile never counts, because its lease is not confirmed."""
        if not self._engine.may_read(peer, message.lease, message.block_ids, now):
            reason = "there is no such lease any more"
            await self.send(peer, LeaseLost(lease=message.lease, reason=reason, ended=True))
            return
        header = encode(Blocks(lease=message.lease, block_ids=message.block_ids))
        blocks = [memoryview(self._engine.pool.blocks[block]) for block in message.block_ids]
        try:
            await self._socket.send(peer, header, *blocks, copy=False)
        except PeerUnreachable:
            self._on_dropped("Blocks", "unreachable")

    async def send(self, peer: bytes, message: Message) -> None:
        """What cannot be delivered is dropped: the peer's lease will run out."""
        try:
            await self._socket.send(peer, encode(message))
        except PeerUnreachable:
            self._on_dropped(type(message).__name__, "unreachable")
