"""Log-probabilities in the shapes of the endpoints.

Everywhere they are lists in the order of the tokens. Only ``/v1/completions`` has, because OpenAI's has, the
alternatives of a token as an object with the tokens' texts for names; where two have the same text, the less
likely one is named ``token_id:N``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from pagerelay.router.pieces import Told


class Vocabulary(Protocol):
    """Of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class CompletionLogprobs(Struct, frozen=True):
    """``choices[].logprobs`` of ``/v1/completions``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """``choices[].logprobs`` of ``/v1/chat/completions``."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TokenTop(Struct, frozen=True):
    token_id: int
    token: str
    logprob: float


class TokenScore(Struct, frozen=True):
    """``choices[].logprobs`` of ``/generate``, and ``prompt_logprobs`` everywhere: one a token."""

    token_id: int
    token: str
    logprob: float | None
    top: list[TokenTop]


def text_of(vocabulary: Vocabulary, token_id: int) -> str:
    """A token's text; ``bytes:`` and their escapes where it is a part of a character."""
    raw = vocabulary.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(told: Sequence[Told], vocabulary: Vocabulary) -> CompletionLogprobs:
    tops: list[dict[str, float] | None] = []
    for one in told:
        if one.logprobs is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in _with_chosen(one):
            name = text_of(vocabulary, token_id)
            top[f"token_id:{token_id}" if name in top else name] = logprob
        tops.append(top)
    return CompletionLogprobs(
        tokens=[text_of(vocabulary, one.token) for one in told],
        token_logprobs=[one.logprobs.logprob if one.logprobs is not None else None for one in told],
        top_logprobs=tops,
        text_offset=[one.offset for one in told],
    )


def _with_chosen(one: Told) -> list[tuple[int, float]]:
    """The most likely tokens, and the token itself after them if it is none of them."""
    if one.logprobs is None:
        return []
    top = list(one.logprobs.top)
    if one.token not in [token_id for token_id, _ in top]:
        top.append((one.token, one.logprobs.logprob))
    return top


def chat_logprobs(told: Sequence[Told], vocabulary: Vocabulary) -> ChatLogprobs:
    """The tokens' bytes, joined, are the answer's; a token that has no text in it has none."""

    return ChatLogprobs(
        [
            ChatTokenLogprob(
                text_of(vocabulary, one.token),
                one.logprobs.logprob,
                None if one.silent else list(vocabulary.token_bytes(one.token)),
                [
                    TopLogprob(text_of(vocabulary, token_id), logprob, list(vocabulary.token_bytes(token_id)))
                    for token_id, logprob in one.logprobs.top
                ],
            )
            for one in told
            if one.logprobs is not None
        ]
    )


def token_scores(told: Sequence[Told], vocabulary: Vocabulary) -> list[TokenScore]:
    return [
        TokenScore(
            one.token,
            text_of(vocabulary, one.token),
            one.logprobs.logprob if one.logprobs is not None else None,
            [
                TokenTop(token_id, text_of(vocabulary, token_id), logprob)
                for token_id, logprob in (one.logprobs.top if one.logprobs is not None else ())
            ],
        )
        for one in told
    ]
