"""msgpack through msgspec: typed both ways, sizes checked before anything is allocated."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from pagerelay.common.errors import WireError
from pagerelay.common.wire.messages import Message

T = TypeVar("T")

MAX_CONTROL_BYTES = 16 * 1024 * 1024
"""Largest frame from a router to a worker: a job of a million token ids stays below it."""
MAX_NEWS_BYTES = 1024 * 1024
"""Largest frame from a worker to a router: tokens of a whole batch are far below it."""
MAX_DATA_REQUEST_BYTES = 256 * 1024
"""Largest frame of a worker that fetches: block ids of a long prompt at most."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one link's union. Raises :class:`WireError` naming what is wrong; never guesses."""

    def __init__(self, union: Any, max_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._max_bytes = max_bytes

    def __call__(self, frame: bytes | memoryview) -> T:
        if len(frame) > self._max_bytes:
            raise WireError(f"a frame of {len(frame)} bytes is over the limit of {self._max_bytes}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"undecodable frame: {error}") from error
