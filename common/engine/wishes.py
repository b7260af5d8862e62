"""What the sequences of one step want of its logits, and what they get."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.errors import GrammarError
from pagerelay.common.grammar import Grammars
from pagerelay.common.model.device_sampler import Sampler
from pagerelay.common.model.logits import SampleRequest, branches, scores, told, unsound
from pagerelay.common.model.sampler import BAD
from pagerelay.common.wire.sampling import TokenLogprobs

BAD_LOGITS = (
    "bad_logits",
    "the model's logits for this request hold NaN or infinity; check the model's weights and engine.dtype "
    "(float16 overflows where bfloat16 does not)",
)


@dataclass(slots=True)
class Wish:
    """Of one sequence, of which the step computes ``count`` tokens, from position ``start``, and its draft.

    Its rows of the logits are those that say how likely the prompt's tokens ``scored`` were, then one for
    each of ``requests``: for the token after the last, and those after each token of the draft.
    """

    seq: Sequence
    start: int
    count: int
    scored: Seq[int]
    requests: list[SampleRequest]
    tokens: list[int] = field(default_factory=list)
    """Sampled, one for each of ``requests``."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    failure: tuple[str, str] | None = None
    """Code and message of why it gets no token: its grammar cannot be followed, or its logits are none."""

    pending: int = 0
    """1 where the sequence goes on from the token that is sampled, as far as can be known before it is."""

    @property
    def plain(self) -> bool:
        """Is a token all that is wanted, and is the next one a function of it by the KV alone?"""
        params = self.seq.sampling
        if self.scored or self.seq.draft or params.beam_width:
            return False
        return not self.requests or not (params.changes_logits or params.logprobs is not None)

    @property
    def num_logits(self) -> int:
        return len(self.scored) + len(self.requests)

    def kept(self) -> Iterator[tuple[int, TokenLogprobs | None]]:
        """The tokens that come next: the first, and those after guesses that turned out right."""
        for position, token in enumerate(self.tokens):
            if token == BAD:
                return  # after a guess: the next step finds it by what was chosen
            yield token, self.logprobs[position] if self.logprobs else None
            if position == len(self.seq.draft) or token != self.seq.draft[position]:
                return


def wish_of(seq: Sequence, count: int, eos: Seq[int], goes_on: bool = True) -> Wish:
    """A step that begins computes ``count`` of its tokens; if these are all, the next token is sampled, and
    it may go on from that."""
    start = seq.num_computed + seq.queued
    after = start + count
    requests = []
    if count == seq.num_due:
        requests = [seq.sample_request(eos, seq.draft[:guessed]) for guessed in range(len(seq.draft) + 1)]
    scored = seq.token_ids[start + 1 : min(after + 1, seq.num_given)] if seq.scores_prompt else ()
    wish = Wish(seq, start, count, scored, requests, pending=int(bool(requests) and goes_on))
    seq.queued += count
    seq.pending += wish.pending
    return wish


def constrain(wishes: Seq[Wish], grammars: Grammars) -> None:
    """Fills in what their grammars allow. After a guess that may not come, nothing is asked: none of it is
    kept."""
    for wish in wishes:
        seq, grammar = wish.seq, wish.seq.sampling.grammar
        if grammar is None or not wish.requests or seq.doomed:
            continue
        try:
            seq.matcher = seq.matcher or grammars.matcher(grammar, seq.compiling)
            masks = seq.matcher.masks(wish.requests[0].output, seq.draft)
        except GrammarError as error:
            wish.failure = "grammar_failed", str(error)
            continue
        for place, mask in enumerate(masks):
            wish.requests[place] = replace(wish.requests[place], mask=np.frombuffer(mask, np.int32).copy())


def answer(logits: torch.Tensor, wishes: Seq[Wish], sample: Sampler) -> None:
    """Fills in what the wishes get from ``logits`` ``[rows of all wishes, vocab]``, which it may write to."""
    rows: list[int] = []
    at = 0
    for wish in wishes:
        _score(logits, range(at, at + len(wish.scored)), wish)
        at += len(wish.scored)
        rows += range(at, at + len(wish.requests))
        at += len(wish.requests)
    requests = [request for wish in wishes for request in wish.requests]
    counts = [request.params.logprobs for request in requests]
    asked = [(place, count) for place, count in enumerate(counts) if count is not None]
    unchanged = scores(logits, [rows[place] for place, _ in asked])
    branching = [place for place, request in enumerate(requests) if request.branches]
    ahead = branches(logits, [rows[place] for place in branching], [requests[place] for place in branching])
    tokens = sample(logits if len(rows) == at else logits[rows], requests)
    said: dict[int, TokenLogprobs] = {}
    if unchanged is not None:
        of_asked = told(
            unchanged, [max(tokens[place], 0) for place, _ in asked], [count for _, count in asked]
        )
        said = {place: logprobs for (place, _), logprobs in zip(asked, of_asked, strict=True)}
    for place, likeliest in zip(branching, ahead, strict=True):
        if tokens[place] == BAD:
            continue
        tokens[place], said[place] = likeliest.top[0][0], likeliest
    at = 0
    for wish in wishes:
        places = range(at, at + len(wish.requests))
        wish.tokens = tokens[at : at + len(wish.requests)]
        wish.logprobs = [said[place] for place in places if place in said]
        at += len(wish.requests)


def _score(logits: torch.Tensor, rows: Seq[int], wish: Wish) -> None:
    table = scores(logits, rows)
    if table is not None:
        count = wish.seq.sampling.prompt_logprobs or 0
        wish.scores = told(table, wish.scored, [count] * len(wish.scored))
        if bool(unsound(table).any()):
            wish.failure = BAD_LOGITS
