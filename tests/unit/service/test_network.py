"""Both engines over a network that reorders, repeats and loses: no block is ever lost, no drawn move is ever
left.

After the storm every request that nobody took back still ends with exactly the tokens of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engines import FakeRunner, answer, decode_engine, greedy, prefill_engine
from handwork import ROUTER, Hands, Request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagerelay.common.engine.core import EngineCore

NUMBER = st.integers(0, 1000)


class Broken(Exception):
    """A step that fails."""


class Network:
    """Every public method but the last two is something that may happen; a number says to whom or how
    much."""

    def __init__(self, prefill_blocks: int, decode_blocks: int, split: bool, **limits: Any) -> None:
        self.runners = FakeRunner(), FakeRunner()
        self.hands = Hands(
            prefill_engine(prefill_blocks, runner=self.runners[0], **limits),
            decode_engine(decode_blocks, runner=self.runners[1], **limits),
            split=split,
        )

    # ------------------------------------------------------------------ requests

    def submit(self, number: int) -> None:
        if sum(not request.over for request in self.hands.requests.values()) < 6:
            family, length, max_tokens = 1 + number % 3, 1 + number // 3 % 14, 1 + number // 42 % 20
            context = min(self.hands.p.max_model_len, self.hands.d.max_model_len)
            self.hands.submit([family] * length, greedy(min(max_tokens, context - length)))

    def _some_request(self, number: int) -> Request | None:
        alive = [request for request in self.hands.requests.values() if not request.over]
        return alive[number % len(alive)] if alive else None

    def abort(self, number: int) -> None:
        request = self._some_request(number)
        if request is not None:
            self.hands.abort(request)

    def time_out(self, number: int) -> None:
        """The router thinks that a worker is lost."""
        request = self._some_request(number)
        if request is not None:
            self.hands.recover(request)

    def lose_the_router(self, number: int) -> None:
        for engine in (self.hands.p, self.hands.d):
            engine.drop_owner(ROUTER)
        self.hands.collect()

    # ------------------------------------------------------------------ the network

    def deliver_in_order(self, number: int) -> None:
        for _ in range(min(1 + number % 12, len(self.hands.flight))):
            self.hands.deliver()

    def deliver_any(self, number: int) -> None:
        if self.hands.flight:
            self.hands.deliver(number % len(self.hands.flight))

    def repeat(self, number: int) -> None:
        if self.hands.flight:
            take, message = self.hands.flight[number % len(self.hands.flight)]
            take(message)

    def lose(self, number: int) -> None:
        if self.hands.flight:
            self.hands.flight.pop(number % len(self.hands.flight))

    def probe(self, number: int) -> None:
        """The router has missed something, and asks both."""
        request = self._some_request(number)
        if request is not None:
            for engine in (self.hands.p, self.hands.d):
                if request.request_id in engine._by_request:
                    engine.probe(ROUTER, request.request_id, request.attempt, len(request.emitted))
            self.hands.collect()

    def time_passes(self, number: int) -> None:
        self.hands.now += number % 8
        tickets = {lease: fetch.intake.handle.ticket for lease, fetch in self.hands.fetches.items()}
        self.hands.p.renew(tickets, self.hands.now)
        self.hands.now += 3
        self.hands.p.expire(self.hands.now)
        self.hands.collect()

    # ------------------------------------------------------------------ steps

    def step_prefill(self, number: int) -> None:
        self._step(self.hands.p, 1 + number % 3)

    def step_decode(self, number: int) -> None:
        self._step(self.hands.d, 1 + number % 4)

    def _step(self, engine: EngineCore, count: int) -> None:
        for _ in range(count):
            engine.step()
            self.hands.collect()

    def step_while_things_happen(self, number: int) -> None:
        def during() -> None:
            if number % 3 == 0:
                self.abort(number)
            self.deliver_in_order(number // 2)
            self.deliver_any(number)

        self._step_with(number, during)

    def step_that_fails(self, number: int) -> None:
        def during() -> None:
            if number % 3 == 0:
                self.abort(number)
            self.deliver_in_order(number)
            raise Broken

        self._step_with(number, during)

    def _step_with(self, number: int, during: Callable[[], None]) -> None:
        which = number % 2
        engine: EngineCore = (self.hands.p, self.hands.d)[which]
        self.runners[which].during = during
        try:
            engine.step()
        except Broken:
            engine.fail_step("it broke")
        self.runners[which].during = None
        self.hands.collect()

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        self.hands.check()
        for request in self.hands.requests.values():
            assert request.emitted == answer(request.prompt, len(request.emitted))

    def calm_down(self) -> None:
        """All messages are lost, all peers are told so; then the network is well, and everybody finishes."""
        for fetch in self.hands.fetches.values():
            self.hands.d.fetch_failed(fetch.intake.seq, "the peer is gone", retryable=True)
        self.lose_the_router(0)
        self.hands.flight.clear()
        for request in self.hands.requests.values():
            if not request.over:
                self.hands.recover(request)
        self.hands.run()
        for request in self.hands.requests.values():
            if not request.aborted:
                assert request.emitted == answer(request.prompt, request.sampling.max_tokens)


USUAL = ("submit", "deliver_any", *("deliver_in_order", "step_prefill", "step_decode") * 3)
RARE = (
    "abort",
    "time_out",
    "lose_the_router",
    "repeat",
    "lose",
    "probe",
    "time_passes",
    "step_while_things_happen",
    "step_that_fails",
)
EVENTS = st.tuples(st.sampled_from(USUAL * 4 + RARE), st.integers(0, 839))


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    start=st.fixed_dictionaries(
        {
            "prefill_blocks": st.integers(6, 14),
            "decode_blocks": st.integers(5, 10),
            "max_batch_tokens": st.sampled_from([32, 6, 4]),
            "max_num_seqs": st.integers(1, 5),
            "prefix_cache": st.booleans(),
            "split": st.booleans(),
        }
    ),
    events=st.lists(EVENTS, min_size=80, max_size=160),
)
def test_any_order_of_anything(start: dict[str, Any], events: list[tuple[str, int]]) -> None:
    network = Network(**start)
    for name, number in events:
        getattr(network, name)(number)
        network.check()
    network.calm_down()
