"""Requests to a router: JSON, server-sent events, typed errors, and a bounded number of retries.

A request is sent again only where nothing of it has run: after a 429 or 503 with ``Retry-After``, and when
the connection is refused by a server that has answered before, which is being restarted. Everything else, and
an answer that breaks off above all, is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import aiohttp

from pagerelay.client.errors import ApiError, ConnectionLost, IncompleteAnswer, error_from

CONNECT_TIMEOUT_S = 10.0
LONGEST_WAIT_S = 60.0
"""A server that asks for a longer pause than this is not asked again."""
FIRST_PAUSE_S = 0.1
"""Before a server that refuses connections is tried again; twice as long each time."""
END_S = 2.0
"""How long the end of a finished stream is waited for."""
MAX_EVENT_BYTES = 16 * 1024 * 1024


class Connection:
    """A pool of connections to one server. Made and used within one event loop."""

    def __init__(self, base_url: str, api_key: str | None, *, max_retries: int, timeout_s: float) -> None:
        self._base_url = base_url
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._answered = False
        """Has there been a server at the address?"""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),  # callers bound how much they ask at once
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        await self._session.close()

    async def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The body of the answer. Raises :class:`ApiError` and :class:`ConnectionLost`."""
        async with self._answer(method, path, body) as response:
            try:
                answer = json.loads(await response.read())
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise IncompleteAnswer(
                    f"{self._base_url}{path} answered with something that is no JSON object"
                )
            return answer

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of a streamed answer up to ``[DONE]``. Raises as :meth:`json`; an event with an error is
        raised too, and so is an end without ``[DONE]``."""
        async with self._answer("POST", path, {**body, "stream": True}) as response:
            async for data in _sse(response.content):
                if data == b"[DONE]":
                    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                        async with asyncio.timeout(END_S):  # a reader that left in order, for the server
                            await response.read()
                    return
                try:
                    event = json.loads(data)
                except ValueError:
                    event = None
                if not isinstance(event, dict):
                    raise IncompleteAnswer(f"an event of {self._base_url}{path} is no JSON object")
                if "error" in event:
                    raise error_from(event)
                yield event
        raise IncompleteAnswer(f"the stream of {self._base_url}{path} ended without [DONE]")

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200, its body still to be read."""
        for retries in itertools.count():
            try:
                async with self._session.request(method, self._base_url + path, json=body) as response:
                    self._answered = True
                    if response.status == 200:
                        yield response
                        return
                    error = await _error(response)
            except TimeoutError as late:
                raise ConnectionLost(
                    f"{self._base_url} did not connect within {CONNECT_TIMEOUT_S:g} s, "
                    f"or gave no whole answer within {self._timeout_s:g} s"
                ) from late
            except aiohttp.ClientConnectorError as refused:
                restarting = self._answered and isinstance(refused.os_error, ConnectionRefusedError)
                if not restarting or retries == self._max_retries:
                    raise ConnectionLost(
                        f"no server answers at {self._base_url}: {_reason(refused)}"
                    ) from refused
                await asyncio.sleep(FIRST_PAUSE_S * 2**retries)
                continue
            except aiohttp.InvalidURL as wrong:
                raise ConnectionLost(f"{self._base_url} is no http address") from wrong
            except aiohttp.ClientPayloadError as broken:
                raise IncompleteAnswer(
                    f"the answer of {self._base_url}{path} ended in the middle"
                ) from broken
            except (aiohttp.ClientError, OSError) as lost:
                raise ConnectionLost(f"the connection to {self._base_url} broke: {_reason(lost)}") from lost
            pause = error.retry_after_s
            if error.status not in (429, 503) or pause is None or pause > LONGEST_WAIT_S:
                raise error
            if retries == self._max_retries:
                raise error
            await asyncio.sleep(pause)


def _reason(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


async def _error(response: aiohttp.ClientResponse) -> ApiError:
    after = response.headers.get("Retry-After", "")  # as a date it is not understood: no retry then
    text = await response.text(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    return error_from(body, response.status, int(after) if after.isdecimal() else None)


async def _sse(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The ``data`` of each finished event; comments and other fields are left out."""
    rest, data = b"", list[bytes]()
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise IncompleteAnswer(f"a line of the stream is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
