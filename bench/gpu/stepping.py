"""Decode steps by a whole engine: what the host adds to the GPU's time, with steps begun ahead and not."""

from __future__ import annotations

import time

import torch

from pagerelay.bench.gpu.bench import Bench
from pagerelay.common.engine.leasing import Leasing
from pagerelay.common.engine.parts import EngineLimits
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.batch import Row, build_batch
from pagerelay.common.model.runner import ModelFacts, ModelRunner
from pagerelay.common.wire.messages import DecodeJob, HandedOver, KvHandle, SamplingParams, Tokens
from pagerelay.decode_svc.engine import DecodeEngine


class PlainMemory:
    """A pool in torch's own memory (``uint8 [bytes]``), which nobody else reads: its marks mean nothing."""

    settled_mark: int | None = None

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.pointer, self.num_bytes = memory.data_ptr(), memory.numel()

    def tensor(self) -> torch.Tensor:
        return self._memory

    def mark_written(self) -> int:
        return 0

    def settle(self, mark: int) -> None:
        pass


def steps_of_an_engine(bench: Bench, runner: ModelRunner, facts: ModelFacts, pool: KvPool) -> None:
    batch, context, count = bench.sized((16, 1024, 32), (2, 4, 2))
    size = pool.layout.block_size
    width = -(-(context + count) // size)
    rows = [Row([3], context, range(n * width, (n + 1) * width), 1) for n in range(batch)]
    step = build_batch(rows, size, runner.ops.min_rows)
    alone = bench.milliseconds(lambda: runner.run(step, pool.tensor), bench.sized(10, 1))
    answers = []
    for ahead in (False, True):
        bench.go_on()
        spent, tokens = _served(runner, facts, pool, batch, context, count, ahead)
        answers.append(tokens)
        bench.figure(
            f"host time per step, ahead {'on' if ahead else 'off'}",
            1000 * (spent - alone),
            "us",
            f"{batch} x {context}: a step takes {spent:.3f} ms, {alone:.3f} of it the model's",
        )
    same = sum(answers[0][name] == answers[1][name] for name in answers[0])
    # A library may choose its algorithm by what else is in a step, and near-ties may fall either way.
    bench.figure("answers equal, ahead on and off", f"{same} of {batch}")


def _served(
    runner: ModelRunner, facts: ModelFacts, pool: KvPool, batch: int, context: int, count: int, ahead: bool
) -> tuple[float, dict[str, list[int]]]:
    """Milliseconds a step, once all sequences decode; and their tokens."""

    def no_handle(lease: int, num_tokens: int) -> KvHandle:
        raise RuntimeError("an engine that gives no leases was asked for one")

    limits = EngineLimits(pool.layout.block_size, batch, 2048, prefix_cache=False, step_ahead=ahead)
    engine = DecodeEngine(runner, facts, pool, limits, Leasing("bench", 10.0, no_handle, gives=False))
    sampling = SamplingParams(max_tokens=facts.max_model_len, temperature=0.0, ignore_eos=True)
    for n in range(batch):
        job = DecodeJob(
            request_id=f"r{n}",
            attempt=1,
            age_s=0.0,
            token_ids=[(7 * i + n) % 250 + 3 for i in range(context)],
            sampling=sampling,
            first_index=0,
            handle=None,
        )
        engine.submit("bench", job, float(n))
    while engine.stats.sampled < batch:
        engine.step()
    began = time.perf_counter()
    for _ in range(count):
        engine.step()
    spent = 1000 * (time.perf_counter() - began) / count
    tokens: dict[str, list[int]] = {}
    for _, message in engine.take_outbox().to_router:
        if isinstance(message, HandedOver):
            tokens[message.request_id] = [message.first.token]
        elif isinstance(message, Tokens):
            for delta in message.deltas:
                tokens[delta.request_id].append(delta.token)
    for request_id in tokens:
        engine.abort(request_id, 1)
    while engine.step():  # what is in flight still writes the pool
        pass
    return spent, tokens
