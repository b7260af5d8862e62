"""The router's socket towards the workers, and who gets their news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pagerelay.common.errors import WireError
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.messages import (
    Abort,
    Ask,
    Beat,
    DecodeJob,
    Failed,
    FirstToken,
    Goodbye,
    HandedOver,
    Heartbeat,
    Hello,
    Message,
    Preempted,
    PrefillJob,
    PrefillStarted,
    Refused,
    Tokens,
    ToRouter,
)
from pagerelay.common.wire.sockets import PeerUnreachable, ServerSocket
from pagerelay.router.registry import Bound, WorkerEntry, WorkerRegistry

log = logging.getLogger(__name__)
_decode: Decoder[ToRouter] = Decoder(ToRouter)

RequestNews = PrefillStarted | FirstToken | HandedOver | Preempted | Failed


class Flow(Bound, Protocol):
    def news(self, message: RequestNews, worker_id: str) -> None: ...

    def tokens(self, message: Tokens, position: int) -> None: ...


class WorkerLinks:
    """Receives from every worker and sends to one. ``flows`` is filled by the requests themselves."""

    def __init__(
        self,
        registry: WorkerRegistry,
        keys: CurveKeys | None,
        on_dropped: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.registry = registry
        self.flows: dict[str, Flow] = {}
        self._socket = ServerSocket(keys)
        self._on_dropped = on_dropped
        self._clock = clock

    def bind(self, host: str, port: int) -> int:
        return self._socket.bind(host, port, "router.workers_endpoint")

    async def receive_forever(self) -> None:
        while True:
            identity, frames = await self._socket.receive()
            try:
                message = _decode(frames[0] if frames else b"")
            except WireError as error:
                self._on_dropped()
                log.warning("dropped a worker's message: %s", error)
                continue
            await self._handle(identity, message)

    async def expire_forever(self, interval_s: float) -> None:
        while True:
            before = self._clock()
            await asyncio.sleep(interval_s)
            if self._clock() - before > 3 * interval_s:
                self.registry.pardon()
            else:
                self.registry.expire()

    async def _handle(self, identity: bytes, message: ToRouter) -> None:
        if isinstance(message, Hello):
            await self._send(identity, self.registry.welcome(message, identity))
            return
        entry = self.registry.find(identity)
        if entry is None:
            # Somebody who said Hello to our predecessor, or whom we have taken for dead.
            await self._send(identity, Refused(reason="unknown worker, say Hello", fatal=False))
        elif isinstance(message, Tokens):
            for position, delta in enumerate(message.deltas):
                flow = self.flows.get(delta.request_id)
                if flow is not None:
                    flow.tokens(message, position)
                else:
                    self._on_dropped()
        elif isinstance(message, Heartbeat):
            self.registry.heard(entry, message)
            await self._send(identity, Beat())
        elif isinstance(message, Goodbye):
            self.registry.remove(entry, "it said goodbye")
        else:
            request_id = message.delta.request_id if isinstance(message, FirstToken) else message.request_id
            flow = self.flows.get(request_id)
            if flow is not None:
                flow.news(message, entry.worker_id)
            else:
                self._on_dropped()

    async def send(self, entry: WorkerEntry, message: PrefillJob | DecodeJob | Ask | Abort) -> bool:
        """False if the worker cannot be reached: it is taken for gone, and what it held recovers."""
        if await self._send(entry.identity, message):
            return True
        self.registry.remove(entry, "it cannot be reached")
        return False

    async def _send(self, identity: bytes, message: Message) -> bool:
        try:
            await self._socket.send(identity, encode(message))
        except PeerUnreachable:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
