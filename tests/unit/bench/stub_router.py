"""The least that can stand in for a router: no checks, no queues, one worker of each role."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from pagerelay.common.wire import messages as wire
from pagerelay.common.wire.codec import Decoder, encode


class StubRouter:
    def __init__(self) -> None:
        self.socket: zmq.asyncio.Socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        self.socket.bind(os.environ["PAGERELAY_ROUTER_WORKERS_ENDPOINT"])
        self.decode: Decoder[Any] = Decoder(wire.ToRouter)
        self.workers: dict[str, bytes] = {}
        self.jobs: dict[str, wire.PrefillJob] = {}
        self.queues: dict[str, asyncio.Queue[wire.TokenDelta]] = {}
        folder = Path(os.environ["PAGERELAY_MODEL_PATH"])
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.words = {number: piece.replace("Ġ", " ") for piece, number in vocabulary.items()}
        self.count = 0

    async def send(self, role: str, message: wire.Message) -> None:
        await self.socket.send_multipart([self.workers[role], encode(message)])

    async def serve(self) -> None:
        while True:
            name, frame = await self.socket.recv_multipart()
            match self.decode(frame):
                case wire.Hello(role=role):
                    self.workers[role] = name
                    await self.send(role, wire.Welcome(router_id="stub", heartbeat_s=0.5, dead_after_s=3.0))
                case wire.PrefillStarted(request_id=request_id, handle=handle):
                    job = self.jobs[request_id]
                    decode = wire.DecodeJob(
                        request_id=request_id, attempt=1, age_s=0.0, token_ids=[1], sampling=job.sampling,
                        first_index=0, handle=handle,
                    )  # fmt: skip
                    await self.send("decode", decode)
                case wire.FirstToken(delta=delta):  # what HandedOver repeats is not looked at
                    self.queues[delta.request_id].put_nowait(delta)
                case wire.Tokens(deltas=deltas):
                    for delta in deltas:
                        self.queues[delta.request_id].put_nowait(delta)
                case _:
                    pass

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.count += 1
        request_id = str(self.count)
        sampling = wire.SamplingParams(max_tokens=body["max_tokens"], seed=body["seed"])
        job = wire.PrefillJob(
            request_id=request_id, attempt=1, age_s=0.0, token_ids=[1], sampling=sampling, first_index=0
        )
        self.jobs[request_id], queue = job, asyncio.Queue[wire.TokenDelta]()
        self.queues[request_id] = queue
        await self.send("prefill", job)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        text, stream = "", body["stream"]
        if stream:
            await response.prepare(request)
        while True:
            delta = await queue.get()
            text += self.words[delta.token]
            if stream:
                event = {"choices": [{"text": self.words[delta.token], "finish_reason": delta.finish_reason}]}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if delta.finish_reason:
                break
        if not stream:
            return web.json_response({"choices": [{"text": text, "finish_reason": "length"}]})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub"}]})


async def start(app: web.Application) -> None:
    router = StubRouter()
    app["task"] = asyncio.create_task(router.serve())
    app.router.add_post("/v1/completions", router.answer)
    app.router.add_get("/v1/models", router.models)


async def build() -> web.Application:
    app = web.Application()
    await start(app)
    return app


web.run_app(build(), host="127.0.0.1", port=int(os.environ["PAGERELAY_ROUTER_PORT"]), print=None)
