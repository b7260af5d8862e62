"""The prefill worker's process: jobs from routers, KV to decode workers.

Its data link serves two kinds of messages to decode workers: the talk about leases (Fetch, Renew, Release)
and, for those that cannot map its memory, the blocks themselves (Read), sent straight from the pool.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from pagerelay.common.config import Config
from pagerelay.common.errors import WireError
from pagerelay.common.service.build import Parts
from pagerelay.common.service.worker import Worker
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.wire import address
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.messages import (
    Attach,
    Blocks,
    Detach,
    Detached,
    Fetch,
    FirstToken,
    KvHandle,
    LeaseLost,
    Load,
    Message,
    PrefillJob,
    PrefillStarted,
    Read,
    Release,
    Renew,
    ToPrefill,
    ToWorker,
)
from pagerelay.common.wire.sockets import PeerUnreachable, ServerSocket
from pagerelay.prefill_svc.engine import PrefillEngine

log = logging.getLogger(__name__)

RECALL_S = 2.0
"""Longest wait at the end for those that have our GPU memory open."""
_decode: Decoder[ToPrefill] = Decoder(ToPrefill)


class PrefillWorker(Worker):
    role = "prefill"

    def __init__(self, config: Config, keys: CurveKeys | None, parts: Parts) -> None:
        super().__init__(config, keys, parts)
        self._endpoint = ""
        self._data_port = 0
        self._data = ServerSocket(keys)
        self.engine: PrefillEngine = PrefillEngine(
            parts.runner,
            parts.facts,
            parts.pool,
            parts.limits,
            incarnation=self.incarnation,
            lease_s=config.worker.lease_s,
            handle=self._handle,
        )
        self._serving: asyncio.Task[None] | None = None
        self._times: dict[str, float] = {}
        """request_id → when it was accepted; for durations only."""
        self._began: dict[str, float] = {}
        """request_id → when its prefill began."""

    def _handle(self, lease: int, num_tokens: int) -> KvHandle:
        return KvHandle(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            lease=lease,
            data_endpoint=self._endpoint,
            pool=self.parts.backend.address(),
            layout=self.parts.layout,
            num_tokens=num_tokens,
        )

    # ------------------------------------------------------------------ data link

    async def start_data_link(self) -> None:
        settings = self.config.worker
        self._data_port = self._data.bind(settings.data_host, settings.data_port, "worker.data_host")
        self.data_endpoint()
        self._serving = self.task(self._serve())

    async def stop_data_link(self) -> None:
        await self._recall_pool()
        if self._serving is not None:
            self._serving.cancel()
        self._data.close()
        self.parts.backend.close()

    async def _recall_pool(self) -> None:
        """Whoever has our GPU memory open is asked to close it: freeing it before is undefined."""
        exported = self.parts.backend
        if not isinstance(exported, CudaIpcBackend):
            return
        for peer in list(exported.importers):
            try:
                await self._data.send(peer, encode(Detach()))
            except PeerUnreachable:
                exported.importers.discard(peer)  # it is gone, and what it had open with it
        deadline = self.clock() + RECALL_S
        while exported.importers and self.clock() < deadline:
            await asyncio.sleep(0.01)

    def _note_importer(self, peer: bytes, message: Attach | Detached) -> None:
        if isinstance(self.parts.backend, CudaIpcBackend):
            if isinstance(message, Attach):
                self.parts.backend.importers.add(peer)
            else:
                self.parts.backend.importers.discard(peer)

    async def _serve(self) -> None:
        while True:
            peer, frames = await self._data.receive()
            try:
                message = _decode(frames[0] if frames else b"")
            except WireError as error:
                self.message_dropped()
                log.warning("dropped a message on the data link: %s", error)
                continue
            if isinstance(message, Read):
                await self._send_blocks(peer, message)
                continue
            if isinstance(message, Attach | Detached):
                self._note_importer(peer, message)
                continue
            if isinstance(message, Fetch):
                self.engine.fetch(peer, message, self.clock())
            elif isinstance(message, Renew):
                self.engine.renew(message.leases, self.clock())
            elif isinstance(message, Release):
                self.engine.release(peer, message.lease, message.received)
            self.wake()  # freed blocks may let a waiting prompt in
            self.flush()

    async def _send_blocks(self, peer: bytes, message: Read) -> None:
        """Sends blocks straight from the pool (from host memory without a copy): the lease keeps them, and a
        copy made of a block that was given up meanwhile never counts, because its lease is not confirmed."""
        if not self.engine.may_read(peer, message.lease, message.block_ids, self.clock()):
            await self.send_to_peer(
                peer, LeaseLost(lease=message.lease, reason="there is no such lease any more", ended=True)
            )
            return
        header = encode(Blocks(lease=message.lease, block_ids=message.block_ids))
        try:
            blocks = await self.parts.backend.frames(self.parts.pool.blocks, message.block_ids)
            await self._data.send(peer, header, *blocks, copy=False)
        except PeerUnreachable:
            self.message_dropped()

    async def send_to_peer(self, peer: bytes, message: Message) -> None:
        try:
            await self._data.send(peer, encode(message))
        except PeerUnreachable:
            self.message_dropped()  # its lease will run out

    def after_step(self) -> None:
        pass  # decode workers come by themselves

    # ------------------------------------------------------------------ routers

    def data_endpoint(self) -> str:
        """What decode workers are told. Looked up again with every Hello: a router's name may not resolve at
        start."""
        settings = self.config.worker
        host = settings.advertise_host
        if host is None and not address.is_loopback(settings.data_host):
            host = address.address_towards(settings.routers[0])
        self._endpoint = address.join(host or settings.data_host, self._data_port)
        return self._endpoint

    def submit(self, router_id: str, message: ToWorker) -> bool:
        if isinstance(message, PrefillJob):
            self._times[message.request_id] = self.clock()
            self.engine.submit(router_id, message)
        return isinstance(message, PrefillJob)

    def outgoing(self, message: Message) -> Message:
        now = self.clock()
        if isinstance(message, PrefillStarted):
            since = self._times.pop(message.request_id, now)
            self._began[message.request_id] = now
            return msgspec.structs.replace(message, queued_s=now - since)
        if isinstance(message, FirstToken):
            since = self._began.pop(message.delta.request_id, now)
            return msgspec.structs.replace(message, prefill_s=now - since)
        return message

    def tick(self) -> None:
        now = self.clock()
        self.engine.expire(now)
        # Requests that were taken back or failed leave their times behind.
        for times in (self._times, self._began):
            for request_id in [r for r, at in times.items() if now - at > 3600 or not self.engine.knows(r)]:
                del times[request_id]
        self.counters.leases_expired = self.engine.expired
        self.counters.prompt_tokens_cached = self.engine.num_prompt_tokens_cached
        self.wake()

    def load(self) -> Load:
        engine = self.engine
        return Load(
            blocks=engine.counts(),
            waiting=len(engine.scheduler.waiting),
            running=len(engine.scheduler.running),
            outstanding_prefill_tokens=engine.outstanding_tokens(),
            busy_for_s=self.busy_for_s(),
            draining=self.draining,
        )
