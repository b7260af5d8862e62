"""A small OpenAI-compatible server in this process. Its prompt costs one token a word, and 7 for the
template.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from pagerelay.bench.client import Client, Target, open_session

TEMPLATE_TOKENS = 7


@dataclass
class FakeServer:
    """``mode`` is what the next answers do; ``bodies`` is what was asked."""

    url: str = ""
    mode: str = "good"
    gap_s: float = 0.001
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open_streams: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.mode == "500":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        if self.mode == "redirect":
            raise web.HTTPTemporaryRedirect("http://192.0.2.1/elsewhere")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open_streams += 1
        try:
            await self.stream(response, request.path.endswith("/chat/completions"), body)
        finally:
            self.open_streams -= 1
        return response

    async def stream(self, response: web.StreamResponse, chat: bool, body: dict[str, Any]) -> None:
        prompt = body["prompt"] if not chat else " ".join(m["content"] for m in body["messages"])
        prompt_tokens = len(prompt.split()) + (TEMPLATE_TOKENS if chat else 0)

        async def send(event: dict[str, Any]) -> None:
            raw = f": comment\r\ndata: {json.dumps(event)}\r\n\r\n".encode()
            half = len(raw) // 2
            await response.write(raw[:half])
            await asyncio.sleep(0)
            await response.write(raw[half:])

        def choice(text: str, finish: str | None) -> dict[str, Any]:
            part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, "finish_reason": finish, **part}]}

        count = body["max_tokens"]
        for index in range(count):
            if self.mode == "hang" and index == 2:
                await asyncio.sleep(60)
            if self.mode == "error" and index == 1:
                await send({"error": {"message": "the worker was lost"}})
                return
            if self.mode == "broken" and index == 1:
                return
            await send(choice(" ä" if self.mode != "empty" else "", "length" if index == count - 1 else None))
            await asyncio.sleep(self.gap_s)
        if body.get("stream_options"):
            await send(
                {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count}},
            )
        await response.write(b"data: [DONE]\n\n")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield server
    await runner.cleanup()


@pytest.fixture
async def client(fake: FakeServer) -> AsyncIterator[Client]:
    async with open_session() as session:
        yield Client(Target(fake.url, "fake-model"), session, timeout_s=10)
