"""Model-based: P's and D's real engines, and a simulated network that does as it likes to their messages.

Rules submit requests, deliver, lose, repeat and reorder messages, crash and restart either side, abort,
suspend, let leases run out and let steps fail. After every rule the ledgers are recounted and every answer
is a beginning of the undisturbed one; a move that is not drawn raises. At the end the network heals and every
request that nobody took back ends with exactly its tokens.

``HYPOTHESIS_PROFILE=long pytest tests/unit/service/test_machines.py`` goes at least 100,000 steps.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from engines import EOS, FakeRunner, answer, assert_idle, decode_engine, greedy, handle_for, prefill_engine
from handwork import PEER, ROUTER, Hands, Request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from late import LateDevice, LateRunner
from msgspec import structs

from pagerelay.common.engine.core import EngineCore
from pagerelay.common.wire.messages import Fetch, Probe, Release, Renew, Suspend

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
pytestmark = pytest.mark.timeout(1200) if LONG else []
NUMBER = st.integers(0, 10_000)
LEASE_S = 10.0
MOST_ALIVE = 5
steps_taken = 0


class Broken(Exception):
    """A step that fails."""


class Cluster(Hands):
    """Both engines, and what of a worker's and the router's shell is about loss: restarts and questions."""

    def __init__(self, prefill_blocks: int, decode_blocks: int, **limits: Any) -> None:
        self.shapes = prefill_blocks, decode_blocks
        self.limits = limits
        self.starts = 0
        self.runners = [
            LateRunner(LateDevice(eager=True)) if limits["step_ahead"] else FakeRunner() for _ in range(2)
        ]
        super().__init__(self._new_prefill(), self._new_decode())

    def _new_prefill(self) -> Any:
        self.starts += 1
        incarnation = f"incarnation-{self.starts}"
        engine = prefill_engine(self.shapes[0], runner=self.runners[0], lease_s=LEASE_S, **self.limits)
        pool = engine.pool
        engine._last_lease = 1000 * self.starts  # Hands tells fetches apart by the lease alone

        def handle(lease: int, num_tokens: int) -> Any:
            return structs.replace(handle_for(lease, num_tokens, pool), incarnation=incarnation)

        engine._leasing = dataclasses.replace(engine._leasing, incarnation=incarnation, handle=handle)
        return engine

    def _new_decode(self) -> Any:
        return decode_engine(self.shapes[1], runner=self.runners[1], **self.limits)

    def restart_prefill(self) -> None:
        """SIGKILL and a new process at the same address: messages to the old one may still arrive."""
        self.p = self._new_prefill()
        self._lost()

    def restart_decode(self) -> None:
        for lease in list(self.fetches):
            del self.fetches[lease]
        self.d = self._new_decode()
        self._lost()

    def _lost(self) -> None:
        """The router notices: whatever may have been there is dispatched anew."""
        for request in self.requests.values():
            if not request.over:
                self.recover(request)
        self.collect()

    def probe(self, request: Request) -> None:
        question = Probe(
            request_id=request.request_id, attempt=request.attempt, next_index=len(request.emitted)
        )
        take = self._at_decode if request.handed_off == request.attempt else self._at_prefill
        self.flight.append((take, question))

    def ask_again(self) -> None:
        """What a fetch does after its patience: it repeats its open question. Those that wait for room renew
        their leases."""
        tickets = {handle.lease: handle.ticket for handle in self.d.queued_handles()}
        self.flight.append((self._at_prefill, Renew(tickets=tickets)))
        for lease, fetch in self.fetches.items():
            question: Any = Release(lease=lease, received=True)
            if not fetch.asked:
                question = Fetch(
                    lease=lease,
                    incarnation=fetch.intake.handle.incarnation,
                    from_block=min(fetch.missing, default=len(fetch.intake.seq.block_ids)),
                    layout=self.d.pool.layout,
                    ticket=fetch.intake.handle.ticket,
                )
            self.flight.append((self._at_prefill, question))


class Machines(RuleBasedStateMachine):
    @initialize(
        prefill_blocks=st.integers(6, 14),
        decode_blocks=st.integers(5, 10),
        max_batch_tokens=st.sampled_from([32, 6, 4]),
        max_num_seqs=st.integers(1, 5),
        prefix_cache=st.booleans(),
        step_ahead=st.booleans(),
    )
    def start(self, prefill_blocks: int, decode_blocks: int, **limits: Any) -> None:
        self.cluster = Cluster(prefill_blocks, decode_blocks, **limits)

    def alive(self) -> list[Request]:
        return [request for request in self.cluster.requests.values() if not request.over]

    def pick(self, number: int) -> Request:
        alive = self.alive()
        return alive[number % len(alive)]

    # ------------------------------------------------------------------ requests

    @precondition(lambda self: len(self.alive()) < MOST_ALIVE)
    @rule(family=st.integers(1, 3), length=st.integers(1, 14), max_tokens=st.integers(1, 20))
    def submit(self, family: int, length: int, max_tokens: int) -> None:
        context = min(self.cluster.p.max_model_len, self.cluster.d.max_model_len)
        self.cluster.submit([family] * length, greedy(min(max_tokens, context - length)))

    @precondition(lambda self: self.alive())
    @rule(number=NUMBER)
    def abort(self, number: int) -> None:
        self.cluster.abort(self.pick(number))

    @precondition(lambda self: self.alive())
    @rule(number=NUMBER)
    def probe(self, number: int) -> None:
        self.cluster.probe(self.pick(number))

    @precondition(lambda self: self.alive())
    @rule(number=NUMBER)
    def suspend(self, number: int) -> None:
        """D drains: what it keeps waits under a lease of its own."""
        request = self.pick(number)
        message = Suspend(request_id=request.request_id, attempt=request.attempt)
        self.cluster.flight.append((self.cluster._at_decode, message))

    # ------------------------------------------------------------------ the network

    @rule(count=st.integers(1, 12))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.cluster.flight))):
            self.cluster.deliver()

    @precondition(lambda self: self.cluster.flight)
    @rule(number=NUMBER)
    def deliver_out_of_order(self, number: int) -> None:
        self.cluster.deliver(number % len(self.cluster.flight))

    @precondition(lambda self: self.cluster.flight)
    @rule(number=NUMBER)
    def lose(self, number: int) -> None:
        self.cluster.flight.pop(number % len(self.cluster.flight))

    @precondition(lambda self: self.cluster.flight)
    @rule(number=NUMBER, later=st.booleans())
    def repeat(self, number: int, later: bool) -> None:
        take, message = self.cluster.flight[number % len(self.cluster.flight)]
        if later:
            self.cluster.flight.append((take, message))
        else:
            take(message)

    # ------------------------------------------------------------------ time, death

    @rule(seconds=st.integers(1, 12), patient=st.booleans())
    def time_passes(self, seconds: int, patient: bool) -> None:
        """Leases run out unless somebody asks in time."""
        self.cluster.now += seconds
        if patient:
            self.cluster.ask_again()
        self.cluster.p.expire(self.cluster.now)
        self.cluster.d.expire(self.cluster.now)
        self.cluster.collect()

    @rule(number=st.integers(0, 9))
    def a_worker_dies_and_comes_back(self, number: int) -> None:
        if number == 0:
            self.cluster.restart_prefill()
        elif number == 1:
            self.cluster.restart_decode()
        elif number == 2:
            for engine in (self.cluster.p, self.cluster.d):
                engine.drop_owner(ROUTER)
            self.cluster.collect()

    # ------------------------------------------------------------------ steps

    @rule(which=st.integers(0, 1), count=st.integers(1, 4))
    def step(self, which: int, count: int) -> None:
        engine: EngineCore = (self.cluster.p, self.cluster.d)[which]
        for _ in range(count):
            engine.step()
            self.cluster.collect()

    @rule(which=st.integers(0, 1), number=NUMBER, fails=st.booleans())
    def step_while_messages_arrive(self, which: int, number: int, fails: bool) -> None:
        def during() -> None:
            if number % 5 == 0 and self.alive():
                self.cluster.abort(self.pick(number))
            self.deliver(1 + number % 3)
            if fails:
                raise Broken

        runner = self.cluster.runners[which]
        engine: EngineCore = (self.cluster.p, self.cluster.d)[which]
        runner.during = during
        try:
            engine.step()
        except Broken:
            engine.fail_step("it broke")
        runner.during = None
        self.cluster.collect()

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def blocks_are_conserved_and_answers_exact(self) -> None:
        global steps_taken
        steps_taken += 1
        if not hasattr(self, "cluster"):
            return
        self.cluster.check()
        for request in self.cluster.requests.values():
            assert EOS not in request.emitted
            assert request.emitted == answer(request.prompt, len(request.emitted))

    def teardown(self) -> None:
        """The network heals: leases run out, lost messages stay lost, everybody finishes."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.flight.clear()
        for fetch in list(cluster.fetches.values()):
            cluster.d.fetch_failed(fetch.intake.seq, "the peer is gone", retryable=True)
        for engine in (cluster.p, cluster.d):
            engine.drop_owner(ROUTER)
        cluster.collect()
        cluster.flight.clear()
        for request in self.alive():
            cluster.recover(request)
        cluster.run()
        for request in cluster.requests.values():
            if not request.aborted:
                assert request.emitted == answer(request.prompt, request.sampling.max_tokens)
        assert_idle(cluster.p)
        assert_idle(cluster.d)


assert PEER  # the one decode worker's name on the data link
Machines.TestCase.settings = settings(
    max_examples=1500 if LONG else 30,
    stateful_step_count=100 if LONG else 60,
    suppress_health_check=list(HealthCheck),
)
TestMachines = Machines.TestCase


def test_the_long_profile_went_far_enough() -> None:
    """Runs after the machine (tests of a file keep their order)."""
    if LONG:
        assert steps_taken >= 100_000
