"""What the rows of the public faults share: requests of each endpoint, refusals, and how a cluster has to be
when a row is over."""

from __future__ import annotations

import io
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
from cluster import Cluster, post
from reference import Expected, greedy
from strict_sse import StrictStream, check_answer, events, strict_json

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
CHAT = PATHS[2]
ANSWERS = dict(zip(PATHS, ("Generation", "Completion", "ChatCompletion"), strict=True))
FRANCE = "The capital of France is"
LOUD = re.compile(r"^\S+ +(ERROR|CRITICAL) .*|^Traceback.*", re.MULTILINE)
EXCEPTIONS = re.compile(r"\w(Error|Exception)\b|Traceback")


async def model_of(cluster: Cluster) -> str:
    return str((await cluster.get("/v1/models"))["data"][0]["id"])


def smallest(path: str, model: str, prompt: Any = "hi") -> dict[str, Any]:
    turn = {"messages": [{"role": "user", "content": prompt}]}
    return {"model": model} | (turn if path == CHAT else {"prompt": prompt})


async def ids_of(cluster: Cluster, **what: Any) -> list[int]:
    """Ids of a ``prompt`` or of ``messages``."""
    status, answer, _ = await post(cluster, "/tokenize", what)
    assert status == 200, answer
    return list(answer["tokens"])


async def text_of(cluster: Cluster, ids: list[int]) -> str:
    """All of them decoded at once."""
    return str((await post(cluster, "/detokenize", {"tokens": ids}))[1]["prompt"])


async def asked(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A checked answer without streaming."""
    status, answer, _ = await post(cluster, path, body)
    assert status == 200, answer
    check_answer(ANSWERS[path], answer)
    return dict(answer)


async def streamed(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[StrictStream, list[Any]]:
    """A checked stream and its events."""
    body = body | {"stream": True}
    checked = StrictStream(path, body)
    async with aiohttp.ClientSession() as session, session.post(cluster.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return checked, [event async for event in events(response, checked)]


async def both(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The answer, and the events of the stream that says the same."""
    whole = await asked(cluster, path, body)
    checked, said = await streamed(cluster, path, body)
    checked.assert_same_as(whole)
    return whole, said


async def refused(
    cluster: Cluster,
    path: str,
    body: bytes | dict[str, Any],
    param: str | None,
    code: str | None = None,
    says: tuple[object, ...] = (),
) -> None:
    """A clean 400, the same with and without streaming; ``says`` stands in its message."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answers = []
    async with aiohttp.ClientSession() as session:
        for stream in (b"", b'"stream": true, '):
            data = b"{" + stream + raw[1:]
            headers = {"Content-Type": "application/json"}
            async with session.post(cluster.url + path, data=io.BytesIO(data), headers=headers) as response:
                text = await response.text()
                assert (response.status, response.content_type) == (400, "application/json"), (
                    raw[:300],
                    text,
                )
            answer = strict_json(text)
            check_answer("Error", answer)
            assert answer["error"]["param"] == param, (raw[:300], text)
            assert code in (None, answer["error"]["code"])
            message = answer["error"]["message"]
            assert not EXCEPTIONS.search(message), message
            assert all(str(word) in message for word in says), message
            answers.append(answer["error"] | ({} if says else {"message": ""}))
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- after a row


@lru_cache(8)
def gold(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> Expected:
    """The greedy answer of one undisturbed process."""
    return next(greedy(folder, [list(prompt)], num_tokens))


async def after(cluster: Cluster, seconds: float = 10.0) -> None:
    """Within ``seconds`` nothing runs, waits or is fetched and all blocks are back; a plain request then has
    the answer of an undisturbed process; no process has ended or is another one; nobody has complained in a
    log since it was last looked at."""
    await cluster.idle(seconds)
    for gauge in (
        "pagerelay_requests_running",
        "pagerelay_sequences",
        "pagerelay_outstanding_prefill_tokens",
    ):
        assert await cluster.metric(gauge) == 0, gauge
    for kind in ("sequence", "fetch", "lease"):
        assert await cluster.metric("pagerelay_block_holders", kind=kind) == 0, kind
    assert await cluster.metric("pagerelay_ledger_faults_total") == 0
    want = gold(cluster.folder, tuple(await ids_of(cluster, prompt=FRANCE)), 16)
    assert (await cluster.ids(FRANCE, 16))[: want.sure] == want.ids[: want.sure]
    children = cluster.launcher.children
    assert all(child.process.poll() is None for child in children)
    assert {worker["pid"] for worker in await cluster.workers()} == {
        child.process.pid for child in children if child.name != "router"
    }
    loud = LOUD.search(log := cluster.fresh_log())
    assert loud is None, log[max(0, loud.start() - 500) : loud.end() + 3000]
