"""Token ids → text, one token at a time. One detokenizer per choice.

The joined pieces equal the one-shot decode of all ids, and where they continue a prompt what the decode of
both has more than that of the prompt. Two ways, by the tokenizer's decoder:

* byte-level BPE (:class:`ByteDetokenizer`): every id is a string of bytes, and UTF-8 is decoded as they come.
  A piece never ends inside a character; bytes that are no UTF-8 become U+FFFD as soon as that is certain.
* any other (:class:`WindowDetokenizer`): decodes a short window of the last ids with and without the new ones
  and sends the difference (the prefix-offset method of vLLM and TGI). Single-byte tokens (byte fallback) wait
  until they make a character, at most ``PATIENCE`` of them. Where an output is broken UTF-8 in such tokens,
  and only there, the pieces can differ from the one-shot decode, which depends on the tokens yet to come.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Final

PATIENCE: Final = 4
"""Bytes of the longest UTF-8 character."""
TAIL: Final = 4
"""Tokens of a prompt that its answer is decoded after."""
STRANGE: Final = "\N{REPLACEMENT CHARACTER}"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself where it prints, else a character from U+0100 up."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in prints}
    others = [byte for byte in range(256) if byte not in set(prints)]
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with a character outside that alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class Detokenizer(ABC):
    """Incremental decoder of one output; linear in its length."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that this token completes, often all of it, sometimes ``""``."""

    @abstractmethod
    def flush(self) -> str:
        """What is still held, at the end of the output: an unfinished character becomes U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """``table[id]`` are the bytes of a token; ids in ``skip`` and ids outside the table are passed over."""

    def __init__(self, table: Sequence[bytes], skip: Collection[int] = ()) -> None:
        self._table = table
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip or not 0 <= token_id < len(self._table):
            return ""
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """``decode`` is the tokenizer's own one-shot decode, ``byte_ids`` are its single-byte tokens; the text
    goes on from the ids ``after``, unless these end within a character.

    Holds the ids of the last piece sent and those after it.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skip: Collection[int] = (),
        byte_ids: Collection[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._byte_ids = byte_ids
        self._sent = [] if not after or after[-1] in byte_ids else list(after[-TAIL:])
        self._pending: list[int] = []
        self._sent_text = self._decode(self._sent) if self._sent else ""
        self._bytes_waiting = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._sent + self._pending)
        if token_id in self._byte_ids:
            self._bytes_waiting += 1
            marks = len(text) - max(len(text.rstrip(STRANGE)), len(self._sent_text))
            # Bytes of an unfinished character are a mark each; fewer marks are a real U+FFFD.
            if self._bytes_waiting <= marks and self._bytes_waiting < PATIENCE:
                return ""
        if len(text) <= len(self._sent_text) and len(self._pending) < 4 * PATIENCE:
            return ""  # a token without text of its own, such as the first blank
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._sent + self._pending)) if self._pending else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._sent_text) :]
        self._sent, self._pending, self._bytes_waiting = self._pending, [], 0
        self._sent_text = self._decode(self._sent)
        return new
