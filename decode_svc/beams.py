"""Beam search: one request, several sequences that share the KV of what they have in common.

The semantics are those of transformers' ``generate(num_beams=…, do_sample=False)``. In each step every beam
names its likeliest next tokens; of all of them together the best go on. Where several go on from one beam,
the first takes its sequence and the others get one that shares all its blocks; a block that is shared is
copied before it is written (``Scheduler``). Ties fall to the beam that was the likelier, then to the lower
token id, so a search that was lost with its worker finds the same answers again elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagerelay.common.engine.parts import EngineLimits
from pagerelay.common.engine.scheduler import Scheduler
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.kv.blocks import BlockPool
from pagerelay.common.wire.messages import Beams
from pagerelay.common.wire.sampling import Hypothesis, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Branch:
    """A beam, ``rank`` of those that were, goes on with ``token``; ``score`` is the logarithm of its answer's
    probability."""

    score: float
    rank: int
    token: int


class BeamSearch:
    """``members`` are the beams' sequences, the likeliest first, ``finished`` the answers until now, the best
    first. The engine, under its lock, is the only writer."""

    def __init__(self, lead: Sequence, eos: tuple[int, ...], max_model_len: int) -> None:
        """``lead`` computes the prompt, or gets its KV; all other beams branch off from it."""
        lead.width = lead.sampling.beam_width
        self.members = [lead]
        self.finished: list[Hypothesis] = []
        self.num_tokens = 0
        """Of every beam's answer."""
        self._params = lead.sampling
        self._stops = lead.stops(eos)
        self._max_tokens = min(lead.sampling.max_tokens, max_model_len - lead.num_given)
        self._scores = [0.0]
        self._ahead: dict[int, TokenLogprobs] = {}

    def misfit(self, limits: EngineLimits, num_blocks: int) -> str | None:
        """Why it could not run alone with so many blocks: it would be preempted for ever."""
        width, size, given = self._params.beam_width, limits.block_size, self.members[0].num_given
        # The prompt's full blocks once, all others for each beam.
        need = given // size + width * (-(-(given + self._max_tokens) // size) - given // size)
        if width <= limits.max_num_seqs and need <= num_blocks:
            return None
        return (
            f"{width} beams of up to {self._max_tokens} tokens may need {need} KV blocks and {width} places "
            f"in a step; the decode worker has {num_blocks} and {limits.max_num_seqs}"
        )

    def computed(self, member: Sequence) -> bool:
        """The member's newest token is only the likeliest of those that may come. Have all members theirs?"""
        self._ahead[self.members.index(member)] = member.logprobs.pop(member.next_index - 1)
        member.token_ids.pop()
        return len(self._ahead) == len(self.members)

    def news(self, ended: bool = False) -> Beams:
        lead = self.members[0]
        return Beams(
            request_id=lead.request_id,
            attempt=lead.attempt,
            num_tokens=self.num_tokens,
            hypotheses=self.finished if ended else None,
        )

    def choose(self) -> list[Branch]:
        """One step of the search, when all have spoken: who goes on, the likeliest first; nobody at its
        end."""
        width, self.num_tokens = self._params.beam_width, self.num_tokens + 1
        last = self.num_tokens >= self._max_tokens
        ranked = sorted(
            (-(self._scores[rank] + logprob), rank, token)
            for rank, ahead in self._ahead.items()
            for token, logprob in ahead.top
        )
        self._ahead = {}
        going: list[Branch] = []
        for place, (cost, rank, token) in enumerate(ranked):
            if last or token in self._stops:
                if place < width:
                    self._finish(Branch(-cost, rank, token))
            else:
                going.append(Branch(-cost, rank, token))
            if len(going) == width:
                break
        self._scores = [branch.score for branch in going]
        return [] if not going or self._is_over(going[0].score) else going

    def _finish(self, branch: Branch) -> None:
        seq = self.members[branch.rank]
        answer = Hypothesis(
            token_ids=[*seq.token_ids[seq.num_given :], branch.token],
            score=self._worth(branch.score, self.num_tokens),
            finish_reason="stop" if branch.token in self._stops else "length",
        )
        self.finished = sorted([*self.finished, answer], key=lambda one: -one.score)
        del self.finished[self._params.beam_width :]

    def _worth(self, score: float, length: int) -> float:
        return score / float(length**self._params.length_penalty)

    def _is_over(self, likeliest: float) -> bool:
        """Enough has finished, and none of those that go on is thought to become better."""
        params = self._params
        if len(self.finished) < params.beam_width:
            return False
        at_the_end = params.early_stopping == "never" and params.length_penalty > 0
        best = self._worth(likeliest, self._max_tokens if at_the_end else self.num_tokens)
        return params.early_stopping is True or best <= self.finished[-1].score

    def branch(self, going: list[Branch], scheduler: Scheduler, blocks: BlockPool) -> None:
        """The members become the beams that go on. None of them is in a step."""
        parents = self.members
        spare = [seq for rank, seq in enumerate(parents) if all(branch.rank != rank for branch in going)]
        self.members = []
        for branch in going:
            parent = parents[branch.rank]
            if any(parent is member for member in self.members):
                child = spare.pop() if spare else _beside(parent, scheduler)
                _share(parent, child, blocks)
                self.members.append(child)
            else:
                self.members.append(parent)
        for seq in spare:
            scheduler.remove(seq)
            blocks.drop(seq.block_ids, seq.holder)
            seq.block_ids = []
        for branch, member in zip(going, self.members, strict=True):
            member.token_ids.append(branch.token)
            member.width = 1
        # Places that it does not need yet stay its own.
        self.members[0].width += self._params.beam_width - len(self.members)


def _beside(parent: Sequence, scheduler: Scheduler) -> Sequence:
    """One more sequence of the same request, without tokens or blocks."""
    child = Sequence(
        owner=parent.owner,
        request_id=parent.request_id,
        attempt=parent.attempt,
        order=parent.order,
        token_ids=[],
        sampling=parent.sampling,
        first_index=parent.first_index,
        machine=parent.machine,
    )
    child.num_given, child.holder = parent.num_given, parent.holder
    scheduler.add_running(child)
    return child


def _share(parent: Sequence, child: Sequence, blocks: BlockPool) -> None:
    """The child forgets what it was and goes on as the parent does. The books see only the blocks after those
    that both had."""
    had, has = child.block_ids, parent.block_ids
    kept = next((at for at, pair in enumerate(zip(had, has, strict=False)) if pair[0] != pair[1]), None)
    kept = min(len(had), len(has)) if kept is None else kept
    blocks.share(has[kept:], parent.holder)
    blocks.drop(had[kept:], child.holder)
    child.block_ids, child.token_ids, child.keys = has.copy(), parent.token_ids.copy(), parent.keys.copy()
    child.num_computed, child.num_known_blocks = parent.num_computed, parent.num_known_blocks
