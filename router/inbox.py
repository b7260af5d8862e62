"""What reaches a request from outside, in the order in which it came."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pagerelay.common.wire.messages import TokenDelta
from pagerelay.router.links import RequestNews


@dataclass(frozen=True, slots=True)
class News:
    message: RequestNews
    worker_id: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that this request depends on is gone. ``goodbye``: it left in order, nothing of it died."""

    worker_id: str
    goodbye: bool


@dataclass(frozen=True, slots=True)
class LeaveDecoder:
    """Its decode worker drains, and hands over what runs on it."""

    worker_id: str


Event = TokenDelta | News | Lost | LeaveDecoder


class Inbox:
    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)

    def empty(self) -> bool:
        return self._events.empty()

    async def get(self, until: float) -> Event | None:
        """The next event, at once if there is one; ``None`` if none came until this loop time."""
        if not self._events.empty():
            return self._events.get_nowait()
        try:
            # Not wait_for: on Python 3.11 it can swallow a cancellation that comes together with the item.
            async with asyncio.timeout_at(until):
                return await self._events.get()
        except TimeoutError:
            return None
