"""What aiohttp answers by itself: no request, however wrong, makes more than a line at DEBUG."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace

import pytest
from aiohttp import web
from flows import Clock, registry

from pagerelay.router.app import SERVICE
from pagerelay.router.http import Runner
from pagerelay.router.metrics import RouterMetrics

POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
CASES: dict[str, tuple[list[bytes], bytes]] = {
    "no-http": ([b"\x16\x03\x01\x02\x00 not http at all\r\n\r\n"], b"400"),
    "no-method": ([b"G@T / HTTP/1.1\r\nHost: a\r\n\r\n"], b"400"),
    "version": ([b"GET / HTTP/9.9\r\nHost: a\r\n\r\n"], b"400"),
    "target": ([b"GET http://a:b:c/ HTTP/1.1\r\nHost: a\r\n\r\n"], b"400"),
    "no-colon": ([GET + b"bad header\r\n\r\n"], b"400"),
    "no-colon-later": ([GET, b"bad header\r\n\r\n"], b"400"),
    "nul": ([GET + b"X: a\x00b\r\n\r\n"], b"400"),
    "length": ([POST + b"Content-Length: abc\r\n\r\n"], b"400"),
    "two-lengths": ([POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"], b"400"),
    "encoding": ([POST + b"Transfer-Encoding: foo\r\n\r\n"], b"400"),
    "long": ([b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"], b"431"),
    "many": ([GET + b"".join(b"X-%d: 1\r\n" % n for n in range(20_000)) + b"\r\n"], b"400"),
    "after-a-good-one": ([GET + b"\r\n", b"GARBAGE\r\n\r\n"], b"200"),
    "gzip": ([POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"], b"200"),
    "gzip-later": ([POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n", b"hello"], b"200"),
    "deflate": ([POST + b"Content-Encoding: deflate\r\nContent-Length: 5\r\n\r\n", b"hello"], b"200"),
    "chunk": ([POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n"], b"400"),
    "chunk-later": ([POST + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\nhello\r\n"], b"200"),
}


@contextlib.asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[int]:
    """The port of an application that reads no body."""
    app = web.Application()
    app[SERVICE] = SimpleNamespace(metrics=RouterMetrics(registry(Clock())))  # type: ignore[assignment]
    app.router.add_route("*", "/", answer)
    runner = Runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def well(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def broken(_: web.Request) -> web.Response:
    raise RuntimeError("broken")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(well) as port:
        yield port


@pytest.mark.parametrize(("pieces", "status"), CASES.values(), ids=CASES)
async def test_what_is_malformed_is_answered_and_no_fault_of_ours(
    port: int, pieces: list[bytes], status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02)
    async with asyncio.timeout(5):
        assert (await reader.readline()).split()[1] == status
    writer.close()
    await asyncio.sleep(0.02)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_a_fault_of_ours_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(broken) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        assert (await reader.readline()).split()[1] == b"500"
        writer.close()
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR]
