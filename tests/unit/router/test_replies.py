from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from strict_sse import StrictStream

from pagerelay.common.errors import ApiError, InvalidRequest, Overloaded
from pagerelay.router.pieces import Piece
from pagerelay.router.replies import (
    ChatReply,
    CompletionReply,
    GenerateReply,
    Model,
    Reply,
    Timings,
    Usage,
    models_body,
    reply_for,
)
from pagerelay.router.sse import DONE, KEEPALIVE, error_event
from pagerelay.router.tool_calls import CallDelta
from pagerelay.router.validate import Kind, Limits, parse_request

USAGE = Usage.of(3, 6)
TIMINGS = Timings(queue_ms=0.5, prefill_ms=12.0, ttft_ms=13.0, total_ms=80.25)
USAGE_JSON = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


class Words:
    """A vocabulary of made-up words."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"w%d" % token_id


WORDS = Words()
REPLIES = (GenerateReply, CompletionReply, ChatReply)


def read(data: bytes) -> list[Any]:
    """Events, and what ends the stream."""
    checked = StrictStream()
    events: list[Any] = checked.feed(data)
    checked.close()
    return [*events, "[DONE]"] if checked.done else events


def stream(reply: Reply, num_choices: int = 2) -> list[Any]:
    data = reply.start(num_choices)
    data += reply.delta(Piece(0, "Hel", [1], None))
    data += reply.delta(Piece(1, "", [7], None))
    data += reply.delta(Piece(0, "lo", [2, 3], None))
    data += reply.delta(Piece(1, "x", [8], "length"))
    data += reply.delta(Piece(0, "", [2], "stop"))
    return read(data + reply.end(USAGE, TIMINGS))


def test_generate_stream() -> None:
    reply = GenerateReply("smol", WORDS)
    events = stream(reply)
    assert events.pop() == "[DONE]"
    assert [event["choices"][0] for event in events[:-1]] == [
        {"index": 0, "text": "Hel", "token_ids": [1], "finish_reason": None},
        {"index": 1, "text": "", "token_ids": [7], "finish_reason": None},
        {"index": 0, "text": "lo", "token_ids": [2, 3], "finish_reason": None},
        {"index": 1, "text": "x", "token_ids": [8], "finish_reason": "length"},
        {"index": 0, "text": "", "token_ids": [2], "finish_reason": "stop"},
    ]
    assert all(set(event) == {"id", "model", "choices"} for event in events[:-1])
    assert events[-1] == {
        "id": reply.id,
        "model": "smol",
        "choices": [],
        "usage": USAGE_JSON,
        "timings": {
            "queue_ms": 0.5,
            "prefill_ms": 12.0,
            "handover_ms": None,
            "handover_phases_ms": None,
            "ttft_ms": 13.0,
            "total_ms": 80.25,
            "recoveries": 0,
        },
    }


def test_generate_whole() -> None:
    body = json.loads(GenerateReply("smol", WORDS).whole([Piece(0, "Hello", [1, 2], "stop")], USAGE, TIMINGS))
    assert list(body) == ["id", "model", "choices", "usage", "timings"]
    assert body["id"].startswith("gen-")
    assert body["choices"] == [{"index": 0, "text": "Hello", "token_ids": [1, 2], "finish_reason": "stop"}]


def test_completion_stream() -> None:
    reply = CompletionReply("smol", WORDS)
    events = stream(reply)
    assert events.pop() == "[DONE]"
    for chunk in events:
        assert {**chunk, "choices": None} == {
            "id": reply.id,
            "object": "text_completion",
            "created": reply.created,
            "model": "smol",
            "choices": None,
        }
    assert [chunk["choices"] for chunk in events] == [
        [{"index": 0, "text": "Hel", "finish_reason": None, "logprobs": None}],
        [{"index": 0, "text": "lo", "finish_reason": None, "logprobs": None}],
        [{"index": 1, "text": "x", "finish_reason": "length", "logprobs": None}],
        [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}],
    ]


def test_chat_stream() -> None:
    reply = ChatReply("smol", WORDS)
    events = stream(reply)
    assert events.pop() == "[DONE]"
    assert {chunk["object"] for chunk in events} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in events)

    def choice(index: int, delta: dict[str, str], reason: str | None = None) -> list[dict[str, Any]]:
        return [{"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}]

    assert [chunk["choices"] for chunk in events] == [
        choice(0, {"role": "assistant", "content": ""}),
        choice(1, {"role": "assistant", "content": ""}),
        choice(0, {"content": "Hel"}),
        choice(0, {"content": "lo"}),
        choice(1, {"content": "x"}),
        choice(1, {}, "length"),
        choice(0, {}, "stop"),
    ]


CALLS = [
    [CallDelta(0, "", "call_1", "add"), CallDelta(0, '{"a"')],
    [CallDelta(0, ": 1}"), CallDelta(1, "", "call_2", "now"), CallDelta(1, "{}")],
]


def test_chat_with_calls() -> None:
    reply = ChatReply("smol", WORDS)
    pieces = [
        Piece(0, "So", [1], None, calls=CALLS[0]),
        Piece(0, "", [2], None, calls=CALLS[1]),
        Piece(0, "", [3], "stop"),
        Piece(1, "no call", [4], "stop"),
    ]
    events = read(reply.start(2) + b"".join(map(reply.delta, pieces)) + reply.end(USAGE, TIMINGS))
    assert events.pop() == "[DONE]"
    deltas = [(one["choices"][0]["delta"], one["choices"][0]["finish_reason"]) for one in events[2:]]
    add = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}
    now = {"index": 1, "id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}}
    assert deltas == [
        ({"content": "So"}, None),
        ({"tool_calls": [add, {"index": 0, "function": {"arguments": '{"a"'}}]}, None),
        (
            {
                "tool_calls": [
                    {"index": 0, "function": {"arguments": ": 1}"}},
                    now,
                    {"index": 1, "function": {"arguments": "{}"}},
                ]
            },
            None,
        ),
        ({}, "tool_calls"),
        ({"content": "no call"}, None),
        ({}, "stop"),
    ]


@pytest.mark.parametrize(("reason", "shown"), [("stop", "tool_calls"), ("length", "length")])
def test_whole_chat_with_calls(reason: Any, shown: str) -> None:
    outputs = [Piece(0, "", [1], reason, calls=[*CALLS[0], *CALLS[1]]), Piece(1, "", [2], reason)]
    first, second = json.loads(ChatReply("smol", WORDS).whole(outputs, USAGE, TIMINGS))["choices"]
    assert first == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        "finish_reason": shown,
        "logprobs": None,
    }
    assert second["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert second["finish_reason"] == reason


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
def test_usage_comes_once(kind: type[Reply]) -> None:
    events = stream(kind("smol", WORDS, include_usage=True))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert (last["choices"], last["usage"]) == ([], USAGE_JSON)
    assert events
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in events)


def test_openai_whole() -> None:
    outputs = [Piece(0, "Hello", [1, 2], "stop"), Piece(1, "x", [3], "length")]
    text = json.loads(CompletionReply("smol", WORDS, include_usage=True).whole(outputs, USAGE, TIMINGS))
    assert list(text) == ["id", "object", "created", "model", "choices", "usage"]
    assert text["object"] == "text_completion"
    assert text["usage"] == USAGE_JSON
    assert text["choices"][1] == {"index": 1, "text": "x", "finish_reason": "length", "logprobs": None}
    chat = json.loads(ChatReply("smol", WORDS).whole(outputs, USAGE, TIMINGS))
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None},
        "finish_reason": "stop",
        "logprobs": None,
    }


def test_shapes_satisfy_the_official_client() -> None:
    types = pytest.importorskip("openai.types")
    chat_types = pytest.importorskip("openai.types.chat")
    outputs = [Piece(0, "Hello", [1, 2], "stop")]
    types.Completion.model_validate_json(
        CompletionReply("m", WORDS).whole(outputs, USAGE, TIMINGS), strict=True
    )
    chat_types.ChatCompletion.model_validate_json(
        ChatReply("m", WORDS).whole(outputs, USAGE, TIMINGS), strict=True
    )
    called = [Piece(0, "", [1, 2], "stop", calls=[*CALLS[0], *CALLS[1]])]
    chat_types.ChatCompletion.model_validate_json(
        ChatReply("m", WORDS).whole(called, USAGE, TIMINGS), strict=True
    )
    chunks = stream(ChatReply("m", WORDS, include_usage=True))[:-1]
    reply = ChatReply("m", WORDS)
    called = reply.start(1)
    for calls in CALLS:
        called += reply.delta(Piece(0, "", [1], None, calls=calls))
    called += reply.delta(Piece(0, "", [2], "stop")) + reply.end(USAGE, TIMINGS)
    chunks += read(called)[:-1]
    for chunk in chunks:
        chat_types.ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)


@pytest.mark.parametrize(
    ("kind", "body", "prefix"),
    [
        ("generate", '{"prompt":"x"}', "gen-"),
        ("completions", '{"model":"smol","prompt":"x"}', "cmpl-"),
        ("chat", '{"model":"smol","messages":[{"role":"user","content":"x"}]}', "chatcmpl-"),
    ],
)
def test_reply_for(kind: Kind, body: str, prefix: str) -> None:
    limits = Limits(served_name="smol", vocab_size=9, context_len=99, max_choices=9)
    parsed = parse_request(kind, body.encode(), limits)
    first, second = reply_for(parsed, WORDS), reply_for(parsed, WORDS)
    assert first.id.startswith(prefix)
    assert first.id != second.id
    assert first.model == "smol"


def test_errors_have_one_shape() -> None:
    for error in (InvalidRequest("no", param="n"), Overloaded("full", retry_after_s=1), ApiError("ouch")):
        (shown,) = read(error_event(error))
        assert shown == json.loads(msgspec.json.encode(error.body()))
        assert set(shown["error"]) == {"message", "type", "param", "code"}


def test_text_never_breaks_a_line() -> None:
    text = 'a\nb\r\nc\u2028d\u2029e\u0085f\x0bg\x1ch\x00i 🦜 \\ " é'
    (shown,) = StrictStream().feed(CompletionReply("smol", WORDS).delta(Piece(0, text, [1], None)))
    assert shown["choices"][0]["text"] == text


def test_constants() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert KEEPALIVE.startswith(b":")
    assert KEEPALIVE.endswith(b"\n\n")


def test_models() -> None:
    body = json.loads(models_body(Model("smol", 5, 8192)))
    assert body == {
        "object": "list",
        "data": [
            {"id": "smol", "object": "model", "created": 5, "owned_by": "pagerelay", "max_model_len": 8192}
        ],
    }


@pytest.mark.parametrize("kind", REPLIES)
def test_cheap(kind: type[Reply]) -> None:
    """The hot path: far more than 20,000 tokens/s a core."""
    reply = kind("smol", WORDS, include_usage=True)
    began = time.thread_time()
    for _ in range(20_000):
        reply.delta(Piece(0, " token", [5], None))
    assert time.thread_time() - began < 1
