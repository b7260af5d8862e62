"""guidellm, a load generator: a few requests of each kind, none of which may fail.

It reads in processes of its own, so what it reads passes through this one, where every stream is checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import taps
from aiohttp import web
from cluster import Cluster

pytest.importorskip("guidellm")


HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@asynccontextmanager
async def passed_on(url: str) -> AsyncIterator[str]:
    """The URL of a server that hands requests to ``url`` as they are, and answers as they come."""

    def end_to_end(headers: object) -> dict[str, str]:
        return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}

    async def ask(request: web.Request) -> web.StreamResponse:
        there = session.request(
            request.method,
            url + request.path_qs,
            data=await request.read() or None,
            headers=end_to_end(request.headers),
        )
        async with there as found:
            answer = web.StreamResponse(status=found.status, headers=end_to_end(found.headers))
            await answer.prepare(request)
            async for piece in found.content.iter_any():
                await answer.write(piece)
            return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", ask)
    runner = web.AppRunner(app)
    await runner.setup()
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions"])
async def test_a_bounded_run(
    served: Cluster, key: str, tiny_dir: Path, tmp_path: Path, request_format: str
) -> None:
    report = tmp_path / "report.json"
    async with passed_on(served.url) as url:
        command = ["-m", "guidellm", "run", "--disable-console"]
        command += [
            "--backend",
            f"kind=openai_http,target={url},api_key={key},request_format={request_format}",
            "--tokenizer",
            f"kind=huggingface_auto,model={tiny_dir}",
            "--data",
            "kind=synthetic_text,prompt_tokens=40,output_tokens=8",
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            "kind=max_requests,count=6",
            "--output",
            f"kind=json,path={report}",
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(process.communicate(), 280)
        assert process.returncode == 0, said.decode()
    [run] = json.loads(report.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)
    assert run["metrics"]["output_token_count"]["successful"]["mean"] == 8
    assert taps.check_all() >= 6
