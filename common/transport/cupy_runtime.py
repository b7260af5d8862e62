"""The real :class:`CudaRuntime`: a thin layer over ``cupy.cuda.runtime``, and the only module that imports
cupy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from pagerelay.common.errors import CudaError, StartupError
from pagerelay.common.transport.cuda_runtime import CudaRuntime, DeviceInfo
from pagerelay.common.transport.torch_runtime import TorchRuntime, describe

_SUCCESS, _NOT_READY = 0, 600  # cudaError_t: cupy's eventQuery returns it, where the others raise


def open_runtime(index: int) -> CudaRuntime:
    """The runtime of GPU number ``index`` of those visible here; torch's own, which has no IPC, where cupy is
    missing. Raises :class:`StartupError` saying what is missing."""
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise StartupError(f"engine.device is cuda, and {why}: set engine.device to cpu, or give it one")
    count = torch.cuda.device_count()
    if index >= count:
        raise StartupError(f"engine.device is cuda:{index}, and there are {count} GPUs here, from cuda:0 on")
    try:
        import cupy
    except ImportError as error:
        return TorchRuntime(index, f"cupy is not installed ({error}): pip install 'pagerelay[cuda]'")
    try:
        cupy.cuda.runtime.setDevice(index)
        cupy.cuda.runtime.memGetInfo()  # makes the context, so that what cannot work fails here
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise StartupError(f"engine.device is cuda:{index}, which cannot be used: {error}") from error
    return CupyRuntime(cupy, index)


class CupyRuntime:
    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._index = index
        self._info = describe(index)

    def _call(self, name: str, *arguments: Any) -> Any:
        """One call with our device current, which is a setting of each thread."""
        try:
            self._runtime.setDevice(self._index)
            return getattr(self._runtime, name)(*arguments)
        except self._runtime.CUDARuntimeError as error:
            raise CudaError(f"{name}: {error}") from error

    @property
    def device(self) -> DeviceInfo:
        return self._info

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def torch_peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._index)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._call("memGetInfo")
        return int(free), int(total)

    def can_access_peer(self, uuid: str) -> bool | None:
        if uuid == self._info.uuid:
            return True
        for index in range(torch.cuda.device_count()):
            if describe(index).uuid == uuid:
                return bool(self._call("deviceCanAccessPeer", self._index, index))
        return None

    # ------------------------------------------------------------------ memory

    def malloc(self, num_bytes: int) -> int:
        return int(self._call("malloc", num_bytes))

    def free(self, pointer: int) -> None:
        self._call("free", pointer)

    def zero(self, pointer: int, num_bytes: int) -> None:
        self._call("memset", pointer, 0, num_bytes)
        self._call("streamSynchronize", 0)  # memset of device memory does not wait

    def host_alloc(self, num_bytes: int) -> int:
        return int(self._call("hostAlloc", num_bytes, self._runtime.hostAllocDefault))

    def host_free(self, pointer: int) -> None:
        self._call("freeHost", pointer)

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        cupy = self._cupy
        with cupy.cuda.Device(self._index):
            memory = cupy.cuda.UnownedMemory(pointer, num_bytes, self, self._index)
            array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        return from_dlpack(array)

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        # "Default" finds out by the addresses where each side lies, another GPU's mapped memory included.
        self._call("memcpyAsync", target, source, num_bytes, self._runtime.memcpyDefault, stream)

    def copy_batch_async(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        for target, source, num_bytes in copies:
            self.copy_async(target, source, num_bytes, stream)

    # ------------------------------------------------------------------ other processes' memory

    def ipc_export(self, pointer: int) -> bytes:
        return bytes(self._call("ipcGetMemHandle", pointer))

    def ipc_open(self, handle: bytes) -> int:
        flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
        return int(self._call("ipcOpenMemHandle", handle, flags))

    def ipc_close(self, pointer: int) -> None:
        self._call("ipcCloseMemHandle", pointer)

    # ------------------------------------------------------------------ order

    def stream_create(self) -> int:
        return int(self._call("streamCreateWithFlags", self._runtime.streamNonBlocking))

    def stream_destroy(self, stream: int) -> None:
        self._call("streamDestroy", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("streamWaitEvent", stream, event)

    def stream_synchronize(self, stream: int) -> None:
        self._call("streamSynchronize", stream)

    def compute_stream(self) -> int:
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def event_create(self, *, interprocess: bool = False) -> int:
        flags = self._runtime.eventDisableTiming
        return int(
            self._call(
                "eventCreateWithFlags", flags | self._runtime.eventInterprocess if interprocess else flags
            )
        )

    def event_record(self, event: int, stream: int) -> None:
        self._call("eventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        status = int(self._call("eventQuery", event))
        if status not in (_SUCCESS, _NOT_READY):
            raise CudaError(f"eventQuery: {self._runtime.CUDARuntimeError(status)}")
        return status == _SUCCESS

    def event_synchronize(self, event: int) -> None:
        self._call("eventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        self._call("eventDestroy", event)

    def ipc_export_event(self, event: int) -> bytes:
        return bytes(self._call("ipcGetEventHandle", event))

    def ipc_open_event(self, handle: bytes) -> int:
        return int(self._call("ipcOpenEventHandle", handle))
