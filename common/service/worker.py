"""One engine thread, and around it an event loop with the sockets and the clock.

The engine computes on its own thread; its verbs are called from the event loop (they only take its lock).
After every step and every verb the messages that the engine wants sent are collected in order and sent by one
task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from pagerelay.common.config import Config
from pagerelay.common.engine.leasing import Leasing, LeasingEngine
from pagerelay.common.engine.parts import Outbox
from pagerelay.common.errors import PagerelayError
from pagerelay.common.service.build import Parts
from pagerelay.common.service.data_link import DataLink
from pagerelay.common.service.link import RouterLink, monotonic
from pagerelay.common.wire.account import Counters, Load
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.messages import (
    Abort,
    Drain,
    Heartbeat,
    Hello,
    KvHandle,
    Message,
    Probe,
    Role,
    ToWorker,
)
from pagerelay.common.wire.roles import MAY_GET
from pagerelay.common.wire.sockets import cancel_all

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
TICK_S = 0.25


class Worker(ABC):
    """Shared life of a worker. Subclasses add their engine's verbs and their end of the data link."""

    role: Role
    engine: LeasingEngine
    data: DataLink | None = None
    """Where other workers fetch from this one, if they may."""

    def __init__(self, config: Config, keys: CurveKeys | None, parts: Parts) -> None:
        self.config = config
        self.parts = parts
        self.keys = keys
        self.incarnation = secrets.token_hex(8)
        self.worker_id = config.worker.name or f"{self.role}-{self.incarnation[:6]}"
        self.draining = False
        self.clock = monotonic
        self.exit_code = 0
        self.counters = Counters()
        self._links: list[RouterLink] = []
        self._outgoing: asyncio.Queue[Outbox] = asyncio.Queue()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._stopped = asyncio.Event()
        self._step_began: float | None = None
        self._ledger_due = False
        """Something has come since the ledger was last recounted."""
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ subclasses

    @abstractmethod
    def submit(self, router_id: str, message: ToWorker) -> None:
        """Gives the engine what is for workers of this role alone."""

    @abstractmethod
    def load(self) -> Load: ...

    def outgoing(self, message: Message) -> Message:
        """A last look at a message to a router, for durations: the engine has no clock."""
        return message

    @abstractmethod
    def after_step(self) -> None:
        """Runs on the event loop after each step and verb."""

    def tick(self) -> None:
        """Runs a few times a second."""
        self.engine.expire(self.clock())
        self.counters.leases_expired = self.engine.expired
        self.wake()  # freed blocks may let somebody in

    # ------------------------------------------------------------------ the data link

    def leasing(self) -> Leasing:
        """How the engine gives leases. They are looked at once a tick, and a lease's time begins with such a
        look: so it is shortened by two, and ends ``worker.lease_s`` after the last sign of life at the
        latest."""
        return Leasing(self.incarnation, self._lease_s(), self._handle, self.config.worker.checksums)

    def _lease_s(self) -> float:
        lease_s = self.config.worker.lease_s
        return max(lease_s - 2 * TICK_S, lease_s / 2)

    def _handle(self, lease: int, num_tokens: int) -> KvHandle:
        assert self.data is not None  # noqa: S101 - leases are given by those alone that serve them
        return KvHandle(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            lease=lease,
            data_endpoint=self.data.endpoint,
            pool=self.parts.backend.address(),
            layout=self.parts.layout,
            num_tokens=num_tokens,
            lease_s=self._lease_s(),
        )

    def make_data_link(self, engine: LeasingEngine) -> DataLink:
        return DataLink(
            self.config.worker,
            self.keys,
            engine,
            self.parts.backend,
            clock=self.clock,
            changed=self._data_changed,
            on_dropped=self.message_dropped,
        )

    def _data_changed(self) -> None:
        self.wake()
        self.flush()

    async def start_data_link(self) -> None:
        if self.data is not None:
            self.data.start(self.task)

    async def stop_data_link(self) -> None:
        if self.data is not None:
            await self.data.stop()

    # ------------------------------------------------------------------ the life of the process

    async def run(self, announce: Callable[[dict[str, Any]], None], orphaned: Callable[[], bool]) -> int:
        """Serves until :meth:`stop`, drains, and returns the exit code.

        ``orphaned``: has the launcher gone? Then there is nobody to finish anything for.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self.start_data_link()
        except BaseException:
            await self.stop_data_link()
            raise
        self.engine.on_planned = self._flush_from_thread
        self.engine.on_ready = self.wake
        self.engine.on_dropped = self.message_dropped
        thread = threading.Thread(target=self._step_forever, name="engine", daemon=True)
        thread.start()
        self._tasks = [self.task(self._send_forever()), self.task(self._tick_forever())]
        self._links = [
            RouterLink(endpoint, self.keys, self, self.clock)
            for endpoint in dict.fromkeys(self.config.worker.routers)
        ]
        for link in self._links:
            link.start()
        announce({"event": "ready", "worker_id": self.worker_id})
        await self._stopped.wait()
        if self.exit_code == 0:
            await self._drain(orphaned)
        # The engine stops first: what its last step had to say is sent before the sockets close.
        self._stopping.set()
        self._wake.set()
        await asyncio.to_thread(thread.join, 5.0)
        self.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await self._outgoing.join()
        cancel_all(self._tasks)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links))
        await self.stop_data_link()
        return self.exit_code

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task whose unexpected end ends the worker, loudly: a silent one would be a hang."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the worker failed", exc_info=task.exception())
            self.exit_code = 1
            self._stopped.set()

    def stop(self) -> None:
        """Finishes what runs, and ends. May be said again."""
        if not self._stopped.is_set():
            log.info("stopping: finishing what runs, for at most %g s", self.config.worker.drain_s)
        self._stopped.set()

    async def _drain(self, orphaned: Callable[[], bool]) -> None:
        """Routers see ``draining`` with the next heartbeat and send no more; what is here is finished."""
        self.draining = True
        for link in self._links:
            if link.router_id is not None:
                await link.send(self.heartbeat())
        deadline = self.clock() + self.config.worker.drain_s
        joined = any(link.router_id is not None for link in self._links)
        while joined and self.clock() < deadline and not orphaned() and not self._idle():
            await asyncio.sleep(0.05)

    def _idle(self) -> bool:
        load = self.load()
        return not (load.running or load.waiting or load.blocks.held or load.blocks.leased)

    # ------------------------------------------------------------------ engine thread

    def _step_forever(self) -> None:
        try:
            self._step_until_stopped()
        except BaseException:
            log.exception("the engine's thread failed")
            self._loop.call_soon_threadsafe(self._give_up)

    def _step_until_stopped(self) -> None:
        failed = 0
        while not self._stopping.is_set():
            began = self._step_began = self.clock()
            try:
                worked = self.engine.step()
                failed = 0 if worked else failed
            except Exception:
                # A fault belongs to the requests of its step. Only an engine that cannot step at all ends.
                log.exception("a step failed")
                self.engine.fail_step("the worker failed while computing this request")
                failed, worked = failed + 1, True
                if failed == MAX_FAILED_STEPS:
                    raise
            self._step_began = None
            if worked:
                if not failed:
                    self._count_step(self.clock() - began)
                self._flush_from_thread()
            else:
                self._wake.wait()
                self._wake.clear()

    def _flush_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self.flush)

    def _count_step(self, seconds: float) -> None:
        stats, counters = self.engine.stats, self.counters
        counters.steps += 1
        counters.step_seqs += stats.num_seqs
        counters.step_seconds += seconds
        counters.prompt_tokens_computed += stats.num_prefill_tokens
        counters.tokens_generated += stats.sampled
        counters.tokens_drafted += stats.drafted
        counters.tokens_accepted += stats.accepted
        counters.bad_logits += stats.bad_logits

    def _give_up(self) -> None:
        log.error("the engine cannot go on: this worker ends")
        self.exit_code = 1
        self._stopped.set()

    # ------------------------------------------------------------------ event loop

    def wake(self) -> None:
        """There may be something to compute."""
        self._wake.set()

    def flush(self) -> None:
        """Hands what the engine wants sent to the sender, in order."""
        outbox = self.engine.take_outbox()
        if outbox.to_router or outbox.to_peer:
            self._outgoing.put_nowait(outbox)
        self.after_step()

    async def _send_forever(self) -> None:
        while True:
            outbox = await self._outgoing.get()
            for peer, message in outbox.to_peer:
                if self.data is not None:
                    await self.data.send(peer, message)
            for router_id, message in outbox.to_router:
                for link in self._links:
                    if link.router_id == router_id:
                        await link.send(self.outgoing(message))
            self._outgoing.task_done()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
            self.flush()
            self._check_ledger()

    def _check_ledger(self) -> None:
        """Conservation, recounted whenever a worker that had something to do is idle again. A broken one is a
        fault of ours: said loudly, and counted."""
        try:
            if self._ledger_due and self.engine.check_idle():
                self._ledger_due = False
        except PagerelayError as error:
            self._ledger_due = False
            self.counters.ledger_faults += 1
            log.critical("%s", error)

    # ------------------------------------------------------------------ links' questions

    def hello(self) -> Hello:
        parts = self.parts
        if self.data is not None:
            self.data.refresh_endpoint()
        return Hello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            layout=parts.layout,
            num_blocks=parts.pool.num_blocks,
            max_model_len=self.engine.max_model_len,
            transport=parts.backend.name,
            ops=parts.runner.ops.name,
            prefix_cache=parts.limits.prefix_cache,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def received(self, router_id: str, message: ToWorker) -> None:
        if type(message) not in MAY_GET[self.role]:
            self.message_dropped(type(message).__name__, "refused")
        elif isinstance(message, Abort):
            self.engine.abort(message.request_id, message.attempt)
        elif isinstance(message, Probe):
            self.engine.probe(router_id, message.request_id, message.attempt, message.next_index)
        elif isinstance(message, Drain):
            self.stop()
        else:
            self.submit(router_id, message)
            self._ledger_due = True
        self.wake()
        self.flush()

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(load=self.load(), counters=self.counters)

    def busy_for_s(self) -> float:
        began = self._step_began
        return 0.0 if began is None else self.clock() - began

    def router_lost(self, router_id: str) -> None:
        dropped = self.engine.drop_owner(router_id)
        if dropped:
            log.warning("dropped %d requests of a router that is gone", dropped)
        self.flush()

    def refused_for_good(self, endpoint: str, reason: str) -> None:
        log.error("the router at %s refuses this worker: %s", endpoint, reason)
        self.exit_code = 3
        self._stopped.set()

    def message_dropped(self, kind: str, reason: str) -> None:
        """Counts a message that came to nothing. Both labels are from closed sets."""
        key = f"{kind}/{reason}"
        self.counters.dropped[key] = self.counters.dropped.get(key, 0) + 1
