"""CUDA IPC: GPU memory of one process mapped into another on the same host, and one batch of copies per
announced chunk on a stream of its own.

The fetching side opens a pool once and keeps it open for as long as its owner lives. Three rules keep it safe
from that owner's death:

* Mapped memory is only ever the source of a copy, never an operand of attention.
* No stream waits for another process: its event, which says "these blocks are written", is asked instead.
  A stream that waited would hang if the owner died, and a cancelled fetch could not give its target blocks
  back. Nearly always the event has come to pass when ``Ready`` arrives.
* Before every batch the owner's process is looked at, by a descriptor that cannot mean another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pagerelay.common.errors import CudaError, TransferError
from pagerelay.common.transport.base import (
    Bytes,
    DeviceBlocks,
    DirectBackend,
    Peer,
    check_blocks,
    host_id,
)
from pagerelay.common.transport.cuda_pool import SCRATCH_BYTES, CudaPool
from pagerelay.common.transport.cuda_runtime import (
    EVENT_HANDLE_BYTES,
    MEMORY_HANDLE_BYTES,
    CudaRuntime,
    runs,
)
from pagerelay.common.transport.staging import PinnedStaging
from pagerelay.common.wire.pools import CudaExport, PoolAddress

log = logging.getLogger(__name__)

SPINS, POLL_S = 20, 0.0005
"""A wait first gives way to the event loop this often, then sleeps in between."""


class Watch(Protocol):
    """Another process, as long as it lives."""

    @property
    def gone(self) -> bool: ...

    def close(self) -> None: ...


class ProcessWatch:
    def __init__(self, pid: int) -> None:
        """Raises OSError if there is no such process."""
        self._fd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def gone(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process runs, as far as it matters for sharing GPU memory."""

    host: str = field(default_factory=host_id)
    pid: int = field(default_factory=os.getpid)
    pid_namespace: int = field(default_factory=lambda: os.stat("/proc/self/ns/pid").st_ino)

    def watch(self, pid: int) -> Watch:
        return ProcessWatch(pid)


@dataclass(slots=True)
class Mapped:
    """A peer's pool, open here. The event loop is its only user."""

    pointer: int
    blocks: DeviceBlocks
    events: list[int]
    owner: Watch
    fetches: int = 0
    closing: bool = False


class CudaIpcBackend(DirectBackend):
    name: ClassVar[str] = "cuda_ipc"

    def __init__(self, runtime: CudaRuntime, place: Place | None = None) -> None:
        self._runtime = runtime
        self._place = place if place is not None else Place()
        self._pool: CudaPool | None = None
        self._address: PoolAddress | None = None
        self._mapped: dict[str, Mapped] = {}
        self._taken_back: set[str] = set()
        """Nonces of pools whose owners asked us to close them."""
        self._stream = 0
        self._staging = PinnedStaging(runtime)
        self.importers: set[bytes] = set()
        """Links of the workers that have our pool open; written by the data link that serves them."""

    # ------------------------------------------------------------------ our own pool

    def allocate(self, num_blocks: int, block_bytes: int) -> CudaPool:
        """Raises :class:`CudaError` where the pool cannot be exported, StartupError where it does not fit."""
        self._check_device()
        pool = CudaPool(self._runtime, num_blocks, block_bytes)
        try:
            memory, events = pool.export()
        except CudaError:
            pool.close()
            raise
        self._pool = pool
        self._address = PoolAddress(
            kind="cuda_ipc",
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            host_id=self._place.host,
            nonce=pool.nonce,
            cuda=CudaExport(
                memory=memory,
                memory_bytes=pool.allocated_bytes,
                events=events,
                device_uuid=self._runtime.device.uuid,
                pid=self._place.pid,
                pid_namespace=self._place.pid_namespace,
            ),
        )
        return pool

    def _check_device(self) -> None:
        reason = self._runtime.device.no_ipc
        if reason is not None:
            raise CudaError(f"no CUDA IPC on {self._runtime.device.name}: {reason}")

    def address(self) -> PoolAddress:
        if self._address is None:
            raise TransferError("no pool has been allocated")
        return self._address

    async def frames(self, blocks: Bytes | DeviceBlocks, ids: Sequence[int]) -> list[memoryview]:
        if not isinstance(blocks, DeviceBlocks):
            return await super().frames(blocks, ids)
        return await self._staging.frames(blocks, ids)

    # ------------------------------------------------------------------ peers' pools

    def attach(self, pool: PoolAddress) -> Mapped:
        known = self._mapped.get(pool.nonce)
        if known is not None:
            return known
        export = self._check_reach(pool)
        try:
            owner = self._place.watch(export.pid)
        except OSError as error:
            raise TransferError(f"the peer's process cannot be watched: {error.strerror}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(owner.close)
            try:
                pointer = self._runtime.ipc_open(export.memory)
            except CudaError as error:
                raise TransferError(
                    f"the peer's pool cannot be opened ({error}): workers in containers need a shared PID "
                    "and IPC namespace and sight of each other's GPUs"
                ) from error
            undo.callback(self._runtime.ipc_close, pointer)
            events = []
            for handle in export.events:
                events.append(self._runtime.ipc_open_event(handle))
                undo.callback(self._runtime.event_destroy, events[-1])
            if self._read(pointer + pool.num_blocks * pool.block_bytes, 32) != pool.nonce.encode():
                raise TransferError("the memory that was opened is not the peer's pool")
            undo.pop_all()
        blocks = DeviceBlocks(pointer, pool.num_blocks, pool.block_bytes)
        mapped = self._mapped[pool.nonce] = Mapped(pointer, blocks, events, owner)
        return mapped

    def _check_reach(self, pool: PoolAddress) -> CudaExport:
        """Everything that can be known before CUDA is asked. Raises TransferError with the
        reason."""
        self._check_device()
        export, place = pool.cuda, self._place
        if pool.kind != "cuda_ipc" or export is None:
            raise TransferError("the peer's pool is not in GPU memory that it exports")
        if pool.nonce in self._taken_back:
            raise TransferError("the peer is ending and has taken its pool back")
        if pool.host_id != place.host:
            raise TransferError("the peer is on another host")
        if export.pid_namespace != place.pid_namespace:
            raise TransferError(
                "the peer is in another PID namespace: containers need a common one (pid: host or "
                "pid: service:…) for CUDA IPC"
            )
        if export.pid == place.pid:
            raise TransferError("the pool is this process's own, which CUDA does not open a second time")
        need = pool.num_blocks * pool.block_bytes + SCRATCH_BYTES
        sizes = {len(event) for event in export.events} - {EVENT_HANDLE_BYTES}
        if export.memory_bytes < need or len(export.memory) != MEMORY_HANDLE_BYTES or sizes:
            raise TransferError("the peer's export is smaller than announced, or malformed")
        reach = self._runtime.can_access_peer(export.device_uuid)
        if reach is None:
            raise TransferError(
                f"the peer's {export.device_uuid} is not visible here: give both workers all GPUs and choose "
                "by engine.device"
            )
        if not reach:
            raise TransferError(f"this GPU has no peer access to the peer's {export.device_uuid}")
        return export

    def _read(self, pointer: int, num_bytes: int) -> bytes:
        """The probe: a few bytes of mapped memory, copied and waited for."""
        host = self._runtime.host_alloc(num_bytes)
        try:
            stream = self._side_stream()
            self._runtime.copy_async(host, pointer, num_bytes, stream)
            self._runtime.stream_synchronize(stream)
            return ctypes.string_at(host, num_bytes)
        finally:
            self._runtime.host_free(host)

    def _side_stream(self) -> int:
        if not self._stream:
            self._stream = self._runtime.stream_create()
        return self._stream

    def holds(self, pool: PoolAddress) -> bool:
        return pool.nonce in self._mapped

    async def detach(self, pool: PoolAddress) -> None:
        """Its owner takes it back: no more copies begin, those under way end, then it is closed for good."""
        self._taken_back.add(pool.nonce)
        mapped = self._mapped.get(pool.nonce)
        if mapped is None:
            return
        mapped.closing = True
        while mapped.fetches:
            await asyncio.sleep(POLL_S)
        if self._mapped.get(pool.nonce) is mapped:
            self._unmap(pool.nonce)

    def detach_gone(self) -> None:
        for nonce, mapped in list(self._mapped.items()):
            if mapped.owner.gone:
                mapped.closing = True
                if not mapped.fetches:
                    log.info("closing the pool of a worker that has ended")
                    self._unmap(nonce)

    def _unmap(self, nonce: str) -> None:
        mapped = self._mapped.pop(nonce)
        try:
            with contextlib.ExitStack() as closing:  # each of them, also if one fails
                closing.callback(mapped.owner.close)
                closing.callback(self._runtime.ipc_close, mapped.pointer)
                for event in mapped.events:
                    closing.callback(self._runtime.event_destroy, event)
        except CudaError as error:
            log.warning("a peer's pool could not be closed properly: %s", error)

    # ------------------------------------------------------------------ fetching

    async def fetch(
        self,
        peer: Peer,
        lease: int,
        sources: Sequence[int],
        into: Bytes | DeviceBlocks,
        targets: Sequence[int],
        written: int | None = None,
    ) -> int:
        if not isinstance(into, DeviceBlocks):
            raise TransferError("CUDA IPC copies into GPU memory alone")
        mapped = self.attach(peer.pool)
        theirs, size = mapped.blocks, into.block_bytes
        check_blocks(sources, theirs.num_blocks, theirs.block_bytes, size)
        if not sources:
            return 0
        if written is not None and not 0 <= written < len(mapped.events):
            raise TransferError("the peer names an event that it has not exported")
        mapped.fetches += 1
        try:
            if written is not None:
                await self._until_written(mapped, mapped.events[written])
            self._check_alive(mapped)
            copies = [
                (into.at(target), theirs.at(source), count * size)
                for source, target, count in runs(sources, targets)
            ]
            await self._copy(copies, into.memory.settled_mark if into.memory is not None else None)
        finally:
            mapped.fetches -= 1
        return len(sources) * size

    @staticmethod
    def _check_alive(mapped: Mapped) -> None:
        if mapped.closing or mapped.owner.gone:
            raise TransferError("the peer has ended, or is about to")

    async def _until_written(self, mapped: Mapped, event: int) -> None:
        """A cancellation leaves at once: nothing has been queued yet."""
        self._check_alive(mapped)
        spins = 0
        while not self._runtime.event_query(event):
            await asyncio.sleep(0 if spins < SPINS else POLL_S)
            spins += 1
            self._check_alive(mapped)

    async def _copy(self, copies: list[tuple[int, int, int]], after: int | None) -> None:
        """One batch, after our own GPU's last use of its targets; returns, raises or is cancelled only when
        nothing of it runs any more."""
        stream, done = self._side_stream(), self._runtime.event_create()
        try:
            try:
                if after is not None:
                    self._runtime.stream_wait_event(stream, after)
                self._runtime.copy_batch_async(copies, stream)
            finally:  # also after an error: some may have been queued
                self._runtime.event_record(done, stream)
                await self._until_done(done)
        finally:
            self._runtime.event_destroy(done)

    async def _until_done(self, event: int) -> None:
        cancelled: asyncio.CancelledError | None = None
        spins = 0
        while not self._runtime.event_query(event):
            try:
                await asyncio.sleep(0 if spins < SPINS else POLL_S)
            except asyncio.CancelledError as error:
                cancelled = error
            spins += 1
        if cancelled is not None:
            raise cancelled

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Closes what is open, then frees the pool, unless somebody still has it open: then its memory goes
        with the process."""
        stream, self._stream = self._stream, 0
        pool, self._pool = self._pool, None
        self._address = None
        with contextlib.ExitStack() as closing:  # in reverse
            if pool is not None:
                if self.importers:
                    log.warning(
                        "this pool is still open in other processes (%d): its memory goes with this one",
                        len(self.importers),
                    )
                closing.callback(pool.close, free=not self.importers)
            closing.callback(self._staging.close)
            if stream:
                closing.callback(self._runtime.stream_destroy, stream)
            for nonce in list(self._mapped):
                closing.callback(self._unmap, nonce)
            if stream:
                closing.callback(self._runtime.stream_synchronize, stream)
