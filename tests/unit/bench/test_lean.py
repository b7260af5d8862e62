from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from pagerelay.bench.lean import Connection
from pagerelay.bench.phases import token_latencies_ms


async def connect(url: str) -> Connection:
    port = urlsplit(url).port
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


def body(count: int) -> bytes:
    return json.dumps({"model": "m", "prompt": "a b", "max_tokens": count, "stream_options": {}}).encode()


async def test_one_connection_carries_one_stream_after_another(fake: Any) -> None:
    connection = await connect(fake.url)
    for count in (5, 1, 30):
        reply = await connection.request("127.0.0.1", "/v1/completions", body(count))
        assert (reply.status, reply.error, reply.finished, reply.tokens) == (200, None, True, count)
        times = [at for at, _ in reply.arrivals]
        assert reply.sent_ns < times[0] <= times[-1] <= reply.end_ns
    assert not connection.closed
    connection.close()


@pytest.mark.parametrize(
    ("mode", "error"), [("500", "out of luck"), ("error", "lost"), ("broken", "broken off")]
)
async def test_what_fails_says_why(fake: Any, mode: str, error: str) -> None:
    fake.mode = mode
    connection = await connect(fake.url)
    reply = await connection.request("127.0.0.1", "/v1/completions", body(3))
    assert reply.error is not None
    assert error in reply.error
    connection.close()


async def test_a_whole_answer_in_small_pieces(unused_tcp_port: int) -> None:
    raw = json.dumps({"choices": [{"text": " two words"}]}).encode()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        for byte in head.encode() + raw:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", unused_tcp_port):
        connection = await connect(f"http://127.0.0.1:{unused_tcp_port}")
        reply = await connection.request("127.0.0.1", "/x", b"{}")
        assert (reply.error, reply.tokens) == (None, 2)
        connection.close()
        await asyncio.sleep(0.01)


async def test_a_server_that_hangs_up(unused_tcp_port: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", unused_tcp_port):
        connection = await connect(f"http://127.0.0.1:{unused_tcp_port}")
        with pytest.raises(ConnectionError, match="hung up"):
            await connection.request("127.0.0.1", "/x", b"{}")
        assert connection.closed


def test_the_latency_of_each_token_is_that_of_the_piece_it_came_in() -> None:
    left = np.array([1_000_000, 2_000_000, 3_000_000, 0], dtype=np.int64)
    assert token_latencies_ms([(2_000_000, 1), (5_000_000, 2), (6_000_000, 1)], left) == [1.0, 3.0, 2.0]
