"""Steps that were given to the model and are not applied yet: at most two, one behind the other.

Where tokens are chosen on a device, a step can be begun while the one before it runs there. It takes those of
its tokens that the host does not know yet on the device, from what the step before has chosen. Everywhere
else a step is applied before the next is begun, and its tokens are chosen then.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.engine.wishes import BAD_LOGITS, Wish, answer
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.batch import Batch, Row, build_batch
from pagerelay.common.model.device_sampler import Chosen, DeviceSampler, sampler_for
from pagerelay.common.model.runner import ModelRunner
from pagerelay.common.model.sampler import BAD


@dataclass(slots=True)
class Flight:
    """One step. ``wishes``: those of its sequences that are not applied yet."""

    wishes: list[Wish]
    mark: int | None = None
    """The pool's, of what it writes."""
    logits: torch.Tensor | None = None
    """Where its tokens are chosen when it is applied; valid as long as no other step has been begun."""
    chosen: Chosen | None = None
    """Where they are chosen on the device, behind the model."""
    masks: Future[None] | None = None
    """What grammars allow: looked up while the model computes, since that depends on the past alone."""

    @property
    def plain(self) -> bool:
        """Is a token of each sequence all that is wanted of it, and no token but the last needed for that?"""
        return all(wish.plain for wish in self.wishes)

    def rows(self, behind: Flight | None) -> Iterator[Row]:
        """What each sequence computes. A token that is still to be chosen by the step before is −1 − k: the
        k-th of those that it chooses."""
        asking = [wish.seq for wish in behind.wishes if wish.requests] if behind is not None else []
        places = {id(seq): place for place, seq in enumerate(asking)}
        for wish in self.wishes:
            seq = wish.seq
            token_ids = seq.token_ids[wish.start : wish.start + wish.count]
            if len(token_ids) < wish.count:
                token_ids.append(-1 - places[id(seq)])
            yield Row(token_ids + seq.draft, wish.start, seq.block_ids, wish.num_logits)


class Launcher:
    """Gives steps to the model and reads what they have chosen. Belongs to the engine's thread."""

    def __init__(self, runner: ModelRunner, pool: KvPool, block_size: int, step_ahead: bool) -> None:
        self._runner, self._pool, self._block_size = runner, pool, block_size
        self._sample = sampler_for(runner.ops)
        self.ahead = step_ahead and isinstance(self._sample, DeviceSampler)
        """May a step be begun while another runs?"""
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="masks")
        """For what need not wait for a model that computes, and lets go of the interpreter."""

    def build(self, flight: Flight, behind: Flight | None) -> Batch:
        batch = build_batch(list(flight.rows(behind)), self._block_size, self._runner.ops.min_rows)
        if behind is not None and behind.chosen is not None and bool((batch.token_ids < 0).any()):
            batch = replace(batch, late_ids=behind.chosen.ids)
        return batch

    def copy_shared(self, flight: Flight) -> int:
        """What others compute with too becomes a sequence's own, before the step writes to it. Returns the
        number of blocks."""
        writers = [wish.seq for wish in flight.wishes if wish.seq.copied_block is not None]
        sources = [seq.copied_block for seq in writers if seq.copied_block is not None]
        if writers:
            self._pool.copy(sources, [seq.block_ids[-1] for seq in writers])
        for seq in writers:
            seq.copied_block = None
        return len(writers)

    def launch(self, flight: Flight, batch: Batch) -> None:
        logits = self._runner.run(batch, self._pool.tensor)
        flight.mark = self._pool.mark_written()
        if self.ahead and flight.plain and isinstance(self._sample, DeviceSampler):
            flight.chosen = self._sample.queue(logits, [r for wish in flight.wishes for r in wish.requests])
        else:
            flight.logits = logits

    def land(self, flight: Flight) -> None:
        """Waits for the step's tokens and gives each wish its own."""
        if flight.logits is not None:
            answer(flight.logits, flight.wishes, self._sample)
            flight.logits = None
        elif flight.chosen is not None:
            tokens = iter(flight.chosen.read())
            for wish in flight.wishes:
                wish.tokens = [next(tokens) for _ in wish.requests]
        for wish in flight.wishes:
            if wish.tokens[:1] == [BAD]:
                wish.failure = wish.failure or BAD_LOGITS


def in_flight(flights: list[Flight]) -> list[Sequence]:
    """Their sequences, each once."""
    return list({id(wish.seq): wish.seq for flight in flights for wish in flight.wishes}.values())
