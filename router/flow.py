"""One choice of one request, as one coroutine: the router's journal of it, and its recovery.

States (``common/states.py`` has the table)::

    QUEUED      → PREFILLING   a prefill worker P has the job; ``PrefillStarted`` brings the handle of its KV
    PREFILLING  → HANDOFF      a decode worker D was chosen on fresh load and fetches while P computes
    QUEUED      → HANDOFF      no prefill worker is there: D computes the prompt itself
    HANDOFF     → DECODING     D has confirmed the KV
    any of them → RECOVERING   a worker was lost, the lease or the fetch failed, or D preempted it: all is
                               dispatched anew with prompt + tokens so far; sampling is keyed by position
    → FINISHED | FAILED | ABORTED; whichever way it ends, workers that may hold something are told once

The journal is ``emitted``. A token counts when its index is the next one due: what comes twice (both P and D
send the first token; a late attempt) is dropped. A gap, or silence, may mean that a message was lost: the
worker is asked, and says again what it has, or that it knows nothing of the request, which recovers then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagerelay.common.errors import DeadlineExceeded, InvalidRequest, Unavailable, WorkerLost
from pagerelay.common.states import ROUTER, Machine
from pagerelay.common.wire.messages import (
    Abort,
    Ask,
    DecodeJob,
    Failed,
    FinishReason,
    FirstToken,
    HandedOver,
    KvHandle,
    Preempted,
    PrefillJob,
    PrefillStarted,
    SamplingParams,
    TokenDelta,
    Tokens,
)
from pagerelay.router.links import RequestNews, WorkerLinks
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.policy import RoutingPolicy
from pagerelay.router.registry import WorkerEntry

log = logging.getLogger(__name__)

MAX_PREEMPTIONS = 64
"""A request preempted this often ends in an error instead of going round for ever."""


@dataclass(frozen=True, slots=True)
class FlowSettings:
    queue_timeout_s: float
    stall_timeout_s: float
    max_recoveries: int
    rejoin_wait_s: float = 1.0
    """With the 3 s until a silent worker is taken for dead, an answer that cannot go on ends within 5 s."""
    ask_after_s: float = 1.0
    """Without progress for this long, the worker that is due to make some is asked about the request."""


@dataclass(slots=True)
class FlowTimes:
    """Durations in seconds, as far as they are known."""

    queue_s: float | None = None
    prefill_s: float | None = None
    handover_s: float | None = None
    phases: dict[str, float] = field(default_factory=dict)  # of the hand-over, see HandoverPhases


class _Lost:
    """A worker that this request depends on is gone."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id


class RequestFlow:
    def __init__(
        self,
        *,
        request_id: str,
        order: int,
        prompt: list[int],
        sampling: SamplingParams,
        links: WorkerLinks,
        policy: RoutingPolicy,
        metrics: RouterMetrics,
        settings: FlowSettings,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self.attempt = 1
        self.emitted: list[int] = []
        self.recoveries = 0
        self.times = FlowTimes()
        self.transport: str | None = None
        self._order = order
        self._prompt = prompt
        self._sampling = sampling
        self._links = links
        self._policy = policy
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._machine = Machine(ROUTER, "QUEUED")
        self._inbox: asyncio.Queue[TokenDelta | RequestNews | _Lost] = asyncio.Queue()
        self._prefill: WorkerEntry | None = None
        self._decode: WorkerEntry | None = None
        self._preemptions = 0
        self._done = False
        self._handed_over_at: float | None = None
        self._first_index = 0
        """When the decode worker had the KV, and which token it was given with it."""
        self._progress_at = self._asked_at = 0.0
        """On the event loop's clock: the last new state or token, and the last question to a worker."""

    @property
    def state(self) -> str:
        return self._machine.state

    # ------------------------------------------------------------------ news from the links (synchronous)

    def news(self, message: RequestNews, worker_id: str) -> None:
        self._inbox.put_nowait(message)

    def tokens(self, message: Tokens, position: int) -> None:
        self._inbox.put_nowait(message.deltas[position])

    def worker_lost(self, worker_id: str) -> None:
        self._inbox.put_nowait(_Lost(worker_id))

    # ------------------------------------------------------------------ the coroutine's verbs

    async def start(self) -> None:
        """Dispatches the request. Raises Unavailable where nobody could serve it."""
        self._links.flows[self.request_id] = self
        await self._dispatch()

    async def next(self) -> tuple[list[int], FinishReason | None]:
        """The next tokens (at least one), and why the answer ended if it did. Raises an :class:`ApiError`."""
        fresh: list[int] = []
        reason: FinishReason | None = None
        while not fresh or (not self._inbox.empty() and reason is None):
            for delta in await self._step():
                fresh.append(delta.token)
                reason = delta.finish_reason
        if reason is not None:
            # The worker that sent the last token holds nothing any more; a decode worker that was only going
            # to take over still does.
            self._done = self.state == "DECODING" or self._decode is None
            self._move("FINISHED")
        return fresh, reason

    async def close(self) -> None:
        """The one exit: tells every worker that may still hold something, exactly once. May be called at any
        time."""
        self._links.flows.pop(self.request_id, None)
        if not self._machine.ended:
            self._move("ABORTED")
        await self._release(abort=not self._done)

    def finished_by_router(self) -> None:
        """A stop string ended the answer: the worker does not know yet, :meth:`close` will tell it."""
        if not self._machine.ended:
            self._move("FINISHED")

    # ------------------------------------------------------------------ one piece of news

    async def _step(self) -> list[TokenDelta]:
        patience = (
            self._settings.stall_timeout_s if self.state == "DECODING" else self._settings.queue_timeout_s
        )
        event = await self._event(patience)
        if event is None:
            was = self.state
            if was == "DECODING":
                await self._recover("stall", f"the decode worker was silent for {patience:g} s")
                return []
            self._move("FAILED")
            raise DeadlineExceeded(
                f"no progress for {patience:g} s while {was.lower()}; the cluster is overloaded or stuck"
            )
        if isinstance(event, TokenDelta):
            return await self._accept(event)
        if isinstance(event, _Lost):
            if event.worker_id in self._holders():
                await self._recover("worker_lost", "its worker was lost")
            return []
        attempt = event.delta.attempt if isinstance(event, FirstToken) else event.attempt
        if attempt != self.attempt:
            self._metrics.late_messages.inc()
            return []
        return await self._on_news(event)

    async def _event(self, patience: float) -> TokenDelta | RequestNews | _Lost | None:
        """The next news, asked for now and then; ``None`` without progress for ``patience`` seconds."""
        now = asyncio.get_running_loop().time
        while self._inbox.empty():
            left = self._progress_at + patience - now()
            if left <= 0:
                return None
            try:
                # Not wait_for: on Python 3.11 it can swallow a cancellation that comes with the item.
                async with asyncio.timeout(min(left, self._settings.ask_after_s)):
                    return await self._inbox.get()
            except TimeoutError:
                if now() < self._progress_at + patience:
                    await self._ask()
        return self._inbox.get_nowait()

    async def _ask(self) -> None:
        """Asks the worker that is due to make progress, not more often than every ``ask_after_s``."""
        now = asyncio.get_running_loop().time()
        entry = self._decode or self._prefill
        if entry is None or now - self._asked_at < self._settings.ask_after_s / 2:
            return
        self._asked_at = now
        ask = Ask(request_id=self.request_id, attempt=self.attempt, next_index=len(self.emitted))
        await self._links.send(entry, ask)

    async def _on_news(self, event: RequestNews) -> list[TokenDelta]:
        match event:
            case PrefillStarted():
                if self.state != "PREFILLING" or self._decode is not None:
                    return []  # said twice
                self.times.queue_s = event.queued_s
                self._metrics.queue.observe(event.queued_s)
                # One token is all that is wanted: it comes from P, and no decode worker is troubled.
                if self._sampling.max_tokens > len(self.emitted) + 1:
                    await self._hand_off(event.handle)
            case FirstToken():
                if event.delta.index == len(self.emitted):
                    self.times.prefill_s = event.prefill_s
                    self._metrics.prefill.observe(event.prefill_s)
                if self._prefill is not None:
                    self._prefill.tokens_due.pop(self.request_id, None)
                return await self._accept(event.delta)
            case HandedOver():
                self._handed_over(event)
                return await self._accept(event.first)
            case Preempted():
                self._preemptions += 1
                await self._recover("preempted", "the decode workers have too little memory for this request")
            case Failed():
                if not event.retryable:
                    self._move("FAILED")
                    if event.code == "too_long":
                        raise InvalidRequest(event.message, code="context_length_exceeded")
                    raise Unavailable(event.message, code=event.code)
                await self._recover(event.code, event.message)
        return []

    def _handed_over(self, event: HandedOver) -> None:
        if self.state != "HANDOFF":
            return  # said twice
        self._move("DECODING")
        self.transport = event.transport
        if event.transport == "local":
            self._metrics.recomputed_tokens.inc(event.num_computed_tokens)
        else:
            self.times.handover_s = event.handover_s
            self._metrics.handover.labels(transport=event.transport).observe(event.handover_s)
            if event.phases is not None:
                for name in event.phases.__struct_fields__:
                    self._phase(name.removesuffix("_s"), getattr(event.phases, name))
            self._handed_over_at, self._first_index = asyncio.get_running_loop().time(), event.first.index
            self._metrics.handover_bytes.labels(transport=event.transport).inc(event.num_bytes)
        if self._prefill is not None:
            self._prefill.release(self.request_id)
            self._prefill = None

    def _phase(self, name: str, seconds: float) -> None:
        self.times.phases[name] = seconds
        self._metrics.handover_phases.labels(phase=name).observe(seconds)

    async def _accept(self, delta: TokenDelta) -> list[TokenDelta]:
        """The delta if it is the next one due. Each worker's news come in order, and D repeats P's token
        before its own, so a gap means that a message was lost: D is asked, and has it unless it ended."""
        if delta.attempt != self.attempt:
            self._metrics.late_messages.inc()
            return []
        if delta.index > len(self.emitted):
            await self._ask()
            return []
        if delta.index < len(self.emitted):
            return []
        self.emitted.append(delta.token)
        self._progress_at = asyncio.get_running_loop().time()
        if self._handed_over_at is not None and self.state == "DECODING" and delta.index > self._first_index:
            self._phase("first_step", self._progress_at - self._handed_over_at)
            self._handed_over_at = None
        return [delta]

    # ------------------------------------------------------------------ dispatch and recovery

    def _holders(self) -> set[str]:
        return {entry.worker_id for entry in (self._prefill, self._decode) if entry is not None}

    def _blocks_needed(self, tokens: int) -> int:
        layout = self._links.registry.layout()
        return 1 if layout is None else -(-tokens // layout.block_size)

    async def _dispatch(self) -> None:
        """Sends the job to a prefill worker; where there is none, to a decode worker that computes the prompt
        too."""
        registry = self._links.registry
        tokens = self._prompt + self.emitted
        blocks = self._blocks_needed(len(tokens))
        single = self._sampling.max_tokens <= len(self.emitted) + 1
        decoders = registry.views("decode", "colocated")
        if not single and self._policy.decode(decoders, blocks) is None:
            self._move("FAILED")
            raise Unavailable("no decode worker is available", code="no_decode_worker", retry_after_s=1)
        chosen = self._policy.prefill(registry.views("prefill"), blocks)
        entry = registry.chosen(chosen) if chosen is not None else None
        if entry is None:
            await self._hand_off(None)
            return
        self._move("PREFILLING")
        self._prefill = entry
        entry.bound[self.request_id] = self
        entry.tokens_due[self.request_id] = len(tokens)
        await self._links.send(entry, PrefillJob(**self._job(tokens)))

    async def _hand_off(self, handle: KvHandle | None) -> None:
        """Chooses a decode worker on its load of this moment and sends it the job."""
        self._handed_over_at = None
        registry = self._links.registry
        tokens = self._prompt + self.emitted
        chosen = self._policy.decode(registry.views("decode", "colocated"), self._blocks_needed(len(tokens)))
        entry = registry.chosen(chosen) if chosen is not None else None
        if entry is None:
            self._move("FAILED")
            raise Unavailable("no decode worker is available", code="no_decode_worker", retry_after_s=1)
        self._move("HANDOFF")
        if handle is None and entry.hello.role != "colocated":
            self._metrics.local_prefills.labels(reason="no_prefill_worker").inc()
        self._decode = entry
        entry.bound[self.request_id] = self
        await self._links.send(entry, DecodeJob(**self._job(tokens), handle=handle))

    def _job(self, tokens: list[int]) -> dict[str, Any]:
        """The fields of a job of either kind."""
        return {
            "request_id": self.request_id,
            "attempt": self.attempt,
            "order": self._order,
            "token_ids": tokens,
            "sampling": self._sampling,
            "first_index": len(self.emitted),
        }

    async def _recover(self, cause: str, message: str) -> None:
        """Everything anew with what the client has already; at most ``max_recoveries`` times."""
        if self._machine.ended:
            return
        self._metrics.recoveries.labels(cause=cause).inc()
        log.warning(
            "%s recovers while %s, %d tokens in: %s (%s)",
            *(self.request_id, self.state.lower(), len(self.emitted), message, cause),
        )
        if cause != "preempted":
            self.recoveries += 1
        if self.recoveries > self._settings.max_recoveries or self._preemptions > MAX_PREEMPTIONS:
            self._move("FAILED")
            raise WorkerLost(f"gave up after {self._settings.max_recoveries} recoveries: {message}")
        self._move("RECOVERING")
        await self._release(abort=True)
        self.attempt += 1
        await self._wait_for_a_decoder()
        await self._dispatch()

    async def _wait_for_a_decoder(self) -> None:
        """An answer under way may wait a moment for a worker that comes back; a new request is refused at
        once."""
        deadline = self._clock() + self._settings.rejoin_wait_s
        while not self._links.registry.entries("decode", "colocated") and self._clock() < deadline:
            await asyncio.sleep(0.05)

    async def _release(self, abort: bool) -> None:
        for entry in (self._prefill, self._decode):
            if entry is None:
                continue
            entry.release(self.request_id)
            if abort and self._links.registry.find_alive(entry):
                await self._links.send(entry, Abort(request_id=self.request_id, attempt=self.attempt))
        self._prefill = self._decode = None

    def _move(self, state: str) -> None:
        self._machine.move(state)
        self._progress_at = asyncio.get_running_loop().time()
