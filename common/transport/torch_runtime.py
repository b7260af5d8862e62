"""A :class:`CudaRuntime` by torch alone, for where cupy is missing: all but memory of other processes, so
blocks go over TCP through pinned buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from pagerelay.common.errors import CudaError
from pagerelay.common.transport.cuda_runtime import DeviceInfo


def describe(index: int, no_ipc: str | None = None) -> DeviceInfo:
    """From torch, not from cupy, whose properties cut a UUID off at its first zero byte."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid)
    if not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"
    if uuid.startswith("MIG-") or " MIG " in properties.name:
        no_ipc = no_ipc or "it is a MIG slice"
    return DeviceInfo(index, properties.name, uuid, no_ipc)


class TorchRuntime:
    """Pointers are those of tensors that it keeps, streams and events numbers of torch's objects."""

    def __init__(self, index: int, no_ipc: str, place: str | None = None) -> None:
        """``place``: torch device of the memory, for tests; default: the GPU."""
        self._index = index
        self._place = torch.device(place or f"cuda:{index}")
        self._info = describe(index, no_ipc)
        self._memory: dict[int, torch.Tensor] = {}
        self._streams: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    @property
    def device(self) -> DeviceInfo:
        return self._info

    @property
    def torch_device(self) -> torch.device:
        return self._place

    def torch_peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._index)

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._index)
        return int(free), int(total)

    def can_access_peer(self, uuid: str) -> bool | None:
        return True if uuid == self._info.uuid else None

    # ------------------------------------------------------------------ memory

    def _keep(self, tensor: torch.Tensor) -> int:
        self._memory[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def malloc(self, num_bytes: int) -> int:
        try:
            return self._keep(torch.empty(num_bytes, dtype=torch.uint8, device=self._place))
        except torch.OutOfMemoryError as error:
            raise CudaError(f"out of GPU memory: {str(error).splitlines()[0]}") from error

    def free(self, pointer: int) -> None:
        del self._memory[pointer]

    def zero(self, pointer: int, num_bytes: int) -> None:
        self.tensor(pointer, num_bytes).zero_()
        torch.cuda.current_stream(self._index).synchronize()

    def host_alloc(self, num_bytes: int) -> int:
        pinned = self._place.type == "cuda"
        return self._keep(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def host_free(self, pointer: int) -> None:
        del self._memory[pointer]

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        for base, memory in self._memory.items():
            if base <= pointer and pointer + num_bytes <= base + memory.nbytes:
                return memory[pointer - base : pointer - base + num_bytes]
        raise CudaError("an address outside of the memory that was allocated here")

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        with torch.cuda.stream(self._streams[stream]):
            self.tensor(target, num_bytes).copy_(self.tensor(source, num_bytes), non_blocking=True)

    def copy_batch_async(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        for target, source, num_bytes in copies:
            self.copy_async(target, source, num_bytes, stream)

    # ------------------------------------------------------------------ other processes' memory: none

    def _no_ipc(self) -> NoReturn:
        raise CudaError(f"no CUDA IPC: {self._info.no_ipc}")

    def ipc_export(self, pointer: int) -> bytes:
        self._no_ipc()

    def ipc_open(self, handle: bytes) -> int:
        self._no_ipc()

    def ipc_close(self, pointer: int) -> None:
        self._no_ipc()

    def ipc_export_event(self, event: int) -> bytes:
        self._no_ipc()

    def ipc_open_event(self, handle: bytes) -> int:
        self._no_ipc()

    # ------------------------------------------------------------------ order

    def stream_create(self) -> int:
        number = next(self._numbers)
        self._streams[number] = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        return number

    def stream_destroy(self, stream: int) -> None:
        del self._streams[stream]

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._streams[stream].wait_event(self._events[event])

    def stream_synchronize(self, stream: int) -> None:
        self._streams[stream].synchronize()

    def compute_stream(self) -> int:
        """0 stands for whatever stream is torch's current one."""
        return 0

    def event_create(self, *, interprocess: bool = False) -> int:
        number = next(self._numbers)
        self._events[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return number

    def event_record(self, event: int, stream: int) -> None:
        on = self._streams[stream] if stream else torch.cuda.current_stream(self._index)
        self._events[event].record(on)

    def event_query(self, event: int) -> bool:
        return bool(self._events[event].query())

    def event_synchronize(self, event: int) -> None:
        self._events[event].synchronize()

    def event_destroy(self, event: int) -> None:
        del self._events[event]
