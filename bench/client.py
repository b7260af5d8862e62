"""One streamed request to an OpenAI-compatible server, and what is remembered of it."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pagerelay.bench.sse import SseParser, decode_event

Api = Literal["chat", "completions"]
Outcome = Literal["ok", "failed", "cut"]

SAMPLE_CHARACTERS = 400
DRAIN_S = 2.0
"""How long the end of a finished stream is waited for, so that the server sees a reader that left in order.
"""


@dataclass(slots=True)
class Record:
    """One request. Times are readings of the event loop's clock, in seconds.

    ``cut``: stopped by the run's time limit; what had come by then still counts. ``stamps`` holds the arrival
    of each chunk with text. ``tokens`` is the server's own count, or the number of chunks where it gave none.
    """

    start: float
    end: float = 0.0
    outcome: Outcome = "failed"
    error: str | None = None
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int | None = None
    text: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.stamps[0] - self.start if self.stamps else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.stamps)]

    @property
    def tpot_s(self) -> float | None:
        return (
            (self.stamps[-1] - self.stamps[0]) / (self.tokens - 1)
            if self.stamps and self.tokens > 1
            else None
        )

    @property
    def e2e_s(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. ``extra_body`` is merged into each request; a ``None`` in it drops the field."""

    base_url: str
    model: str
    api: Api = "chat"
    extra_body: dict[str, Any] = field(default_factory=dict)

    def request(self, system: str, user: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """URL and body of a greedy streamed request of a fixed number of output tokens."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if self.api == "chat":
            path = "/chat/completions"
            body["messages"] = [{"role": "system", "content": system}] if system else []
            body["messages"].append({"role": "user", "content": user})
        else:
            path = "/completions"
            body["prompt"] = f"{system} {user}" if system else user
        body |= self.extra_body
        return self.base_url + path, {key: value for key, value in body.items() if value is not None}


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this host. Names other than ``localhost`` are not looked up: they count as
    remote.
    """
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Client:
    """Sends requests to one target over one HTTP session; any number at a time."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self.target = target
        self._session = session
        self._timeout_s = timeout_s

    async def send(self, system: str, user: str, max_tokens: int, deadline: float | None = None) -> Record:
        """Never raises for what a server does. ``deadline``, on the loop's clock, cuts the request."""
        clock = asyncio.get_running_loop().time
        record = Record(start=clock())
        limit = record.start + self._timeout_s
        try:
            async with asyncio.timeout_at(limit if deadline is None else min(deadline, limit)):
                await self._stream(record, system, user, max_tokens)
        except TimeoutError:
            if record.outcome == "ok":
                pass  # all had been read; only the end of the connection was still awaited
            elif deadline is not None and deadline <= limit:
                record.outcome, record.tokens = "cut", len(record.stamps)
            else:
                record.error = f"no end after {self._timeout_s:g} s"
        except (aiohttp.ClientError, msgspec.MsgspecError, ValueError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"[:300]
        if not record.end:
            record.end = clock()
        return record

    async def _stream(self, record: Record, system: str, user: str, max_tokens: int) -> None:
        url, body = self.target.request(system, user, max_tokens)
        async with self._session.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text(errors='replace'))[:300]}"
                return
            closed = await self._read(record, response)
            record.end = asyncio.get_running_loop().time()
            record.tokens = record.tokens or len(record.stamps)
            if record.error is None and not record.stamps:
                record.error = "no content in the stream"
            elif record.error is None and not closed:
                record.error = "the stream broke off: no [DONE], no finish_reason"
            if record.error is None:
                record.outcome = "ok"
                await _drain(response)

    async def _read(self, record: Record, response: aiohttp.ClientResponse) -> bool:
        """Fills the record; true if the stream was closed in order."""
        clock = asyncio.get_running_loop().time
        parser = SseParser()
        finished = False
        async for piece in response.content.iter_any():
            now = clock()
            for data in parser.feed(piece):
                if data == b"[DONE]":
                    return True
                event = decode_event(data)
                if event.error:
                    record.error = str(event.error)[:300]
                    return False
                if event.usage:
                    record.tokens = event.usage.completion_tokens or 0
                    record.prompt_tokens = event.usage.prompt_tokens
                for choice in event.choices or ():
                    finished = finished or choice.finish_reason is not None
                    if text := choice.piece:
                        record.stamps.append(now)
                        if len(record.text) < SAMPLE_CHARACTERS:
                            record.text = (record.text + text)[:SAMPLE_CHARACTERS]
        return finished


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Reads up to the end of the body. What a server does after ``[DONE]`` cannot fail a request."""
    try:
        async with asyncio.timeout(DRAIN_S):
            async for _ in response.content.iter_any():
                pass
    except (TimeoutError, aiohttp.ClientError):
        pass


@asynccontextmanager
async def open_session(limit: int = 0, api_key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with one connection a request: no request can meet a connection that the server has just
    closed.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=limit, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
    ) as session:
        yield session


async def served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """Name of the first model of ``/models``. Raises ``ValueError`` in one clear line."""
    try:
        async with asyncio.timeout(10), session.get(base_url + "/models", allow_redirects=False) as response:
            answer = await response.json(content_type=None)
        return str(answer["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{base_url}/models names no model ({type(error).__name__}): is the server up? else give --model"
        ) from error
