"""Server-sent events, and the part of OpenAI's stream objects that measuring needs."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

MAX_EVENT_BYTES = 16 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")


class SseParser:
    """Bytes in, the ``data`` of finished events out, whatever the boundaries of the pieces.

    Knows all three line ends, events of several ``data`` lines (joined by a newline), comments, and fields it
    has no use for. An event that is not closed by an empty line is never returned, as the standard wants it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Raises ``ValueError`` for a line or event over :data:`MAX_EVENT_BYTES`."""
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        if not piece:
            return []
        text = self._rest + piece
        self._after_cr = text.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(text)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("a line of the event stream is too long")
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                if len(self._data) > 1 and sum(map(len, self._data)) > MAX_EVENT_BYTES:
                    raise ValueError("an event of the stream is too long")
        return events


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(Struct):
    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        """The text that this event adds, of either API."""
        if self.text:
            return self.text
        part = self.delta or self.message
        return (part.content or part.reasoning_content or "") if part else ""


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Event(Struct):
    """One stream object (or a whole answer) of the chat or the completions API; other fields are ignored."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(Event).decode
