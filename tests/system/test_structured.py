"""Structured output: the same answer on both sides of the split and after a loss, and always as asked for."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest
from cluster import Cluster, running
from schemas import bounded_schemas

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 6},
        "at": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
    "sampled": {"guided_json": PERSON, "temperature": 0.8, "top_p": 0.95},
    "scored": {"guided_json": PERSON, "logprobs": 2, "presence_penalty": 0.5},
    "object": {"response_format": {"type": "json_object"}, "temperature": 1},
    "regex": {"guided_regex": r"(\d{1,3}\.){3}\d{1,3}"},
    "choice": {"guided_choice": ["yes", "no", "perhaps tomorrow"]},
    "lark": {"guided_grammar": 'start: "(" start ")" | /[a-z]{3,9}/'},
    "gbnf": {"structured_outputs": {"grammar": 'root ::= ("- " [a-z]{2,6} "\\n"){2,5}'}},
    "end early": {"guided_choice": ["no"], "min_tokens": 6, "max_tokens": 20},
    "ends heard": {"guided_regex": "[a-z]{2,30}", "ignore_eos": False},
    "few ids": {"guided_regex": "[0-9]{3}", "allowed_token_ids": list(range(3, 1000))},
}
PROMPTS = [[5, 17, 301, 8], list(range(40, 90))]


def is_right(way: str, text: str) -> bool:
    match way:
        case "json_schema" | "sampled" | "scored":
            return jsonschema_rs.is_valid(PERSON, json.loads(text))
        case "object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", text) is not None
        case "choice":
            return text in ("yes", "no", "perhaps tomorrow")
        case "lark":
            depth = text.count("(")
            return re.fullmatch(r"\(*[a-z]{3,9}\)*", text) is not None and text.count(")") == depth
        case "gbnf":
            return re.fullmatch("(- [a-z]{2,6}\n){2,5}", text) is not None
        case "end early":
            return text == "no"
        case "ends heard":
            return re.fullmatch("[a-z]{2,30}", text) is not None
        case _:
            return re.fullmatch("[0-9]{3}", text) is not None


async def ask(cluster: Cluster) -> dict[tuple[str, int], dict[str, Any]]:
    async def one(way: str, number: int) -> dict[str, Any]:
        fields = {"max_tokens": 150, "seed": number, **WAYS[way]}
        answer = await cluster.generate(PROMPTS[number], fields.pop("max_tokens"), **fields)
        return {
            name: answer["choices"][0].get(name)
            for name in ("token_ids", "text", "finish_reason", "logprobs")
        }

    wanted = [(way, number) for way in WAYS for number in range(len(PROMPTS))]
    return dict(zip(wanted, await asyncio.gather(*(one(*want) for want in wanted)), strict=True))


def check(answers: dict[tuple[str, int], dict[str, Any]]) -> None:
    ended = 0
    for (way, _), answer in answers.items():
        if answer["finish_reason"] == "stop":
            assert is_right(way, answer["text"]), (way, answer["text"])
            ended += 1
        else:
            assert way in ("object", "lark", "json_schema", "sampled", "scored"), (way, answer)
    assert ended > len(answers) / 2


async def test_the_same_answers_on_both_sides_of_the_split(split: Cluster, colocated: Cluster) -> None:
    answers = await ask(split)
    check(answers)
    await split.idle()
    alone = await ask(colocated)
    await colocated.idle()
    for want, answer in answers.items():
        assert alone[want] == answer, want


LONG = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
        "required": ["n"],
    },
    "minItems": 20,
}


async def test_the_same_answer_after_a_decode_worker_died(tiny_dir: Path) -> None:
    fields: dict[str, Any] = {"guided_json": LONG, "temperature": 0.9, "seed": 4}
    with running(tiny_dir, cluster__decode=2) as cluster:
        undisturbed = await cluster.ids(PROMPTS[0], 120, **fields)
        ids: list[int] = []
        killed = 0
        async for event in cluster.stream(PROMPTS[0], 120, **fields):
            assert "error" not in event, event
            for choice in event["choices"]:
                ids += choice["token_ids"]
            if len(ids) >= 20 and not killed:
                (killed,) = [w["pid"] for w in await cluster.workers("decode") if w["requests"]]
                os.kill(killed, signal.SIGKILL)
        assert ids == undisturbed
        assert await cluster.metric("pagerelay_recoveries_total") >= 1


REFUSED = [
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_grammar": "start: nobody"}, "guided_grammar"),
    ({"guided_json": {"not": {"type": "string"}}}, "guided_json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}},
        "response_format",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_a_grammar_that_cannot_be_used_is_refused_at_once(
    split: Cluster, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "x", "stream": True, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(split.url + "/generate", json=body) as response,
    ):
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["code"] == "invalid_grammar"
    assert error["param"].startswith(param)


async def check_schemas(cluster: Cluster, schemas: list[dict[str, Any]]) -> dict[str, int]:
    """Every finished answer parses and validates, every cut one is a beginning; returns how many of which."""
    found = {"stop": 0, "length": 0, "refused": 0}
    gate = asyncio.Semaphore(8)

    async def one(session: aiohttp.ClientSession, number: int, schema: dict[str, Any]) -> None:
        body = {
            "prompt": [7 + number, 99],
            "max_tokens": 600,
            "seed": number,
            "temperature": (0, 1)[number % 2],
            "response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}},
        }
        async with gate, session.post(cluster.url + "/generate", json=body) as response:
            answer = await response.json()
        if response.status == 400:
            assert answer["error"]["code"] == "invalid_grammar", answer
            found["refused"] += 1
            return
        assert response.status == 200, (answer, schema)
        choice = answer["choices"][0]
        found[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["text"])
            jsonschema_rs.Draft202012Validator(schema).validate(value)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(
            *(
                one(
                    session,
                    *numbered,
                )
                for numbered in enumerate(schemas)
            )
        )
    return found


async def test_random_schemas(split: Cluster) -> None:
    found = await check_schemas(split, bounded_schemas(15))
    assert found["stop"] >= 10, found
    await split.idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_random_schemas(split: Cluster) -> None:
    found = await check_schemas(split, bounded_schemas(200))
    print(found)
    assert found["stop"] >= 150, found
    await split.idle()
