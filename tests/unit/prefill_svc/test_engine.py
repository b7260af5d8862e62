"""The prefill engine: prompts in, leased KV and one token out, message by message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engines import (
    FACTS,
    INCARNATION,
    VOCAB,
    HeldRunner,
    RunningStep,
    answer,
    assert_idle,
    greedy,
    make_pool,
    next_token,
    prefill_engine,
    prefill_job,
    run_dry,
    sent_to_peer,
    sent_to_router,
)
from fake_cuda import Machine
from msgspec import structs

from pagerelay.common.errors import PagerelayError
from pagerelay.common.kv.checksum import block_sum
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.wire.messages import (
    Commit,
    Failed,
    Fetch,
    FirstToken,
    LeaseLost,
    PrefillStarted,
    Ready,
    Released,
    TokenDelta,
)
from pagerelay.prefill_svc.engine import PrefillEngine

PROMPT = list(range(1, 11))  # 10 tokens: two full blocks and two tokens
DECODER, OTHER = b"decode-1", b"decode-2"


def fetch(
    engine: PrefillEngine,
    lease: int = 1,
    from_block: int = 0,
    peer: bytes = DECODER,
    now: float = 0.0,
    **changes: Any,
) -> None:
    layout = changes.pop("layout", engine.pool.layout)
    given = engine.leases.get(lease)
    message = Fetch(
        lease=lease,
        incarnation=INCARNATION,
        from_block=from_block,
        layout=layout,
        ticket=given.handle.ticket if given is not None else "",
    )
    engine.fetch(peer, structs.replace(message, **changes), now)


def first_token(
    request_id: str, token: int, *, index: int = 0, reason: Any = None, attempt: int = 1
) -> TokenDelta:
    return TokenDelta(request_id=request_id, attempt=attempt, index=index, token=token, finish_reason=reason)


def leased(engine: PrefillEngine, request_id: str = "r", prompt: list[int] = PROMPT, **job: Any) -> None:
    """Computes a prompt whose lease then stands, and forgets the messages."""
    engine.submit("router", prefill_job(request_id, prompt, **job), 0.0)
    run_dry(engine)


def first_delta(engine: PrefillEngine) -> TokenDelta:
    first = run_dry(engine).to_router[-1][1]
    assert isinstance(first, FirstToken)
    return first.delta


def ending_with(eos: int) -> PrefillEngine:
    """An engine whose model ends with ``eos``."""
    return prefill_engine(facts=replace(FACTS, eos_token_ids=(eos,)))


# ------------------------------------------------------------------ the usual way


def test_a_prompt_is_started_computed_and_leased() -> None:
    engine = prefill_engine()
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    assert engine.outstanding_tokens() == 10
    sent = run_dry(engine)
    assert [owner for owner, _ in sent.to_router] == ["router", "router"]
    started, first = (message for _, message in sent.to_router)
    assert isinstance(started, PrefillStarted)
    assert (started.request_id, started.attempt, started.num_cached_tokens) == ("r", 1, 0)
    assert (started.handle.lease, started.handle.num_tokens) == (1, 10)
    assert isinstance(first, FirstToken)
    assert first.delta == first_token("r", next_token(PROMPT))
    assert first.num_computed_tokens == 10
    assert sent.to_peer == []
    counts = engine.counts()
    assert (counts.held, counts.leased) == (0, 3)
    assert engine.outstanding_tokens() == 0


def test_a_late_fetch_is_told_everything_at_once_and_released_after_its_confirmation() -> None:
    engine = prefill_engine()
    leased(engine)
    fetch(engine)
    assert sent_to_peer(engine, DECODER) == [
        Ready(lease=1, first=0, block_ids=[0, 1, 2]),
        Commit(lease=1, num_tokens=10, first_token=next_token(PROMPT)),
    ]
    engine.release(DECODER, 1, received=True)
    assert sent_to_peer(engine, DECODER) == [Released(lease=1, ok=True)]
    assert_idle(engine)
    assert engine.counts().cached == 2


def test_an_early_fetch_is_told_chunk_by_chunk() -> None:
    engine = prefill_engine(max_batch_tokens=4)
    prompt = list(range(1, 15))  # 14 tokens in chunks of 4
    engine.submit("router", prefill_job("r", prompt), 0.0)
    engine.step()
    fetch(engine)
    told = [sent_to_peer(engine)]
    for _ in range(3):
        engine.step()
        told.append(sent_to_peer(engine))
    assert told == [
        [Ready(lease=1, first=0, block_ids=[0])],
        [Ready(lease=1, first=1, block_ids=[1])],
        [Ready(lease=1, first=2, block_ids=[2])],
        [
            Ready(lease=1, first=3, block_ids=[3]),
            Commit(lease=1, num_tokens=14, first_token=next_token(prompt)),
        ],
    ]


def test_what_is_announced_has_the_mark_of_the_step_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step that has returned is not done; a mark is made after each, before its news leave."""
    engine = prefill_engine(max_batch_tokens=4)
    marks = iter([3, 0, 1, 2])
    monkeypatch.setattr(engine.pool, "mark_written", lambda: next(marks))
    engine.submit("router", prefill_job("r", list(range(1, 15))), 0.0)
    engine.step()
    fetch(engine)
    told = sent_to_peer(engine)
    for _ in range(3):
        engine.step()
        told += sent_to_peer(engine)
    assert [news.written for news in told if isinstance(news, Ready)] == [3, 0, 1, 2]


def test_a_chunk_that_ends_within_a_block_announces_only_what_is_full() -> None:
    engine = prefill_engine(max_batch_tokens=6)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.step()
    fetch(engine)
    assert sent_to_peer(engine) == [Ready(lease=1, first=0, block_ids=[0])]


def test_blocks_that_the_decode_worker_has_are_not_announced() -> None:
    engine = prefill_engine()
    leased(engine)
    fetch(engine, from_block=2)
    ready, commit = sent_to_peer(engine)
    assert ready == Ready(lease=1, first=2, block_ids=[2])
    assert isinstance(commit, Commit)


def test_one_who_has_every_block_gets_the_commit_alone() -> None:
    engine = prefill_engine()
    leased(engine, prompt=PROMPT[:8])
    fetch(engine, from_block=2)
    assert sent_to_peer(engine) == [Commit(lease=1, num_tokens=8, first_token=next_token(PROMPT[:8]))]


def test_a_second_prompt_with_the_same_beginning_computes_only_the_rest() -> None:
    engine = prefill_engine()
    leased(engine)
    engine.submit("router", prefill_job("s", [*PROMPT, 3, 4], order=2), 0.0)
    started, first = (message for _, message in run_dry(engine).to_router)
    assert isinstance(started, PrefillStarted)
    assert isinstance(first, FirstToken)
    assert started.num_cached_tokens == 8
    assert first.num_computed_tokens == 4
    assert first.delta.token == next_token([*PROMPT, 3, 4])
    assert engine.num_prompt_tokens_cached == 8
    # Blocks 0 and 1 are leased twice.
    assert engine.counts().leased == 4
    engine.abort("r", 1)
    assert engine.counts().leased == 3
    fetch(engine, lease=2)
    assert sent_to_peer(engine)[0] == Ready(lease=2, first=0, block_ids=[0, 1, 3])


def test_a_resumed_answer_goes_on_at_its_position() -> None:
    engine = prefill_engine()
    said = answer(PROMPT, 3)
    engine.submit("router", prefill_job("r", PROMPT + said, attempt=2, first_index=3), 0.0)
    (_, started), (_, first) = run_dry(engine).to_router
    assert isinstance(started, PrefillStarted)
    assert isinstance(first, FirstToken)
    assert first.delta == first_token("r", answer(PROMPT, 4)[3], index=3, attempt=2)


# ------------------------------------------------------------------ the first token ends it


ENDS = [
    pytest.param({"max_tokens": 1}, "length", id="max-tokens"),
    pytest.param({"stop_token_ids": (next_token(PROMPT),)}, "stop", id="stop-id"),
    pytest.param({"min_tokens": 2, "max_tokens": 1}, "length", id="min-tokens"),
]


@pytest.mark.parametrize(("params", "reason"), ENDS)
def test_an_answer_of_one_token_leaves_nothing_behind(params: dict[str, Any], reason: str) -> None:
    engine = prefill_engine()
    engine.submit("router", prefill_job("r", PROMPT, greedy(**params)), 0.0)
    first = run_dry(engine).to_router[-1][1]
    assert isinstance(first, FirstToken)
    assert first.delta == first_token("r", next_token(PROMPT), reason=reason)
    assert_idle(engine)
    # A decode worker that comes for it hears that nothing is wrong.
    fetch(engine)
    (lost,) = sent_to_peer(engine)
    assert (lost.lease, lost.ended) == (1, True)


def test_eos_as_the_first_token() -> None:
    engine = ending_with(next_token(PROMPT))
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    assert first_delta(engine).finish_reason == "stop"
    assert_idle(engine)


def test_eos_may_be_ignored() -> None:
    engine = ending_with(next_token(PROMPT))
    engine.submit("router", prefill_job("r", PROMPT, greedy(ignore_eos=True)), 0.0)
    assert first_delta(engine).finish_reason is None


def test_eos_does_not_come_before_min_tokens() -> None:
    eos = next_token(PROMPT)
    engine = ending_with(eos)
    engine.submit("router", prefill_job("r", PROMPT, greedy(min_tokens=1)), 0.0)
    delta = first_delta(engine)
    assert delta.token != eos
    assert delta.finish_reason is None


def test_one_who_fetches_early_hears_that_the_first_token_ended_it() -> None:
    engine = prefill_engine(max_batch_tokens=6)
    engine.submit("router", prefill_job("r", PROMPT, greedy(1)), 0.0)
    engine.step()
    fetch(engine)
    ready, late, lost = (message for _, message in run_dry(engine).to_peer)
    assert (ready, late) == (Ready(lease=1, first=0, block_ids=[0]), Ready(lease=1, first=1, block_ids=[1]))
    assert isinstance(lost, LeaseLost)
    assert lost.ended
    assert_idle(engine)


def test_a_prompt_that_fills_the_context_ends_with_its_first_token() -> None:
    engine = prefill_engine(num_blocks=20, max_batch_tokens=64)
    engine.submit("router", prefill_job("r", [1] * (FACTS.max_model_len - 1)), 0.0)
    assert first_delta(engine).finish_reason == "length"
    assert_idle(engine)


# ------------------------------------------------------------------ leases


def test_a_lease_runs_out_and_everybody_hears_of_it() -> None:
    engine = prefill_engine(lease_s=10.0)
    engine.expire(100.0)  # the clock, before the prompt
    leased(engine)
    fetch(engine, now=101.0)
    sent_to_peer(engine)
    engine.expire(111.0)
    assert engine.counts().leased == 3
    engine.expire(111.1)
    outbox = engine.take_outbox()
    ((owner, failed),) = outbox.to_router
    assert isinstance(failed, Failed)
    assert (owner, failed.request_id, failed.code, failed.retryable) == ("router", "r", "lease_expired", True)
    ((peer, lost),) = outbox.to_peer
    assert isinstance(lost, LeaseLost)
    assert (peer, lost.lease, lost.ended) == (DECODER, 1, False)
    assert engine.expired == 1
    assert_idle(engine)


def test_a_lease_that_nobody_came_for_runs_out_as_well() -> None:
    """Its time begins with the first look at the clock: on a machine that has long been up, that is no small
    number, and a prompt that was complete before it must not be taken for an old one."""
    engine = prefill_engine(lease_s=10.0)
    leased(engine)
    sent_to_router(engine)
    engine.expire(90_000.0)
    engine.expire(90_010.0)
    assert sent_to_router(engine) == []
    engine.expire(90_010.1)
    assert [type(message) for message in sent_to_router(engine)] == [Failed]
    assert_idle(engine)


def test_a_confirmation_after_the_end_is_refused() -> None:
    engine = prefill_engine(lease_s=10.0)
    leased(engine)
    fetch(engine)
    engine.expire(10.1)
    engine.take_outbox()
    engine.release(DECODER, 1, received=True)
    assert sent_to_peer(engine, DECODER) == [Released(lease=1, ok=False)]
    fetch(engine, now=11.0)
    (lost,) = sent_to_peer(engine)
    assert isinstance(lost, LeaseLost)
    assert not lost.ended, "the fetch has failed, and the router must hear of it"


@pytest.mark.parametrize("sign", ["renew", "fetch", "read"])
def test_every_sign_of_life_prolongs_a_lease(sign: str) -> None:
    engine = prefill_engine(lease_s=10.0)
    leased(engine)
    fetch(engine)
    if sign == "renew":
        engine.renew({1: engine.leases[1].handle.ticket, 99: ""}, 8.0)
    elif sign == "fetch":
        fetch(engine, now=8.0)
    else:
        assert engine.may_read(DECODER, 1, [0, 2], 8.0)
    engine.expire(17.9)
    assert engine.counts().leased == 3
    engine.expire(18.1)
    assert_idle(engine)


def test_a_lease_has_no_deadline_while_its_prompt_is_computed() -> None:
    engine = prefill_engine(max_batch_tokens=4, lease_s=10.0)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.step()
    engine.expire(1000.0)
    assert engine.expired == 0
    run_dry(engine)
    engine.expire(1009.0)
    assert engine.counts().leased == 3


def test_a_confirmation_before_the_commit_is_refused_and_the_prompt_goes_on() -> None:
    engine = prefill_engine(max_batch_tokens=4)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.step()
    fetch(engine)
    sent_to_peer(engine)
    engine.release(DECODER, 1, received=True)
    assert sent_to_peer(engine) == [Released(lease=1, ok=False)]
    run_dry(engine)
    fetch(engine, peer=OTHER)
    assert [type(message) for message in sent_to_peer(engine, OTHER)] == [Ready, Commit]


def test_nobody_releases_or_reads_anothers_lease() -> None:
    engine = prefill_engine()
    leased(engine)
    fetch(engine)
    engine.take_outbox()
    engine.release(OTHER, 1, received=True)
    assert sent_to_peer(engine) == [Released(lease=1, ok=False)]
    engine.release(OTHER, 1, received=False)
    assert engine.counts().leased == 3
    engine.take_outbox()
    for peer, lease in ((OTHER, 1), (DECODER, 2)):
        assert not engine.may_read(peer, lease, [0], 0.0)
        (lost,) = sent_to_peer(engine, peer)
        assert isinstance(lost, LeaseLost)
        assert (lost.lease, lost.ended) == (lease, False), "the request has not ended: its fetch has failed"
    assert not engine.may_read(DECODER, 1, [0, 3], 0.0)
    assert not engine.may_read(DECODER, 1, [-1], 0.0)
    assert engine.may_read(DECODER, 1, [0, 1, 2], 0.0)


def test_one_who_no_longer_wants_a_lease_ends_it_without_an_answer() -> None:
    engine = prefill_engine()
    leased(engine)
    fetch(engine)
    engine.take_outbox()
    engine.release(DECODER, 1, received=False)
    assert sent_to_peer(engine) == []
    assert_idle(engine)
    engine.release(DECODER, 1, received=False)
    assert_idle(engine)


def test_a_lease_belongs_to_who_came_first_with_its_ticket() -> None:
    engine, dropped = watched(prefill_engine())
    leased(engine)
    fetch(engine, ticket="guessed")
    fetch(engine, ticket="")
    assert [message.ended for message in sent_to_peer(engine)] == [False, False]
    engine.renew({1: "guessed"}, 5.0)
    fetch(engine)
    assert [type(message) for message in sent_to_peer(engine)] == [Ready, Commit]
    fetch(engine, peer=OTHER)  # it has the ticket, but the lease has its reader
    (lost,) = sent_to_peer(engine, OTHER)
    assert isinstance(lost, LeaseLost)
    engine.release(OTHER, 1, received=True)
    assert sent_to_peer(engine) == [Released(lease=1, ok=False)]
    engine.release(DECODER, 1, received=True)
    assert sent_to_peer(engine) == [Released(lease=1, ok=True)]
    assert dropped == ["Fetch/refused", "Fetch/refused", "Renew/refused", "Fetch/refused", "Release/refused"]
    assert_idle(engine)


def test_a_confirmation_said_twice_is_answered_twice() -> None:
    """The first answer may have been lost; whether the copy counts does not change."""
    engine, dropped = watched(prefill_engine())
    leased(engine)
    fetch(engine)
    engine.take_outbox()
    for _ in range(2):
        engine.release(DECODER, 1, received=True)
        assert sent_to_peer(engine) == [Released(lease=1, ok=True)]
    engine.release(OTHER, 1, received=True)
    assert sent_to_peer(engine) == [Released(lease=1, ok=False)]
    assert dropped == ["Release/late"]
    assert_idle(engine)


def test_blocks_that_are_not_computed_yet_are_nobodys_to_read() -> None:
    """They still hold what somebody else's prompt left in them."""
    engine = prefill_engine(max_batch_tokens=4)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.step()
    fetch(engine, from_block=3)  # it says that it has them all: that changes nothing
    assert engine.may_read(DECODER, 1, [0], 0.0)
    assert not engine.may_read(DECODER, 1, [1], 0.0)
    run_dry(engine)
    assert engine.may_read(DECODER, 1, [0, 1, 2], 0.0)


def test_no_block_is_asked_for_twice_in_one_read() -> None:
    engine = prefill_engine()
    leased(engine)
    fetch(engine)
    assert not engine.may_read(DECODER, 1, [0, 1, 0], 0.0)


# ------------------------------------------------------------------ checksums


def ready_of(engine: PrefillEngine) -> list[Ready]:
    return [message for message in sent_to_peer(engine) if isinstance(message, Ready)]


def test_every_block_is_announced_with_the_checksum_of_its_bytes() -> None:
    engine = prefill_engine(max_batch_tokens=3, checksums=True)  # chunks end within blocks
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.step()
    fetch(engine)
    run = [message for _, message in run_dry(engine).to_peer if isinstance(message, Ready)]
    sums = [one for ready in run for one in ready.sums]
    assert sums == [block_sum(engine.pool.blocks[block]) for block in (0, 1, 2)]
    assert len(set(sums)) == 3
    engine.release(DECODER, 1, received=True)
    engine.take_outbox()
    # Found in the prefix cache, they are announced with the sums of when they were computed.
    engine.pool.blocks[1][5] ^= 1
    leased(engine, "s")
    fetch(engine, lease=2)
    (ready,) = ready_of(engine)
    assert (ready.block_ids[:2], ready.sums[:2]) == ([0, 1], sums[:2])


def test_a_pool_in_gpu_memory_has_no_checksums() -> None:
    """Each would cost a copy to the host and a wait for the step."""
    machine = Machine()
    cuda = machine.process()
    backend = CudaIpcBackend(cuda, cuda.place)
    engine = prefill_engine(pool=make_pool(16, backend=backend), checksums=True)
    leased(engine)
    fetch(engine)
    (ready,) = ready_of(engine)
    assert (ready.block_ids, ready.sums) == ([0, 1, 2], [])
    assert ready.written is not None
    backend.close()
    machine.check()


def test_a_block_that_arrived_corrupt_is_not_given_to_anyone_again() -> None:
    engine = prefill_engine(checksums=True)
    leased(engine)
    fetch(engine)
    engine.release(DECODER, 1, received=False, corrupt=[1, 77])
    assert_idle(engine)
    engine.submit("router", prefill_job("s", PROMPT), 0.0)
    started = run_dry(engine).to_router[0][1]
    assert isinstance(started, PrefillStarted)
    assert started.num_cached_tokens == 4, "only the block before it"


# ------------------------------------------------------------------ what is said again


def test_a_probe_is_told_again_what_was_said() -> None:
    engine = prefill_engine(max_batch_tokens=4)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.probe("router", "r", 1, 0)
    assert sent_to_router(engine) == [], "it waits: nothing has been said yet"
    engine.step()
    engine.take_outbox()
    engine.probe("router", "r", 1, 0)
    (started,) = sent_to_router(engine)
    assert started.handle == engine.leases[1].handle
    run_dry(engine)
    engine.probe("router", "r", 1, 0)
    _, first = sent_to_router(engine)
    assert first.delta == first_token("r", next_token(PROMPT))
    engine.abort("r", 1)
    for request_id, attempt in (("r", 1), ("nobody", 3)):
        engine.probe("router", request_id, attempt, 0)
        (failed,) = sent_to_router(engine)
        assert (failed.request_id, failed.attempt, failed.code) == (request_id, attempt, "forgotten")
        assert failed.retryable


def test_a_job_that_comes_after_its_abort_or_twice_is_not_begun() -> None:
    engine, dropped = watched(prefill_engine())
    engine.abort("r", 2)
    engine.submit("router", prefill_job("r", PROMPT, attempt=1), 0.0)
    engine.submit("router", prefill_job("r", PROMPT, attempt=2), 0.0)
    assert_idle(engine)
    leased(engine, attempt=3)
    fetch(engine)
    engine.release(DECODER, 1, received=True)
    engine.submit("router", prefill_job("r", PROMPT, attempt=3), 0.0)
    assert not engine.step()
    assert_idle(engine)
    assert dropped == ["PrefillJob/late", "PrefillJob/repeated", "PrefillJob/repeated"]


def watched(engine: PrefillEngine) -> tuple[PrefillEngine, list[str]]:
    dropped: list[str] = []
    engine.on_dropped = lambda kind, reason: dropped.append(f"{kind}/{reason}")
    return engine, dropped


def test_a_decode_worker_of_another_layout_is_refused_with_both_values() -> None:
    engine = prefill_engine()
    leased(engine)
    other = structs.replace(engine.pool.layout, block_size=64)
    fetch(engine, layout=other)
    (lost,) = sent_to_peer(engine)
    assert isinstance(lost, LeaseLost)
    assert "block_size: 4 here, 64 there" in lost.reason
    assert not lost.ended
    assert not engine.may_read(DECODER, 1, [0], 0.0)


def test_a_lease_of_a_worker_that_is_gone_is_not_taken_for_one_of_ours() -> None:
    """A new process at the old one's address counts its leases from 1 again."""
    engine = prefill_engine()
    leased(engine)
    fetch(engine, incarnation="before")
    (lost,) = sent_to_peer(engine)
    assert isinstance(lost, LeaseLost)
    assert (lost.lease, lost.ended) == (1, False)
    assert not engine.may_read(DECODER, 1, [0], 0.0)
    assert engine.counts().leased == 3


def test_leased_blocks_are_not_given_to_anyone_else() -> None:
    engine = prefill_engine(num_blocks=4)
    leased(engine)
    engine.submit("router", prefill_job("s", [9] * 8, order=2), 0.0)
    assert not engine.step()
    assert engine.outstanding_tokens() == 8
    fetch(engine)
    engine.release(DECODER, 1, received=True)
    run_dry(engine)
    assert engine.counts().leased == 2


# ------------------------------------------------------------------ taking back


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 9], ids=["waiting", "computing", "leased"])
@pytest.mark.parametrize("how", ["abort", "drop_owner", "newer"])
def test_a_request_is_taken_back_wherever_it_is(steps: int, how: str, fetched: bool) -> None:
    engine = prefill_engine(max_batch_tokens=4)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    for _ in range(steps):
        engine.step()
    if fetched:
        fetch(engine)
    engine.take_outbox()
    if how == "abort":
        engine.abort("r", 1)
    elif how == "drop_owner":
        assert engine.drop_owner("another router") == 0
        assert engine.drop_owner("router") == 1
    else:
        engine.submit("router", prefill_job("r", PROMPT, attempt=2), 0.0)
    lost = sent_to_peer(engine)
    assert [message.ended for message in lost] == ([True] if fetched and steps else [])
    if how == "newer":
        first = run_dry(engine).to_router[-1][1]
        assert isinstance(first, FirstToken)
        assert first.delta == first_token("r", next_token(PROMPT), attempt=2)
        engine.abort("r", 2)
    engine.abort("r", 9)
    assert engine.drop_owner("router") == 0
    assert not engine.step()
    assert_idle(engine)


def test_an_old_abort_or_job_does_nothing_to_a_newer_attempt() -> None:
    engine = prefill_engine()
    engine.submit("router", prefill_job("r", PROMPT, attempt=2), 0.0)
    engine.abort("r", 1)
    engine.submit("router", prefill_job("r", [5, 6], attempt=1), 0.0)
    engine.submit("router", prefill_job("r", [5, 6], attempt=2), 0.0)
    first = run_dry(engine).to_router[-1][1]
    assert isinstance(first, FirstToken)
    assert first.delta == first_token("r", next_token(PROMPT), attempt=2)
    assert engine.counts().leased == 3


def test_aborting_what_nobody_knows() -> None:
    engine = prefill_engine()
    engine.abort("r", 1)
    assert_idle(engine)


@pytest.mark.parametrize("tokens", [[], [1] * 65, [1] * 13])
def test_what_can_never_fit_is_refused_at_once(tokens: list[int]) -> None:
    engine = prefill_engine(num_blocks=3)
    engine.submit("router", prefill_job("r", tokens), 0.0)
    (failed,) = sent_to_router(engine)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("too_long", False)
    assert "12" in failed.message
    assert_idle(engine)


# ------------------------------------------------------------------ while a step computes


def held_engine(**kwargs: Any) -> tuple[PrefillEngine, HeldRunner]:
    runner = HeldRunner()
    return prefill_engine(runner=runner, **kwargs), runner


def test_what_is_taken_back_during_a_step_gives_its_blocks_back_after_it() -> None:
    engine, runner = held_engine(max_batch_tokens=32)
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    engine.submit("router", prefill_job("s", PROMPT[::-1], order=2), 0.0)
    with RunningStep(engine, runner):
        engine.take_outbox()
        engine.abort("r", 1)
        assert engine.counts().held == 6  # the model still writes to them
        assert not engine.check_idle()
    assert engine.counts().held == 0
    assert engine.counts().leased == 3
    (first,) = sent_to_router(engine)
    assert isinstance(first, FirstToken)
    assert first.delta == first_token("s", next_token(PROMPT[::-1]))
    engine.abort("s", 1)
    assert_idle(engine)


def test_a_newer_attempt_during_a_step_of_the_older() -> None:
    engine, runner = held_engine()
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    with RunningStep(engine, runner):
        engine.submit("router", prefill_job("r", PROMPT, attempt=2), 0.0)
    engine.take_outbox()
    run = run_dry(engine).to_router
    assert [type(message) for _, message in run] == [PrefillStarted, FirstToken]
    assert engine.counts().leased == 3
    engine.drop_owner("router")
    assert_idle(engine)


def test_no_verb_waits_for_a_step() -> None:
    engine, runner = held_engine()
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    with RunningStep(engine, runner):
        engine.submit("router", prefill_job("s", PROMPT, order=2), 0.0)
        fetch(engine)
        engine.renew({1: engine.leases[1].handle.ticket}, 1.0)
        engine.expire(2.0)
        assert not engine.may_read(DECODER, 1, [0], 2.0), "it is being computed"
        engine.release(DECODER, 1, received=False)
        assert engine.outstanding_tokens() == 20
        started = sent_to_router(engine)
        assert [type(message) for message in started] == [PrefillStarted]
        engine.drop_owner("router")
    assert_idle(engine)


def test_the_router_can_be_told_of_a_start_before_the_step_is_computed() -> None:
    engine, runner = held_engine()
    told: list[Any] = []
    engine.on_planned = lambda: told.extend(sent_to_router(engine))
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    with RunningStep(engine, runner):
        assert [type(message) for message in told] == [PrefillStarted]


def test_a_step_that_fails_fails_its_requests_and_nothing_else() -> None:
    engine, runner = held_engine(max_num_seqs=2)
    for number, name in enumerate("rst"):
        engine.submit("router", prefill_job(name, PROMPT, order=number), 0.0)
    runner.error = RuntimeError("broken")
    with RunningStep(engine, runner) as step:
        fetch(engine)
        engine.abort("s", 1)
    assert step.error is runner.error
    engine.take_outbox()
    engine.fail_step("it broke")
    outbox = engine.take_outbox()
    ((owner, failed),) = outbox.to_router
    assert isinstance(failed, Failed)
    assert (owner, failed.request_id, failed.code, failed.retryable) == ("router", "r", "step_failed", True)
    assert [type(message) for _, message in outbox.to_peer] == [LeaseLost]
    assert engine.counts().held == 0
    # The one that waited goes on.
    runner.error = None
    run = run_dry(engine).to_router
    assert [type(message) for _, message in run] == [PrefillStarted, FirstToken]
    engine.abort("t", 1)
    assert_idle(engine)


def test_a_block_held_by_nobody_is_found_out_when_idle() -> None:
    engine = prefill_engine(8)
    engine.blocks.take(1)
    with pytest.raises(PagerelayError, match="not held as their holders"):
        engine.check_idle()


def test_after_the_confirmation_a_probe_finds_nothing() -> None:
    engine = prefill_engine()
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    run_dry(engine)
    fetch(engine)
    engine.release(DECODER, 1, received=True)
    engine.take_outbox()
    engine.probe("router", "r", 1, 0)
    (failed,) = sent_to_router(engine)
    assert (failed.code, failed.retryable) == ("forgotten", True)


@pytest.mark.parametrize("odd", [-1, VOCAB], ids=["below", "above"])
@pytest.mark.parametrize("where", ["prompt", "stop"])
def test_a_token_outside_the_vocabulary_ends_its_own_request(odd: int, where: str) -> None:
    """In a step it would fail everybody else there, too."""
    engine = prefill_engine()
    engine.submit("router", prefill_job("good", PROMPT), 0.0)
    tokens = [*PROMPT, odd] if where == "prompt" else PROMPT
    stops = (odd,) if where == "stop" else ()
    engine.submit("router", prefill_job("bad", tokens, greedy(stop_token_ids=stops), order=2), 0.0)
    (failed,) = sent_to_router(engine)
    assert (failed.request_id, failed.code, failed.retryable) == ("bad", "bad_job", False)
    sent = [message for _, message in run_dry(engine).to_router]
    assert first_token("good", next_token(PROMPT)) in [getattr(message, "delta", None) for message in sent]


@pytest.mark.parametrize("how", ["taken back", "expired", "never given"])
def test_who_asks_for_a_lease_that_is_not_there_hears_whether_its_request_has_ended(how: str) -> None:
    engine = prefill_engine()
    leased(engine)
    if how == "taken back":
        engine.abort("r", 1)
    elif how == "expired":
        engine.expire(0.0)
        engine.expire(100.0)
    lease = 9 if how == "never given" else 1
    engine.take_outbox()
    fetch(engine, lease=lease)
    assert not engine.may_read(DECODER, lease, [0], 0.0)
    answers = sent_to_peer(engine)
    assert [(type(m), m.lease, m.ended) for m in answers] == [(LeaseLost, lease, how == "taken back")] * 2


def test_who_asks_while_nothing_is_ready_hears_that_it_is_being_computed() -> None:
    engine, runner = held_engine()
    engine.submit("router", prefill_job("r", PROMPT), 0.0)
    with RunningStep(engine, runner):
        for _ in range(2):
            fetch(engine)
            assert sent_to_peer(engine) == [Ready(lease=1, first=0, block_ids=[])]


def test_the_oldest_goes_first_whichever_router_it_came_through() -> None:
    """A router that has just begun to count has no older requests than others."""
    engine, _ = held_engine()
    jobs = {"long here": ("a", 9.0, 10.0), "new": ("b", 0.0, 11.0), "came back": ("b", 30.0, 12.0)}
    for name, (router, age_s, now) in jobs.items():
        engine.submit(router, structs.replace(prefill_job(name, PROMPT), age_s=age_s), now)
    waiting = [seq.request_id for seq in engine.scheduler.waiting]
    assert waiting == ["came back", "long here", "new"]
    for name in jobs:
        engine.abort(name, 1)


def test_a_first_token_that_ended_the_answer_may_be_asked_for_when_it_was_lost() -> None:
    engine = prefill_engine()
    engine.submit("router", prefill_job("r", PROMPT, greedy(1)), 0.0)
    sent = [message for _, message in run_dry(engine).to_router]
    assert isinstance(sent[-1], FirstToken)
    assert sent[-1].delta.finish_reason == "length"
    engine.probe("router", "r", 1, 0)
    assert sent_to_router(engine) == sent[-1:]
