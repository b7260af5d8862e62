"""The reader that every stream of the tests passes: what it lets through, and what it must not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from strict_sse import StrictStream, check_stream

from pagerelay.bench.sse import SseParser, decode_event

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def sent(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    shown = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    return shown | more


def delta(index: int = 0, reason: str | None = None, **fields: str) -> dict[str, Any]:
    return {"index": index, "delta": fields, "finish_reason": reason, "logprobs": None}


ROLE, TEXT, END = (
    chunk(delta(role="assistant", content="")),
    chunk(delta(content="a")),
    chunk(delta(reason="stop")),
)
GOOD = sent(ROLE, TEXT) + b": keep-alive\n\n" + sent(END) + DONE


def text(index: int, ids: list[int], reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "text": "x" * len(ids), "token_ids": ids, "finish_reason": reason}
    return {"id": "g", "model": "m", "choices": [choice]} | more


def test_a_good_stream_in_any_pieces() -> None:
    """Also a test of bench's reader, which knows every dialect: it hears the same."""
    rng = random.Random(1)
    for _ in range(50):
        strict, lenient, heard = (
            StrictStream("/v1/chat/completions", {"messages": [], "n": 1}),
            SseParser(),
            [],
        )
        at = 0
        while at < len(GOOD):
            piece = GOOD[at : at + rng.randint(1, 60)]
            at += len(piece)
            strict.feed(piece)
            heard += lenient.feed(piece)
        strict.close()
        assert strict.texts == {0: "a"}
        assert strict.finish == {0: "stop"}
        assert strict.num_comments == 1
        assert heard[-1] == b"[DONE]"
        said = [choice.piece for event in map(decode_event, heard[:-1]) for choice in event.choices or ()]
        assert "".join(said) == strict.texts[0]


def test_generate_and_usage() -> None:
    last = {"id": "g", "model": "m", "choices": [], "usage": USAGE, "timings": {"recoveries": 0}}
    stream = check_stream(
        sent(text(0, [4]), text(0, [5], "length"), last) + DONE, "/generate", {"prompt": "a"}
    )
    assert stream.token_ids == {0: [4, 5]}
    assert stream.usage == USAGE
    whole = {"choices": [{"index": 0, "text": "xx", "token_ids": [4, 5], "finish_reason": "length"}]}
    stream.assert_same_as(whole | {"usage": USAGE})
    with pytest.raises(AssertionError):
        stream.assert_same_as(whole | {"usage": USAGE | {"total_tokens": 6}})


def test_an_error_ends_a_stream() -> None:
    error = {"error": {"message": "lost", "type": "server_error", "param": None, "code": "worker_lost"}}
    stream = check_stream(sent(ROLE, TEXT, error))
    assert stream.error == error["error"]
    assert not stream.done
    with pytest.raises(AssertionError, match="after the end"):
        check_stream(sent(ROLE, error) + DONE)


WITH_USAGE = [chunk(*c["choices"], usage=None) for c in (ROLE, TEXT, END)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ended without"),
        (GOOD.removesuffix(DONE), "ended without"),
        (GOOD[:-1], "half an event"),
        (GOOD + b"\n", "after the end"),
        (GOOD + DONE, "after the end"),
        (GOOD.replace(b"keep-alive", b"hello"), "hello"),
        (GOOD.replace(b"data: ", b"data:"), "data:"),
        (GOOD.replace(b"\n\n", b"\r\n\r\n"), "half an event"),
        (GOOD.replace(b"\n\n", b"\n") + b"\n", "more than one line"),
        (b"event: x\n" + GOOD, "event: x"),
        (GOOD.replace(b'"a"', "\u2028".join('""').encode()), "more than one line"),
        (GOOD.replace(b'"a"', b'"\xff"'), "utf-8"),
        (GOOD.replace(b'"created": 1', b'"created": NaN'), "NaN"),
        (GOOD.replace(b'"created": 1', b'"created": 1, "created": 1'), "twice"),
        (sent(TEXT, END) + DONE, "role"),
        (sent(ROLE, ROLE, END) + DONE, "role"),
        (sent(ROLE, TEXT) + DONE, "choices ended"),
        (sent(ROLE, END, TEXT) + DONE, "after its end"),
        (sent(ROLE, END, END) + DONE, "after its end"),
        (sent(ROLE, TEXT | {"id": "d"}, END) + DONE, "after"),
        (sent(ROLE, TEXT | {"created": 2}, END) + DONE, "after"),
        (sent(ROLE, TEXT | {"model": "n"}, END) + DONE, "after"),
        (sent(ROLE, TEXT | {"secret": 1}, END) + DONE, "secret"),
        (sent(ROLE, TEXT | {"choices": "a"}, END) + DONE, "array"),
        (sent(ROLE, chunk(), END) + DONE, "neither"),
        (sent(chunk(delta(1, role="assistant")), chunk(delta(1, "stop"))) + DONE, "choices"),
        (sent(ROLE, TEXT, END, chunk(usage=USAGE)) + DONE, "usage"),
        (sent(*WITH_USAGE) + DONE, "usage"),
        (sent(*WITH_USAGE, chunk(usage=USAGE), chunk(usage=USAGE)) + DONE, "after the usage"),
        (sent(*WITH_USAGE[:2], chunk(*END["choices"], usage=USAGE)) + DONE, "choices"),
        (sent(text(0, [1]), text(0, [2], "stop")) + DONE, "usage"),
        (DONE, "without anything"),
    ],
    ids=range(32),
)
def test_what_is_no_stream(data: bytes, why: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=why):
        check_stream(data)


@pytest.mark.parametrize(
    ("path", "request_", "why"),
    [
        ("/generate", None, "was asked"),
        ("/v1/chat/completions", {"messages": [], "n": 2}, "1 choices of 2"),
        ("/v1/chat/completions", {"messages": [], "stream_options": {"include_usage": True}}, "usage asked"),
    ],
)
def test_what_was_not_asked(path: str, request_: dict[str, Any] | None, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check_stream(GOOD, path, request_)
