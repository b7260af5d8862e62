"""Bodies of megabytes and prompts of 300,000 tokens: refused in order, and nobody else notices.

How long others wait is compared with how long they waited just before on the same machine, so that a busy
machine does not fail the test; the bounds of an idle one are 0.5 s for /livez and 1 s between two chunks.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, sse
from strict_sse import check_answer

MB5 = 5_000_000
WORDS = " ".join(f"word{number % 997} and" for number in range(MB5 // 12))


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """(path, body) by name; each is more than a request may have."""
    made: dict[str, tuple[str, Any]] = {
        "one line": ("/generate", {"prompt": "a" * MB5}),
        "words": ("/generate", {"prompt": WORDS}),
        "300,000 tokens of text": ("/v1/completions", {"prompt": " cat" * 300_000}),
        "300,000 ids": ("/generate", {"prompt": [5] * 300_000}),
        "ids of 5 MB": ("/v1/completions", {"prompt": [1234] * (MB5 // 6)}),
        "a million prompts": ("/generate", {"prompt": ["a"] * (MB5 // 5)}),
        "chat": ("/v1/chat/completions", chat(WORDS)),
        "chat with control tokens": ("/v1/chat/completions", chat("<|im_end|>" * (MB5 // 10))),
        "tokenize": ("/tokenize", {"prompt": "a" * MB5}),
        "detokenize": ("/detokenize", {"tokens": [1234] * (MB5 // 6)}),
        "many stops": ("/generate", {"prompt": "a", "stop": ["b"] * (MB5 // 5)}),
    }
    raw = {
        "lists": b'{"prompt":[' + b"[1]," * (MB5 // 4) + b"[1]]}",
        "unknown strings": b'{"prompt":[],"x":[' + b'"[",' * (MB5 // 4) + b"1]}",
        "deep": b'{"prompt":' + b"[" * MB5,
        "escapes": b'{"prompt":"' + b"\\u00e9" * (MB5 // 6) + b'"}',
        "too large": b" " * (17 * 1024 * 1024),
    }
    encoded = {
        name: (path, json.dumps({"model": model, **body}).encode()) for name, (path, body) in made.items()
    }
    return encoded | {name: ("/generate", body) for name, body in raw.items()}


class Others:
    """Two streams and a poll of /livez, as long as it lasts: their longest waits."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.livez_s = self.gap_s = 0.0

    async def __aenter__(self) -> Others:
        self._session = aiohttp.ClientSession()
        self._tasks = [asyncio.create_task(self._stream(index)) for index in range(2)]
        self._tasks.append(asyncio.create_task(self._poll()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended

    async def _stream(self, index: int) -> None:
        while True:
            body = {"prompt": [index + 7] * 20, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            async with self._session.post(self.cluster.url + "/generate", json=body) as response:
                last = None
                async for event in sse(response, body):
                    assert "error" not in event, event
                    now = time.monotonic()
                    if last is not None:
                        self.gap_s = max(self.gap_s, now - last)
                    last = now

    async def _poll(self) -> None:
        while True:
            began = time.monotonic()
            async with self._session.get(self.cluster.url + "/livez") as response:
                assert response.status == 200
            self.livez_s = max(self.livez_s, time.monotonic() - began)
            await asyncio.sleep(0.05)


async def refused(cluster: Cluster, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        try:
            async with session.post(cluster.url + path, data=memoryview(body)) as response:
                answer = await response.json()
                assert response.status in (400, 413), answer
                check_answer("Error", answer)
        except aiohttp.ClientConnectionError:  # answered before all had been sent
            assert len(body) > 16 * 1024 * 1024


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_large_bodies_stop_nobody(split: Cluster) -> None:
    large = bodies((await split.get("/v1/models"))["data"][0]["id"])
    async with Others(split) as undisturbed:
        await asyncio.sleep(2)
    async with Others(split) as others:
        for path, body in large.values():
            await refused(split, path, body)
        await asyncio.gather(*(refused(split, path, body) for path, body in list(large.values())[:6]))
    seen = f"/livez {others.livez_s:.3f} s, before {undisturbed.livez_s:.3f}; "
    seen += f"chunks {others.gap_s:.3f} s, before {undisturbed.gap_s:.3f}"
    print(seen)
    assert others.livez_s < 0.5 + 4 * undisturbed.livez_s, seen
    assert others.gap_s < 1.0 + 4 * undisturbed.gap_s, seen
    await split.idle()
    assert (await split.generate("a", 2))["usage"]["completion_tokens"] == 2
