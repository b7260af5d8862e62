"""A decode worker's link to one prefill worker, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engines import INCARNATION, handle_for, make_pool
from msgspec import structs

from pagerelay.common.errors import TransferError
from pagerelay.common.wire.codec import MAX_DATA_REQUEST_BYTES, Decoder, encode
from pagerelay.common.wire.messages import (
    Blocks,
    Commit,
    Detach,
    Fetch,
    KvHandle,
    LeaseLost,
    Message,
    Read,
    Ready,
    Release,
    Renew,
    ToPrefill,
)
from pagerelay.common.wire.sockets import ServerSocket
from pagerelay.decode_svc.peers import LeaseEnded, PeerLink, Peers

POOL = make_pool(2)


def fetch(lease: int) -> Fetch:
    return Fetch(lease=lease, incarnation=INCARNATION, from_block=0, layout=POOL.layout)


class Prefill:
    """The other end."""

    def __init__(self) -> None:
        self.socket = ServerSocket(None)
        self.port = self.socket.bind("127.0.0.1", 0, "worker.data_host")
        self.peer = b""
        self._decode: Decoder[Any] = Decoder(ToPrefill)

    def handle(self, incarnation: str = INCARNATION) -> KvHandle:
        return structs.replace(
            handle_for(1, 4, POOL), data_endpoint=f"tcp://127.0.0.1:{self.port}", incarnation=incarnation
        )

    async def hear(self) -> Any:
        async with asyncio.timeout(5):
            self.peer, frames = await self.socket.receive()
        return self._decode(frames[0])

    async def say(self, message: Message | bytes, *frames: bytes) -> None:
        header = message if isinstance(message, bytes) else encode(message)
        await self.socket.send(self.peer, header, *frames)


def ignored(kind: str, reason: str) -> None:
    pass


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    made = Prefill()
    yield made
    made.socket.close()


@pytest.fixture
async def link(prefill: Prefill) -> AsyncIterator[PeerLink]:
    made = PeerLink(prefill.handle(), None, asyncio.create_task, ignored)
    yield made
    await made.close()


async def test_news_reach_their_lease_in_order(prefill: Prefill, link: PeerLink) -> None:
    one, two = await link.open(fetch(1)), await link.open(fetch(2))
    assert (await prefill.hear(), await prefill.hear()) == (fetch(1), fetch(2))
    said: list[Any] = [
        Ready(lease=1, first=0, block_ids=[5]),
        Commit(lease=2, num_tokens=4, first_token=3),
        Commit(lease=1, num_tokens=4, first_token=6),
    ]
    await prefill.say(Ready(lease=99, first=0, block_ids=[1]))  # nobody's: dropped
    await prefill.say(b"\xc1")  # rubbish: dropped
    for message in said:
        await prefill.say(message)
    assert [await one.get(), await one.get(), await two.get()] == [said[0], said[2], said[1]]
    await link.send(Release(lease=1, received=True))
    assert await prefill.hear() == Release(lease=1, received=True)


async def test_blocks_answer_the_read_that_asked_for_them(prefill: Prefill, link: PeerLink) -> None:
    await link.open(fetch(1))
    reads = [asyncio.create_task(link.read(1, ids)) for ids in ([4, 5], [6])]
    await prefill.hear()
    assert [await prefill.hear(), await prefill.hear()] == [
        Read(lease=1, block_ids=[4, 5]),
        Read(lease=1, block_ids=[6]),
    ]
    await prefill.say(Blocks(lease=1, block_ids=[4, 5]), b"four", b"five")
    await prefill.say(Blocks(lease=1, block_ids=[6]), b"six")
    assert [[bytes(frame) for frame in await read] for read in reads] == [[b"four", b"five"], [b"six"]]


async def test_an_answer_that_was_lost_or_came_twice_is_not_taken_for_another(
    prefill: Prefill, link: PeerLink
) -> None:
    await link.open(fetch(1))
    reads = [asyncio.create_task(link.read(1, ids)) for ids in ([4], [5], [6])]
    await asyncio.sleep(0)
    await prefill.hear()
    await prefill.say(Blocks(lease=1, block_ids=[5]), b"five")  # the answer about 4 was lost
    await prefill.say(Blocks(lease=1, block_ids=[5]), b"five")
    await prefill.say(Blocks(lease=1, block_ids=[6]), b"six")
    assert [[bytes(frame) for frame in await read] for read in reads[1:]] == [[b"five"], [b"six"]]
    assert not reads[0].done()
    link.close_lease(1)


async def test_an_answer_to_a_cancelled_read_goes_to_no_other(prefill: Prefill, link: PeerLink) -> None:
    await link.open(fetch(1))
    first = asyncio.create_task(link.read(1, [4]))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.create_task(link.read(1, [5]))
    for _ in range(3):
        await prefill.hear()
    await prefill.say(Blocks(lease=1, block_ids=[4]), b"four")
    await prefill.say(Blocks(lease=1, block_ids=[5]), b"five")
    assert [bytes(frame) for frame in await second] == [b"five"]


async def test_a_lost_question_or_answer_is_asked_for_again_and_the_lease_renewed(prefill: Prefill) -> None:
    link = PeerLink(prefill.handle(), None, asyncio.create_task, ignored, read_patience_s=0.02)
    await link.open(structs.replace(fetch(1), ticket="t"))
    read = asyncio.create_task(link.read(1, [4, 5]))
    question, sign = Read(lease=1, block_ids=[4, 5]), Renew(tickets={1: "t"})
    await prefill.hear()
    assert [await prefill.hear() for _ in range(5)] == [question, sign, question, sign, sign]
    await prefill.say(Blocks(lease=1, block_ids=[4, 5]), b"four", b"five")
    await prefill.say(Blocks(lease=1, block_ids=[4, 5]), b"four", b"five")
    async with asyncio.timeout(5):
        assert [bytes(frame) for frame in await read] == [b"four", b"five"]
    await link.close()


async def test_a_peer_that_stays_silent_fails_the_read(prefill: Prefill) -> None:
    link = PeerLink(prefill.handle(), None, asyncio.create_task, ignored, read_patience_s=0.001)
    await link.open(fetch(1))
    async with asyncio.timeout(5):
        with pytest.raises(TransferError, match="prefill-1 did not answer 4 times"):
            await link.read(1, [4])
    await link.close()


async def test_many_leases_are_renewed_in_frames_that_the_peer_takes(
    prefill: Prefill, link: PeerLink
) -> None:
    tickets = {lease: f"{lease:032x}" for lease in range(2**40, 2**40 + 10_000)}
    assert len(encode(Renew(tickets=tickets))) > MAX_DATA_REQUEST_BYTES
    await link.renew(tickets)
    heard: dict[int, str] = {}
    while len(heard) < len(tickets):
        message = await prefill.hear()
        assert len(encode(message)) <= MAX_DATA_REQUEST_BYTES
        heard |= message.tickets
    assert heard == tickets


async def test_a_lost_lease_fails_its_reads_and_is_news(prefill: Prefill, link: PeerLink) -> None:
    news = await link.open(fetch(1))
    reads = [asyncio.create_task(link.read(1, [block])) for block in (4, 5)]
    for _ in range(3):
        await prefill.hear()
    lost = LeaseLost(lease=1, reason="expired")
    await prefill.say(lost)
    for read in reads:
        with pytest.raises(TransferError, match="the lease is gone: expired"):
            await read
    assert await news.get() == lost


async def test_closing_a_lease_cancels_its_reads_and_forgets_it(prefill: Prefill, link: PeerLink) -> None:
    await link.open(fetch(1))
    assert not link.idle
    read = asyncio.create_task(link.read(1, [4]))
    await asyncio.sleep(0)
    link.close_lease(1)
    link.close_lease(1)
    with pytest.raises(asyncio.CancelledError):
        await read
    assert link.idle
    with pytest.raises(TransferError, match="closed"):
        await link.read(1, [4])


async def test_a_lease_that_could_not_be_opened_leaves_nothing(
    link: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise TransferError("the prefill worker cannot be reached")

    monkeypatch.setattr(PeerLink, "send", fail)
    with pytest.raises(TransferError):
        await link.open(fetch(1))
    assert link.idle


async def test_one_link_an_incarnation_and_it_is_closed_when_idle(prefill: Prefill) -> None:
    now = 0.0
    peers = Peers(None, lambda: now, asyncio.create_task, ignored, idle_s=60.0)
    one = peers.link(prefill.handle("one"))
    assert peers.link(prefill.handle("one")) is one
    two = peers.link(prefill.handle("two"))
    assert two is not one
    await two.open(fetch(1))
    now = 60.0
    assert await peers.close_idle() == []
    now = 61.0
    assert await peers.close_idle() == [one], "the other one still fetches"
    two.close_lease(1)
    assert await peers.close_idle() == [two]
    again = peers.link(prefill.handle("one"))
    assert again is not one
    await peers.close()


async def test_the_link_to_the_owner_of_a_pool_that_is_open_stays(prefill: Prefill) -> None:
    now, keep = 0.0, True
    peers = Peers(None, lambda: now, asyncio.create_task, ignored, keep=lambda _: keep)
    link = peers.link(prefill.handle("one"))
    now = 600.0
    assert await peers.close_idle() == []
    assert peers.links() == [link]
    keep = False
    assert await peers.close_idle() == [link]
    await peers.close()


async def test_a_peer_takes_its_pool_back(prefill: Prefill) -> None:
    recalled: asyncio.Queue[PeerLink] = asyncio.Queue()
    peers = Peers(None, lambda: 0.0, asyncio.create_task, ignored, on_detach=recalled.put_nowait)
    link = peers.link(prefill.handle())
    news = await link.open(fetch(1))
    await prefill.hear()
    await prefill.say(Detach())
    async with asyncio.timeout(5):
        assert await recalled.get() is link
    assert news.empty()
    await peers.close()


async def test_a_read_of_a_lease_that_ended_properly_has_not_failed(prefill: Prefill, link: PeerLink) -> None:
    await link.open(fetch(1))
    read = asyncio.create_task(link.read(1, [4]))
    for _ in range(2):
        await prefill.hear()
    await prefill.say(LeaseLost(lease=1, reason="the first token ended the answer", ended=True))
    with pytest.raises(LeaseEnded):
        await read
