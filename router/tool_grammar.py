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
from pagerelay.router.prompts import unsupported
from pagerelay.router.tool_calls import ToolFamily, ToolRules
from pagerelay.router.tool_xml import deref, kinds

FunctionSpec = dict[str, Any]
"""``{"type": "function", "function": {"name", "description"?, "parameters"}}``, as templates take it."""

_MARKS: Final[dict[ToolFamily, tuple[str, ...]]] = {
    "hermes": ("<tool_call>",),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral_args": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<tool_call>", "<function="),
}
_TERMINALS: Final = r"""
GAP: /[ \t\r\n]{0,8}/
ANY: /(?s:.*)/
"""
_NOTES: Final = frozenset({"title", "description", "default", "examples", "$defs"})
"""Words of a schema that ask for nothing."""


def forced_schema(
    tools: list[FunctionSpec], name: str | None = None, parallel: bool = True
) -> dict[str, Any]:
    """The JSON schema of an output that is a list of calls and nothing else, read by the family ``forced``.

    ``name`` is the function that must be called, ``None`` any; without ``parallel``, or with a name, there is
    one call.
    """
    calls = _calls([tool for tool in tools if name in (None, tool["function"]["name"])])
    one = {} if parallel and name is None else {"maxItems": 1}
    return {
        "type": "array",
        "items": {"anyOf": calls["anyOf"]},
        "minItems": 1,
        **one,
        "$defs": calls["$defs"],
    }


def strict_calls(
    rules: ToolRules, tools: list[FunctionSpec], tokens: Mapping[str, int], answer: dict[str, Any] | None
) -> str:
    """A grammar in Lark's form. ``tokens`` are those of the vocabulary that stand for a whole text, such as a
    mark; where no call is, there is JSON of the schema ``answer``, without one any text. Raises
    :class:`InvalidRequest` where the family cannot be held to a schema."""
    offered = [
        tool
        if tool["function"]["name"] in rules.strict
        else {"function": tool["function"] | {"parameters": {}}}
        for tool in tools
    ]

    def word(text: str) -> str:
        own = f" | <[{tokens[text]}]>" if text in tokens else ""
        return f"({json.dumps(text)}{own})"

    marks, more = _MARKS[rules.family], [""]
    match rules.family:
        case "hermes":
            bodies = [f"GAP {_json(_calls(offered))} GAP {word('</tool_call>')}"]
        case "mistral":
            bodies = [f"GAP {_json(forced_schema(offered))}"]
        case "mistral_args":
            ways = [
                f"{json.dumps(one['name'])} {word('[ARGS]')} GAP {_json(_object(one['parameters']))}"
                for one in (tool["function"] for tool in offered)
            ]
            bodies = [f"({' | '.join(ways)})"]
        case "qwen3_coder":
            bodies = [f'GAP "<function=" xml GAP {word("</tool_call>")}', "xml"]
            more = _xml(tools, rules.strict)
        case _:
            call = _json(_calls(offered, "parameters"))
            bodies = [f'GAP {call} (GAP ";" GAP {call})*']
    at_start = f"GAP {bodies[0]} | " if rules.family == "llama3_json" else ""
    if answer is not None:
        start = f"{at_start}(GAP {word(marks[0])} {bodies[0]})+ | {_json(answer)}"
        return "\n".join(["%llguidance {}", f"start: {start}", *more, _TERMINALS])
    lines = ["%llguidance {}"]
    calls = " | ".join(f"begin{number} {body}" for number, body in enumerate(bodies))
    if at_start:  # what comes first tells what the whole is; behind a call, more of them or nothing
        lines += [f"start: {at_start}{calls} | TEXT", r"TEXT: /[ \t\r\n]*([^{ \t\r\n](?s:.*))?/"]
    else:
        others = [str(token) for text, token in sorted(tokens.items()) if text not in marks]
        control = f" | WHOLE <[{','.join(others)}]>" if others else ""
        halves = " | ".join(json.dumps(mark[:size]) for mark in marks for size in range(1, len(mark)))
        lines += [f"start: ({calls}{control})* TEXT", "TEXT: ANY"]
        lines += [f"WHOLE: ANY & ~(ANY HALF)\nHALF: {halves}"] if others else []
    for number, mark in enumerate(marks):
        own = f" | TEXT <[{tokens[mark]}]>" if mark in tokens else ""
        lines += [f"begin{number}: spelled{number}{own}", f"spelled{number}[lazy]: TEXT {json.dumps(mark)}"]
    return "\n".join([*lines, *more, _TERMINALS])


def _xml(tools: list[FunctionSpec], strict: frozenset[str]) -> list[str]:
    """Behind ``<function=``. Only the tags tell where a value ends, so a text may be any or one of a list."""
    lines = [
        "xml: " + " | ".join(f"f{number}" for number in range(len(tools))),
        'value[lazy]: ANY "</parameter>"',
    ]
    for number, function in enumerate(tool["function"] for tool in tools):
        schema = function["parameters"]
        parts = [r'("<parameter=" /[^<>\n]{1,128}/ ">" value GAP)*']
        if function["name"] in strict:
            properties, required = schema.get("properties", {}), schema.get("required", [])
            parts = [
                f"({_tag(key)} {_value(part, schema, function['name'])} GAP){'' if key in required else '?'}"
                for key, part in properties.items()
            ]
        lines.append(f'f{number}: {json.dumps(function["name"] + ">")} GAP {" ".join(parts)} "</function>"')
    return lines


def _tag(key: str) -> str:
    return json.dumps(f"<parameter={key}>")


def _value(schema: Any, root: dict[str, Any], name: str) -> str:
    """A value and its closing tag."""
    found = deref(schema, root)
    allowed = kinds(found, root)
    if "string" not in allowed:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f'GAP {_json(definitions | found)} GAP "</parameter>"'
    texts = found.get("enum", [found["const"]] if "const" in found else None)
    if texts and allowed == {"string"}:
        return f'"\\n"? ({" | ".join(map(json.dumps, texts))}) "\\n"? "</parameter>"'
    ways = [deref(one, root) for one in found.get("anyOf", [found])]
    if any(set(one) - _NOTES - {"type"} for one in ways):
        message = f"tools: {name} cannot be strict: this model's form of calls bounds no text but by its tags"
        raise unsupported("tools", message)
    return "value"


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
