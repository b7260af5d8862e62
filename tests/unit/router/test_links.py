"""The router's socket: workers come in, their news go to the right request, and nothing breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from flows import hello, registry

from pagerelay.common.wire.account import Counters, Load
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.messages import (
    Abort,
    Beat,
    Failed,
    FirstToken,
    Goodbye,
    HandedOver,
    Heartbeat,
    Message,
    Preempted,
    Refused,
    TokenDelta,
    Tokens,
    ToWorker,
    Welcome,
)
from pagerelay.common.wire.sockets import ClientSocket
from pagerelay.router.links import WorkerLinks


class Flow:
    """A request as the links see it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self.left: list[str] = []

    def news(self, message: Any, worker_id: str) -> None:
        self.heard.append((message, worker_id))

    def tokens(self, message: Tokens, position: int) -> None:
        self.heard.append(message.deltas[position])

    def worker_lost(self, worker_id: str, goodbye: bool) -> None:
        self.lost.append(worker_id)

    def leave_decoder(self, worker_id: str) -> None:
        self.left.append(worker_id)


class Clock:
    """The real one, and what a test adds to it."""

    added = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.added


class House:
    def __init__(self) -> None:
        self.clock = Clock()
        self.dropped = 0
        self.reasons: list[str] = []
        self.registry = registry(self.clock)  # type: ignore[arg-type]
        self.links = WorkerLinks(self.registry, None, self._drop, self.clock)
        self.port = self.links.bind("127.0.0.1", 0)
        self.tasks = [asyncio.create_task(self.links.receive_forever())]
        self.workers: list[ClientSocket] = []

    def _drop(self, kind: str, reason: str) -> None:
        self.dropped += 1
        self.reasons.append(f"{kind}/{reason}")

    def bind(self, worker_id: str, **flows: Flow) -> None:
        """What a request does that is dispatched to the worker."""
        entry = self.registry.by_id(worker_id)
        assert entry is not None
        self.links.flows.update(flows)
        entry.bound.update(flows)

    async def worker(self, worker_id: str) -> Worker:
        worker = Worker(self, worker_id)
        await worker.say(hello(worker_id))
        assert isinstance(await worker.hear(), Welcome)
        return worker

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for socket in self.workers:
            socket.close(0)
        self.links.close()


class Worker:
    _decode: Decoder[Any] = Decoder(ToWorker)

    def __init__(self, house: House, worker_id: str) -> None:
        identity = worker_id.encode()
        self.socket = ClientSocket(f"tcp://127.0.0.1:{house.port}", identity, None, "worker.routers")
        house.workers.append(self.socket)

    async def say(self, message: Message) -> None:
        await self.socket.send(encode(message))

    async def hear(self) -> Message:
        async with asyncio.timeout(5):
            frames = await self.socket.receive()
        message: Message = self._decode(frames[0])
        return message

    async def beat(self) -> None:
        """Says a heartbeat and waits for its answer: all that was said before has been taken by then."""
        await self.say(Heartbeat(load=Load(), counters=Counters()))
        assert isinstance(await self.hear(), Beat)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.close()


def delta(request_id: str, index: int) -> TokenDelta:
    return TokenDelta(request_id=request_id, attempt=1, index=index, token=9)


async def test_news_go_to_their_request(house: House) -> None:
    worker = await house.worker("d")
    one, two = Flow(), Flow()
    house.bind("d", one=one, two=two)
    first = HandedOver(
        request_id="one", attempt=1, first=delta("one", 0), transport="shm", handover_s=0.1, num_bytes=1
    )
    preempted = Preempted(request_id="two", attempt=1)
    await worker.say(first)
    await worker.say(Tokens(deltas=[delta("two", 4), delta("one", 1), delta("two", 5)]))
    await worker.say(preempted)
    await worker.beat()
    assert one.heard == [(first, "d"), delta("one", 1)]
    assert two.heard == [delta("two", 4), delta("two", 5), (preempted, "d")]
    assert house.dropped == 0


async def test_news_for_nobody_are_counted(house: House) -> None:
    worker = await house.worker("d")
    await worker.say(Tokens(deltas=[delta("gone", 4), delta("gone", 5)]))
    # Whoever goes on with what nobody wants is told again that it was taken back.
    assert [await worker.hear() for _ in range(2)] == [Abort(request_id="gone", attempt=1)] * 2
    await worker.say(Failed(request_id="gone", attempt=1, code="c", message="m", retryable=True))
    await worker.beat()
    assert house.reasons == ["TokenDelta/late", "TokenDelta/late", "Failed/late"]


async def test_a_worker_has_no_say_in_what_is_not_bound_to_it(house: House) -> None:
    flow = Flow()
    worker = await house.worker("d")
    await house.worker("other")
    house.bind("other", r=flow)
    await worker.say(Failed(request_id="r", attempt=1, code="c", message="m", retryable=False))
    await worker.say(Tokens(deltas=[delta("r", 0)]))
    assert isinstance(await worker.hear(), Abort)
    await worker.beat()
    assert flow.heard == []
    assert house.reasons == ["Failed/late", "TokenDelta/late"]


async def test_a_worker_says_only_what_its_role_may(house: House) -> None:
    flow = Flow()
    worker = await house.worker("d")
    house.bind("d", r=flow)
    await worker.say(FirstToken(delta=delta("r", 0), prefill_s=0.1, num_computed_tokens=1))
    await worker.beat()
    assert flow.heard == []
    assert house.reasons == ["FirstToken/refused"]


async def test_one_that_hands_over_says_so_to_what_is_bound_to_it(house: House) -> None:
    flow = Flow()
    worker = await house.worker("d")
    house.bind("d", r=flow)
    await worker.say(Heartbeat(load=Load(draining=True, hands_over=True), counters=Counters()))
    assert isinstance(await worker.hear(), Beat)
    assert flow.left == ["d"]


async def test_a_stranger_has_to_say_hello_first(house: House) -> None:
    stranger = Worker(house, "stranger")
    await stranger.say(Heartbeat(load=Load(), counters=Counters()))
    assert await stranger.hear() == Refused(reason="unknown worker, say Hello", fatal=False)
    await stranger.say(hello("stranger"))
    assert isinstance(await stranger.hear(), Welcome)
    await stranger.beat()


async def test_one_that_does_not_match_is_refused_for_good(house: House) -> None:
    await house.worker("d")
    other = Worker(house, "other")
    await other.say(hello("other", block_size=64))
    refused = await other.hear()
    assert isinstance(refused, Refused)
    assert refused.fatal
    assert "block_size: 4 here, 64 there" in refused.reason


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [encode(Abort(request_id="r", attempt=1))], []], ids=len
)
async def test_rubbish_is_dropped_and_counted_and_the_next_message_taken(
    house: House, frames: list[bytes]
) -> None:
    worker = await house.worker("d")
    await worker.socket.send(*(frames or [b""]))
    await worker.beat()
    assert house.dropped == 1


async def test_goodbye_loses_what_was_bound_at_once(house: House) -> None:
    worker = await house.worker("d")
    flow = Flow()
    house.registry.entries()[0].bound["r"] = flow
    await worker.say(Goodbye())
    await house.until(lambda: flow.lost)
    assert flow.lost == ["d"]
    assert house.registry.entries() == []


async def test_messages_reach_their_worker(house: House) -> None:
    one, two = await house.worker("one"), await house.worker("two")
    for name in ("two", "one"):
        entry = house.registry.by_id(name)
        assert entry is not None
        assert await house.links.send(entry, Abort(request_id=name, attempt=1))
    assert await one.hear() == Abort(request_id="one", attempt=1)
    assert await two.hear() == Abort(request_id="two", attempt=1)


async def test_a_worker_that_cannot_be_reached_is_lost(house: House) -> None:
    worker = await house.worker("d")
    entry = house.registry.entries()[0]
    flow = Flow()
    entry.bound["r"] = flow
    worker.socket.close(0)

    async def unreachable() -> bool:
        return not await house.links.send(entry, Abort(request_id="r", attempt=1))

    async with asyncio.timeout(5):
        while not await unreachable():
            await asyncio.sleep(0.002)
    assert flow.lost == ["d"]
    assert house.registry.entries() == []


async def test_the_silent_are_removed_and_the_pause_of_our_own_is_pardoned(house: House) -> None:
    await house.worker("d")
    entry = house.registry.entries()[0]
    house.tasks.append(asyncio.create_task(house.links.expire_forever(0.02)))
    await asyncio.sleep(0.03)
    house.clock.added += 60.0  # we were stopped: nobody else's fault
    await asyncio.sleep(0.05)
    assert house.registry.entries() == [entry]
    entry.last_heard -= 2.0  # with what the pardon left of it, more than three seconds
    await house.until(lambda: house.registry.entries() == [])
