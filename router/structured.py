"""The ways to say what an answer must look like → one grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from pagerelay.common.errors import InvalidRequest
from pagerelay.common.wire.sampling import Grammar
from pagerelay.router.prompts import missing, unsupported
from pagerelay.router.schemas import Common, ResponseFormat, StructuredOutputs
from pagerelay.router.tool_calls import ToolRules
from pagerelay.router.tool_grammar import FunctionSpec, forced_schema, strict_calls

MAX_GRAMMAR_BYTES: Final = 256 << 10

Kind = Literal["json_schema", "regex", "choice", "lark"]
Way = tuple[str, Kind, dict[str, Any] | list[str] | str | None]
"""A field, the kind of grammar that it holds, and its value."""

_NOTHING: Final[Way] = ("tools", "json_schema", None)
_ANY_OBJECT: Final = {"type": "object"}
_NOT_YET: Final = (
    "structural_tag",
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)


def read_grammar(
    request: Common, tools: list[FunctionSpec], rules: ToolRules | None, tokens: Iterable[tuple[str, int]]
) -> tuple[Grammar | None, str]:
    """The request's grammar, if it has one, and the field that it is in. For ``tokens`` see
    :func:`strict_calls`. Whether it can be compiled is not looked at: see :mod:`grammar_check`."""
    forced: dict[str, Any] | None = None
    if rules is not None and rules.family == "forced":
        forced = forced_schema(tools, rules.named, rules.parallel)
    ways: list[Way] = [
        ("guided_json", "json_schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
        ("guided_grammar", "lark", request.guided_grammar),
        ("tool_choice", "json_schema", forced),
    ]
    if request.response_format is not None:
        ways.append(_of_format(request.response_format))
    if request.structured_outputs is not None:
        ways += _of_outputs(request.structured_outputs)
    given = [(param, kind, value) for param, kind, value in ways if value is not None]
    if not given and (rules is None or not rules.strict):
        return None, ""
    if len(given) > 1:
        first, second = given[0][0], given[1][0]
        raise InvalidRequest(f"{first} and {second} both say what the answer is; use one", param=second)
    param, kind, value = given[0] if given else _NOTHING
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not the text of a JSON object", param=param) from error
    if rules is not None and rules.strict:
        if value is not None and not isinstance(value, dict):
            message = f"{param} and strict tools exclude each other; leave one out, or give a JSON schema"
            raise InvalidRequest(message, param=param)
        param, kind, value = "tools", "lark", strict_calls(rules, tools, dict(tokens), value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"{param} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
        raise InvalidRequest(message, param=param)
    return Grammar(kind=kind, text=text), param


def _of_format(wanted: ResponseFormat) -> Way:
    match wanted.type:
        case "text":
            return "response_format", "json_schema", None
        case "json_object":
            return "response_format", "json_schema", _ANY_OBJECT
        case "json_schema":
            if wanted.json_schema is None:
                raise missing("response_format.json_schema")
            if wanted.json_schema.schema is None:
                raise missing("response_format.json_schema.schema")
            return "response_format.json_schema.schema", "json_schema", wanted.json_schema.schema
        case _:
            pass
    message = "response_format.type is text, json_object or json_schema"
    raise unsupported("response_format.type", message)


def _of_outputs(wanted: StructuredOutputs) -> list[Way]:
    for name in _NOT_YET:
        if getattr(wanted, name) not in (None, False):
            raise unsupported(f"structured_outputs.{name}", f"structured_outputs.{name} is not supported")
    ways: list[Way] = [
        ("structured_outputs.json", "json_schema", wanted.json),
        ("structured_outputs.regex", "regex", wanted.regex),
        ("structured_outputs.choice", "choice", wanted.choice),
        ("structured_outputs.grammar", "lark", wanted.grammar),
        ("structured_outputs.json_object", "json_schema", _ANY_OBJECT if wanted.json_object else None),
    ]
    if all(value is None for _, _, value in ways):
        message = "structured_outputs is empty; give json, regex, choice, grammar or json_object: true"
        raise InvalidRequest(message, param="structured_outputs")
    return ways
