"""Fetching one prompt: the talk with the prefill worker, step by step, and whatever can go wrong in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engines import INCARNATION, decode_engine, decode_job, handle_for, make_pool
from msgspec import structs

from pagerelay.common.errors import ConfigError, TransferError
from pagerelay.common.kv.checksum import block_sum
from pagerelay.common.transport.base import Bytes, DeviceBlocks, Peer, TransferBackend
from pagerelay.common.wire.messages import (
    Commit,
    Fetch,
    HandoverPhases,
    LeaseLost,
    Ready,
    Release,
    Released,
)
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.decode_svc.engine import DecodeEngine, Intake
from pagerelay.decode_svc.intake import BackendChoice, CorruptBlocks, Fetched, fetch_prompt
from pagerelay.decode_svc.peers import LeaseEnded

PROMPT = list(range(1, 11))  # three blocks, the last one partly filled
ALL = [Ready(lease=1, first=0, block_ids=[5, 6, 7]), Commit(lease=1, num_tokens=10, first_token=4)]
YES, NO = Released(lease=1, ok=True), Released(lease=1, ok=False)


class Link:
    """The peer: says what the script holds for each question, and remembers the questions."""

    def __init__(self, *script: list[Any]) -> None:
        self.script = list(script)
        self.asked: list[Any] = []
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.closed: list[int] = []
        self.fails = False
        self.pool = PoolAddress(kind="tcp", num_blocks=16, block_bytes=32)

    async def send(self, message: Any) -> None:
        self.asked.append(message)
        if self.fails:
            raise TransferError("the prefill worker cannot be reached")
        for answer in self.script.pop(0) if self.script else []:
            self.news.put_nowait(answer)

    async def open(self, fetch: Fetch) -> asyncio.Queue[Any]:
        await self.send(fetch)
        return self.news

    def committed_at(self, lease: int) -> float:
        return 0.0

    def close_lease(self, lease: int) -> None:
        self.closed.append(lease)


class Copy(TransferBackend):
    """Source block ``n`` is full of ``n``."""

    name = "copy"

    def __init__(self) -> None:
        self.copied: list[tuple[list[int], list[int]]] = []
        self.written: list[int | None] = []
        self.hold: asyncio.Event | None = None
        self.stopped = False

    async def fetch(
        self,
        peer: Peer,
        lease: int,
        sources: Sequence[int],
        into: Bytes | DeviceBlocks,
        targets: Sequence[int],
        written: int | None = None,
    ) -> int:
        assert isinstance(into, np.ndarray)
        self.copied.append((list(sources), list(targets)))
        self.written.append(written)
        if self.hold is not None:
            try:
                await self.hold.wait()
            finally:
                self.stopped = True
        for source, target in zip(sources, targets, strict=True):
            into[target] = source
        return into.shape[1] * len(sources)

    def allocate(self, num_blocks: int, block_bytes: int) -> Bytes:
        return np.zeros(num_blocks * block_bytes, dtype=np.uint8)

    def address(self) -> PoolAddress:
        raise AssertionError

    def close(self) -> None:
        pass


def reserved(num_tokens: int = 10) -> tuple[DecodeEngine, Intake]:
    engine = decode_engine()
    engine.submit("router", decode_job("r", PROMPT, handle=handle_for(1, num_tokens, engine.pool)), 0.0)
    (intake,) = engine.admit()
    return engine, intake


async def fetch(
    link: Link,
    backend: Copy | None = None,
    patience_s: float = 5.0,
    intake: tuple[DecodeEngine, Intake] | None = None,
    checksums: bool = True,
) -> Fetched:
    engine, taken = intake or reserved()
    ticks = iter(range(100))
    return await fetch_prompt(
        taken,
        link,  # type: ignore[arg-type]
        backend or Copy(),
        engine.pool,
        patience_s=patience_s,
        clock=lambda: float(next(ticks)),
        checksums=checksums,
    )


QUESTION = Fetch(lease=1, incarnation=INCARNATION, from_block=0, layout=make_pool(1).layout)
CONFIRM, GIVE_UP = Release(lease=1, received=True), Release(lease=1, received=False)


async def test_blocks_are_copied_as_they_are_announced_and_the_lease_confirmed() -> None:
    link, backend, intake = Link(ALL, [YES]), Copy(), reserved()
    link.script[0] = [
        Ready(lease=1, first=0, block_ids=[5]),
        Ready(lease=1, first=1, block_ids=[6, 7]),
        ALL[1],
    ]
    fetched = await fetch(link, backend, intake=intake)
    assert (fetched.first_token, fetched.transport, fetched.num_bytes, fetched.num_blocks) == (
        4,
        "copy",
        96,
        3,
    )
    # The clock was read when the fetch began, at the first news, when all was copied, and at the end.
    assert fetched.phases == HandoverPhases(announce_s=1.0, copy_s=2.0, confirm_s=1.0)
    assert fetched.handover_s == 3.0
    assert backend.copied == [([5], [0]), ([6, 7], [1, 2])]
    assert link.asked == [QUESTION, CONFIRM]
    assert link.closed == [1]
    assert [int(intake[0].pool.blocks[block][0]) for block in (0, 1, 2)] == [5, 6, 7]


async def test_each_announcement_is_copied_after_its_own_mark() -> None:
    link, backend = Link(ALL, [YES]), Copy()
    link.script[0] = [
        Ready(lease=1, first=0, block_ids=[5], written=3),
        Ready(lease=1, first=1, block_ids=[6, 7], written=0),
        ALL[1],
    ]
    await fetch(link, backend)
    assert backend.written == [3, 0]


async def test_blocks_are_compared_with_their_checksums() -> None:
    due = [block_sum(np.full(32, block, dtype=np.uint8)) for block in (5, 6, 7)]
    link = Link([Ready(lease=1, first=0, block_ids=[5, 6, 7], sums=due), ALL[1]], [YES])
    assert (await fetch(link)).num_blocks == 3


async def test_bytes_that_are_not_those_of_the_checksum_are_never_used() -> None:
    due = [block_sum(np.full(32, block, dtype=np.uint8)) for block in (5, 99, 7)]
    link = Link([Ready(lease=1, first=0, block_ids=[5, 6, 7], sums=due), ALL[1]])
    with pytest.raises(CorruptBlocks, match="1 blocks came with other bytes") as caught:
        await fetch(link)
    assert caught.value.block_ids == [6]
    assert link.asked[1:] == [Release(lease=1, received=False, corrupt=[6])]


async def test_a_fetch_that_is_given_up_ends_when_nobody_reads_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are somebody else's afterwards. Meanwhile the event loop is free."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> list[int]:
        begun.set()
        assert go_on.wait(5)
        return []

    monkeypatch.setattr("pagerelay.decode_svc.intake.wrong_blocks", slow)
    link = Link([Ready(lease=1, first=0, block_ids=[5, 6, 7], sums=[1, 2, 3]), ALL[1]])
    fetching = asyncio.create_task(fetch(link))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    fetching.cancel()
    await asyncio.sleep(0.02)
    assert not fetching.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert link.asked[1:] == [GIVE_UP]


async def test_checksums_may_be_left_out() -> None:
    link = Link([Ready(lease=1, first=0, block_ids=[5, 6, 7], sums=[1, 2, 3]), ALL[1]], [YES])
    assert (await fetch(link, checksums=False)).num_blocks == 3


async def test_checksums_of_another_number_are_refused() -> None:
    link = Link([Ready(lease=1, first=0, block_ids=[5, 6, 7], sums=[1])])
    with pytest.raises(TransferError, match="of different number"):
        await fetch(link)


async def test_the_commit_may_come_before_the_blocks() -> None:
    link = Link([ALL[1], ALL[0]], [YES])
    assert (await fetch(link)).num_blocks == 3
    assert link.asked == [QUESTION, CONFIRM]


async def test_what_is_here_already_is_not_copied() -> None:
    engine, intake = reserved()
    copied = Copy()
    intake = Intake(intake.seq, intake.handle, from_block=2)
    link = Link([Ready(lease=1, first=2, block_ids=[7]), ALL[1]], [YES])
    fetched = await fetch(link, copied, intake=(engine, intake))
    assert (fetched.num_blocks, fetched.num_bytes) == (1, 32)
    assert copied.copied == [([7], [2])]
    assert link.asked[0] == structs.replace(QUESTION, from_block=2)


async def test_only_the_commit_is_due_where_everything_is_here() -> None:
    engine, intake = reserved()
    intake = Intake(intake.seq, intake.handle, from_block=3)
    backend = Copy()
    fetched = await fetch(Link([ALL[1]], [YES]), backend, intake=(engine, intake))
    assert (fetched.num_blocks, backend.copied) == (0, [])


async def test_a_silent_peer_is_asked_again_for_what_is_missing() -> None:
    """The question or its answer was lost with a connection; what is announced twice is copied once."""
    backend = Copy()
    link = Link([Ready(lease=1, first=0, block_ids=[5])], [], [*ALL], [], [YES])
    await fetch(link, backend, patience_s=0.02)
    rest = structs.replace(QUESTION, from_block=1)
    assert link.asked == [QUESTION, rest, rest, CONFIRM, CONFIRM]
    assert backend.copied == [([5], [0]), ([6, 7], [1, 2])]


@pytest.mark.parametrize("question", ["fetch", "confirmation"])
async def test_a_peer_that_answers_nothing_any_more_fails_the_fetch(question: str) -> None:
    link = Link(*([] if question == "fetch" else [ALL]))
    with pytest.raises(TransferError, match="did not answer 4 times"):
        await fetch(link, patience_s=0.005)
    asked = QUESTION if question == "fetch" else CONFIRM
    assert [message for message in link.asked if message == asked] == [asked] * 4
    assert link.asked[-1] == GIVE_UP


async def test_a_peer_that_computes_for_long_is_waited_for() -> None:
    here = [Ready(lease=1, first=0, block_ids=[])]
    backend = Copy()
    fetched = await fetch(Link(*[here] * 9, ALL, [YES]), backend, patience_s=0.005)
    assert backend.copied == [([5, 6, 7], [0, 1, 2])]
    assert fetched.first_token == 4


async def test_a_confirmation_that_comes_too_late_voids_the_copy() -> None:
    link = Link(ALL, [NO])
    with pytest.raises(TransferError, match="ran out before the copy was confirmed"):
        await fetch(link)
    assert link.asked == [QUESTION, CONFIRM, GIVE_UP]
    assert link.closed == [1]


@pytest.mark.parametrize("when", [0, 1])
async def test_a_lost_lease(when: int) -> None:
    lost = LeaseLost(lease=1, reason="expired")
    link = Link([lost]) if when == 0 else Link(ALL, [lost])
    with pytest.raises(TransferError, match="the lease is gone: expired") as caught:
        await fetch(link)
    assert not isinstance(caught.value, LeaseEnded)
    assert link.closed == [1]


async def test_a_lease_that_ended_properly() -> None:
    with pytest.raises(LeaseEnded):
        await fetch(Link([LeaseLost(lease=1, reason="the first token ended it", ended=True)]))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([Ready(lease=1, first=2, block_ids=[7, 8])], "more blocks than the prompt has"),
        ([ALL[0], Commit(lease=1, num_tokens=9, first_token=4)], "covers 9 tokens, 10 are due"),
    ],
)
async def test_a_peer_that_contradicts_itself(script: list[Any], reason: str) -> None:
    link = Link(script)
    with pytest.raises(TransferError, match=reason):
        await fetch(link)
    assert link.asked[-1] == GIVE_UP


async def test_a_handle_of_another_prompt_is_not_even_asked_for() -> None:
    link = Link(ALL, [YES])
    with pytest.raises(TransferError, match="the lease covers 9 tokens, the job has 10"):
        await fetch(link, intake=reserved(9))
    assert link.asked == []


async def test_a_peer_that_cannot_be_reached() -> None:
    link = Link()
    link.fails = True
    with pytest.raises(TransferError, match="cannot be reached"):
        await fetch(link)


async def test_a_cancelled_fetch_gives_the_lease_back_when_its_copy_has_stopped() -> None:
    link, backend = Link(ALL), Copy()
    backend.hold = asyncio.Event()
    task = asyncio.create_task(fetch(link, backend))
    while not backend.copied:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.stopped
    assert link.asked == [QUESTION, GIVE_UP]
    assert link.closed == [1]


# ------------------------------------------------------------------ which backend


POOL = PoolAddress(kind="shm", num_blocks=1, block_bytes=32)


class Probe:
    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.count = 0

    def __call__(self, pool: PoolAddress) -> None:
        self.count += 1
        if self.error is not None:
            raise TransferError(self.error)


def choice(wanted: str, probe: Probe) -> tuple[BackendChoice, TransferBackend, TransferBackend]:
    shm, tcp = Copy(), Copy()
    return BackendChoice(wanted, shm, tcp, probe), shm, tcp


def test_shared_memory_where_it_opens() -> None:
    probe = Probe()
    chosen, shm, _ = choice("auto", probe)
    assert [chosen.backend("peer", POOL) for _ in range(3)] == [(shm, None)] * 3
    assert probe.count == 1


def test_tcp_where_it_does_not_and_the_reason_once_a_peer() -> None:
    chosen, _, tcp = choice("auto", Probe("another host"))
    assert chosen.backend("peer", POOL) == (tcp, "another host")
    assert chosen.backend("peer", POOL) == (tcp, None)
    assert chosen.backend("other", POOL) == (tcp, "another host")


@pytest.mark.parametrize("way", ["shm", "cuda_ipc"])
def test_a_forced_choice_that_cannot_work_fails(way: str) -> None:
    chosen, _, _ = choice(way, Probe("another host"))
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=rf"worker\.transport is {way}, which cannot reach peer: another host"
        ):
            chosen.backend("peer", POOL)


def test_forced_tcp_does_not_look_for_anything_else() -> None:
    probe = Probe()
    chosen, _, tcp = choice("tcp", probe)
    assert chosen.backend("peer", POOL) == (tcp, None)
    assert probe.count == 0
