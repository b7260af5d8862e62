"""Who runs in the next step, and on how many tokens.

Rules, in this order:

1. A sequence with one token to compute (decoding) always runs, even if there are more of them than the token
   budget; sequences decode together, oldest first.
2. What is left of the token budget, or a quarter of it if that is more, goes to prompts: at most half of that
   to the oldest, the rest to those with the least left to compute. So a long prompt cannot hold up short
   ones, nor they it, and those that decode hold up neither.
3. Waiting sequences enter in order of arrival as soon as their blocks are there.
4. A decoding sequence writes to no block that others compute with too: it gets one of its own first, into
   which the step copies what is there.
5. A decoding sequence that needs a block and finds none preempts the youngest; the oldest is never preempted.
6. Guesses of decoding sequences, oldest first, get what is left: of the token budget, of the rows that
   ``max_num_seqs`` stands for, and of blocks beyond one for each sequence. They hold blocks for one step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from pagerelay.common.engine.drafting import Drafting
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.hashing import PrefixHasher
from pagerelay.common.kv.blocks import BlockPool

MAX_SCORED_ROWS = 128
"""Most rows of prompts in a step whose logits are all wanted: each is as long as the vocabulary."""


def by_age(sequence: Sequence) -> float:
    return sequence.order


class Scheduler:
    def __init__(
        self,
        blocks: BlockPool,
        hasher: PrefixHasher,
        *,
        block_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        on_admit: Callable[[Sequence], None],
        on_short: Callable[[Sequence], bool],
        drafting: Drafting | None = None,
    ) -> None:
        """``on_admit``: a waiting sequence got its blocks. ``on_short(sequence)``: a block is missing for it;
        make room (now: return True; later: return False, and the sequence sits this step out)."""
        self._blocks = blocks
        self._hasher = hasher
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._on_admit = on_admit
        self._on_short = on_short
        self.drafting = drafting
        """Makes guesses for those that decode; ``None``: nobody does."""
        self.num_elsewhere = 0
        """Sequences (or what they will become) that hold blocks here and do not run yet: they count against
        ``max_num_seqs``."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    @property
    def num_taken(self) -> int:
        """Of the ``max_num_seqs`` places."""
        return sum(sequence.width for sequence in self.running) + self.num_elsewhere

    def add_waiting(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=by_age)

    def add_running(self, sequence: Sequence) -> None:
        """For a sequence that holds its blocks already (its KV came from elsewhere)."""
        insort(self.running, sequence, key=by_age)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)

    def match_prefix(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Ids of cached blocks that hold the KV of a prefix of ``token_ids[:num_tokens]``; nobody holds them
        yet."""
        if self._blocks.cache is None:
            return []
        self._hasher.extend(sequence.keys, sequence.token_ids, sequence.num_tokens)
        return self._blocks.cache.match(sequence.keys[: num_tokens // self._block_size])

    def reserve(self, sequence: Sequence, cached: list[int], headroom: int) -> bool:
        """Gives a sequence the blocks of all its tokens: the cached ones shared, the rest taken. False: no
        room yet."""
        need = self.blocks_for(sequence.num_tokens) - len(cached)
        self._blocks.share(cached, sequence.holder)
        if self._blocks.available < need + headroom + sequence.width - 1:
            self._blocks.drop(cached, sequence.holder)
            return False
        sequence.block_ids = cached + self._blocks.take(need, sequence.holder)
        sequence.num_known_blocks = len(cached)
        sequence.num_cached = sequence.num_computed = len(cached) * self._block_size
        return True

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Tells the prefix cache about every block whose KV is complete."""
        if self._blocks.cache is None:
            return
        full = sequence.num_computed // self._block_size
        self._hasher.extend(sequence.keys, sequence.token_ids, sequence.num_computed)
        for index in range(sequence.num_known_blocks, full):
            self._blocks.cache.insert(sequence.keys[index], sequence.block_ids[index])
        sequence.num_known_blocks = full

    def _admit(self) -> None:
        while self.waiting and self.num_taken + self.waiting[0].width <= self._max_num_seqs:
            sequence = self.waiting[0]
            # At least one token is always computed: its logits are what the answer starts from. Where the
            # prompt's own are wanted, all are.
            cached = [] if sequence.scores_prompt else self.match_prefix(sequence, sequence.num_tokens - 1)
            if not self.reserve(sequence, cached, headroom=self.num_taken):
                return
            self.waiting.pop(0)
            insort(self.running, sequence, key=by_age)
            self._on_admit(sequence)

    def plan(self) -> list[tuple[Sequence, int]]:
        """(sequence, number of its tokens) of the next step; empty if there is nothing to do."""
        self._admit()
        chosen: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            ready = sequence.num_due == 1 and not sequence.waits_for_grammar
            if ready and sequence in self.running and self._has_room(sequence):
                chosen.append((sequence, 1))
        # Someone chosen may have been preempted by someone chosen later only if it was younger: drop those.
        chosen = [(sequence, count) for sequence, count in chosen if sequence in self.running]
        prompts = [sequence for sequence in self.running if sequence.num_due > 1]
        if prompts:
            budget = max(self._max_batch_tokens - len(chosen), self._max_batch_tokens // 4, 1)
            first, rest = prompts[0], sorted(prompts[1:], key=lambda s: (s.num_due, s.order))
            share = budget if not rest else max(1, budget // 2)
            counts = {id(first): min(first.num_due, share)}
            budget -= counts[id(first)]
            for sequence in rest:
                counts[id(sequence)] = min(sequence.num_due, budget)
                budget -= counts[id(sequence)]
            counts[id(first)] += min(first.num_due - counts[id(first)], budget)
            scored = MAX_SCORED_ROWS
            for sequence in prompts:
                if sequence.scores_prompt:
                    counts[id(sequence)] = min(counts[id(sequence)], scored)
                    scored -= counts[id(sequence)]
                if sequence.waits_for_grammar:
                    counts[id(sequence)] = min(counts[id(sequence)], sequence.num_due - 1)
            chosen += [(sequence, counts[id(sequence)]) for sequence in prompts if counts[id(sequence)]]
        if self.drafting is not None:
            self._draft(self.drafting, chosen)
        return chosen

    def _draft(self, drafting: Drafting, chosen: list[tuple[Sequence, int]]) -> None:
        computed = sum(count for _, count in chosen)
        room = min(self._max_num_seqs - len(chosen), self._max_batch_tokens - computed)
        drafting.begin()
        for sequence, _ in chosen:
            guesses = drafting.guesses(sequence, room) if room > 0 else []
            if guesses:
                missing = self.blocks_for(sequence.num_tokens + len(guesses)) - len(sequence.block_ids)
                spare = self._blocks.available - len(self.running) - self.num_elsewhere
                if 0 < missing <= spare:
                    sequence.block_ids += self._blocks.take(missing)
                fitting = len(sequence.block_ids) * self._block_size - sequence.num_tokens
                sequence.draft = guesses[:fitting]
                room -= len(sequence.draft)

    def settle_draft(self, sequence: Sequence, kept: int) -> None:
        """Its step is over, so many guesses were right: the blocks of those that were not are given back."""
        if sequence.drafter is not None:
            sequence.drafter.told(sequence.num_tokens, len(sequence.draft), kept)
        sequence.draft = []
        self.trim(sequence, sequence.num_tokens)

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives back what it holds beyond the blocks of so many tokens."""
        spare = sequence.block_ids[self.blocks_for(num_tokens) :]
        if spare:
            self._blocks.drop(spare, sequence.holder)
            del sequence.block_ids[-len(spare) :]

    def _has_room(self, sequence: Sequence) -> bool:
        while (missing := self._num_missing(sequence) > 0) or self._blocks.is_shared(sequence.block_ids[-1]):
            if self._blocks.available:
                if not missing:
                    sequence.copied_block = sequence.block_ids.pop()
                    self._blocks.drop([sequence.copied_block])
                sequence.block_ids += self._blocks.take(1)
            elif not self._on_short(sequence) or sequence not in self.running:
                return False
        return True

    def _num_missing(self, sequence: Sequence) -> int:
        return max(0, self.blocks_for(sequence.num_tokens + sequence.pending) - len(sequence.block_ids))

    @property
    def has_room(self) -> bool:
        """Will the next :meth:`plan` find a block for all that need one, so that nobody has to go?"""
        decoding = [sequence for sequence in self.running if sequence.num_due == 1]
        shared = sum(self._blocks.is_shared(sequence.block_ids[-1]) for sequence in decoding)
        return self._blocks.available >= shared + sum(map(self._num_missing, decoding))
