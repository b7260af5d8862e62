"""Between GPU memory and wire frames: a ring of pinned host buffers, so that the copies run at the bus's
speed and overlap with those on the host.

Its calls block and belong on the one thread that :meth:`PinnedStaging.run` gives them. Frames leave the ring
by a copy of their own: a reader that takes them slowly holds its frames and never the ring, which all share.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from pagerelay.common.aside import run_aside
from pagerelay.common.kv.memory import Bytes, DeviceBlocks
from pagerelay.common.transport.cuda_runtime import CudaRuntime

NUM_BUFFERS = 3
T = TypeVar("T")


@dataclass(slots=True)
class Buffer:
    pointer: int
    view: Bytes
    done: int
    """Event: the last copy to or from it has ended."""


class PinnedStaging:
    """One buffer holds one block. Made at first use: a pool that is only read by CUDA IPC never needs it."""

    def __init__(self, runtime: CudaRuntime, num_buffers: int = NUM_BUFFERS) -> None:
        self._runtime = runtime
        self._num_buffers = num_buffers
        self._ring: list[Buffer] = []
        self._stream = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpu-staging")

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` on the staging thread. Cancelled, it returns only when the work has stopped: its
        blocks are somebody else's afterwards."""
        return await run_aside(work, self._thread)

    async def frames(self, blocks: DeviceBlocks, ids: Sequence[int]) -> list[memoryview]:
        """These blocks of our own pool as frames for the wire, as the step applied last leaves them."""
        return [frame.data for frame in await self.run(partial(self.read, blocks, ids))]

    def read(self, blocks: DeviceBlocks, ids: Sequence[int]) -> list[Bytes]:
        """Copies of these blocks, one array each."""
        ring = self._buffers(blocks.block_bytes)
        self._wait_for(blocks.memory.settled_mark if blocks.memory is not None else None)
        due: deque[Buffer] = deque()
        frames: list[Bytes] = []
        try:
            for number, block in enumerate(ids):
                if len(due) == len(ring):
                    frames.append(self._taken(due.popleft(), blocks.block_bytes))
                buffer = ring[number % len(ring)]
                self._runtime.copy_async(buffer.pointer, blocks.at(block), blocks.block_bytes, self._stream)
                self._runtime.event_record(buffer.done, self._stream)
                due.append(buffer)
            frames += [self._taken(buffer, blocks.block_bytes) for buffer in due]
        except BaseException:
            self._runtime.stream_synchronize(self._stream)
            raise
        return frames

    def _taken(self, buffer: Buffer, num_bytes: int) -> Bytes:
        self._runtime.event_synchronize(buffer.done)
        return buffer.view[:num_bytes].copy()

    def write(self, frames: Sequence[memoryview], blocks: DeviceBlocks, ids: Sequence[int]) -> None:
        """Puts each frame into its block of our own pool; returns when all are there."""
        ring = self._buffers(blocks.block_bytes)
        self._wait_for(blocks.memory.settled_mark if blocks.memory is not None else None)
        try:
            for number, (frame, block) in enumerate(zip(frames, ids, strict=True)):
                buffer = ring[number % len(ring)]
                self._runtime.event_synchronize(buffer.done)
                np.copyto(buffer.view[: frame.nbytes], np.frombuffer(frame, dtype=np.uint8))
                self._runtime.copy_async(blocks.at(block), buffer.pointer, frame.nbytes, self._stream)
                self._runtime.event_record(buffer.done, self._stream)
        finally:
            self._runtime.stream_synchronize(self._stream)

    def _wait_for(self, mark: int | None) -> None:
        if mark is not None:
            self._runtime.stream_wait_event(self._stream, mark)

    def _buffers(self, num_bytes: int) -> list[Buffer]:
        if self._ring and self._ring[0].view.nbytes < num_bytes:
            self._release()
        if not self._stream:
            self._stream = self._runtime.stream_create()
        while len(self._ring) < self._num_buffers:
            event = self._runtime.event_create()
            try:
                pointer = self._runtime.host_alloc(num_bytes)
            except BaseException:
                self._runtime.event_destroy(event)
                raise
            view = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(pointer))
            self._ring.append(Buffer(pointer, view, event))
        return self._ring

    def _release(self) -> None:
        ring, self._ring = self._ring, []
        for buffer in ring:
            self._runtime.event_destroy(buffer.done)
            self._runtime.host_free(buffer.pointer)

    def close(self) -> None:
        """Waits for what runs. May be repeated."""
        self._thread.shutdown(wait=True)
        self._release()
        stream, self._stream = self._stream, 0
        if stream:
            self._runtime.stream_destroy(stream)
