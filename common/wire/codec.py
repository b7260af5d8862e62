"""msgpack through msgspec: typed both ways, sizes checked before anything is allocated.

A control frame ends with the CRC-32 of what stands before it: a flipped bit must not become another token.
"""

from __future__ import annotations

import zlib
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

CRC_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return sealed(_encoder.encode(message))


def sealed(body: bytes) -> bytes:
    """A control frame with ``body`` in it."""
    return body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")


class Decoder(Generic[T]):
    """Decodes one link's union. Raises :class:`WireError` naming what is wrong; never guesses."""

    def __init__(self, union: Any, max_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._max_bytes = max_bytes

    def __call__(self, frame: bytes | memoryview) -> T:
        if len(frame) > self._max_bytes:
            raise WireError(f"a frame of {len(frame)} bytes is over the limit of {self._max_bytes}")
        body, seal = memoryview(frame)[:-CRC_BYTES], memoryview(frame)[-CRC_BYTES:]
        if zlib.crc32(body) != int.from_bytes(seal, "little") or len(seal) != CRC_BYTES:
            raise WireError("a damaged frame: its checksum is not that of its content")
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"undecodable frame: {error}") from error
