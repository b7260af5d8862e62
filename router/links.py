"""The router's socket towards the workers, and who gets their news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pagerelay.common.errors import WireError
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.codec import MAX_NEWS_BYTES, Decoder, encode
from pagerelay.common.wire.messages import (
    Abort,
    Beams,
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
    Probe,
    PromptScores,
    Refused,
    Suspend,
    Suspended,
    Tokens,
    ToRouter,
)
from pagerelay.common.wire.roles import MAY_SEND
from pagerelay.common.wire.sockets import PeerUnreachable, ServerSocket
from pagerelay.router.registry import Bound, WorkerEntry, WorkerRegistry

log = logging.getLogger(__name__)
_decode: Decoder[ToRouter] = Decoder(ToRouter, MAX_NEWS_BYTES)

RequestNews = PrefillStarted | FirstToken | PromptScores | HandedOver | Beams | Preempted | Suspended | Failed
ToOneWorker = PrefillJob | DecodeJob | Suspend | Probe | Abort


class Flow(Bound, Protocol):
    def news(self, message: RequestNews, worker_id: str) -> None: ...

    def tokens(self, message: Tokens, position: int) -> None: ...


class WorkerLinks:
    """Receives from every worker and sends to one. ``flows`` is filled by the requests themselves."""

    def __init__(
        self,
        registry: WorkerRegistry,
        keys: CurveKeys | None,
        on_dropped: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self.registry = registry
        self.flows: dict[str, Flow] = {}
        self._socket = ServerSocket(keys, MAX_NEWS_BYTES)
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
                self._on_dropped("unknown", "malformed")
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
        elif type(message) not in MAY_SEND[entry.hello.role]:
            self._on_dropped(type(message).__name__, "refused")
            log.warning("%s may not send %s", entry.worker_id, type(message).__name__)
        elif isinstance(message, Tokens):
            for position, delta in enumerate(message.deltas):
                flow = self._flow(entry, delta.request_id)
                if flow is not None:
                    flow.tokens(message, position)
                else:
                    await self._unwanted(entry, "TokenDelta", delta.request_id, delta.attempt)
        elif isinstance(message, Heartbeat):
            self.registry.heard(entry, message)
            await self._send(identity, Beat())
        elif isinstance(message, Goodbye):
            self.registry.remove(entry, "it said goodbye", goodbye=True)
        else:
            subject = message.delta if isinstance(message, FirstToken) else message
            flow = self._flow(entry, subject.request_id)
            if flow is not None:
                flow.news(message, entry.worker_id)
            else:
                await self._unwanted(entry, type(message).__name__, subject.request_id, subject.attempt)

    def _flow(self, entry: WorkerEntry, request_id: str) -> Flow | None:
        """The request, if this worker has something to say about it."""
        return self.flows.get(request_id) if request_id in entry.bound else None

    async def _unwanted(self, entry: WorkerEntry, kind: str, request_id: str, attempt: int) -> None:
        """News of a request that this worker has no part in any more. If it goes on with it, our Abort was
        lost or overtaken: it hears it again."""
        self._on_dropped(kind, "late")
        if kind in ("PrefillStarted", "HandedOver", "TokenDelta", "Beams", "Suspended"):
            await self._send(entry.identity, Abort(request_id=request_id, attempt=attempt))

    async def send(self, entry: WorkerEntry, message: ToOneWorker) -> bool:
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
