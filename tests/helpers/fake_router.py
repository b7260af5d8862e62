"""A router that answers as it was told, to a client in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

Answer = dict[str, Any] | web.Response | bytes
"""An object as JSON, a response as it is, or the bytes of a stream."""


class FakeRouter:
    """Serves in a thread of its own. ``answers`` are given in turn, the last one again and again; a function
    is called with the request's body."""

    def __init__(self) -> None:
        self.answers: list[Answer | Callable[[dict[str, Any]], Answer]] = []
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.running = self.most_running = self.left = 0
        self.delay_s = 0.0
        self.hold = False
        """Streams stay open after their bytes."""
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append({"path": request.path, **body})
        self.keys.append(request.headers.get("Authorization"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            answer = given(body) if callable(given) else given
            if isinstance(answer, bytes):
                return await self._stream(request, answer)
            return answer if isinstance(answer, web.Response) else web.json_response(answer)
        except (asyncio.CancelledError, ConnectionError):  # while it waits, or while it writes
            self.left += 1
            raise
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(0, len(data), 7):  # pieces that respect no event
            await response.write(data[at : at + 7])
        while self.hold:
            await asyncio.sleep(0.01)
        return response

    def stop(self) -> None:
        """Nobody listens any more, and open connections are closed."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)

    def start_again(self) -> None:
        """At the same address."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def refusal(status: int, code: str, retry_after: str | None = None, **fields: Any) -> web.Response:
    """An error as the router writes it."""
    body = {"error": {"message": "no", "type": "some_error", "param": None, "code": code} | fields}
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return web.json_response(body, status=status, headers=headers)


def generated(body: dict[str, Any]) -> dict[str, Any]:
    """An answer that repeats its prompt, one choice or ``n``."""
    text = f"<{body['prompt']}>"
    choices = [
        {"index": index, "text": text, "token_ids": [index], "finish_reason": "stop"}
        for index in reversed(range(body.get("n", 1)))
    ]
    return {"id": "gen-1", "model": "fake", "choices": choices, "usage": {"prompt_tokens": 3}, "timings": {}}


def events(*payloads: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(payload)}\n\n" for payload in payloads]
    return "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n" * done]).encode()


def piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": [1], "finish_reason": finish_reason}
    return {"id": "gen-1", "model": "fake", "choices": [choice]}
