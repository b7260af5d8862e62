from __future__ import annotations

import pytest

from pagerelay.bench import sse
from pagerelay.bench.sse import SseParser, decode_event

STREAM = (
    ': hello\n\ndata: {"a": 1}\n\ndata:two\r\ndata: lines ä\r\n\r\nevent: x\rdata: three\r\rdata: [DONE]\n\n'
).encode()
EVENTS = [b'{"a": 1}', "two\nlines ä".encode(), b"three", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 1000])
def test_any_piece_size_gives_the_same_events(size: int) -> None:
    parser = SseParser()
    found = []
    for start in range(0, len(STREAM), size):
        found += parser.feed(STREAM[start : start + size])
    assert found == EVENTS


def test_an_open_event_is_not_returned() -> None:
    parser = SseParser()
    assert parser.feed(b"data: half\n") == []
    assert parser.feed(b"") == []
    assert parser.feed(b"\n") == [b"half"]


def test_a_carriage_return_at_the_end_of_a_piece_is_one_line_end_with_the_next_line_feed() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\ndata: b\r") == []
    assert parser.feed(b"\n\r\n") == [b"a\nb"]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="too long"):
        SseParser().feed(b"data: " + b"x" * 200)


@pytest.mark.parametrize(
    ("raw", "piece"),
    [
        (b'{"choices":[{"index":0,"text":"a","logprobs":null}],"id":"x"}', "a"),
        (b'{"choices":[{"delta":{"role":"assistant","content":"b"}}]}', "b"),
        (b'{"choices":[{"delta":{"reasoning_content":"c","content":null}}]}', "c"),
        (b'{"choices":[{"message":{"content":"d"}}]}', "d"),
        (b'{"choices":[{"delta":{}}]}', ""),
    ],
)
def test_the_text_of_every_shape_of_event(raw: bytes, piece: str) -> None:
    event = decode_event(raw)
    assert event.choices is not None
    assert event.choices[0].piece == piece
