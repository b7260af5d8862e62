"""A CUDA runtime without a GPU, that keeps real bytes and is stricter than the real one.

A :class:`Machine` has GPUs and processes; each :class:`FakeCuda` is the runtime of one process. What is
queued on a stream runs only when somebody asks for it (a synchronise, or an event that is asked for long
enough), so a missing wait shows up as wrong bytes. What the real runtime refuses is refused; what it calls
undefined is refused too and kept in ``Machine.violations``. ``Machine.check`` says what has been left open.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pagerelay.common.errors import CudaError
from pagerelay.common.transport.cuda_ipc import Place
from pagerelay.common.transport.cuda_runtime import DeviceInfo

Bytes = Any


@dataclass(eq=False)
class Allocation:
    owner: FakeCuda
    pointer: int
    data: Bytes
    kind: str = "device"
    opens: dict[int, int] = field(default_factory=dict)
    """pid → how often it is open there."""
    freed: bool = False


@dataclass(eq=False)
class Stream:
    owner: FakeCuda
    ops: list[Any] = field(default_factory=list)
    done: int = 0


@dataclass(eq=False)
class Event:
    owner: FakeCuda
    interprocess: bool
    record: tuple[Stream, int] | None = None
    asked: int = 0
    destroyed: bool = False


@dataclass(frozen=True, slots=True)
class FakePlace(Place):
    machine: Machine | None = None

    def watch(self, pid: int) -> FakeWatch:
        assert self.machine is not None
        if pid not in self.machine.processes or not self.machine.processes[pid].alive:
            raise ProcessLookupError(3, "No such process")
        self.machine.watches += 1
        return FakeWatch(self.machine, pid)


@dataclass(eq=False)
class FakeWatch:
    machine: Machine
    pid: int
    closed: bool = False

    @property
    def gone(self) -> bool:
        assert not self.closed
        return not self.machine.processes[self.pid].alive

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.machine.watches -= 1


class Machine:
    def __init__(self, uuids: Sequence[str] = ("GPU-a", "GPU-b"), gpu_bytes: int = 1 << 30) -> None:
        self.uuids = list(uuids)
        self.gpu_bytes = gpu_bytes
        self.lock = threading.RLock()
        self.processes: dict[int, FakeCuda] = {}
        self.handles: dict[bytes, Allocation | Event] = {}
        self.violations: list[str] = []
        self.watches = 0
        self.lag = 2
        """How often an event that has still to come is asked for before the GPU gets round to it."""
        self.no_peer_access: set[frozenset[str]] = set()
        self.refuse_open: str | None = None
        self.refuse_export: str | None = None
        self._addresses = itertools.count(0x7F00_0000_0000, 1 << 32)
        self._numbers = itertools.count(1)

    def process(self, device: int = 0, **kw: Any) -> FakeCuda:
        made = FakeCuda(self, 1000 + next(self._numbers), device, **kw)
        self.processes[made.pid] = made
        return made

    def address(self) -> int:
        return next(self._addresses)

    def number(self) -> int:
        return next(self._numbers)

    def violated(self, what: str) -> CudaError:
        self.violations.append(what)
        return CudaError(what)

    def check(self) -> None:
        """Nothing was misused, and every process that lives has given back all it had."""
        assert self.violations == []
        left = [text for process in self.processes.values() if process.alive for text in process.left()]
        assert left == []
        assert self.watches == 0, "a peer's process is still watched"

    # ------------------------------------------------------------------ the GPU at work

    def finish(self, stream: Stream, upto: int) -> bool:
        """Runs the stream as far as ``upto``; False if it cannot, because its process's work hangs."""
        while stream.done < upto:
            if stream.owner.hung:
                return False
            op = stream.ops[stream.done]
            if isinstance(op, tuple):
                if not self.finish(*op):
                    return False
            else:
                op()
            stream.done += 1
        return True


class FakeCuda:
    """The runtime of one process on one device. ``calls`` counts what was called."""

    def __init__(
        self,
        machine: Machine,
        pid: int,
        device: int,
        *,
        host: str = "host-1",
        pid_namespace: int = 1,
        visible: Sequence[str] | None = None,
        no_ipc: str | None = None,
    ) -> None:
        self.machine, self.pid = machine, pid
        uuid = machine.uuids[device]
        self.info = DeviceInfo(device, "Fake GPU", uuid, no_ipc)
        self.visible = list(machine.uuids if visible is None else visible)
        self.place = FakePlace(host=host, pid=pid, pid_namespace=pid_namespace, machine=machine)
        self.alive = True
        self.hung = False
        """Nothing queued by this process makes progress."""
        self.calls: dict[str, int] = {}
        self.allocations: dict[int, Allocation] = {}
        self.imports: dict[int, tuple[Allocation, int]] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.copies: list[tuple[int, int, int]] = []
        self.fail: dict[str, str] = {}
        """Call → why it fails from now on."""
        self.torch_bytes = 0
        """Held by torch, beside what is allocated here."""
        self.compute = self.stream_create()
        self.calls.clear()

    def _enter(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if not self.alive:
            raise self.machine.violated(f"{name} in a process that has ended")
        if name in self.fail:
            raise CudaError(f"{name}: {self.fail[name]}")

    def left(self) -> list[str]:
        found = [f"{a.kind} memory of {a.data.size} bytes" for a in self.allocations.values()]
        found += [f"open memory, {count} times" for _, count in self.imports.values()]
        found += ["an event"] * len(self.events)
        return found + ["a stream"] * (len(self.streams) - 1)

    def end(self) -> None:
        """The process is killed: what it had open is closed, what it had queued never comes to pass."""
        self.alive, self.hung = False, True
        for allocation, _ in self.imports.values():
            allocation.opens.pop(self.pid, None)

    # ------------------------------------------------------------------ for tests

    def view(self, pointer: int, num_bytes: int) -> Bytes:
        """Those bytes themselves, as the host never sees them on a real GPU."""
        return self._bytes(pointer, num_bytes)

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queues work on the compute stream."""
        self.streams[self.compute].ops.append(kernel)

    def _bytes(self, pointer: int, num_bytes: int) -> Bytes:
        known = [(base, a) for base, a in self.allocations.items()]
        known += [(base, a) for base, (a, _) in self.imports.items()]
        for base, allocation in known:
            if base <= pointer < base + allocation.data.size:
                if pointer + num_bytes > base + allocation.data.size:
                    raise self.machine.violated("access beyond the end of an allocation")
                if allocation.freed:
                    raise self.machine.violated("access to memory that its owner has freed")
                return allocation.data[pointer - base : pointer - base + num_bytes]
        raise self.machine.violated("access to memory that is not there (any more)")

    # ------------------------------------------------------------------ device

    @property
    def device(self) -> DeviceInfo:
        return self.info

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def torch_peak(self) -> int:
        return self.torch_bytes

    def memory_info(self) -> tuple[int, int]:
        used = sum(
            a.data.size
            for process in self.machine.processes.values()
            for a in process.allocations.values()
            if a.kind == "device" and process.info.uuid == self.info.uuid
        )
        return self.machine.gpu_bytes - used, self.machine.gpu_bytes

    def can_access_peer(self, uuid: str) -> bool | None:
        if uuid not in self.visible:
            return None
        return frozenset((uuid, self.info.uuid)) not in self.machine.no_peer_access

    # ------------------------------------------------------------------ memory

    def malloc(self, num_bytes: int) -> int:
        self._enter("malloc")
        if num_bytes > self.memory_info()[0]:
            raise CudaError("malloc: cudaErrorMemoryAllocation: out of memory")
        pointer = self.machine.address()
        data = np.full(num_bytes, 0xA5, dtype=np.uint8)
        self.allocations[pointer] = Allocation(self, pointer, data)
        return pointer

    def free(self, pointer: int) -> None:
        self._enter("free")
        allocation = self.allocations.get(pointer)
        if allocation is None or allocation.kind != "device":
            raise self.machine.violated("free of what was not allocated")
        if allocation.opens:
            raise self.machine.violated("free of memory that another process has open")
        allocation.freed = True
        del self.allocations[pointer]

    def zero(self, pointer: int, num_bytes: int) -> None:
        self._enter("zero")
        self._bytes(pointer, num_bytes)[:] = 0

    def host_alloc(self, num_bytes: int) -> int:
        self._enter("host_alloc")
        data = np.full(num_bytes, 0x5A, dtype=np.uint8)
        self.allocations[data.ctypes.data] = Allocation(self, data.ctypes.data, data, "host")
        return int(data.ctypes.data)

    def host_free(self, pointer: int) -> None:
        self._enter("host_free")
        allocation = self.allocations.pop(pointer, None)
        if allocation is None or allocation.kind != "host":
            raise self.machine.violated("host_free of what was not allocated")

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        self._enter("tensor")
        return torch.from_numpy(self._bytes(pointer, num_bytes))

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._enter("copy_async")
        with self.machine.lock:
            self._bytes(target, num_bytes), self._bytes(source, num_bytes)
            base = next((b for b, (a, _) in self.imports.items() if b <= target < b + a.data.size), None)
            if base is not None:
                raise self.machine.violated("a peer's pool is written to")

            def copy() -> None:
                self._bytes(target, num_bytes)[:] = self._bytes(source, num_bytes)

            self._stream(stream).ops.append(copy)
            self.copies.append((target, source, num_bytes))

    def copy_batch_async(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        self._enter("copy_batch_async")
        for target, source, num_bytes in copies:
            self.copy_async(target, source, num_bytes, stream)

    # ------------------------------------------------------------------ other processes

    def ipc_export(self, pointer: int) -> bytes:
        self._enter("ipc_export")
        allocation = self.allocations.get(pointer)
        if self.machine.refuse_export or allocation is None or allocation.kind != "device":
            why = self.machine.refuse_export or "cudaErrorInvalidValue: invalid argument"
            raise CudaError(f"ipc_export: {why}")
        return self._handle(allocation)

    def _handle(self, what: Allocation | Event) -> bytes:
        for handle, known in self.machine.handles.items():
            if known is what:
                return handle
        handle = f"handle-{self.machine.number()}".encode().ljust(64, b"\0")
        self.machine.handles[handle] = what
        return handle

    def ipc_open(self, handle: bytes) -> int:
        self._enter("ipc_open")
        allocation = self.machine.handles.get(handle)
        if self.machine.refuse_open:
            raise CudaError(f"ipc_open: {self.machine.refuse_open}")
        if not isinstance(allocation, Allocation) or allocation.freed or not allocation.owner.alive:
            raise CudaError("ipc_open: cudaErrorInvalidValue: invalid argument")
        if allocation.owner is self:
            raise CudaError("ipc_open: cudaErrorDeviceUninitialized: invalid device context")
        for base, (known, count) in self.imports.items():
            if known is allocation:
                self.imports[base] = known, count + 1
                allocation.opens[self.pid] += 1
                return base
        base = self.machine.address()
        self.imports[base] = allocation, 1
        allocation.opens[self.pid] = 1
        return base

    def ipc_close(self, pointer: int) -> None:
        self._enter("ipc_close")
        if pointer not in self.imports:
            raise self.machine.violated("ipc_close of what is not open")
        allocation, count = self.imports[pointer]
        allocation.opens[self.pid] = count - 1
        if count > 1:
            self.imports[pointer] = allocation, count - 1
        else:
            del self.imports[pointer]
            del allocation.opens[self.pid]

    # ------------------------------------------------------------------ order

    def _stream(self, stream: int) -> Stream:
        if stream not in self.streams:
            raise self.machine.violated("a stream that is not there (any more)")
        return self.streams[stream]

    def _event(self, event: int) -> Event:
        if event not in self.events:
            raise self.machine.violated("an event that is not there (any more)")
        if self.events[event].destroyed and self.events[event].owner.alive:
            raise self.machine.violated("an event that its owner has destroyed")
        return self.events[event]

    def stream_create(self) -> int:
        self._enter("stream_create")
        number = self.machine.number()
        self.streams[number] = Stream(self)
        return number

    def stream_destroy(self, stream: int) -> None:
        self._enter("stream_destroy")
        if self._stream(stream).done < len(self._stream(stream).ops):
            raise self.machine.violated("a stream is destroyed while work is queued on it")
        del self.streams[stream]

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._enter("stream_wait_event")
        record = self._event(event).record
        if record is not None:
            self._stream(stream).ops.append(record)

    def stream_synchronize(self, stream: int) -> None:
        self._enter("stream_synchronize")
        with self.machine.lock:
            made = self._stream(stream)
            if not self.machine.finish(made, len(made.ops)):
                raise self.machine.violated("this stream would be waited for for ever")

    def compute_stream(self) -> int:
        return self.compute

    def event_create(self, *, interprocess: bool = False) -> int:
        self._enter("event_create")
        number = self.machine.number()
        self.events[number] = Event(self, interprocess)
        return number

    def event_record(self, event: int, stream: int) -> None:
        self._enter("event_record")
        with self.machine.lock:
            made, on = self._event(event), self._stream(stream)
            made.record, made.asked = (on, len(on.ops)), 0

    def event_query(self, event: int) -> bool:
        self._enter("event_query")
        with self.machine.lock:
            made = self._event(event)
            if made.record is None or made.record[0].done >= made.record[1]:
                return True
            made.asked += 1
            return made.asked > self.machine.lag and self.machine.finish(*made.record)

    def event_synchronize(self, event: int) -> None:
        self._enter("event_synchronize")
        with self.machine.lock:
            record = self._event(event).record
            if record is not None and not self.machine.finish(*record):
                raise self.machine.violated("this event would be waited for for ever")

    def event_destroy(self, event: int) -> None:
        self._enter("event_destroy")
        if event not in self.events:
            raise self.machine.violated("event_destroy of what is not there")
        made = self.events.pop(event)
        if made.owner is self:
            made.destroyed = True

    def ipc_export_event(self, event: int) -> bytes:
        self._enter("ipc_export_event")
        if not self._event(event).interprocess:
            raise CudaError("ipc_export_event: cudaErrorInvalidResourceHandle: not an interprocess event")
        return self._handle(self._event(event))

    def ipc_open_event(self, handle: bytes) -> int:
        self._enter("ipc_open_event")
        event = self.machine.handles.get(handle)
        if not isinstance(event, Event) or event.destroyed or event.owner is self:
            raise CudaError("ipc_open_event: cudaErrorInvalidResourceHandle: invalid resource handle")
        number = self.machine.number()
        self.events[number] = event
        return number
