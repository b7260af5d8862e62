"""The decode engine: fetched KV in, tokens out, every sequence joining and leaving at any step."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engines import (
    BLOCK,
    FACTS,
    HeldRunner,
    RunningStep,
    answer,
    assert_idle,
    decode_engine,
    decode_job,
    greedy,
    handle_for,
    next_token,
    run_dry,
    sent_to_router,
)

from pagerelay.common.kv.checksum import block_sum
from pagerelay.common.wire.messages import (
    Commit,
    Failed,
    Fetch,
    HandedOver,
    Preempted,
    Ready,
    SamplingParams,
    Suspended,
    TokenDelta,
    Tokens,
)
from pagerelay.decode_svc.engine import DecodeEngine, Intake

PROMPT = list(range(1, 11))


def submit(
    engine: DecodeEngine,
    request_id: str = "r",
    prompt: list[int] = PROMPT,
    sampling: SamplingParams | None = None,
    *,
    lease: int | None = 1,
    owner: str = "router",
    **job: Any,
) -> None:
    """A job with a handle, or without one: ``lease=None``."""
    handle = None if lease is None else handle_for(lease, len(prompt), engine.pool)
    engine.submit(owner, decode_job(request_id, prompt, sampling, handle=handle, **job), 0.0)


def copy_in(engine: DecodeEngine, intake: Intake) -> None:
    """What a fetch does: writes the KV of the prompt (as the fake model would) into the reserved blocks."""
    kv = engine.pool.tensor[:, 0, :, 0, :, 0].numpy()
    seq = intake.seq
    for position in range(intake.from_block * BLOCK, seq.num_given):
        block = seq.block_ids[position // BLOCK]
        kv[block, :, position % BLOCK] = np.array([seq.token_ids[position], position + 1])


def hand_over(engine: DecodeEngine, intake: Intake) -> None:
    copy_in(engine, intake)
    first = next_token(intake.seq.token_ids)
    engine.fetched(intake.seq, first, "hand", 100, 0.25)
    engine.fetch_ended(intake.seq)


def fetching(engine: DecodeEngine, request_id: str = "r", prompt: list[int] = PROMPT, **job: Any) -> Intake:
    submit(engine, request_id, prompt, **job)
    (intake,) = engine.admit()
    return intake


def running(engine: DecodeEngine, request_id: str = "r", prompt: list[int] = PROMPT, **job: Any) -> None:
    """A sequence whose KV has been handed over; its messages are forgotten."""
    hand_over(engine, fetching(engine, request_id, prompt, **job))
    engine.take_outbox()


def end_cancelled(engine: DecodeEngine) -> int:
    """The copies that were given up have stopped."""
    cancelled, engine.cancelled_fetches = engine.cancelled_fetches, []
    for seq in cancelled:
        engine.fetch_ended(seq)
    return len(cancelled)


def deltas(messages: list[Any]) -> list[TokenDelta]:
    return [delta for message in messages if isinstance(message, Tokens) for delta in message.deltas]


def tokens_of(messages: list[Any], request_id: str = "r") -> list[int]:
    return [delta.token for delta in deltas(messages) if delta.request_id == request_id]


# ------------------------------------------------------------------ the usual way


def test_a_prompt_is_reserved_fetched_and_decoded() -> None:
    engine = decode_engine()
    intake = fetching(engine, sampling=greedy(6))
    assert (intake.seq.block_ids, intake.from_block, intake.handle.lease) == ([0, 1, 2], 0, 1)
    assert engine.counts().held == 3
    assert (engine.num_waiting(), engine.num_running()) == (0, 1)
    assert not engine.step()

    hand_over(engine, intake)
    (handed,) = sent_to_router(engine)
    expected = answer(PROMPT, 6)
    first = TokenDelta(request_id="r", attempt=1, index=0, token=expected[0])
    assert handed == HandedOver(
        request_id="r", attempt=1, first=first, transport="hand", handover_s=0.25, num_bytes=100
    )
    sent = [message for _, message in run_dry(engine).to_router]
    assert [delta.index for delta in deltas(sent)] == [1, 2, 3, 4, 5]
    assert tokens_of(sent) == expected[1:]
    assert [delta.finish_reason for delta in deltas(sent)] == [None] * 4 + ["length"]
    assert_idle(engine)


def test_without_a_handle_the_prompt_is_computed_here() -> None:
    engine = decode_engine(max_batch_tokens=4)
    submit(engine, sampling=greedy(4), lease=None)
    assert engine.admit() == []
    assert engine.outstanding_tokens() == 10
    sent = [message for _, message in run_dry(engine).to_router]
    expected = answer(PROMPT, 4)
    first = TokenDelta(request_id="r", attempt=1, index=0, token=expected[0])
    assert sent[0] == HandedOver(
        request_id="r",
        attempt=1,
        first=first,
        transport="local",
        handover_s=0.0,
        num_bytes=0,
        num_computed_tokens=10,
    )
    assert tokens_of(sent) == expected[1:], "the first one came with HandedOver"
    assert engine.num_prompt_tokens_computed == 10
    assert_idle(engine)


def test_one_message_a_step_and_router() -> None:
    engine = decode_engine(num_blocks=32)
    for number, owner in enumerate(["one", "two", "one"], start=1):
        running(engine, f"r{number}", [number] * 5, lease=number, order=number, owner=owner)
    engine.step()
    sent = engine.take_outbox().to_router
    assert [(owner, [d.request_id for d in message.deltas]) for owner, message in sent] == [
        ("one", ["r1", "r3"]),
        ("two", ["r2"]),
    ]


def test_a_resumed_answer_goes_on_at_its_position() -> None:
    engine = decode_engine()
    said = answer(PROMPT, 3)
    running(engine, prompt=PROMPT + said, sampling=greedy(6), first_index=3, attempt=2)
    sent = [message for _, message in run_dry(engine).to_router]
    assert [(delta.index, delta.attempt) for delta in deltas(sent)] == [(4, 2), (5, 2)]
    assert tokens_of(sent) == answer(PROMPT, 6)[4:]
    assert_idle(engine)


def test_sequences_join_and_leave_a_running_batch() -> None:
    engine = decode_engine(num_blocks=40)
    prompts = {f"r{n}": [n + 1] * (n + 3) for n in range(5)}
    sent: list[Any] = []
    for number, (name, prompt) in enumerate(prompts.items()):
        running(engine, name, prompt, sampling=greedy(9), lease=number, order=number)
        engine.step()
        sent += sent_to_router(engine)
    sent += [message for _, message in run_dry(engine).to_router]
    assert {name: tokens_of(sent, name) for name in prompts} == {
        name: answer(prompt, 9)[1:] for name, prompt in prompts.items()
    }
    assert_idle(engine)


# ------------------------------------------------------------------ ends


def test_eos_stop_ids_and_the_context_end_an_answer() -> None:
    expected = answer(PROMPT, 40)
    eos = expected[4]
    until = expected.index(eos) + 1
    cases: list[tuple[Any, SamplingParams, int, str]] = [
        (FACTS, greedy(40, stop_token_ids=(eos,)), until, "stop"),
        (replace(FACTS, eos_token_ids=(eos,)), greedy(40), until, "stop"),
        (replace(FACTS, eos_token_ids=(eos,)), greedy(20, ignore_eos=True), 20, "length"),
        (replace(FACTS, max_model_len=16), greedy(40), 6, "length"),
    ]
    for facts, sampling, count, reason in cases:
        engine = decode_engine(facts=facts)
        running(engine, sampling=sampling)
        sent = [message for _, message in run_dry(engine).to_router]
        assert tokens_of(sent) == expected[1:count]
        assert deltas(sent)[-1].finish_reason == reason
        assert_idle(engine)


def test_min_tokens_keeps_the_end_away() -> None:
    expected = answer(PROMPT, 10)
    engine = decode_engine()
    running(engine, sampling=greedy(10, stop_token_ids=(expected[3],), min_tokens=6))
    sent = [message for _, message in run_dry(engine).to_router]
    assert expected[3] not in tokens_of(sent)[:5]
    assert len(tokens_of(sent)) >= 5
    assert_idle(engine)


def test_a_pool_that_is_full_ends_the_answer() -> None:
    """4 blocks of 4: the context is 16 tokens here, whatever the model could do."""
    engine = decode_engine(num_blocks=4)
    assert engine.max_model_len == 16
    running(engine, sampling=greedy(40))
    sent = [message for _, message in run_dry(engine).to_router]
    assert len(tokens_of(sent)) == 5
    assert deltas(sent)[-1].finish_reason == "length"
    assert_idle(engine)


def test_a_local_answer_of_one_token() -> None:
    engine = decode_engine()
    submit(engine, sampling=greedy(1), lease=None)
    sent = [message for _, message in run_dry(engine).to_router]
    delta = TokenDelta(request_id="r", attempt=1, index=0, token=next_token(PROMPT), finish_reason="length")
    (handed,) = sent
    assert isinstance(handed, HandedOver)
    assert (handed.first, handed.num_computed_tokens) == (delta, 10)
    assert_idle(engine)


# ------------------------------------------------------------------ admission


def test_jobs_are_admitted_in_order_of_arrival_at_the_router() -> None:
    engine = decode_engine()
    submit(engine, "young", [1, 2], order=7, lease=1)
    submit(engine, "old", [1, 2], order=3, lease=2)
    assert [intake.seq.request_id for intake in engine.admit()] == ["old", "young"]
    assert engine.admit() == []


def test_a_job_waits_for_room_and_its_lease_must_be_renewed() -> None:
    engine = decode_engine(num_blocks=6)
    running(engine, "a", [1] * 10)  # 3 blocks
    submit(engine, "b", [2] * 12, lease=2, order=2)  # 3 blocks, and one is headroom
    submit(engine, "c", [3], lease=3, order=3)
    assert engine.admit() == []
    assert engine.num_waiting() == 2
    assert [handle.lease for handle in engine.queued_handles()] == [2, 3]
    engine.abort("a", 1)
    assert [intake.seq.request_id for intake in engine.admit()] == ["b", "c"]
    assert engine.queued_handles() == []


def test_fetching_sequences_count_against_max_num_seqs() -> None:
    engine = decode_engine(num_blocks=32, max_num_seqs=2)
    first = fetching(engine, "a", lease=1, order=1)
    submit(engine, "b", [1, 2], lease=None, order=2)
    submit(engine, "c", [1, 2], lease=None, order=3)
    submit(engine, "d", [1, 2], lease=4, order=4)
    intakes = [first, *engine.admit()]
    assert [intake.seq.request_id for intake in intakes] == ["a", "d"]
    sent: list[Any] = []
    for _ in range(40):
        engine.step()
        assert engine.num_running() <= 2
        for intake in intakes:
            hand_over(engine, intake)
        sent += sent_to_router(engine)
        intakes = engine.admit()
    assert [delta.request_id for delta in deltas(sent) if delta.finish_reason] == ["a", "d", "b", "c"]
    assert_idle(engine)


def test_blocks_of_a_known_prefix_are_not_fetched_again() -> None:
    engine = decode_engine()
    running(engine)
    run_dry(engine)
    intake = fetching(engine, "s", [*PROMPT, 5, 6], lease=2)
    assert intake.from_block == 2
    assert intake.seq.block_ids[:2] == [0, 1]
    hand_over(engine, intake)
    sent = [message for _, message in run_dry(engine).to_router]
    assert tokens_of(sent, "s") == answer([*PROMPT, 5, 6], 8)[1:]
    assert_idle(engine)


def test_a_prompt_that_is_wholly_here_needs_only_its_commit() -> None:
    engine = decode_engine()
    running(engine, prompt=PROMPT[:8])
    run_dry(engine)
    intake = fetching(engine, "s", PROMPT[:8], lease=2)
    assert (intake.from_block, len(intake.seq.block_ids)) == (2, 2)
    hand_over(engine, intake)
    sent = [message for _, message in run_dry(engine).to_router]
    assert tokens_of(sent, "s") == answer(PROMPT[:8], 8)[1:]
    assert_idle(engine)


def test_a_local_prompt_that_is_known_computes_only_the_rest() -> None:
    engine = decode_engine()
    running(engine)
    run_dry(engine)
    submit(engine, "s", lease=None)
    handed, *_ = (message for _, message in run_dry(engine).to_router)
    assert isinstance(handed, HandedOver)
    assert handed.num_computed_tokens == 2
    assert_idle(engine)


@pytest.mark.parametrize("lease", [1, None])
@pytest.mark.parametrize("tokens", [[], [1] * 17])
def test_what_can_never_fit_is_refused_at_once(tokens: list[int], lease: int | None) -> None:
    engine = decode_engine(num_blocks=4)
    submit(engine, prompt=tokens, lease=lease)
    (failed,) = sent_to_router(engine)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("too_long", False)
    assert_idle(engine)


# ------------------------------------------------------------------ fetches that come to nothing


def test_a_failed_fetch_tells_the_router_and_gives_its_blocks_back() -> None:
    engine = decode_engine()
    intake = fetching(engine)
    engine.fetch_failed(intake.seq, "the lease is gone", retryable=True)
    assert engine.counts().held == 3  # the copy may still run
    engine.fetch_ended(intake.seq)
    (failed,) = sent_to_router(engine)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message, failed.retryable) == ("fetch_failed", "the lease is gone", True)
    assert engine.counts().held == 0
    end_cancelled(engine)
    assert_idle(engine)


def test_a_pointless_fetch_says_nothing() -> None:
    engine = decode_engine()
    intake = fetching(engine)
    engine.fetch_pointless(intake.seq)
    engine.fetch_ended(intake.seq)
    assert sent_to_router(engine) == []
    end_cancelled(engine)
    assert_idle(engine)


@pytest.mark.parametrize("news", ["fetched", "fetch_failed", "fetch_pointless"])
def test_news_of_a_fetch_that_was_taken_back_change_nothing(news: str) -> None:
    engine = decode_engine()
    intake = fetching(engine)
    engine.abort("r", 1)
    assert engine.cancelled_fetches == [intake.seq]
    if news == "fetched":
        hand_over(engine, intake)
    elif news == "fetch_failed":
        engine.fetch_failed(intake.seq, "too late", retryable=True)
    else:
        engine.fetch_pointless(intake.seq)
    engine.fetch_ended(intake.seq)
    end_cancelled(engine)
    assert sent_to_router(engine) == []
    assert_idle(engine)


def test_fetched_blocks_of_a_failed_fetch_are_not_cached() -> None:
    engine = decode_engine()
    intake = fetching(engine)
    engine.fetch_failed(intake.seq, "", retryable=True)
    engine.fetch_ended(intake.seq)
    end_cancelled(engine)
    assert engine.counts().cached == 0


# ------------------------------------------------------------------ taking back


@pytest.mark.parametrize("state", ["queued", "fetching", "running", "waiting", "computing"])
@pytest.mark.parametrize("how", ["abort", "drop_owner", "newer"])
def test_a_request_is_taken_back_wherever_it_is(state: str, how: str) -> None:
    engine = decode_engine(max_batch_tokens=4)
    submit(engine, lease=None if state in ("waiting", "computing") else 1)
    if state == "computing":
        engine.step()
    if state in ("fetching", "running"):
        (intake,) = engine.admit()
        if state == "running":
            hand_over(engine, intake)
            engine.step()
    engine.take_outbox()
    if how == "abort":
        engine.abort("r", 1)
    elif how == "drop_owner":
        assert engine.drop_owner("another router") == 0
        assert engine.drop_owner("router") == 1
    else:
        submit(engine, attempt=2, lease=2)
    assert sent_to_router(engine) == []
    assert end_cancelled(engine) == (state == "fetching")
    if how == "newer":
        (intake,) = engine.admit()
        hand_over(engine, intake)
        sent = [message for _, message in run_dry(engine).to_router]
        assert tokens_of(sent) == answer(PROMPT, 8)[1:]
        assert {delta.attempt for delta in deltas(sent)} == {2}
    engine.abort("r", 9)
    assert engine.queued_handles() == []
    assert not engine.step()
    assert_idle(engine)


def test_an_old_abort_or_job_does_nothing_to_a_newer_attempt() -> None:
    engine = decode_engine()
    running(engine, attempt=2)
    engine.abort("r", 1)
    submit(engine, prompt=[1], attempt=1)
    submit(engine, prompt=[1], attempt=2)
    sent = [message for _, message in run_dry(engine).to_router]
    assert tokens_of(sent) == answer(PROMPT, 8)[1:]


def test_what_is_taken_back_during_a_step_gives_its_blocks_back_after_it() -> None:
    runner = HeldRunner()
    engine = decode_engine(runner=runner)
    running(engine, "r")
    running(engine, "s", [7] * 6, lease=2, order=2)
    with RunningStep(engine, runner):
        engine.abort("r", 1)
        engine.abort("r", 1)
        held = engine.counts().held
        assert held == 5
        assert not engine.check_idle()
    assert engine.counts().held == 2
    sent = sent_to_router(engine)
    assert [delta.request_id for delta in deltas(sent)] == ["s"]
    assert tokens_of(sent, "s") == answer([7] * 6, 2)[1:]
    engine.abort("s", 1)
    assert_idle(engine)


def test_a_newer_attempt_during_a_step_of_the_older() -> None:
    runner = HeldRunner()
    engine = decode_engine(runner=runner)
    running(engine)
    with RunningStep(engine, runner):
        intake = fetching(engine, attempt=2, lease=2)
        hand_over(engine, intake)
    assert deltas(sent_to_router(engine)) == []
    sent = [message for _, message in run_dry(engine).to_router]
    assert {delta.attempt for delta in deltas(sent)} == {2}
    assert tokens_of(sent) == answer(PROMPT, 8)[1:]
    assert_idle(engine)


def test_a_step_that_fails_fails_its_requests_and_nothing_else() -> None:
    runner = HeldRunner()
    engine = decode_engine(runner=runner)
    for number, name in enumerate("abc", start=1):
        running(engine, name, [number] * 6, lease=number, order=number)
    runner.error = RuntimeError("broken")
    with RunningStep(engine, runner) as step:
        engine.abort("b", 1)
        late = fetching(engine, "late", lease=9, order=9)
    assert step.error is runner.error
    assert engine.fail_step("it broke") in (2, 3)
    failed = sent_to_router(engine)
    assert [(message.request_id, message.code, message.retryable) for message in failed] == [
        ("a", "step_failed", True),
        ("c", "step_failed", True),
    ]
    runner.error = None
    hand_over(engine, late)
    runner.go_on.set()
    sent = [message for _, message in run_dry(engine).to_router]
    assert tokens_of(sent, "late") == answer(PROMPT, 8)[1:]
    assert_idle(engine)


# ------------------------------------------------------------------ preemption


def preempted(engine: DecodeEngine) -> list[str]:
    return [message.request_id for message in sent_to_router(engine) if isinstance(message, Preempted)]


def fetching_without_headroom(engine: DecodeEngine) -> Intake:
    """A fetch for the last block, as if its room had been there when it was admitted."""
    seqs, engine.scheduler.running = engine.scheduler.running, []
    intake = fetching(engine, "young", [3] * 3, lease=9, order=9)
    engine.scheduler.running = seqs
    return intake


def test_the_youngest_makes_room_for_an_older_one() -> None:
    engine = decode_engine(num_blocks=6, prefix_cache=False)
    running(engine, "a", [1] * 7, lease=1, order=1)  # 2 blocks, full with its first token
    running(engine, "b", [2] * 3, lease=2, order=2)
    running(engine, "c", [3] * 3, lease=3, order=3)  # 4 of 6 blocks are taken
    engine.step()
    assert preempted(engine) == []
    engine.step()  # a takes a block: 9 tokens; b and c have 5: two more are needed and one is there
    assert preempted(engine) == ["c"]
    assert [seq.request_id for seq in engine.scheduler.running] == ["a", "b"]
    assert engine.num_preempted == 1


def test_the_oldest_is_never_preempted_and_finishes_first() -> None:
    engine = decode_engine(num_blocks=8, prefix_cache=False)
    for number, name in enumerate("abc", start=1):
        running(engine, name, [number] * 5, sampling=greedy(20), lease=number, order=number)
    gone: list[str] = []
    done: list[str] = []
    for _ in range(60):
        engine.step()
        engine.blocks.check()
        for message in sent_to_router(engine):
            if isinstance(message, Preempted):
                gone.append(message.request_id)
            elif isinstance(message, Tokens):
                done += [delta.request_id for delta in message.deltas if delta.finish_reason]
    assert "a" not in gone
    assert done[0] == "a"
    assert sorted(gone + done) == ["a", "b", "c"]
    assert_idle(engine)


def test_a_fetch_younger_than_everybody_is_given_up_and_its_blocks_come_when_the_copy_has_stopped() -> None:
    engine = decode_engine(num_blocks=4, prefix_cache=False)
    running(engine, "a", [1] * 8)  # 2 blocks; its next token needs a third
    engine.blocks.take(1)
    young = fetching_without_headroom(engine)
    engine.step()
    assert preempted(engine) == ["young"]
    assert engine.cancelled_fetches == [young.seq]
    # Its copy still runs: the needy one sits out, and nobody else has to go.
    for _ in range(3):
        engine.step()
        assert preempted(engine) == []
        assert engine.counts().held == 4
    assert end_cancelled(engine) == 1
    engine.step()
    assert deltas(sent_to_router(engine))[0].request_id == "a"


def test_a_preemption_alone_is_news() -> None:
    """A step that only makes room computes nothing, but what it says has to be sent."""
    engine = decode_engine(num_blocks=4, prefix_cache=False)
    running(engine, "a", [1] * 8)
    engine.blocks.take(1)
    fetching_without_headroom(engine)
    told: list[str] = []
    engine.on_planned = lambda: told.extend(preempted(engine))
    assert not engine.step()
    assert told == ["young"]


# ------------------------------------------------------------------ handing a running sequence over


def take_over(source: DecodeEngine, target: DecodeEngine, suspended: Suspended, tokens: list[int]) -> None:
    """What the router and the target's worker do: the job, the fetch block by block, the confirmation."""
    handle = suspended.handle
    job = decode_job("r", tokens, greedy(12), attempt=2, first_index=len(tokens) - len(PROMPT), handle=handle)
    target.submit("router", job, 0.0)
    (intake,) = target.admit()
    fetch = Fetch(
        lease=handle.lease,
        incarnation=handle.incarnation,
        from_block=intake.from_block,
        layout=target.pool.layout,
        ticket=handle.ticket,
    )
    source.fetch(b"target", fetch, 0.0)
    ready, commit = (message for _, message in source.take_outbox().to_peer)
    assert isinstance(ready, Ready)
    assert isinstance(commit, Commit)
    assert commit.num_tokens == intake.seq.num_given == handle.num_tokens
    for index, block in enumerate(ready.block_ids, ready.first):
        target.pool.blocks[intake.seq.block_ids[index]] = source.pool.blocks[block]
    source.release(b"target", handle.lease, received=True)
    target.fetched(intake.seq, commit.first_token, "hand", 0, 0.0)
    target.fetch_ended(intake.seq)


@pytest.mark.parametrize("num_steps", range(7))
def test_a_running_sequence_goes_on_elsewhere_at_the_next_token(num_steps: int) -> None:
    source, target = decode_engine(), decode_engine()
    running(source, sampling=greedy(12))
    for _ in range(num_steps):
        source.step()
    source.take_outbox()
    expected = answer(PROMPT, 12)
    source.suspend("r", 1)
    (suspended,) = sent_to_router(source)
    assert isinstance(suspended, Suspended)
    assert suspended.handle.num_tokens == len(PROMPT) + num_steps
    counts = source.counts()
    assert (counts.held, counts.by_lease) == (0, -(-(len(PROMPT) + num_steps) // BLOCK))
    assert not source.step()
    take_over(source, target, suspended, PROMPT + expected[:num_steps])
    assert_idle(source)
    sent = [message for _, message in run_dry(target).to_router]
    assert isinstance(sent[0], HandedOver)
    assert (sent[0].first.index, sent[0].first.token) == (num_steps, expected[num_steps])
    assert tokens_of(sent) == expected[num_steps + 1 :]
    assert_idle(target)


def test_suspending_within_a_step_waits_for_its_token() -> None:
    runner = HeldRunner()
    engine = decode_engine(runner=runner)
    running(engine)
    with RunningStep(engine, runner):
        engine.suspend("r", 1)
        assert sent_to_router(engine) == []
    tokens, suspended = sent_to_router(engine)
    assert [delta.index for delta in tokens.deltas] == [1]
    assert suspended.handle.num_tokens == len(PROMPT) + 1
    engine.abort("r", 2)
    assert_idle(engine)


def test_suspending_what_cannot_be_suspended() -> None:
    engine = decode_engine(max_batch_tokens=4)
    engine.suspend("nobody", 1)
    intake = fetching(engine)
    submit(engine, "local", [7] * 10, lease=None, order=2)
    engine.step()
    for request_id, attempt in (("r", 1), ("local", 1), ("r", 2)):
        engine.suspend(request_id, attempt)  # still fetched, its prompt computed, another attempt
    assert sent_to_router(engine) == []
    hand_over(engine, intake)
    assert len(tokens_of([message for _, message in run_dry(engine).to_router])) > 0
    assert_idle(engine)


def test_a_worker_that_nobody_can_fetch_from_is_not_suspended() -> None:
    engine = decode_engine()
    engine._leasing = replace(engine._leasing, gives=False)
    dropped: list[str] = []
    engine.on_dropped = lambda kind, reason: dropped.append(f"{kind}/{reason}")
    running(engine, sampling=greedy(6))
    engine.suspend("r", 1)
    assert sent_to_router(engine) == []
    assert dropped == ["Suspend/refused"]
    assert tokens_of([message for _, message in run_dry(engine).to_router]) == answer(PROMPT, 6)[1:]
    assert_idle(engine)


def test_what_nobody_comes_for_is_given_up_and_the_router_hears_of_it() -> None:
    engine = decode_engine()
    running(engine)
    engine.suspend("r", 1)
    first = sent_to_router(engine)
    engine.suspend("r", 1)
    engine.probe("router", "r", 1, 1)
    assert sent_to_router(engine) == [*first, *first], "asked again, it says so again"
    engine.expire(5.0)
    engine.expire(16.0)
    (failed,) = sent_to_router(engine)
    assert (failed.code, failed.retryable) == ("lease_expired", True)
    assert_idle(engine)


def test_a_probe_is_told_the_tokens_from_the_one_that_is_due() -> None:
    engine = decode_engine()
    running(engine, sampling=greedy(8))
    for _ in range(4):
        engine.step()
    engine.take_outbox()
    expected = answer(PROMPT, 5)
    for due in range(6):
        engine.probe("router", "r", 1, due)
        assert tokens_of(sent_to_router(engine)) == expected[due:]
    for request_id, attempt in (("other", 1), ("r", 2)):
        engine.probe("router", request_id, attempt, 0)
        (failed,) = sent_to_router(engine)
        assert (failed.request_id, failed.attempt, failed.code) == (request_id, attempt, "forgotten")
        assert failed.retryable
    submit(engine, "waiting")
    engine.probe("router", "waiting", 1, 0)
    assert sent_to_router(engine) == [], "there is nothing to say of it yet"


def test_checksums_of_what_is_handed_over_are_made_while_the_lock_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = decode_engine(checksums=True)
    running(engine, sampling=greedy(12))
    engine.step()
    engine.suspend("r", 1)
    (suspended,) = [m for _, m in engine.take_outbox().to_router if isinstance(m, Suspended)]
    free: list[bool] = []

    def taken_by_another() -> None:
        free.append(engine.lock.acquire(blocking=False))
        if free[-1]:
            engine.lock.release()

    def watched(block: Any) -> int:
        other = threading.Thread(target=taken_by_another)
        other.start()
        other.join()
        return block_sum(block)

    monkeypatch.setattr("pagerelay.common.engine.leasing.block_sum", watched)
    handle = suspended.handle
    question = Fetch(
        lease=handle.lease,
        incarnation=handle.incarnation,
        from_block=0,
        layout=engine.pool.layout,
        ticket=handle.ticket,
    )
    engine.fetch(b"target", question, 0.0)
    ready = engine.take_outbox().to_peer[0][1]
    assert isinstance(ready, Ready)
    assert ready.sums == [block_sum(engine.pool.blocks[block]) for block in ready.block_ids]
    assert free == [True] * len(ready.block_ids)


def test_the_end_of_an_answer_may_be_asked_for_when_it_was_lost() -> None:
    engine = decode_engine()
    running(engine, sampling=greedy(4))
    sent = deltas([message for _, message in run_dry(engine).to_router])
    assert [(delta.index, delta.finish_reason) for delta in sent] == [(1, None), (2, None), (3, "length")]
    engine.probe("router", "r", 1, 2)
    assert deltas(sent_to_router(engine)) == sent[1:]
    engine.probe("router", "r", 2, 2)
    (failed,) = sent_to_router(engine)
    assert (failed.code, failed.attempt) == ("forgotten", 2)
