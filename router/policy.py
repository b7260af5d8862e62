"""Which worker gets a request: a pure function of a snapshot. Least load, ties to the one that waited
longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the policy may know of a worker. ``available_blocks`` counts free and evictable ones."""

    worker_id: str
    rank: int | None
    """0: ready. 1: late with its heartbeat, so only if no other is there. ``None``: draining or stuck, gets
    nothing new."""
    outstanding_tokens: int
    num_seqs: int
    available_blocks: int
    max_model_len: int
    """Longest prompt + answer, in tokens, that it can hold."""
    last_chosen: int
    """Number of the last choice that fell on it; smaller is longer ago."""


class RoutingPolicy(Protocol):
    """``final_len``: tokens of the prompt and of the longest answer that was granted. A worker that cannot
    hold so many would end the answer early, so it is never chosen."""

    def prefill(self, workers: Sequence[WorkerView], final_len: int) -> str | None: ...

    def decode(self, workers: Sequence[WorkerView], blocks_needed: int, final_len: int) -> str | None:
        """``blocks_needed``: for the KV that it begins with."""


def _candidates(workers: Sequence[WorkerView], final_len: int) -> list[WorkerView]:
    fits = [worker for worker in workers if worker.rank is not None and worker.max_model_len >= final_len]
    best = min((worker.rank for worker in fits if worker.rank is not None), default=None)
    return [worker for worker in fits if worker.rank == best]


class LeastLoad:
    """P: fewest prompt tokens accepted and not yet computed. D: room for the prompt's blocks first, then
    fewest sequences, then most available blocks."""

    def prefill(self, workers: Sequence[WorkerView], final_len: int) -> str | None:
        fits = _candidates(workers, final_len)
        if not fits:
            return None
        return min(fits, key=lambda w: (w.outstanding_tokens, w.last_chosen)).worker_id

    def decode(self, workers: Sequence[WorkerView], blocks_needed: int, final_len: int) -> str | None:
        fits = _candidates(workers, final_len)
        if not fits:
            return None
        return min(
            fits,
            key=lambda w: (
                w.available_blocks < blocks_needed,
                w.num_seqs,
                -w.available_blocks,
                w.last_chosen,
            ),
        ).worker_id
