"""Keeps control tokens that users spell out (``<|im_end|>`` in a message) from becoming control tokens.

The spellings travel through the chat template under random names. Then the text is split at the control
tokens that the template itself wrote, just as the tokenizer does it, and each stretch between them, spellings
put back, is encoded by a twin of the tokenizer that knows no added tokens. Only the tokens marked special
count as control tokens: others, such as ``<think>``, are text that templates look for in messages.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from functools import cached_property
from typing import Any, TypeVar

import tokenizers

from pagerelay.common.errors import InvalidRequest

T = TypeVar("T")


class ControlTokens:
    """``definition`` is the parsed ``tokenizer.json``, ``added`` all added tokens by id."""

    def __init__(self, definition: dict[str, Any], added: dict[int, tokenizers.AddedToken]) -> None:
        self._definition = definition
        self._added = {token.content: (token_id, token) for token_id, token in added.items()}
        special = [token.content for token in added.values() if token.special and token.content]
        self._special = _any_of(special)
        self._control_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._all = _any_of([content for content in self._added if content])

    def spelled_in(self, value: Any) -> bool:
        """Does a text anywhere in ``value`` (JSON, keys too) spell out a control token?"""
        if isinstance(value, str):
            return self._special.search(value) is not None
        if isinstance(value, dict):
            return any(self.spelled_in(part) for pair in value.items() for part in pair)
        return isinstance(value, list) and any(map(self.spelled_in, value))

    def hide(self, value: T) -> tuple[T, dict[str, str]]:
        """``value`` with every spelling under a random name, and what the names stand for."""
        nonce = secrets.token_hex(8)
        names: dict[str, str] = {}

        def name_of(match: re.Match[str]) -> str:
            # Letters and digits alone: JSON with escapes holds them unchanged.
            return names.setdefault(match[0], f"x{nonce}x{len(names)}x")

        def hidden(part: Any) -> Any:
            if isinstance(part, str):
                return self._special.sub(name_of, part)
            if isinstance(part, dict):
                return {hidden(key): hidden(item) for key, item in part.items()}
            return [hidden(item) for item in part] if isinstance(part, list) else part

        return hidden(value), {name: text for text, name in names.items()}

    def encode(self, rendered: str, hidden: dict[str, str]) -> list[int]:
        """Ids of a rendered chat; equal to the tokenizer's own where ``hidden`` is empty."""
        parts = self._all.split(rendered)
        ids: list[int] = []
        for number in range(0, len(parts), 2):
            stretch = parts[number]
            if number > 0:
                token_id, token = self._added[parts[number - 1]]
                ids.append(token_id)
                stretch = stretch.lstrip() if token.rstrip else stretch
            if number + 1 < len(parts) and self._added[parts[number + 1]][1].lstrip:
                stretch = stretch.rstrip()
            if stretch:
                twin = self._first if number == 0 and not ids else self._later
                plain = encode_ids(twin, restore(stretch, hidden), add_special_tokens=False)
                if not self._control_ids.isdisjoint(plain):
                    raise InvalidRequest(
                        "a message spells out a control token of the model", param="messages"
                    )
                ids += plain
        return ids

    @cached_property
    def _first(self) -> tokenizers.Tokenizer:
        return _twin(self._definition)

    @cached_property
    def _later(self) -> tokenizers.Tokenizer:
        """For stretches that do not begin the text: a Metaspace that marks only the text's first word stays
        silent.
        """
        changed = copy.deepcopy(self._definition.get("pre_tokenizer"))
        if not _silence_first(changed):
            return self._first
        return _twin({**self._definition, "pre_tokenizer": changed})


def restore(text: str, hidden: dict[str, str]) -> str:
    """The text with the spellings in place of their random names."""
    for name, spelling in hidden.items():
        text = text.replace(name, spelling)
    return text


def encode_ids(encoder: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Ids of a text, by the one call of the library that lets other threads run meanwhile."""
    return list(encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """A pattern of one group that matches any of the texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _silence_first(part: Any) -> bool:
    found = False
    if isinstance(part, dict):
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"], found = "never", True
        for child in part.get("pretokenizers") or ():
            found = _silence_first(child) or found
    return found


def _twin(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens: text in, only text out."""
    removed: dict[str, Any] = {
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return tokenizers.Tokenizer.from_str(json.dumps({**definition, **removed}))
