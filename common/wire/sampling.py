"""How one choice of a request wants its tokens chosen, and what is said of each token."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

FinishReason = Literal["stop", "length"]

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0)]

MAX_LOGPROBS = 20
"""Most alternatives that may be asked for beside a token."""
MAX_BEAMS = 64
MAX_BEAM_TOKENS = 150_000
"""Of all beams of a search together: their answers come in one message, five bytes a token at most."""


class Grammar(Struct, frozen=True, kw_only=True, gc=False):
    """What the whole output must look like.

    ``text`` is a JSON schema, a regular expression, a JSON list of texts, or a grammar in Lark's form.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str


class SamplingParams(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How to choose tokens; validated by the router, and by bounds at decoding.

    Randomness is a function of (``seed``, ``choice``, output position) alone, so neither the batch nor the
    worker nor a recovery changes a token. ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p``
    0 are off. ``max_tokens`` and ``min_tokens`` count output tokens from position 0, those before a recovery
    included.

    Logits are changed in this order: ``logit_bias`` is added; ``repetition_penalty`` divides (where negative:
    multiplies) those of all tokens of prompt and output; ``presence_penalty`` and ``frequency_penalty`` (the
    latter times the count) are subtracted from those of the output; what is not in ``allowed_token_ids`` (if
    any), would complete one of ``bad_words``, or that ``grammar`` or ``min_tokens`` forbid, is excluded.

    ``logprobs``: natural logarithms of the unchanged distribution, of each token and so many most likely
    ones; ``prompt_logprobs`` the same of the prompt's tokens.

    ``beam_width`` above 0: the answers are the best that a beam search of that width finds, and nothing is
    drawn. Logarithms of probabilities take the place of logits, and are changed as these would be. An answer
    of ``L`` tokens is worth their sum / ``L ** length_penalty``. The search ends with ``beam_width`` finished
    answers; unless ``early_stopping``, not before the likeliest beam is worth less than all of them:
    at the length that it has, or, with "never", at the one from ``L`` to ``max_tokens`` where it is worth
    most.
    """

    max_tokens: Count
    temperature: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    seed: Count = 0
    choice: Count = 0
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: tuple[tuple[TokenId, Annotated[float, Meta(ge=-100, le=100)]], ...] = ()
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    allowed_token_ids: tuple[TokenId, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Grammar | None = None
    beam_width: Annotated[int, Meta(ge=0, le=MAX_BEAMS)] = 0
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def changes_logits(self) -> bool:
        """Is the choice of a token more than a function of its logits and position?"""
        return (
            bool(self.logit_bias or self.bad_words or self.allowed_token_ids)
            or (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
            or self.grammar is not None
            or self.beam_width > 0
        )


def named_tokens(params: SamplingParams) -> list[int]:
    """All token ids that the parameters name: they must be of the vocabulary."""
    biased = [token for token, _ in params.logit_bias]
    bad = [token for word in params.bad_words for token in word]
    return [*params.stop_token_ids, *biased, *bad, *params.allowed_token_ids]


class TokenLogprobs(Struct, frozen=True, gc=False, array_like=True):
    """Of one token: the logarithm of its probability, and the most likely tokens with theirs, best first."""

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class Hypothesis(Struct, frozen=True, kw_only=True, gc=False):
    """A finished answer of a beam search. ``score``: what it is worth, see :class:`SamplingParams`."""

    token_ids: list[int]
    score: float
    finish_reason: FinishReason


class TokenDelta(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One output token. ``index`` is its position in the output, so a repeated one is recognised and
    dropped."""

    request_id: str
    attempt: int
    index: int
    token: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
