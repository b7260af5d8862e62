"""Whole workers in this process, sockets and engine threads and all, around the fake model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from engines import answer, handle_for, prefill_job
from house import PROMPT, House
from msgspec.structs import replace

from pagerelay.common.kv.checksum import block_sum
from pagerelay.common.service.link import RouterLink
from pagerelay.common.service.worker import Worker
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.messages import FirstToken, PrefillStarted, TokenDelta
from pagerelay.decode_svc.peers import PeerLink
from pagerelay.decode_svc.worker import DecodeWorker
from pagerelay.prefill_svc.worker import PrefillWorker
from pagerelay.router.flow import RequestFlow
from pagerelay.router.links import WorkerLinks


@pytest.fixture(params=[False, True], ids=["open", "curve"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    made = House(CurveKeys("a cluster key of at least 32 characters") if request.param else None)
    yield made
    await made.close()


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
async def test_a_request_goes_through_both_workers(house: House, transport: str) -> None:
    prefill = await house.start(PrefillWorker, transport)
    decode = await house.start(DecodeWorker, transport)
    flows = await asyncio.gather(*(house.ask([n + 1, *PROMPT[n:]]) for n in range(6)))
    for n, flow in enumerate(flows):
        assert flow.journal.tokens == answer([n + 1, *PROMPT[n:]], 20)
        assert flow.transport == ("tcp" if transport == "tcp" else "shm")
        assert (flow.recoveries, flow.attempt) == (0, 1)
    counters = house.workers[decode][0].counters
    assert sum(counters.fetched_blocks.values()) > 0
    assert counters.prompt_tokens_received > 0
    await house.idle()
    assert await house.stop(decode) == 0
    assert await house.stop(prefill) == 0
    await house.until(lambda: house.registry.entries() == [])  # they said goodbye


async def test_pools_of_two_kinds_meet_over_tcp(house: House) -> None:
    await house.start(PrefillWorker, "tcp")
    decode = await house.start(DecodeWorker, "auto")
    flow = await house.ask(PROMPT)
    assert flow.journal.tokens == answer(PROMPT, 20)
    assert flow.transport == "tcp"
    assert house.workers[decode][0].counters.fallbacks == 1


async def test_a_decode_worker_alone_and_a_colocated_one(house: House) -> None:
    await house.start(DecodeWorker, "tcp")
    await house.start(DecodeWorker, "tcp", colocated=True)
    flows = await asyncio.gather(*(house.ask(PROMPT[n:]) for n in range(4)))
    assert [flow.journal.tokens for flow in flows] == [answer(PROMPT[n:], 20) for n in range(4)]
    assert {flow.transport for flow in flows} == {"local"}
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_a_request_that_is_taken_back_leaves_nothing(house: House) -> None:
    await house.start(PrefillWorker)
    await house.start(DecodeWorker)
    for num_pieces in range(4):
        flow = house.flow(PROMPT, 30)
        await flow.start()
        for _ in range(num_pieces):
            await flow.next()
        await flow.close()
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
@pytest.mark.parametrize("where", [PrefillWorker, DecodeWorker])
async def test_a_step_that_fails_is_recovered_from(house: House, where: type[Worker]) -> None:
    ids = {kind: await house.start(kind) for kind in (PrefillWorker, DecodeWorker)}
    house.workers[ids[where]][1].failures = 2
    flow = await house.ask(PROMPT)
    assert flow.journal.tokens == answer(PROMPT, 20)
    assert flow.recoveries == 2
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
@pytest.mark.parametrize("where", [PrefillWorker, DecodeWorker])
async def test_a_worker_that_hangs_in_a_step_is_left_and_comes_back(
    house: House, where: type[Worker]
) -> None:
    house.registry._stuck_s = 0.3
    other = DecodeWorker if where is PrefillWorker else PrefillWorker
    hung = await house.start(where)
    await house.start(other)
    entry = house.registry.by_id(hung)
    assert entry is not None
    ends = threading.Event()
    house.workers[hung][1].during = lambda: ends.wait(20)  # the engine's lock is free meanwhile
    try:
        flow = house.flow(PROMPT)
        await flow.start()
        asking = asyncio.create_task(house.finish(flow))
        await house.until(lambda: house.registry.state(entry) == "stuck")
        await house.start(where)
        async with asyncio.timeout(8):
            await asking
        assert flow.journal.tokens == answer(PROMPT, 20)
        assert flow.recoveries == 1
        assert house.registry.by_id(hung) is entry
    finally:
        ends.set()
    await house.until(lambda: house.registry.state(entry) == "ready")
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_an_engine_that_cannot_step_ends_its_worker(house: House) -> None:
    broken, good = await house.start(DecodeWorker), await house.start(DecodeWorker)
    house.workers[broken][1].failures = 99
    flows = await asyncio.gather(*(house.ask(PROMPT[n:]) for n in range(6)), return_exceptions=True)
    async with asyncio.timeout(8):
        assert await house.workers[broken][2] == 1
    await house.until(lambda: [entry.worker_id for entry in house.registry.entries()] == [good])
    answered = [flow for flow in flows if isinstance(flow, RequestFlow)]
    assert answered
    assert all(flow.journal.tokens == answer(flow.journal.prompt, 20) for flow in answered)


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_a_draining_worker_finishes_what_it_has(house: House) -> None:
    worker_id = await house.start(DecodeWorker)
    asking = asyncio.create_task(house.ask(PROMPT, 30))
    await house.until(lambda: house.workers[worker_id][0].engine.counts().held)
    assert await house.stop(worker_id) == 0
    assert (await asking).journal.tokens == answer(PROMPT, 30)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_draining_decode_worker_hands_over_what_it_runs(
    house: House, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another decode worker goes on at the next token; nothing is computed anew. Checksums are made and
    compared beside the event loop."""
    threads: list[str] = []

    def summed(block: Any) -> int:
        threads.append(threading.current_thread().name)
        return block_sum(block)

    monkeypatch.setattr("pagerelay.common.engine.leasing.block_sum", summed)
    monkeypatch.setattr("pagerelay.common.kv.checksum.block_sum", summed)
    prefill = await house.start(PrefillWorker, transport)
    first = await house.start(DecodeWorker, transport, drain="hand-over")
    flows = await house.decoding(first)
    second = await house.start(DecodeWorker, transport)
    computed = house.workers[prefill][0].counters.prompt_tokens_computed
    await house.hand_over(first, flows)
    assert house.workers[prefill][0].counters.prompt_tokens_computed == computed
    assert house.workers[second][0].counters.prompt_tokens_received >= len(flows)
    assert threads
    assert threading.main_thread().name not in threads
    await house.idle()


async def test_corrupt_blocks_are_found_and_recovered_from(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy goes wrong on its way: the answer is that of an undisturbed run."""
    await house.start(PrefillWorker, "tcp")
    decode = await house.start(DecodeWorker, "tcp")
    honest = TcpBackend._place
    spoiled: list[int] = []

    async def place(backend: TcpBackend, frames: Any, into: Any, targets: Any) -> int:
        moved = await honest(backend, frames, into, targets)
        if not spoiled:
            spoiled.append(targets[0])
            into[targets[0]][0] ^= 1
        return moved

    monkeypatch.setattr(TcpBackend, "_place", place)
    flow = await house.ask(PROMPT)
    assert flow.journal.tokens == answer(PROMPT, 20)
    assert flow.recoveries == 1
    assert house.workers[decode][0].counters.corrupt_blocks == 1
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
@pytest.mark.parametrize("seed", range(2))
async def test_lost_and_repeated_messages_change_no_answer(
    house: House, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """On the control link one message in twenty is lost, one comes twice: what was missed is asked for."""
    random = Random(seed)
    await house.start(PrefillWorker)
    for _ in range(2):
        await house.start(DecodeWorker)
    honest_worker, honest_router = RouterLink.send, WorkerLinks._send
    lost: list[str] = []

    async def from_worker(link: Any, message: Any) -> None:
        for _ in range(copies(message)):
            await honest_worker(link, message)

    async def from_router(links: Any, identity: bytes, message: Any) -> bool:
        return all([await honest_router(links, identity, message) for _ in range(copies(message))])

    def copies(message: Any) -> int:
        count = random.choices([0, 1, 2], [1, 18, 1])[0]
        if count == 0:
            lost.append(type(message).__name__)
        return count

    monkeypatch.setattr(RouterLink, "send", from_worker)
    monkeypatch.setattr(WorkerLinks, "_send", from_router)

    async def ask(n: int) -> None:
        flow = house.flow([n + 1, *PROMPT[n % 5 :]], 20, probe_s=0.05, max_recoveries=4)
        await flow.start()
        tokens: list[int] = []
        reason = None
        while reason is None:
            fresh, reason = await flow.next()
            tokens += fresh
        await flow.close()
        assert tokens == answer([n + 1, *PROMPT[n % 5 :]], 20)

    async with asyncio.timeout(20):
        for turn in range(5):
            await asyncio.gather(*(ask(5 * turn + n) for n in range(5)))
    assert lost
    monkeypatch.undo()
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_a_worker_takes_nothing_that_is_not_for_its_role(house: House) -> None:
    worker = house.workers[await house.start(DecodeWorker)][0]
    worker.received("router", prefill_job("r", PROMPT))
    assert worker.counters.dropped == {"PrefillJob/refused": 1}
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_what_is_said_again_has_the_durations_of_the_first_time(house: House) -> None:
    worker = house.workers[await house.start(PrefillWorker)][0]
    now = 100.0
    worker.clock = lambda: now
    worker.submit("router", prefill_job("r", PROMPT))
    handle = handle_for(1, len(PROMPT), worker.parts.pool)
    started = PrefillStarted(request_id="r", attempt=1, handle=handle, queued_s=0.0, num_cached_tokens=0)
    delta = TokenDelta(request_id="r", attempt=1, index=0, token=1)
    first = FirstToken(delta=delta, prefill_s=0.0, num_computed_tokens=len(PROMPT))
    now = 102.0
    assert worker.outgoing(started) == replace(started, queued_s=2.0)
    now = 105.0
    assert worker.outgoing(first) == replace(first, prefill_s=3.0)
    now = 110.0
    assert worker.outgoing(started) == replace(started, queued_s=2.0)
    assert worker.outgoing(first) == replace(first, prefill_s=3.0)
    worker.engine.abort("r", 1)
    await house.idle()


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_leases_are_renewed_as_their_owners_want_and_one_bad_handle_spoils_no_other(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = house.workers[await house.start(DecodeWorker)][0]
    good = replace(handle_for(1, 4, worker.parts.pool), lease_s=1.0, ticket="t")
    bad = replace(good, incarnation="bad", data_endpoint="nowhere")
    renewed: list[tuple[float, dict[int, str]]] = []

    async def renew(_: PeerLink, tickets: dict[int, str]) -> None:
        renewed.append((now, tickets))

    monkeypatch.setattr(PeerLink, "renew", renew)
    monkeypatch.setattr(worker.engine, "queued_handles", lambda: [bad, good])
    now = round(worker.clock()) + 100.0
    began = now
    worker.clock = lambda: now
    for seconds in (0.0, 0.125, 0.25, 0.375, 0.5):
        now = began + seconds
        worker.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [(at - began, tickets) for at, tickets in renewed] == [(at, {1: "t"}) for at in (0, 0.25, 0.5)]
    assert len([line for line in caplog.messages if "could not renew leases on" in line]) == 1


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_a_leak_is_found_when_the_worker_is_idle(house: House) -> None:
    await house.start(DecodeWorker)
    worker = next(iter(house.workers.values()))[0]
    await house.ask(PROMPT, 3)
    assert worker.counters.ledger_faults == 0
    leaked = worker.engine.blocks.take(1)
    await house.ask(PROMPT, 3)
    await house.until(lambda: worker.counters.ledger_faults == 1)
    worker.engine.blocks.drop(leaked)
    await house.idle()
