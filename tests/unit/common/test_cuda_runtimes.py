"""The two layers over the real CUDA, on stand-ins for cupy and torch.cuda: what they ask for, and how they
fail. That a GPU does what it is asked can only be seen on one."""

from __future__ import annotations

import builtins
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagerelay.common.errors import CudaError, StartupError
from pagerelay.common.transport import cupy_runtime
from pagerelay.common.transport.cupy_runtime import CupyRuntime, open_runtime
from pagerelay.common.transport.torch_runtime import TorchRuntime, describe


class Refusal(RuntimeError):
    """cupy's CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: no")


class CupyRuntimeModule:
    """``cupy.cuda.runtime``: remembers what it is asked, answers from ``answers``."""

    CUDARuntimeError = Refusal
    memcpyDefault, eventDisableTiming, eventInterprocess, streamNonBlocking = 4, 2, 4, 1
    cudaIpcMemLazyEnablePeerAccess, hostAllocDefault = 1, 0

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            answer = self.answers.get(name, 77)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


GPUS = [
    SimpleNamespace(name="NVIDIA H200", uuid="0011"),
    SimpleNamespace(name="NVIDIA H200", uuid="GPU-2233"),
    SimpleNamespace(name="NVIDIA H200 MIG 1g.18gb", uuid="4455"),
]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: GPUS[index])


@pytest.fixture
def module() -> CupyRuntimeModule:
    return CupyRuntimeModule()


@pytest.fixture
def runtime(module: CupyRuntimeModule) -> CupyRuntime:
    return CupyRuntime(SimpleNamespace(cuda=SimpleNamespace(runtime=module)), 1)


def test_devices() -> None:
    assert [describe(index).uuid for index in range(3)] == ["GPU-0011", "GPU-2233", "GPU-4455"]
    assert [describe(index).no_ipc for index in range(3)] == [None, None, "it is a MIG slice"]


CALLS: list[Any] = [
    ("malloc", (64,), [("malloc", 64)], 77),
    ("free", (1,), [("free", 1)], None),
    ("zero", (1, 64), [("memset", 1, 0, 64), ("streamSynchronize", 0)], None),
    ("host_alloc", (64,), [("hostAlloc", 64, 0)], 77),
    ("host_free", (1,), [("freeHost", 1)], None),
    ("copy_async", (1, 2, 64, 9), [("memcpyAsync", 1, 2, 64, 4, 9)], None),
    (
        "copy_batch_async",
        ([(1, 2, 64), (3, 4, 8)], 9),
        [("memcpyAsync", 1, 2, 64, 4, 9), ("memcpyAsync", 3, 4, 8, 4, 9)],
        None,
    ),
    ("ipc_open", (b"h",), [("ipcOpenMemHandle", b"h", 1)], 77),
    ("ipc_close", (1,), [("ipcCloseMemHandle", 1)], None),
    ("ipc_open_event", (b"h",), [("ipcOpenEventHandle", b"h")], 77),
    ("stream_create", (), [("streamCreateWithFlags", 1)], 77),
    ("stream_destroy", (9,), [("streamDestroy", 9)], None),
    ("stream_wait_event", (9, 5), [("streamWaitEvent", 9, 5)], None),
    ("stream_synchronize", (9,), [("streamSynchronize", 9)], None),
    ("event_create", (), [("eventCreateWithFlags", 2)], 77),
    ("event_record", (5, 9), [("eventRecord", 5, 9)], None),
    ("event_synchronize", (5,), [("eventSynchronize", 5)], None),
    ("event_destroy", (5,), [("eventDestroy", 5)], None),
]


@pytest.mark.parametrize(("call", "arguments", "asked", "answer"), CALLS, ids=[c[0] for c in CALLS])
def test_each_call_is_made_with_its_device_current(
    runtime: CupyRuntime, module: CupyRuntimeModule, call: str, arguments: Any, asked: Any, answer: Any
) -> None:
    assert getattr(runtime, call)(*arguments) == answer
    assert [one for one in module.asked if one[0] != "setDevice"] == asked
    assert module.asked[::2] == [("setDevice", 1)] * len(asked)


def test_handles_are_bytes_and_events_for_other_processes_have_both_flags(
    runtime: CupyRuntime, module: CupyRuntimeModule
) -> None:
    module.answers = {"ipcGetMemHandle": b"m" * 64, "ipcGetEventHandle": b"e" * 64, "memGetInfo": (5, 9)}
    assert runtime.ipc_export(1) == b"m" * 64
    assert runtime.ipc_export_event(5) == b"e" * 64
    assert runtime.memory_info() == (5, 9)
    runtime.event_create(interprocess=True)
    assert module.asked[-1] == ("eventCreateWithFlags", 2 | 4)


@pytest.mark.parametrize("call", [c[:2] for c in CALLS], ids=lambda call: call[0])
def test_a_refusal_names_the_call(runtime: CupyRuntime, module: CupyRuntimeModule, call: Any) -> None:
    module.answers["setDevice"] = Refusal(101)
    with pytest.raises(CudaError, match=r"^[a-z]\w+: cudaError101"):
        getattr(runtime, call[0])(*call[1])


def test_an_event_is_asked_by_its_status(runtime: CupyRuntime, module: CupyRuntimeModule) -> None:
    """cupy returns the status here, where every other call raises."""
    for status, answer in ((0, True), (600, False)):
        module.answers["eventQuery"] = status
        assert runtime.event_query(5) is answer
    module.answers["eventQuery"] = 700
    with pytest.raises(CudaError, match="eventQuery: cudaError700"):
        runtime.event_query(5)


def test_peers_are_found_by_uuid(runtime: CupyRuntime, module: CupyRuntimeModule) -> None:
    assert runtime.can_access_peer("GPU-2233") is True
    assert runtime.can_access_peer("GPU-9999") is None
    assert module.asked == []
    module.answers["deviceCanAccessPeer"] = 0
    assert runtime.can_access_peer("GPU-0011") is False
    assert module.asked[-1] == ("deviceCanAccessPeer", 1, 0)


# ------------------------------------------------------------------ opening


def test_without_a_gpu_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"cuda:3, and there are 3 GPUs here"):
        open_runtime(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, reason in ((None, "built without CUDA"), ("13.0", "torch finds no GPU")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(StartupError, match=reason):
            open_runtime(0)


def test_without_cupy_torch_serves_and_knows_why_there_is_no_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **kw: Any) -> Any:
        if name == "cupy":
            raise ImportError("No module named 'cupy'")
        return real(name, *rest, **kw)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    opened = open_runtime(0)
    assert isinstance(opened, TorchRuntime)
    assert opened.device.no_ipc is not None
    assert "pip install 'pagerelay[cuda]'" in opened.device.no_ipc


def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, module: CupyRuntimeModule) -> None:
    module.answers["memGetInfo"] = Refusal(46)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=module))
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=r"cuda:1, which cannot be used: cudaError46"):
        open_runtime(1)
    del module.answers["memGetInfo"]
    assert isinstance(open_runtime(1), CupyRuntime)
    assert cupy_runtime.__name__.endswith("cupy_runtime")


# ------------------------------------------------------------------ torch's own


class TorchStream:
    def __init__(self, *_: Any) -> None:
        self.asked: list[Any] = []

    def __enter__(self) -> None:
        self.asked.append("entered")

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def wait_event(self, event: Any) -> None:
        self.asked.append(event)


class TorchEvent:
    def __init__(self) -> None:
        self.on: Any = None

    def record(self, stream: Any) -> None:
        self.on = stream

    def query(self) -> bool:
        return self.on is not None

    def synchronize(self) -> None:
        pass


def test_torchs_own_runtime_moves_bytes_and_gives_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    current = TorchStream()
    monkeypatch.setattr(torch.cuda, "Stream", TorchStream)
    monkeypatch.setattr(torch.cuda, "Event", TorchEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    runtime = TorchRuntime(0, "cupy is not installed", place="cpu")
    pool, host, stream = runtime.malloc(64), runtime.host_alloc(16), runtime.stream_create()
    runtime.zero(pool, 64)
    assert current.asked == ["synchronize"]
    runtime.tensor(host, 16).fill_(3)
    runtime.copy_batch_async([(pool + 8, host, 16), (pool + 40, host + 8, 4)], stream)
    moved = runtime.tensor(pool, 64)
    assert moved.tolist() == [0] * 8 + [3] * 16 + [0] * 16 + [3] * 4 + [0] * 20
    for pointer, size in ((pool + 60, 5), (pool - 1, 1), (1, 1)):
        with pytest.raises(CudaError, match="outside"):
            runtime.tensor(pointer, size)
    event = runtime.event_create(interprocess=True)
    assert not runtime.event_query(event)
    runtime.event_record(event, runtime.compute_stream())
    assert runtime._events[event].on is current
    runtime.event_record(event, stream)
    assert runtime._events[event].on is runtime._streams[stream]
    runtime.stream_wait_event(stream, event)
    assert runtime._streams[stream].asked[-1] is runtime._events[event]
    for call in (runtime.ipc_export, runtime.ipc_close, runtime.ipc_export_event):
        with pytest.raises(CudaError, match="cupy is not installed"):
            call(1)
    for open_ in (runtime.ipc_open, runtime.ipc_open_event):
        with pytest.raises(CudaError, match="cupy is not installed"):
            open_(b"")
    runtime.free(pool)
    runtime.host_free(host)
    runtime.event_destroy(event)
    runtime.stream_destroy(stream)
    assert (runtime._memory, runtime._events, runtime._streams) == ({}, {}, {})
