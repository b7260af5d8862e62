"""A worker's link to one router: it dials, introduces itself, and comes back by itself whatever happens.

Liveness is judged by our own clock alone: every heartbeat is answered by a Beat, and a router that answers
none for ``router_dead_s`` is taken for gone: its requests are dropped here, and Hello is said again until it
answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from msgspec.structs import replace

from pagerelay.common.errors import WireError
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.messages import (
    Beat,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    ToWorker,
    Welcome,
)
from pagerelay.common.wire.sockets import ClientSocket, PeerUnreachable

log = logging.getLogger(__name__)

HELLO_INTERVAL_S = 0.5
_decode: Decoder[ToWorker] = Decoder(ToWorker)


class LinkOwner(Protocol):
    def hello(self) -> Hello: ...

    def heartbeat(self) -> Heartbeat: ...

    def received(self, router_id: str, message: ToWorker) -> None: ...

    def router_lost(self, router_id: str) -> None: ...

    def refused_for_good(self, endpoint: str, reason: str) -> None: ...

    def message_dropped(self, kind: str, reason: str) -> None: ...

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class RouterLink:
    def __init__(
        self, endpoint: str, keys: CurveKeys | None, owner: LinkOwner, clock: Callable[[], float]
    ) -> None:
        self.endpoint = endpoint
        self.router_id: str | None = None
        self._owner = owner
        self._clock = clock
        self._socket = ClientSocket(endpoint, secrets.token_bytes(16), keys, "worker.routers")
        self._heartbeat_s = HELLO_INTERVAL_S
        self._dead_after_s = 5.0
        self._last_heard = clock()
        self._epoch = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [self._owner.task(self._receive()), self._owner.task(self._beat())]

    async def send(self, message: Message) -> None:
        """A router that cannot be reached loses the message: it will drop the request, or has gone with
        it."""
        try:
            await self._socket.send(encode(message))
        except PeerUnreachable:
            self._owner.message_dropped(type(message).__name__, "unreachable")

    async def _beat(self) -> None:
        while True:
            if self.router_id is None:
                await self.send(replace(self._owner.hello(), epoch=self._epoch))
            else:
                await self.send(self._owner.heartbeat())
                if self._clock() - self._last_heard > self._dead_after_s:
                    log.warning("the router at %s does not answer: dropping its requests", self.endpoint)
                    self._lose()
            await asyncio.sleep(self._heartbeat_s)

    def _lose(self) -> None:
        if self.router_id is not None:
            gone, self.router_id = self.router_id, None
            self._epoch += 1
            self._owner.router_lost(gone)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.receive()
            try:
                message = _decode(frames[0])
            except WireError as error:
                self._owner.message_dropped("unknown", "malformed")
                log.warning("dropped a message of the router at %s: %s", self.endpoint, error)
                continue
            self._last_heard = self._clock()
            if isinstance(message, Welcome):
                self._welcome(message)
            elif isinstance(message, Refused):
                if message.fatal:
                    self._owner.refused_for_good(self.endpoint, message.reason)
                else:
                    self._lose()  # it does not know us (it restarted): Hello follows with the next beat
            elif not isinstance(message, Beat) and self.router_id is not None:
                self._owner.received(self.router_id, message)

    def _welcome(self, message: Welcome) -> None:
        if self.router_id not in (None, message.router_id):
            self._lose()
        if self.router_id is None:
            log.info("joined the router at %s", self.endpoint)
        self.router_id = message.router_id
        self._heartbeat_s = message.heartbeat_s
        self._dead_after_s = max(5.0, 1.5 * message.dead_after_s)

    async def close(self) -> None:
        """Says Goodbye, so that the router need not wait for silence."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.router_id is not None:
            await self.send(Goodbye())
        self._socket.close()


def monotonic() -> float:
    return time.monotonic()
