"""What the router knows of one choice's answer: all that a recovery needs, and all that a client gets."""

from __future__ import annotations

from dataclasses import dataclass

from pagerelay.common.wire.messages import PromptScores
from pagerelay.common.wire.sampling import SamplingParams, TokenDelta, TokenLogprobs

MAX_PREEMPTIONS = 64
"""A request preempted this often ends in an error instead of going round for ever."""


@dataclass(frozen=True, slots=True)
class FlowSettings:
    queue_timeout_s: float
    stall_timeout_s: float
    max_recoveries: int
    rejoin_wait_s: float = 1.0
    """With the 3 s until a silent worker is taken for dead, an answer that cannot go on ends within 5 s."""
    probe_s: float = 1.0
    """Silence after which the worker that is due to make progress is asked about the request."""


class Journal:
    """``tokens`` has grown by one with each output token, ``logprobs`` beside it where they are wanted."""

    def __init__(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_scores: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on."""
        self._held: dict[tuple[int, int], TokenDelta] = {}
        """By attempt and index: tokens that came before the scores of their prompt."""

    def all_tokens(self) -> list[int]:
        return self.prompt + self.tokens

    def ends_with_next(self, index: int) -> bool:
        """Is the token at output position ``index`` the last, so that no decode worker is needed?"""
        return not self.sampling.beam_width and self.sampling.max_tokens <= index + 1

    def add(self, delta: TokenDelta) -> None:
        self.tokens.append(delta.token)
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)

    def add_scores(self, message: PromptScores) -> bool:
        """False where an earlier part is missing; what is here already changes nothing."""
        missing = message.first - 1 - len(self.prompt_scores)
        if missing <= 0:
            self.prompt_scores += message.scores[-missing:]
        return missing <= 0

    @property
    def lacks_scores(self) -> bool:
        """Are scores of the prompt wanted that have not come?"""
        wanted = self.sampling.prompt_logprobs is not None and not self.tokens
        return wanted and len(self.prompt_scores) < len(self.prompt) - 1

    def hold(self, delta: TokenDelta) -> bool:
        """Keeps a token of D until the prompt's scores are here: P says them before D has the KV, but on
        another socket. False where the first is said again, for which somebody must have been asked: they
        will not come."""
        known = self._held.setdefault((delta.attempt, delta.index), delta)
        return known is delta or delta.index > 0

    def take_held(self) -> list[TokenDelta]:
        """What was kept, in the order in which it came; nothing as long as scores are missing."""
        if self.lacks_scores:
            return []
        held, self._held = self._held, {}
        return list(held.values())
