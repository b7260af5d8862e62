"""What the fields of other servers and of tokenisation do to answers of a running cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, post, sse
from strict_sse import StrictStream, check_answer, events

from pagerelay.router.text import Tokenizer

PROMPT = "The licence says that nobody may"
ENDPOINTS = {
    "/generate": ("Generation", {"prompt": PROMPT}),
    "/v1/completions": ("Completion", {"prompt": PROMPT}),
    "/v1/chat/completions": ("ChatCompletion", {"messages": [{"role": "user", "content": PROMPT}]}),
}


async def both_ways(cluster: Cluster, path: str, **fields: Any) -> dict[str, Any]:
    """The answer without streaming, which must be that of the stream, joined."""
    component, body = ENDPOINTS[path]
    model = (await cluster.get("/v1/models"))["data"][0]["id"]
    body = {"model": model, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | body | fields
    status, whole, _ = await post(cluster, path, body)
    assert status == 200, whole
    check_answer(component, whole)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    checked = StrictStream(path, body)
    async with aiohttp.ClientSession() as session, session.post(cluster.url + path, json=body) as response:
        assert [event async for event in events(response, checked)]
    checked.assert_same_as(whole)
    assert checked.usage == whole["usage"]
    return dict(whole)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_streams_joined_are_whole_answers(split: Cluster, path: str) -> None:
    for fields in (
        {},
        {"n": 3, "temperature": 1, "seed": 5},
        {"stop": [" a", "e"]},
        {"max_tokens": 1},
        {"return_token_ids": True, "skip_special_tokens": False},
    ):
        whole = await both_ways(split, path, **fields)
        wants_ids = path == "/generate" or "return_token_ids" in fields
        assert all(("token_ids" in choice) is wants_ids for choice in whole["choices"])


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_truncated_prompts_keep_their_end(split: Cluster, tiny_dir: Path, path: str) -> None:
    whole = await both_ways(split, path, truncate_prompt_tokens=3, return_token_ids=True)
    assert whole["usage"]["prompt_tokens"] == 3
    if path != "/v1/chat/completions":
        last = Tokenizer.load(tiny_dir).encode(PROMPT)[-3:]
        assert whole["choices"][0]["token_ids"] == await split.ids(last, 12)
    plenty = await both_ways(split, path, truncate_prompt_tokens=500)
    assert plenty["usage"] == (await both_ways(split, path))["usage"]


async def test_a_prompt_longer_than_the_context_can_be_truncated(split: Cluster) -> None:
    ids = [5] * 20_000
    answer = await split.generate(ids, 2, truncate_prompt_tokens=100)
    assert answer["usage"]["prompt_tokens"] == 100


async def test_other_servers_requests(split: Cluster) -> None:
    """Four ways to ask, streamed and not: one answer."""
    ours = (await split.generate(PROMPT, 6))["choices"]
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    ids = (await post(split, "/tokenize", {"prompt": PROMPT}))[1]["tokens"]
    for body in (
        {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "use_beam_search": False},
        {"text": PROMPT, "sampling_params": params},
        {"input_ids": ids, "sampling_params": params},
        {"inputs": PROMPT, "parameters": {**params, "details": True, "do_sample": False}},
    ):
        status, answer, _ = await post(split, "/generate", body)
        assert (status, answer["choices"]) == (200, ours)
        async with (
            aiohttp.ClientSession() as session,
            session.post(split.url + "/generate", json=body | {"stream": True}) as response,
        ):
            heard = [event async for event in sse(response, {})]
        assert "".join(c["text"] for event in heard for c in event["choices"]) == ours[0]["text"]
