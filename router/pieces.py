"""What an answer is made of, whatever the endpoint: text and tokens of one choice, a part or all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagerelay.common.wire.sampling import FinishReason, TokenLogprobs
from pagerelay.router.tool_calls import CallDelta


@dataclass(frozen=True, slots=True)
class Told:
    """A token with its log-probabilities, ``None`` for a prompt's first one.

    ``offset``: characters of the text before it. ``silent``: it has no text there, as one
    that ends the answer.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs | None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Of choice ``index``: new text and tokens in a stream, all of them at the end without one.

    ``told`` has an entry for each token of ``text`` where log-probabilities are wanted; with ``echo`` the
    prompt is part of both. ``prompt_told`` are those of the prompt where they are wanted beside the answer.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    told: list[Told] = field(default_factory=list)
    prompt_told: list[Told] = field(default_factory=list)
    score: float | None = None
    """What a beam search says that it is worth."""
    calls: list[CallDelta] = field(default_factory=list)
    """Pieces of calls of functions, which are no part of ``text``."""
