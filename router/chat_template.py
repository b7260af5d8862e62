"""A model's chat template, rendered in a sandbox with a limit on time and size.

The template comes from the model folder only, never from a request: ``chat_template.jinja``, else
``chat_template`` in ``tokenizer_config.json`` (one text, or a list of named ones of which "default" is
taken). Settings and helpers are those of transformers' ``apply_chat_template``, so that the text is the same.

Limits: a clock is looked at in every turn of a loop and every call of a macro, ``range`` stops at 100,000,
arithmetic cannot make a value longer than the output may be, and the output is at most four times its input
plus 1 Mi characters. One built-in call (``center``, ``~``) is not bounded: a folder from a stranger still
deserves a look.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from pagerelay.common.errors import InvalidRequest, StartupError

Message = dict[str, Any]
"""A turn as templates take it: ``role``, ``content``, and what tools need."""

RENDER_SECONDS: Final = 2.0
BASE_CHARS: Final = 1 << 20

_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template that does not suit the messages may raise."""


class _LimitReached(Exception):
    pass


class _RefusedByTemplate(jinja2.TemplateError):
    """``raise_exception`` in a template: its own words about messages it cannot take."""


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training; here it is only its
    content.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a call of :meth:`tick` put into the body of every loop and macro."""

    intercepted_binops = frozenset(["*", "**", "+"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.now = threading.local()
        del self.globals["lipsum"]
        self.filters["tojson"] = self.to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        blocks: list[nodes.For | nodes.Macro] = [
            *template.find_all(nodes.For),
            *template.find_all(nodes.Macro),
        ]
        for block in blocks:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            block.body.insert(0, nodes.Output([tick]).set_lineno(block.lineno, override=True))
        return template

    def tick(self) -> str:
        if time.monotonic() > getattr(self.now, "deadline", float("inf")):
            raise _LimitReached("takes too long")
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limit = getattr(self.now, "max_chars", BASE_CHARS)
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise _LimitReached("computes too large a power")
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if (
                    isinstance(sized, str | list | tuple)
                    and isinstance(times, int)
                    and len(sized) * times > limit
                ):
                    raise _LimitReached("makes too long a text")
        if operator == "+" and isinstance(left, str | list) and len(left) > limit:
            raise _LimitReached("makes too long a text")
        return super().call_binop(context, operator, left, right)

    def to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        pieces, size = [], 0
        for piece in encoder.iterencode(value):  # a deep list grows a hundredfold by its indents
            pieces.append(piece)
            size += len(piece)
            if size > getattr(self.now, "max_chars", BASE_CHARS):
                raise _LimitReached("makes too long a text")
            self.tick()
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplate(str(message)[:300])


class ChatAbilities(Struct, frozen=True, kw_only=True):
    """What a model's chat template makes use of."""

    tools: bool = False
    """The functions offered."""
    calls: bool = False
    """An assistant's calls, and messages of tools."""
    names: bool = False
    """The names of those who speak."""
    part_roles: frozenset[str] = frozenset()
    """Roles whose content may be a list of text parts."""
    variables: frozenset[str] = frozenset()
    """Free variables of the template."""


_MARK: Final = "zq7xv"
_MARKS: Final = [f"{_MARK}{end}" for end in "abcd"]
_USER: Final[Message] = {"role": "user", "content": "hi"}
_CALL: Final[Message] = {
    "id": "zq7xv0123",  # nine letters and digits, as Mistral's templates want it
    "type": "function",
    "function": {"name": _MARKS[0], "arguments": {_MARKS[1]: 1}},
}
_ASKED: Final[list[Message]] = [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
_TOOL: Final = {
    "type": "function",
    "function": {"name": _MARK, "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """Compiled once at start; :meth:`render` takes about ``seconds`` at most; threads may share it.

    What it makes use of (:attr:`abilities`) is found by rendering small chats. Raises :class:`StartupError`
    if the template does not compile or breaks the sandbox or the limits on a plain message.
    """

    def __init__(self, source: str, constants: Mapping[str, Any], seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self._constants = {"tools": None, "documents": None, "add_generation_prompt": True, **constants}
        self.source = source
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
            self._render([{"role": "user", "content": "hi"}])
        except _RefusedByTemplate:
            pass  # it wants another first message; that is the template's right
        except _LimitReached as limit:
            raise StartupError(f"the model's chat template {limit}; fix it in the model folder") from limit
        except _FAULTS as error:
            detail = " ".join(str(error).split())[:300]
            raise StartupError(f"the model's chat template does not work: {detail}") from error
        self.abilities = self._find_abilities()

    @classmethod
    def load(
        cls, folder: Path, settings: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> ChatTemplate | None:
        """The template of a model folder, ``None`` if it has none. ``settings`` is its
        ``tokenizer_config.json``.
        """
        file = folder / "chat_template.jinja"
        source: Any = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        if isinstance(source, list):
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
        return cls(source, constants) if isinstance(source, str) else None

    def render(
        self,
        messages: list[Message],
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        """The prompt text, which with ``continue_final`` ends with the last message's content. Raises
        :class:`InvalidRequest` with our own or the template's words."""
        tag = secrets.token_hex(16)
        if continue_final:
            messages = [*messages[:-1], _tagged(messages[-1], f"{tag} ")]
        try:
            text = self._render(messages, variables)
        except _RefusedByTemplate as refusal:
            message = f"the model's chat template refuses these messages: {refusal}"
            raise InvalidRequest(message, param="messages") from refusal
        except _LimitReached as limit:
            message = f"the model's chat template {limit} on these messages"
            raise InvalidRequest(message, param="messages") from limit
        except _FAULTS as error:
            message = "the model's chat template cannot render these messages"
            raise InvalidRequest(message, param="messages") from error
        if not continue_final:
            return text
        before, found, after = text.rpartition(tag)
        if not found:
            message = "the model's chat template leaves out the last message's end, so it cannot be continued"
            raise InvalidRequest(message, param="continue_final_message")
        return before if after.startswith(" ") else before.rstrip()  # trimmed, as the tag's own blank was

    def _render(self, messages: list[Message], variables: Mapping[str, Any] | None = None) -> str:
        variables = variables or {}
        max_chars = BASE_CHARS + 4 * (num_chars(messages) + num_chars(variables))
        now = self._environment.now
        now.deadline, now.max_chars = time.monotonic() + self._seconds, max_chars
        pieces, size = [], 0
        for piece in self._template.generate({**self._constants, **variables, "messages": messages}):
            pieces.append(piece)
            size += len(piece)
            if size > max_chars:
                raise _LimitReached("makes too long a text")
            self._environment.tick()
        return "".join(pieces)

    def _find_abilities(self) -> ChatAbilities:
        called: Message = {
            "role": "tool",
            "tool_call_id": _CALL["id"],
            "name": _MARKS[3],
            "content": _MARKS[2],
        }
        parts = [{"type": "text", "text": _MARKS[0]}, {"type": "text", "text": _MARKS[1]}]
        chats: dict[str, list[Message]] = {
            "system": [{"role": "system", "content": parts}, _USER],
            "user": [{"role": "user", "content": parts}],
            "assistant": [_USER, {"role": "assistant", "content": parts}, _USER],
            "tool": [*_ASKED, {**called, "content": parts}],
        }
        names = [[{**_USER, "name": _MARKS[3]}], [*_ASKED, called]]
        tree = self._environment.parse(self.source)
        names_set = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
        # A name that the template sets is its own, unless it sets it only where nobody else has.
        asked = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
        free = meta.find_undeclared_variables(tree) - (names_set - asked)
        return ChatAbilities(
            tools=self._writes([_USER], [_MARK], {"tools": [_TOOL]}),
            calls=self._writes([*_ASKED, called], _MARKS[:3]),
            names=any(self._writes(chat, _MARKS[3:]) for chat in names),
            part_roles=frozenset(role for role, chat in chats.items() if self._writes(chat, _MARKS[:2])),
            variables=frozenset(free - set(self._constants) - {"messages"}),
        )

    def _writes(
        self, messages: list[Message], marks: Sequence[str], variables: Mapping[str, Any] | None = None
    ) -> bool:
        """Does the template write every marked text, and no Python or JSON around text parts?"""
        try:
            text = self._render(messages, variables)
        except (_LimitReached, *_FAULTS):
            return False
        raw = any(f"{quote}text{quote}" in text for quote in "'\"")
        return not raw and all(mark in text for mark in marks)


def _tagged(message: Message, tag: str) -> Message:
    """The message with ``tag`` behind its text, or its last part's."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + tag}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + tag}]}


def num_chars(value: Any) -> int:
    """About as many as JSON takes to write it."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(len(key) + 6 + num_chars(item) for key, item in value.items())
    return sum(num_chars(item) + 2 for item in value) if isinstance(value, list) else 8
