"""Clients that do not read lose their own stream and nothing else; clients that wait hear that they are not
forgotten."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from cluster import Cluster, running
from strict_sse import StrictStream, events

NUM_STALLED = 2


@pytest.fixture(scope="module")
def impatient(tiny_dir: Path) -> Iterator[Cluster]:
    with running(tiny_dir, router__write_timeout_s=1.5, router__keepalive_s=0.3) as cluster:
        yield cluster


async def stalled(cluster: Cluster, index: int) -> socket.socket:
    """A stream whose client takes its first bytes and no more, through the smallest buffer there is."""
    body = {"prompt": [index + 9] * 20, "max_tokens": 2000, "stream": True}
    body |= {"ignore_eos": True, "logprobs": 20}
    data = json.dumps(body).encode()
    host, port = cluster.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + data)
    assert b" 200 " in await loop.sock_recv(client, 100)
    return client


def resident_mb(pid: int) -> float:
    (line,) = (text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text[:5] == "VmRSS")
    return int(line.split()[1]) / 1024


async def test_readers_that_stop_lose_their_own_stream(impatient: Cluster) -> None:
    expected = await impatient.ids([7] * 30, 60)
    router = impatient.child("router").process.pid
    before_mb, aborted = (
        resident_mb(router),
        await impatient.metric("pagerelay_requests_total", outcome="aborted"),
    )
    clients = [await stalled(impatient, index) for index in range(NUM_STALLED)]
    try:
        got = [
            token
            async for event in impatient.stream([7] * 30, 60)
            for choice in event["choices"]
            for token in choice["token_ids"]
        ]
        assert got == expected

        async def all_ended() -> bool:
            now = await impatient.metric("pagerelay_requests_total", outcome="aborted")
            return now == aborted + NUM_STALLED

        await impatient.until("the stalled streams are ended", all_ended, 60)
        assert resident_mb(router) - before_mb < 50
        await impatient.idle()
    finally:
        for client in clients:
            client.close()
    assert await impatient.ids([7] * 30, 60) == expected


async def test_a_wait_for_the_first_token_is_not_silent(impatient: Cluster) -> None:
    await impatient.idle()
    body = {"prompt": "wait", "max_tokens": 3, "stream": True, "ignore_eos": True}
    checked = StrictStream("/generate", body)
    for name in ("prefill-1", "decode-1"):
        impatient.signal(name, signal.SIGSTOP)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(impatient.url + "/generate", json=body) as response,
        ):
            assert response.status == 200
            heard = events(response, checked)
            first = asyncio.ensure_future(anext(heard))
            while checked.num_comments < 2:
                await asyncio.sleep(0.02)
            for name in ("prefill-1", "decode-1"):
                impatient.signal(name, signal.SIGCONT)
            await first
            async for _ in heard:
                pass
    finally:
        for name in ("prefill-1", "decode-1"):
            impatient.signal(name, signal.SIGCONT)
    assert len(checked.token_ids[0]) == 3
