"""The shapes of answers, one :class:`Reply` an HTTP request; ``/v1/*`` are OpenAI's, ``/generate`` is ours.

A stream is ``start() + delta(…)* + end(…)``, every choice ending with one ``delta`` that has a finish reason;
a plain answer is ``whole(…)``. All give bytes ready to be written.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from pagerelay.common.wire.messages import FinishReason
from pagerelay.router.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenScore,
    Vocabulary,
    chat_logprobs,
    completion_logprobs,
    token_scores,
)
from pagerelay.router.pieces import Piece
from pagerelay.router.sse import DONE, event, json_body
from pagerelay.router.tool_calls import CallDelta, whole_calls
from pagerelay.router.validate import Kind, ParsedRequest

C = TypeVar("C")


class Usage(Struct, frozen=True):
    """``prompt_tokens`` counts each prompt once, however many choices answer it; ``completion_tokens`` all
    choices.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> Usage:
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class Timings(Struct, frozen=True, kw_only=True):
    """Milliseconds of one ``/generate`` request as the router saw them; ``None`` where a stage did not
    happen.
    """

    queue_ms: float | None = None
    prefill_ms: float | None = None
    handover_ms: float | None = None
    handover_phases_ms: dict[str, float] | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    recoveries: int = 0


class Reply(ABC):
    """Makes the answer of one request."""

    prefix = ""

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        include_usage: bool = False,
        logprobs: bool = False,
        token_ids: bool = False,
        named_call: bool = False,
    ) -> None:
        """``logprobs``, ``token_ids``: the request wants them of its tokens; ``named_call``: it forces a call
        of one function."""
        self.id = self.prefix + secrets.token_hex(12)
        self.model = model
        self.vocabulary = vocabulary
        self.logprobs = logprobs
        self.token_ids = token_ids
        self.named_call = named_call
        self.created = int(time.time())
        self.include_usage = include_usage

    def start(self, num_choices: int) -> bytes:
        """What a stream sends before any token."""
        return b""

    @abstractmethod
    def delta(self, piece: Piece) -> bytes:
        """A new piece of a choice; ``b""`` where the endpoint has nothing to say about it."""

    @abstractmethod
    def end(self, usage: Usage, timings: Timings) -> bytes:
        """The end of a stream that went well."""

    @abstractmethod
    def whole(self, outputs: list[Piece], usage: Usage, timings: Timings) -> bytes:
        """The body of an answer without streaming; outputs in the order of their index."""


# ------------------------------------------------------------------------------------------------ /generate


class _Generated(Struct, frozen=True):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenScore] | UnsetType = UNSET
    prompt_logprobs: list[TokenScore] | UnsetType = UNSET
    score: float | UnsetType = UNSET


class _Generation(Struct, frozen=True):
    id: str
    model: str
    choices: list[_Generated]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


def _prompt_logprobs(piece: Piece, vocabulary: Vocabulary) -> list[TokenScore] | UnsetType:
    return token_scores(piece.prompt_told, vocabulary) if piece.prompt_told else UNSET


class GenerateReply(Reply):
    """``{id, model, choices: [{index, text, token_ids, finish_reason}], usage, timings}``; a choice may have
    ``logprobs`` and ``prompt_logprobs``, and after a beam search its ``score``.

    A stream sends the same shape: text and ids are the new ones; usage and timings come in a last event of no
    choices.
    """

    prefix = "gen-"

    def delta(self, piece: Piece) -> bytes:
        return event(_Generation(self.id, self.model, [self._generated(piece)]))

    def _generated(self, piece: Piece) -> _Generated:
        return _Generated(
            piece.index,
            piece.text,
            piece.token_ids,
            piece.finish_reason,
            token_scores(piece.told, self.vocabulary) if self.logprobs else UNSET,
            _prompt_logprobs(piece, self.vocabulary),
            UNSET if piece.score is None else piece.score,
        )

    def end(self, usage: Usage, timings: Timings) -> bytes:
        return event(_Generation(self.id, self.model, [], usage, timings)) + DONE

    def whole(self, outputs: list[Piece], usage: Usage, timings: Timings) -> bytes:
        choices = [self._generated(output) for output in outputs]
        return json_body(_Generation(self.id, self.model, choices, usage, timings))


# ------------------------------------------------------------------------------------------------ OpenAI


class _TextChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[TokenScore] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


ChatFinish = FinishReason | Literal["tool_calls"]


class _Function(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class _ToolCall(Struct, frozen=True):
    function: _Function
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """In streams only."""


class _Turn(Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[_ToolCall] | UnsetType = UNSET


class _ChatChoice(Struct, frozen=True):
    index: int
    message: _Turn
    finish_reason: ChatFinish | None
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: list[TokenScore] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class _ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[_ToolCall] | UnsetType = UNSET


class _ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: _ChatDelta
    finish_reason: ChatFinish | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class _OpenAi(Struct, Generic[C], frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: Usage | UnsetType | None = UNSET


class _OpenAiReply(Reply):
    kind = ""
    chunk_kind = ""

    def _chunk(self, choices: list[Any], usage: Usage | None = None) -> bytes:
        shown = usage if self.include_usage else UNSET
        return event(_OpenAi(self.id, self.chunk_kind, self.created, self.model, choices, shown))

    def end(self, usage: Usage, timings: Timings) -> bytes:
        return self._chunk([], usage) + DONE if self.include_usage else DONE

    def whole(self, outputs: list[Piece], usage: Usage, timings: Timings) -> bytes:
        choices = [self._choice(output) for output in outputs]
        return json_body(_OpenAi(self.id, self.kind, self.created, self.model, choices, usage))

    def _ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.token_ids if self.token_ids else UNSET

    @abstractmethod
    def _choice(self, output: Piece) -> Struct:
        """A finished choice in the endpoint's shape."""


class CompletionReply(_OpenAiReply):
    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def delta(self, piece: Piece) -> bytes:
        if not piece.text and not piece.told and piece.finish_reason is None and not self.token_ids:
            return b""
        return self._chunk([self._choice(piece)])

    def _choice(self, output: Piece) -> Struct:
        return _TextChoice(
            output.index,
            output.text,
            output.finish_reason,
            completion_logprobs(output.told, self.vocabulary) if self.logprobs else None,
            _prompt_logprobs(output, self.vocabulary),
            self._ids(output),
        )


class ChatReply(_OpenAiReply):
    """A choice that ends by itself after calls of functions has the finish reason ``tool_calls``, but
    ``stop`` where the only function was named by the request."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._called: set[int] = set()

    def start(self, num_choices: int) -> bytes:
        first = _ChatDelta("assistant", "")
        return b"".join(self._chunk([_ChatChunkChoice(index, first)]) for index in range(num_choices))

    def delta(self, piece: Piece) -> bytes:
        chunk, index = b"", piece.index
        if piece.text or piece.told or self.token_ids:
            delta, ids = _ChatDelta(content=piece.text), self._ids(piece)
            chunk = self._chunk(
                [_ChatChunkChoice(index, delta, logprobs=self._logprobs(piece), token_ids=ids)]
            )
        if piece.calls:
            self._called.add(index)
            calls = [_tool_call(call, call.index) for call in piece.calls]
            chunk += self._chunk([_ChatChunkChoice(index, _ChatDelta(tool_calls=calls))])
        if piece.finish_reason is not None:
            reason = self._finish(piece.finish_reason, index in self._called)
            chunk += self._chunk([_ChatChunkChoice(index, _ChatDelta(), reason)])
        return chunk

    def _finish(self, reason: FinishReason, called: bool) -> ChatFinish:
        return "tool_calls" if called and reason == "stop" and not self.named_call else reason

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(piece.told, self.vocabulary) if self.logprobs else None

    def _choice(self, output: Piece) -> Struct:
        calls = [_tool_call(call) for call in whole_calls(output.calls)]
        content = None if calls and not output.text else output.text
        return _ChatChoice(
            output.index,
            _Turn("assistant", content, tool_calls=calls or UNSET),
            None if output.finish_reason is None else self._finish(output.finish_reason, bool(calls)),
            self._logprobs(output),
            _prompt_logprobs(output, self.vocabulary),
            self._ids(output),
        )


def _tool_call(call: CallDelta, index: int | UnsetType = UNSET) -> _ToolCall:
    if call.id is None or call.name is None:
        return _ToolCall(_Function(call.arguments), index=index)
    return _ToolCall(_Function(call.arguments, call.name), call.id, "function", index)


_REPLIES: dict[Kind, type[Reply]] = {
    "generate": GenerateReply,
    "completions": CompletionReply,
    "chat": ChatReply,
}


def reply_for(parsed: ParsedRequest, vocabulary: Vocabulary) -> Reply:
    """A fresh reply of the endpoint's shape, with an id of its own."""
    return _REPLIES[parsed.kind](
        parsed.model,
        vocabulary,
        parsed.include_usage,
        logprobs=parsed.logprobs is not None,
        token_ids=parsed.return_token_ids,
        named_call=parsed.tool_rules is not None and parsed.tool_rules.named is not None,
    )


class Model(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "pagerelay"


class Models(Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


def models_body(model: Model) -> bytes:
    """``GET /v1/models``"""
    return json_body(Models([model]))
