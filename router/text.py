"""Text → token ids, with the `tokenizers` library alone: the router never imports torch or transformers.

Ids are those of transformers' ``AutoTokenizer`` for the same folder: a prompt gets the special tokens that
the post-processor of ``tokenizer.json`` adds (``add_bos_token`` beside it counts for nothing, there as here),
a chat gets only those of its template.

**What a user types never becomes a control token of a chat.** Where a message spells one out
(``<|im_end|>``), that text is encoded as ordinary characters; every chat without such text has exactly the
reference's ids. Text prompts of ``/generate`` and ``/v1/completions`` are raw model input, and there control
tokens keep their meaning.

Encoding releases the interpreter lock and costs at most about 1 µs a byte, so it belongs into a thread. Text
that cannot fit the context is refused before it is encoded, see :meth:`Tokenizer.max_text_bytes`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagerelay.common.errors import ContextLengthExceeded, InvalidRequest, StartupError
from pagerelay.router.chat_template import ChatAbilities, ChatTemplate, Message
from pagerelay.router.control_tokens import ControlTokens, encode_ids, restore
from pagerelay.router.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, token_bytes

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time; no pool of threads per process

_BLANK = "\u2581".encode()
"""SentencePiece's stand-in of a blank."""
_SINGLE_BYTE = re.compile("<0x[0-9A-F]{2}>")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Tokenizer and chat template of one model folder. Never changes once loaded; threads may share it."""

    def __init__(self, definition: str, settings: dict[str, Any], folder: Path) -> None:
        self._definition: dict[str, Any] = json.loads(definition)
        self._encoder = tokenizers.Tokenizer.from_str(definition)
        self._encoder.no_truncation()
        self._encoder.no_padding()
        named = {name: _token_text(settings[name]) for name in NAMED_TOKENS if settings.get(name)}
        known = {token.content for token in self._encoder.get_added_tokens_decoder().values()}
        self._encoder.add_special_tokens(
            [text for text in dict.fromkeys(named.values()) if text not in known]
        )
        added = self._encoder.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.whole_tokens = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        """Tokens that are no text to a grammar: llguidance takes any ``<…>`` that was added for one."""
        vocabulary = self._encoder.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the largest id of the tokenizer; the model's own number may be larger."""
        self._byte_level = _is_byte_level(self._definition.get("decoder"))
        self._token_bytes = [b""] * self.vocab_size
        for token, token_id in vocabulary.items():
            self._token_bytes[token_id] = token_bytes(token) if self._byte_level else token.encode("utf-8")
        self._byte_ids = frozenset(
            token_id for token, token_id in vocabulary.items() if _SINGLE_BYTE.fullmatch(token)
        )
        self._longest = self._bytes_a_token(added)
        self._control = ControlTokens(self._definition, added)
        self.template = ChatTemplate.load(folder, settings, named)
        self.abilities = ChatAbilities() if self.template is None else self.template.abilities

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads the tokenizer's files and the chat template. Raises :class:`StartupError`."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(
                f"model folder {folder}: no tokenizer.json; make one with "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)` of transformers"
            )
        optional = folder / "tokenizer_config.json"
        try:
            settings = json.loads(optional.read_text(encoding="utf-8")) if optional.is_file() else {}
            if not isinstance(settings, dict):
                raise StartupError(f"{optional}: the top level must be an object")
            return cls(path.read_text(encoding="utf-8"), settings, folder)
        except StartupError:
            raise
        except Exception as error:  # all that the tokenizers library raises is a bare Exception
            raise StartupError(f"model folder {folder}: unusable tokenizer files: {error}") from error

    # -------------------------------------------------------------------------------------------- encoding

    def encode(
        self,
        text: str,
        context_len: int | None = None,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[int]:
        """Ids of a prompt text; with ``context_len``, :class:`ContextLengthExceeded` where it cannot fit."""
        self._check_length(text, context_len, param)
        return encode_ids(self._encoder, text, add_special_tokens)

    def encode_chat(
        self,
        messages: list[Message],
        context_len: int | None = None,
        variables: dict[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer; ``variables`` are the template's others,
        with ``continue_final`` the answer continues the last message."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        given: list[Any] = [messages, variables or {}]
        if self._control.spelled_in(given):
            given, hidden = self._control.hide(given)
            text = self.template.render(given[0], given[1], continue_final)
            self._check_length(restore(text, hidden), context_len, "messages")
            return self._control.encode(text, hidden)
        text = self.template.render(given[0], given[1], continue_final)
        self._check_length(text, context_len, "messages")
        return encode_ids(self._encoder, text, add_special_tokens=False)

    def max_text_bytes(self, max_tokens: int) -> int:
        """A text of more UTF-8 bytes than this has more than ``max_tokens`` tokens.

        Exact for byte-level BPE; with a normalizer or blank-eating special tokens, which make text shorter
        before it is encoded, four times that. Encoding what is allowed takes seconds at the very most
        (measured: 1 µs a byte in the worst case, one unbroken run of a letter; 8,192 tokens of SmolLM2 are
        0.66 MB).
        """
        return max_tokens * self._longest

    def _check_length(self, text: str, context_len: int | None, param: str) -> None:
        if context_len is None or len(text) * 4 <= self.max_text_bytes(context_len - 1):
            return
        num_bytes = len(text.encode())
        if num_bytes > self.max_text_bytes(context_len - 1):
            at_least = -(-num_bytes // self._longest)
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context_len} tokens, prompt and answer together, "
                f"but the prompt has at least {at_least} ({num_bytes} bytes)",
                param=param,
            )

    # -------------------------------------------------------------------------------------------- decoding

    def detokenizer(
        self, skip_special_tokens: bool = True, keep: Sequence[str] = (), after: Sequence[int] = ()
    ) -> Detokenizer:
        """A fresh incremental decoder for one choice; special tokens in ``keep`` are never skipped. The text
        goes on from the ids ``after``: some tokenizers drop a blank at the very beginning."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        if keep and skip:
            skip -= {self._encoder.token_to_id(token) for token in keep}
        if self._byte_level:
            return ByteDetokenizer(self._token_bytes, skip)
        return WindowDetokenizer(self._decode, skip, self._byte_ids, after)

    def decode(self, ids: list[int]) -> str:
        """The text of all ids at once, special tokens as they are spelled. Other threads run meanwhile."""
        return str(self._encoder.decode_batch([ids], skip_special_tokens=False)[0])

    def token_strings(self, ids: list[int]) -> list[str]:
        """Each id as the vocabulary spells it; ``""`` where the model has an id that the tokenizer lacks."""
        return [self._encoder.id_to_token(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The text of one token; empty for an id that the tokenizer does not have."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        if self._byte_level:
            return self._token_bytes[token_id]
        byte = _SINGLE_BYTE.fullmatch(self._token_bytes[token_id].decode())
        return bytes([int(byte[0][3:5], 16)]) if byte else self._token_bytes[token_id].replace(_BLANK, b" ")

    def bad_words(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of texts that must not come, at the start of a word and within one."""
        words = [
            tuple(encode_ids(self._encoder, before + text.lstrip(), add_special_tokens=False))
            for text in texts
            for before in ("", " ")
        ]
        return tuple(dict.fromkeys(word for word in words if word))

    def _decode(self, ids: list[int]) -> str:
        return str(self._encoder.decode(ids, skip_special_tokens=False))

    # -------------------------------------------------------------------------------------------- loading

    def _bytes_a_token(self, added: dict[int, tokenizers.AddedToken]) -> int:
        """The most bytes of text that one token can stand for, see :meth:`max_text_bytes`."""
        longest = max(map(len, self._token_bytes), default=1)
        eats_blanks = any(token.lstrip or token.rstrip for token in added.values())
        exact = self._byte_level and self._definition.get("normalizer") is None and not eats_blanks
        return max(longest, 1) * (1 if exact else 4)


def _token_text(token: Any) -> str:
    """A named token of ``tokenizer_config.json``: its text, or an object with ``content``."""
    return str(token["content"] if isinstance(token, dict) else token)


def _is_byte_level(decoder: Any) -> bool:
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        return len(parts) == 1 and _is_byte_level(parts[0])
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
