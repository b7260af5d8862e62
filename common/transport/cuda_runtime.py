"""What we ask of CUDA, as one small protocol: the real one is in ``cupy_runtime``, tests bring their own.

Pointers, streams and events are the plain integers of the CUDA runtime. A runtime belongs to one device of
one process and may be called from any thread. Every call raises :class:`CudaError` where CUDA refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

MEMORY_HANDLE_BYTES = EVENT_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """``uuid`` as ``GPU-…``; ``no_ipc``: why its memory cannot be shared between processes, if so."""

    index: int
    name: str
    uuid: str
    no_ipc: str | None = None


class CudaRuntime(Protocol):
    @property
    def device(self) -> DeviceInfo: ...

    @property
    def torch_device(self) -> torch.device:
        """Where torch's tensors on this device are."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        ...

    def torch_peak(self) -> int:
        """Most bytes of the device that torch's allocator has held in this process until now."""
        ...

    def can_access_peer(self, uuid: str) -> bool | None:
        """Can this device reach the memory of that one (true of itself)? ``None``: it is not visible here."""
        ...

    # ------------------------------------------------------------------ memory

    def malloc(self, num_bytes: int) -> int:
        """A device allocation of its own, whose base can be exported; its content is undefined."""
        ...

    def free(self, pointer: int) -> None: ...

    def zero(self, pointer: int, num_bytes: int) -> None:
        """Returns when it is done."""
        ...

    def host_alloc(self, num_bytes: int) -> int:
        """Pinned memory of the host, at an address that this process can read and write."""
        ...

    def host_free(self, pointer: int) -> None: ...

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        """That device memory as ``uint8 [num_bytes]``, not copied and not owned."""
        ...

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Between any two of: this device, another one that it can reach, pinned memory."""
        ...

    def copy_batch_async(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """``(target, source, num_bytes)`` each. After an error some of them may have been queued."""
        ...

    # ------------------------------------------------------------------ other processes' memory

    def ipc_export(self, pointer: int) -> bytes:
        """Handle of a whole allocation of ``malloc``; no other memory has one."""
        ...

    def ipc_open(self, handle: bytes) -> int:
        """Maps another process's allocation; refused in the process that exported it. Opened again it is
        counted."""
        ...

    def ipc_close(self, pointer: int) -> None: ...

    # ------------------------------------------------------------------ order

    def stream_create(self) -> int:
        """A stream that does not wait for the default one."""
        ...

    def stream_destroy(self, stream: int) -> None: ...

    def stream_wait_event(self, stream: int, event: int) -> None:
        """What is queued on ``stream`` from now on waits for the event as it was last recorded."""
        ...

    def stream_synchronize(self, stream: int) -> None: ...

    def compute_stream(self) -> int:
        """The stream that the calling thread's torch operations are queued on."""
        ...

    def event_create(self, *, interprocess: bool = False) -> int:
        """Without timing, as events of other processes must be."""
        ...

    def event_record(self, event: int, stream: int) -> None: ...

    def event_query(self, event: int) -> bool:
        """Has what it last recorded come to pass? True if it never recorded anything. Does not wait."""
        ...

    def event_synchronize(self, event: int) -> None: ...

    def event_destroy(self, event: int) -> None:
        """Also of an imported one, in the importing process."""
        ...

    def ipc_export_event(self, event: int) -> bytes: ...

    def ipc_open_event(self, handle: bytes) -> int: ...


def runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Adjacent blocks that stay adjacent, as ``(source, target, count)``: each can be one copy."""
    merged: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if merged:
            first, to, count = merged[-1]
            if source == first + count and target == to + count:
                merged[-1] = first, to, count + 1
                continue
        merged.append((source, target, 1))
    return merged
