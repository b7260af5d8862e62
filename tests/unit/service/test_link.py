"""A worker's link to a router: it introduces itself, and comes back by itself whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from flows import hello

from pagerelay.common.service import link as module
from pagerelay.common.service.link import RouterLink
from pagerelay.common.wire.account import Counters, Load
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.messages import (
    Abort,
    Beat,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    ToRouter,
    Welcome,
)
from pagerelay.common.wire.sockets import ServerSocket

BEAT_S = 0.01


class Owner:
    """The worker, as its link sees it: remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.num_dropped = 0

    def hello(self) -> Hello:
        return hello("d")

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(load=Load(), counters=Counters())

    def received(self, router_id: str, message: Any) -> None:
        self.told.append((router_id, message))

    def router_lost(self, router_id: str) -> None:
        self.told.append(("lost", router_id))

    def refused_for_good(self, endpoint: str, reason: str) -> None:
        self.told.append(("refused", reason))

    def message_dropped(self, kind: str, reason: str) -> None:
        self.num_dropped += 1

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work)


class Router:
    """The other end, on a clock of its own."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.now = 0.0
        self.socket = ServerSocket(None)
        port = self.socket.bind("127.0.0.1", 0, "router.workers_endpoint")
        self.link = RouterLink(f"tcp://127.0.0.1:{port}", None, self.owner, lambda: self.now)
        self.peer = b""
        self._decode: Decoder[Any] = Decoder(ToRouter)

    async def hear(self, kind: type[Message] | None = None) -> Any:
        """The next message, or the next one of a kind."""
        async with asyncio.timeout(5):
            while True:
                self.peer, frames = await self.socket.receive()
                message = self._decode(frames[0])
                if kind is None or isinstance(message, kind):
                    return message

    async def say(self, message: Message | bytes) -> None:
        await self.socket.send(self.peer, message if isinstance(message, bytes) else encode(message))

    async def welcome(self, router_id: str = "one") -> None:
        await self.hear(Hello)
        await self.say(Welcome(router_id=router_id, heartbeat_s=BEAT_S, dead_after_s=3.0))
        await self.hear(Heartbeat)

    async def until(self, told: list[Any]) -> None:
        async with asyncio.timeout(5):
            while self.owner.told != told:
                await asyncio.sleep(0.002)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setattr(module, "HELLO_INTERVAL_S", BEAT_S)
    made = Router()
    made.link.start()
    yield made
    await made.link.close()
    made.socket.close()


async def test_it_says_hello_until_it_is_welcome_then_beats(router: Router) -> None:
    assert [await router.hear() for _ in range(3)] == [hello("d")] * 3
    assert router.link.router_id is None
    await router.welcome()
    assert router.link.router_id == "one"
    for _ in range(2):
        assert isinstance(await router.hear(), Heartbeat)
    assert router.owner.told == []


async def test_jobs_come_through_with_their_router_and_beats_do_not(router: Router) -> None:
    await router.welcome()
    abort = Abort(request_id="r", attempt=1)
    for message in (Beat(), abort, b"\xc1", abort):
        await router.say(message)
    await router.until([("one", abort)] * 2)
    assert router.owner.num_dropped == 1


async def test_nothing_is_taken_before_the_welcome(router: Router) -> None:
    await router.hear(Hello)
    await router.say(Abort(request_id="r", attempt=1))
    await router.welcome()
    assert router.owner.told == []


async def test_a_router_that_does_not_know_us_loses_its_requests_and_hears_hello(router: Router) -> None:
    await router.welcome()
    await router.say(Refused(reason="unknown worker, say Hello", fatal=False))
    assert (await router.hear(Hello)).epoch == 1, "what it was given before is dropped"
    assert router.owner.told == [("lost", "one")]
    await router.welcome("two")
    assert router.link.router_id == "two"
    assert router.owner.told == [("lost", "one")]


async def test_another_router_at_the_same_address_loses_the_first_ones_requests(router: Router) -> None:
    await router.welcome()
    await router.say(Welcome(router_id="two", heartbeat_s=BEAT_S, dead_after_s=3.0))
    await router.until([("lost", "one")])
    assert router.link.router_id == "two"


async def test_a_router_that_does_not_answer_is_lost_by_our_own_clock(router: Router) -> None:
    await router.welcome()
    router.now = 5.0
    await router.hear(Heartbeat)
    await router.hear(Heartbeat)
    assert router.owner.told == []
    router.now = 5.1
    await router.hear(Hello)
    assert router.owner.told == [("lost", "one")]


async def test_a_router_that_answers_is_never_lost(router: Router) -> None:
    await router.welcome()
    for router.now in (4.0, 8.0, 12.0):
        await router.say(Beat())
        async with asyncio.timeout(5):
            while router.link._last_heard < router.now:
                await asyncio.sleep(0.002)
        await router.hear(Heartbeat)
    assert router.owner.told == []


async def test_a_refusal_for_good_is_the_workers_matter(router: Router) -> None:
    await router.hear(Hello)
    await router.say(Refused(reason="dtype: a here, b there", fatal=True))
    await router.until([("refused", "dtype: a here, b there")])


async def test_it_leaves_with_a_goodbye(router: Router) -> None:
    await router.welcome()
    await router.link.close()
    await router.hear(Goodbye)


async def test_who_was_never_welcome_just_leaves(router: Router) -> None:
    await router.hear(Hello)
    await router.link.close()
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await router.hear(Goodbye)
