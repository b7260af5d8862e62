"""Speculative decoding by prompt lookup: the next tokens are guessed to be those that followed the same few
tokens before, in the prompt or in the answer. A step computes the guesses beside the last token and keeps
those that are sampled anyway, so the answer stays what it is: an answer that copies takes fewer steps.

The method is prompt lookup decoding (Saxena, 2023), which vLLM calls ``ngram``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pagerelay.common.engine.sequence import Sequence

INDEXED_PER_STEP = 4096
"""Tokens that are entered into indices before one step, about 4 ms: a long prompt's take several."""
MOST_MISSES = 6


@dataclass(frozen=True, slots=True)
class Speculation:
    num_tokens: int = 4
    """Most guesses for one sequence in one step."""
    min_ngram: int = 2
    max_ngram: int = 4
    """So many last tokens are looked for, the most first."""


class NgramIndex:
    """Where the n-grams of a growing list of tokens were last followed by another token. Takes some 400
    bytes a token, small beside the KV."""

    def __init__(self, least: int, most: int) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(most, least - 1, -1)}
        """By length, longest first: n-gram → position after its latest occurrence."""
        self.num_entered = 0

    def extend(self, tokens: Seq[int], most: int) -> int:
        """Enters what is new in ``tokens``, at most so many; returns how many that were."""
        start, end = self.num_entered, min(len(tokens), self.num_entered + most)
        for n, after in self._after.items():
            for at in range(max(start, n), end):
                after[tuple(tokens[at - n : at])] = at
        self.num_entered = end
        return end - start

    def propose(self, tokens: Seq[int], count: int) -> list[int]:
        """What followed the latest earlier occurrence of the last tokens, ``count`` tokens or none. Where
        that reaches the end of ``tokens`` they repeat themselves, and are taken to go on with it."""
        for n, after in self._after.items():
            at = after.get(tuple(tokens[-n:]))
            if at is not None:
                period = len(tokens) - at
                return [tokens[at + ahead % period] for ahead in range(count)]
        return []


class Drafter:
    """The guesses of one sequence. When most of them are wrong it makes none for a while, which doubles each
    time, up to 62 tokens; as soon as half of them are right it is as before."""

    __slots__ = ("_misses", "index", "resumes_at")

    def __init__(self, speculation: Speculation) -> None:
        self.index = NgramIndex(speculation.min_ngram, speculation.max_ngram)
        self._misses = 0
        self.resumes_at = 0
        """Guesses again with so many tokens."""

    def told(self, num_tokens: int, drafted: int, kept: int) -> None:
        """So many of its guesses were right; the sequence has ``num_tokens`` now."""
        if 2 * kept >= drafted:
            self._misses = 0
            return
        self._misses = min(self._misses + 1, MOST_MISSES)
        self.resumes_at = num_tokens + 2**self._misses - 2


class Drafting:
    """The guesses of an engine's sequences."""

    def __init__(self, speculation: Speculation, eos: Seq[int], max_model_len: int) -> None:
        self._speculation = speculation
        self._eos = eos
        self._max_model_len = max_model_len
        self._may_enter = 0

    def begin(self) -> None:
        """Before the guesses of one step."""
        self._may_enter = INDEXED_PER_STEP

    def guesses(self, seq: Sequence, most: int) -> list[int]:
        """At most so many, for a sequence that decodes; none after which no token could count."""
        if seq.in_step or seq.num_tokens == seq.num_given or seq.sampling.beam_width:
            return []
        count = min(
            most,
            self._speculation.num_tokens,
            seq.sampling.max_tokens - seq.next_index - 1,
            self._max_model_len - seq.num_tokens - 1,
        )
        drafter = seq.drafter = seq.drafter or Drafter(self._speculation)
        if count < 1 or seq.num_tokens < drafter.resumes_at:
            return []
        self._may_enter -= drafter.index.extend(seq.token_ids, self._may_enter)
        if drafter.index.num_entered < seq.num_tokens:
            return []
        found = drafter.index.propose(seq.token_ids, count)
        for ahead, token in enumerate(found):
            if seq.finish_reason(token, seq.next_index + ahead, self._eos, self._max_model_len):
                return found[:ahead]
        return found
