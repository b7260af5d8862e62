"""Arguments of a call that stand in tags, as Qwen3-Coder writes them → JSON, while they stream.

``<parameter=key>`` has a value behind it, which ends at ``</parameter>``; one line break at either end of it
is layout, anything else is meant. What a value is, only the function's schema can tell: a text is passed on
as it comes, anything else once it is whole, as JSON if it can be read as such (or as Python's ``True``,
``False``, ``None``, which Qwen's template writes) and the schema does not want a text there.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

MAX_BLANKS: Final = 64
"""Blanks in a row between two parts of a call; with more of them it is none."""
_BLANKS: Final = " \t\r\n"
_KEY = re.compile(r"[ \t\r\n]{0,64}<parameter=([^<>\n]{1,128})>")
_MAX_KEY: Final = 224
"""No such tag is longer, blanks before it included."""
_CLOSING: Final = "</parameter>"
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_KINDS: Final = {int: "integer number", float: "number", bool: "boolean", list: "array", dict: "object"}
_MAX_WAYS: Final = 64
"""Schemas of a list that are looked at."""
_ANY: Final = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_TEXT: Final = frozenset({"string"})


class XmlArguments:
    """One call's."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._said = "{"
        self._next = ""
        """What stands before the next key."""
        self._kinds: frozenset[str] | None = None
        """The types that the value may have which is being read, if one is."""
        self._begins = False
        """Nothing of it has been read."""

    def read(self, text: str, last: bool) -> tuple[str, int, bool]:
        """JSON that may be passed on, how many characters of ``text`` it stands for, and whether the call
        is over. The rest of ``text`` is given again, with more behind it; with ``last`` there is no more,
        and what is unfinished stays so."""
        at, over, before = 0, False, -1
        while at != before and not over:
            before = at
            at, over = self._key(text, at, last) if self._kinds is None else self._value(text, at, last)
        said, self._said = self._said, ""
        return said, at, over

    def _key(self, text: str, at: int, last: bool) -> tuple[int, bool]:
        rest = text[at:]
        key = _KEY.match(rest)
        if key is not None:
            known = self._schema.get("properties")
            known = known if isinstance(known, dict) else {}
            self._kinds = kinds(known[key[1]], self._schema) if key[1] in known else _TEXT
            self._begins = True
            quote = '"' if self._kinds == _TEXT else ""
            self._said += f"{self._next}{json.dumps(key[1], ensure_ascii=False)}: {quote}"
            self._next = ", "
            return at + key.end(), False
        closed, further = match(rest, "</function>"), match(rest, "<parameter=")
        if closed is None or further is None or (further > 0 and len(rest) <= _MAX_KEY):
            return at, last  # it may become either
        self._said += "}"
        return at + max(closed or 0, 0), True

    def _value(self, text: str, at: int, last: bool) -> tuple[int, bool]:
        if self._begins and at < len(text):
            at += text[at] == "\n"
            self._begins = False
        end = text.find(_CLOSING, at)
        if end >= 0:
            value = text[at : end - (text[at:end][-1:] == "\n")]
            self._said += _escaped(value) + '"' if self._kinds == _TEXT else _json(value, self._kinds or _ANY)
            self._kinds = None
            return end + len(_CLOSING), False
        if self._kinds != _TEXT and not last:
            return at, False
        held = 0 if last else max(beginning(text[at:], tag) for tag in (_CLOSING, "\n" + _CLOSING))
        piece = text[at : len(text) - held]
        quote = "" if self._kinds == _TEXT else '"'
        self._said += quote + _escaped(piece) if "string" in (self._kinds or _ANY) else piece
        return len(text) - held, last


def kinds(schema: Any, root: Any, steps: int = 3) -> frozenset[str]:
    """The JSON types that a value may have; all of them where the schema does not say. ``root`` is what its
    references begin at; no more than ``steps`` are taken from one schema to another."""
    if not isinstance(schema, dict) or not steps:
        return _ANY
    reference, named, ways = schema.get("$ref"), schema.get("type"), schema.get("anyOf")
    if isinstance(reference, str):
        found = root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        return kinds(found, root, steps - 1)
    if isinstance(named, str | list):
        return frozenset([named] if isinstance(named, str) else map(str, named))
    if isinstance(ways, list):
        return frozenset[str]().union(*(kinds(way, root, steps - 1) for way in ways[:_MAX_WAYS]))
    return _ANY


def _json(text: str, allowed: frozenset[str]) -> str:
    """A whole value that need not be a text."""
    word = _PYTHON.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(word)
    except (msgspec.DecodeError, RecursionError):
        value = text
    found = _KINDS.get(type(value), "null" if value is None else "string").split()
    as_text = value is text or ("string" in allowed and (allowed - _TEXT).isdisjoint(found))
    return f'"{_escaped(text)}"' if as_text else word


def _escaped(text: str) -> str:
    """Without quotes, so that pieces add up."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def match(text: str, *words: str) -> int | None:
    """Where ``words``, blanks allowed before each, end at the beginning of ``text``; -1 if they do not stand
    there, ``None`` if more text must tell."""
    at = 0
    for word in words:
        start = at
        while at < len(text) and text[at] in _BLANKS:
            at += 1
        if at - start > MAX_BLANKS:
            return -1
        found = text[at : at + len(word)]
        if found != word:
            return None if word.startswith(found) and at + len(found) == len(text) else -1
        at += len(word)
    return at


def beginning(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``mark``."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
