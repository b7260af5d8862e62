"""Where one request is: the workers that hold something of it, and what is sent to them.

``source`` gives the KV: a prefill worker, or a decode worker that hands over. ``decoder`` takes it.
Whatever they are given is booked with them (``WorkerEntry.bound``), and taken back exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagerelay.common.wire.messages import (
    Abort,
    DecodeJob,
    KvHandle,
    PrefillJob,
    Probe,
    SamplingParams,
    Suspend,
)
from pagerelay.router.journal import FlowSettings
from pagerelay.router.links import WorkerLinks
from pagerelay.router.policy import RoutingPolicy
from pagerelay.router.registry import Bound, WorkerEntry

MAX_BESIDE = 16
"""Sequences more than the least loaded decode worker that another one may have and still be given an answer
to a prompt whose KV it has."""


class Placement:
    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        flow: Bound,
        links: WorkerLinks,
        policy: RoutingPolicy,
        clock: Callable[[], float],
        settings: FlowSettings,
    ) -> None:
        self.source: WorkerEntry | None = None
        self.decoder: WorkerEntry | None = None
        self._request_id = request_id
        self._final_len = num_prompt_tokens + sampling.max_tokens
        self._clock = clock
        self._rejoin_wait_s = settings.rejoin_wait_s
        self._arrived_at = clock()
        self._sampling = sampling
        self._flow = flow
        self._links = links
        self._policy = policy
        self.source_attempt = 0
        """The attempt that the source knows it by; older than the decoder's where a decode worker hands
        over."""
        self.probed_at = 0.0
        """Loop time of the last question."""

    def decodes_on(self, worker_id: str) -> bool:
        return self.decoder is not None and self.decoder.worker_id == worker_id

    def is_given_by(self, worker_id: str, attempt: int | None = None) -> bool:
        """Is this worker (and this attempt) the source that a decode worker takes it from?"""
        if self.source is None or self.decoder is None or self.source.worker_id != worker_id:
            return False
        return attempt is None or attempt == self.source_attempt

    def is_with(self, worker_id: str) -> bool:
        return any(entry.worker_id == worker_id for entry in (self.source, self.decoder) if entry is not None)

    def _blocks_needed(self, num_tokens: int) -> int:
        layout = self._links.registry.layout()
        return 1 if layout is None else -(-num_tokens // layout.block_size)

    def decoder_for(self, num_tokens: int) -> str | None:
        """Id of the decode worker that would get a sequence of this length now, on its load of this
        moment."""
        views = self._links.registry.views("decode", "colocated")
        return self._policy.decode(views, self._blocks_needed(num_tokens), self._final_len)

    def _book(self, worker_id: str | None) -> WorkerEntry | None:
        entry = self._links.registry.chosen(worker_id) if worker_id is not None else None
        if entry is not None:
            entry.bound[self._request_id] = self._flow
        return entry

    async def to_prefill(self, attempt: int, token_ids: list[int], first_index: int) -> WorkerEntry | None:
        """Sends the prompt to a prefill worker; ``None`` if there is none that could take it."""
        views = self._links.registry.views("prefill")
        entry = self._book(self._policy.prefill(views, self._final_len))
        if entry is None:
            return None
        self.source, self.source_attempt = entry, attempt
        entry.tokens_due[self._request_id] = len(token_ids)
        job = PrefillJob(
            request_id=self._request_id,
            attempt=attempt,
            age_s=self._clock() - self._arrived_at,
            token_ids=token_ids,
            sampling=self._sampling,
            first_index=first_index,
        )
        await self._links.send(entry, job)
        return entry

    async def wait_for_decoder(self, num_tokens: int) -> bool:
        """Could a decode worker take so many tokens? What is under way may wait a moment for one that comes
        back; a new request is refused at once."""
        deadline = self._clock() + self._rejoin_wait_s
        while self.decoder_for(num_tokens) is None:
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def shares_prefixes(self, worker_id: str) -> bool:
        """Can this decode worker be given something new, has it room for as much as the others have, and does
        it find the prompts that it has again?"""
        views = self._links.registry.views("decode", "colocated")
        least = min((view.num_seqs for view in views if view.rank == 0), default=0)
        mine = next((view for view in views if view.worker_id == worker_id), None)
        if mine is None or mine.num_seqs > least + MAX_BESIDE or mine.available_blocks <= mine.num_seqs:
            return False
        entry = self._links.registry.by_id(worker_id)
        return entry is not None and entry.hello.prefix_cache and self._links.registry.state(entry) == "ready"

    async def to_decoder(
        self,
        attempt: int,
        token_ids: list[int],
        first_index: int,
        handle: KvHandle | None,
        worker_id: str | None = None,
    ) -> WorkerEntry | None:
        """Sends the tokens whose KV is to be fetched, or without a handle computed, to a decode worker: to
        this one, or by load; ``None`` if there is none."""
        entry = self._book(worker_id or self.decoder_for(len(token_ids)))
        if entry is None:
            return None
        self.decoder = entry
        job = DecodeJob(
            request_id=self._request_id,
            attempt=attempt,
            age_s=self._clock() - self._arrived_at,
            token_ids=token_ids,
            sampling=self._sampling,
            first_index=first_index,
            handle=handle,
        )
        await self._links.send(entry, job)
        return entry

    def first_token_due(self) -> bool:
        """True once for each prompt: the first token that the source sends."""
        due = self.source.tokens_due if self.source is not None else {}
        return due.pop(self._request_id, None) is not None

    def kv_arrived(self) -> None:
        """The source has nothing more to do with it."""
        if self.source is not None:
            self.source.release(self._request_id)
            self.source = None

    def turn_over(self, attempt: int) -> None:
        """The decoder gives its KV from now on; ``attempt`` is the one that it knows."""
        self.source, self.decoder = self.decoder, None
        self.source_attempt = attempt

    async def probe(self, attempt: int, next_index: int, spacing_s: float) -> None:
        """Asks the workers that have it to say again what we may have missed, if they were not asked for
        ``spacing_s``."""
        now = asyncio.get_running_loop().time()
        if now - self.probed_at < spacing_s:
            return
        self.probed_at = now
        for entry, known_as in ((self.decoder, attempt), (self.source, self.source_attempt)):
            probe = Probe(request_id=self._request_id, attempt=known_as, next_index=next_index)
            await self._send(entry, probe)

    async def suspend(self, attempt: int) -> None:
        await self._send(self.decoder, Suspend(request_id=self._request_id, attempt=attempt))

    async def _send(self, entry: WorkerEntry | None, message: Probe | Suspend | Abort) -> None:
        if entry is not None and self._links.registry.find_alive(entry):
            await self._links.send(entry, message)

    async def release(self, attempt: int, abort: bool) -> None:
        """Nobody holds it any more. ``abort``: those who did do not know that yet."""
        holders, self.source, self.decoder = (self.source, self.decoder), None, None
        for entry in holders:
            if entry is not None:
                entry.release(self._request_id)
                if abort:
                    await self._send(entry, Abort(request_id=self._request_id, attempt=attempt))
