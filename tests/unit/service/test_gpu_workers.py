"""Whole workers whose pools lie on (fake) GPUs: what carries the blocks, what it falls back to, how it
ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engines import answer
from fake_cuda import FakeCuda, Machine
from house import PROMPT, House
from late import LateDevice

from pagerelay.common.errors import ApiError
from pagerelay.common.service.data_link import RECALL_S
from pagerelay.common.service.worker import Worker
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.decode_svc.engine import DecodeEngine
from pagerelay.decode_svc.worker import DecodeWorker
from pagerelay.prefill_svc.worker import PrefillWorker
from pagerelay.router.flow import RequestFlow


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House(None)
    yield made
    await made.close()


@pytest.fixture
def machine(house: House) -> Machine:
    return Machine()


def importers(house: House, prefill: str) -> set[bytes]:
    backend = house.workers[prefill][0].parts.backend
    assert isinstance(backend, CudaIpcBackend)
    return backend.importers


async def ask(house: House, transport: str) -> None:
    flows = await asyncio.gather(*(house.ask([n + 1, *PROMPT[n:]]) for n in range(6)))
    for n, flow in enumerate(flows):
        assert flow.journal.tokens == answer([n + 1, *PROMPT[n:]], 20)
        assert flow.transport == transport
        assert (flow.recoveries, flow.attempt) == (0, 1)


@pytest.mark.parametrize("first_to_stop", [PrefillWorker, DecodeWorker])
@pytest.mark.parametrize("gpus", [(0, 0), (0, 1)], ids=["same-gpu", "peer-gpu"])
async def test_two_workers_on_gpus_of_one_host(
    house: House, machine: Machine, gpus: tuple[int, int], first_to_stop: type[Worker]
) -> None:
    prefill_cuda, decode_cuda = (machine.process(gpu) for gpu in gpus)
    prefill = await house.start(PrefillWorker, "auto", prefill_cuda)
    decode = await house.start(DecodeWorker, "auto", decode_cuda)
    await ask(house, "cuda_ipc")
    assert decode_cuda.calls["ipc_open"] == 1
    assert len(importers(house, prefill)) == 1
    assert house.workers[decode][0].counters.fallbacks == 0
    assert "host_alloc" not in decode_cuda.calls or decode_cuda.calls["host_alloc"] == 2, "nothing was staged"
    await house.idle()
    order = [prefill, decode] if first_to_stop is PrefillWorker else [decode, prefill]
    for worker in order:  # the fake objects to memory that is freed while somebody has it open
        assert await house.stop(worker) == 0
    machine.check()


@pytest.mark.parametrize("where", [PrefillWorker, DecodeWorker])
async def test_over_tcp_blocks_are_staged(house: House, machine: Machine, where: type[Worker]) -> None:
    for kind in (PrefillWorker, DecodeWorker):
        await house.start(kind, "tcp", machine.process() if kind is where else None)
    await ask(house, "tcp")
    await house.close()
    machine.check()


async def test_where_ipc_cannot_work_tcp_serves_and_that_is_said_and_counted(
    house: House, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = await house.start(PrefillWorker, "auto", machine.process(pid_namespace=1))
    decode = await house.start(DecodeWorker, "auto", machine.process(pid_namespace=2))
    await ask(house, "tcp")
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "over tcp, not cuda_ipc: the peer is in another PID namespace" in record.getMessage()
    assert house.workers[decode][0].counters.fallbacks == 1
    await house.until(lambda: not importers(house, prefill))
    await house.close()
    machine.check()


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
async def test_steps_ahead_of_a_late_gpu(
    house: House, machine: Machine, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers begin steps before they know the tokens of the step before, on GPUs that do nothing until
    they are waited for; meanwhile requests leave, and others are preempted for want of blocks. The tokens are
    those of workers on CPUs that wait for each step."""
    LateDevice().use(monkeypatch)
    prefill = await house.start(PrefillWorker, transport, machine.process(), step_ahead=True)
    decode = await house.start(DecodeWorker, transport, machine.process(), step_ahead=True, num_blocks=30)

    async def leave(prompt: list[int], after: int) -> None:
        flow = house.flow(prompt)
        await flow.start()
        while len(flow.journal.tokens) < after:
            await flow.next()
        await flow.close()
        assert flow.journal.tokens == answer(prompt, len(flow.journal.tokens))

    prompts = [[n + 1, *PROMPT[n:]] for n in range(10)]
    async with asyncio.timeout(30):
        asked = [house.ask(prompt, 34) for prompt in prompts[:6]]
        left = [leave(prompt, after) for after, prompt in enumerate(prompts[6:])]
        flows = await asyncio.gather(*asked, *left)
    for flow, prompt in zip(flows, prompts[:6], strict=False):
        assert flow is not None
        assert flow.journal.tokens == answer(prompt, 34)
        assert (flow.transport, flow.recoveries) == (transport, 0)
    await house.idle()
    for worker_id in (prefill, decode):
        worker = house.workers[worker_id][0]
        runner: Any = worker.parts.runner
        assert any(a[:4] == b[:4] == "step" for a, b in itertools.pairwise(runner.device.log))
    engine = house.workers[decode][0].engine
    assert isinstance(engine, DecodeEngine)
    assert engine.num_preempted > 0
    await house.close()
    machine.check()


@pytest.mark.parametrize("gpu", [PrefillWorker, DecodeWorker])
async def test_a_gpu_and_a_cpu_worker_meet_over_tcp(
    house: House, machine: Machine, gpu: type[Worker]
) -> None:
    ids = {
        kind: await house.start(kind, "auto", machine.process() if kind is gpu else None)
        for kind in (PrefillWorker, DecodeWorker)
    }
    await ask(house, "tcp")
    assert house.workers[ids[DecodeWorker]][0].counters.fallbacks == 1
    await house.close()
    machine.check()


async def test_a_forced_way_that_cannot_work_fails_the_request_with_the_reason(
    house: House, machine: Machine
) -> None:
    machine.refuse_open = "invalid device context"
    prefill = await house.start(PrefillWorker, "cuda_ipc", machine.process())
    await house.start(DecodeWorker, "cuda_ipc", machine.process())
    flow = house.flow(PROMPT)
    await flow.start()
    with pytest.raises(ApiError, match=r"worker\.transport is cuda_ipc, which cannot reach.*device context"):
        await to_the_end(flow)
    await flow.close()
    await house.until(lambda: not importers(house, prefill))
    await house.close()
    machine.check()


async def test_a_prefill_worker_that_is_killed_has_its_pool_closed(house: House, machine: Machine) -> None:
    killed, reader = machine.process(), machine.process()
    worker_id = await house.start(PrefillWorker, "auto", killed)
    await house.start(DecodeWorker, "auto", reader)
    await ask(house, "cuda_ipc")
    await house.idle()
    await kill(house, worker_id, killed)
    await house.until(lambda: not reader.imports)
    assert machine.watches == 0
    await house.start(PrefillWorker, "auto", machine.process())
    await ask(house, "cuda_ipc")
    await house.close()
    machine.check()


async def test_a_decode_worker_that_is_killed_does_not_keep_a_pool_for_ever(
    house: House, machine: Machine
) -> None:
    owner, killed = machine.process(), machine.process()
    prefill = await house.start(PrefillWorker, "auto", owner)
    worker_id = await house.start(DecodeWorker, "auto", killed)
    await ask(house, "cuda_ipc")
    await kill(house, worker_id, killed)
    assert len(importers(house, prefill)) == 1, "nobody has said that it is gone"
    await house.stop(prefill)
    assert owner.left() == []
    assert machine.violations == []


@pytest.mark.parametrize(
    ("transport", "taker"),
    [("auto", "same-gpu"), ("auto", "peer-gpu"), ("tcp", "same-gpu"), ("auto", "cpu")],
)
async def test_a_draining_decode_worker_hands_over_what_its_gpu_holds(
    house: House, machine: Machine, transport: str, taker: str
) -> None:
    """By the same ways as from a prefill worker; its pool is freed when the taker has closed it."""
    await house.start(PrefillWorker, transport, machine.process())
    first = await house.start(DecodeWorker, transport, machine.process(), drain="hand-over")
    flows = await house.decoding(first)
    cuda = {"same-gpu": machine.process(), "peer-gpu": machine.process(1), "cpu": None}[taker]
    second = await house.start(DecodeWorker, transport, cuda)
    owner = house.workers[first][0].parts.cuda
    await house.hand_over(first, flows)
    way = "cuda_ipc" if transport == "auto" and cuda is not None else "tcp"
    assert set(house.workers[second][0].counters.fetched_blocks) == {way}
    assert isinstance(owner, FakeCuda)
    assert owner.left() == []
    await house.idle()
    await house.close()
    machine.check()


async def test_two_that_hand_over_and_end_at_once_wait_for_each_other(house: House, machine: Machine) -> None:
    """Each has had the other's pool open: neither frees its own under the other, nor waits in vain."""
    await house.start(PrefillWorker, "auto", machine.process())
    ids = [await house.start(DecodeWorker, "auto", machine.process(), drain="hand-over") for _ in range(2)]
    workers = [house.workers[worker_id][0] for worker_id in ids]
    for one, other in (workers, workers[::-1]):
        assert isinstance(one, DecodeWorker)
        other.data.refresh_endpoint()  # type: ignore[union-attr]
        handle = other._handle(1, 1)
        assert (await one._backend(handle, one._peers.link(handle))).name == "cuda_ipc"
    await house.until(lambda: all(len(importers(house, worker_id)) == 1 for worker_id in ids))
    began = time.monotonic()
    assert await asyncio.gather(*(house.stop(worker_id) for worker_id in ids)) == [0, 0]
    assert time.monotonic() - began < RECALL_S
    await house.close()
    machine.check()


async def to_the_end(flow: RequestFlow) -> None:
    async with asyncio.timeout(8):
        while (await flow.next())[1] is None:
            pass


async def kill(house: House, worker_id: str, cuda: FakeCuda) -> None:
    """As nearly as one can within a process: it says nothing of its pool, and closes nothing on its GPU."""
    cuda.end()
    worker = house.workers[worker_id][0]
    backend = worker.parts.backend
    assert isinstance(backend, CudaIpcBackend)
    backend.importers.clear()
    backend.close = backend._staging._thread.shutdown  # type: ignore[method-assign,assignment]
    if isinstance(worker, DecodeWorker):

        async def say_nothing(_: object) -> None:
            pass

        worker._detach = say_nothing  # type: ignore[method-assign]
    await house.stop(worker_id)
