"""A server as a process of its own: ``python word_server.py PORT [slow|dies|stubborn]``. Streams words,
computes nothing.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from aiohttp import web

MODE = sys.argv[2] if len(sys.argv) > 2 else ""
GAP_S = 0.01 if MODE == "slow" else 0.002


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    count = body["max_tokens"]
    for _ in range(count):
        await response.write(b'data: {"choices": [{"delta": {"content": " word"}}]}\n\n')
        await asyncio.sleep(GAP_S)
    words = sum(len(message["content"].split()) for message in body["messages"])
    usage = {"prompt_tokens": words, "completion_tokens": count}
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "words"}]})


if MODE == "dies":
    sys.exit("no such model")
app = web.Application()
app.router.add_post("/v1/chat/completions", answer)
app.router.add_get("/v1/models", models)
if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, handle_signals=MODE != "stubborn")
