"""Blocks out of another process's pool: how fast, in which order, and what happens when it dies.

The pool has small blocks; larger ones are played by runs of adjacent ids, which become one copy each.
"""

from __future__ import annotations

import asyncio
import base64
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from pagerelay.bench.gpu.bench import Bench, copy_gb_s
from pagerelay.bench.gpu.pools import fill_by_seed, make_backend, seen
from pagerelay.common.errors import CudaError, TransferError
from pagerelay.common.segments import sweep_dead_segments
from pagerelay.common.transport.base import DeviceBlocks
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.cupy_runtime import open_runtime
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.kernels.triton.blocks import copy_blocks

KIB, MIB = 1 << 10, 1 << 20
SIZES = [
    *((64 * KIB, 8), (64 * KIB, 64), (64 * KIB, 256), (512 * KIB, 64)),
    *((2 * MIB, 64), (2 * MIB, 256), (8 * MIB, 8), (8 * MIB, 64)),
]
"""Bytes of a block, and blocks."""
WANTED_SHARE = 0.8
"""Of a device copy's speed, for blocks of 2 MiB and more."""


@dataclass(frozen=True)
class Neighbour:
    """The owner's pool; its memory is read, it is never asked."""

    pool: PoolAddress

    async def read(self, lease: int, block_ids: Sequence[int]) -> list[memoryview]:
        raise TransferError("a neighbour's memory needs no messages")


class Owner:
    """The other process."""

    def __init__(self, device: torch.device, num_blocks: int, block_bytes: int) -> None:
        sizes = str(num_blocks), str(block_bytes)
        command = [sys.executable, "-m", "pagerelay.bench.gpu.owner", str(device), *sizes]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own module
        self.pool = msgspec.msgpack.decode(base64.b64decode(self._line()), type=PoolAddress)

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"the other process ended with {self.process.wait()}")
        return line.strip()

    def fill(self, value: int) -> int | None:
        """The mark after which every byte is ``value``."""
        self._send(f"fill {value}\n")
        mark = self._line()
        return int(mark) if mark else None

    def _send(self, line: str) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def end(self, kill: bool = False) -> None:
        if self.process.poll() is None:
            if kill:
                self.process.kill()
            else:
                self._send("end\n")
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def between_processes(bench: Bench) -> None:
    num_blocks, block_bytes = bench.sized((32768, 64 * KIB), (64, 4 * KIB))
    if not bench.dry:
        _own_pool(bench)
    owner = Owner(bench.device, num_blocks, block_bytes)
    backend = make_backend(bench.device)
    try:
        memory: Any = backend.allocate(num_blocks, block_bytes)
        asyncio.run(_read(bench, owner, backend, memory, num_blocks, block_bytes))
    finally:
        owner.end(kill=True)
        backend.close()
        sweep_dead_segments()


def _own_pool(bench: Bench) -> None:
    """The pool's tensor is its memory, and CUDA does not open it a second time here."""
    cuda = open_runtime(bench.device.index or 0)
    backend = CudaIpcBackend(cuda)
    try:
        memory = backend.allocate(4, MIB)
        tensor = memory.tensor()
        tensor[5:9] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
        bench.wait()
        there = cuda.tensor(memory.pointer + 5, 4)
        same = tensor.data_ptr() == memory.pointer and there.tolist() == [1, 2, 3, 4]
        bench.check("the pool's tensor is its memory", same)
        export = backend.address().cuda
        try:
            cuda.ipc_close(cuda.ipc_open(export.memory if export is not None else b""))
            bench.figure("opened by its own process", "allowed", note="the driver did not refuse")
        except CudaError as error:
            bench.figure("opened by its own process", "refused", note=str(error)[:60])
    except CudaError as error:
        bench.check("the pool can be exported", False, str(error)[:100])
    finally:
        backend.close()


async def _read(
    bench: Bench, owner: Owner, backend: Any, memory: Any, num_blocks: int, block_bytes: int
) -> None:
    on_gpu = bench.device.type == "cuda"
    into: Any = DeviceBlocks(memory.pointer, num_blocks, block_bytes, memory) if on_gpu else memory
    if not on_gpu:
        into = memory.reshape(num_blocks, block_bytes)
    peer, content = Neighbour(owner.pool), seen(memory).view(num_blocks, block_bytes)
    expected = torch.empty_like(content)
    fill_by_seed(expected.view(-1))
    began = time.perf_counter()
    first = backend.attach(owner.pool)
    bench.figure("open a pool", 1e6 * (time.perf_counter() - began), "us", "once per peer")
    bench.check("opened once", backend.attach(owner.pool) is first)

    copy = copy_gb_s(bench, bench.sized(1 << 30, 1 << 18))
    bench.figure("device copy", copy, "GB/s", "read + write")
    draw = random.Random(1)  # noqa: S311 - places of blocks
    sizes = bench.sized(SIZES, [(4 * KIB, 8), (16 * KIB, 4)])
    for size, count in sizes:
        bench.go_on()
        run = size // block_bytes
        sources, targets = (
            [first * run + i for first in draw.sample(range(num_blocks // run), count) for i in range(run)]
            for _ in range(2)
        )
        content.zero_()
        bench.wait()
        spent = []
        for _ in range(bench.sized(10, 1)):
            began = time.perf_counter()
            await backend.fetch(peer, 1, sources, into, targets)
            spent.append(time.perf_counter() - began)
        seconds = sorted(spent)[len(spent) // 2]
        reached = 2 * size * count / seconds / 1e9
        name = f"{count} blocks of {size // KIB} KiB"
        bench.figure(name, reached, "GB/s", f"{1e6 * seconds:.0f} us, {reached / copy:.0%} of device copy")
        bench.check(f"{name}, every bit", torch.equal(content[targets], expected[sources]))
        if on_gpu and size >= 2 * MIB and count >= 64:
            bench.check(f"{name} reaches {WANTED_SHARE:.0%} of copy", reached >= WANTED_SHARE * copy)
    if on_gpu:
        _by_kernel(bench, backend, owner.pool, content, copy)
        began = time.perf_counter()
        frames = await backend.frames(into, list(range(bench.sized(1024, 8))))
        seconds = time.perf_counter() - began
        bench.figure("staging for TCP", sum(map(len, frames)) / seconds / 1e9, "GB/s", "device to frames")

    ids = list(range(16))
    for value in (90, 91, 92, 93, 94):  # every mark is used, one a second time
        written = owner.fill(value)
        await backend.fetch(peer, 1, ids, into, ids, written)
        right = bool((content[ids] == value).all())
        bench.check(f"a delayed writer is waited for, mark {written}", right)
    owner.end(kill=True)
    try:
        await backend.fetch(peer, 1, ids, into, ids)
        bench.check("a killed owner is noticed", not on_gpu, "the copy went through")
    except TransferError as error:
        bench.check("a killed owner is noticed", True, str(error)[:60])
    backend.detach_gone()
    content.fill_(5)
    bench.wait()
    bench.check("the reader works on", bool((content[3] == 5).all()))


def _by_kernel(bench: Bench, backend: Any, pool: PoolAddress, content: torch.Tensor, copy: float) -> None:
    """The same bytes by one kernel instead of a copy per run."""
    mapped = backend.attach(pool)
    cuda = open_runtime(bench.device.index or 0)
    theirs = cuda.tensor(mapped.pointer, content.numel()).view_as(content)
    for count in (64, 1024, 16384):
        ids = torch.randperm(content.shape[0], device=bench.device)[:count]
        spent = bench.milliseconds(lambda ids=ids: copy_blocks(theirs, content, ids, ids), 10)  # type: ignore[misc]
        reached = 2 * count * content.shape[1] / spent / 1e6
        name = f"{count} blocks of {content.shape[1] // KIB} KiB by a kernel"
        bench.figure(name, reached, "GB/s", f"{reached / copy:.0%} of device copy")
