"""What every way of moving KV blocks promises, and what shared memory and TCP promise on top."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import Machine
from msgspec import json, structs
from transports import gpus, make_backend, seen

from pagerelay.common import segments
from pagerelay.common.errors import StartupError, TransferError
from pagerelay.common.transport import shm as shm_module
from pagerelay.common.transport.base import Bytes, TransferBackend
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.pools import PoolAddress

SHM = Path("/dev/shm")
MakePair = Callable[..., Any]


# ------------------------------------------------------------------ every way


async def test_bytes_arrive_exactly_and_only_where_they_are_due(pair: Any) -> None:
    pair.target[:] = 7
    assert await pair.fetch([6, 0, 3], [1, 5, 2]) == 3 * 64
    assert (pair.target[[1, 5, 2]] == pair.source[[6, 0, 3]]).all()
    assert (pair.target[[0, 3, 4, 6, 7]] == 7).all()


async def test_the_source_is_left_alone(pair: Any) -> None:
    before = pair.source.copy()
    await pair.fetch([0, 1], [0, 1])
    pair.target[:] = 0
    assert (pair.source == before).all()


async def test_a_fetch_may_be_repeated_and_sees_what_is_there_then(pair: Any) -> None:
    await pair.fetch([2], [2])
    pair.source[2] = 9
    await pair.fetch([2], [2])
    assert (pair.target[2] == 9).all()


async def test_more_blocks_than_any_window(pair: Any) -> None:
    for _ in range(3):
        pair.target[:] = 0
        assert await pair.fetch(list(range(8)), list(range(8))[::-1]) == 8 * 64
        assert (pair.target == pair.source[::-1]).all()


async def test_nothing_to_fetch(pair: Any) -> None:
    pair.target[:] = 7
    assert await pair.fetch([], []) == 0
    assert (pair.target == 7).all()


async def test_fetches_side_by_side(pair: Any) -> None:
    await asyncio.gather(*(pair.fetch([n, 7 - n], [n, 7 - n]) for n in range(4)))
    assert (pair.target == pair.source).all()


@pytest.mark.parametrize("block", [8, 1000, -1])
async def test_a_block_that_the_peer_does_not_have_is_refused(pair: Any, block: int) -> None:
    pair.target[:] = 7
    with pytest.raises(TransferError):
        await pair.fetch([block], [0])
    assert (pair.target == 7).all()


@pytest.mark.parametrize("reader_block_bytes", [32, 128, 1])
async def test_blocks_of_another_size_are_refused(
    way: str, make_pair: MakePair, reader_block_bytes: int
) -> None:
    pair = await make_pair(way, reader_block_bytes=reader_block_bytes)
    pair.target[:] = 7
    with pytest.raises(TransferError, match=r"64.*bytes|bytes.*64"):
        await pair.fetch([0], [0])
    assert (pair.target == 7).all()


async def test_a_blocks_own_size_of_one_byte_does_not_spread(way: str, make_pair: MakePair) -> None:
    pair = await make_pair(way, block_bytes=1, reader_block_bytes=64)
    with pytest.raises(TransferError):
        await pair.fetch([0], [0])
    assert (pair.target == 0).all()


def test_a_pool_is_zeroed_writable_and_of_the_size_asked_for(way: str, machine: Machine) -> None:
    cuda = machine.process() if gpus(way)[0] is not None else None
    backend = make_backend(way, 4, cuda)
    try:
        memory = seen(backend.allocate(5, 4096), 5, 4096, cuda)[0].reshape(-1)
        assert memory.shape == (5 * 4096,)
        assert memory.dtype == np.uint8
        assert not memory.any()
        memory[-1] = 1
        address = backend.address()
        assert (address.num_blocks, address.block_bytes, address.kind) == (5, 4096, backend.name)
        assert backend.address() == address
    finally:
        backend.close()


@pytest.mark.parametrize("backend", [ShmBackend, lambda: TcpBackend(4)], ids=["shm", "tcp"])
def test_there_is_no_address_before_there_is_a_pool(backend: Callable[[], TransferBackend]) -> None:
    made = backend()
    with pytest.raises(TransferError, match="no pool"):
        made.address()
    made.close()
    made.close()


# ------------------------------------------------------------------ shared memory


def segment(address: PoolAddress) -> Path:
    return SHM / address.segment


@pytest.fixture
def shm() -> Iterator[ShmBackend]:
    backend = ShmBackend()
    yield backend
    backend.close()


@pytest.fixture
def owned(shm: ShmBackend) -> tuple[ShmBackend, Bytes, PoolAddress]:
    memory = shm.allocate(4, 64)
    memory[:] = 5
    return shm, memory, shm.address()


CHILD = """
import os, sys, time
import msgspec
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.wire.pools import PoolAddress

backend = ShmBackend()
if sys.argv[1] == "own":
    backend.allocate(4, 64)[:] = 9
    print(msgspec.json.encode(backend.address()).decode(), flush=True)
else:
    blocks = backend.attach(msgspec.json.decode(sys.argv[1], type=PoolAddress))
    print(int(blocks.sum()), flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
if sys.argv[2] == "exit":
    sys.exit()
os._exit(0)
"""


class Child:
    """Another process with a backend of its own."""

    def __init__(self, role: str, end: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, role, end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def end(self, number: int | None = None) -> None:
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate(timeout=10)


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_a_readers_end_leaves_the_owners_segment_whole(
    owned: tuple[ShmBackend, Bytes, PoolAddress], end: str
) -> None:
    _, memory, address = owned
    for _ in range(2):  # and after it another one can read
        reader = Child(json.encode(address).decode(), "wait" if end == "killed" else "exit")
        assert reader.said == str(5 * 4 * 64)
        reader.end(signal.SIGKILL if end == "killed" else None)
    assert segment(address).stat().st_size == 4096 + 4 * 64
    memory[:] = 6
    other = ShmBackend()
    assert (other.attach(address) == 6).all()
    other.close()


def test_a_killed_owners_segment_goes_with_the_next_start(
    owned: tuple[ShmBackend, Bytes, PoolAddress],
) -> None:
    dead = Child("own", "wait")
    left = segment(json.decode(dead.said, type=PoolAddress))
    assert left.exists()
    starting = ShmBackend()
    starting.allocate(1, 64)
    assert left.exists(), "its owner lives"
    starting.close()

    dead.end(signal.SIGKILL)
    assert left.exists()
    starting = ShmBackend()
    starting.allocate(1, 64)
    starting.close()
    assert not left.exists()
    # The living are left alone, those of this very process included.
    assert segment(owned[2]).exists()


def test_an_owner_that_ends_properly_leaves_nothing() -> None:
    backend = ShmBackend()
    backend.allocate(1, 64)
    path = segment(backend.address())
    assert path.stat().st_mode & 0o777 == 0o600
    backend.close()
    assert not path.exists()


def test_a_sweep_takes_only_what_is_ours() -> None:
    other = SHM / f"pagerelay-test-{secrets.token_hex(4)}"
    other.touch()
    try:
        backend = ShmBackend()
        backend.allocate(1, 64)
        backend.close()
        assert other.exists()
    finally:
        other.unlink()


def test_a_peers_pool_can_only_be_read(owned: tuple[ShmBackend, Bytes, PoolAddress]) -> None:
    blocks = ShmBackend().attach(owned[2])
    assert blocks.shape == (4, 64)
    assert not blocks.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        blocks[0] = 1


REFUSED: list[Any] = [
    pytest.param({"nonce": "0" * 32}, "not the peer's", id="nonce"),
    pytest.param({"nonce": ""}, "not the peer's", id="no-nonce"),
    pytest.param({"host_id": "elsewhere"}, "another host", id="host"),
    pytest.param({"kind": "tcp"}, "not in shared memory", id="kind"),
    pytest.param({"segment": "../../etc/passwd"}, "not in shared memory", id="traversal"),
    pytest.param({"segment": "/etc/passwd"}, "not in shared memory", id="absolute"),
    pytest.param({"segment": "pagerelay-" + "0" * 29 + "/.."}, "not in shared memory", id="dots"),
    pytest.param({"segment": "pagerelay-" + "0" * 32 + "\n"}, "not in shared memory", id="newline"),
    pytest.param({"segment": ""}, "not in shared memory", id="empty"),
    pytest.param({"segment": "pagerelay-" + "0" * 32}, "cannot be opened", id="missing"),
    pytest.param({"num_blocks": 5}, "smaller than announced", id="size"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_what_is_not_the_peers_pool_is_refused(
    owned: tuple[ShmBackend, Bytes, PoolAddress], changes: dict[str, Any], reason: str
) -> None:
    reader = ShmBackend()
    with pytest.raises(TransferError, match=reason):
        reader.attach(structs.replace(owned[2], **changes))
    # A refusal does not stick.
    assert (reader.attach(owned[2]) == 5).all()
    reader.close()


def test_a_link_in_the_folder_is_not_followed(owned: tuple[ShmBackend, Bytes, PoolAddress]) -> None:
    link = SHM / f"pagerelay-{secrets.token_hex(16)}"
    link.symlink_to(segment(owned[2]))
    try:
        with pytest.raises(TransferError, match="cannot be opened"):
            ShmBackend().attach(structs.replace(owned[2], segment=link.name))
    finally:
        link.unlink()


def test_pools_of_peers_that_have_gone_are_forgotten() -> None:
    owner, reader = ShmBackend(), ShmBackend()
    owner.allocate(1, 64)[:] = 3
    address = owner.address()
    blocks = reader.attach(address)
    reader.detach_gone()
    assert reader.attach(address) is blocks
    owner.close()
    assert (blocks == 3).all(), "a copy under way still reads"
    reader.detach_gone()
    with pytest.raises(TransferError, match="cannot be opened"):
        reader.attach(address)
    reader.close()


def test_too_little_shared_memory_says_need_have_and_remedy(
    shm: ShmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Not /dev/shm itself, where other processes come and go.
    for module in (segments, shm_module):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartupError) as caught:
        shm.allocate(3, 1 << 20)
    message = str(caught.value)
    assert "needs 3 MiB" in message
    assert f"{tmp_path} has " in message
    assert "MiB free" in message
    for remedy in ("cache.kv_memory_mib", "shm_size", "worker.transport to tcp"):
        assert remedy in message
    assert list(tmp_path.iterdir()) == []


def test_another_fault_of_the_folder_is_told_as_it_is(
    shm: ShmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StartupError, match="no shared memory: Operation not permitted"):
        shm.allocate(1, 64)


def test_a_sweep_between_creating_and_locking_costs_nothing_but_another_try(
    shm: ShmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker starts just then, and takes the new file for a dead one's."""
    lock, swept = fcntl.flock, 0

    def race(fd: int, operation: int) -> None:
        nonlocal swept
        if operation == fcntl.LOCK_EX and not swept:
            Path(os.readlink(f"/proc/self/fd/{fd}")).unlink()
            swept += 1
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", race)
    memory = shm.allocate(2, 64)
    memory[:] = 4
    assert swept == 1
    reader = ShmBackend()
    assert (reader.attach(shm.address()) == 4).all()
    reader.close()


async def test_a_cancelled_fetch_ends_only_when_its_copy_has_stopped(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair("shm")
    began, go_on = threading.Event(), threading.Event()
    copy = ShmBackend._copy

    def slow(*args: Any) -> None:
        began.set()
        assert go_on.wait(10)
        copy(*args)

    monkeypatch.setattr(ShmBackend, "_copy", staticmethod(slow))
    task = asyncio.create_task(pair.fetch([1, 2], [1, 2]))
    await asyncio.to_thread(began.wait, 10)
    for _ in range(3):  # however often it is cancelled
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (pair.target[[1, 2]] == pair.source[[1, 2]]).all()  # it has run to its end, not been left running


# ------------------------------------------------------------------ TCP


@pytest.mark.parametrize("window", [1, 2, 3, 4, 16])
async def test_never_more_blocks_are_asked_for_than_the_window_has(make_pair: MakePair, window: int) -> None:
    pair = await make_pair("tcp-by-hand", blocks=20, window=window)
    await pair.fetch(list(range(20)), list(range(20)))
    assert (pair.target == pair.source).all()
    assert pair.peer.most_in_flight == window // 2 * 2 or window == 1
    assert pair.peer.most_in_flight <= window


async def test_an_answer_that_comes_after_a_cancellation_changes_nothing(make_pair: MakePair) -> None:
    pair = await make_pair("tcp-by-hand")
    pair.target[:] = 7
    pair.peer.gate.clear()
    others = asyncio.all_tasks()
    task = asyncio.create_task(pair.fetch([1, 2, 3, 4], [1, 2, 3, 4]))
    while pair.peer.in_flight < 4:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pair.peer.gate.set()
    assert asyncio.all_tasks() == others, "a read was left running"
    assert (pair.target == 7).all()


async def test_a_lost_peer_fails_a_fetch_once_and_quietly(make_pair: MakePair) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    pair = await make_pair("tcp-by-hand")
    pair.peer.lost = "the lease is gone"
    with pytest.raises(TransferError, match="the lease is gone"):
        await pair.fetch(list(range(8)), list(range(8)))
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_a_peer_that_sends_too_few_blocks_is_refused(make_pair: MakePair) -> None:
    pair = await make_pair("tcp-by-hand")

    async def read(lease: int, block_ids: list[int]) -> list[memoryview]:
        return [memoryview(bytes(64))]

    pair.peer.read = read
    with pytest.raises(TransferError, match="asked for 2 blocks, got 1"):
        await pair.fetch([0, 1], [0, 1])


def test_too_little_memory_says_need_and_remedy() -> None:
    with pytest.raises(StartupError, match=r"needs \d+ MiB of memory.*cache\.kv_memory_mib"):
        TcpBackend(4).allocate(1 << 20, 1 << 40)
