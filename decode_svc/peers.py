"""A decode worker's links to the workers that it fetches from, prefill workers and decode workers that hand
over: one per peer process, opened on first use."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pagerelay.common.errors import TransferError, WireError
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.codec import MAX_CONTROL_BYTES, Decoder, encode
from pagerelay.common.wire.messages import (
    AboutLease,
    Blocks,
    Commit,
    Detach,
    Fetch,
    KvHandle,
    LeaseLost,
    Read,
    Renew,
    ToDecode,
    ToPrefill,
)
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.common.wire.sockets import MAX_BLOCK_BYTES, ClientSocket, PeerUnreachable

log = logging.getLogger(__name__)

READ_PATIENCE_S = 2.0
"""Longest silence of a peer after a ``Read`` before it hears of us again."""
NUM_READS = 4
"""How often blocks are asked for; each time the answer gets twice as long, 30 s in all."""
RENEW_AT_ONCE = 4096
"""Leases renewed by one message: it stays below ``MAX_DATA_REQUEST_BYTES``."""

_decode: Decoder[ToDecode] = Decoder(ToDecode)


def _parts(tickets: dict[int, str]) -> Iterator[dict[int, str]]:
    items = iter(tickets.items())
    while part := dict(islice(items, RENEW_AT_ONCE)):
        yield part


class LeaseEnded(TransferError):
    """Nothing went wrong: the request has no more need of a decode worker."""


def loss(message: LeaseLost) -> TransferError:
    """What it means to a fetch that its lease is gone."""
    return (
        LeaseEnded(message.reason) if message.ended else TransferError(f"the lease is gone: {message.reason}")
    )


Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class Inbox:
    """News about one lease. ``reads``: answers due for blocks asked for over the wire, by the ids asked for:
    an answer that was lost or came twice must not be taken for another one's."""

    ticket: str
    news: asyncio.Queue[AboutLease] = field(default_factory=asyncio.Queue)
    committed_at: float = 0.0
    """When the commit came, by the link's clock."""
    reads: dict[tuple[int, ...], asyncio.Future[list[memoryview]]] = field(default_factory=dict)


class PeerLink:
    """The data link to one incarnation of one worker that gives leases."""

    def __init__(
        self,
        handle: KvHandle,
        keys: CurveKeys | None,
        spawn: Spawn,
        on_dropped: Callable[[str, str], None],
        on_detach: Callable[[PeerLink], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        read_patience_s: float = READ_PATIENCE_S,
    ) -> None:
        self.worker_id = handle.worker_id
        # An answer that is waited for must not cost the lease it is about.
        self._patience_s = min(read_patience_s, handle.lease_s / 4)
        self._on_dropped = on_dropped
        self._on_detach = on_detach
        self._clock = clock
        self.pool: PoolAddress = handle.pool
        self.last_used = 0.0
        self._socket = ClientSocket(
            handle.data_endpoint,
            secrets.token_bytes(16),
            keys,
            "the peer's data endpoint",
            max_frame_bytes=min(max(handle.layout.block_bytes, MAX_CONTROL_BYTES), MAX_BLOCK_BYTES),
        )
        self._inboxes: dict[int, Inbox] = {}
        self._task = spawn(self._receive())

    @property
    def idle(self) -> bool:
        return not self._inboxes

    async def send(self, message: ToPrefill) -> None:
        try:
            await self._socket.send(encode(message))
        except PeerUnreachable as error:
            raise TransferError("the worker that has the KV cannot be reached") from error

    async def open(self, fetch: Fetch) -> asyncio.Queue[AboutLease]:
        """Begins to fetch a lease; its news come through the queue until :meth:`close_lease`."""
        inbox = self._inboxes[fetch.lease] = Inbox(fetch.ticket)
        try:
            await self.send(fetch)
        except BaseException:
            self.close_lease(fetch.lease)
            raise
        return inbox.news

    def committed_at(self, lease: int) -> float:
        """When the lease's commit came: it may have waited behind earlier announcements' copies."""
        return self._inboxes[lease].committed_at

    def close_lease(self, lease: int) -> None:
        inbox = self._inboxes.pop(lease, None)
        for read in inbox.reads.values() if inbox is not None else ():
            read.cancel()

    async def read(self, lease: int, block_ids: Sequence[int]) -> list[memoryview]:
        """One frame per block. While none comes the lease is renewed, and the question is asked again, ever
        less often: it, or its answer, may have been lost with a connection, or the network is slow. Raises
        TransferError when the lease is lost or the peer stays silent."""
        inbox = self._inboxes.get(lease)
        if inbox is None:
            raise TransferError("the lease is closed")
        answer: asyncio.Future[list[memoryview]] = asyncio.get_running_loop().create_future()
        inbox.reads[tuple(block_ids)] = answer
        try:
            for attempt in range(NUM_READS):
                await self.send(Read(lease=lease, block_ids=list(block_ids)))
                for _ in range(2**attempt):
                    # Not a timeout around it: that would cancel the answer.
                    await asyncio.wait((answer,), timeout=self._patience_s)
                    if answer.done():
                        return answer.result()
                    await self.renew({lease: inbox.ticket})
            raise TransferError(f"{self.worker_id} did not answer {NUM_READS} times when asked for blocks")
        finally:
            answer.cancel()

    async def renew(self, tickets: dict[int, str]) -> None:
        """Signs of life for leases that wait: lease → ticket."""
        for part in _parts(tickets):
            await self.send(Renew(tickets=part))

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.receive()
            try:
                message = _decode(frames[0] if frames else b"")
            except WireError as error:
                self._on_dropped("unknown", "malformed")
                log.warning("dropped a message of %s: %s", self.worker_id, error)
                continue
            if isinstance(message, Detach):
                self._on_detach(self)
                continue
            inbox = self._inboxes.get(message.lease)
            if inbox is None:
                self._on_dropped(type(message).__name__, "late")  # the lease is no longer ours
                continue
            if isinstance(message, Blocks):
                due = inbox.reads.pop(tuple(message.block_ids), None)
                if due is None:
                    self._on_dropped("Blocks", "repeated")
                elif not due.done():
                    due.set_result(frames[1:])
                continue
            if isinstance(message, LeaseLost):
                for read in inbox.reads.values():
                    if not read.done():
                        read.set_exception(loss(message))
                inbox.reads.clear()
            if isinstance(message, Commit) and not inbox.committed_at:
                inbox.committed_at = self._clock()
            inbox.news.put_nowait(message)

    async def close(self, linger_ms: int = 0) -> None:
        """``linger_ms``: how long what was sent last may take to leave."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for lease in list(self._inboxes):
            self.close_lease(lease)
        self._socket.close(linger_ms=linger_ms)


class Peers:
    """Opens a link to a peer when a handle first names it, and closes it when it has been idle for
    ``idle_s``."""

    def __init__(
        self,
        keys: CurveKeys | None,
        clock: Callable[[], float],
        spawn: Spawn,
        on_dropped: Callable[[str, str], None],
        idle_s: float = 60.0,
        *,
        on_detach: Callable[[PeerLink], None] = lambda _: None,
        keep: Callable[[PoolAddress], bool] = lambda _: False,
    ) -> None:
        """``spawn`` starts a task whose failure does not go unnoticed. ``on_detach``: the peer takes its pool
        back. ``keep``: the link to the owner of this pool stays, however idle it is."""
        self._on_detach = on_detach
        self._keep = keep
        self._spawn = spawn
        self._on_dropped = on_dropped
        self._keys = keys
        self._clock = clock
        self._idle_s = idle_s
        self._links: dict[str, PeerLink] = {}

    def link(self, handle: KvHandle) -> PeerLink:
        link = self._links.get(handle.incarnation)
        if link is None:
            link = self._links[handle.incarnation] = PeerLink(
                handle, self._keys, self._spawn, self._on_dropped, self._on_detach, self._clock
            )
        link.last_used = self._clock()
        return link

    async def close_idle(self) -> list[PeerLink]:
        """Closes and returns the links that nobody has used lately: mostly those of workers that are gone."""
        now = self._clock()
        old = [
            key
            for key, link in self._links.items()
            if link.idle and now - link.last_used > self._idle_s and not self._keep(link.pool)
        ]
        closed = [self._links.pop(key) for key in old]
        for link in closed:
            await link.close()
        return closed

    def links(self) -> list[PeerLink]:
        return list(self._links.values())

    async def close(self, linger_ms: int = 0) -> None:
        for link in self._links.values():
            await link.close(linger_ms)
        self._links.clear()
