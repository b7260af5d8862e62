"""A running cluster as clients see it: answers, streams, errors, and what a client that leaves costs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, joined, post, sse

PROMPT = "The licence says that"


async def test_generate_shape(split: Cluster) -> None:
    answer = await split.generate(PROMPT, 5)
    choice = answer["choices"][0]
    assert set(answer) == {"id", "model", "choices", "usage", "timings"}
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 5
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert answer["timings"]["ttft_ms"] > 0
    assert answer["timings"]["handover_ms"] is not None
    assert set(answer["timings"]["handover_phases_ms"]) == {
        "reserve",
        "announce",
        "copy",
        "confirm",
        "first_step",
    }


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17])
async def test_exactly_as_many_tokens_as_asked(split: Cluster, count: int) -> None:
    whole = (await split.generate(PROMPT, count, seed=7, temperature=1))["choices"][0]
    ids, text, reason = joined([event async for event in split.stream(PROMPT, count, seed=7, temperature=1)])
    assert ids == whole["token_ids"]
    assert len(ids) == count
    assert text == whole["text"]
    assert reason == whole["finish_reason"] == "length"


async def test_one_token_needs_no_decode_worker(split: Cluster) -> None:
    await asyncio.sleep(1.2)  # the workers' counters come with their heartbeats
    before = [
        await split.metric("pagerelay_handover_bytes_total"),
        await split.metric("pagerelay_fetched_blocks_total"),
    ]
    await split.generate(PROMPT, 1)
    await asyncio.sleep(1.2)
    after = [
        await split.metric("pagerelay_handover_bytes_total"),
        await split.metric("pagerelay_fetched_blocks_total"),
    ]
    assert before == after


async def test_choices_and_prompts_keep_their_order(split: Cluster) -> None:
    prompts = [[5, 6, 7], [900] * 17, [30, 40]]
    alone = [await split.ids(prompt, 4) for prompt in prompts]
    answer = await split.generate(prompts, 4, n=2)
    got = [choice["token_ids"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert got == [ids for ids in alone for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == 22


async def test_n_gives_different_choices_and_the_same_ones_again(split: Cluster) -> None:
    first, second = [
        [c["token_ids"] for c in (await split.generate(PROMPT, 12, n=4, seed=7, temperature=1))["choices"]]
        for _ in range(2)
    ]
    assert first == second
    assert len({tuple(ids) for ids in first}) > 1


async def test_stop_strings_never_leak(split: Cluster) -> None:
    whole = (await split.generate(PROMPT, 24))["choices"][0]["text"]
    stop = whole[9:14]
    cut = whole[: whole.index(stop)]
    answer = await split.generate(PROMPT, 24, stop=[stop])
    events = [event async for event in split.stream(PROMPT, 24, stop=[stop])]
    _, text, reason = joined(events)
    assert answer["choices"][0]["text"] == text == cut
    assert answer["choices"][0]["finish_reason"] == reason == "stop"
    await split.idle()


async def test_stop_token_ids_and_min_tokens(split: Cluster) -> None:
    ids = await split.ids(PROMPT, 12)
    answer = (await split.generate(PROMPT, 12, stop_token_ids=[ids[0]]))["choices"][0]
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == (ids[:1], "", "stop")
    later = (await split.generate(PROMPT, 12, stop_token_ids=[ids[0]], min_tokens=3))["choices"][0]
    assert len(later["token_ids"]) >= 3
    assert ids[0] not in later["token_ids"][:2]


async def test_openai_endpoints(split: Cluster) -> None:
    model = (await split.get("/v1/models"))["data"][0]["id"]
    status, answer, _ = await post(
        split, "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    )
    assert (status, answer["object"], answer["usage"]["completion_tokens"]) == (200, "text_completion", 3)
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0,
    }
    status, answer, _ = await post(split, "/v1/chat/completions", chat)
    assert (status, answer["object"]) == (200, "chat.completion")
    body = chat | {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(split.url + "/v1/chat/completions", json=body) as response,
    ):
        events = [event async for event in sse(response, body)]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    text = "".join(c["delta"].get("content", "") for event in events for c in event["choices"])
    assert text == answer["choices"][0]["message"]["content"]


async def test_official_client(split: Cluster) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(
        base_url=split.url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        model = (await client.models.list()).data[0].id
        messages = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=4, temperature=0
        )
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=4, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError) as refused:
            await client.completions.create(model="other", prompt="hi")
        assert refused.value.code == "model_not_found"


# ---------------------------------------------------------------- what cannot be

BAD = [
    (b"", 400, None),
    (b"[]", 400, None),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    (b'{"prompt": "a", "top_p": -Infinity}', 400, "top_p"),
    (b'{"prompt": "a", "min_p": 1.5}', 400, "min_p"),
    (b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
    (b'{"prompt": "a", "max_tokens": true}', 400, "max_tokens"),
    (b'{"prompt": "a", "max_tokens": "5"}', 400, "max_tokens"),
    (b'{"prompt": "a", "n": 1000000}', 400, "n"),
    (b'{"prompt": ""}', 400, "prompt"),
    (b'{"prompt": ["hi", ""]}', 400, "prompt[1]"),
    (b'{"prompt": []}', 400, "prompt"),
    (b'{"prompt": null}', 400, "prompt"),
    (b"{}", 400, "prompt"),
    (b'{"prompt": [49152]}', 400, "prompt[0]"),
    (b'{"prompt": [-1]}', 400, None),
    (b'{"prompt": "\\ud83d"}', 400, None),
    (b'{"prompt": "\xff"}', 400, None),
    (b'{"prompt": "a", "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, None),
    (b'{"prompt": "a", "logprobs": 21}', 400, "logprobs"),
    (b'{"prompt": "a", "stop": ""}', 400, "stop"),
    (b'{"prompt": "a", "stream_options": []}', 400, "stream_options"),
    (b'{"prompt": "a", "min_tokens": 9, "max_tokens": 5}', 400, "min_tokens"),
    (b'{"prompt": "a", "model": "../../etc/passwd"}', 404, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=lambda v: str(v)[:40])
async def test_bad_requests_are_told_why(
    split: Cluster, body: bytes, status: int, param: str | None, stream: bool
) -> None:
    if stream and body.startswith(b"{") and len(body) > 2:
        body = b'{"stream": true, ' + body[1:]
    got, answer, headers = await post(split, "/generate", body)
    assert got == status
    assert headers["Content-Type"].startswith("application/json")
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert "Error" not in answer["error"]["message"]
    if param is not None:
        assert answer["error"]["param"] == param


async def test_prompt_too_long_and_cap_too_big(split: Cluster) -> None:
    context = (await split.get("/cluster"))["context_len"]
    for length in (context, context + 1, 300_000):
        status, answer, _ = await post(split, "/generate", {"prompt": [5] * length, "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert str(context) in answer["error"]["message"]
    answer = await split.generate([5] * (context - 2), 65_535)
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000, 431, "header_too_large"),
        (b"GET /livez?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x", 431, "header_too_large"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nno colon", 400, "malformed_http"),
        (b"\x16\x03\x01\x02\x00 not http at all", 400, "malformed_http"),
    ],
    ids=["header", "line", "colon", "rubbish"],
)
async def test_what_is_not_http_is_refused_in_the_shape_of_all_errors(
    split: Cluster, head: bytes, status: int, code: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(split.url.rpartition(":")[2]))
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()  # to the end: the connection is closed
    writer.close()
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.startswith((b"HTTP/1.1 %d " % status, b"HTTP/1.0 %d " % status)), top
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")


async def test_large_and_odd_bodies(split: Cluster) -> None:
    big = json.dumps({"prompt": "a" * 5_000_000}).encode()
    status, answer, _ = await post(split, "/generate", big)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer, _ = await post(split, "/generate", b" " * (17 * 1024 * 1024))
    assert status == 413
    assert answer["error"]["type"] == "invalid_request_error"
    status, answer, _ = await post(split, "/generate", b"x", headers={"Content-Encoding": "gzip"})
    assert status == 415
    status, answer, _ = await post(split, "/nowhere", {})
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer, _ = await post(split, "/v1/embeddings", {})
    assert (status, answer["error"]["code"]) == (404, "unsupported_endpoint")
    assert (await split.generate(PROMPT, 2))["usage"]["completion_tokens"] == 2


# ---------------------------------------------------------------- clients that leave


async def test_a_client_that_leaves_frees_everything(split: Cluster) -> None:
    """Streaming and not, at any moment; within 2 s nothing of it is left on P or D."""

    async def leave(index: int) -> None:
        body = {"prompt": [index + 3] * 40, "max_tokens": 400, "ignore_eos": True, "n": 1 + index % 3}
        timeout = aiohttp.ClientTimeout(total=0.05 + 0.1 * index)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            with pytest.raises((TimeoutError, aiohttp.ClientError)):
                await read_all(session, body | {"stream": index % 2 == 0})

    async def read_all(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(split.url + "/generate", json=body) as response:
            await response.read()

    await asyncio.gather(*(leave(index) for index in range(12)))
    await split.idle(2.0)
    aborted = await split.metric("pagerelay_requests_total", outcome="aborted")
    assert aborted >= 12
    assert (await split.generate(PROMPT, 2))["usage"]["completion_tokens"] == 2


async def test_series_do_not_grow_with_what_clients_invent(split: Cluster) -> None:
    async def series() -> int:
        return len((await split.get("/metrics")).splitlines())

    await post(split, "/generate", {"prompt": "a", "model": "none"})
    await post(split, "/none", {})
    before = await series()
    for index in range(20):
        await post(split, "/generate", {"prompt": "a", "model": f"model-{index}"})
        await post(split, f"/path-{index}", {})
    assert await series() == before


async def test_ready_live_and_cluster(split: Cluster) -> None:
    assert await split.get("/livez") == {"status": "live"}
    assert await split.get("/readyz") == {"status": "ready"}
    await split.idle()  # heartbeats may still tell of the request before
    for worker in await split.workers():
        assert worker["state"] == "ready"
        blocks = worker["load"]["blocks"]
        assert blocks["free"] + blocks["held"] + blocks["leased"] + blocks["cached"] == blocks["total"]
        assert blocks["by_sequence"] == blocks["by_fetch"] == blocks["by_lease"] == 0
        assert await split.metric("pagerelay_block_holders", worker=worker["id"], kind="prefix") == float(
            blocks["by_prefix"]
        )
    assert await split.metric("pagerelay_ledger_faults_total") == 0


async def test_chat_takes_text_in_parts(split: Cluster) -> None:
    """C11, C14, C20: parts are one text, what is not supported is named, a turn can be continued."""

    model = (await split.get("/v1/models"))["data"][0]["id"]
    image = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}]

    async def chat(content: Any, **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0} | fields
        status, answer, _ = await post(split, "/v1/chat/completions", body)
        return status, answer

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (status, one), (_, other) = await chat("a\nb"), await chat(parts)
    assert status == 200
    assert (one["usage"], one["choices"]) == (other["usage"], other["choices"])
    tool = {"type": "function", "function": {"name": "f"}}
    refused = {
        "tools": {"tools": [tool]},
        "tool_choice": {"tool_choice": "required"},
        "messages[1].content[0].type": {"messages": image},
    }
    for param, fields in refused.items():
        status, answer = await chat("x", **fields)
        assert (status, answer["error"]["param"]) == (400, param)
    turns = {"system": "s", "user": "a", "assistant": "The answer"}
    begun = [{"role": role, "content": said} for role, said in turns.items()]
    status, answer = await chat("", messages=begun, continue_final_message=True)
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns.items())
    raw = await split.generate(text.removesuffix("<|im_end|>\n"), 4, temperature=0)
    assert status == 200
    assert answer["usage"] == raw["usage"]
    assert answer["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
