"""Public faults of other servers as black-box tests; the number of a test is its row's.

Rows of validation and streaming that stand elsewhere (u: unit/router): C03 test_api (stops), u/test_stops;
C08 u/test_detokenizer; C11, C20 test_api, u/test_text, u/test_tools; C12 test_api (too long);
C14 u/test_validate; C15 test_api (choices), test_sampling; C17 test_sampling, u/test_replies;
C19 test_api (stop ids), test_exact; C21 test_api (a client that leaves); C23 test_failures;
C25 test_slow_links.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, post
from strict_sse import StrictStream, check_answer, events, strict_json

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


async def model_of(cluster: Cluster) -> str:
    return str((await cluster.get("/v1/models"))["data"][0]["id"])


def smallest(path: str, model: str) -> dict[str, Any]:
    turn = {"messages": [{"role": "user", "content": "hi"}]}
    return {"model": model} | (turn if path.endswith("chat/completions") else {"prompt": "hi"})


async def refused(cluster: Cluster, path: str, body: bytes, param: str | None) -> None:
    """A clean 400, the same with and without streaming."""
    answers = []
    for stream in (b"", b'"stream": true, '):
        status, answer, headers = await post(cluster, path, b"{" + stream + body[1:])
        assert (status, headers["Content-Type"]) == (400, "application/json"), answer
        strict_json(json.dumps(answer))
        check_answer("Error", answer)
        assert answer["error"]["param"] == param
        answers.append({**answer["error"], "message": ""})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("path", PATHS)
async def test_c01_numbers_that_are_none(split: Cluster, path: str) -> None:
    start = json.dumps(smallest(path, await model_of(split)))[:-1].encode()
    fields = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for field, value in product(fields, (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"NaN"', b"-2.5")):
        await refused(split, path, start + b', "' + field.encode() + b'": ' + value + b"}", field)


@pytest.mark.parametrize("path", PATHS)
async def test_c06_limits_of_the_answer(split: Cluster, path: str) -> None:
    body = smallest(path, await model_of(split)) | {"ignore_eos": True}
    for value in (0, -1, "5", 5.0, 5.5, True, [], 2**31):
        await refused(split, path, json.dumps(body | {"max_tokens": value}).encode(), "max_tokens")
    status, answer, _ = await post(split, path, body | {"max_tokens": 1})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
    if path != "/v1/chat/completions":  # there it is all that fits
        default = {"/generate": 128, "/v1/completions": 16}[path]
        for asked in (body, body | {"max_tokens": None}):
            status, answer, _ = await post(split, path, asked)
            assert (status, answer["usage"]["completion_tokens"]) == (200, default)


async def test_c06_echo_alone_scores_the_prompt(split: Cluster) -> None:
    body = smallest("/v1/completions", await model_of(split))
    body |= {"max_tokens": 0, "echo": True, "logprobs": 1}
    status, answer, _ = await post(split, "/v1/completions", body)
    check_answer("Completion", answer)
    choice = answer["choices"][0]
    assert (status, answer["usage"]["completion_tokens"], choice["text"]) == (200, 0, "hi")
    assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("path", PATHS)
async def test_c10_half_a_surrogate_pair(split: Cluster, path: str) -> None:
    model = await model_of(split)
    plain = json.dumps(smallest(path, model)).encode()
    bodies = [
        plain.replace(b'"hi"', b'"\\ud83d"'),
        plain.replace(b'"hi"', b'"\xff\xfe"'),
        plain[:-1] + b', "stop": "\\ud83d"}',
        plain[:-1] + b', "user": "\\udc00 x"}',
        plain.replace(json.dumps(model).encode(), b'"\\ud83d"'),
    ]
    if path == "/v1/chat/completions":
        bodies.append(plain.replace(b'"hi"', b'[{"type": "text", "text": "\\ud83d"}]'))
    for body in bodies:
        await refused(split, path, body, None)
    pair = plain.replace(b'"hi"', b'"\\ud83d\\ude00"')[:-1] + b', "max_tokens": 1}'
    assert (await post(split, path, pair))[0] == 200


async def test_c05_a_prompt_without_tokens_runs_nothing(split: Cluster) -> None:
    before = await split.metric("pagerelay_prompt_tokens_total")
    for prompt in ("", [""], [], [[]], ["hi", ""], None):
        status, answer, _ = await post(split, "/generate", {"prompt": prompt})
        assert status == 400, answer
        assert answer["error"]["param"].startswith("prompt")
    assert await split.metric("pagerelay_prompt_tokens_total") == before
    chat = {"model": await model_of(split), "messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    assert (await post(split, "/v1/chat/completions", chat))[0] == 200


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}], ids=str)
async def test_c24_usage_comes_as_asked(split: Cluster, path: str, options: dict[str, bool] | None) -> None:
    body = smallest(path, await model_of(split)) | {"max_tokens": 4, "temperature": 0, "n": 2}
    _, whole, _ = await post(split, path, body)
    body |= {"stream": True, "stream_options": options}
    checked = StrictStream(path, body)
    async with aiohttp.ClientSession() as session, session.post(split.url + path, json=body) as response:
        assert [event async for event in events(response, checked)]
    checked.assert_same_as(whole)
    assert (checked.usage == whole["usage"]) is bool(options and options.get("include_usage"))


async def test_c24_options_without_a_stream(split: Cluster) -> None:
    for path in PATHS:
        body = smallest(path, await model_of(split)) | {"stream_options": {"include_usage": True}}
        status, answer, _ = await post(split, path, body)
        assert (status, answer["error"]["param"]) == (400, "stream_options")
        await refused(split, path, json.dumps(smallest(path, body["model"]) | {"n": 0}).encode(), "n")
