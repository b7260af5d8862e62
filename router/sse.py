"""Bytes of every answer: JSON bodies, and server-sent events, all of which are made by :func:`event`.

An event is ``data: `` + one line of JSON + a blank line. A stream that ends well closes with ``data:
[DONE]``; one that ends with an error closes with an error event alone, so that only a real finish has a
finish reason and usage.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pagerelay.common.errors import ApiError

DONE: Final = b"data: [DONE]\n\n"
KEEPALIVE: Final = b": keep-alive\n\n"
HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_encode = msgspec.json.Encoder().encode

# Legal inside a line of JSON, but taken as line ends by readers that split text instead of bytes.
_LINE_ENDS: Final = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\u0085".encode(), b"\\u0085"),
)


def json_body(payload: Any) -> bytes:
    """Strict JSON: no NaN, no raw control characters, UTF-8."""
    return _encode(payload)


def event(payload: Any) -> bytes:
    """One server-sent event."""
    line = _encode(payload)
    for raw, escaped in _LINE_ENDS:
        if raw in line:
            line = line.replace(raw, escaped)
    return b"data: " + line + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed after it had begun."""
    return event(error.body())
