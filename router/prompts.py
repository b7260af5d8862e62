"""The two ways to say what the model shall continue: text or ids (``prompt``), and turns (``messages``)."""

from __future__ import annotations

from typing import Any, Final, cast

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.schemas import ChatMessage, ContentPart, Prompt

Message = dict[str, str]

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_ROLES: Final = ("tool", "function")


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


def read_messages(messages: list[ChatMessage] | None) -> list[Message]:
    """Turns as a chat template takes them: ``role`` and ``content``, both texts."""
    if messages is None:
        raise missing("messages")
    if not messages:
        raise InvalidRequest("messages is an empty list; send at least one", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> Message:
    if message.role in _TOOL_ROLES:
        raise unsupported(f"{where}.role", "messages of tools are not supported")
    role = ROLES.get(message.role)
    if role is None:
        known = ", ".join(ROLES)
        raise InvalidRequest(f"{where}.role is unknown; known are {known}", param=f"{where}.role")
    for name in ("tool_calls", "function_call"):
        if getattr(message, name) not in (None, []):
            raise unsupported(f"{where}.{name}", "tool calls are not supported")
    content = message.content
    if content is None or content == []:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if not isinstance(content, str):
        content = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    return {"role": role, "content": content}


def _text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise unsupported(f"{where}.type", f'{where}.type: only parts of type "text" are supported')
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
    return part.text


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
