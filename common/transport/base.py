"""The four verbs of a transfer backend.

============  ==============================================================================================
allocate      reserves the memory of a pool, once, at start; raises StartupError with need, have and remedy
address       where other workers can read that memory; stays valid until close
fetch         copies blocks of a peer's pool into ours; may be repeated; touches only the target blocks named
close         gives everything back; after it no other verb may be called
============  ==============================================================================================

Only the fetching side ever writes its own pool, and a copy counts only after the owner has confirmed that the
lease still stood when the copy was complete (``Release`` → ``Released``), so a backend need not know of
leases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from pagerelay.common.wire.messages import PoolAddress

Bytes = npt.NDArray[np.uint8]


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
    def allocate(self, num_blocks: int, block_bytes: int) -> Bytes:
        """Zeroed ``uint8 [num_blocks * block_bytes]``, really reserved. Called once."""

    @abstractmethod
    def address(self) -> PoolAddress:
        """Address of the allocated pool."""

    @abstractmethod
    async def fetch(
        self, peer: Peer, lease: int, sources: Sequence[int], into: Bytes, targets: Sequence[int]
    ) -> int:
        """Copies the peer's blocks ``sources`` to rows ``targets`` of ``into`` ``[blocks, block_bytes]``.

        Returns the bytes moved. Raises :class:`TransferError`; then the targets' content is undefined.
        """

    @abstractmethod
    def close(self) -> None: ...


def host_id() -> str:
    """Identity of this host's kernel: equal on two workers exactly if they could share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
