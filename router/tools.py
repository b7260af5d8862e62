"""The functions that a chat offers to the model: what the template is given, and how the output is read."""

from __future__ import annotations

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.chat_template import ChatAbilities, ChatTemplate
from pagerelay.router.prompts import missing, unsupported
from pagerelay.router.schemas import ChatRequest, FunctionTool, ToolChoice
from pagerelay.router.tool_calls import ToolFamily, ToolRules, detect_family
from pagerelay.router.tool_grammar import STRICT, FunctionSpec


def tool_family(setting: str, template: ChatTemplate | None) -> ToolFamily | None:
    """The form of a model's calls, by ``router.tool_parser``."""
    match setting:
        case "hermes" | "llama3_json" | "mistral" | "mistral_args" | "qwen3_coder":
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
    strict: list[str] = []
    forced = request.tool_choice not in (None, "auto", "none")
    for index, tool in enumerate(request.tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise unsupported(f"{where}.type", f'{where}.type: only "function" is supported')
        if tool.function is None:
            raise missing(f"{where}.function")
        if tool.function.name in names:
            param = f"{where}.function.name"
            raise InvalidRequest(f"{param}: {tool.function.name!r} stands twice in tools", param=param)
        if tool.function.strict and not forced:
            if family not in STRICT:
                param = f"{where}.function.strict"
                raise unsupported(
                    param, f"{param}: this model's calls cannot be held to a schema; leave it out"
                )
            strict.append(tool.function.name)
        names.append(tool.function.name)
        tools.append(_spec(tool.function))
    _check_choice(request.tool_choice, names)
    if request.tool_choice == "none":
        return None, None
    choice, untyped = request.tool_choice, family == "qwen3_coder" and not forced
    rules = ToolRules(
        "forced" if forced else family,
        frozenset(names),
        request.parallel_tool_calls is not False,
        choice.function.name if isinstance(choice, ToolChoice) and choice.function else None,
        family in ("mistral", "mistral_args"),
        frozenset(strict),
        {one["function"]["name"]: one["function"]["parameters"] for one in tools if untyped},
    )
    return tools, rules


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
