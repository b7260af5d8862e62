"""Whole workers in this process, sockets and engine threads and all, around the fake model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from engines import answer
from house import PROMPT, House

from pagerelay.common.service.worker import Worker
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.decode_svc.worker import DecodeWorker
from pagerelay.prefill_svc.worker import PrefillWorker
from pagerelay.router.flow import RequestFlow


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
        assert flow.emitted == answer([n + 1, *PROMPT[n:]], 20)
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
    assert flow.emitted == answer(PROMPT, 20)
    assert flow.transport == "tcp"
    assert house.workers[decode][0].counters.fallbacks == 1


async def test_a_decode_worker_alone_and_a_colocated_one(house: House) -> None:
    await house.start(DecodeWorker, "tcp")
    await house.start(DecodeWorker, "tcp", colocated=True)
    flows = await asyncio.gather(*(house.ask(PROMPT[n:]) for n in range(4)))
    assert [flow.emitted for flow in flows] == [answer(PROMPT[n:], 20) for n in range(4)]
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
    assert flow.emitted == answer(PROMPT, 20)
    assert flow.recoveries == 2
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
    assert all(flow.emitted == answer(flow._prompt, 20) for flow in answered)


@pytest.mark.parametrize("house", [False], indirect=True, ids=["open"])
async def test_a_draining_worker_finishes_what_it_has(house: House) -> None:
    worker_id = await house.start(DecodeWorker)
    asking = asyncio.create_task(house.ask(PROMPT, 30))
    await house.until(lambda: house.workers[worker_id][0].engine.counts().held)
    assert await house.stop(worker_id) == 0
    assert (await asking).emitted == answer(PROMPT, 30)
