"""What is installed, and what this device can do at best."""

from __future__ import annotations

import importlib
import time

import torch

from pagerelay.bench.gpu.bench import Bench, copy_gb_s, matmul_tflop_s
from pagerelay.common.transport.cupy_runtime import open_runtime
from pagerelay.kernels.triton.launch import INTERPRETED
from pagerelay.kernels.triton.ops import TritonOps


def versions(bench: Bench) -> None:
    for name in ("torch", "triton", "numpy", "transformers", "cupy", "zmq", "msgspec"):
        began = time.perf_counter()
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            bench.skip(name, f"cannot be imported: {error}")
            continue
        bench.figure(name, str(module.__version__), note=f"import {time.perf_counter() - began:.1f} s")
    bench.figure("CUDA of torch", torch.version.cuda or "none")
    bench.check("kernels run as they will in service", bench.dry == INTERPRETED, "TRITON_INTERPRET")
    if bench.dry:
        bench.skip("device", "dry run on the CPU")
        return
    cuda = open_runtime(bench.device.index or 0)
    major, minor = torch.cuda.get_device_capability(bench.device)
    free, total = cuda.memory_info()
    bench.figure("device", cuda.device.name, note=f"{cuda.device.uuid}, sm_{major}{minor}")
    bench.figure("driver", str(getattr(torch.cuda, "driver_version", lambda: None)() or "unknown"))
    bench.figure("memory free", free / 2**30, "GiB", f"of {total / 2**30:.1f}")
    bench.check("sm_80 or newer", major >= 8)
    bench.check(
        "memory can be shared between processes", cuda.device.no_ipc is None, cuda.device.no_ipc or ""
    )


def ceilings(bench: Bench) -> None:
    bench.figure("device copy", copy_gb_s(bench, bench.sized(4 << 30, 1 << 20)), "GB/s", "read + write")
    size, dtype = bench.sized((8192, torch.bfloat16), (64, torch.float32))
    bench.figure(f"matmul {size}", matmul_tflop_s(bench, size, dtype), "TFLOP/s", str(dtype))
    num_bytes = bench.sized(1 << 28, 1 << 16)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not bench.dry)
    for name, target, source in (("pinned to device", there, here), ("device to pinned", here, there)):
        spent = bench.milliseconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), 10)  # type: ignore[misc]
        bench.figure(name, num_bytes / spent / 1e6, "GB/s")
    ops, x = TritonOps(), torch.ones(1, 512, device=bench.device)
    weight = torch.ones(512, device=bench.device)
    bench.figure("Triton launch", bench.host_us(lambda: ops.rms_norm(x, weight, 1e-6)), "us", "on the host")
    if bench.dry:
        bench.skip("graph replay", "dry run on the CPU")
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            ops.rms_norm(x, weight, 1e-6)
    bench.figure("graph of 100 launches", bench.host_us(graph.replay), "us", "on the host")
    bench.figure("graph of 100 launches, device", 1000 * bench.milliseconds(graph.replay), "us")
