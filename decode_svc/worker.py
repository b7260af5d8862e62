"""The decode worker's process: jobs from routers, KV from prefill workers, tokens back to the routers."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from msgspec import structs

from pagerelay.common.config import Config
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.errors import ConfigError, TransferError
from pagerelay.common.service.build import Parts
from pagerelay.common.service.worker import Worker
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.messages import (
    DecodeJob,
    HandedOver,
    HandoverPhases,
    KvHandle,
    Load,
    Message,
    Role,
    ToWorker,
)
from pagerelay.decode_svc.engine import DecodeEngine, Intake
from pagerelay.decode_svc.intake import BackendChoice, LeaseEnded, fetch_prompt
from pagerelay.decode_svc.peers import Peers

log = logging.getLogger(__name__)


class DecodeWorker(Worker):
    role: Role = "decode"

    def __init__(
        self, config: Config, keys: CurveKeys | None, parts: Parts, *, colocated: bool = False
    ) -> None:
        if colocated:
            self.role = "colocated"
        super().__init__(config, keys, parts)
        self.engine: DecodeEngine = DecodeEngine(parts.runner, parts.facts, parts.pool, parts.limits)
        shm = parts.backend if isinstance(parts.backend, ShmBackend) else ShmBackend()
        self._backends = (shm, TcpBackend(config.worker.tcp_window_blocks))
        self._choice = BackendChoice(config.worker.transport, *self._backends, probe=shm.attach)
        self._shm = shm
        self._peers = Peers(keys, self.clock, self.task, self.message_dropped)
        self._arrived: dict[str, float] = {}
        """request_id → when its job came; for durations only."""
        self._phases: dict[str, HandoverPhases] = {}
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._renewed_at = 0.0

    # ------------------------------------------------------------------ fetching

    async def start_data_link(self) -> None:
        pass  # a decode worker dials; nobody fetches from it

    async def stop_data_link(self) -> None:
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        await self._peers.close()
        for backend in {*self._backends, self.parts.backend}:
            backend.close()

    async def send_to_peer(self, peer: bytes, message: Message) -> None:
        raise TransferError("a decode worker has no peers that dial it")

    def after_step(self) -> None:
        """Starts the fetches that there is room for now, and stops those that nobody wants any more."""
        with self.engine.lock:
            cancelled, self.engine.cancelled_fetches = self.engine.cancelled_fetches, []
        for seq in cancelled:
            task = self._fetches.get(id(seq))
            if task is not None:
                task.cancel()
            else:
                self.engine.fetch_ended(seq)  # it ended between its last await and now
        for intake in self.engine.admit():
            task = asyncio.create_task(self._fetch(intake))
            self._fetches[id(intake.seq)] = task
            # A callback, not a finally: a task that is cancelled before it ran has no finally.
            task.add_done_callback(partial(self._fetch_done, intake.seq))

    def _fetch_done(self, seq: Sequence, task: asyncio.Task[None]) -> None:
        del self._fetches[id(seq)]
        if not task.cancelled() and task.exception() is not None:
            log.error("a fetch failed in an unforeseen way", exc_info=task.exception())
            self.engine.fetch_failed(seq, "the decode worker failed while fetching", retryable=True)
        self.engine.fetch_ended(seq)
        self.wake()
        self.flush()

    async def _fetch(self, intake: Intake) -> None:
        seq, handle = intake.seq, intake.handle
        reserve_s = self.clock() - self._arrived.pop(seq.request_id, self.clock())
        try:
            difference = self.parts.layout.difference(handle.layout)
            if difference is not None:
                raise ConfigError(f"the prefill worker does not match: {difference}")
            backend, reason = self._choice.backend(handle.incarnation, handle.pool)
            if reason is not None:
                log.warning("fetching from %s over tcp, not shared memory: %s", handle.worker_id, reason)
                self.counters.fallbacks += 1
            fetched = await fetch_prompt(
                intake,
                self._peers.link(handle),
                backend,
                self.parts.pool,
                patience_s=self.config.worker.lease_s / 4,
                clock=self.clock,
            )
        except ConfigError as error:
            log.error("%s", error)
            self.engine.fetch_failed(seq, str(error), retryable=False)
        except LeaseEnded:
            self.engine.fetch_pointless(seq)
        except TransferError as error:
            log.warning("fetch from %s failed: %s", handle.worker_id, error)
            self.engine.fetch_failed(seq, str(error), retryable=True)
        else:
            self._count(seq, intake.from_block, fetched.transport, fetched.num_blocks, fetched.num_bytes)
            self._phases[seq.request_id] = structs.replace(fetched.phases, reserve_s=reserve_s)
            self.engine.fetched(
                seq, fetched.first_token, fetched.transport, fetched.num_bytes, fetched.handover_s
            )

    def _count(self, seq: Sequence, from_block: int, transport: str, num_blocks: int, num_bytes: int) -> None:
        counters = self.counters
        counters.fetched_blocks[transport] = counters.fetched_blocks.get(transport, 0) + num_blocks
        counters.fetched_bytes[transport] = counters.fetched_bytes.get(transport, 0) + num_bytes
        cached = min(from_block * self.parts.layout.block_size, seq.num_given)
        counters.prompt_tokens_cached += cached
        counters.prompt_tokens_received += seq.num_given - cached

    def tick(self) -> None:
        self.counters.preemptions = self.engine.num_preempted
        for request_id in [r for r in self._arrived if not self.engine.knows(r)]:
            del self._arrived[request_id]
        now = self.clock()
        if now - self._renewed_at > self.config.worker.lease_s / 4:
            self._renewed_at = now
            waiting = self.engine.queued_handles()
            if waiting:
                self._background = asyncio.create_task(self._renew(waiting))
            self._closing = asyncio.create_task(self._forget_idle_peers())

    async def _renew(self, handles: list[KvHandle]) -> None:
        """Requests that wait for room here keep their KV on P."""
        leases: dict[str, list[int]] = {}
        for handle in handles:
            leases.setdefault(handle.incarnation, []).append(handle.lease)
        for handle in {handle.incarnation: handle for handle in handles}.values():
            try:
                await self._peers.link(handle).renew(leases[handle.incarnation])
            except TransferError as error:
                log.debug("could not renew leases on %s: %s", handle.worker_id, error)

    async def _forget_idle_peers(self) -> None:
        await self._peers.close_idle()
        self._shm.detach_gone()

    # ------------------------------------------------------------------ routers

    def submit(self, router_id: str, message: ToWorker) -> bool:
        if isinstance(message, DecodeJob):
            self._arrived[message.request_id] = self.clock()
            self.engine.submit(router_id, message)
        return isinstance(message, DecodeJob)

    def outgoing(self, message: Message) -> Message:
        if isinstance(message, HandedOver):
            return structs.replace(message, phases=self._phases.pop(message.request_id, None))
        return message

    def load(self) -> Load:
        engine = self.engine
        return Load(
            blocks=engine.counts(),
            waiting=engine.num_waiting(),
            running=engine.num_running(),
            outstanding_prefill_tokens=engine.outstanding_tokens(),
            busy_for_s=self.busy_for_s(),
            draining=self.draining,
        )
