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
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagerelay.common.errors import InvalidRequest, StartupError

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
        self.filters["tojson"] = _tojson
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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplate(str(message)[:300])


class ChatTemplate:
    """Compiled once at start; :meth:`render` takes about ``seconds`` at most; threads may share it.

    Raises :class:`StartupError` if the template does not compile or breaks the sandbox or the limits on a
    plain message.
    """

    def __init__(self, source: str, constants: Mapping[str, Any], seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self._constants = {"tools": None, "documents": None, **constants}
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

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises :class:`InvalidRequest` with our own or the template's words."""
        try:
            return self._render(messages, add_generation_prompt)
        except _RefusedByTemplate as refusal:
            message = f"the model's chat template refuses these messages: {refusal}"
            raise InvalidRequest(message, param="messages") from refusal
        except _LimitReached as limit:
            message = f"the model's chat template {limit} on these messages"
            raise InvalidRequest(message, param="messages") from limit
        except _FAULTS as error:
            message = "the model's chat template cannot render these messages"
            raise InvalidRequest(message, param="messages") from error

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        max_chars = BASE_CHARS + 4 * sum(len(message["content"]) for message in messages)
        now = self._environment.now
        now.deadline, now.max_chars = time.monotonic() + self._seconds, max_chars
        pieces, size = [], 0
        values = {**self._constants, "add_generation_prompt": add_generation_prompt}
        for piece in self._template.generate(messages=messages, **values):
            pieces.append(piece)
            size += len(piece)
            if size > max_chars:
                raise _LimitReached("makes too long a text")
            self._environment.tick()
        return "".join(pieces)
