"""The decode worker's process: jobs from routers, KV from prefill workers, tokens back to the routers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from msgspec import structs

from pagerelay.common.config import Config
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.errors import ConfigError, TransferError
from pagerelay.common.service.build import Parts, direct_backend
from pagerelay.common.service.worker import Worker
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.account import Load
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.messages import (
    Attach,
    DecodeJob,
    Detached,
    KvHandle,
    Role,
    Suspend,
    ToWorker,
)
from pagerelay.common.wire.sockets import LINGER_MS
from pagerelay.decode_svc.engine import DecodeEngine, Intake
from pagerelay.decode_svc.intake import BackendChoice, CorruptBlocks, fetch_prompt
from pagerelay.decode_svc.peers import LeaseEnded, PeerLink, Peers

log = logging.getLogger(__name__)

FORGET_PEERS_S = 2.5
"""How often idle links to peers are looked for."""


class DecodeWorker(Worker):
    role: Role = "decode"

    def __init__(
        self, config: Config, keys: CurveKeys | None, parts: Parts, *, colocated: bool = False
    ) -> None:
        if colocated:
            self.role = "colocated"
        super().__init__(config, keys, parts)
        hands_over = config.worker.drain == "hand-over"
        leasing = replace(self.leasing(), gives=hands_over)
        self.engine: DecodeEngine = DecodeEngine(parts.runner, parts.facts, parts.pool, parts.limits, leasing)
        if hands_over:
            self.data = self.make_data_link(self.engine)
        self._direct = direct_backend(parts)
        self._backends = (self._direct, TcpBackend(config.worker.tcp_window_blocks, parts.cuda))
        self._choice = BackendChoice(config.worker.transport, *self._backends, probe=self._direct.attach)
        self._peers = Peers(
            keys,
            self.clock,
            self.task,
            self.message_dropped,
            on_detach=self._recalled,
            keep=self._direct.holds,
        )
        self._detaching: set[asyncio.Task[None]] = set()
        self._arrived: dict[str, float] = {}
        """request_id → when its job came; for durations only."""
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._renewed_at = 0.0
        self._renewing: asyncio.Task[None] | None = None
        self._forgot_at = 0.0
        self._unreachable: set[str] = set()
        """Incarnations whose leases cannot be renewed, as has been said."""

    # ------------------------------------------------------------------ fetching

    async def stop_data_link(self) -> None:
        await super().stop_data_link()  # while the links to our peers still answer those that end, too
        if self._renewing is not None:
            self._renewing.cancel()
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        await asyncio.gather(*(self._detach(link) for link in self._peers.links()))
        await self._peers.close(LINGER_MS if isinstance(self._direct, CudaIpcBackend) else 0)
        for backend in {*self._backends, self.parts.backend}:
            backend.close()

    def _recalled(self, link: PeerLink) -> None:
        task = self.task(self._detach(link))
        self._detaching.add(task)
        task.add_done_callback(self._detaching.discard)

    async def _detach(self, link: PeerLink) -> None:
        """Closes the peer's pool here and says so, so that its owner may free it."""
        if isinstance(self._direct, CudaIpcBackend) and link.pool.kind == self._direct.name:
            await self._direct.detach(link.pool)
            await self._tell_detached(link)

    async def _tell_detached(self, link: PeerLink) -> None:
        try:
            await link.send(Detached())
        except TransferError as error:
            log.debug("%s was not told that its pool is closed: %s", link.worker_id, error)

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
                raise ConfigError(f"the worker that has the KV does not match: {difference}")
            link = self._peers.link(handle)
            backend = await self._backend(handle, link)
            fetched = await fetch_prompt(
                intake,
                link,
                backend,
                self.parts.pool,
                patience_s=handle.lease_s / 4,
                clock=self.clock,
                checksums=self.config.worker.checksums,
            )
        except ConfigError as error:
            log.error("%s", error)
            self.engine.fetch_failed(seq, str(error), retryable=False)
        except LeaseEnded:
            self.engine.fetch_pointless(seq)
        except TransferError as error:
            if isinstance(error, CorruptBlocks):
                self.counters.corrupt_blocks += len(error.block_ids)
            log.warning("fetch from %s failed: %s", handle.worker_id, error)
            self.engine.fetch_failed(seq, str(error), retryable=True)
        else:
            self._count(seq, intake.from_block, fetched.transport, fetched.num_blocks, fetched.num_bytes)
            self.engine.fetched(
                seq,
                fetched.first_token,
                fetched.transport,
                fetched.num_bytes,
                fetched.handover_s,
                structs.replace(fetched.phases, reserve_s=reserve_s),
                fetched.logprobs,
            )

    async def _backend(self, handle: KvHandle, link: PeerLink) -> TransferBackend:
        """Chosen at the first fetch from a peer. Raises ConfigError where a forced one cannot work."""
        # The owner of a pool in GPU memory must know of those that open it before they do.
        opens = handle.pool.kind == CudaIpcBackend.name == self._direct.name
        opens = opens and not self._choice.is_known(handle.incarnation)
        if opens:
            await link.send(Attach())
        try:
            backend, reason = self._choice.backend(handle.incarnation, handle.pool)
        finally:
            if opens and not self._direct.holds(handle.pool):
                await self._tell_detached(link)
        if reason is not None:
            log.warning("fetching from %s over tcp, not %s: %s", handle.worker_id, self._direct.name, reason)
            self.counters.fallbacks += 1
        return backend

    def _count(self, seq: Sequence, from_block: int, transport: str, num_blocks: int, num_bytes: int) -> None:
        counters = self.counters
        counters.fetched_blocks[transport] = counters.fetched_blocks.get(transport, 0) + num_blocks
        counters.fetched_bytes[transport] = counters.fetched_bytes.get(transport, 0) + num_bytes
        cached = min(from_block * self.parts.layout.block_size, seq.num_given)
        counters.prompt_tokens_cached += cached
        counters.prompt_tokens_received += seq.num_given - cached

    def tick(self) -> None:
        super().tick()
        self.counters.preemptions = self.engine.num_preempted
        self.counters.copied_blocks = self.engine.num_copied_blocks
        for request_id in [r for r in self._arrived if not self.engine.knows(r)]:
            del self._arrived[request_id]
        now = self.clock()
        waiting = self.engine.queued_handles()
        # The owners of the leases say how long they keep them: it need not be what is set here.
        due = self._renewed_at + min((handle.lease_s for handle in waiting), default=0.0) / 4
        if waiting and now >= due and (self._renewing is None or self._renewing.done()):
            self._renewed_at = now
            self._renewing = self.task(self._renew(waiting))
        if now - self._forgot_at > FORGET_PEERS_S:
            self._forgot_at = now
            self._closing = asyncio.create_task(self._forget_idle_peers())

    async def _renew(self, handles: list[KvHandle]) -> None:
        """Requests that wait for room here keep their KV on P."""
        tickets: dict[str, dict[int, str]] = {}
        for handle in handles:
            tickets.setdefault(handle.incarnation, {})[handle.lease] = handle.ticket
        self._unreachable &= tickets.keys()
        for handle in {handle.incarnation: handle for handle in handles}.values():
            try:
                await self._peers.link(handle).renew(tickets[handle.incarnation])
            except (ConfigError, TransferError) as error:
                # The others' leases are renewed all the same; these requests fail when they are fetched.
                if handle.incarnation not in self._unreachable:
                    log.warning("could not renew leases on %s: %s", handle.worker_id, error)
                self._unreachable.add(handle.incarnation)
            else:
                self._unreachable.discard(handle.incarnation)

    async def _forget_idle_peers(self) -> None:
        self._direct.detach_gone()
        await self._peers.close_idle()

    # ------------------------------------------------------------------ routers

    def submit(self, router_id: str, message: ToWorker) -> None:
        if isinstance(message, DecodeJob):
            if message.handle is not None:
                self._arrived.setdefault(message.request_id, self.clock())
            self.engine.submit(router_id, message, self.clock())
        elif isinstance(message, Suspend):
            self.engine.suspend(message.request_id, message.attempt)

    def load(self) -> Load:
        engine = self.engine
        return Load(
            blocks=engine.counts(),
            waiting=engine.num_waiting(),
            running=engine.num_running(),
            outstanding_prefill_tokens=engine.outstanding_tokens(),
            busy_for_s=self.busy_for_s(),
            draining=self.draining,
            hands_over=self.draining and self.data is not None,
        )
