"""Steps that are begun while the one before them runs: the same answers, in the same messages, and every
block accounted for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engines import (
    FACTS,
    answer,
    assert_idle,
    decode_engine,
    decode_job,
    greedy,
    next_token,
    prefill_engine,
    prefill_job,
    run_dry,
    sent_to_router,
)
from late import LateDevice, LateRunner

from pagerelay.common.wire.messages import (
    Failed,
    Fetch,
    FirstToken,
    HandedOver,
    Preempted,
    Ready,
    SamplingParams,
    Suspended,
    TokenDelta,
    Tokens,
)
from pagerelay.decode_svc.engine import DecodeEngine
from pagerelay.prefill_svc.engine import PrefillEngine

PROMPT = list(range(1, 11))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return LateDevice().use(monkeypatch)


def decoder(device: LateDevice, num_blocks: int = 32, *, ahead: bool = True, **limits: Any) -> DecodeEngine:
    return decode_engine(num_blocks, runner=LateRunner(device), step_ahead=ahead, **limits)


def submit(
    engine: DecodeEngine, request_id: str, prompt: list[int], sampling: SamplingParams, order: int = 1
) -> None:
    engine.submit("router", decode_job(request_id, prompt, sampling, order=order), 0.0)


def deltas(messages: list[Any]) -> dict[str, list[TokenDelta]]:
    """Of each request, in the order of arrival."""
    found: dict[str, list[TokenDelta]] = {}
    for message in messages:
        if isinstance(message, HandedOver):
            found.setdefault(message.request_id, []).append(message.first)
        elif isinstance(message, Tokens):
            for delta in message.deltas:
                found.setdefault(delta.request_id, []).append(delta)
    return found


def tokens(messages: list[Any], request_id: str = "r") -> list[int]:
    said = deltas(messages).get(request_id, [])
    assert [delta.index for delta in said] == list(range(len(said)))
    assert all(delta.finish_reason is None for delta in said[:-1])
    return [delta.token for delta in said]


def running(device: LateDevice, sampling: SamplingParams, **kw: Any) -> DecodeEngine:
    """An engine whose one request has its first token, with a step in flight."""
    engine = decoder(device, **kw)
    submit(engine, "r", PROMPT, sampling)
    assert engine.step()
    return engine


def test_a_step_is_launched_before_the_tokens_of_the_one_before_it_are_read(device: LateDevice) -> None:
    engine = decoder(device)
    submit(engine, "r", PROMPT, greedy(4))
    sent = run_dry(engine)
    assert device.log == ["step 10", "step 1", "read", "step 1", "read", "step 1", "read", "read"]
    assert tokens([message for _, message in sent.to_router]) == answer(PROMPT, 4)
    assert_idle(engine)


def test_where_it_is_switched_off_each_step_is_waited_for(device: LateDevice) -> None:
    device.eager = True
    engine = decoder(device, ahead=False)
    submit(engine, "r", PROMPT, greedy(3))
    sent = run_dry(engine)
    assert device.log == ["step 10", "read", "step 1", "read", "step 1", "read"]
    assert tokens([message for _, message in sent.to_router]) == answer(PROMPT, 3)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_messages_as_from_an_engine_that_waits(
    seed: int, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and are taken back at any step, end by length and by their tokens, share prefixes, are
    computed in chunks, and crowd each other out of a small pool."""

    def served(ahead: bool, eager: bool) -> dict[str, list[TokenDelta]]:
        draw = random.Random(seed)
        engine = decoder(LateDevice(eager).use(monkeypatch), 24, ahead=ahead, max_num_seqs=6)
        told: list[Any] = []
        for number in range(24):
            prompt = [
                *PROMPT[: draw.randrange(9)],
                *(draw.randrange(1, 32) for _ in range(draw.randrange(1, 14))),
            ]
            stop = tuple(draw.sample(range(1, 32), draw.randrange(4)))
            sampling = greedy(draw.randrange(1, 14), stop_token_ids=stop)
            submit(engine, f"r{number}", prompt, sampling, number)
            for _ in range(draw.randrange(4)):
                engine.step()
                engine.check_ledger()
                told += sent_to_router(engine)
            if draw.random() < 0.2:
                engine.abort(f"r{draw.randrange(number + 1)}", 1)
                engine.check_ledger()
        told += [message for _, message in run_dry(engine).to_router]
        assert_idle(engine)
        assert not [message for message in told if isinstance(message, Failed)]
        return deltas(told)

    expected, got = served(False, True), served(True, False)
    whole = 0
    for request_id in expected.keys() & got.keys():
        ours, theirs = got[request_id], expected[request_id]
        if ours[-1].finish_reason and theirs[-1].finish_reason:
            assert ours == theirs
            whole += 1
        else:  # taken back or preempted, perhaps a step earlier or later
            shared = min(len(ours), len(theirs))
            assert ours[:shared] == theirs[:shared]
    assert whole > 8


def test_a_sequence_that_ends_by_its_token_has_run_one_step_too_much(device: LateDevice) -> None:
    """Its pool's block for that step comes back with the step, and nothing of it is told or cached."""
    wanted = answer(PROMPT, 3)
    engine = running(device, greedy(9, stop_token_ids=(wanted[2],)))
    assert engine.step()
    assert engine.step()
    assert tokens(sent_to_router(engine)) == wanted
    assert not engine.knows("r")
    assert not engine.check_idle()
    held = engine.counts()
    assert held.held == 4, "3 for the prompt and 2 tokens, and one for the step that still runs"
    engine.check_ledger()
    assert engine.step()
    assert not engine.step()
    assert sent_to_router(engine) == []
    assert_idle(engine)
    assert engine.counts().cached == 3, "10 + 2 tokens of which the KV is whole"


def test_one_that_ends_by_length_is_in_no_step_too_much(device: LateDevice) -> None:
    engine = decoder(device, 3, max_batch_tokens=16)
    submit(engine, "r", PROMPT, greedy(2))
    run_dry(engine)
    assert device.log == ["step 10", "step 1", "read", "read"]
    engine = decoder(LateDevice(), 3)
    assert engine.max_model_len == 12
    submit(engine, "full", PROMPT, greedy(9))
    said = deltas([message for _, message in run_dry(engine).to_router])["full"]
    assert [delta.finish_reason for delta in said] == [None, "length"]


@pytest.mark.parametrize("how", ["abort", "newer", "router"])
def test_what_is_taken_back_gives_its_blocks_back_when_no_step_holds_it(device: LateDevice, how: str) -> None:
    engine = running(device, greedy(9))
    sent_to_router(engine)
    if how == "abort":
        engine.abort("r", 1)
    elif how == "router":
        assert engine.drop_owner("router") == 1
    else:
        engine.submit("router", decode_job("r", PROMPT, greedy(2), attempt=2), 0.0)
    engine.check_ledger()
    assert engine.counts().held == 3
    sent = run_dry(engine)
    told = deltas([message for _, message in sent.to_router])
    assert all(delta.attempt == 2 for delta in told.get("r", []))
    assert len(told.get("r", [])) == (2 if how == "newer" else 0)
    assert_idle(engine)


def test_what_is_taken_back_while_the_next_step_is_launched_is_in_both(device: LateDevice) -> None:
    engine = running(device, greedy(9))
    sent_to_router(engine)
    runner = engine._launcher._runner
    assert isinstance(runner, LateRunner)
    runner.during = lambda: engine.abort("r", 1)
    assert engine.step()
    engine.check_ledger()
    assert engine.counts().held > 0, "the newer step has still to be applied"
    run_dry(engine)
    assert_idle(engine)


def test_nobody_is_preempted_while_a_step_runs(device: LateDevice) -> None:
    """A victim's blocks would not come back at once: the step is waited for, then one has to go."""
    engine = decoder(device, 7)
    for order, request_id in enumerate(("old", "young"), 1):
        submit(engine, request_id, PROMPT[: 6 + order], greedy(12), order)
    told = [message for _, message in run_dry(engine).to_router]
    assert [m.request_id for m in told if isinstance(m, Preempted)] == ["young"]
    assert tokens(told, "old") == answer(PROMPT[:7], 12)
    young = tokens(told, "young")
    assert young == answer(PROMPT[:8], 12)[: len(young)]
    assert "step 2" in device.log
    assert_idle(engine)


def test_suspending_waits_until_no_step_holds_the_sequence(device: LateDevice) -> None:
    engine = running(device, greedy(12))
    engine.step()
    engine.suspend("r", 1)
    told = sent_to_router(engine)
    assert not [message for message in told if isinstance(message, Suspended)]
    assert engine.step()
    told += sent_to_router(engine)
    assert isinstance(told[-1], Suspended)
    emitted = tokens(told[:-1])
    assert emitted == answer(PROMPT, 3)
    assert told[-1].handle.num_tokens == len(PROMPT) + 2, "all but the last token's"
    assert not engine.step()
    assert engine.counts().leased == 3
    engine.check_ledger()
    engine.abort("r", 1)
    assert_idle(engine)


def test_a_probe_is_told_what_is_known(device: LateDevice) -> None:
    engine = running(device, greedy(9))
    engine.step()
    sent_to_router(engine)
    engine.probe("router", "r", 1, 0)
    assert tokens(sent_to_router(engine)) == answer(PROMPT, 2)


@pytest.mark.parametrize("failing", ["first", "behind"])
def test_a_step_that_raises_fails_all_that_are_in_flight(device: LateDevice, failing: str) -> None:
    engine = decoder(device)
    runner = engine._launcher._runner
    assert isinstance(runner, LateRunner)
    submit(engine, "r", PROMPT, greedy(9))
    if failing == "behind":
        engine.step()
        submit(engine, "s", PROMPT[:3], greedy(9), 2)
    runner.failures = 1
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    sent_to_router(engine)
    assert engine.fail_step("broken") == (1 if failing == "first" else 2)
    failed = sent_to_router(engine)
    assert {message.request_id for message in failed} == ({"r"} if failing == "first" else {"r", "s"})
    assert all(isinstance(message, Failed) and message.retryable for message in failed)
    assert_idle(engine)
    submit(engine, "next", PROMPT, greedy(3))
    assert tokens([message for _, message in run_dry(engine).to_router], "next") == answer(PROMPT, 3)


def test_one_whose_next_token_needs_more_than_its_last_makes_the_others_wait(device: LateDevice) -> None:
    device.eager = True
    engine = decoder(device)
    submit(engine, "r", PROMPT, greedy(6))
    submit(engine, "s", PROMPT[:4], greedy(2, logprobs=1), 2)
    told = [message for _, message in run_dry(engine).to_router]
    assert device.log[:5] == ["step 14", "read", "step 2", "read", "step 1"]
    assert device.log[5:7] == ["step 1", "read"], "once it is gone, steps are begun ahead"
    assert tokens(told) == answer(PROMPT, 6)
    assert all(delta.logprobs is not None for delta in deltas(told)["s"])


def test_sequences_join_while_a_step_runs(device: LateDevice) -> None:
    engine = running(device, greedy(6))
    other = [21, 22, 23, 24, 25]
    submit(engine, "s", other, greedy(3), 2)
    told = [message for _, message in run_dry(engine).to_router]
    assert (tokens(told), tokens(told, "s")) == (answer(PROMPT, 6), answer(other, 3))
    assert "step 6" in device.log, "its prompt beside a token that is not known yet"
    assert_idle(engine)


def prefiller(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> tuple[PrefillEngine, list[int | None]]:
    """And the marks that it settles, of which it makes 0, 1, 2, …"""
    engine = prefill_engine(32, runner=LateRunner(device), max_batch_tokens=4, step_ahead=True)
    settled: list[int | None] = []
    marks = iter(range(100))
    monkeypatch.setattr(engine.pool, "mark_written", lambda: next(marks))
    monkeypatch.setattr(engine.pool, "settle", settled.append)
    return engine, settled


def test_chunks_are_announced_with_the_mark_of_their_own_step(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, settled = prefiller(device, monkeypatch)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.step()
    assert device.log == ["step 4", "step 4"], "a chunk that samples nothing is not waited for"
    lease = engine.leases[1]
    layout = FACTS.layout(4)
    engine.fetch(
        b"peer",
        Fetch(lease=1, incarnation="incarnation-1", ticket=lease.handle.ticket, from_block=0, layout=layout),
        0.0,
    )
    news: list[Any] = []
    while engine.step():
        engine.check_ledger()
    news = [m for _, m in engine.take_outbox().to_peer if isinstance(m, Ready)]
    assert [(m.first, m.block_ids, m.written) for m in news] == [(0, [0], 0), (1, [1], 1), (2, [2], 2)]
    assert settled == [0, 1, 2]


def test_a_prompt_leaves_with_its_first_token_while_the_next_one_runs(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = prefiller(device, monkeypatch)
    for order, prompt in enumerate((PROMPT[:4], PROMPT[4:8], PROMPT[2:5]), 1):
        engine.submit("router", prefill_job(f"r{order}", prompt, order=order), 0.0)
    first = [m for _, m in run_dry(engine).to_router if isinstance(m, FirstToken)]
    assert {m.delta.request_id: m.delta.token for m in first} == {
        "r1": next_token(PROMPT[:4]),
        "r2": next_token(PROMPT[4:8]),
        "r3": next_token(PROMPT[2:5]),
    }
    assert device.log.index("read") > 1
    assert all(lease.first_token is not None for lease in engine.leases.values())
