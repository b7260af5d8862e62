"""What comes back: one :class:`RequestOutput` a prompt, with one :class:`CompletionOutput` a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice; of a stream, what is new in it."""

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    """Empty where the endpoint does not tell them, as in a chat."""
    finish_reason: str | None = None
    """``stop``, ``length`` …; ``None`` while a stream goes on."""
    logprobs: Any = None
    """As the API gives them; ``None`` if they were not asked for."""
    message: Mapping[str, Any] | None = None
    """The whole turn of a chat, with its tool calls; ``None`` from ``generate``."""

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> CompletionOutput:
        """From a choice of any endpoint, whole or a piece."""
        message = choice["message"] if "message" in choice else choice.get("delta")
        text = choice["text"] if message is None else message.get("content") or ""
        return cls(
            choice["index"],
            text,
            list(choice.get("token_ids") or ()),
            choice.get("finish_reason"),
            choice.get("logprobs"),
            message,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    """The text that was asked about; ``None`` for token ids and chats."""
    prompt_token_ids: list[int] | None
    """The ids that were asked about, or those that the API tells."""
    outputs: list[CompletionOutput]
    """``n`` choices in the order of their index."""
    prompt_logprobs: Any = None
    usage: Mapping[str, int] = field(default_factory=dict)
    """``prompt_tokens``, ``completion_tokens``, ``total_tokens``."""
    timings: Mapping[str, Any] = field(default_factory=dict)
    """Milliseconds as the router saw them; empty for chats."""

    @classmethod
    def of(cls, answer: Mapping[str, Any], prompt: str | Sequence[int] | None = None) -> RequestOutput:
        """From the body of an answer to one prompt."""
        choices = answer["choices"]
        known = choices[0] if choices else answer
        ids = answer.get("prompt_token_ids") or known.get("prompt_token_ids")
        if ids is None and prompt is not None and not isinstance(prompt, str):
            ids = prompt
        return cls(
            answer["id"],
            prompt if isinstance(prompt, str) else None,
            None if ids is None else list(ids),
            sorted((CompletionOutput.of(choice) for choice in choices), key=lambda output: output.index),
            answer.get("prompt_logprobs") or known.get("prompt_logprobs"),
            answer.get("usage") or {},
            answer.get("timings") or {},
        )
