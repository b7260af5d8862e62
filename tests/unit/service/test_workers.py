"""Whole workers in this process, sockets and engine threads and all, around the fake model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from engines import FACTS, FakeRunner, answer, assert_idle, greedy, make_limits, prefill_job
from flows import registry

from pagerelay.common.config import Config, WorkerConfig
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.service.build import Parts
from pagerelay.common.service.link import RouterLink
from pagerelay.common.service.worker import Worker
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.messages import Drain
from pagerelay.decode_svc.worker import DecodeWorker
from pagerelay.prefill_svc.worker import PrefillWorker
from pagerelay.router.flow import FlowSettings, RequestFlow
from pagerelay.router.links import WorkerLinks
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.policy import LeastLoad

PROMPT = list(range(1, 30))


class BreakingRunner(FakeRunner):
    """Fails as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.step_s = 0.0
        """A real model's steps take time; with none here nothing else could happen meanwhile."""

    def run(self, batch: Any, pool: Any) -> Any:
        time.sleep(self.step_s)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("broken")
        return super().run(batch, pool)


class House:
    def __init__(self, keys: CurveKeys | None) -> None:
        self.keys = keys
        self.registry = registry(time.monotonic)  # type: ignore[arg-type]
        self.metrics = RouterMetrics(self.registry)
        self.links = WorkerLinks(self.registry, keys, self.metrics.drop, time.monotonic)
        self.port = self.links.bind("127.0.0.1", 0)
        self.receiving = asyncio.create_task(self.links.receive_forever())
        self.workers: dict[str, tuple[Worker, BreakingRunner, asyncio.Task[int]]] = {}
        self.count = 0

    async def start(
        self, kind: type[Worker], transport: Any = "auto", drain: Any = "finish", **kw: Any
    ) -> str:
        """Starts a worker and waits until the router knows it. Returns its id."""
        layout = FACTS.layout(4)
        backend: TransferBackend = TcpBackend(4) if transport == "tcp" else ShmBackend()
        pool = KvPool(backend.allocate(128, layout.block_bytes), layout)
        pool.tensor.fill_(float("nan"))
        runner = BreakingRunner()
        limits = make_limits(max_batch_tokens=8)
        parts = Parts(FACTS, layout, runner, pool, backend, limits)  # type: ignore[arg-type]
        config = Config(
            worker=WorkerConfig(
                routers=(f"tcp://127.0.0.1:{self.port}",),
                transport=transport,
                drain=drain,
                drain_s=5.0,
                lease_s=3.0,
                tcp_window_blocks=4,
            )
        )
        worker = kind(config, self.keys, parts, **kw)  # type: ignore[call-arg]
        task = asyncio.create_task(worker.run(lambda _: None, lambda: False))
        self.workers[worker.worker_id] = worker, runner, task
        await self.until(lambda: self.registry.by_id(worker.worker_id) is not None)
        return worker.worker_id

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(8):
            while not condition():
                await asyncio.sleep(0.005)

    def flow(
        self, prompt: list[int], max_tokens: int = 20, probe_s: float = 2.0, max_recoveries: int = 2
    ) -> RequestFlow:
        self.count += 1
        return RequestFlow(
            request_id=f"r{self.count}",
            order=self.count,
            prompt=prompt,
            sampling=greedy(max_tokens),
            links=self.links,
            policy=LeastLoad(),
            metrics=self.metrics,
            settings=FlowSettings(
                queue_timeout_s=8.0,
                stall_timeout_s=8.0,
                max_recoveries=max_recoveries,
                probe_s=probe_s,
            ),
            clock=time.monotonic,
        )

    async def ask(self, prompt: list[int], max_tokens: int = 20) -> RequestFlow:
        """A flow that has run to its end and is closed."""
        flow = self.flow(prompt, max_tokens)
        await flow.start()
        reason = None
        async with asyncio.timeout(8):
            while reason is None:
                _, reason = await flow.next()
        await flow.close()
        return flow

    async def idle(self) -> None:
        for worker, _, _ in self.workers.values():
            await self.until(worker.engine.check_idle)
            assert_idle(worker.engine)

    async def stop(self, worker_id: str) -> int:
        worker, _, task = self.workers.pop(worker_id)
        if not task.done():
            worker.received("", Drain())
        async with asyncio.timeout(8):
            return await task

    async def close(self) -> None:
        for worker_id in list(self.workers):
            await self.stop(worker_id)
        self.receiving.cancel()
        await asyncio.gather(self.receiving, return_exceptions=True)
        self.links.close()


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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_draining_decode_worker_hands_over_what_it_runs(house: House, transport: str) -> None:
    """Another decode worker goes on at the next token; nothing is computed anew."""
    prefill = await house.start(PrefillWorker, transport)
    first = await house.start(DecodeWorker, transport, "hand-over")
    house.workers[first][1].step_s = 0.05
    flows = [house.flow([n + 1, *PROMPT], 34) for n in range(4)]
    for flow in flows:
        await flow.start()
        async with asyncio.timeout(30):
            while len(flow.emitted) < 3 or flow.state != "DECODING":
                await flow.next()
    second = await house.start(DecodeWorker, transport)
    computed = house.workers[prefill][0].counters.prompt_tokens_computed

    async def finish(flow: RequestFlow) -> None:
        reason = None
        while reason is None:
            _, reason = await flow.next()
        await flow.close()

    async with asyncio.timeout(30):
        code, *_ = await asyncio.gather(house.stop(first), *(finish(flow) for flow in flows))
    assert code == 0
    for n, flow in enumerate(flows):
        assert flow.emitted == answer([n + 1, *PROMPT], 34)
        assert flow.recoveries == 0
    moved = house.metrics.collector.get_sample_value("pagerelay_moved_requests_total")
    assert moved == len(flows)
    assert house.workers[prefill][0].counters.prompt_tokens_computed == computed
    assert house.workers[second][0].counters.prompt_tokens_received >= moved
    await house.idle()


async def test_corrupt_blocks_are_found_and_recovered_from(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy goes wrong on its way: the answer is that of an undisturbed run."""
    await house.start(PrefillWorker, "tcp")
    decode = await house.start(DecodeWorker, "tcp")
    honest = TcpBackend._place
    spoiled: list[int] = []

    def place(frames: Any, into: Any, targets: Any) -> int:
        moved = honest(frames, into, targets)
        if not spoiled:
            spoiled.append(targets[0])
            into[targets[0]][0] ^= 1
        return moved

    monkeypatch.setattr(TcpBackend, "_place", staticmethod(place))
    flow = await house.ask(PROMPT)
    assert flow.emitted == answer(PROMPT, 20)
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
