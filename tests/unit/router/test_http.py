"""Requests that take their time: each limit has its code, and is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from flows import Clock, registry
from strict_sse import check_answer

from pagerelay.router import app as routes
from pagerelay.router import http
from pagerelay.router.app import SERVICE, answering, errors_as_json
from pagerelay.router.http import Runner
from pagerelay.router.metrics import RouterMetrics

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


class Server:
    def __init__(self) -> None:
        self.metrics = RouterMetrics(registry(Clock()))
        self.port = 0

    async def ask(self, *pieces: bytes, pause_s: float = 0.0) -> bytes:
        """All that comes until the server hangs up; the client waits between the pieces."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        reading = asyncio.create_task(reader.read())
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
            if reading.done():
                break
        async with asyncio.timeout(10):
            answer = await reading
        writer.close()
        return answer

    def timeouts(self) -> dict[str, float]:
        (family,) = self.metrics.timeouts.collect()
        return {s.labels["limit"]: s.value for s in family.samples if s.name.endswith("_total")}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    async def echo(service: Any, body: bytes) -> bytes:
        return body

    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(routes, "BODY_TIMEOUT_S", 0.6)
    made = Server()
    app = web.Application(middlewares=[errors_as_json])
    app[SERVICE] = SimpleNamespace(metrics=made.metrics, in_house=nullcontext)  # type: ignore[assignment]
    app.router.add_post("/x", answering(echo))
    runner = Runner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


def error_of(answer: bytes) -> dict[str, Any]:
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), answer
    said = json.loads(answer.partition(b"\r\n\r\n")[2])
    check_answer("Error", said)
    return dict(said["error"])


@pytest.mark.parametrize(
    "pieces", [(), (HEAD[:20],), [HEAD[at : at + 1] for at in range(40)]], ids=["none", "half", "drops"]
)
async def test_headers_that_do_not_come_to_an_end(server: Server, pieces: list[bytes]) -> None:
    assert error_of(await server.ask(*pieces, pause_s=0.02))["code"] == "header_timeout"
    assert server.timeouts() == {"header_timeout": 1}


async def test_headers_of_a_second_request(server: Server) -> None:
    answer = await server.ask(HEAD + b"5555", HEAD[:20], pause_s=0.5)  # a connection may rest in between
    first, _, second = answer.partition(b"5555")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert error_of(second)["code"] == "header_timeout"


async def test_a_body_has_a_limit_of_its_own(server: Server) -> None:
    whole = await server.ask(HEAD + b"5", b"55", b"5", HEAD[:20], pause_s=0.2)
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\n5555" in whole
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD + b"55")
    async with asyncio.timeout(10):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert error_of(answer)["code"] == "body_timeout"
    assert server.timeouts() == {"header_timeout": 1, "body_timeout": 1}
