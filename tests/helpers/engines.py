"""Engines by small factories, and a model that needs no weights but does read the KV that it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagerelay.common.engine.core import EngineCore
from pagerelay.common.engine.drafting import Speculation
from pagerelay.common.engine.leasing import Leasing
from pagerelay.common.engine.parts import EngineLimits, Outbox
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.batch import Batch
from pagerelay.common.model.runner import ModelFacts
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.wire.messages import DecodeJob, KvHandle, PrefillJob, SamplingParams
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.decode_svc.engine import DecodeEngine
from pagerelay.prefill_svc.engine import PrefillEngine

VOCAB = 32
EOS = 0
BLOCK = 4
INCARNATION = "incarnation-1"
FACTS = ModelFacts(
    digest="model",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    vocab_size=VOCAB,
    max_model_len=64,
    eos_token_ids=(EOS,),
)


def next_token(tokens: list[int]) -> int:
    """What the fake model says after ``tokens``: every one of them and their order matter; never EOS."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return 1 + value % (VOCAB - 1)


def answer(prompt: list[int], count: int, say: Callable[[list[int]], int] = next_token) -> list[int]:
    """The fake model's greedy answer of ``count`` tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(say(tokens))
    return tokens[len(prompt) :]


def copied_token(tokens: list[int]) -> int:
    """What another fake model says: mostly a function of the last two tokens, so that it repeats itself, and
    at every fifth position of all of them."""
    return next_token(tokens if len(tokens) % 5 == 0 else tokens[-2:])


class FakeOps:
    name = "fake"
    min_rows = 1


class FakeRunner:
    """Stores each token and its position as its key and value, then reads the whole context back through the
    tables.

    So a block that was not copied, belongs to somebody else or was given away too early is found out at once.
    """

    def __init__(self, say: Callable[[list[int]], int] = next_token) -> None:
        self.ops = FakeOps()
        self.say = say
        self.steps: list[int] = []
        """Rows of each step."""
        self.sick: Callable[[list[int]], float | None] = lambda _: None
        """What one logit after a context is instead of a number, if it is ill."""
        self.during: Callable[[], None] | None = None
        """Runs once, in the middle of the next step: the engine's lock is free, its step is not over."""

    def run(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        during, self.during = self.during, None
        if during is not None:
            during()
        kv = pool[:, 0, :, 0, :, 0].numpy()  # [blocks, key|value, slot]
        slots, size = batch.slots.numpy(), kv.shape[2]
        blocks, offsets = slots // size, slots % size
        kv[blocks, 0, offsets] = batch.token_ids.numpy()
        kv[blocks, 1, offsets] = batch.positions.numpy() + 1
        tables, lengths, starts = (
            tensor.numpy() for tensor in (batch.tables, batch.seq_lens, batch.query_starts)
        )
        logits = torch.zeros(batch.num_logits, VOCAB)
        wanted = batch.logits_rows[: batch.num_logits].tolist()
        self.steps.append(batch.token_ids.numel())
        for index, length in enumerate(lengths):
            context = kv[tables[index, : -(-length // size)]].transpose(1, 0, 2).reshape(2, -1)[:, :length]
            positions = np.arange(1, length + 1)
            assert (context[1] == positions).all(), f"KV of other positions: {context[1]} for 1..{length}"
            last, tokens = int(starts[index + 1]) - 1, context[0].astype(int).tolist()
            for row, at in enumerate(wanted):
                if starts[index] <= at <= last:
                    before = tokens[: len(tokens) - (last - at)]
                    logits[row, self.say(before)] = 10.0
                    if (value := self.sick(before)) is not None:
                        logits[row, 3] = value
        return logits


class HeldRunner(FakeRunner):
    """Stops within ``run`` until it is let go: what happens to an engine while a step computes. May fail
    then."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.error: Exception | None = None

    def run(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        return super().run(batch, pool)


class RunningStep:
    """``with RunningStep(engine, held) as step:`` the body runs while the engine computes a step on its
    thread."""

    def __init__(self, engine: EngineCore, runner: HeldRunner) -> None:
        self._engine, self._runner = engine, runner
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._step, daemon=True)

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:
            self.error = error

    def __enter__(self) -> RunningStep:
        self._runner.entered.clear()
        self._runner.go_on.clear()
        self._thread.start()
        assert self._runner.entered.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.go_on.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def make_pool(
    num_blocks: int,
    block_size: int = BLOCK,
    facts: ModelFacts = FACTS,
    backend: TransferBackend | None = None,
) -> KvPool:
    """A pool full of NaN, in ordinary memory or where ``backend`` puts it: whoever reads what nobody wrote
    notices."""
    layout = facts.layout(block_size)
    if backend is None:
        memory = np.zeros(num_blocks * layout.block_bytes, dtype=np.uint8)
    else:
        memory = backend.allocate(num_blocks, layout.block_bytes)
    pool = KvPool(memory, layout)
    pool.tensor.fill_(float("nan"))
    return pool


def make_limits(
    *,
    block_size: int = BLOCK,
    max_num_seqs: int = 8,
    max_batch_tokens: int = 16,
    prefix_cache: bool = True,
    speculation: Speculation | None = None,
    step_ahead: bool = False,
) -> EngineLimits:
    return EngineLimits(block_size, max_num_seqs, max_batch_tokens, prefix_cache, speculation, step_ahead)


def handle_for(lease: int, num_tokens: int, pool: KvPool) -> KvHandle:
    return KvHandle(
        worker_id="prefill-1",
        incarnation=INCARNATION,
        lease=lease,
        data_endpoint="tcp://127.0.0.1:1",
        pool=PoolAddress(kind="tcp", num_blocks=pool.num_blocks, block_bytes=pool.layout.block_bytes),
        layout=pool.layout,
        num_tokens=num_tokens,
        lease_s=10.0,
    )


def leasing(pool: KvPool, lease_s: float, checksums: bool) -> Leasing:
    return Leasing(
        INCARNATION, lease_s, lambda lease, num_tokens: handle_for(lease, num_tokens, pool), checksums
    )


def prefill_engine(
    num_blocks: int = 16,
    *,
    runner: Any = None,
    facts: ModelFacts = FACTS,
    lease_s: float = 10.0,
    block_size: int = BLOCK,
    pool: KvPool | None = None,
    checksums: bool = False,
    **limits: Any,
) -> PrefillEngine:
    kv = pool or make_pool(num_blocks, block_size, facts)
    return PrefillEngine(
        runner or FakeRunner(),
        facts,
        kv,
        make_limits(block_size=block_size, **limits),
        leasing(kv, lease_s, checksums),
    )


def decode_engine(
    num_blocks: int = 16,
    *,
    runner: Any = None,
    facts: ModelFacts = FACTS,
    block_size: int = BLOCK,
    pool: KvPool | None = None,
    checksums: bool = False,
    **limits: Any,
) -> DecodeEngine:
    kv = pool or make_pool(num_blocks, block_size, facts)
    return DecodeEngine(
        runner or FakeRunner(),
        facts,
        kv,
        make_limits(block_size=block_size, **limits),
        leasing(kv, 10.0, checksums),
    )


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)


def prefill_job(
    request_id: str,
    tokens: list[int],
    sampling: SamplingParams | None = None,
    *,
    order: int = 1,
    attempt: int = 1,
    first_index: int = 0,
) -> PrefillJob:
    return PrefillJob(
        request_id=request_id,
        attempt=attempt,
        age_s=1000.0 - order,
        token_ids=list(tokens),
        sampling=sampling or greedy(),
        first_index=first_index,
    )


def decode_job(
    request_id: str,
    tokens: list[int],
    sampling: SamplingParams | None = None,
    *,
    order: int = 1,
    attempt: int = 1,
    first_index: int = 0,
    handle: KvHandle | None = None,
) -> DecodeJob:
    return DecodeJob(
        request_id=request_id,
        attempt=attempt,
        age_s=1000.0 - order,
        token_ids=list(tokens),
        sampling=sampling or greedy(),
        first_index=first_index,
        handle=handle,
    )


def run_dry(engine: EngineCore, most: int = 500) -> Outbox:
    """Steps until there is nothing to compute; the ledger holds after every step. Returns all that was to be
    sent."""
    sent = Outbox()
    for _ in range(most):
        worked = engine.step()
        engine.check_ledger()
        outbox = engine.take_outbox()
        sent.to_router += outbox.to_router
        sent.to_peer += outbox.to_peer
        if not worked:
            return sent
    raise AssertionError(f"still working after {most} steps")


def assert_idle(engine: EngineCore) -> None:
    """Nobody is here, and every block is free or cached."""
    assert engine.check_idle()
    counts = engine.counts()
    assert (counts.held, counts.leased) == (0, 0)
    assert counts.free + counts.cached == counts.total


def sent_to_router(engine: EngineCore) -> list[Any]:
    """The messages for routers since the last look, without their addresses."""
    return [message for _, message in engine.take_outbox().to_router]


def sent_to_peer(engine: EngineCore, peer: bytes | None = None) -> list[Any]:
    """The messages for decode workers, or for one of them, since the last look."""
    return [message for to, message in engine.take_outbox().to_peer if peer in (None, to)]
