"""msgpack through msgspec: typed both ways, sizes checked before anything is allocated."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from pagerelay.common.errors import WireError
from pagerelay.common.wire.messages import Message

T = TypeVar("T")

MAX_CONTROL_BYTES = 16 * 1024 * 1024
"""Largest control frame: a job of a million token ids stays below it."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one link's union. Raises :class:`WireError` naming what is wrong; never guesses."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes | memoryview) -> T:
        if len(frame) > MAX_CONTROL_BYTES:
            raise WireError(f"control frame of {len(frame)} bytes is over the limit of {MAX_CONTROL_BYTES}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"undecodable frame: {error}") from error
