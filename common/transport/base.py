"""The five verbs of a transfer backend.

============  ==============================================================================================
allocate      reserves the memory of a pool, once, at start; raises StartupError with need, have and remedy
address       where other workers can read that memory; stays valid until close
frames        blocks of our own pool as frames for the wire, for peers that cannot read it themselves
fetch         copies blocks of a peer's pool into ours; may be repeated; touches only the target blocks named
close         gives everything back; may be repeated; after it no other verb may be called
============  ==============================================================================================

Only the fetching side ever writes its own pool, and a copy counts only after the owner has confirmed that the
lease still stood when the copy was complete (``Release`` → ``Released``), so a backend need not know of
leases. A backend that reads the peer's memory itself (:class:`DirectBackend`) has to attach it first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from pagerelay.common.errors import TransferError
from pagerelay.common.kv.memory import Bytes, DeviceBlocks, DeviceMemory
from pagerelay.common.wire.pools import PoolAddress

__all__ = ["Bytes", "DeviceBlocks", "DirectBackend", "Peer", "TransferBackend", "check_blocks", "host_id"]


class Peer(Protocol):
    """The link to the worker that owns the blocks."""

    @property
    def pool(self) -> PoolAddress: ...

    async def read(self, lease: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Asks for blocks over the wire and returns one frame each. Raises TransferError when the peer is
        lost."""
        ...


class TransferBackend(ABC):
    name: ClassVar[str]

    @abstractmethod
    def allocate(self, num_blocks: int, block_bytes: int) -> Bytes | DeviceMemory:
        """Zeroed ``uint8 [num_blocks * block_bytes]``, really reserved. Called once."""

    @abstractmethod
    def address(self) -> PoolAddress:
        """Address of the allocated pool."""

    async def frames(self, blocks: Bytes | DeviceBlocks, ids: Sequence[int]) -> list[memoryview]:
        """Those of our blocks, one frame each. Of a host's memory the frames are the pool's own bytes, not a
        copy."""
        if not isinstance(blocks, np.ndarray):
            raise TransferError(f"{self.name} has no pool in GPU memory")
        return [memoryview(blocks[block]) for block in ids]

    @abstractmethod
    async def fetch(
        self,
        peer: Peer,
        lease: int,
        sources: Sequence[int],
        into: Bytes | DeviceBlocks,
        targets: Sequence[int],
        written: int | None = None,
    ) -> int:
        """Copies the peer's blocks ``sources`` to rows ``targets`` of ``into`` ``[blocks, block_bytes]``.

        ``written``: what ``Ready`` says about when the peer's GPU has written them. Returns the bytes moved.
        Raises :class:`TransferError`; then the targets' content is undefined. It returns, raises or is
        cancelled only when nothing writes the targets any more.
        """

    @abstractmethod
    def close(self) -> None: ...


class DirectBackend(TransferBackend):
    """Reads the peer's memory itself."""

    @abstractmethod
    def attach(self, pool: PoolAddress) -> object:
        """Opens a peer's pool and proves that it is the one; once is enough. Raises TransferError naming why
        it cannot be read here."""

    @abstractmethod
    def detach_gone(self) -> None:
        """Closes the pools of peers that have ended. Cheap; called a few times a second."""

    def holds(self, pool: PoolAddress) -> bool:
        """Is that pool open here, and must its owner be able to tell us to close it?"""
        return False


def check_blocks(sources: Sequence[int], theirs: int, their_bytes: int, our_bytes: int) -> None:
    """What the peer announced against what its pool has. Raises :class:`TransferError`."""
    if sources and not 0 <= min(sources) <= max(sources) < theirs:
        raise TransferError("the peer announced a block that its pool does not have")
    if their_bytes != our_bytes:
        raise TransferError(f"the peer's blocks have {their_bytes} bytes, ours {our_bytes}")


def host_id() -> str:
    """Identity of this host's kernel: equal on two workers exactly if they could share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
