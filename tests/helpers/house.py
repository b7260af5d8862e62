"""A router's links and whole workers in this process, sockets and engine threads and all, around the fake
model."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
from engines import FACTS, VOCAB, FakeRunner, answer, assert_idle, greedy, make_limits
from fake_cuda import FakeCuda
from flows import registry
from late import LateRunner, LateStream

from pagerelay.common.config import Config, WorkerConfig
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.service.build import Parts
from pagerelay.common.service.worker import Worker
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.messages import Drain
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


class GpuRunner(BreakingRunner):
    """Its steps are only queued on the GPU; one whose logits are wanted is waited for, as sampling does."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def run(self, batch: Any, pool: Any) -> Any:
        if batch.num_logits:
            self._cuda.stream_synchronize(self._cuda.compute)
            return super().run(batch, pool)
        compute = super().run
        self._cuda.launch(lambda: compute(batch, pool))
        return torch.zeros(0, VOCAB)


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
        self,
        kind: type[Worker],
        transport: Any = "auto",
        cuda: FakeCuda | None = None,
        *,
        drain: Any = "finish",
        num_blocks: int = 128,
        step_ahead: bool = False,
        **kw: Any,
    ) -> str:
        """Starts a worker, on that GPU if one is given, and waits until the router knows it. Returns its
        id. ``step_ahead``: on a GPU that is late; see :class:`LateStream`, and ``LateDevice.use``."""
        layout = FACTS.layout(4)
        backend: TransferBackend = ShmBackend()
        if transport == "tcp":
            backend = TcpBackend(4, cuda)
        elif cuda is not None:
            backend = CudaIpcBackend(cuda, cuda.place)
        pool = KvPool(backend.allocate(num_blocks, layout.block_bytes), layout)
        pool.tensor.fill_(float("nan"))
        runner: Any = BreakingRunner() if cuda is None else GpuRunner(cuda)
        if step_ahead and cuda is not None:
            runner = LateRunner(LateStream(cuda))
        limits = make_limits(max_batch_tokens=8, step_ahead=step_ahead)
        parts = Parts(FACTS, layout, runner, pool, backend, limits, cuda)
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
        async with asyncio.timeout(8):
            await self.finish(flow)
        return flow

    async def finish(self, flow: RequestFlow) -> None:
        reason = None
        while reason is None:
            _, reason = await flow.next()
        await flow.close()

    async def decoding(self, worker_id: str) -> list[RequestFlow]:
        """Four requests that this one decode worker is in the middle of, slowly from now on."""
        self.workers[worker_id][1].step_s = 0.05
        flows = [self.flow([n + 1, *PROMPT], 34) for n in range(4)]
        for flow in flows:
            await flow.start()
            async with asyncio.timeout(30):
                while len(flow.journal.tokens) < 3 or flow.state != "DECODING":
                    await flow.next()
        return flows

    async def hand_over(self, worker_id: str, flows: list[RequestFlow]) -> None:
        """Drains that worker: each of its requests goes to another one and ends there as if undisturbed."""
        async with asyncio.timeout(30):
            code, *_ = await asyncio.gather(self.stop(worker_id), *(self.finish(flow) for flow in flows))
        assert code == 0
        for flow in flows:
            assert flow.journal.tokens == answer(flow.journal.prompt, 34)
            assert flow.recoveries == 0
        moved = self.metrics.collector.get_sample_value("pagerelay_moved_requests_total")
        assert moved == len(flows)

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
