"""One engine step: schedule, run, apply. Prefill and decode engines add what a finished prompt or token
means.

An engine is synchronous, does no I/O and reads no clock. One thread calls :meth:`step`; any thread may call
the other verbs. All state is guarded by one lock, which is *not* held while the model computes: so a
cancelled request, a released lease or a new job never waits for a step. A sequence that is removed while a
step reads its blocks is marked ``doomed`` and gives them back when that step has ended.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from pagerelay.common.engine.drafting import Drafting
from pagerelay.common.engine.flight import Flight, Launcher, in_flight
from pagerelay.common.engine.parts import EngineLimits, Outbox, StepStats
from pagerelay.common.engine.scheduler import Scheduler
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.engine.wishes import BAD_LOGITS, Wish, constrain, wish_of
from pagerelay.common.grammar import Grammars
from pagerelay.common.hashing import PrefixHasher
from pagerelay.common.kv.blocks import BlockPool, Holder, PrefixCache
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.runner import ModelFacts, ModelRunner
from pagerelay.common.states import Machine
from pagerelay.common.wire.account import BlockCounts
from pagerelay.common.wire.messages import DecodeJob, Failed, PrefillJob, PromptScores

NUM_REMEMBERED = 4096
"""Requests and leases of the past that are remembered."""
NUM_FINISHED, MAX_TOLD = 256, 20_000
"""Answers of the past that are remembered with all their tokens, and what is told of these."""


def _nothing() -> None:
    pass


def _ignored(kind: str, reason: str) -> None:
    pass


class EngineCore(ABC):
    """Shared machinery; what a finished prompt or token means is the subclasses' business."""

    def __init__(self, runner: ModelRunner, facts: ModelFacts, pool: KvPool, limits: EngineLimits) -> None:
        self.lock = threading.RLock()
        self.facts = facts
        self.limits = limits
        self.pool = pool
        self.blocks = BlockPool(pool.num_blocks, PrefixCache() if limits.prefix_cache else None)
        self.max_model_len = min(facts.max_model_len, pool.num_blocks * limits.block_size)
        self._grammars = Grammars(facts.folder, facts.vocab_size, facts.eos_token_ids)
        speculation, eos = limits.speculation, facts.eos_token_ids
        drafting = Drafting(speculation, eos, self.max_model_len) if speculation is not None else None
        # Guesses follow the last token, so they have to know it.
        self._launcher = Launcher(runner, pool, limits.block_size, limits.step_ahead and drafting is None)
        self.scheduler = Scheduler(
            self.blocks,
            PrefixHasher(facts.digest, limits.block_size),
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_batch_tokens=limits.max_batch_tokens,
            on_admit=self._admitted,
            on_short=self._short,
            drafting=drafting,
        )
        self.stats = StepStats()
        self.num_copied_blocks = 0
        """Shared ones, before somebody wrote to them."""
        self.written: int | None = None
        """The pool's mark of the step that was applied last."""
        self._outbox = Outbox()
        self._by_request: dict[str, Sequence] = {}
        self._flights: list[Flight] = []
        """Steps that the model was given and that are not applied yet, oldest first."""
        self._suspending: set[str] = set()
        """Requests to be suspended when no step holds them: until then none is begun ahead."""
        self._past: OrderedDict[str, int] = OrderedDict()
        """Requests that have left or were taken back before they came, with their attempt: what is said of
        them again, or late, finds nobody."""
        self._finished: OrderedDict[str, Sequence] = OrderedDict()
        self._num_told = 0
        """Answers that ended here lately: the router may ask for their end, should it have been lost."""
        self.on_dropped: Callable[[str, str], None] = _ignored
        """``(kind, reason)`` of a message that is dropped; called with the lock held."""
        self.on_ready: Callable[[], None] = _nothing
        """Called on any thread when something that a sequence waits for is there."""
        self.on_planned: Callable[[], None] = _nothing
        """Called on the engine's thread when a step was planned that has news (a prompt was admitted): the
        decode worker is told before the step is computed, not after."""

    def take_outbox(self) -> Outbox:
        """What has to be sent since the last call."""
        with self.lock:
            outbox, self._outbox = self._outbox, Outbox()
        return outbox

    # ------------------------------------------------------------------ one step

    def step(self) -> bool:
        """Applies one step if there is anything to do; tells whether there was. On a device the next one is
        begun before this one's tokens are waited for."""
        if not self._flights and not self._begin():
            return False
        self._begin()
        self._finish(self._flights[0])
        return True

    def _begin(self) -> bool:
        """Plans a step and gives it to the model, if need be behind one that runs; tells whether it did."""
        with self.lock:
            behind = self._flights[-1] if self._flights else None
            if behind is not None and not self._goes_behind(behind):
                return False
            eos, plan = self.facts.eos_token_ids, self.scheduler.plan()
            flight = Flight([wish_of(seq, count, eos, self._goes_on(seq)) for seq, count in plan])
            if flight.wishes:
                self._flights.append(flight)
            news = bool(self._outbox.to_router)
        if news:
            self.on_planned()
        if not flight.wishes:
            return False
        with self.lock:
            batch = self._launcher.build(flight, behind)
        self.num_copied_blocks += self._launcher.copy_shared(flight)
        if any(wish.seq.sampling.grammar is not None for wish in flight.wishes):
            flight.masks = self._launcher.reader.submit(constrain, flight.wishes, self._grammars)
        self._launcher.launch(flight, batch)
        return True

    def _goes_behind(self, flight: Flight) -> bool:
        """May a step be planned while this one runs? Not where its tokens decide what the next one is, nor
        where somebody would have to be preempted, whose blocks would not come back at once."""
        return self._launcher.ahead and flight.plain and self.scheduler.has_room and not self._suspending

    def _finish(self, flight: Flight) -> None:
        """Waits for the tokens of the oldest step and applies it."""
        if flight.masks is not None:
            flight.masks.result()
        self._launcher.land(flight)
        self._computed([(wish.seq, wish.count) for wish in flight.wishes])
        with self.lock:
            self.written = flight.mark
            self.pool.settle(flight.mark)
            self._apply(flight.wishes)
            self._flights.pop(0)

    def _apply(self, wishes: list[Wish]) -> None:
        self.stats = StepStats(
            num_seqs=len(wishes),
            num_prefill_tokens=sum(w.count for w in wishes if w.seq.num_computed < w.seq.num_given),
        )
        while wishes:
            self.stats.sampled += self._apply_one(wishes[0])
            del wishes[0]  # should applying one raise, it and those after it fail, not those before

    def _apply_one(self, wish: Wish) -> int:
        """Returns the number of tokens that it got."""
        seq = wish.seq
        seq.queued -= wish.count
        seq.pending -= wish.pending
        if seq.doomed:
            if not seq.in_step:
                self._give_back(seq)
            return 0
        if wish.failure is not None:
            if wish.failure is BAD_LOGITS:
                self.stats.bad_logits += 1
                for block in seq.block_ids:
                    self.blocks.forget(block)  # should the fault lie in its KV, nobody else shall have it
            self._fail(seq, *wish.failure, retryable=False)
            return 0
        if wish.scores:
            scores = PromptScores(
                request_id=seq.request_id, attempt=seq.attempt, first=seq.num_computed + 1, scores=wish.scores
            )
            self._outbox.to_router.append((seq.owner, scores))
        seq.num_computed += wish.count
        self.scheduler.cache_full_blocks(seq)
        self._advanced(seq)
        number = 0
        for number, (token, logprobs) in enumerate(wish.kept(), 1):
            if number > 1:  # the one before was guessed: its KV is there already
                seq.num_computed += 1
                self.scheduler.cache_full_blocks(seq)
            index = seq.next_index
            seq.token_ids.append(token)
            if logprobs is not None:
                seq.logprobs[index] = logprobs
            if not self._sampled(seq, token, index):
                break
        if seq.draft:
            self.stats.drafted += len(seq.draft)
            self.stats.accepted += number - 1
            self.scheduler.settle_draft(seq, number - 1)
        return number

    def fail_step(self, message: str) -> int:
        """A step raised: every request in flight fails (and may be tried elsewhere), the engine goes on."""
        with self.lock:
            hit, self._flights = in_flight(self._flights), []
            # What was launched of them may still write their blocks: whoever gets these waits for that.
            self.pool.settle(self.pool.mark_written())
            for seq in hit:
                seq.queued = seq.pending = 0
                if seq.doomed:
                    self._give_back(seq)
                    continue
                self._fail(seq, "step_failed", message, retryable=True)
            return len(hit)

    def _fail(self, seq: Sequence, code: str, message: str, retryable: bool) -> None:
        self._tell_failed(seq, code, message, retryable)
        self._failed(seq)

    def _tell_failed(self, seq: Sequence, code: str, message: str, retryable: bool) -> None:
        failed = Failed(
            request_id=seq.request_id, attempt=seq.attempt, code=code, message=message, retryable=retryable
        )
        self._outbox.to_router.append((seq.owner, failed))

    # ------------------------------------------------------------------ requests come and go

    def _accept(
        self, owner: str, job: PrefillJob | DecodeJob, machine: Machine, now: float
    ) -> Sequence | None:
        """A sequence for the job; ``None`` if it can never fit (the router is told) or is an old attempt's. A
        newer attempt replaces an older one. ``now``: by the same clock at each job."""
        known = self._by_request.get(job.request_id)
        attempt = known.attempt if known is not None else self._past.get(job.request_id, 0)
        if attempt >= job.attempt:
            self.on_dropped(type(job).__name__, "repeated" if attempt == job.attempt else "late")
            return None
        if known is not None:
            self._end(known, "ABORTED", "a newer attempt took its place")
        seq = Sequence(
            owner=owner,
            request_id=job.request_id,
            attempt=job.attempt,
            order=now - job.age_s,
            token_ids=job.token_ids,
            sampling=job.sampling,
            first_index=job.first_index,
            machine=machine,
        )
        if (misfit := seq.misfit(self.max_model_len, self.facts.vocab_size)) is not None:
            self._tell_failed(seq, *misfit, retryable=False)
            return None
        self._by_request[job.request_id] = seq
        if seq.sampling.grammar is not None:
            seq.compiling = self._grammars.prepare(seq.sampling.grammar)
            seq.compiling.add_done_callback(lambda _: self.on_ready())
        return seq

    def abort(self, request_id: str, attempt: int) -> None:
        """Takes a request back wherever it is; late or repeated calls do nothing."""
        with self.lock:
            seq = self._by_request.get(request_id)
            if seq is not None and seq.attempt <= attempt:
                self._end(seq, "ABORTED", "the request was taken back")
                return
            if seq is None and self._past.get(request_id, 0) < attempt:
                self._remember(request_id, attempt)  # its job may still be under way
                return
            self.on_dropped("Abort", "late")

    def probe(self, owner: str, request_id: str, attempt: int, next_index: int) -> None:
        """Says again what a router may have missed, or that the request is not here."""
        with self.lock:
            seq = self._by_request.get(request_id) or self._finished.get(request_id)
            if seq is not None and seq.attempt == attempt:
                self._repeat(seq, next_index)
            else:
                failed = Failed(
                    request_id=request_id,
                    attempt=attempt,
                    code="forgotten",
                    message="the worker does not know this request",
                    retryable=True,
                )
                self._outbox.to_router.append((owner, failed))

    def drop_owner(self, owner: str) -> int:
        """The router is gone, and nobody waits for its requests. Returns how many there were."""
        with self.lock:
            orphans = [seq for seq in self._by_request.values() if seq.owner == owner]
            for seq in orphans:
                self._end(seq, "ABORTED", "the router is gone")
            return len(orphans)

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def _end(self, seq: Sequence, state: str, reason: str | None = None) -> None:
        """The one place where a request leaves and its blocks are given back."""

    @abstractmethod
    def _repeat(self, seq: Sequence, next_index: int) -> None:
        """Sends again what has been said of it, output tokens from ``next_index`` on."""

    @abstractmethod
    def _failed(self, seq: Sequence) -> None:
        """The step it was in raised, or had no token for it."""

    @abstractmethod
    def _admitted(self, seq: Sequence) -> None:
        """It left the queue and has its blocks."""

    @abstractmethod
    def _short(self, seq: Sequence) -> bool:
        """A block is missing for it; see ``Scheduler``."""

    def _goes_on(self, seq: Sequence) -> bool:
        """Will it be computed here after the token that it is about to sample, unless that one is its end?"""
        return not seq.ends_at(seq.next_index + seq.pending, self.max_model_len)

    def _computed(self, plan: list[tuple[Sequence, int]]) -> None:  # noqa: B027 - a hook, nothing by default
        """The step's KV is written and not applied yet. The lock is not held: for work on its bytes."""

    @abstractmethod
    def _advanced(self, seq: Sequence) -> None:
        """More of its KV is computed."""

    @abstractmethod
    def _sampled(self, seq: Sequence, token: int, index: int) -> bool:
        """``token``, appended already, is its output at position ``index``. Does it go on?"""

    def _forget(self, seq: Sequence) -> None:
        """It is nobody's any more; what is said of it from now on is late."""
        del self._by_request[seq.request_id]
        self._remember(seq.request_id, seq.attempt)

    def _keep_answer(self, seq: Sequence) -> None:
        seq.drafter = seq.matcher = seq.compiling = seq.distinct_prompt = None
        seq.keys = []
        self._finished[seq.request_id] = seq
        self._num_told += seq.num_told
        while len(self._finished) > NUM_FINISHED or (self._num_told > MAX_TOLD and len(self._finished) > 1):
            self._num_told -= self._finished.popitem(last=False)[1].num_told

    def _remember(self, request_id: str, attempt: int) -> None:
        self._past[request_id] = attempt
        self._past.move_to_end(request_id)
        if len(self._past) > NUM_REMEMBERED:
            self._past.popitem(last=False)

    def _leave(self, seq: Sequence) -> None:
        """Takes a sequence out of the schedule and gives its blocks back, now or when the running step has
        ended."""
        self.scheduler.remove(seq)
        if seq.in_step:
            seq.doomed = True
        else:
            self._give_back(seq)

    def _give_back(self, seq: Sequence) -> None:
        self.blocks.drop(seq.block_ids, seq.holder)
        seq.block_ids = []

    def _hold_as(self, seq: Sequence, holder: Holder) -> None:
        """Its blocks stay its own and serve another purpose from now on."""
        self.blocks.move(seq.block_ids, seq.holder, holder)
        seq.holder = holder

    def _leaving(self) -> list[Sequence]:
        """Sequences that no request is known by and whose blocks somebody still touches: they have left, or
        are beams beside the first."""
        return [seq for seq in in_flight(self._flights) if seq.doomed]

    # ------------------------------------------------------------------ reading

    def knows(self, request_id: str) -> bool:
        with self.lock:
            return request_id in self._by_request

    def counts(self) -> BlockCounts:
        with self.lock:
            return self.blocks.counts()

    def check_ledger(self) -> None:
        """Recounts the ledger from the sequences that are here. Raises :class:`PagerelayError` if a block is
        lost, or held by nobody who will give it back."""
        with self.lock:
            here = [*self._by_request.values(), *self._leaving()]
            self.blocks.check_holders((seq.holder, seq.block_ids) for seq in here)

    def check_idle(self) -> bool:
        """True if no sequence is here; then the ledger has been recounted, and every block is free or cached.
        Raises :class:`PagerelayError` if it is not so."""
        with self.lock:
            if self._by_request or self._leaving():
                return False
            self.check_ledger()
            return True
