"""The workers as the router knows them, by an injected clock."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flows import Clock, hello, registry

from pagerelay.common.wire.account import BlockCounts, Counters, Load
from pagerelay.common.wire.messages import PROTOCOL, HandedOver, Heartbeat, Refused, TokenDelta, Welcome
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.registry import NUM_REMEMBERED, WorkerEntry, WorkerRegistry
from pagerelay.router.times import FlowTimes


class Request:
    """Something bound to a worker."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def worker_lost(self, worker_id: str, goodbye: bool) -> None:
        self.lost.append(worker_id)

    def leave_decoder(self, worker_id: str) -> None:
        pass


def join(
    workers: WorkerRegistry, worker_id: str = "d", identity: bytes | None = None, **fields: Any
) -> WorkerEntry:
    identity = identity or worker_id.encode()
    answer = workers.welcome(hello(worker_id, **fields), identity)
    assert isinstance(answer, Welcome)
    entry = workers.find(identity)
    assert entry is not None
    return entry


def bind(entry: WorkerEntry, request_id: str = "r") -> Request:
    request = Request()
    entry.bound[request_id] = request
    return request


def beat(workers: WorkerRegistry, entry: WorkerEntry, **counters: Any) -> None:
    load = counters.pop("load", Load())
    assert workers.find(entry.identity) is entry
    workers.heard(entry, Heartbeat(load=load, counters=Counters(**counters)))


# ------------------------------------------------------------------ who may come


def test_a_worker_is_welcomed() -> None:
    workers = registry(Clock())
    answer = workers.welcome(hello("d"), b"d")
    assert answer == Welcome(router_id=workers.router_id, heartbeat_s=0.5, dead_after_s=3.0)
    assert [entry.worker_id for entry in workers.entries()] == ["d"]
    assert workers.entries("prefill") == []
    assert workers.by_id("d") is workers.entries("decode")[0]


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"protocol": 99}, f"protocol: {PROTOCOL} here, 99 there"),
        ({"model_digest": "theirs"}, "model_digest: model here, theirs there"),
        ({"block_size": 64}, "block_size: 4 here, 64 there"),
        ({"dtype": "bfloat16"}, "dtype: 'float32' here, 'bfloat16' there"),
        ({"head_dim": 2}, "head_dim: 1 here, 2 there"),
    ],
)
def test_a_mismatch_is_refused_with_both_values(change: dict[str, Any], values: str) -> None:
    workers = registry(Clock())
    join(workers, "first")
    answer = workers.welcome(hello("d", **change), b"d")
    assert isinstance(answer, Refused)
    assert values in answer.reason
    assert answer.fatal
    assert workers.find(b"d") is None


def test_when_all_have_gone_another_layout_may_come() -> None:
    workers = registry(Clock())
    workers.remove(join(workers, "first"), "bye")
    join(workers, "d", block_size=64)
    layout = workers.layout()
    assert layout is not None
    assert layout.block_size == 64


# ------------------------------------------------------------------ life and death


def test_silence_makes_suspect_then_dead() -> None:
    clock = Clock()
    workers = registry(clock)
    entry = join(workers)
    request = bind(entry)
    assert workers.state(entry) == "ready"
    clock.now = 1.5
    workers.expire()
    assert workers.state(entry) == "ready"
    clock.now = 1.6
    workers.expire()
    assert workers.state(entry) == "suspect"
    assert [view.rank for view in workers.views()] == [1]
    beat(workers, entry)
    assert workers.state(entry) == "ready"
    clock.now = 4.6
    workers.expire()
    assert workers.entries() == [entry]
    assert request.lost == []
    clock.now = 4.7
    workers.expire()
    assert workers.entries() == []
    assert request.lost == ["d"]
    assert not workers.find_alive(entry)
    assert workers.find(b"d") is None


def test_a_step_that_does_not_end_makes_stuck_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    workers = registry(Clock())
    entry = join(workers)
    request = bind(entry)
    beat(workers, entry, load=Load(busy_for_s=60.0))
    assert (workers.state(entry), request.lost) == ("ready", [])
    with caplog.at_level(logging.ERROR):
        for seconds in (60.5, 61.0):
            beat(workers, entry, load=Load(busy_for_s=seconds, draining=True, hands_over=True))
    assert workers.state(entry) == "stuck"
    assert [view.rank for view in workers.views()] == [None]
    assert request.lost == ["d"], "said once: it may be back there for another reason"
    assert ["step has run for 60 s" in text for text in caplog.messages] == [True]
    assert workers.not_ready() is not None
    assert workers.find_alive(entry)
    beat(workers, entry)
    assert workers.state(entry) == "ready"
    assert [view.rank for view in workers.views()] == [0]


def test_every_message_is_a_sign_of_life() -> None:
    clock = Clock()
    workers = registry(clock)
    entry = join(workers)
    for clock.now in (2.0, 4.0, 6.0):
        assert workers.find(b"d") is entry
        workers.expire()
    assert workers.entries() == [entry]


def test_if_we_did_not_listen_their_silence_proves_nothing() -> None:
    clock = Clock()
    workers = registry(clock)
    entry = join(workers)
    clock.now = 60.0
    workers.pardon()
    workers.expire()
    assert workers.entries() == [entry]
    clock.now = 61.6
    workers.expire()
    assert workers.entries() == []


def test_a_worker_leaves_once() -> None:
    workers = registry(Clock())
    entry = join(workers)
    request = bind(entry)
    workers.remove(entry, "it said goodbye")
    workers.remove(entry, "it is silent")
    assert request.lost == ["d"]


def test_one_who_is_told_of_the_loss_may_let_go_of_the_worker_at_once() -> None:
    workers = registry(Clock())
    entry = join(workers)

    class Leaving(Request):
        def worker_lost(self, worker_id: str, goodbye: bool) -> None:
            super().worker_lost(worker_id, goodbye)
            for name in ("r", "s"):
                entry.release(name)

    requests = [Leaving(), Leaving()]
    entry.bound.update(zip(("r", "s"), requests, strict=True))
    workers.remove(entry, "bye")
    assert [request.lost for request in requests] == [["d"], ["d"]]
    assert entry.bound == {}


def test_a_new_incarnation_replaces_the_old_at_once() -> None:
    workers = registry(Clock())
    request = bind(join(workers, "d", b"old", incarnation="1"))
    new = join(workers, "d", b"new", incarnation="2")
    assert request.lost == ["d"]
    assert workers.entries() == [new]
    assert workers.by_id("d") is new
    assert workers.find(b"old") is None
    # Should the old one be alive after all, it must not take the place back.
    refused = workers.welcome(hello("d", incarnation="1", epoch=1), b"old")
    assert isinstance(refused, Refused)
    assert refused.fatal
    assert "another worker is called d now" in refused.reason
    assert workers.entries() == [new]


def test_hello_said_twice_before_the_welcome_changes_nothing() -> None:
    workers = registry(Clock())
    entry = join(workers)
    request = bind(entry)
    assert join(workers) is entry
    assert request.lost == []


def test_hello_from_one_who_was_here_means_that_it_has_dropped_everything() -> None:
    """It took us for dead while we were slow: what it had of us it has given up."""
    workers = registry(Clock())
    entry = join(workers)
    request = bind(entry)
    beat(workers, entry)
    assert join(workers) is entry, "a Hello that was late or said twice"
    again = join(workers, epoch=1)
    assert again is not entry
    assert request.lost == ["d"]
    assert again.bound == {}
    assert workers.entries() == [again]


# ------------------------------------------------------------------ counters


def test_counters_never_fall_and_nothing_counts_twice() -> None:
    workers = registry(Clock())
    one = join(workers, "one")
    two = join(workers, "two")
    beat(workers, one, tokens_generated=10, fetched_blocks={"shm": 4})
    beat(workers, two, tokens_generated=5, fetched_blocks={"shm": 1, "tcp": 2})

    def totals() -> tuple[int, dict[str, int]]:
        total = workers.totals()
        return total.tokens_generated, total.fetched_blocks

    assert totals() == (15, {"shm": 5, "tcp": 2})
    workers.remove(one, "bye")
    assert totals() == (15, {"shm": 5, "tcp": 2})
    # Taken for dead, it comes back with what it had.
    one = join(workers, "one")
    assert totals() == (15, {"shm": 5, "tcp": 2})
    beat(workers, one, tokens_generated=12, fetched_blocks={"shm": 4})
    assert totals() == (17, {"shm": 5, "tcp": 2})
    # A new process of that name begins at nought.
    new = join(workers, "one", b"new", incarnation="2")
    beat(workers, new, tokens_generated=1)
    assert totals() == (18, {"shm": 5, "tcp": 2})
    assert one.counters.tokens_generated == 12
    assert two.counters.fetched_blocks == {"shm": 1, "tcp": 2}


def test_those_long_gone_are_counted_and_not_remembered() -> None:
    workers = registry(Clock())
    for number in range(NUM_REMEMBERED + 10):
        entry = join(workers, "d", incarnation=str(number))
        beat(workers, entry, tokens_generated=1, dropped={"Abort/late": 2})
        workers.remove(entry, "bye")
    assert len(workers._departed) == NUM_REMEMBERED
    total = workers.totals()
    assert (total.tokens_generated, total.dropped) == (
        NUM_REMEMBERED + 10,
        {"Abort/late": 2 * NUM_REMEMBERED + 20},
    )


def test_names_that_workers_invent_are_counted_as_one() -> None:
    workers = registry(Clock())
    entry = join(workers, "d")
    metrics = RouterMetrics(workers)
    dropped = {"Abort/late": 2, "TokenDelta/late": 1, "unknown/malformed": 4}
    for number in range(300):
        names = {f"way-{number}-{n}": 1 for n in range(3)}
        odd = {f"Abort/because-{number}": 1, f"Odd{number}/late": 1, f"nothing {number}": 1}
        beat(
            workers,
            entry,
            fetched_blocks={"shm": 2, "tcp": 3, "cuda_ipc": 4, **names},
            fetched_bytes={"shm": 9, **names},
            dropped=dropped | odd,
        )
        handed = HandedOver(
            request_id="r",
            attempt=1,
            first=TokenDelta(request_id="r", attempt=1, index=0, token=5),
            transport=f"way-{number}",
            handover_s=0.1,
            num_bytes=1,
        )
        FlowTimes(metrics).handed_over(handed, 1.0)
    total = workers.totals()
    assert total.fetched_blocks == {"shm": 2, "tcp": 3, "cuda_ipc": 4, "other": 3}
    assert total.fetched_bytes == {"shm": 9, "other": 3}
    assert total.dropped == dropped | {"Abort/other": 1, "other/late": 1, "other/other": 1}
    exposed = metrics.expose().decode()
    assert "way-" not in exposed
    assert "because" not in exposed
    assert 'pagerelay_handover_bytes_total{transport="other"} 300.0' in exposed


# ------------------------------------------------------------------ what the policy sees


def test_a_view_takes_the_worse_of_our_books_and_the_workers_own() -> None:
    workers = registry(Clock())
    entry = join(workers)
    (view,) = workers.views()
    assert (view.outstanding_tokens, view.num_seqs, view.available_blocks, view.max_model_len) == (
        0,
        0,
        64,
        2000,
    )
    entry.tokens_due.update(r=30, s=12)
    bind(entry, "r")
    bind(entry, "s")
    (view,) = workers.views()
    assert (view.outstanding_tokens, view.num_seqs) == (42, 2)
    load = Load(
        blocks=BlockCounts(total=64, free=10, held=40, leased=4, cached=10),
        waiting=2,
        running=3,
        outstanding_prefill_tokens=100,
    )
    beat(workers, entry, load=load)
    (view,) = workers.views()
    assert (view.outstanding_tokens, view.num_seqs, view.available_blocks) == (100, 5, 20)
    entry.release("r")
    entry.release("r")
    assert (list(entry.bound), list(entry.tokens_due)) == (["s"], ["s"])


def test_a_draining_worker_gets_nothing_new() -> None:
    workers = registry(Clock())
    entry = join(workers)
    beat(workers, entry, load=Load(draining=True))
    assert workers.state(entry) == "draining"
    assert [view.rank for view in workers.views()] == [None]
    assert workers.not_ready() == "no_worker"


def test_choices_are_numbered() -> None:
    workers = registry(Clock())
    join(workers, "a")
    join(workers, "b")
    for worker_id in ("a", "b", "a"):
        chosen = workers.chosen(worker_id)
        assert chosen is not None
        assert chosen.worker_id == worker_id
    assert {view.worker_id: view.last_chosen for view in workers.views()} == {"a": 3, "b": 2}
    assert workers.chosen("nobody") is None


def test_readiness_and_the_shortest_context() -> None:
    workers = registry(Clock())
    assert workers.not_ready() == "no_worker"
    assert workers.context_len == 1000
    join(workers, "p", role="prefill", max_model_len=800)
    assert workers.not_ready() == "no_decode_worker"
    assert workers.context_len == 800
    join(workers, "d", max_model_len=500)
    assert workers.not_ready() is None
    assert workers.context_len == 500
    assert [view.worker_id for view in workers.views("decode", "colocated")] == ["d"]
    join(workers, "c", role="colocated")
    assert [view.worker_id for view in workers.views("decode", "colocated")] == ["d", "c"]


def test_losing_a_worker_that_holds_requests_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    workers = registry(Clock())
    caplog.set_level(logging.INFO)
    idle, busy = join(workers, "idle"), join(workers, "busy")
    bind(busy)
    workers.remove(idle, "it said goodbye")
    workers.remove(busy, "silent for 3.1 s")
    left = [
        (record.levelname, record.getMessage()) for record in caplog.records if "left" in record.getMessage()
    ]
    assert left == [
        ("INFO", "idle left: it said goodbye; 0 requests were bound to it"),
        ("WARNING", "busy left: silent for 3.1 s; 1 requests were bound to it"),
    ]
