"""The functions that a chat offers to the model: what the template is given, and how the output is read."""

from __future__ import annotations

from typing import Any

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.chat_template import ChatAbilities, ChatTemplate
from pagerelay.router.prompts import missing, unsupported
from pagerelay.router.schemas import ChatRequest, FunctionTool, ToolChoice
from pagerelay.router.tool_calls import ToolFamily, ToolRules, detect_family

FunctionSpec = dict[str, Any]
"""``{"type": "function", "function": {"name", "description"?, "parameters"}}``, as templates take it."""


def tool_family(setting: str, template: ChatTemplate | None) -> ToolFamily | None:
    """The form of a model's calls, by ``router.tool_parser``."""
    match setting:
        case "hermes" | "llama3_json" | "mistral":
            return setting
        case "auto" if template is not None:
            return detect_family(template.source)
    return None


def read_tools(
    request: ChatRequest, abilities: ChatAbilities, family: ToolFamily | None
) -> tuple[list[FunctionSpec] | None, ToolRules | None]:
    """The tools to render and the rules to read calls by; neither with ``tool_choice: none``, so that the
    model knows of no tool. Raises :class:`InvalidRequest`."""
    if not request.tools:
        if request.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "tool_choice is allowed only beside tools")
        return None, None
    if not abilities.tools:
        raise unsupported("tools", "tools are not supported: this model's chat template does not use them")
    if family is None:
        raise unsupported(
            "tools",
            "tools are not supported: it is not known how this model writes calls; see router.tool_parser",
        )
    tools: list[FunctionSpec] = []
    names: list[str] = []
    for index, tool in enumerate(request.tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise unsupported(f"{where}.type", f'{where}.type: only "function" is supported')
        if tool.function is None:
            raise missing(f"{where}.function")
        if tool.function.name in names:
            param = f"{where}.function.name"
            raise InvalidRequest(f"{param}: {tool.function.name!r} stands twice in tools", param=param)
        if tool.function.strict and request.tool_choice in (None, "auto", "none"):
            param = f"{where}.function.strict"
            message = f"{param}: arguments are held to their schema only where tool_choice forces a call"
            raise unsupported(param, message)
        names.append(tool.function.name)
        tools.append(_spec(tool.function))
    _check_choice(request.tool_choice, names)
    if request.tool_choice == "none":
        return None, None
    forced = request.tool_choice not in (None, "auto")
    parallel = request.parallel_tool_calls is not False
    return tools, ToolRules("forced" if forced else family, frozenset(names), parallel)


def forced_calls(
    choice: str | ToolChoice | None, tools: list[FunctionSpec] | None, rules: ToolRules | None
) -> dict[str, Any] | None:
    """The JSON schema of the output, where it must be calls."""
    if tools is None or rules is None or rules.family != "forced":
        return None
    named = choice.function if isinstance(choice, ToolChoice) else None
    return forced_schema(tools, named.name if named is not None else None, rules.parallel)


def forced_schema(
    tools: list[FunctionSpec], name: str | None = None, parallel: bool = True
) -> dict[str, Any]:
    """The JSON schema of an output that is a list of calls and nothing else, read by the family ``forced``.

    ``name`` is the function that must be called, ``None`` any; without ``parallel``, or with a name, there is
    one call. Every function's parameters are a definition of their own, so that what they refer to by
    ``#/…`` is found.
    """
    called = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": {"$ref": f"#/$defs/f{number}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, function in enumerate(called)
    ]
    one = {} if parallel and name is None else {"maxItems": 1}
    definitions = {
        f"f{number}": _moved(_object(function["parameters"]), f"#/$defs/f{number}")
        for number, function in enumerate(called)
    }
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **one, "$defs": definitions}


def _spec(function: FunctionTool) -> FunctionSpec:
    described = {} if function.description is None else {"description": function.description}
    parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    return {
        "type": "function",
        "function": {"name": function.name, **described, "parameters": parameters},
    }


def _check_choice(choice: str | ToolChoice | None, names: list[str]) -> None:
    if choice in (None, "none", "auto"):
        return
    if isinstance(choice, ToolChoice):
        if choice.type != "function" or choice.function is None:
            raise unsupported("tool_choice", 'tool_choice: only an object of type "function" is supported')
        if choice.function.name not in names:
            param = "tool_choice.function.name"
            raise InvalidRequest(f"{param}: no tool has this name", param=param)
    elif choice != "required":
        raise InvalidRequest("tool_choice is none, auto, required or an object", param="tool_choice")


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
