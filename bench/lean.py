"""A lean HTTP/1.1 client for measuring the router: one persistent connection, one request at a time, no
layers.

A general client costs about as much per event as the router does and would be the limit of what it measures;
this one notes when bytes come in, in the protocol's own callback.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from pagerelay.bench.sse import SseParser, decode_event


@dataclass(slots=True)
class Reply:
    """``arrivals``: (monotonic ns, tokens) for each piece of text; tokens are counted as words."""

    sent_ns: int = 0
    end_ns: int = 0
    status: int = 0
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    finished: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


class Connection(asyncio.Protocol):
    """Keep-alive. ``request`` raises ``ConnectionError`` if the server hangs up before the answer is
    complete.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiter and not self._waiter.done():
            self._waiter.set_exception(ConnectionError("the server hung up"))

    async def request(self, host: str, path: str, body: bytes) -> Reply:
        if self._transport is None:
            raise ConnectionError("not connected")
        self._buffer = b""
        self._in_head, self._chunked, self._left, self._sse = True, False, 0, False
        self._parser = SseParser()
        self._body: list[bytes] = []
        self._waiter = asyncio.get_running_loop().create_future()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._reply = Reply(sent_ns=time.monotonic_ns())
        self._transport.write(head.encode() + body)
        return await self._waiter

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self._buffer += data
        try:
            if self._in_head and not self._read_head():
                return
            if self._chunked:
                self._read_chunks(now)
            else:
                self._take(self._buffer[: self._left], now)
                self._left -= len(self._buffer)
                self._buffer = b""
                if self._left <= 0:
                    self._finish(now)
        except (ValueError, msgspec.MsgspecError) as error:
            self._reply.error = f"unreadable answer: {error}"
            self._finish(now)
            self.close()

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._reply.status = int(status.split()[1])
        self._chunked = "chunked" in headers.get("transfer-encoding", "")
        self._left = int(headers.get("content-length", 0))
        self._sse = headers.get("content-type", "").startswith("text/event-stream")
        self._buffer, self._in_head = rest, False
        return True

    def _read_chunks(self, now: int) -> None:
        while True:
            size, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                return
            length = int(size.partition(b";")[0], 16)
            if len(rest) < length + 2:
                return
            self._buffer = rest[length + 2 :]
            if length == 0:
                self._finish(now)
                return
            self._take(rest[:length], now)

    def _take(self, piece: bytes, now: int) -> None:
        if not self._sse:
            self._body.append(piece)
            return
        for data in self._parser.feed(piece):
            if data == b"[DONE]":
                self._reply.finished = True
            else:
                self._event(data, now)

    def _event(self, data: bytes, now: int) -> None:
        event = decode_event(data)
        if event.error:
            self._reply.error = str(event.error)[:300]
        for choice in event.choices or ():
            if text := choice.piece:
                self._reply.arrivals.append((now, len(text.split())))

    def _finish(self, now: int) -> None:
        reply = self._reply
        reply.end_ns = now
        if self._body:
            self._event(b"".join(self._body), now)
            reply.finished = True
        if reply.error is None and (reply.status != 200 or not reply.finished):
            reply.error = f"HTTP {reply.status}, {'complete' if reply.finished else 'broken off'}"
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(reply)
