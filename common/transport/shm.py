"""POSIX shared memory: one copy, pool to pool, between workers that see the same ``/dev/shm``.

A segment is a file ``/dev/shm/pagerelay-<random>`` of one header page and the pool. Its owner keeps an
exclusive ``flock`` on it for life, so whoever finds a segment that it can lock has found a dead worker's, and
removes it. Readers map it read-only by ``mmap`` (``multiprocessing.shared_memory`` unlinks a segment when a
mere reader exits, before Python 3.13) and prove by a nonce in the header that they opened what they were told
about.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import numpy as np

from pagerelay.common.aside import run_aside
from pagerelay.common.errors import StartupError, TransferError
from pagerelay.common.segments import FOLDER, NAME, own_segments, sweep_dead_segments
from pagerelay.common.transport.base import (
    Bytes,
    DeviceBlocks,
    DirectBackend,
    Peer,
    check_blocks,
    host_id,
)
from pagerelay.common.transport.populate import Populating
from pagerelay.common.wire.pools import PoolAddress

HEADER_BYTES = 4096


class ShmBackend(DirectBackend):
    name: ClassVar[str] = "shm"

    def __init__(self) -> None:
        self._fd = -1
        self._segment = ""
        self._map: mmap.mmap | None = None
        self._address: PoolAddress | None = None
        self._peers: dict[str, Bytes] = {}
        self._populating: list[Populating] = []
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="shm-copy")

    def allocate(self, num_blocks: int, block_bytes: int) -> Bytes:
        sweep_dead_segments()
        need = HEADER_BYTES + num_blocks * block_bytes
        self._segment, nonce = f"pagerelay-{secrets.token_hex(16)}", secrets.token_hex(16)
        path = FOLDER / self._segment
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(
                f"no shared memory: cannot create a file in {FOLDER}: {error.strerror}"
            ) from error
        try:
            own_segments.add(path)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink == 0:
                # Another worker's sweep came between creating and locking: it took the file for a dead one's.
                os.close(self._fd)
                self._fd = -1
                return self.allocate(num_blocks, block_bytes)
            # Reserve every page now: a file that is only sized lazily kills the process by SIGBUS at some
            # later write.
            os.posix_fallocate(self._fd, 0, need)
            self._map = mmap.mmap(self._fd, need)
        except OSError as error:
            self.close()
            if error.errno != errno.ENOSPC:
                raise StartupError(f"no shared memory: {error.strerror}") from error
            space = os.statvfs(FOLDER)
            raise StartupError(
                f"the KV pool needs {need >> 20} MiB of shared memory and {FOLDER} has "
                f"{space.f_bavail * space.f_frsize >> 20} MiB free: lower cache.kv_memory_mib, or enlarge it "
                "(in containers: the size of what is mounted there, or shm_size), "
                "or set worker.transport to tcp"
            ) from error
        self._map[: len(nonce)] = nonce.encode()
        self._address = PoolAddress(
            kind="shm",
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            host_id=host_id(),
            segment=self._segment,
            nonce=nonce,
        )
        memory = np.frombuffer(self._map, dtype=np.uint8, offset=HEADER_BYTES)
        self._populating.append(Populating(memory, write=True))
        return memory

    def address(self) -> PoolAddress:
        if self._address is None:
            raise TransferError("no pool has been allocated")
        return self._address

    def attach(self, pool: PoolAddress) -> Bytes:
        """The peer's pool ``[num_blocks, block_bytes]``, read-only. Raises TransferError naming why it cannot
        be read."""
        known = self._peers.get(pool.segment)
        if known is not None:
            return known
        if pool.kind != "shm" or not NAME.fullmatch(pool.segment):
            raise TransferError("the peer's pool is not in shared memory")
        if pool.host_id != host_id():
            raise TransferError("the peer is on another host")
        try:
            fd = os.open(FOLDER / pool.segment, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(
                f"the peer's segment cannot be opened here ({error.strerror}): no common /dev/shm?"
            ) from error
        try:
            need = HEADER_BYTES + pool.num_blocks * pool.block_bytes
            if os.fstat(fd).st_size < need:
                raise TransferError("the peer's segment is smaller than announced")
            view = mmap.mmap(fd, need, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        if view[: len(pool.nonce)] != pool.nonce.encode() or len(pool.nonce) != 32:
            raise TransferError("the segment of that name is not the peer's")
        blocks = np.frombuffer(view, dtype=np.uint8, offset=HEADER_BYTES).reshape(
            pool.num_blocks, pool.block_bytes
        )
        self._peers[pool.segment] = blocks
        self._populating.append(Populating(blocks, write=False))
        return blocks

    def detach_gone(self) -> None:
        """Forgets pools whose owners have removed them, so that their memory goes; a running copy keeps its
        own."""
        for segment in [name for name in self._peers if not (FOLDER / name).exists()]:
            del self._peers[segment]
        self._populating = [populating for populating in self._populating if populating.running]

    async def fetch(
        self,
        peer: Peer,
        lease: int,
        sources: Sequence[int],
        into: Bytes | DeviceBlocks,
        targets: Sequence[int],
        written: int | None = None,
    ) -> int:
        if not isinstance(into, np.ndarray):
            raise TransferError("shared memory is not copied into GPU memory")
        blocks = self.attach(peer.pool)
        check_blocks(sources, len(blocks), blocks.shape[1], into.shape[1])
        # numpy copies without the interpreter lock, so decoding goes on meanwhile.
        await run_aside(partial(self._copy, blocks, sources, into, targets), self._copier)
        return len(sources) * peer.pool.block_bytes

    @staticmethod
    def _copy(blocks: Bytes, sources: Sequence[int], into: Bytes, targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(into[target], blocks[source])

    def close(self) -> None:
        self._copier.shutdown(wait=True)
        for populating in self._populating:
            populating.stop()
        self._populating.clear()
        self._peers.clear()
        if self._fd >= 0:
            (FOLDER / self._segment).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
