"""Public faults of other servers as black-box tests; the number of a test is its row's. Here: what a request
may say. Beside it: test_cases_tokens (what is told of tokens), test_cases_streams (streams, those who leave).
Each row ends with one check of the whole cluster, ``rows.after``.

Rows that other tests show, too (u: unit/router): C01 C05 C06 C10 C14 u/test_validate, u/test_json_body;
C03 u/test_stops, test_api; C08 u/test_detokenizer; C11 u/test_tools, test_api; C12 u/test_registry;
C15 test_sampling; C17 test_sampling, u/test_replies; C19 test_exact, test_api; C20 u/test_text;
C21 test_api; C23 test_failures.

The rules that were distilled from the rows, and the tests that show them:

================================================ ========================================================
a1  one bounded request, one sampling            C01, C06, u/test_validate, test_openapi
a2  strict JSON in and out                       C01, C10, u/test_json_body; strict_sse reads all answers
a3  zero, false, empty and absent differ         C05, C06, C14, u/test_validate
a4  known before the first token: a 4xx          C12, C05 (a batch), ``rows.refused`` in all rows
a5  what cannot be kept is refused by name       C14, u/test_validate, shape/test_api_table
a6  one machine of stops and limits              C03, C19, u/test_stops, u/test_answer
a7  one detokenizer that holds bytes             C08, u/test_detokenizer, ``rows.both`` in all rows
a8  logprobs are lists by id                     C17, u/test_replies
a9  chats are tokenised once                     C11, C20, u/test_text, u/test_tools
a10 random numbers by seed, choice, position     C15, test_sampling, test_exact, unit/common/test_sampler
b1  one cancel scope, one release                C21, u/test_flow, test_failures
b2  a client that leaves is ordinary             C21, whose end looks at the logs
b3  errors before and after the first byte       C23, C25 (an error after a long wait), u/test_replies
b4  who does not read loses its own stream       C25
b5  one writer, one checker of streams           u/test_replies, u/test_strict_sse, helpers/taps in all tests
b6  time limits with codes and metrics           u/test_http, u/test_flow, C25
================================================ ========================================================
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, post, running
from rows import CHAT, PATHS, after, asked, both, gold, ids_of, model_of, refused, smallest, text_of

from pagerelay.router.schemas import ChatRequest, CompletionRequest, GenerateRequest

STRANGE = "\ufffd"


def raw(body: dict[str, Any], field: str, value: bytes) -> bytes:
    """The body with one more field, whose value need not be JSON."""
    return json.dumps(body)[:-1].encode() + b', "' + field.encode() + b'": ' + value + b"}"


async def test_c01_numbers_that_are_none(row: Cluster) -> None:
    model = await model_of(row)
    none = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"NaN"')
    fields = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for path, field in product(PATHS, fields):
        signed = field in ("presence_penalty", "frequency_penalty")
        for value in (*none, b"-2.5" if signed else b"-0.5"):
            await refused(row, path, raw(smallest(path, model), field, value), field)


async def test_c03_a_stop_that_begins_within_a_token(row: Cluster) -> None:
    model, prompt = await model_of(row), "Here is the English alphabet: ABC"
    plain = smallest(PATHS[1], model, prompt) | {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
    ids = (await asked(row, PATHS[1], plain))["choices"][0]["token_ids"]
    want = gold(row.folder, tuple(await ids_of(row, prompt=prompt)), 24)
    assert ids[: want.sure] == want.ids[: want.sure]
    text = await text_of(row, ids)
    ends = [len(await text_of(row, ids[:n])) for n in range(25)]
    # From within one token into the third after it.
    found = (at for at in range(4, 20) if ends[at + 1] - ends[at] > 1 and ends[at + 4] - ends[at + 3] > 1)
    cuts = ((ends[at] + 1, ends[at + 4] - 1, at + 4) for at in found)
    begin, end, used = next(cut for cut in cuts if text.find(text[cut[0] : cut[1]]) == cut[0])
    stop = text[begin:end]
    for path, included in product(PATHS[:2], (False, True)):
        body = plain | {"stop": stop, "include_stop_str_in_output": included}
        answer, events = await both(row, path, body)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[: end if included else begin], "stop")
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == used
        shown = [one["text"] for event in events for one in event["choices"]]
        assert "".join(shown) == choice["text"]
    chat = smallest(CHAT, model, prompt) | {"temperature": 0, "max_tokens": 24}
    text = (await asked(row, CHAT, chat))["choices"][0]["message"]["content"]
    stop = text[9:21]
    answer, _ = await both(row, CHAT, chat | {"stop": [stop, "\x00never"]})
    assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]


async def test_c05_a_prompt_without_tokens_runs_nothing(row: Cluster) -> None:
    model = await model_of(row)
    accepted = "pagerelay_prompt_tokens_total"
    before = await row.metric(accepted)
    for path in PATHS[:2]:
        named = {"": "prompt", ("",): "prompt", (): "prompt", ((),): "prompt[0]", ("hi", ""): "prompt[1]"}
        for prompt, param in named.items():
            body = {"model": model, "prompt": prompt}
            await refused(row, path, body, param)
        await refused(row, path, {"model": model, "prompt": None}, "prompt")
        await refused(row, path, {"model": model}, "prompt")
    await refused(row, CHAT, {"model": model, "messages": []}, "messages")
    assert await row.metric(accepted) == before
    await both(row, CHAT, smallest(CHAT, model, "") | {"max_tokens": 1, "temperature": 0})


async def test_c06_limits_of_the_answer(row: Cluster) -> None:
    model = await model_of(row)
    scored = {"echo": True, "logprobs": 1}
    for path, more in ((PATHS[0], {}), (PATHS[1], {}), (PATHS[1], scored), (CHAT, {})):
        body = smallest(path, model) | {"ignore_eos": True, "temperature": 0} | more
        for value in (-1, "5", 5.0, 5.5, True, [], 2**31, *([] if more else [0])):
            await refused(row, path, body | {"max_tokens": value}, "max_tokens")
        answer, _ = await both(row, path, body | {"max_tokens": 1})
        assert answer["usage"]["completion_tokens"] == 1
        if path != CHAT:
            default = {PATHS[0]: 128, PATHS[1]: 16}[path]
            answers = [await asked(row, path, asking) for asking in (body, body | {"max_tokens": None})]
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [default] * 2
            assert answers[0]["choices"] == answers[1]["choices"]
    body = smallest(PATHS[1], model) | scored | {"max_tokens": 0}
    answer, _ = await both(row, PATHS[1], body)
    (choice,) = answer["choices"]
    assert (answer["usage"]["completion_tokens"], choice["text"]) == (0, "hi")
    assert choice["logprobs"]["token_logprobs"][0] is None
    # A chat's default is all that the context leaves.
    turns = [{"role": "user", "content": " a" * 8100}]
    room = (await row.get("/cluster"))["context_len"] - len(await ids_of(row, messages=turns))
    assert 0 < room < 80
    for asking in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
        body = {"model": model, "messages": turns, "ignore_eos": True, "temperature": 0} | asking
        answer = await asked(row, CHAT, body)
        assert answer["usage"]["completion_tokens"] == room
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_c10_half_a_surrogate_pair(row: Cluster) -> None:
    model = await model_of(row)
    for path in PATHS:
        plain = json.dumps(smallest(path, model)).encode()
        bodies = [
            plain.replace(b'"hi"', b'"\\ud83d"'),
            plain.replace(b'"hi"', b'"\xff\xfe"'),
            b"\xff" + plain,
            raw(smallest(path, model), "stop", b'"\\ud83d"'),
            raw(smallest(path, model), "stop", b'["a", "\\ud83d"]'),
            raw(smallest(path, model), "user", b'"\\udc00 x"'),
            plain.replace(json.dumps(model).encode(), b'"\\ud83d"'),
        ]
        if path == CHAT:
            bodies.append(plain.replace(b'"hi"', b'[{"type": "text", "text": "\\ud83d"}]'))
        for body in bodies:
            await refused(row, path, body, None)
        few = b', "max_tokens": 2, "temperature": 0}'
        answers = [
            await post(row, path, plain.replace(b'"hi"', said)[:-1] + few)
            for said in (b'"\\ud83d\\ude00"', '"😀"'.encode())
        ]
        assert [status for status, *_ in answers] == [200, 200]
        assert answers[0][1]["choices"] == answers[1][1]["choices"]
        assert answers[0][1]["usage"] == answers[1][1]["usage"]


async def test_c11_what_a_turn_may_hold(row: Cluster) -> None:
    model = await model_of(row)

    def chat(*turns: dict[str, Any]) -> dict[str, Any]:
        return {"model": model, "messages": list(turns), "max_tokens": 4, "temperature": 0}

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answers = [await both(row, CHAT, chat({"role": "user", "content": c})) for c in ("a\nb", parts)]
    assert answers[0][0]["usage"] == answers[1][0]["usage"]
    assert answers[0][0]["choices"] == answers[1][0]["choices"]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    hi = {"role": "user", "content": "hi"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    # This model's template has no tools; test_c11_null_beside_calls has one that does.
    await refused(row, CHAT, chat(hi, called, result), "messages[1].tool_calls")
    await refused(row, CHAT, chat({"role": "user", "content": None}), "messages[0].content")
    await refused(row, CHAT, chat(hi, {"role": "poet", "content": "x"}), "messages[1].role")
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    await refused(
        row, CHAT, chat({"role": "user", "content": [parts[0], image]}), "messages[0].content[1].type"
    )
    system, default = {"role": "system", "content": "Be brief."}, "You are a helpful AI assistant"
    for turns, added in (((system, hi), False), ((hi, system, hi), True), ((hi,), True)):
        answer, _ = await both(row, CHAT, chat(*turns))
        ids = await ids_of(row, messages=list(turns))
        assert answer["usage"]["prompt_tokens"] == len(ids)
        text = await text_of(row, ids)
        assert (default in text) is added
        assert text.count("Be brief.") == turns.count(system)


async def test_c12_a_prompt_that_fills_the_context(row: Cluster) -> None:
    context = (await row.get("/cluster"))["context_len"]
    assert context == 8192
    model = await model_of(row)
    for path in PATHS[:2]:
        for length in (context, context + 1, 300_000):
            body = {"model": model, "prompt": [5] * length, "max_tokens": 1}
            await refused(row, path, body, "prompt", "context_length_exceeded", (context, length))
        body = {"model": model, "temperature": 0, "ignore_eos": True}
        # One token is the most that fits: asked for as one, and with a cap that is meant as none.
        for length, asked_for, said in (
            (context - 1, 1, 1),
            (context - 1, 65_535, 1),
            (8000, 65_535, context - 8000),
        ):
            answer, _ = await both(row, path, body | {"prompt": [5] * length, "max_tokens": asked_for})
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (length, said)
            assert answer["choices"][0]["finish_reason"] == "length"
    # Chats and texts, with the template's own tokens: " a" is one token, and begins no other.
    for path in PATHS:
        least = len(await chat_or_prompt(row, path, " a")) - 1
        most = smallest(path, model, " a" * (context - 1 - least)) | {"max_tokens": 65_535}
        answer, _ = await both(row, path, most | {"temperature": 0, "ignore_eos": True})
        assert answer["usage"] == {
            "prompt_tokens": context - 1,
            "completion_tokens": 1,
            "total_tokens": context,
        }
        param = "messages" if path == CHAT else "prompt"
        for over in (1, 2):
            body = smallest(path, model, " a" * (context - 1 - least + over))
            says = (context, context - 1 + over)
            await refused(row, path, body, param, "context_length_exceeded", says)
        # Far more is refused by its bytes alone, untokenised, with the fewest tokens that it can have.
        body = smallest(path, model, "varied words " * 300_000)
        await refused(row, path, body, param, "context_length_exceeded", (context, "at least"))
    two = {"model": model, "prompt": ["hi", "varied words " * 300_000]}
    await refused(row, PATHS[1], two, "prompt[1]", "context_length_exceeded")


async def chat_or_prompt(cluster: Cluster, path: str, text: str) -> list[int]:
    return await ids_of(cluster, **{k: v for k, v in smallest(path, "", text).items() if k != "model"})


async def test_c14_what_cannot_be_kept_is_refused(row: Cluster) -> None:
    model = await model_of(row)
    kinds = dict(zip(PATHS, (GenerateRequest, CompletionRequest, ChatRequest), strict=True))
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    closed = {"name": "x", "schema": schema | {"additionalProperties": False}}
    tool = {"type": "function", "function": {"name": "f"}}
    for path in PATHS:
        body = smallest(path, model) | {"max_tokens": 6, "seed": 7}
        plain, _ = await both(row, path, body)

        async def said(path: str = path, body: dict[str, Any] = body, **fields: Any) -> list[Any]:
            return list((await both(row, path, body | fields))[0]["choices"])

        same = [
            {name: None for name in kinds[path].__struct_fields__ if name not in body},
            *({"top_k": top_k} for top_k in (-1, 0)),
            {"response_format": {"type": "text"}},
            {"a_field_nobody_knows": {"x": [1]}},
        ]
        for fields in same:
            assert await said(**fields) == plain["choices"], fields
        greedy = await said(temperature=0)
        assert await said(temperature=0, seed=8) == greedy != plain["choices"]
        bias = {"260": 100, "261": -100, "7": 0.5}
        assert await said(logit_bias=bias, temperature=0) != greedy
        await refused(row, path, body | {"logit_bias": bias | {"49152": 1}}, "logit_bias[3]")
        texts = [
            [said_by(one) for one in await said(max_tokens=60, temperature=0, response_format=how)]
            for how in (
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": closed},
            )
        ]
        assert texts[0][0].lstrip().startswith("{")
        assert json.loads(texts[1][0])["x"] in (1, 2)
        await refused(row, path, body | {"response_format": {"type": "xml"}}, "response_format.type")
        await refused(row, path, body | {"top_p": 0}, "top_p")
        await refused(row, path, body | {"tools": [tool], "tool_choice": "required"}, "tools")
        await refused(row, path, body | {"tool_choice": "required"}, "tool_choice")
        if path == CHAT:
            await refused(row, path, body | {"best_of": 2}, "best_of")
        else:
            assert len((await asked(row, path, body | {"best_of": 2}))["choices"]) == 1
            status, answer, _ = await post(row, path, body | {"best_of": 2, "stream": True})
            assert (status, answer["error"]["param"]) == (400, "best_of")


def said_by(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.slow
async def test_c12_the_limit_is_the_smallest_of_all(tiny_dir: Path) -> None:
    """The router's own, a decode worker's with a pool of 32 blocks, a prefill worker's with 16."""
    with running(tiny_dir, model__max_model_len=1000) as cluster, contextlib.ExitStack() as ending:
        started = {}
        for role, num_blocks in (("decode", 32), ("prefill", 16)):
            command = [
                sys.executable,
                "-m",
                "pagerelay.cli",
                role,
                "--model",
                str(tiny_dir),
                "--threads",
                "1",
            ]
            command += ["--router", cluster.launcher.workers_endpoint, "--num-blocks", str(num_blocks)]
            started[role] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            ending.callback(started[role].wait, 30)
            ending.callback(started[role].terminate)

        async def limit_is(context: int) -> None:
            async def is_so() -> bool:
                return bool((await cluster.get("/cluster"))["context_len"] == context)

            await cluster.until(f"the context is {context}", is_so, 60)
            for length in (context, context + 1):
                body = {"prompt": [5] * length}
                await refused(cluster, PATHS[0], body, "prompt", "context_length_exceeded", (context, length))
            answer = await cluster.generate([5] * (context - 1), 65_535)
            assert answer["usage"]["completion_tokens"] == 1
            assert answer["choices"][0]["finish_reason"] == "length"

        for leaving, context in (("prefill", 16 * 16), ("decode", 32 * 16), (None, 1000)):
            await limit_is(context)
            if leaving is not None:
                started[leaving].terminate()
        assert [process.wait(30) for process in started.values()] == [0, 0]
        await after(cluster)
