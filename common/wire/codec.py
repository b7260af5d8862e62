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
"""Largest control frame: a job of a million token ids stays below it."""

CRC_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return sealed(_encoder.encode(message))


def sealed(body: bytes) -> bytes:
    """A control frame with ``body`` in it."""
    return body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")


class Decoder(Generic[T]):
    """Decodes one link's union. Raises :class:`WireError` naming what is wrong; never guesses."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes | memoryview) -> T:
        if len(frame) > MAX_CONTROL_BYTES:
            raise WireError(f"control frame of {len(frame)} bytes is over the limit of {MAX_CONTROL_BYTES}")
        body, seal = memoryview(frame)[:-CRC_BYTES], memoryview(frame)[-CRC_BYTES:]
        if zlib.crc32(body) != int.from_bytes(seal, "little") or len(seal) != CRC_BYTES:
            raise WireError("a damaged frame: its checksum is not that of its content")
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"undecodable frame: {error}") from error
