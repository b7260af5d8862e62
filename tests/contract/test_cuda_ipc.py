"""What CUDA IPC promises on top of the contract: order, one open a peer, the owner's end, and reasons.

The machine is fake, the bytes are real; after each test the fixture ``machine`` checks that opens equal
closes, that nothing allocated is left, and that nothing was done that CUDA calls undefined.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, Machine
from msgspec import structs
from transports import HandLink, Pair

from pagerelay.common.errors import CudaError, StartupError, TransferError
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend, Place, ProcessWatch
from pagerelay.common.transport.cuda_pool import NUM_MARKS, CudaPool
from pagerelay.common.transport.cuda_runtime import runs
from pagerelay.common.wire.pools import PoolAddress

MakePair = Callable[..., Any]


@pytest.fixture(params=["cuda_ipc", "cuda_ipc-peer"])
async def pair(request: pytest.FixtureRequest, make_pair: MakePair) -> Pair:
    made: Pair = await make_pair(request.param)
    return made


def queue_writes(pair: Pair, value: int, *blocks: int) -> int:
    """The owner's GPU will fill these blocks; returns the mark after which they are final."""
    assert pair.owner_cuda is not None

    def kernel() -> None:
        pair.source[list(blocks)] = value

    pair.owner_cuda.launch(kernel)
    mark: int = pair.pool.mark_written()
    return mark


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


# ------------------------------------------------------------------ order


async def test_blocks_are_copied_as_they_are_once_they_are_written(pair: Pair) -> None:
    mark = queue_writes(pair, 9, 2, 3)
    assert not (pair.source[2] == 9).all(), "the kernel has not run yet"
    await pair.fetch([2, 3], [0, 1], written=mark)
    assert (pair.target[[0, 1]] == 9).all()


async def test_without_its_mark_a_fetch_would_be_too_early(pair: Pair) -> None:
    """The fake tells the difference: the test above passes because the fetch waits."""
    queue_writes(pair, 9, 2)
    await pair.fetch([2], [0])
    assert not (pair.target[0] == 9).any()
    pair.owner_cuda.stream_synchronize(pair.owner_cuda.compute)


async def test_a_mark_that_was_used_again_means_a_later_step_never_an_earlier_one(pair: Pair) -> None:
    marks = [queue_writes(pair, 10 + number, number) for number in range(NUM_MARKS + 2)]
    assert marks == [*range(NUM_MARKS), 0, 1]
    await pair.fetch([0], [0], written=marks[0])
    assert (pair.target[0] == 10).all()


async def test_the_host_is_never_further_ahead_than_there_are_marks(pair: Pair) -> None:
    for number in range(NUM_MARKS + 1):
        queue_writes(pair, 10 + number, number)
    assert (pair.source[0] == 10).all(), "a mark was recorded anew before its step was done"
    assert not (pair.source[1] == 11).all()


@pytest.mark.parametrize("mark", [-1, NUM_MARKS])
async def test_a_mark_that_was_not_exported_is_refused(pair: Pair, mark: int) -> None:
    with pytest.raises(TransferError, match="an event that it has not exported"):
        await pair.fetch([0], [0], written=mark)


@pytest.mark.parametrize("way", ["cuda_ipc", "tcp-gpu-by-socket"])
async def test_blocks_that_are_given_back_are_written_after_their_last_use(
    make_pair: MakePair, way: str
) -> None:
    """A step that the host did not wait for still writes a block that has gone back, and to a fetch."""
    pair = await make_pair(way)
    own = pair.into.memory
    pair.reader_cuda.launch(lambda: pair.target.__setitem__([0, 1], 5))
    own.settle(own.mark_written())
    await pair.fetch([2, 3], [0, 1])
    pair.reader_cuda.stream_synchronize(pair.reader_cuda.compute)
    assert (pair.target[[0, 1]] == pair.source[[2, 3]]).all()


async def test_a_fetch_does_not_wait_for_the_step_that_runs(pair: Pair) -> None:
    own = pair.into.memory
    own.settle(own.mark_written())
    pair.reader_cuda.launch(lambda: pair.target.__setitem__(7, 5))
    own.mark_written()
    await pair.fetch([2], [0])
    assert (pair.target[0] == pair.source[2]).all()
    assert not (pair.target[7] == 5).any(), "it has not even run"


async def test_no_stream_of_the_reader_waits_for_the_owner(pair: Pair) -> None:
    await pair.fetch([0], [0], written=queue_writes(pair, 9, 0))
    assert "stream_wait_event" not in pair.reader_cuda.calls
    assert pair.reader_cuda.calls["stream_synchronize"] == 2, "its own nonce's and the probe's, no other"


async def test_a_chunk_is_one_batch_of_as_few_copies_as_its_runs(pair: Pair) -> None:
    await pair.fetch([0], [0])
    pair.reader_cuda.copies.clear()
    before = pair.reader_cuda.calls["copy_batch_async"]
    await pair.fetch([1, 2, 3, 6, 5], [4, 5, 6, 7, 0])
    assert pair.reader_cuda.calls["copy_batch_async"] == before + 1
    assert [num_bytes for _, _, num_bytes in pair.reader_cuda.copies] == [3 * 64, 64, 64]
    assert (pair.target[[4, 5, 6, 7, 0]] == pair.source[[1, 2, 3, 6, 5]]).all()


@pytest.mark.parametrize(
    ("sources", "targets", "merged"),
    [
        ([], [], []),
        ([5], [2], [(5, 2, 1)]),
        ([1, 2, 3], [7, 8, 9], [(1, 7, 3)]),
        ([1, 2, 3], [7, 9, 10], [(1, 7, 1), (2, 9, 2)]),
        ([1, 3, 4], [7, 8, 9], [(1, 7, 1), (3, 8, 2)]),
        ([3, 2, 1], [3, 2, 1], [(3, 3, 1), (2, 2, 1), (1, 1, 1)]),
        ([4, 4], [1, 2], [(4, 1, 1), (4, 2, 1)]),
    ],
)
def test_runs(sources: list[int], targets: list[int], merged: list[tuple[int, int, int]]) -> None:
    assert runs(sources, targets) == merged


# ------------------------------------------------------------------ opens and closes


async def test_a_peer_is_opened_once_for_its_life(pair: Pair) -> None:
    for _ in range(3):
        await asyncio.gather(*(pair.fetch([n], [n]) for n in range(4)))
    cuda = pair.reader_cuda
    assert cuda.calls["ipc_open"] == 1
    assert cuda.calls["ipc_open_event"] == NUM_MARKS
    assert len(cuda.events) == 2 * NUM_MARKS, "an event of a fetch is left"


async def test_a_pool_that_is_taken_back_is_closed_when_its_copies_have_ended(pair: Pair) -> None:
    machine = pair.reader_cuda.machine
    machine.lag = 10**9
    fetching = asyncio.create_task(pair.fetch([0, 1], [0, 1]))
    await until(lambda: pair.reader_cuda.calls.get("copy_batch_async") == 1)
    detaching = asyncio.create_task(pair.reader.detach(pair.peer.pool))
    done, _ = await asyncio.wait([detaching], timeout=0.02)
    assert not done
    assert pair.reader_cuda.imports
    machine.lag = 0
    assert await fetching == 2 * 64
    await detaching
    assert (pair.target[[0, 1]] == pair.source[[0, 1]]).all()
    assert not pair.reader_cuda.imports
    assert not pair.reader.holds(pair.peer.pool)
    with pytest.raises(TransferError, match="taken its pool back"):
        await pair.fetch([0], [0])
    await pair.reader.detach(pair.peer.pool)  # may be repeated


async def test_memory_that_somebody_has_open_is_left_to_the_process(pair: Pair) -> None:
    await pair.fetch([0], [0])
    pair.owner.importers.add(b"reader")
    pair.owner.close()  # the fake would object to a free
    assert "free" not in pair.owner_cuda.calls
    pair.owner_cuda.end()
    pair.reader.detach_gone()
    assert not pair.reader_cuda.imports


# ------------------------------------------------------------------ the owner's end


async def test_after_the_owners_death_no_copy_is_made_and_its_pool_is_closed(pair: Pair) -> None:
    await pair.fetch([0], [0])
    pair.owner_cuda.end()
    copies = pair.reader_cuda.calls["copy_batch_async"]
    with pytest.raises(TransferError, match="has ended"):
        await pair.fetch([1], [1])
    assert pair.reader_cuda.calls["copy_batch_async"] == copies
    assert pair.reader.holds(pair.peer.pool)
    pair.reader.detach_gone()
    assert not pair.reader.holds(pair.peer.pool)
    with pytest.raises(TransferError, match="cannot be watched"):
        await pair.fetch([1], [1])


async def test_an_owner_that_dies_before_it_has_written_fails_the_fetch_and_frees_the_targets(
    pair: Pair,
) -> None:
    pair.target[:] = 7
    pair.owner_cuda.hung = True
    fetching = asyncio.create_task(pair.fetch([2], [0], written=queue_writes(pair, 9, 2)))
    await until(lambda: pair.reader_cuda.calls.get("event_query", 0) > 30)
    pair.reader.detach_gone()
    assert pair.reader.holds(pair.peer.pool), "it lives"
    pair.owner_cuda.end()
    pair.reader.detach_gone()
    with pytest.raises(TransferError, match="has ended"):
        await fetching
    assert "copy_batch_async" not in pair.reader_cuda.calls
    assert (pair.target == 7).all()
    pair.reader.detach_gone()


async def test_a_fetch_cancelled_while_it_waits_for_the_owner_leaves_at_once(pair: Pair) -> None:
    pair.owner_cuda.hung = True
    fetching = asyncio.create_task(pair.fetch([2], [0], written=queue_writes(pair, 9, 2)))
    await until(lambda: pair.reader_cuda.calls.get("event_query", 0) > 5)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert "copy_batch_async" not in pair.reader_cuda.calls
    pair.owner_cuda.end()
    pair.reader.detach_gone()


async def test_a_fetch_cancelled_while_it_copies_ends_when_the_copy_has_stopped(pair: Pair) -> None:
    machine = pair.reader_cuda.machine
    machine.lag = 10**9
    fetching = asyncio.create_task(pair.fetch([1, 2], [1, 2]))
    await until(lambda: pair.reader_cuda.calls.get("copy_batch_async") == 1)
    for _ in range(3):  # however often it is cancelled
        fetching.cancel()
        done, _ = await asyncio.wait([fetching], timeout=0.02)
        assert not done
    machine.lag = 0
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert (pair.target[[1, 2]] == pair.source[[1, 2]]).all()


async def test_a_copy_that_cuda_refuses_fails_the_fetch_when_the_rest_has_stopped(pair: Pair) -> None:
    await pair.fetch([0], [0])
    pair.reader_cuda.fail["copy_batch_async"] = "cudaErrorIllegalAddress"
    with pytest.raises(TransferError, match="cudaErrorIllegalAddress"):
        await pair.fetch([1], [1])
    pair.reader_cuda.fail.clear()
    assert await pair.fetch([1], [1]) == 64


def test_a_process_is_watched_until_it_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = ProcessWatch(child.pid)
    assert not watch.gone
    child.communicate(timeout=10)
    assert watch.gone
    watch.close()
    with pytest.raises(ProcessLookupError):
        ProcessWatch(child.pid)
    here = Place()
    assert here.pid == os.getpid()
    assert here.pid_namespace > 0
    mine = here.watch(here.pid)
    assert not mine.gone
    mine.close()


# ------------------------------------------------------------------ where it cannot work


def export_of(pool: PoolAddress, **changes: Any) -> PoolAddress:
    assert pool.cuda is not None
    return structs.replace(pool, cuda=structs.replace(pool.cuda, **changes))


REFUSED: list[Any] = [
    pytest.param(lambda p: structs.replace(p, kind="shm", cuda=None), "not in GPU memory", id="kind"),
    pytest.param(lambda p: structs.replace(p, cuda=None), "not in GPU memory", id="no-export"),
    pytest.param(lambda p: structs.replace(p, host_id="host-2"), "another host", id="host"),
    pytest.param(lambda p: export_of(p, pid_namespace=2), "another PID namespace.*pid: host", id="namespace"),
    pytest.param(lambda p: export_of(p, pid=1), "cannot be watched: No such process", id="pid"),
    pytest.param(lambda p: export_of(p, device_uuid="GPU-c"), "not visible.*all GPUs", id="invisible"),
    pytest.param(lambda p: export_of(p, memory=b"x" * 63), "malformed", id="handle"),
    pytest.param(lambda p: export_of(p, events=(b"x",)), "malformed", id="event"),
    pytest.param(lambda p: structs.replace(p, num_blocks=9), "smaller than announced", id="size"),
    pytest.param(lambda p: export_of(p, memory=b"x" * 64), "cannot be opened.*namespace", id="unknown"),
    pytest.param(lambda p: structs.replace(p, nonce="0" * 32), "not the peer's pool", id="nonce"),
    pytest.param(lambda p: export_of(p, events=(b"x" * 64,)), "ipc_open_event", id="no-such-event"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
async def test_what_cannot_be_reached_is_refused_with_its_reason_and_nothing_stays_open(
    pair: Pair, change: Callable[[PoolAddress], PoolAddress], reason: str
) -> None:
    good, before = pair.peer.pool, pair.reader_cuda.left()
    with pytest.raises(TransferError, match=reason):
        pair.reader.attach(change(good))
    opened = [what for what in pair.reader_cuda.left() if what != "a stream"]
    assert opened == before
    pair.reader.attach(good)  # a refusal does not stick
    assert await pair.fetch([0], [0]) == 64


async def test_namespaces_that_cuda_does_not_cross(pair: Pair) -> None:
    machine = pair.reader_cuda.machine
    machine.refuse_open = "cudaErrorDeviceUninitialized: invalid device context"
    with pytest.raises(TransferError, match=r"invalid device context\): workers in containers need"):
        pair.reader.attach(pair.peer.pool)
    machine.refuse_open = None


async def test_gpus_without_peer_access(make_pair: MakePair) -> None:
    pair = await make_pair("cuda_ipc-peer")
    pair.reader_cuda.machine.no_peer_access.add(frozenset(("GPU-a", "GPU-b")))
    with pytest.raises(TransferError, match="no peer access"):
        pair.reader.attach(pair.peer.pool)


async def test_a_process_does_not_open_its_own_pool(pair: Pair) -> None:
    with pytest.raises(TransferError, match="this process's own"):
        pair.owner.attach(pair.peer.pool)


async def test_the_hosts_memory_is_not_a_target(pair: Pair) -> None:
    pair.into = np.zeros((8, 64), dtype=np.uint8)
    with pytest.raises(TransferError, match="GPU memory alone"):
        await pair.fetch([0], [0])


def test_a_slice_of_a_gpu_exports_nothing_and_reads_nothing(machine: Machine) -> None:
    slice_ = machine.process(no_ipc="it is a MIG slice")
    backend = CudaIpcBackend(slice_, slice_.place)
    with pytest.raises(CudaError, match="MIG"):
        backend.allocate(4, 64)
    with pytest.raises(TransferError, match="MIG"):
        backend.attach(PoolAddress(kind="cuda_ipc", num_blocks=4, block_bytes=64))
    with pytest.raises(TransferError, match="no pool"):
        backend.address()
    backend.close()
    backend.close()


def test_memory_that_cannot_be_exported_is_given_back(machine: Machine) -> None:
    cuda = machine.process()
    machine.refuse_export = "cudaErrorInvalidValue: invalid argument"
    backend = CudaIpcBackend(cuda, cuda.place)
    with pytest.raises(CudaError, match=r"refuses to export.*invalid argument.*expandable"):
        backend.allocate(4, 64)
    assert cuda.left() == []
    backend.close()


def test_too_little_gpu_memory_says_need_have_and_remedy(machine: Machine) -> None:
    cuda = machine.process()
    with pytest.raises(
        StartupError, match=r"needs 2048 MiB of GPU memory.*1024 of 1024 MiB free.*kv_memory_mib"
    ):
        CudaPool(cuda, 2048, 1 << 20)


@pytest.mark.parametrize("call", ["zero", "host_alloc", "stream_create", "copy_async", "event_create"])
def test_a_pool_that_fails_half_made_leaves_nothing(machine: Machine, call: str) -> None:
    cuda = machine.process()
    cuda.fail[call] = "cudaErrorUnknown"
    with pytest.raises(CudaError, match="cudaErrorUnknown"):
        CudaPool(cuda, 4, 64)


# ------------------------------------------------------------------ over TCP instead


async def test_frames_are_as_the_step_applied_last_leaves_them(make_pair: MakePair) -> None:
    """A peer that cannot map the pool reads it over TCP: the same backend sends it."""
    pair = await make_pair("cuda_ipc")
    pair.pool.settle(queue_writes(pair, 9, 2))
    frames = await pair.owner.frames(pair.peer.blocks, [2, 0])
    assert [frame.tobytes() for frame in frames] == [bytes([9]) * 64, pair.source[0].tobytes()]
    assert isinstance(pair.peer, HandLink)


async def test_staging_reuses_its_few_buffers(make_pair: MakePair) -> None:
    pair = await make_pair("tcp-gpu-by-socket", blocks=40, window=16)
    for _ in range(2):
        await pair.fetch(list(range(40)), list(range(40))[::-1])
        assert (pair.target == pair.source[::-1]).all()
    for cuda in (pair.owner_cuda, pair.reader_cuda):
        assert cuda.calls["host_alloc"] == 1 + 3, "the nonce's, and the ring's"


# ------------------------------------------------------------------ the fake itself


def test_the_fake_refuses_what_cuda_refuses() -> None:
    machine = Machine()
    owner, reader = machine.process(), machine.process()
    pointer = owner.malloc(128)
    handle = owner.ipc_export(pointer)
    assert owner.ipc_export(pointer) == handle
    refused: list[tuple[FakeCuda, str, tuple[Any, ...]]] = [
        (owner, "ipc_open", (handle,)),
        (owner, "ipc_export", (pointer + 64,)),
        (owner, "ipc_export", (12345,)),
        (owner, "ipc_export_event", (owner.event_create(),)),
    ]
    for cuda, call, arguments in refused:
        with pytest.raises(CudaError):
            getattr(cuda, call)(*arguments)
    assert machine.violations == []
    base = reader.ipc_open(handle)
    assert base != pointer
    assert reader.ipc_open(handle) == base
    reader.ipc_close(base)
    stream = reader.stream_create()
    misused: list[tuple[FakeCuda, str, tuple[Any, ...]]] = [
        (owner, "free", (pointer,)),
        (reader, "copy_async", (base, base, 1, stream)),
        (reader, "copy_async", (reader.malloc(8), base + 127, 2, stream)),
    ]
    for cuda, call, arguments in misused:
        with pytest.raises(CudaError):
            getattr(cuda, call)(*arguments)
    assert len(machine.violations) == len(misused)
    reader.ipc_close(base)
    with pytest.raises(CudaError):
        reader.copy_async(base, base, 1, stream)
    with pytest.raises(AssertionError):
        machine.check()


def test_the_fake_runs_what_is_queued_only_when_it_is_waited_for() -> None:
    machine = Machine()
    cuda = machine.process()
    one, two = cuda.malloc(4), cuda.malloc(4)
    cuda.zero(one, 4)
    stream, event = cuda.stream_create(), cuda.event_create()
    cuda.launch(lambda: cuda.view(one, 4).fill(3))
    cuda.event_record(event, cuda.compute)
    cuda.stream_wait_event(stream, event)
    cuda.copy_async(two, one, 4, stream)
    assert not cuda.view(one, 4).any()
    assert [cuda.event_query(event) for _ in range(machine.lag)] == [False] * machine.lag
    assert not cuda.view(one, 4).any()
    cuda.stream_synchronize(stream)  # and first what it waits for
    assert (cuda.view(two, 4) == 3).all()
    assert cuda.event_query(event)
