"""What an output with calls may look like: the schema of forced calls, and the grammar of strict ones.

Strict calls stand in free text. Wherever a family's mark begins a call, spelled out or as a token of its
own, a call must follow whose arguments keep to their function's schema; so whatever :mod:`tool_calls` takes
for a call is one. Tokens that are no text (control tokens, and ``<think>`` where it is one) may come in
between, but not where leaving one out would join two halves of a mark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pagerelay.common.grammar import WHITESPACE
from pagerelay.router.tool_calls import ToolFamily, ToolRules

FunctionSpec = dict[str, Any]
"""``{"type": "function", "function": {"name", "description"?, "parameters"}}``, as templates take it."""

Schema = dict[str, Any]
STRICT: Final[dict[ToolFamily, str]] = {
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
}
"""Families that a grammar can be made for → what their calls begin with."""


def forced_schema(tools: list[FunctionSpec], name: str | None = None, parallel: bool = True) -> Schema:
    """The JSON schema of an output that is a list of calls and nothing else, read by the family ``forced``.

    ``name`` is the function that must be called, ``None`` any; without ``parallel``, or with a name, there is
    one call.
    """
    calls = _calls([tool for tool in tools if name in (None, tool["function"]["name"])])
    items = {"anyOf": calls.pop("anyOf")}
    one = {} if parallel and name is None else {"maxItems": 1}
    return {"type": "array", "items": items, "minItems": 1, **one, **calls}


def strict_calls(
    rules: ToolRules, tools: list[FunctionSpec], tokens: Mapping[str, int], answer: Schema | None
) -> str:
    """A grammar in Lark's form. ``tokens`` are those of the vocabulary that stand for a whole text, such as a
    mark; where no call is, there is JSON of the schema ``answer``, without one any text."""
    mark, offered = STRICT[rules.family], [_relaxed(tool, rules.strict) for tool in tools]
    at_start, free = "", "ANY"

    def word(text: str) -> str:
        own = f" | <[{tokens[text]}]>" if text in tokens else ""
        return f"({json.dumps(text)}{own})"

    match rules.family:
        case "mistral":
            call = _json(forced_schema(offered))
        case "mistral_args":
            named = {tool["function"]["name"]: tool["function"]["parameters"] for tool in offered}
            ways = (f"{json.dumps(key)} {word('[ARGS]')} {_json(_object(one))}" for key, one in named.items())
            call = f"({' | '.join(ways)})"
        case "llama3_json":
            one = _json(_calls(offered, "parameters"))
            call = f'{one} (GAP ";" GAP {one})*'
            # What could be taken for the beginning of a call, or of a further one, is no text.
            at_start, free = f"GAP {call} | ", r"/[ \t\r\n]*([^{; \t\r\n](?s:.*))?/"
        case _:
            call = f"{_json(_calls(offered))} GAP {word('</tool_call>')}"
    start = (
        f"{at_start}(GAP {word(mark)} GAP {call})+ | {_json(answer)}"
        if answer is not None
        else f"{at_start}mixed"
    )
    own = f" | TEXT <[{tokens[mark]}]>" if mark in tokens else ""
    others = ",".join(str(token) for text, token in tokens.items() if text != mark)
    lines = [
        *("%llguidance {}", f"start: {start}", f"mixed: (mark GAP call{others and ' | control'})* TEXT"),
        *(f"call: {call}", f"mark: spelled{own}", f"spelled[lazy]: TEXT {json.dumps(mark)}"),
        *(r"GAP: /[ \t\r\n]{0,8}/", "ANY: /(?s:.*)/", f"TEXT: {free}"),
    ]
    if others:  # whatever ends like the beginning of a mark is none of these
        halves = " | ".join(json.dumps(mark[:size]) for size in range(1, len(mark)))
        lines += [f"control: WHOLE <[{others}]>", f"WHOLE: TEXT & ~(ANY HALF)\nHALF: {halves}"]
    return "\n".join(lines)


def _relaxed(tool: FunctionSpec, strict: frozenset[str]) -> FunctionSpec:
    """A function that is not strict takes any object."""
    function = tool["function"]
    return {"function": function if function["name"] in strict else function | {"parameters": {}}}


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}})


def _calls(tools: list[FunctionSpec], key: str = "arguments") -> dict[str, Any]:
    """The schema of a call of any of the functions, whose arguments stand at ``key``. Every function's
    parameters are a definition of their own, so that what they refer to by ``#/…`` is found."""
    functions = [tool["function"] for tool in tools]
    ways = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, key: {"$ref": f"#/$defs/f{number}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for number, function in enumerate(functions)
    ]
    definitions = {
        f"f{number}": _moved(_object(function["parameters"]), f"#/$defs/f{number}")
        for number, function in enumerate(functions)
    }
    return {"anyOf": ways, "$defs": definitions}


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where their schema does not say so."""
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself pointing below ``root``."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
