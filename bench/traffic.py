"""How requests arrive: closed-loop (a fixed number of clients) or open-loop (Poisson, whatever the server
does).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagerelay.bench.client import Record

MAX_REQUESTS = 100_000
MAX_SECONDS = 3600.0
MAX_IN_FLIGHT = 4096
"""Open-loop requests beyond this many at once are not sent; they count as failed."""


class Job(NamedTuple):
    system: str
    user: str
    max_tokens: int


Send = Callable[[str, str, int, float | None], Awaitable[Record]]


@dataclass(slots=True)
class Run:
    """What one run of traffic gave."""

    records: list[Record]
    wall_s: float
    unsent: int = 0
    """Jobs that the time limit left unsent."""
    lags_s: list[float] = field(default_factory=list)
    """Open-loop: how late each request was sent. High values mean that the generator, not the server, was the
    limit.
    """


def poisson_schedule(
    rate: float, rng: random.Random, requests: int | None = None, duration_s: float | None = None
) -> list[float]:
    """Arrival times in seconds from the start, of ``rate`` a second on average: the same for the same seed.

    Ends at whichever of the two bounds comes first. Raises ``ValueError`` without a bound, or beyond the
    limits of this module.
    """
    if not (0 < rate < math.inf):
        raise ValueError("the rate must be above 0 requests a second")
    if requests is None and duration_s is None:
        raise ValueError("an open loop needs a number of requests or a duration")
    if duration_s is not None and not 0 < duration_s <= MAX_SECONDS:
        raise ValueError(f"the duration must be above 0 and at most {MAX_SECONDS:g} s")
    times: list[float] = []
    now = rng.expovariate(rate)
    while (requests is None or len(times) < requests) and (duration_s is None or now < duration_s):
        if len(times) == MAX_REQUESTS:
            raise ValueError(f"more than {MAX_REQUESTS} requests; lower the rate or the duration")
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def closed_loop(send: Send, jobs: Sequence[Job], clients: int, limit_s: float) -> Run:
    """``clients`` clients, each sending its next job when its last is answered."""
    clock = asyncio.get_running_loop().time
    start = clock()
    deadline = start + limit_s
    queue, records = deque(jobs), []

    async def client() -> None:
        while queue and clock() < deadline:
            records.append(await send(*queue.popleft(), deadline))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(jobs))):
            group.create_task(client())
    return Run(records, clock() - start, unsent=len(queue))


async def open_loop(send: Send, jobs: Sequence[Job], schedule: Sequence[float], limit_s: float) -> Run:
    """Sends job i at ``schedule[i]``, however many are still unanswered."""
    clock = asyncio.get_running_loop().time
    start = clock()
    deadline = start + limit_s
    tasks: set[asyncio.Task[None]] = set()
    run = Run([], 0.0)

    async def one(job: Job) -> None:
        run.records.append(await send(*job, deadline))

    async with asyncio.TaskGroup() as group:
        for position, (job, offset) in enumerate(zip(jobs, schedule, strict=True)):
            await asyncio.sleep(min(start + offset, deadline) - clock())
            now = clock()
            if now >= deadline:
                run.unsent = len(jobs) - position
                break
            run.lags_s.append(now - start - offset)
            if len(tasks) >= MAX_IN_FLIGHT:
                run.records.append(Record(now, now, error=f"not sent: {MAX_IN_FLIGHT} requests unanswered"))
                continue
            task = group.create_task(one(job))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    run.wall_s = clock() - start
    return run
