"""Decode: KV blocks in, tokens out, every sequence joining and leaving the batch at any step.

The life of a request here::

    QUEUED        by arrival, until there are blocks for its whole prompt
    RESERVED      blocks are its own (less those that the prefix cache has already)
    FETCHING      the worker copies P's blocks into them as P announces them
    READY         all copied, the lease confirmed: the KV is ours
    RUNNING       one token a step (a beam search: one of each of its beams, and all of these end together);
                  without a handle, straight from QUEUED: the prompt is computed here, in chunks between the
                  others' tokens
    FINISHED      its last token is out
    LEASED        this worker drains: the router has asked for it, and another decode worker fetches its
                  blocks; RELEASED when that one has confirmed, EXPIRED if nobody came
    PREEMPTED     the youngest, when a block is missing for an older one: it recovers through the router
    FETCH_FAILED  P or the lease was lost: it recovers through the router
    ABORTED       the router took it back
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from msgspec.structs import replace

from pagerelay.common.engine.leasing import Leasing, LeasingEngine
from pagerelay.common.engine.parts import EngineLimits
from pagerelay.common.engine.scheduler import by_age
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.runner import ModelFacts, ModelRunner
from pagerelay.common.states import DECODE, Machine
from pagerelay.common.wire.messages import (
    DecodeJob,
    FinishReason,
    HandedOver,
    HandoverPhases,
    KvHandle,
    Preempted,
    Suspended,
    TokenDelta,
    TokenLogprobs,
)
from pagerelay.decode_svc.beams import BeamSearch


@dataclass(frozen=True, slots=True)
class Intake:
    """A reserved sequence whose blocks from ``from_block`` on the worker must fetch."""

    seq: Sequence
    handle: KvHandle
    from_block: int


class DecodeEngine(LeasingEngine):
    def __init__(
        self, runner: ModelRunner, facts: ModelFacts, pool: KvPool, limits: EngineLimits, leasing: Leasing
    ) -> None:
        super().__init__(runner, facts, pool, limits, leasing)
        self._queue: list[Sequence] = []
        self._handles: dict[str, KvHandle] = {}
        self._fetching: dict[str, Sequence] = {}
        self._ending: dict[int, Sequence] = {}
        """Given-up fetches whose copy may still run: their blocks are on their way back."""
        self._deltas: dict[str, list[TokenDelta]] = {}
        self._searches: dict[str, BeamSearch] = {}
        """By request: those that are answered by beams."""
        self.cancelled_fetches: list[Sequence] = []
        """Fetches that must be given up; the worker takes them from here and ends them with
        :meth:`fetch_ended`."""
        self.num_preempted = 0
        self.num_prompt_tokens_computed = 0

    # ------------------------------------------------------------------ from the router

    def submit(self, owner: str, job: DecodeJob, now: float) -> None:
        """Queues a request: for a fetch, or without a handle for computing its prompt here."""
        with self.lock:
            seq = self._accept(owner, job, Machine(DECODE, "QUEUED"), now)
            if seq is None or (seq.sampling.beam_width and not self._begin_search(seq)):
                return
            if job.handle is None:
                self.scheduler.add_waiting(seq)
            else:
                seq.holder = "fetch"
                self._handles[job.request_id] = job.handle
                insort(self._queue, seq, key=by_age)

    def _begin_search(self, seq: Sequence) -> bool:
        """False if it could never run here; the router is told."""
        search = BeamSearch(seq, self.facts.eos_token_ids, self.max_model_len)
        misfit = search.misfit(self.limits, self.blocks.total)
        if misfit is None:
            self._searches[seq.request_id] = search
        else:
            self._tell_failed(seq, "too_wide", misfit, retryable=False)
            self._end(seq, "ABORTED")
        return misfit is None

    # ------------------------------------------------------------------ intake

    def admit(self) -> list[Intake]:
        """Reserves blocks for queued requests, oldest first, and says what to fetch."""
        admitted: list[Intake] = []
        with self.lock:
            while self._queue:
                seq, held = self._queue[0], self.scheduler.num_taken
                if held + seq.width > self.limits.max_num_seqs:
                    break
                # A whole prompt found here needs only its commit: nothing is computed from it on this side.
                cached = self.scheduler.match_prefix(seq, seq.num_tokens)
                # Headroom: each running sequence may need a block soon, and preempting costs more than
                # waiting.
                if not self.scheduler.reserve(seq, cached, headroom=held):
                    break
                self._queue.pop(0)
                seq.machine.move("RESERVED")
                seq.machine.move("FETCHING")
                self._fetching[seq.request_id] = seq
                self.scheduler.num_elsewhere += seq.width
                admitted.append(Intake(seq, self._handles.pop(seq.request_id), len(cached)))
        return admitted

    def queued_handles(self) -> list[KvHandle]:
        """Leases that requests still waiting for room here depend on: someone must renew them."""
        with self.lock:
            return list(self._handles.values())

    def fetched(
        self,
        seq: Sequence,
        first_token: int,
        transport: str,
        num_bytes: int,
        handover_s: float,
        phases: HandoverPhases | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """All blocks are here and the lease is confirmed: the sequence runs from the next step on."""
        with self.lock:
            if seq.doomed:
                return  # aborted meanwhile; fetch_ended gives its blocks back
            search = self._searches.get(seq.request_id)
            if search is not None and logprobs is None:
                self.fetch_failed(seq, "the commit does not say what the beams begin with", retryable=True)
                return
            seq.machine.move("READY")
            seq.machine.move("RUNNING")
            self._hold_as(seq, "sequence")
            del self._fetching[seq.request_id]
            self.scheduler.num_elsewhere -= seq.width
            seq.num_computed = seq.num_given
            self.scheduler.cache_full_blocks(seq)
            if logprobs is not None:
                seq.logprobs[seq.next_index] = logprobs
            first = self._delta(seq, first_token, seq.next_index)
            seq.token_ids.append(first_token)
            self.scheduler.add_running(seq)
            handed = HandedOver(
                request_id=seq.request_id,
                attempt=seq.attempt,
                first=first,
                transport=transport,
                handover_s=handover_s,
                num_bytes=num_bytes,
                phases=phases,
            )
            self._outbox.to_router.append((seq.owner, handed))
            if search is not None:
                self._search_on(search, seq)

    def fetch_pointless(self, seq: Sequence) -> None:
        """The request ended on P, or was taken back there: the router knows, and its Abort may be under
        way."""
        with self.lock:
            if not seq.doomed:
                self._end(seq, "FETCH_FAILED")

    def fetch_failed(self, seq: Sequence, message: str, retryable: bool) -> None:
        """The fetch came to nothing; tells the router unless the request was taken back anyway."""
        with self.lock:
            if not seq.doomed:
                self._tell_failed(seq, "fetch_failed", message, retryable)
                self._end(seq, "FETCH_FAILED")

    def fetch_ended(self, seq: Sequence) -> None:
        """No copy into the sequence's blocks is running any more: if it does not run by now they are given
        back."""
        with self.lock:
            if seq.doomed:
                self._give_back(seq)
                seq.doomed = False
            self._ending.pop(id(seq), None)

    # ------------------------------------------------------------------ the step

    def step(self) -> bool:
        worked = super().step()
        with self.lock:
            self._flush_deltas()
            suspending, self._suspending = self._suspending, set()
            for request_id in suspending:
                seq = self._by_request.get(request_id)
                if seq is not None:
                    self.suspend(request_id, seq.attempt)
        return worked

    def _flush_deltas(self) -> None:
        for owner, deltas in self._deltas.items():
            self._outbox.tokens(owner, deltas)
        self._deltas = {}

    def _admitted(self, seq: Sequence) -> None:
        seq.machine.move("RUNNING")

    def _advanced(self, seq: Sequence) -> None:
        pass  # nobody else waits for blocks computed here

    def _sampled(self, seq: Sequence, token: int, index: int) -> bool:
        reason = self._reason(seq, token, index)
        if seq.num_computed == seq.num_given:
            # The prompt was computed here, this is its first token: there is no hand-over to tell of it.
            computed = seq.num_given - seq.num_cached
            self.num_prompt_tokens_computed += computed
            handed = HandedOver(
                request_id=seq.request_id,
                attempt=seq.attempt,
                first=self._delta(seq, token, index, reason),
                transport="local",
                handover_s=0.0,
                num_bytes=0,
                num_computed_tokens=computed,
            )
            self._outbox.to_router.append((seq.owner, handed))
        elif seq.request_id not in self._searches:
            self._deltas.setdefault(seq.owner, []).append(self._delta(seq, token, index, reason))
        if seq.request_id in self._searches:
            self._search_on(self._searches[seq.request_id], seq)
            return False
        if reason is not None:
            self._end(seq, "FINISHED")
            self._keep_answer(seq)
        return reason is None

    def _reason(self, seq: Sequence, token: int, index: int) -> FinishReason | None:
        return seq.finish_reason(token, index, self.facts.eos_token_ids, self.max_model_len)

    def _search_on(self, search: BeamSearch, seq: Sequence) -> None:
        """One of its beams is computed. When all are, the best go on."""
        if not search.computed(seq):
            return
        going = search.choose()
        seq.beams = search.news(ended=not going)
        self._outbox.to_router.append((seq.owner, seq.beams))
        if going:
            search.branch(going, self.scheduler, self.blocks)
        else:
            self._end(seq, "FINISHED")
            self._keep_answer(seq)

    def suspend(self, request_id: str, attempt: int) -> None:
        """Stops decoding and keeps the KV for another decode worker, who samples the next token. Said
        again, it is answered again; while its prompt is not complete here, or where nothing could fetch from
        this worker (it does not hand over), it is left alone."""
        with self.lock:
            if not self._leasing.gives:
                self.on_dropped("Suspend", "refused")
                return
            seq = self._by_request.get(request_id)
            if seq is None or seq.attempt != attempt:
                self.on_dropped("Suspend", "late")
                return
            if seq.in_step:
                self._suspending.add(request_id)
                return
            alone = request_id not in self._searches
            if alone and seq.machine.state == "RUNNING" and seq.num_tokens > seq.num_given:
                self._suspend(seq)
                self._flush_deltas()  # what it has sampled goes before the news that it stands still
            self._tell_suspended(seq)

    def _tell_suspended(self, seq: Sequence) -> None:
        lease = self._lease_of.get(seq.request_id)
        if lease is not None:
            suspended = Suspended(request_id=seq.request_id, attempt=seq.attempt, handle=lease.handle)
            self._outbox.to_router.append((seq.owner, suspended))

    def _suspend(self, seq: Sequence) -> None:
        """The last token's KV is not computed: the lease covers those before it."""
        seq.machine.move("LEASED")
        lease = self._open_lease(seq, seq.num_computed)
        lease.summed = False
        self.scheduler.trim(seq, seq.num_computed)
        self._complete_lease(lease, seq.token_ids[-1])

    def _repeat(self, seq: Sequence, next_index: int) -> None:
        """Those of its tokens that are not on their way already with the step's own message."""
        search = self._searches.get(seq.request_id)
        beams = seq.beams if search is None else search.news()
        if beams is not None:
            if beams.num_tokens:
                self._outbox.to_router.append((seq.owner, beams))
            return
        first = max(next_index, seq.first_index)
        tokens = seq.token_ids[seq.num_given + first - seq.first_index :]
        if tokens:
            deltas = [self._delta(seq, token, index) for index, token in enumerate(tokens, first)]
            if seq.machine.state == "FINISHED":
                last = deltas[-1]
                reason = self._reason(seq, last.token, last.index)
                deltas[-1] = replace(last, finish_reason=reason)
            self._outbox.tokens(seq.owner, deltas)
        self._tell_suspended(seq)

    @staticmethod
    def _delta(seq: Sequence, token: int, index: int, reason: FinishReason | None = None) -> TokenDelta:
        return TokenDelta(
            request_id=seq.request_id,
            attempt=seq.attempt,
            index=index,
            token=token,
            finish_reason=reason,
            logprobs=seq.logprobs.get(index),
        )

    def _short(self, seq: Sequence) -> bool:
        """Preempts the youngest that holds blocks, ``seq`` itself if that is the youngest."""
        if self._ending:
            return False  # blocks are on their way back: nobody else has to go
        victim = max((*self.scheduler.running, *self._fetching.values()), key=by_age)
        self.num_preempted += 1
        self._outbox.to_router.append(
            (victim.owner, Preempted(request_id=victim.request_id, attempt=victim.attempt))
        )
        fetching = victim.request_id in self._fetching
        self._end(victim, "FETCH_FAILED" if fetching else "PREEMPTED")
        # A fetch's blocks come back only when its copy has stopped; until then the needy one sits out.
        return not fetching and victim.request_id != seq.request_id

    def _end(self, seq: Sequence, state: str, reason: str | None = None) -> None:
        """The one place where a request leaves: its blocks go back now, or when nobody touches them any
        more."""
        seq.machine.move(state)
        self._forget(seq)
        self._close_lease(seq, reason, ended=state == "ABORTED")
        self._handles.pop(seq.request_id, None)
        search = self._searches.pop(seq.request_id, None)
        if seq in self._queue:
            self._queue.remove(seq)
        elif seq.request_id in self._fetching:
            del self._fetching[seq.request_id]
            self.scheduler.num_elsewhere -= seq.width
            seq.doomed = True
            self._ending[id(seq)] = seq
            self.cancelled_fetches.append(seq)
        else:
            for member in search.members if search is not None else (seq,):
                self._leave(member)

    def _failed(self, seq: Sequence) -> None:
        self._end(seq, "ABORTED")

    def _leaving(self) -> list[Sequence]:
        beams = [seq for search in self._searches.values() for seq in search.members]
        known = self._by_request.values()
        return [*super()._leaving(), *self._ending.values(), *(seq for seq in beams if seq not in known)]

    # ------------------------------------------------------------------ reading

    def num_waiting(self) -> int:
        with self.lock:
            return len(self._queue) + len(self.scheduler.waiting)

    def num_running(self) -> int:
        with self.lock:
            return len(self.scheduler.running) + len(self._fetching)

    def outstanding_tokens(self) -> int:
        """Prompt tokens to be computed here because no prefill worker does."""
        with self.lock:
            queues = (*self.scheduler.waiting, *self.scheduler.running)
            return sum(seq.num_remaining for seq in queues if seq.num_remaining > 1)
