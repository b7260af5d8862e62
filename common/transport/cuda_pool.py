"""A KV pool in GPU memory: one allocation of its own, and the events that say what has been written to it.

Behind the blocks lies a scratch area that begins with a nonce, by which an importer proves that it has mapped
this very pool.
"""

from __future__ import annotations

import ctypes
import secrets
from typing import TYPE_CHECKING

from pagerelay.common.errors import CudaError, StartupError
from pagerelay.common.transport.cuda_runtime import CudaRuntime

if TYPE_CHECKING:
    import torch

SCRATCH_BYTES = 4096
NUM_MARKS = 4
"""Steps that the host may be ahead of the GPU. Also how long a mark keeps its meaning for a slow importer:
afterwards it stands for a later step, and waiting for it takes longer but is never wrong."""


class CudaPool:
    """``[num_blocks * block_bytes]`` zeroed bytes. ``mark_written`` and ``settle`` belong to the
    engine's thread, the rest to the event loop's."""

    def __init__(self, runtime: CudaRuntime, num_blocks: int, block_bytes: int) -> None:
        """Raises :class:`StartupError` with need, have and remedy."""
        self._runtime = runtime
        self.num_bytes = num_blocks * block_bytes
        self.nonce = secrets.token_hex(16)
        self._marks: list[int] = []
        self._next = 0
        self.settled_mark: int | None = None
        """Written by the engine's thread, read by any."""
        need, (free, total) = self.allocated_bytes, runtime.memory_info()
        try:
            self.pointer = runtime.malloc(need)
        except CudaError as error:
            raise StartupError(
                f"the KV pool needs {need >> 20} MiB of GPU memory and {runtime.device.name} has "
                f"{free >> 20} of {total >> 20} MiB free: lower cache.kv_memory_mib ({error})"
            ) from error
        try:
            runtime.zero(self.pointer, need)
            self._write_nonce()
            for _ in range(NUM_MARKS):
                self._marks.append(runtime.event_create(interprocess=True))
        except BaseException:
            self.close()
            raise

    @property
    def allocated_bytes(self) -> int:
        return self.num_bytes + SCRATCH_BYTES

    def _write_nonce(self) -> None:
        text = self.nonce.encode()
        runtime, size = self._runtime, len(text)
        host = runtime.host_alloc(size)
        try:
            ctypes.memmove(host, text, size)
            stream = runtime.stream_create()
            try:
                runtime.copy_async(self.pointer + self.num_bytes, host, size, stream)
                runtime.stream_synchronize(stream)
            finally:
                runtime.stream_destroy(stream)
        finally:
            runtime.host_free(host)

    def tensor(self) -> torch.Tensor:
        return self._runtime.tensor(self.pointer, self.num_bytes)

    def mark_written(self) -> int:
        index = self._next
        event = self._marks[index]
        # Never further ahead of the GPU than there are marks: one that is recorded anew while it is still to
        # come could keep an importer waiting for ever.
        self._runtime.event_synchronize(event)
        self._runtime.event_record(event, self._runtime.compute_stream())
        self._next = (index + 1) % len(self._marks)
        return index

    def settle(self, mark: int) -> None:
        self.settled_mark = self._marks[mark]

    def export(self) -> tuple[bytes, tuple[bytes, ...]]:
        """Handles of the memory and of the marks. Raises :class:`CudaError` where there is no CUDA IPC."""
        try:
            memory = self._runtime.ipc_export(self.pointer)
            return memory, tuple(self._runtime.ipc_export_event(event) for event in self._marks)
        except CudaError as error:
            raise CudaError(
                f"CUDA refuses to export the pool ({error}); only memory of plain cudaMalloc can be "
                "exported, not managed or virtual (expandable) memory nor a part of an allocation, and some "
                "containers and virtual GPUs forbid it"
            ) from error

    def close(self, *, free: bool = True) -> None:
        """``free=False`` leaves the memory and its marks to the end of the process: somebody may still have
        them open, and freeing them then is undefined."""
        marks, self._marks = self._marks, []
        pointer, self.pointer = self.pointer, 0
        self.settled_mark = None
        if not free:
            return
        for event in marks:
            self._runtime.event_destroy(event)
        if pointer:
            self._runtime.free(pointer)
