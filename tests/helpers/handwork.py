"""Router, data link and decode worker's shell played by hand around two engines: no sockets, no clock, no
threads.

The router's part keeps one journal a request, drops what comes twice or late, and dispatches anew what was
lost; the decode worker's part copies blocks with numpy, or however a subclass does it (:meth:`Hands.copy`).
Messages go either straight through (:meth:`Hands.run`) or one by one in whatever order a test chooses
(:attr:`Hands.flight`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines import assert_idle

from pagerelay.common.wire.messages import (
    Abort,
    Beams,
    Commit,
    DecodeJob,
    Failed,
    Fetch,
    FirstToken,
    HandedOver,
    Hypothesis,
    KvHandle,
    LeaseLost,
    Preempted,
    PrefillJob,
    PrefillStarted,
    Probe,
    Ready,
    Release,
    Released,
    Renew,
    SamplingParams,
    Suspend,
    Suspended,
    TokenDelta,
    Tokens,
)
from pagerelay.decode_svc.engine import DecodeEngine, Intake
from pagerelay.prefill_svc.engine import PrefillEngine

PEER = b"decode-1"
ROUTER = "router-1"


@dataclass
class Request:
    """The router's journal of one request."""

    request_id: str
    order: int
    prompt: list[int]
    sampling: SamplingParams
    attempt: int = 1
    emitted: list[int] = field(default_factory=list)
    early: dict[int, TokenDelta] = field(default_factory=dict)
    hypotheses: list[Hypothesis] | None = None
    """What a beam search has found."""
    reason: str | None = None
    error: str | None = None
    preempted: int = 0
    failures: list[str] = field(default_factory=list)
    aborted: bool = False
    handed_off: int = 0
    """The last attempt that a decode worker was given."""

    @property
    def over(self) -> bool:
        ended = self.reason is not None or self.hypotheses is not None
        return ended or self.error is not None or self.aborted


@dataclass
class Intaking:
    """One fetch on the decode worker's side."""

    intake: Intake
    missing: set[int]
    commit: Commit | None = None
    asked: bool = False


class Hands:
    def __init__(self, prefill: PrefillEngine, decode: DecodeEngine, *, split: bool = True) -> None:
        self.p, self.d, self.split = prefill, decode, split
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.flight: list[tuple[Callable[[Any], None], Any]] = []
        """Messages under way, each with what takes it."""
        self.fetches: dict[int, Intaking] = {}
        self.num_shipped = 0

    # ------------------------------------------------------------------ the router

    def submit(self, prompt: list[int], sampling: SamplingParams, request_id: str | None = None) -> Request:
        order = len(self.requests) + 1
        request = Request(request_id or f"r{order}", order, list(prompt), sampling)
        self.requests[request.request_id] = request
        self._dispatch(request)
        return request

    def _dispatch(self, request: Request) -> None:
        job: Any
        common: dict[str, Any] = {
            "request_id": request.request_id,
            "attempt": request.attempt,
            "age_s": 1000.0 - request.order,
            "token_ids": request.prompt + request.emitted,
            "sampling": request.sampling,
            "first_index": len(request.emitted),
        }
        if self.split:
            job = PrefillJob(**common)
            self.flight.append((self._at_prefill, job))
        else:
            job = DecodeJob(**common, handle=None)
            self.flight.append((self._at_decode, job))

    def _hand_off(self, request: Request, handle: KvHandle) -> None:
        if request.handed_off == request.attempt:
            return  # said twice
        request.handed_off = request.attempt
        job = DecodeJob(
            request_id=request.request_id,
            attempt=request.attempt,
            age_s=1000.0 - request.order,
            token_ids=request.prompt + request.emitted[: handle.num_tokens - len(request.prompt)],
            sampling=request.sampling,
            first_index=max(0, handle.num_tokens - len(request.prompt)),
            handle=handle,
        )
        self.flight.append((self._at_decode, job))

    def abort(self, request: Request) -> None:
        request.aborted = True
        self._take_back(request)

    def _take_back(self, request: Request) -> None:
        message = Abort(request_id=request.request_id, attempt=request.attempt)
        self.flight += [(self._at_prefill, message), (self._at_decode, message)]

    def recover(self, request: Request) -> None:
        self._take_back(request)
        request.attempt += 1
        request.early.clear()
        self._dispatch(request)

    def lose_decode(self, fresh: DecodeEngine) -> int:
        """The decode worker is gone with all that it held; ``fresh`` has come in its place.

        Every live request recovers, its prompt and emitted tokens computed again. Returns how many.
        """
        assert not self.flight, "deliver what is under way first, or it is lost with the worker"
        self.d = fresh
        self.fetches.clear()
        live = [request for request in self.requests.values() if not request.over]
        for request in live:
            self.recover(request)
        self.deliver_all()
        return len(live)

    def _at_router(self, message: Any) -> None:
        if isinstance(message, Tokens):
            for delta in message.deltas:
                self._accept(delta)
            return
        subject = message.delta if isinstance(message, FirstToken) else message
        request = self.requests[subject.request_id]
        if request.over or subject.attempt != request.attempt:
            return
        match message:
            case PrefillStarted():
                if request.sampling.beam_width or request.sampling.max_tokens > len(request.emitted) + 1:
                    self._hand_off(request, message.handle)
            case FirstToken():
                self._accept(message.delta)
            case HandedOver():
                self._accept(message.first)
            case Beams():
                request.hypotheses = message.hypotheses
            case Preempted():
                request.preempted += 1
                self.recover(request)
            case Suspended():
                self.recover(request)  # there is no other decode worker here that could take it
            case Failed():
                request.failures.append(message.code)
                if message.retryable:
                    self.recover(request)
                else:
                    request.error = message.code

    def _accept(self, delta: TokenDelta) -> None:
        request = self.requests[delta.request_id]
        if request.over or delta.attempt != request.attempt or delta.index < len(request.emitted):
            return
        if request.sampling.beam_width:
            return  # the likeliest first token, which need not be any answer's
        request.early.setdefault(delta.index, delta)
        while len(request.emitted) in request.early:
            due = request.early.pop(len(request.emitted))
            request.emitted.append(due.token)
            if due.finish_reason is not None:
                request.reason = due.finish_reason
                self._take_back(request)

    # ------------------------------------------------------------------ the two workers' shells

    def _at_prefill(self, message: Any) -> None:
        match message:
            case PrefillJob():
                self.p.submit(ROUTER, message, 0.0)
            case Abort():
                self.p.abort(message.request_id, message.attempt)
            case Fetch():
                self.p.fetch(PEER, message, self.now)
            case Release():
                self.p.release(PEER, message.lease, message.received)
            case Renew():
                self.p.renew(message.tickets, self.now)
            case Probe():
                self.p.probe(ROUTER, message.request_id, message.attempt, message.next_index)
        self.collect()

    def _at_decode(self, message: Any) -> None:
        if isinstance(message, DecodeJob):
            self.d.submit(ROUTER, message, 0.0)
        elif isinstance(message, Abort):
            self.d.abort(message.request_id, message.attempt)
        elif isinstance(message, Suspend):
            self.d.suspend(message.request_id, message.attempt)
        elif isinstance(message, Probe):
            self.d.probe(ROUTER, message.request_id, message.attempt, message.next_index)
        else:
            self._news(message)
        self.collect()

    def _news(self, message: Any) -> None:
        fetch = self.fetches.get(message.lease)
        if fetch is None:
            return
        seq = fetch.intake.seq
        match message:
            case Ready():
                due = [
                    (index, source)
                    for index, source in enumerate(message.block_ids, message.first)
                    if index in fetch.missing
                ]
                targets = [seq.block_ids[index] for index, _ in due]
                self.copy(message.lease, [source for _, source in due], targets)
                fetch.missing.difference_update(index for index, _ in due)
                self.num_shipped += len(due)
            case Commit():
                fetch.commit = message
            case LeaseLost():
                if message.ended:
                    self.d.fetch_pointless(seq)
                else:
                    self.d.fetch_failed(seq, message.reason, retryable=True)
                self._end_fetch(message.lease)
                return
            case Released():
                if not fetch.asked:
                    return
                if message.ok:
                    assert fetch.commit is not None
                    commit = fetch.commit
                    self.d.fetched(seq, commit.first_token, "hand", 0, 0.0, logprobs=commit.logprobs)
                else:
                    self.d.fetch_failed(seq, "the lease ran out", retryable=True)
                self._end_fetch(message.lease)
                return
        if not fetch.missing and fetch.commit is not None and not fetch.asked:
            fetch.asked = True
            self.flight.append((self._at_prefill, Release(lease=message.lease, received=True)))

    def copy(self, lease: int, sources: list[int], targets: list[int]) -> None:
        """The prefill worker's blocks ``sources`` into the decode worker's ``targets``."""
        self.d.pool.blocks[targets] = self.p.pool.blocks[sources]

    def _end_fetch(self, lease: int) -> None:
        self.d.fetch_ended(self.fetches.pop(lease).intake.seq)

    def stop_cancelled(self) -> None:
        """The copies of sequences that were taken back have stopped."""
        cancelled, self.d.cancelled_fetches = self.d.cancelled_fetches, []
        for seq in cancelled:
            for lease in [n for n, fetch in self.fetches.items() if fetch.intake.seq is seq]:
                del self.fetches[lease]
                self.flight.append((self._at_prefill, Release(lease=lease, received=False)))
            self.d.fetch_ended(seq)

    def collect(self) -> None:
        """What the engines want sent gets under way, and fetches begin that there is room for."""
        for engine in (self.p, self.d):
            outbox = engine.take_outbox()
            self.flight += [(self._at_router, message) for _, message in outbox.to_router]
            self.flight += [(self._at_decode, message) for _, message in outbox.to_peer]
        self.stop_cancelled()
        for intake in self.d.admit():
            seq, lease = intake.seq, intake.handle.lease
            self.fetches[lease] = Intaking(intake, set(range(intake.from_block, len(seq.block_ids))))
            fetch = Fetch(
                lease=lease,
                incarnation=intake.handle.incarnation,
                from_block=intake.from_block,
                layout=self.d.pool.layout,
                ticket=intake.handle.ticket,
            )
            self.flight.append((self._at_prefill, fetch))

    # ------------------------------------------------------------------ running

    def deliver(self, index: int = 0) -> None:
        take, message = self.flight.pop(index)
        take(message)
        self.check()

    def deliver_all(self) -> None:
        self.collect()
        while self.flight:
            self.deliver()

    def check(self) -> None:
        self.p.check_ledger()
        self.d.check_ledger()

    def step(self) -> bool:
        """Both engines compute one step, then all that follows is delivered."""
        worked = self.p.step() | self.d.step()
        self.check()
        self.deliver_all()
        return worked

    def run(self, most: int = 2000) -> None:
        """Until every request is over and both engines are idle."""
        self.deliver_all()
        for _ in range(most):
            if not self.step() and all(request.over for request in self.requests.values()):
                break
        assert all(request.over for request in self.requests.values()), "a request hangs"
        assert_idle(self.p)
        assert_idle(self.d)
