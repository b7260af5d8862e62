"""The two ways to say what the model shall continue: text or ids (``prompt``), and turns (``messages``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.chat_template import ChatAbilities, Message
from pagerelay.router.json_body import decode_body
from pagerelay.router.schemas import ChatMessage, ChatRequest, ContentPart, Prompt

ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_object = msgspec.json.Decoder(dict[str, Any])


def read_prompts(prompt: Prompt | None, vocab_size: int) -> list[str | list[int]]:
    """One entry a prompt. A list of numbers is one prompt; a list of texts or of lists is several."""
    if prompt is None:
        raise missing("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt", code="empty_prompt")
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise InvalidRequest("prompt mixes texts, token ids and lists; use one of them", param="prompt")
    if kinds == {int}:
        numbers = cast(list[int], prompt)
        check_ids(numbers, vocab_size, "prompt")
        return [numbers]
    if kinds == {str}:
        return list(cast(list[str], prompt))
    lists = cast(list[list[int]], prompt)
    for index, ids in enumerate(lists):
        if not ids:
            param = f"prompt[{index}]"
            raise InvalidRequest(f"{param} has no tokens", param=param, code="empty_prompt")
        check_ids(ids, vocab_size, f"prompt[{index}]")
    return list(lists)


class Chat(Struct, frozen=True, kw_only=True):
    """A conversation as the model's template takes it."""

    messages: list[Message]
    variables: dict[str, Any] = {}
    """What the template sees beside the messages."""
    continue_final: bool = False
    """The prompt ends with the last message's text, so that the answer continues it."""


def read_chat(request: ChatRequest, abilities: ChatAbilities, tools: list[dict[str, Any]] | None) -> Chat:
    """Raises :class:`InvalidRequest` where the template cannot take what is asked for."""
    variables = _variables(request.chat_template_kwargs or {}, abilities)
    if tools is not None:
        variables["tools"] = tools
    continue_final = request.continue_final_message is True
    if continue_final and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise InvalidRequest(message, param="continue_final_message")
    if continue_final or request.add_generation_prompt is False:
        variables["add_generation_prompt"] = False
    messages = read_messages(request.messages, abilities)
    last = messages[-1]
    if continue_final and (last["role"] != "assistant" or last["content"] is None):
        message = "continue_final_message needs a last message of an assistant with content"
        raise InvalidRequest(message, param="continue_final_message")
    return Chat(messages=messages, variables=variables, continue_final=continue_final)


def _variables(given: Mapping[str, Any], abilities: ChatAbilities) -> dict[str, Any]:
    for name in given:
        if name != "enable_thinking" and name not in abilities.variables:
            known = ", ".join(sorted({"enable_thinking", *abilities.variables}))
            raise unsupported(
                "chat_template_kwargs",
                f"chat_template_kwargs: {name[:64]!a} is no variable of this model's chat template; "
                f"known are {known}",
            )
    return dict(given)


def read_messages(messages: list[ChatMessage] | None, abilities: ChatAbilities) -> list[Message]:
    """Turns as a chat template takes them: ``role`` and ``content``, and what tools need beside them."""
    if messages is None:
        raise missing("messages")
    if not messages:
        raise InvalidRequest("messages is an empty list; send at least one", param="messages")
    turns = [_message(message, f"messages[{index}]", abilities) for index, message in enumerate(messages)]
    if abilities.names:  # clients of OpenAI's API give the id of a call alone, some templates want its name
        calls = [call for turn in turns for call in turn.get("tool_calls", ())]
        names = {call["id"]: call["function"]["name"] for call in calls}
        for turn in turns:
            if "name" not in turn and turn.get("tool_call_id") in names:
                turn["name"] = names[turn["tool_call_id"]]
    return turns


def _message(message: ChatMessage, where: str, abilities: ChatAbilities) -> Message:
    if message.role == "function" or (message.role == "tool" and not abilities.calls):
        raise unsupported(
            f"{where}.role", "messages of tools are not supported by this model's chat template"
        )
    role = ROLES.get(message.role)
    if role is None:
        known = ", ".join(ROLES)
        raise InvalidRequest(f"{where}.role is unknown; known are {known}", param=f"{where}.role")
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise unsupported(f"{where}.{name}", f"{where}.{name} is not supported")
    calls = _calls(message, f"{where}.tool_calls", abilities)
    turn: Message = {"role": role, "content": _content(message, where, role in abilities.part_roles)}
    if calls:
        turn["tool_calls"] = calls
    elif turn["content"] is None:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if role == "tool":
        if message.tool_call_id is None:
            raise missing(f"{where}.tool_call_id")
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None and abilities.names:
        turn["name"] = message.name
    return turn


def _content(message: ChatMessage, where: str, takes_parts: bool) -> str | list[Message] | None:
    content = message.content
    if content is None or isinstance(content, str):
        return content
    texts = [_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if takes_parts and texts:
        # One part: halves of a control token would otherwise meet where the template joins them.
        return [{"type": "text", "text": "".join(texts)}]
    return "\n".join(texts) if texts else None


def _text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        shown = ascii(part.type[:32])
        raise unsupported(f"{where}.type", f'{where}.type {shown}: only parts of type "text" are supported')
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
    return part.text


def _calls(message: ChatMessage, where: str, abilities: ChatAbilities) -> list[Message]:
    if not message.tool_calls:
        return []
    if message.role != "assistant" or not abilities.calls:
        who = "this model's chat template" if message.role == "assistant" else f"role {message.role}"
        raise unsupported(where, f"{where}: tool calls are not supported by {who}")
    calls = []
    for index, call in enumerate(message.tool_calls):
        at = f"{where}[{index}]"
        if call.type != "function":
            raise unsupported(f"{at}.type", f'{at}.type: only "function" is supported')
        if call.function is None:
            raise missing(f"{at}.function")
        arguments = _arguments(call.function.arguments, f"{at}.function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def _arguments(text: str, param: str) -> dict[str, Any]:
    """Templates take arguments as an object; an empty text is an empty one."""
    try:
        return decode_body(text.encode() or b"{}", _object)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{param} must be a JSON object in a string: {error.message}", param=param
        ) from error


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Each inside the vocabulary, or :class:`InvalidRequest` that names the first that is not."""
    if max(ids, default=0) >= vocab_size:
        position = next(at for at, token_id in enumerate(ids) if token_id >= vocab_size)
        raise outside_vocabulary(f"{param}[{position}]", ids[position], vocab_size)


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")


def unsupported(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def outside_vocabulary(param: str, token_id: int, vocab_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: token id {token_id} is outside the vocabulary of {vocab_size}", param=param
    )


def same(value: Any, other: Any) -> bool:
    """Equal and of one JSON type: 0 is not false, but 0 is 0.0."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)
