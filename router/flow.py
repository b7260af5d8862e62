"""One choice of one request, as one coroutine: the router's journal of it, and its recovery.

States (``common/states.py`` has the table)::

    QUEUED      → PREFILLING   a prefill worker P has the job; ``PrefillStarted`` brings the handle of its KV
    PREFILLING  → HANDOFF      a decode worker D was chosen on fresh load and fetches while P computes
    QUEUED      → HANDOFF      no prefill worker is there: D computes the prompt itself
    HANDOFF     → DECODING     D has confirmed the KV
    DECODING    → HANDOFF      D drains and hands over: another D fetches from it, nothing is computed anew
    any of them → RECOVERING   a worker was lost, the lease or the fetch failed, or D preempted it: all is
                               dispatched anew with prompt + tokens so far; sampling is keyed by position
    → FINISHED | FAILED | ABORTED; whichever way it ends, workers that may hold something are told once

The journal has the tokens so far. A token counts when its index is the next one due: what comes twice (both
P and D send the first token; a late attempt) is dropped. Where a message was lost, which a gap or silence
shows, the worker is asked to say it again (``Probe``); only if it cannot the request recovers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from pagerelay.common.errors import ApiError, DeadlineExceeded, Unavailable, WorkerLost
from pagerelay.common.states import ROUTER, Machine
from pagerelay.common.wire.messages import (
    Failed,
    FinishReason,
    FirstToken,
    HandedOver,
    KvHandle,
    Preempted,
    PrefillStarted,
    PromptScores,
    SamplingParams,
    Suspended,
    TokenDelta,
    Tokens,
)
from pagerelay.router.failure import error_of
from pagerelay.router.inbox import Event, Inbox, LeaveDecoder, Lost, News
from pagerelay.router.journal import MAX_PREEMPTIONS, Journal
from pagerelay.router.journal import FlowSettings as FlowSettings
from pagerelay.router.links import RequestNews, WorkerLinks
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.placement import Placement
from pagerelay.router.policy import RoutingPolicy
from pagerelay.router.sharing import PromptShare
from pagerelay.router.times import FlowTimes

log = logging.getLogger(__name__)


class RequestFlow:
    def __init__(
        self,
        *,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        links: WorkerLinks,
        policy: RoutingPolicy,
        metrics: RouterMetrics,
        settings: FlowSettings,
        clock: Callable[[], float],
        share: PromptShare | None = None,
        leads: bool = False,
    ) -> None:
        """``share``: of the choices of one prompt, of which this one may lead."""
        self.request_id = request_id
        self.attempt = 1
        self.journal = Journal(prompt, sampling)
        self.recoveries = 0
        self.times = FlowTimes(metrics)
        self.transport: str | None = None
        self._links = links
        self._place = Placement(request_id, len(prompt), sampling, self, links, policy, clock, settings)
        self._metrics = metrics
        self._settings = settings
        self._share, self._leads = share, leads
        self._machine = Machine(ROUTER, "QUEUED")
        self._inbox = Inbox()
        self._started = False
        """P has said in this attempt where its KV will be."""
        self._preemptions = 0
        self._done = False
        self._doubt_ends: float | None = None
        """Loop time until which D must show that it has the KV: the source has it no more."""
        self._failure: ApiError | None = None
        """What ended it, while tokens that came before are given out first."""
        self._progress_at = 0.0
        """Loop time of the last news that brought it forward; what is said again does not count."""

    @property
    def state(self) -> str:
        return self._machine.state

    # ------------------------------------------------------------------ news from the links (synchronous)

    def news(self, message: RequestNews, worker_id: str) -> None:
        self._inbox.put(News(message, worker_id))

    def tokens(self, message: Tokens, position: int) -> None:
        self._inbox.put(message.deltas[position])

    def worker_lost(self, worker_id: str, goodbye: bool) -> None:
        self._inbox.put(Lost(worker_id, goodbye))

    def leave_decoder(self, worker_id: str) -> None:
        """This worker wants to be rid of it. May be said again and again, also while it gives it away."""
        if self._place.decodes_on(worker_id):
            self._inbox.put(LeaveDecoder(worker_id))

    # ------------------------------------------------------------------ the coroutine's verbs

    async def start(self) -> None:
        """Dispatches the request. Raises Unavailable where nobody could serve it."""
        self._links.flows[self.request_id] = self
        beside = await self._share.worker_id() if self._share is not None and not self._leads else None
        if beside is not None and self._place.shares_prefixes(beside):
            await self._hand_off(None, self.journal.prompt, beside)
        else:
            await self._dispatch()

    async def next(self) -> tuple[list[int], FinishReason | None]:
        """The next tokens (at least one), and why the answer ended if it did. Raises an :class:`ApiError`,
        after all tokens that came before it."""
        if self._failure is not None:
            raise self._failure
        fresh: list[int] = []
        reason: FinishReason | None = None
        while not fresh or (not self._inbox.empty() and reason is None):
            try:
                deltas = await self._step()
            except ApiError as error:
                if not fresh:
                    raise
                self._failure = error
                break
            for delta in deltas:
                fresh.append(delta.token)
                reason = delta.finish_reason
        if reason is not None:
            # The worker that sent the last token holds nothing any more; a decode worker that was only going
            # to take over still does.
            self._done = self.state == "DECODING" or self._place.decoder is None
            self._move("FINISHED")
        return fresh, reason

    async def close(self) -> None:
        """The one exit: tells every worker that may still hold something, exactly once. May be called at any
        time."""
        self._links.flows.pop(self.request_id, None)
        if not self._machine.ended:
            self._move("ABORTED")
        await self._place.release(self.attempt, abort=not self._done)

    def finished_by_router(self) -> None:
        """A stop string ended the answer: the worker does not know yet, :meth:`close` will tell it."""
        if not self._machine.ended:
            self._move("FINISHED")

    # ------------------------------------------------------------------ one piece of news

    async def _step(self) -> list[TokenDelta]:
        settings = self._settings
        patience = settings.stall_timeout_s if self.state == "DECODING" else settings.queue_timeout_s
        was = self.state.lower()
        event = await self._next_event(patience)
        if event is None:
            if self._doubt_ends is not None:
                await self._recover("worker_lost", "the worker that had its KV has it no more")
                return []
            if self.state == "DECODING":
                await self._recover("stall", f"the decode worker was silent for {patience:g} s")
                return []
            self._move("FAILED")
            text = f"no progress for {patience:g} s while {was}; the cluster is overloaded or stuck"
            raise DeadlineExceeded(text, code="queue_timeout")
        if isinstance(event, TokenDelta):
            if self.state == "HANDOFF" and event.attempt == self.attempt:
                self._decoding()  # its HandedOver was lost
            return await self._accept(event)
        if isinstance(event, LeaveDecoder):
            await self._ask_to_suspend(event.worker_id)
            return []
        if isinstance(event, Lost):
            if event.goodbye and self._place.is_given_by(event.worker_id):
                await self._doubt()
            elif self._place.is_with(event.worker_id):
                await self._recover("worker_lost", "its worker was lost")
            return []
        message = event.message
        if isinstance(message, Failed) and self._place.is_given_by(event.worker_id, message.attempt):
            if message.code == "forgotten":
                await self._doubt()  # it also forgets what was confirmed to it
            else:
                await self._failed(message)
            return []
        attempt = message.delta.attempt if isinstance(message, FirstToken) else message.attempt
        if attempt != self.attempt:
            self._metrics.drop(type(message).__name__, "late")
            return []
        return await self._on_news(message)

    async def _doubt(self) -> None:
        """The source has its KV no more: either D has confirmed its copy, and its word is on another socket,
        or nobody has it. D is asked, and has ``probe_s`` for its answer."""
        if self._doubt_ends is None:
            self._doubt_ends = asyncio.get_running_loop().time() + self._settings.probe_s
            await self._place.probe(self.attempt, len(self.journal.tokens), 0.0)

    async def _next_event(self, patience_s: float) -> Event | None:
        """The next piece of news; ``None`` after ``patience_s`` without progress or at the end of a doubt.
        Silence may mean that a message was lost: meanwhile the workers are asked, whatever else comes."""
        now = asyncio.get_running_loop().time
        deadline = self._progress_at + patience_s
        if self._doubt_ends is not None:
            deadline = min(deadline, self._doubt_ends)
        while True:
            ask_at = max(self._progress_at, self._place.probed_at) + self._settings.probe_s
            event = await self._inbox.get(until=min(deadline, ask_at))
            if event is not None:
                return event
            if now() >= deadline:
                return None
            await self._probe()

    async def _probe(self) -> None:
        """Asks the workers that have it, but not for each of many tokens ahead of a missing one."""
        await self._place.probe(self.attempt, len(self.journal.tokens), self._settings.probe_s / 2)

    async def _on_news(self, event: RequestNews) -> list[TokenDelta]:
        match event:
            case PrefillStarted():
                if self._started or self.state != "PREFILLING":
                    self._metrics.drop("PrefillStarted", "repeated")
                    return []
                self._started = True
                self._advanced()
                self.times.queued(event)
                # One token is all that is wanted: it comes from P, and no decode worker is troubled.
                tokens = self.journal.all_tokens()[: event.handle.num_tokens]
                if not self.journal.ends_with_next(len(tokens) - len(self.journal.prompt)):
                    await self._hand_off(event.handle, tokens)
            case FirstToken():
                if not self._place.first_token_due():
                    self._metrics.drop("FirstToken", "repeated")
                    return []
                self.times.prefilled(event)
                return await self._accept(event.delta)
            case HandedOver():
                if self.state != "HANDOFF":
                    self._metrics.drop("HandedOver", "repeated")
                    return []
                self._decoding()
                self.transport = event.transport
                self.times.handed_over(event, self._progress_at)
                # Repeats P's token, by design; where D computed the prompt it alone brings it.
                fresh = event.first.index >= len(self.journal.tokens)
                return await self._accept(event.first) if fresh else []
            case PromptScores():
                if not self.journal.add_scores(event):
                    await self._recover("prompt_scores_lost", "a part of the prompt's scores was lost")
                return [one for delta in self.journal.take_held() for one in await self._accept(delta)]
            case Suspended():
                await self._move_over(event.handle)
            case Preempted():
                self._preemptions += 1
                await self._recover("preempted", "the decode workers have too little memory for this request")
            case Failed():
                await self._failed(event)
            case _:
                self._metrics.drop(type(event).__name__, "refused")  # Beams: there is no search
        return []

    async def _failed(self, news: Failed) -> None:
        if not news.retryable:
            self._move("FAILED")
            raise error_of(news)
        await self._recover(news.code, news.message)

    def _decoding(self) -> None:
        self._doubt_ends = None
        self._move("DECODING")
        if not self.journal.lacks_scores:
            self._place.kv_arrived()

    async def _accept(self, delta: TokenDelta) -> list[TokenDelta]:
        """The delta if it is the next one due. Each worker's news come in order, so a gap means that a
        message was lost: the worker has its tokens still and is asked for them."""
        if delta.attempt != self.attempt or delta.index < len(self.journal.tokens):
            self._metrics.drop("TokenDelta", "late" if delta.attempt != self.attempt else "repeated")
            return []
        if self.journal.lacks_scores:
            if not (self._started and self.state == "DECODING" and self.journal.hold(delta)):
                await self._recover("prompt_scores_lost", "the prompt's scores were lost")
            return []
        if delta.index > len(self.journal.tokens):
            await self._probe()
            return []
        self.journal.add(delta)
        self._advanced()
        if self.state == "DECODING":
            self._place.kv_arrived()
            self.times.decoded(delta.index, self._progress_at)
            if self._leads and self._share is not None and self._place.decoder is not None:
                self._share.settle(self._place.decoder.worker_id)
        return [delta]

    # ------------------------------------------------------------------ dispatch and recovery

    async def _dispatch(self) -> None:
        """To a prefill worker; where there is none, to a decode worker that computes the prompt too."""
        self._started = False
        tokens = self.journal.all_tokens()
        single = self.journal.ends_with_next(len(self.journal.tokens))
        if not single and self._place.decoder_for(len(tokens)) is None:
            self._fail_without_decoder()
        if await self._place.to_prefill(self.attempt, tokens, len(self.journal.tokens)) is None:
            await self._hand_off(None, tokens)
        else:
            self._move("PREFILLING")

    async def _hand_off(self, handle: KvHandle | None, tokens: list[int], beside: str | None = None) -> None:
        """To a decode worker, or to ``beside``: ``tokens`` are those whose KV it fetches or computes."""
        self.times.hands_off()
        first_index = len(tokens) - len(self.journal.prompt)
        if handle is not None:
            await self._place.wait_for_decoder(len(tokens))
        entry = await self._place.to_decoder(self.attempt, tokens, first_index, handle, beside)
        if entry is None:
            self._fail_without_decoder()
        self._move("HANDOFF")
        if handle is None and entry.hello.role != "colocated":
            reason = "shared_prompt" if beside is not None else "no_prefill_worker"
            self._metrics.local_prefills.labels(reason=reason).inc()

    def _fail_without_decoder(self) -> NoReturn:
        self._move("FAILED")
        text = "no decode worker with room for the whole answer is available"
        raise Unavailable(text, code="no_decode_worker", retry_after_s=1)

    async def _ask_to_suspend(self, worker_id: str) -> None:
        """If another decode worker could take it now; else it stays where it is."""
        here = self.state == "DECODING" and self.journal.tokens and self._place.is_with(worker_id)
        if here and self._place.decoder_for(len(self.journal.all_tokens())) is not None:
            await self._place.suspend(self.attempt)

    async def _move_over(self, handle: KvHandle) -> None:
        """The decode worker has stopped: its blocks hold all tokens but the last, and go to another one."""
        tokens = self.journal.all_tokens()[:-1]
        if self.state != "DECODING":
            self._metrics.drop("Suspended", "repeated")
        elif handle.num_tokens > len(tokens):
            await self._probe()  # tokens before it were lost: both are said again
        elif handle.num_tokens != len(tokens) or not await self._place.wait_for_decoder(len(tokens)):
            await self._recover("handover_failed", "its decode worker drains, and none could take over")
        else:
            self._metrics.moved.inc()
            self._place.turn_over(self.attempt)
            self.attempt += 1
            await self._hand_off(handle, tokens)

    async def _recover(self, cause: str, message: str) -> None:
        """Everything anew with what the client has already; at most ``max_recoveries`` times."""
        if self._machine.ended:
            return
        self._metrics.recovered(cause)
        log.warning(
            "%s recovers while %s, %d tokens in: %s (%s)",
            *(self.request_id, self.state.lower(), len(self.journal.tokens), message, cause),
        )
        if cause != "preempted":
            self.recoveries += 1
        if self._preemptions > MAX_PREEMPTIONS:
            self._move("FAILED")
            text = f"preempted {self._preemptions} times: {message}"
            raise Unavailable(text, code="preempted", retry_after_s=1)
        if self.recoveries > self._settings.max_recoveries:
            self._move("FAILED")
            raise WorkerLost(f"gave up after {self._settings.max_recoveries} recoveries: {message}")
        self._doubt_ends = None
        self._move("RECOVERING")
        await self._place.release(self.attempt, abort=True)
        self.attempt += 1
        await self._place.wait_for_decoder(len(self.journal.all_tokens()))
        await self._dispatch()

    def _move(self, state: str) -> None:
        self._machine.move(state)
        if self._leads and self._share is not None and self._machine.ended:
            self._share.settle(None)
        self._advanced()

    def _advanced(self) -> None:
        self._progress_at = asyncio.get_running_loop().time()
