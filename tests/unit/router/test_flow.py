"""One request as one coroutine: what is sent to whom, what counts, how it goes on after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engines import greedy
from flows import Driven, House

from pagerelay.common.errors import ApiError, DeadlineExceeded, InvalidRequest, Unavailable, WorkerLost
from pagerelay.common.wire.account import Counters, Load
from pagerelay.common.wire.messages import (
    DecodeJob,
    Failed,
    HandoverPhases,
    Heartbeat,
    PrefillJob,
    PrefillStarted,
    Probe,
    Suspend,
)
from pagerelay.router.journal import MAX_PREEMPTIONS

PROMPT = [5, 6, 7]


async def started(
    house: House, max_tokens: int = 8, prompt_logprobs: int | None = None, **settings: Any
) -> Driven:
    """A flow whose job is with the prefill worker (or, without one, with the decode worker)."""
    driven = house.flow(PROMPT, greedy(max_tokens, prompt_logprobs=prompt_logprobs), **settings)
    await driven.flow.start()
    return driven


async def settle(driven: Driven, seconds: float = 0.0) -> None:
    """Lets the flow take all its news although no token is due, and then wait for ``seconds``."""
    task = asyncio.create_task(driven.flow.next())
    while not driven.flow._inbox.empty():
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(seconds / 5)
    if task.done():
        task.result()
        raise AssertionError("a token came")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def handing_off(house: House, **kw: Any) -> Driven:
    driven = await started(house, **kw)
    driven.started()
    await settle(driven)
    return driven


async def decoding(house: House, **kw: Any) -> Driven:
    """Two tokens are out, 11 and 12."""
    driven = await handing_off(house, **kw)
    driven.first(0, 11)
    driven.handed_over(0, 11)
    driven.token(1, 12)
    assert await driven.flow.next() == ([11, 12], None)
    assert driven.flow.state == "DECODING"
    return driven


def nobody_holds_anything(house: House) -> bool:
    return (
        not any(entry.bound or entry.tokens_due for entry in house.registry.entries())
        and not house.links.flows
    )


# ------------------------------------------------------------------ the usual way


async def test_the_happy_path() -> None:
    house = House("p1", "d1")
    driven = await started(house)
    flow = driven.flow
    assert house.take_sent() == [("p1", driven.prefill_job())]
    assert flow.state == "PREFILLING"
    assert house.entry("p1").tokens_due == {"r": 3}
    assert list(house.entry("d1").bound) == [], "the decode worker holds nothing while the prompt waits"

    driven.started()
    driven.first(0, 11)
    assert await flow.next() == ([11], None)
    assert house.take_sent() == [("d1", driven.decode_job())]
    assert flow.state == "HANDOFF"
    assert house.entry("p1").tokens_due == {}

    driven.handed_over(0, 11)
    driven.token(1, 12)
    assert await flow.next() == ([12], None)
    assert flow.state == "DECODING"
    assert list(house.entry("p1").bound) == []
    driven.tokens(driven.delta(2, 13), driven.delta(3, 14, "length"))
    assert await flow.next() == ([13, 14], "length")
    assert flow.state == "FINISHED"
    assert flow.journal.tokens == [11, 12, 13, 14]

    await flow.close()
    assert house.take_sent() == [], "nobody holds anything: there is nothing to abort"
    assert nobody_holds_anything(house)
    assert (flow.times.queue_s, flow.times.prefill_s, flow.times.handover_s) == (0.5, 0.25, 0.125)
    assert flow.transport == "shm"


async def test_the_first_token_may_come_from_the_decode_worker_alone() -> None:
    house = House("p1", "d1")
    driven = await handing_off(house)
    driven.handed_over(0, 11)
    driven.token(1, 12)
    assert await driven.flow.next() == ([11, 12], None)
    driven.first(0, 11)  # P's own comes late
    driven.token(2, 13)
    assert await driven.flow.next() == ([13], None)


async def test_what_comes_twice_counts_once() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    driven.token(0, 11)
    driven.token(1, 12)
    driven.token(2, 13)
    driven.token(2, 99)
    driven.token(3, 14)
    assert await driven.flow.next() == ([13, 14], None)
    assert driven.flow.journal.tokens == [11, 12, 13, 14]


async def test_one_token_never_troubles_a_decode_worker() -> None:
    house = House("p1", "d1")
    driven = await started(house, max_tokens=1)
    driven.started()
    driven.first(0, 11, "length")
    assert await driven.flow.next() == ([11], "length")
    await driven.flow.close()
    assert house.take_sent() == [("p1", driven.prefill_job())]
    assert nobody_holds_anything(house)


async def test_one_token_needs_no_decode_worker_to_be_there() -> None:
    house = House("p1")
    driven = await started(house, max_tokens=1)
    driven.started()
    driven.first(0, 11, "length")
    assert await driven.flow.next() == ([11], "length")


async def test_a_first_token_that_ends_the_answer_calls_the_decode_worker_back() -> None:
    house = House("p1", "d1")
    driven = await started(house)
    driven.started()
    driven.first(0, 2, "stop")
    assert await driven.flow.next() == ([2], "stop")
    house.take_sent()
    await driven.flow.close()
    assert [message for worker, message in house.take_sent() if worker == "d1"] == [driven.abort()]
    assert nobody_holds_anything(house)


async def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt() -> None:
    house = House("d1")
    driven = await started(house)
    assert house.take_sent() == [("d1", driven.decode_job(local=True))]
    assert driven.flow.state == "HANDOFF"
    assert house.count("local_prefills", reason="no_prefill_worker") == 1
    driven.handed_over(0, 11, "local")
    driven.token(0, 11)
    driven.token(1, 12, "length")
    assert await driven.flow.next() == ([11, 12], "length")
    await driven.flow.close()
    assert house.take_sent() == []
    assert house.count("decode_recomputed_tokens") == 4


async def test_a_local_answer_of_one_token() -> None:
    house = House("d1")
    driven = await started(house, max_tokens=1)
    driven.handed_over(0, 11, "local", "length")
    driven.token(0, 11, "length")
    assert await driven.flow.next() == ([11], "length")
    house.take_sent()
    await driven.flow.close()
    assert house.take_sent() == []


async def test_a_colocated_worker_is_no_exception_worth_counting() -> None:
    house = House("c1")
    driven = await started(house)
    assert house.take_sent() == [("c1", driven.decode_job(local=True))]
    assert house.count("local_prefills", reason="no_prefill_worker") == 0


async def test_the_decode_worker_is_chosen_when_the_prompt_is_computed_not_before() -> None:
    house = House("p1", "d1", "d2")
    driven = await started(house)
    house.lose("d1")
    driven.started()
    await settle(driven)
    assert house.take_sent()[-1] == ("d2", driven.decode_job())


async def test_requests_spread_over_the_workers() -> None:
    house = House("p1", "p2", "d1", "d2")
    sent = []
    for _ in range(4):
        await started(house)
        sent += house.take_sent()
    assert [worker for worker, _ in sent] == ["p1", "p2", "p1", "p2"]


# ------------------------------------------------------------------ recovery


def lose(*workers: str) -> Callable[[Driven], None]:
    def event(driven: Driven) -> None:
        for worker in workers:
            driven.house.lose(worker)

    return event


def fail(code: str) -> Callable[[Driven], None]:
    return lambda driven: driven.failed(code)


PREFILLING: list[Any] = [
    pytest.param(lose("p1"), [], "p2", id="P-lost"),
    pytest.param(fail("step_failed"), ["p1"], "p2", id="failed"),
]


@pytest.mark.parametrize(("event", "aborted", "next_prefill"), PREFILLING)
async def test_recovery_while_prefilling(
    event: Callable[[Driven], None], aborted: list[str], next_prefill: str
) -> None:
    house = House("p1", "p2", "d1")
    driven = await started(house)
    house.take_sent()
    event(driven)
    await settle(driven)
    assert house.take_sent() == [
        *((worker, driven.abort()) for worker in aborted),
        (next_prefill, driven.prefill_job(attempt=2)),
    ]
    assert (driven.flow.state, driven.flow.recoveries) == ("PREFILLING", 1)
    await finish(driven, [])


HANDOFF: list[Any] = [
    pytest.param(lose("p1"), ["d1"], id="P-lost"),
    pytest.param(lose("d1"), ["p1"], id="D-lost"),
    pytest.param(lose("p1", "d1"), [], id="both-lost"),
    pytest.param(fail("fetch_failed"), ["p1", "d1"], id="fetch-failed"),
    pytest.param(fail("lease_expired"), ["p1", "d1"], id="lease-expired"),
    pytest.param(Driven.preempted, ["p1", "d1"], id="preempted"),
]


@pytest.mark.parametrize("with_token", [False, True], ids=["no-token", "first-token"])
@pytest.mark.parametrize(("event", "aborted"), HANDOFF)
async def test_recovery_while_handing_off(
    event: Callable[[Driven], None], aborted: list[str], with_token: bool
) -> None:
    house = House("p1", "p2", "d1", "d2")
    driven = await handing_off(house)
    emitted: list[int] = []
    if with_token:
        driven.first(0, 11)
        assert await driven.flow.next() == ([11], None)
        emitted = [11]
    house.take_sent()
    event(driven)
    await settle(driven)
    assert house.take_sent() == [
        *((worker, driven.abort()) for worker in aborted),
        ("p2", driven.prefill_job(attempt=2, emitted=emitted)),
    ]
    await finish(driven, emitted)


DECODING: list[Any] = [
    pytest.param(lose("d1"), [], "worker_lost", id="D-lost"),
    pytest.param(fail("step_failed"), ["d1"], "step_failed", id="failed"),
    pytest.param(Driven.preempted, ["d1"], "preempted", id="preempted"),
    pytest.param(fail("forgotten"), ["d1"], "forgotten", id="forgotten"),
]


@pytest.mark.parametrize(("event", "aborted", "cause"), DECODING)
async def test_recovery_while_decoding(
    event: Callable[[Driven], None], aborted: list[str], cause: str
) -> None:
    house = House("p1", "p2", "d1", "d2")
    driven = await decoding(house)
    house.take_sent()
    event(driven)
    await settle(driven)
    assert house.take_sent() == [
        *((worker, driven.abort()) for worker in aborted),
        ("p2", driven.prefill_job(attempt=2, emitted=[11, 12])),
    ]
    assert driven.flow.recoveries == (cause != "preempted")
    assert house.count("recoveries", cause=cause) == 1
    await finish(driven, [11, 12])


async def finish(driven: Driven, emitted: list[int]) -> None:
    """The second attempt goes through, whatever the first one still says."""
    house, count = driven.house, len(emitted)
    driven.token(count, 99, attempt=1)
    driven.first(count, 99, attempt=1)
    driven.handed_over(count, 99, attempt=1)
    driven.failed(attempt=1)
    driven.started(attempt=1)
    driven.started()
    driven.first(count, 21)
    driven.handed_over(count, 21)
    driven.token(count + 1, 22, "length")
    assert await driven.flow.next() == ([21, 22], "length")
    ((worker, job),) = house.take_sent()
    assert worker in ("d1", "d2")
    assert job == driven.decode_job(attempt=2, emitted=emitted)
    assert house.dropped("late") >= 4
    await driven.flow.close()
    assert house.take_sent() == []
    assert nobody_holds_anything(house)


async def test_losing_the_prefill_worker_after_the_hand_over_changes_nothing() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    house.take_sent()
    house.lose("p1")
    driven.token(2, 13, "length")
    assert await driven.flow.next() == ([13], "length")
    await driven.flow.close()
    assert house.take_sent() == []
    assert driven.flow.recoveries == 0


async def test_losing_somebody_elses_worker_changes_nothing() -> None:
    house = House("p1", "d1", "d2")
    driven = await decoding(house)
    house.lose("d2")
    driven.token(2, 13)
    assert await driven.flow.next() == ([13], None)


async def test_recovery_without_any_prefill_worker_goes_to_the_decode_worker() -> None:
    house = House("p1", "d1")
    driven = await handing_off(house)
    house.take_sent()
    house.lose("p1")
    await settle(driven)
    assert house.take_sent() == [("d1", driven.abort()), ("d1", driven.decode_job(attempt=2, local=True))]


async def test_a_worker_that_cannot_be_reached_counts_as_lost() -> None:
    house = House("p1", "p2", "d1")
    house.links.broken = {"p1"}
    driven = await started(house)
    await settle(driven)
    assert house.take_sent() == [("p1", driven.prefill_job()), ("p2", driven.prefill_job(attempt=2))]
    assert house.registry.by_id("p1") is None
    house.links.broken = {"d1"}
    house.join("d2")
    driven.started()
    await settle(driven)
    assert [worker for worker, _ in house.take_sent()] == ["d1", "p2", "p2"]
    assert driven.flow.recoveries == 2


async def test_the_last_token_due_after_a_recovery_needs_no_decode_worker() -> None:
    house = House("p1", "d1")
    driven = await decoding(house, max_tokens=3)
    house.take_sent()
    house.lose("d1")
    await settle(driven)
    assert house.take_sent() == [("p1", driven.prefill_job(attempt=2, emitted=[11, 12]))]
    driven.started()
    driven.first(2, 13, "length")
    assert await driven.flow.next() == ([13], "length")
    await driven.flow.close()
    assert house.take_sent() == []


async def test_a_third_loss_is_one_too_many() -> None:
    house = House("p1", "d1")
    driven = await started(house)
    for attempt in (2, 3):
        driven.failed("step_failed")
        await settle(driven)
        assert driven.flow.attempt == attempt
    driven.failed("step_failed")
    with pytest.raises(WorkerLost, match="gave up after 2 recoveries"):
        await driven.flow.next()
    assert driven.flow.state == "FAILED"
    house.take_sent()
    await driven.flow.close()
    assert house.take_sent() == [("p1", driven.abort(3))]
    assert nobody_holds_anything(house)


async def test_preemptions_do_not_count_as_losses_but_not_for_ever() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    for _ in range(MAX_PREEMPTIONS):
        driven.preempted()
        await settle(driven)
    assert driven.flow.recoveries == 0
    driven.preempted()
    with pytest.raises(Unavailable, match=f"preempted {MAX_PREEMPTIONS + 1} times") as caught:
        await driven.flow.next()
    assert caught.value.code == "preempted"


async def test_tokens_that_came_before_the_end_are_given_out_first() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    driven.token(2, 13)
    driven.failed("bad_job", retryable=False)
    assert await driven.flow.next() == ([13], None)
    for _ in range(2):
        with pytest.raises(Unavailable, match="it is bad_job"):
            await driven.flow.next()


async def test_tokens_of_the_lost_attempt_that_came_in_time_are_kept() -> None:
    house = House("p1", "d1", "d2")
    driven = await decoding(house)
    driven.token(2, 13)
    house.lose("d1")
    driven.token(3, 14)  # it was on its way when the worker was lost: of an attempt that is over
    house.take_sent()
    assert (await driven.flow.next())[0] == [13]
    await settle(driven)
    assert house.take_sent() == [("p1", driven.prefill_job(attempt=2, emitted=[11, 12, 13]))]
    assert driven.flow.journal.tokens == [11, 12, 13]


async def test_an_answer_under_way_waits_a_moment_for_a_decode_worker_to_come_back() -> None:
    house = House("p1", "d1")
    driven = await decoding(house, rejoin_wait_s=5.0)
    house.take_sent()
    house.lose("d1")
    task = asyncio.create_task(driven.flow.next())
    await asyncio.sleep(0.01)
    assert house.take_sent() == []
    house.join("d2")
    async with asyncio.timeout(5):
        while not house.links.sent:
            await asyncio.sleep(0.01)
    assert house.take_sent() == [("p1", driven.prefill_job(attempt=2, emitted=[11, 12]))]
    driven.started()
    driven.first(2, 13)
    assert await task == ([13], None)


# ------------------------------------------------------------------ errors


async def test_nobody_who_could_serve_it() -> None:
    for workers in ((), ("p1",)):
        house = House(*workers)
        driven = house.flow(PROMPT, greedy(8))
        with pytest.raises(Unavailable) as caught:
            await driven.flow.start()
        assert caught.value.code == "no_decode_worker"
        assert driven.flow.state == "FAILED"
        await driven.flow.close()
        assert house.take_sent() == []
        assert nobody_holds_anything(house)


async def test_no_decode_worker_is_left_when_the_prompt_begins() -> None:
    house = House("p1", "d1")
    driven = await started(house)
    house.lose("d1")
    driven.started()
    with pytest.raises(Unavailable) as caught:
        await driven.flow.next()
    assert caught.value.retry_after_s == 1
    house.take_sent()
    await driven.flow.close()
    assert house.take_sent() == [("p1", driven.abort())]
    assert nobody_holds_anything(house)


@pytest.mark.parametrize(
    ("code", "kind"), [("too_long", InvalidRequest), ("fetch_failed", Unavailable), ("bad_logits", ApiError)]
)
@pytest.mark.parametrize("worker_id", ["p1", "d1"])
async def test_what_cannot_be_tried_again_ends_at_once(
    code: str, kind: type[ApiError], worker_id: str
) -> None:
    house = House("p1", "d1")
    driven = await handing_off(house)
    driven.failed(code, retryable=False, worker_id=worker_id)
    with pytest.raises(kind, match=f"it is {code}") as caught:
        await driven.flow.next()
    assert caught.value.code == ("context_length_exceeded" if code == "too_long" else code)
    house.take_sent()
    await driven.flow.close()
    assert house.take_sent() == [("p1", driven.abort()), ("d1", driven.abort())]


@pytest.mark.parametrize("state", ["prefilling", "handoff"])
async def test_a_request_that_does_not_move_ends_in_time(state: str) -> None:
    house = House("p1", "d1")
    make = started if state == "prefilling" else handing_off
    driven = await make(house, queue_timeout_s=0.03, stall_timeout_s=60.0)
    with pytest.raises(DeadlineExceeded, match=f"no progress for 0.03 s while {state}"):
        await driven.flow.next()
    assert driven.flow.state == "FAILED"
    house.take_sent()
    await driven.flow.close()
    assert {worker for worker, _ in house.take_sent()} == ({"p1"} if state == "prefilling" else {"p1", "d1"})


async def test_a_decode_worker_that_falls_silent_is_recovered_from() -> None:
    house = House("p1", "d1")
    driven = await decoding(house, queue_timeout_s=60.0, stall_timeout_s=0.03)
    house.take_sent()
    task = asyncio.create_task(driven.flow.next())
    async with asyncio.timeout(5):
        while len(house.links.sent) < 2:
            await asyncio.sleep(0.01)
    task.cancel()
    assert house.take_sent() == [
        ("d1", driven.abort()),
        ("p1", driven.prefill_job(attempt=2, emitted=[11, 12])),
    ]
    assert house.count("recoveries", cause="stall") == 1


# ------------------------------------------------------------------ the one exit


@pytest.mark.parametrize(
    ("make", "holders"), [(started, ["p1"]), (handing_off, ["p1", "d1"]), (decoding, ["d1"])]
)
async def test_closing_tells_each_holder_exactly_once(
    make: Callable[[House], Any], holders: list[str]
) -> None:
    house = House("p1", "d1")
    driven = await make(house)
    house.take_sent()
    await driven.flow.close()
    assert house.take_sent() == [(worker, driven.abort()) for worker in holders]
    assert driven.flow.state == "ABORTED"
    await driven.flow.close()
    assert house.take_sent() == []
    assert nobody_holds_anything(house)


async def test_closing_before_the_start() -> None:
    house = House("p1", "d1")
    driven = house.flow(PROMPT, greedy())
    await driven.flow.close()
    assert driven.flow.state == "ABORTED"
    assert house.take_sent() == []


async def test_closing_does_not_write_to_the_dead() -> None:
    house = House("p1", "d1")
    driven = await handing_off(house)
    house.take_sent()
    house.lose("p1")
    await driven.flow.close()
    assert house.take_sent() == [("d1", driven.abort())]


async def test_closing_after_a_recovery_aborts_the_newest_attempt() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    driven.preempted()
    await settle(driven)
    house.take_sent()
    await driven.flow.close()
    assert house.take_sent() == [("p1", driven.abort(2))]


async def test_a_stop_string_ends_the_answer_and_the_worker_is_told() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    house.take_sent()
    driven.flow.finished_by_router()
    assert driven.flow.state == "FINISHED"
    await driven.flow.close()
    assert house.take_sent() == [("d1", driven.abort())]
    assert nobody_holds_anything(house)


async def test_a_stop_string_in_the_workers_own_last_token() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    house.take_sent()
    driven.token(2, 13, "length")
    await driven.flow.next()
    driven.flow.finished_by_router()
    await driven.flow.close()
    assert house.take_sent() == []


async def test_news_for_a_closed_request_have_no_taker() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    assert house.links.flows == {"r": driven.flow}
    await driven.flow.close()
    assert house.links.flows == {}
    house.lose("d1")
    assert driven.flow.state == "ABORTED"


async def test_where_a_hand_over_spent_its_time() -> None:
    house = House("p1", "d1")
    driven = await handing_off(house)
    driven.first(0, 11)
    driven.handed_over(0, 11, phases=HandoverPhases(reserve_s=1.0, announce_s=2.0, copy_s=3.0, confirm_s=4.0))
    assert await driven.flow.next() == ([11], None)
    driven.token(1, 12)
    assert await driven.flow.next() == ([12], None)
    first_step = driven.flow.times.phases.pop("first_step")
    assert 0 <= first_step < 5
    assert driven.flow.times.phases == {"reserve": 1.0, "announce": 2.0, "copy": 3.0, "confirm": 4.0}
    driven.token(2, 13)
    assert await driven.flow.next() == ([13], None)
    assert "first_step" not in driven.flow.times.phases, "only the first step belongs to the hand-over"


# ------------------------------------------------------------------ lost, repeated and late messages


async def test_a_gap_is_filled_by_the_worker_that_has_the_tokens() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    house.take_sent()
    driven.token(3, 14)  # the message with token 2 was lost
    driven.token(4, 15)
    await settle(driven)
    assert house.take_sent() == [("d1", Probe(request_id="r", attempt=1, next_index=2))]
    driven.tokens(driven.delta(2, 13), driven.delta(3, 14), driven.delta(4, 15))
    driven.token(5, 16, "length")
    assert await driven.flow.next() == ([13, 14, 15, 16], "length")
    assert driven.flow.recoveries == 0


async def test_a_gap_is_asked_about_again_while_tokens_come_ahead_of_it() -> None:
    """The question or its answer may be lost as well, and a worker that goes on is never silent."""
    house = House("p1", "d1")
    driven = await decoding(house, max_tokens=50, probe_s=0.02)
    house.take_sent()
    for index in range(3, 40):
        driven.token(index, 14)
        await settle(driven, 0.002)
    sent = house.take_sent()
    assert len(sent) > 1
    assert all(one == ("d1", Probe(request_id="r", attempt=1, next_index=2)) for one in sent)
    assert driven.flow.recoveries == 0


async def test_the_prompts_scores_may_come_after_the_decode_workers_tokens() -> None:
    """They are P's to say, and no socket waits for another."""
    house = House("p1", "d1")
    driven = await handing_off(house, prompt_logprobs=0)
    driven.handed_over(0, 11)
    driven.token(1, 12)
    driven.token(1, 12)
    await settle(driven)
    assert driven.flow.journal.tokens == []
    assert list(house.entry("p1").bound) == ["r"], "it still has something to say"
    driven.scores()
    driven.first(0, 11)
    driven.token(2, 13)
    assert await driven.flow.next() == ([11, 12, 13], None)
    assert list(house.entry("p1").bound) == []
    assert driven.flow.recoveries == 0


@pytest.mark.parametrize(
    "how", ["P goes on", "P goes on late", "P is lost", "D says it again", "D computed them"]
)
async def test_scores_that_were_lost_are_computed_again(how: str) -> None:
    local = how == "D computed them"
    house = House("d1") if local else House("p1", "d1")
    driven = await (started if local else handing_off)(house, prompt_logprobs=0)
    if how != "P goes on":
        driven.handed_over(0, 11, transport="local" if local else "shm")
    if how == "P is lost":
        await settle(driven)
        house.lose("p1")
        house.join("p1")
    elif how == "D says it again":
        driven.token(1, 12)
        driven.token(0, 11)
    elif not local:
        driven.first(0, 11)
    await settle(driven)
    assert (driven.flow.recoveries, driven.flow.attempt) == (1, 2)
    driven.scores()
    if local:
        driven.handed_over(0, 11, transport="local")
    else:
        driven.started()
        driven.first(0, 11)
    assert await driven.flow.next() == ([11], None)


@pytest.mark.parametrize("state", ["PREFILLING", "HANDOFF", "DECODING"])
async def test_one_who_is_silent_is_asked(state: str) -> None:
    house = House("p1", "d1")
    driven = await started(house, probe_s=0.01)
    if state != "PREFILLING":
        driven.started()
        await settle(driven)
    if state == "DECODING":
        driven.handed_over(0, 11)
        await driven.flow.next()
    house.take_sent()
    await settle(driven, 0.05)
    sent = house.take_sent()
    whom = "p1" if state == "PREFILLING" else "d1"
    assert sent[0] == (whom, Probe(request_id="r", attempt=1, next_index=len(driven.flow.journal.tokens)))
    assert driven.flow.state == state
    driven.failed("forgotten")  # its job was lost
    await settle(driven)
    assert ("p1", driven.prefill_job(2, driven.flow.journal.tokens)) in house.take_sent()


async def test_what_is_said_again_is_no_progress() -> None:
    """A worker that answers but does not go on is given up for all that."""
    house = House("p1", "d1")
    driven = await started(house, max_tokens=1, queue_timeout_s=0.1, probe_s=0.01)
    driven.started()
    task = asyncio.create_task(driven.flow.next())
    async with asyncio.timeout(5):
        while not task.done():
            driven.started()
            await asyncio.sleep(0.005)
    with pytest.raises(DeadlineExceeded):
        await task


async def test_a_start_that_is_heard_of_after_the_first_token_hands_the_prompt_off() -> None:
    house = House("p1", "d1")
    driven = await started(house)
    driven.first(0, 11)
    assert await driven.flow.next() == ([11], None)
    house.take_sent()
    driven.news(
        PrefillStarted(request_id="r", attempt=1, handle=driven.handle(3), queued_s=0.1, num_cached_tokens=0)
    )
    await settle(driven)
    ((worker, job),) = house.take_sent()
    assert (worker, job.token_ids, job.first_index) == ("d1", driven.prompt, 0)


async def test_every_message_said_twice_counts_once() -> None:
    house = House("p1", "d1")
    driven = await started(house)
    for _ in range(2):
        driven.started()
        driven.first(0, 11)
    for _ in range(2):
        driven.handed_over(0, 11)
        driven.token(1, 12)
    driven.started()
    driven.token(2, 13, "length")
    tokens: list[int] = []
    reason = None
    while reason is None:
        fresh, reason = await driven.flow.next()
        tokens += fresh
    assert tokens == [11, 12, 13]
    assert driven.flow.recoveries == 0
    assert house.dropped("repeated") == 5
    assert [type(message) for _, message in house.take_sent()] == [PrefillJob, DecodeJob]


async def test_tokens_from_a_decoder_whose_confirmation_was_lost() -> None:
    house = House("p1", "d1")
    driven = await handing_off(house)
    driven.first(0, 11)
    driven.token(1, 12)
    assert await driven.flow.next() == ([11, 12], None)
    assert driven.flow.state == "DECODING"
    assert list(house.entry("p1").bound) == []


# ------------------------------------------------------------------ a decode worker hands over


async def test_a_running_request_moves_to_another_decode_worker() -> None:
    house = House("p1", "d1", "d2")
    driven = await decoding(house)  # emitted 11, 12 on d1
    house.take_sent()
    driven.flow.leave_decoder("d1")
    await settle(driven)
    assert house.take_sent() == [("d1", Suspend(request_id="r", attempt=1))]
    drain(house, "d1")
    driven.token(2, 13)  # was under way
    driven.suspended(len(driven.prompt) + 2)
    assert await driven.flow.next() == ([13], None)
    await settle(driven)
    ((worker, job),) = house.take_sent()
    assert (worker, job.attempt) == ("d2", 2)
    assert (job.token_ids, job.first_index) == ([*driven.prompt, 11, 12], 2)
    assert driven.flow.state == "HANDOFF"
    driven.suspended(len(driven.prompt) + 2, attempt=1)  # said twice
    driven.handed_over(2, 13)
    driven.token(3, 14, "length")
    assert await driven.flow.next() == ([14], "length")
    assert driven.flow.journal.tokens == [11, 12, 13, 14]
    await driven.flow.close()
    assert house.take_sent() == []
    assert nobody_holds_anything(house)
    assert driven.flow.recoveries == 0
    assert house.count("moved_requests") == 1


async def test_tokens_lost_before_a_suspension_are_asked_for() -> None:
    house = House("p1", "d1", "d2")
    driven = await decoding(house)  # emitted 11, 12 on d1
    house.take_sent()
    driven.suspended(len(driven.prompt) + 2)
    await settle(driven)
    assert house.take_sent() == [("d1", Probe(request_id="r", attempt=1, next_index=2))]
    driven.token(2, 13)
    driven.suspended(len(driven.prompt) + 2)
    assert await driven.flow.next() == ([13], None)
    await settle(driven)
    ((_, job),) = house.take_sent()
    assert (job.token_ids, job.first_index) == ([*driven.prompt, 11, 12], 2)
    assert driven.flow.recoveries == 0


async def test_with_nobody_to_take_over_it_stays() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    drain(house, "d1")
    house.take_sent()
    driven.flow.leave_decoder("d1")
    driven.flow.leave_decoder("somebody else")
    driven.token(2, 13, "length")
    assert await driven.flow.next() == ([13], "length")
    assert house.take_sent() == []


@pytest.mark.parametrize("how", ["fetch-failed", "source-lost", "target-lost", "wrong-length"])
async def test_a_move_that_fails_is_recovered_from(how: str) -> None:
    house = House("p1", "d1", "d2", "d3")
    driven = await decoding(house)
    drain(house, "d1")
    house.take_sent()
    driven.suspended(len(driven.prompt) + (0 if how == "wrong-length" else 1))
    await settle(driven)
    if how == "fetch-failed":
        driven.failed("fetch_failed")
    elif how != "wrong-length":
        house.lose("d1" if how == "source-lost" else driven.house.take_sent()[-1][0])
    await settle(driven)
    attempt = 2 if how == "wrong-length" else 3
    sent = house.take_sent()
    assert sent[-1] == ("p1", driven.prefill_job(attempt, [11, 12]))
    if how in ("fetch-failed", "target-lost"):
        assert ("d1", driven.abort(2)) in sent
    assert driven.flow.recoveries == 1
    await driven.flow.close()
    assert nobody_holds_anything(house)


async def moving(house: House, **settings: Any) -> Driven:
    """d1 has given it up, d2 fetches from it as attempt 2."""
    driven = await decoding(house, **settings)
    drain(house, "d1")
    driven.suspended(len(driven.prompt) + 1)
    await settle(driven)
    assert house.take_sent()[-1][0] == "d2"
    assert (driven.flow.state, driven.flow.attempt) == ("HANDOFF", 2)
    return driven


@pytest.mark.parametrize("state", ["HANDOFF", "suspended", "RECOVERING"])
async def test_it_waits_while_those_who_are_left_only_drain(state: str) -> None:
    house = House("p1", "d1", "d2")
    driven = await (started if state == "HANDOFF" else decoding)(house, rejoin_wait_s=5.0)
    house.take_sent()
    drain(house, "d1")
    house.lose("d2")
    if state == "HANDOFF":
        driven.started()
    elif state == "suspended":
        driven.suspended(len(driven.prompt) + 1)
    else:
        driven.failed("step_failed")
    task = asyncio.create_task(driven.flow.next())
    await asyncio.sleep(0.06)
    assert [message for _, message in house.take_sent() if message != driven.abort()] == []
    house.join("d3")
    async with asyncio.timeout(5):
        while not house.links.sent:
            await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    assert house.take_sent()[-1][0] == ("p1" if state == "RECOVERING" else "d3")
    assert driven.flow.recoveries == (state == "RECOVERING")


async def test_the_givers_failure_counts_although_it_knows_an_older_attempt() -> None:
    house = House("p1", "d1", "d2", "d3")
    driven = await moving(house)
    expired = Failed(request_id="r", attempt=1, code="lease_expired", message="late", retryable=True)
    driven.flow.news(expired, "d3")
    await settle(driven)
    assert driven.flow.state == "HANDOFF", "it says so of nothing that it gives"
    driven.flow.news(expired, "d1")
    await settle(driven)
    assert house.take_sent()[-1] == ("p1", driven.prefill_job(3, [11, 12]))
    assert house.count("recoveries", cause="lease_expired") == 1


async def test_while_it_moves_both_are_asked_by_the_attempt_that_they_know() -> None:
    house = House("p1", "d1", "d2")
    driven = await moving(house, probe_s=0.05)
    await settle(driven, 0.08)
    sent = house.take_sent()
    assert sent[:2] == [
        ("d2", Probe(request_id="r", attempt=2, next_index=2)),
        ("d1", Probe(request_id="r", attempt=1, next_index=2)),
    ]
    assert all(question in sent[:2] for question in sent)  # on a slow machine they are asked again


@pytest.mark.parametrize("how", ["goodbye", "forgotten"])
@pytest.mark.parametrize("copied", [True, False])
async def test_a_giver_that_has_it_no_more_is_no_loss_if_the_taker_has_it(how: str, copied: bool) -> None:
    """Its goodbye can overtake the taker's confirmation, which comes on another socket."""
    house = House("p1", "d1", "d2")
    driven = await moving(house, probe_s=0.05)
    if how == "goodbye":
        house.registry.remove(house.entry("d1"), "it said goodbye", goodbye=True)
    else:
        driven.flow.news(
            Failed(request_id="r", attempt=1, code="forgotten", message="?", retryable=True), "d1"
        )
    await settle(driven)
    assert house.take_sent()[0] == ("d2", Probe(request_id="r", attempt=2, next_index=2))
    assert driven.flow.state == "HANDOFF"
    if copied:
        driven.handed_over(1, 12)
        await settle(driven, 0.08)
        assert (driven.flow.state, driven.flow.recoveries) == ("DECODING", 0)
    else:
        await settle(driven, 0.08)
        assert ("p1", driven.prefill_job(3, [11, 12])) in house.take_sent()
        assert driven.flow.recoveries == 1


async def test_heartbeats_of_a_worker_that_hands_over_do_not_put_off_the_question() -> None:
    house = House("p1", "d1")
    driven = await decoding(house, probe_s=0.1)
    drain(house, "d1")
    house.take_sent()
    task = asyncio.create_task(driven.flow.next())
    async with asyncio.timeout(5):
        while not house.links.sent:
            driven.flow.leave_decoder("d1")  # there is nobody to take over
            await asyncio.sleep(0.01)
    task.cancel()
    assert house.take_sent() == [("d1", Probe(request_id="r", attempt=1, next_index=2))]


async def test_a_giver_need_not_be_told_again() -> None:
    house = House("p1", "d1", "d2")
    driven = await moving(house)
    driven.flow.leave_decoder("d1")
    assert driven.flow._inbox.empty()


def drain(house: House, worker_id: str) -> None:
    house.registry.heard(house.entry(worker_id), Heartbeat(load=Load(draining=True), counters=Counters()))


# ------------------------------------------------------------------ who is fit


@pytest.mark.parametrize("longest", [10, 11])
async def test_a_smaller_worker_that_joins_later_gets_no_answer_that_it_would_cut_short(longest: int) -> None:
    """Eleven tokens were granted: three of the prompt and eight."""
    house = House("p1", "d1")
    driven = await decoding(house)
    house.take_sent()
    house.join("p2", max_model_len=longest)
    house.join("d2", max_model_len=longest)
    house.lose("p1")
    house.lose("d1")
    if longest == 10:
        with pytest.raises(Unavailable, match="room for the whole answer") as caught:
            await driven.flow.next()
        assert caught.value.code == "no_decode_worker"
        assert house.take_sent() == []
    else:
        await settle(driven)
        assert house.take_sent() == [("p2", driven.prefill_job(2, [11, 12]))]
    await driven.flow.close()


async def test_a_small_prefill_worker_is_passed_over() -> None:
    house = House("p1", "d1")
    driven = await decoding(house)
    house.take_sent()
    house.join("p2", max_model_len=10)
    house.join("d2")
    house.lose("p1")
    house.lose("d1")
    await settle(driven)
    assert house.take_sent() == [("d2", driven.decode_job(2, [11, 12], local=True))]
    await driven.flow.close()


async def test_a_request_keeps_its_age_through_a_recovery() -> None:
    house = House("p1", "d1", "d2")
    driven = await decoding(house)
    house.take_sent()
    house.clock.now = 2.5  # the silence of that time has no meaning here
    house.lose("d1")
    await settle(driven)
    ((_, job),) = house.take_sent()
    assert (job.attempt, job.age_s) == (2, 2.5)
    await driven.flow.close()


async def test_a_worker_whose_step_does_not_end_is_left() -> None:
    house = House("p1", "d1", "d2")
    driven = await decoding(house)
    house.take_sent()
    stuck = Heartbeat(load=Load(busy_for_s=61.0), counters=Counters())
    house.registry.heard(house.entry("d1"), stuck)
    await settle(driven)
    assert house.take_sent() == [("d1", driven.abort()), ("p1", driven.prefill_job(2, [11, 12]))]
    driven.started()
    await settle(driven)
    assert house.take_sent()[0][0] == "d2"
    assert list(house.entry("d1").bound) == []
    await driven.flow.close()


async def test_a_cause_that_a_worker_has_made_up_is_counted_as_other() -> None:
    house = House("p1", "d1", "d2")
    driven = await decoding(house)
    driven.failed("made up, and long" * 1000)
    await settle(driven)
    assert house.count("recoveries", cause="other") == 1
    await driven.flow.close()
