"""What clients in this process read of a router's streams, whoever the clients are (ours, the bench's, other
people's): recorded as it comes in aiohttp, httpx and httpx2, checked when the test is over.

A stream of a router is known by its type and its ``X-Request-Id``; those of the tests' own fake servers have
none. A test that reads with :func:`strict_sse.events` has checked already.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from strict_sse import OF_PATH, StrictStream, reading


@dataclass
class Heard:
    path: str
    request: dict[str, Any] | None
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """By itself: the client did not leave, nor did the connection break."""

    def check(self) -> None:
        checked = StrictStream(self.path, self.request)
        checked.feed(bytes(self.data))
        if self.ended:
            checked.close()


heard: dict[int, Heard] = {}
"""By the aiohttp reader or httpx response that brings it."""
_keep: list[Any] = []
"""These, so that none takes another's place."""


def listen(to: Any, path: str, headers: Any, request: dict[str, Any] | None) -> Heard | None:
    is_stream = headers.get("Content-Type", "").startswith("text/event-stream")
    if path not in OF_PATH or not is_stream or "X-Request-Id" not in headers:
        return None
    _keep.append(to)
    return heard.setdefault(id(to), Heard(path, request))


def check_all() -> int:
    """How many were heard. Raises what one of them did wrong."""
    ours = [one for reader, one in heard.items() if reader not in reading]
    for kept in (heard, _keep, reading):
        kept.clear()
    for one in ours:
        one.check()
    return len(ours)


def install(patch: pytest.MonkeyPatch) -> None:
    _tap_aiohttp(patch)
    for name in ("httpx", "httpx2"):
        if importlib.util.find_spec(name) is not None:
            _tap_httpx(importlib.import_module(name), patch)


def _tap_aiohttp(patch: pytest.MonkeyPatch) -> None:
    ask, feed, end = (
        aiohttp.ClientSession._request,
        aiohttp.StreamReader.feed_data,
        aiohttp.StreamReader.feed_eof,
    )

    @functools.wraps(ask)
    async def asking(self: Any, method: str, url: Any, **options: Any) -> aiohttp.ClientResponse:
        response = await ask(self, method, url, **options)
        one = listen(response.content, response.url.path, response.headers, options.get("json"))
        if one is not None:  # nobody has read yet; what came with the head lies there
            one.data += b"".join(response.content._buffer)
            one.ended = response.content.is_eof()
            if isinstance(sent := options.get("data"), bytes):
                one.request = json.loads(sent)
        return response

    @functools.wraps(feed)
    def feeding(self: aiohttp.StreamReader, data: bytes, *more: Any) -> Any:
        if (one := heard.get(id(self))) is not None:
            one.data += data
        return feed(self, data, *more)

    @functools.wraps(end)
    def ending(self: aiohttp.StreamReader) -> None:
        if (one := heard.get(id(self))) is not None:
            one.ended = True
        end(self)

    patch.setattr(aiohttp.ClientSession, "_request", asking)
    patch.setattr(aiohttp.StreamReader, "feed_data", feeding)
    patch.setattr(aiohttp.StreamReader, "feed_eof", ending)


def _tap_httpx(library: Any, patch: pytest.MonkeyPatch) -> None:
    read, aread = library.Response.iter_raw, library.Response.aiter_raw

    def listening(response: Any) -> Heard:
        request = response.request
        sent = request.content if isinstance(request.stream, library.ByteStream) else b""
        one = listen(response, request.url.path, response.headers, json.loads(sent) if sent else None)
        return one or Heard("", None)  # to nobody

    @functools.wraps(read)
    def iterating(self: Any, *more: Any) -> Iterator[bytes]:
        one = listening(self)
        for piece in read(self, *more):
            one.data += piece
            yield piece
        one.ended = True

    @functools.wraps(aread)
    async def aiterating(self: Any, *more: Any) -> AsyncIterator[bytes]:
        one = listening(self)
        async for piece in aread(self, *more):
            one.data += piece
            yield piece
        one.ended = True

    patch.setattr(library.Response, "iter_raw", iterating)
    patch.setattr(library.Response, "aiter_raw", aiterating)
