"""Public faults of other servers as black-box tests: streams, and clients that leave or do not read. See
test_cases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import taps
from cluster import Cluster, post, running
from rows import CHAT, PATHS, after, asked, model_of, refused, smallest, streamed
from strict_sse import StrictStream, events

ABORTED = {"name": "pagerelay_requests_total", "outcome": "aborted"}

# ---------------------------------------------------------------- clients that leave


async def test_c21_clients_that_leave(wide_row: Cluster) -> None:
    """Ten that read three pieces of a stream and ten that wait for a whole answer, some for four of them."""
    before = await wide_row.metric(**ABORTED)
    model = await model_of(wide_row)

    async def leave(index: int) -> None:
        path = PATHS[index % 2]
        body = smallest(path, model, [index + 3] * 40) | {"max_tokens": 2000, "ignore_eos": True}
        body |= {"stream": index < 10, "n": 4 if index % 5 == 0 else 1}
        async with aiohttp.ClientSession() as session:
            if index >= 10:
                with pytest.raises(TimeoutError):
                    async with (
                        asyncio.timeout(0.3),
                        session.post(wide_row.url + path, json=body) as response,
                    ):
                        await response.read()
                return
            async with session.post(wide_row.url + path, json=body) as response:
                said = events(response, StrictStream(path, body))
                for _ in range(3):
                    await anext(said)

    await asyncio.gather(*(leave(index) for index in range(20)))
    await wide_row.idle(2.0)
    assert await wide_row.metric(**ABORTED) == before + 20


# ---------------------------------------------------------------- workers that are lost


async def ready(cluster: Cluster) -> None:
    async def is_ready() -> bool:
        here = len(await cluster.workers())
        return here == 2 and (await cluster.get("/readyz"))["status"] == "ready"

    await cluster.until("all workers serve", is_ready, 60)


async def test_c23_the_last_decode_worker_is_lost(wide_row: Cluster) -> None:
    url = wide_row.url + PATHS[1]
    body = smallest(PATHS[1], await model_of(wide_row)) | {"max_tokens": 500, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    checked, seen = StrictStream(PATHS[1], body), 0
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        async for _ in events(response, checked):  # it ends when the server has closed the connection
            seen += 1
            if seen == 10:
                wide_row.signal("decode-1", signal.SIGKILL)
                killed_at = time.monotonic()
    assert time.monotonic() - killed_at < 5.0
    assert checked.error is not None
    assert checked.error["code"] == "no_decode_worker"
    assert (checked.finish, checked.usage, checked.done) == ({}, None, False)
    # Before the first token it is a plain status.
    status, answer, headers = await post(wide_row, PATHS[1], body)
    assert (status, answer["error"]["code"]) == (503, "no_decode_worker")
    assert headers["Retry-After"]
    wide_row.revive("decode-1")
    await ready(wide_row)
    for path in PATHS:
        await refused(wide_row, path, smallest(path, body["model"]) | {"n": 0}, "n")


async def test_c25_an_error_after_a_long_wait_is_an_event(wide_row: Cluster) -> None:
    body = {"prompt": "wait", "max_tokens": 3, "stream": True, "ignore_eos": True}
    checked = StrictStream(PATHS[0], body)
    for name in ("prefill-1", "decode-1"):
        wide_row.signal(name, signal.SIGSTOP)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(wide_row.url + PATHS[0], json=body) as response,
        ):
            assert response.status == 200
            (event,) = [event async for event in events(response, checked)]  # both are thought to be dead
    finally:
        for name in ("prefill-1", "decode-1"):
            wide_row.signal(name, signal.SIGCONT)
    assert (event["error"]["code"], checked.done) == ("no_decode_worker", False)
    assert checked.num_comments > 1
    await ready(wide_row)


# ---------------------------------------------------------------- usage


OPTIONS = (None, {}, {"include_usage": False}, {"include_usage": True})


async def test_c24_usage_comes_as_asked(row: Cluster) -> None:
    model = await model_of(row)
    for path in PATHS[1:]:
        body = smallest(path, model) | {"max_tokens": 4, "temperature": 0, "n": 2}
        whole = await asked(row, path, body)
        for options in (*OPTIONS, "absent"):
            more = {} if options == "absent" else {"stream_options": options}
            checked, said = await streamed(row, path, body | more)
            checked.assert_same_as(whole)
            wanted = options == {"include_usage": True}
            assert (checked.usage == whole["usage"]) is wanted
            assert [event.get("usage", "none") for event in said[:-1]] == [
                None if wanted else "none" for _ in said[:-1]
            ]
            finishes = [c for event in said for c in event["choices"] if c["finish_reason"] is not None]
            assert sorted(choice["index"] for choice in finishes) == [0, 1]
    for path in PATHS:
        for stream in ({}, {"stream": False}, {"stream": None}):
            body = smallest(path, model) | {"stream_options": {"include_usage": True}} | stream
            status, answer, _ = await post(row, path, body)
            assert (status, answer["error"]["param"]) == (400, "stream_options")


async def test_c24_the_official_client_reads_it(row: Cluster) -> None:
    openai = pytest.importorskip("openai")
    model = await model_of(row)
    turns = smallest(CHAT, model)["messages"]
    async with openai.AsyncOpenAI(base_url=row.url + "/v1", api_key="none", max_retries=0) as client:
        for make, asking in (
            (client.completions.create, {"prompt": "hi"}),
            (client.chat.completions.create, {"messages": turns}),
        ):
            asking |= {"model": model, "max_tokens": 4, "temperature": 0}
            whole = await make(**asking)
            for options in (openai.NOT_GIVEN, *OPTIONS[1:]):
                stream = await make(**asking, stream=True, stream_options=options)
                chunks = [chunk async for chunk in stream]
                if options == {"include_usage": True}:
                    assert (chunks[-1].usage, chunks.pop().choices) == (whole.usage, [])
                assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
                assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert taps.check_all() == 8


# ---------------------------------------------------------------- clients that do not read


@dataclass
class Stalled:
    client: socket.socket
    body: dict[str, Any]
    seen: bytes = b""

    def close(self) -> None:
        """What came until then was as it has to be."""
        with contextlib.suppress(OSError):  # nothing more, or the router's end of it
            while data := self.client.recv(65536):
                self.seen += data
        self.client.close()
        head, _, rest = self.seen.partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        checked, num_events = StrictStream(PATHS[0], self.body), 0
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            num_events += len(checked.feed(rest[: int(size, 16)]))
            rest = rest[int(size, 16) + 2 :]
        assert num_events > 0


async def stalled(cluster: Cluster, index: int, **more: Any) -> Stalled:
    """Four streams in one, whose client takes the first piece and no more, through the smallest buffer there
    is."""
    body = {"prompt": [index + 9] * 20, "max_tokens": 4000, "n": 4, "stream": True, "ignore_eos": True}
    body |= more
    data = json.dumps(body).encode()
    host, port = cluster.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + data)
    made = Stalled(client, body)
    while b"data: {" not in made.seen:
        made.seen += await loop.sock_recv(client, 100)
    assert made.seen.startswith(b"HTTP/1.1 200 ")
    return made


def resident_mb(pid: int) -> float:
    (line,) = (text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text[:5] == "VmRSS")
    return int(line.split()[1]) / 1024


async def lose_those_who_stall(cluster: Cluster, seconds: float, **more: Any) -> float:
    """Ten who stall for so long; others are served beside them. The most that the router grew, in MiB."""
    expected = await cluster.ids([7] * 30, 60)
    router = cluster.child("router").process.pid
    before_mb, aborted = resident_mb(router), await cluster.metric(**ABORTED)
    began = time.monotonic()
    most_mb = before_mb
    clients = await asyncio.gather(*(stalled(cluster, index, **more) for index in range(10)))
    try:
        while await cluster.metric(**ABORTED) < aborted + 10 or time.monotonic() < began + seconds:
            assert time.monotonic() < began + seconds + 80, await cluster.get("/cluster")
            got = [
                token
                async for event in cluster.stream([7] * 30, 60)
                for choice in event["choices"]
                for token in choice["token_ids"]
            ]
            assert got == expected
            most_mb = max(most_mb, resident_mb(router))
        assert await cluster.metric(**ABORTED) == aborted + 10
        await cluster.idle()
    finally:
        for client in clients:
            client.close()
    return max(most_mb, resident_mb(router)) - before_mb


async def test_c25_readers_that_stop_lose_their_own_stream(wide_row: Cluster) -> None:
    """Much is told of each token, so that what the kernel takes is full sooner."""
    assert await lose_those_who_stall(wide_row, 0, logprobs=20) < 50


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_c25_readers_that_stop_for_a_minute(tiny_dir: Path) -> None:
    """With the patience that the router has by default."""
    with running(tiny_dir, cache__num_blocks=10_500) as cluster:
        assert await lose_those_who_stall(cluster, 60) < 50
        await after(cluster)


async def test_c25_a_wait_for_the_first_token_is_not_silent(wide_row: Cluster) -> None:
    """The queue is full: comments come meanwhile, which clients do not see."""
    openai = pytest.importorskip("openai")
    model = await model_of(wide_row)
    few = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    prompts = [[at + 3] * 8000 for at in range(5)]
    before = [asyncio.create_task(wide_row.ids(prompt, 1)) for prompt in prompts[:-1]]
    while await wide_row.metric("pagerelay_requests_running") < len(before):
        await asyncio.sleep(0.01)

    async def by_the_official_client() -> str:
        async with openai.AsyncOpenAI(base_url=wide_row.url + "/v1", api_key="none") as client:
            stream = await client.completions.create(
                model=model,
                prompt=prompts[-1],
                max_tokens=3,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    (checked, _), text = await asyncio.gather(
        streamed(wide_row, PATHS[0], {"prompt": prompts[-1], **few}), by_the_official_client()
    )
    assert checked.num_comments >= 1
    assert len(checked.token_ids[0]) == 3
    assert text == checked.texts[0]
    await asyncio.gather(*before)
