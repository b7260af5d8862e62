"""Calls of functions in a model's output, found while it streams.

====================  =======================================================================================
family                what the model writes
====================  =======================================================================================
``hermes``            ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, once a call (Hermes, Qwen)
``llama3_json``       ``{"name": …, "parameters": {…}}`` at the start of the output or after
                      ``<|python_tag|>``, further ones after ``;`` (Llama 3.1 and 3.2)
``mistral``           ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``
``mistral_args``      ``[TOOL_CALLS]name[ARGS]{…}``, once a call, at times with ``[CALL_ID]…`` behind the name
                      (Mistral since Small 3.2)
``qwen3_coder``       ``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``,
                      at times without the first tag; :mod:`tool_xml` (Qwen3-Coder)
``forced``            the list alone, as a grammar of :func:`pagerelay.router.tools.forced_schema` makes it
====================  =======================================================================================

What comes out does not depend on how the text is cut into pieces. A call begins once its name, one of those
offered, and the bracket of its arguments are there; from then on its arguments are passed on as the model
writes them, and where the output breaks off they are left unfinished. Anything else (another name, no JSON, a
lone tag) is ordinary text, tags included. Blanks beside calls belong to them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from pagerelay.router.tool_xml import MAX_BLANKS, XmlArguments, beginning, match

ToolFamily = Literal["hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "forced"]
Said = tuple[str, list["CallDelta"]]

_BLANKS: Final = " \t\r\n"
_B: Final = r"[ \t\r\n]{0,64}"
_HEADER = re.compile(
    rf'\{{{_B}"name"{_B}:{_B}"([^"\\]{{1,64}})"{_B},{_B}"(?:arguments|parameters)"{_B}:{_B}(?=\{{)'
)
_NO_CALL = re.compile(
    rf'\{{{_B}(?:[^" \t\r\n]|"(?!(?:name|arguments|parameters|type|id)")[^"\\]{{0,64}}["\\])'
)
"""The beginning of an object whose first key is none of a call's."""
_ARGS_HEADER = re.compile(
    rf"\[TOOL_CALLS\]{_B}([\w.-]{{1,64}})(?:\[CALL_ID\][^\[\]]{{1,64}})?\[ARGS\]{_B}(?=\{{)", re.ASCII
)
_XML_HEADER = re.compile(rf"(?:<tool_call>{_B})?<function=([\w.-]{{1,64}})>", re.ASCII)
_MAX_HEADER: Final = 320
"""No header is longer."""


class CallDelta(Struct, frozen=True):
    """A piece of call ``index``. The first has its ``id`` and ``name``, those after it have ``arguments``."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def whole_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """The calls that the pieces make."""
    calls: list[CallDelta] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(delta)
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    return calls


class ToolRules(Struct, frozen=True):
    """How the output of one request is read."""

    family: ToolFamily
    names: frozenset[str]
    parallel: bool = True
    """Else the answer ends with its first call."""
    named: str | None = None
    """The function that must be called, if there is one."""
    short_ids: bool = False
    """Calls have ids of nine letters and digits: Mistral's templates take no others."""
    strict: frozenset[str] = frozenset()
    """Functions whose arguments a grammar holds to their schema, though no call is forced."""
    parameters: dict[str, dict[str, Any]] = {}
    """The schema of each function's arguments, where the text of a call does not tell their types."""


class _Format(NamedTuple):
    marks: tuple[str, ...] = ()
    opening: tuple[str, ...] = ()
    """What stands between the mark and the first call."""
    between: tuple[str, ...] | None = None
    closing: tuple[str, ...] | None = None
    at_start: tuple[str, ...] | None = None
    """What stands before a call at the start of the output, which needs no mark."""
    header: re.Pattern[str] | None = None
    """A mark and the name of the function, where arguments follow at once and not inside of an object."""
    within: tuple[str, ...] = ()
    """Further tags."""


_FORMATS: Final[dict[ToolFamily, _Format]] = {
    "hermes": _Format(("<tool_call>",), closing=("</tool_call>",)),
    "llama3_json": _Format(("<|python_tag|>",), between=(";",), at_start=()),
    "mistral": _Format(("[TOOL_CALLS]",), opening=("[",), between=(",",), closing=("]",)),
    "mistral_args": _Format(("[TOOL_CALLS]",), header=_ARGS_HEADER, within=("[CALL_ID]", "[ARGS]")),
    "qwen3_coder": _Format(("<tool_call>", "<function="), closing=("</tool_call>",), header=_XML_HEADER),
    "forced": _Format(between=(",",), closing=("]",), at_start=("[",)),
}
_NO_CALLS: Final = _Format()
_NO_RULES: Final = ToolRules("forced", frozenset())


def detect_family(template: str) -> ToolFamily | None:
    """The family whose calls a chat template writes."""
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3_json"
    return None


class ToolParser:
    """One choice's output → its text and calls. ``rules`` is ``None`` where all of it is text."""

    def __init__(self, rules: ToolRules | None) -> None:
        self._format = _NO_CALLS if rules is None else _FORMATS[rules.family]
        self._rules = rules or _NO_RULES
        self.marks = (*self._format.marks, *self._format.within, *(self._format.closing or ()))
        """Tags that the parser must see even if they are special tokens."""
        self.done = False
        """No more output is wanted."""
        first = self._format.at_start
        self._state: Callable[[], bool] = self._text if first is None else partial(self._expect, first)
        self._buffer = ""
        self._opening = ""  # text that was taken for the beginning of a call, as yet without its JSON
        self._after_call = False
        self._num_calls = 0
        self._scan = _Scan()
        self._xml = XmlArguments({})
        self._last = False
        self._texts: list[str] = []
        self._deltas: list[CallDelta] = []

    def push(self, text: str, last: bool = False) -> Said:
        """Takes new text; gives text and pieces of calls that may be sent now, all of them at the last."""
        self._buffer += text
        self._last = last
        while not self.done and self._state():
            pass
        said = "".join(self._texts), self._deltas
        self._texts, self._deltas = [], []
        return said

    # ------------------------------------------------- states: each is true if the next one has work to do

    def _text(self) -> bool:
        text, marks = self._buffer, self._format.marks
        if self._after_call:
            text = text.lstrip(_BLANKS)
            self._after_call = not text
        at, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
        held = 0 if self._last else max((beginning(text, mark) for mark in marks), default=0)
        begins = at if at >= 0 else len(text) - held
        if marks and not (self._last and at < 0):
            begins -= _num_blanks_before(text, begins)
        self._texts.append(text[:begins])
        self._buffer = text[begins:]
        if at < 0:
            return False
        behind = at + len(mark)
        self._opening, self._buffer = text[begins:behind], text[behind:]
        self._state = self._named if self._format.header else partial(self._expect, self._format.opening)
        return True

    def _named(self) -> bool:
        """The name of a function, and its arguments at once."""
        text = self._opening.lstrip(_BLANKS) + self._buffer
        header = self._format.header and self._format.header.match(text)
        if header is None and len(text) <= _MAX_HEADER and not self._last:
            return False
        if header is None or header[1] not in self._rules.names:
            return self._no_call()
        self._buffer = text
        return self._begin_arguments(header)

    def _expect(self, words: tuple[str, ...]) -> bool:
        """``words`` and an object come next, or all was text."""
        end = match(self._buffer, *words, "{")
        if end is None and not self._last:
            return False
        if end is None or end < 0:
            return self._no_call()
        self._begin_object(end)
        return True

    def _begin_object(self, end: int) -> None:
        self._opening += self._buffer[: end - 1]
        self._buffer = self._buffer[end - 1 :]
        self._scan = _Scan()
        self._state = self._object

    def _object(self) -> bool:
        header = _HEADER.match(self._buffer)
        if header is not None:
            return self._begin_arguments(header) if header[1] in self._rules.names else self._no_call()
        if _NO_CALL.match(self._buffer):
            return self._no_call()
        end = self._scan.end(self._buffer)
        if end is None and not self._last:
            return False
        call = None if end is None or self._scan.broken else _read_call(self._buffer[:end])
        if call is None or call[0] not in self._rules.names:
            return self._no_call()
        self._begin_call(call[0])
        self._deltas.append(CallDelta(self._num_calls, call[1]))
        self._buffer = self._buffer[end:]
        return self._end_call()

    def _begin_arguments(self, header: re.Match[str]) -> bool:
        self._begin_call(header[1])
        self._buffer = self._buffer[header.end() :]
        self._scan, self._xml = _Scan(), XmlArguments(self._rules.parameters.get(header[1], {}))
        self._state = self._xml_arguments if self._rules.family == "qwen3_coder" else self._arguments
        return True

    def _xml_arguments(self) -> bool:
        piece, num_read, over = self._xml.read(self._buffer, self._last)
        self._deltas += [CallDelta(self._num_calls, piece)] if piece else []
        self._buffer = self._buffer[num_read:]
        return over and self._end_call()

    def _arguments(self) -> bool:
        end = self._scan.end(self._buffer)
        piece = self._buffer[:end]
        self._deltas += [CallDelta(self._num_calls, piece)] if piece else []
        self._buffer = self._buffer[len(piece) :]
        self._scan.at = 0
        if end is None:
            return False
        if self._scan.broken or self._format.header is not None:
            return self._end_call()
        self._scan = _Scan(depth=1)
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        """What follows the arguments in their object: its bracket; further keys are passed over."""
        further = match(self._buffer, ",")
        end = match(self._buffer, "}") if further is None or further < 0 else self._scan.end(self._buffer)
        if end is None and not self._last:
            return False
        if end is not None and end >= 0:
            rest, self._buffer = self._buffer[:end], self._buffer[end:]
            if self._scan.broken or not _is_json('{"":0' + rest):
                self._texts.append(rest)
        return self._end_call()

    def _after(self) -> bool:
        """Behind a call: the next of a list, the closing tag, or neither."""
        between, closing = self._format.between, self._format.closing
        following = -1 if between is None else match(self._buffer, *between, "{")
        closed = -1 if closing is None else match(self._buffer, *closing)
        if (following is None or closed is None) and not self._last:
            return False
        if following is not None and following >= 0:
            self._begin_object(following)
            return True
        if closed is not None and closed >= 0:
            self._buffer = self._buffer[closed:]
        self._after_call = True
        self._state = self._text
        return True

    # ------------------------------------------------------------------------------------------------ moves

    def _no_call(self) -> bool:
        self._texts.append(self._opening)
        self._opening = ""
        self._state = self._text
        return True

    def _begin_call(self, name: str) -> None:
        short = self._rules.short_ids or self._rules.family in ("mistral", "mistral_args")
        call_id = secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"
        self._deltas.append(CallDelta(self._num_calls, "", call_id, name))
        self._opening = ""

    def _end_call(self) -> bool:
        self._num_calls += 1
        self.done = not self._rules.parallel
        self._state = self._after
        return True


class _Scan:
    """Follows the brackets of JSON text up to the one that closes it."""

    def __init__(self, depth: int = 0) -> None:
        self.at = 0
        self.broken = False
        """It ended at a ``<``, which JSON has in strings only: a closing tag."""
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Where the JSON ends in ``text``, which has grown since the last call; ``None``: not yet."""
        for at in range(self.at, len(text)):
            char = text[at]
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
            elif char == "<":
                self.broken = True
                return at
        self.at = len(text)
        return None


def _num_blanks_before(text: str, end: int) -> int:
    start = max(0, end - MAX_BLANKS)
    return end - start - len(text[start:end].rstrip(_BLANKS))


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose keys stand in another order, or whose arguments are JSON in a
    string."""
    try:
        call: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, msgspec.json.encode(arguments).decode()


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
