"""Calls of functions on both sides of the split. A random model calls nothing of itself, so it is pushed: by
``tool_choice``, or by a bias for the token that begins a call."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import msgspec
import pytest
from chat_templates import FIRST_MARK, terse, with_tools
from cluster import Cluster, post, running, sse

PAY = {
    "type": "object",
    "properties": {
        "amount": {"type": "integer", "minimum": 0, "maximum": 999},
        "to": {"enum": ["Ann", "日本"]},
        "note": {"type": ["string", "null"], "maxLength": 8},
    },
    "required": ["amount", "to", "note"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "pay", "parameters": PAY, "strict": True}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
BIAS = {str(FIRST_MARK): 100}
CALLS: dict[str, Any] = {"tools": [STRICT, NOW], "logit_bias": BIAS}
WAYS: dict[str, dict[str, Any]] = {
    "strict": CALLS | {"temperature": 0.9},
    "several": CALLS | {"n": 2, "logprobs": True, "top_logprobs": 1, "temperature": 1, "max_tokens": 60},
    "one": CALLS | {"parallel_tool_calls": False},
    "text": CALLS | {"logit_bias": {str(FIRST_MARK): -100}, "max_tokens": 12},
    "required": {"tools": [STRICT, NOW], "tool_choice": "required"},
    "named": {"tools": [NOW, STRICT], "tool_choice": {"type": "function", "function": {"name": "pay"}}},
    "beside an answer": CALLS
    | {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"enum": [1]}},
        },
        "parallel_tool_calls": False,
    },
}


@pytest.fixture(scope="module")
def folder(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tools(tiny_dir, tmp_path_factory.mktemp("hermes"), "hermes")


@pytest.fixture(scope="module")
def split(folder: Path) -> Iterator[Cluster]:
    with running(folder, cluster__decode=2) as cluster:
        yield cluster


def request(fields: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "pay"}],
        "seed": 5,
        "max_tokens": 80,
    }
    return body | fields | {"logit_bias": terse() | fields.get("logit_bias", {})}


async def whole(cluster: Cluster, fields: dict[str, Any]) -> dict[str, Any]:
    body = request(fields)
    status, answer, _ = await post(cluster, "/v1/chat/completions", body)
    assert status == 200, answer
    async with (
        aiohttp.ClientSession() as session,
        session.post(cluster.url + "/v1/chat/completions", json=body | {"stream": True}) as response,
    ):
        streamed: dict[int, list[dict[str, Any]]] = {}
        async for event in sse(response, body):
            for choice in event["choices"]:
                streamed.setdefault(choice["index"], []).append(choice)
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
        pieces = streamed[choice["index"]]
        calls = [call for piece in pieces for call in piece["delta"].get("tool_calls", ())]
        text = "".join(call["function"]["arguments"] for call in calls)
        assert text == "".join(c["function"]["arguments"] for c in choice["message"].get("tool_calls", ()))
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    return answer


def check(way: str, answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        calls = choice["message"].get("tool_calls", [])
        if way == "text":
            assert (calls, choice["finish_reason"]) == ([], "length")
            continue
        assert calls
        cut = choice["finish_reason"] == "length"
        assert cut or choice["message"]["content"] is None
        for call in calls[:-1] if cut else calls:
            arguments = msgspec.json.decode(call["function"]["arguments"])
            if call["function"]["name"] == "pay":
                jsonschema_rs.Draft202012Validator(PAY).validate(arguments)
            assert isinstance(arguments, dict)
        if way in ("one", "named", "beside an answer"):
            assert len(calls) == 1
            assert choice["finish_reason"] == ("stop" if way == "named" else "tool_calls")
        elif way == "required":
            assert choice["finish_reason"] == "tool_calls"


async def test_calls_are_the_same_on_both_sides_of_the_split(split: Cluster, folder: Path) -> None:
    async def ask(cluster: Cluster) -> dict[str, Any]:
        answers = await asyncio.gather(*(whole(cluster, fields) for fields in WAYS.values()))
        await cluster.idle()
        return {way: answer["choices"] for way, answer in zip(WAYS, answers, strict=True)}

    found = await ask(split)
    for way, choices in found.items():
        check(way, {"choices": choices})
    with running(folder, cluster__prefill=0, cluster__decode=0, cluster__colocated=1) as cluster:
        alone = await ask(cluster)
    for way in WAYS:
        assert [c["message"] for c in alone[way]] == [c["message"] for c in found[way]], way


async def test_the_same_calls_after_a_decode_worker_died(split: Cluster) -> None:
    fields = CALLS | {"temperature": 0.9, "max_tokens": 200}
    undisturbed = (await whole(split, fields))["choices"][0]["message"]["tool_calls"]
    body = request(fields)
    found: list[dict[str, Any]] = []
    killed = None
    async with (
        aiohttp.ClientSession() as session,
        session.post(split.url + "/v1/chat/completions", json=body | {"stream": True}) as response,
    ):
        async for event in sse(response, body):
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls", ()):
                    if "id" in call:
                        found.append({"function": dict(call["function"]), "type": "function"})
                    else:
                        found[-1]["function"]["arguments"] += call["function"]["arguments"]
            if len(found) == 2 and killed is None:
                (killed,) = [w for w in await split.workers("decode") if w["requests"]]
                os.kill(killed["pid"], signal.SIGKILL)
    assert killed is not None
    assert found == undisturbed
    assert await split.metric("pagerelay_recoveries_total") >= 1


async def test_a_strict_schema_that_cannot_be_used_is_refused(split: Cluster) -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "text"}}}, "strict": True}
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": tool}],
    }
    status, answer, _ = await post(split, "/v1/chat/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_grammar", "tools")
