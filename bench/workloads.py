"""The named workloads, prompts of a wanted size, and the run of one workload.

====  ============================================================================  ========================
name  traffic                                                                       shows
====  ============================================================================  ========================
W1    1 client, 5 requests one after another, 128 tokens in, 64 out                 latency
W2    16 clients, 32 requests, 128 in, 64 out                                       batching
W3    16 clients, 32 requests: 512 shared tokens + 32 of their own in, 32 out       prefix caching
W4b   8 streams, 32 in, 128 out, nothing else                                       baseline of W4 and W4l
W4l   the same 8 streams while a new prompt of 1,024 tokens (8 out) comes each 10 s  decode beside prefill
W4    the same, one each 2 s                                                        the same, harder
B16   16 requests at once, 64 in, 128 out                                           batching, beside B1
B1    the same 16, one after another                                                its baseline
====  ============================================================================  ========================

Prompts are random common words. One or two calibration requests per shape read the server's own count of
prompt tokens and correct the number of words, so the sizes above hold with any chat template and nearly any
vocabulary. Prompts differ between requests, repeats and (unless seeded) invocations, so that a prefix cache
helps only where the workload shares a prefix on purpose. W4 and W4l end after 60 s; what is cut then still
counts.
"""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from msgspec import Struct

from pagerelay.bench.client import Record
from pagerelay.bench.traffic import Job, Run, Send, closed_loop, open_loop, poisson_schedule

_TEXT = """
time people year way day man thing world life hand part child eye place work week case point number group
problem fact water room mother area money story month lot right study book word business issue side kind
head house service friend father power hour game line end member law car city community name president team
minute idea body information back parent face others level office door health person art war history party
result change morning reason research girl guy moment air teacher force education
"""
WORDS = _TEXT.split()

INTERFERING_PROMPT_TOKENS = 1024
INTERFERING_OUTPUT_TOKENS = 8
INTERFERING_FIRST_S = 1.0
INTERFERING_MOST = 60


class Shape(Struct, frozen=True, kw_only=True):
    """Sizes in tokens as the server counts them. ``rate`` makes it an open loop and replaces ``clients``."""

    requests: int | None
    prompt_tokens: int
    output_tokens: int
    clients: int = 1
    prefix_tokens: int = 0
    rate: float | None = None
    duration_s: float | None = None
    interfere_every_s: float | None = None
    max_s: float | None = None


WORKLOADS: dict[str, Shape] = {
    "W1": Shape(clients=1, requests=5, prompt_tokens=128, output_tokens=64),
    "W2": Shape(clients=16, requests=32, prompt_tokens=128, output_tokens=64),
    "W3": Shape(clients=16, requests=32, prefix_tokens=512, prompt_tokens=544, output_tokens=32),
    "W4b": Shape(clients=8, requests=8, prompt_tokens=32, output_tokens=128),
    "W4l": Shape(
        clients=8, requests=8, prompt_tokens=32, output_tokens=128, interfere_every_s=10.0, max_s=60.0
    ),
    "W4": Shape(
        clients=8, requests=8, prompt_tokens=32, output_tokens=128, interfere_every_s=2.0, max_s=60.0
    ),
    "B16": Shape(clients=16, requests=16, prompt_tokens=64, output_tokens=128),
    "B1": Shape(clients=1, requests=16, prompt_tokens=64, output_tokens=128),
}


class Sizes(NamedTuple):
    """Numbers of words that give a shape its tokens."""

    system: int
    user: int
    interfering: int = 0


class Result(NamedTuple):
    """``interfering``: the long prompts of W4 and W4l that were answered; ``unanswered``: those that were
    not.
    """

    run: Run
    interfering: list[Record]
    unanswered: int


def random_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, count)))


async def calibrate(send: Send, prefix_tokens: int, prompt_tokens: int) -> tuple[int, int]:
    """Words of (system, user) for the wanted prompt tokens. Without usage in the answers, a word counts as a
    token.
    """
    system, user = prefix_tokens, prompt_tokens - prefix_tokens
    rng = random.Random(12345)  # noqa: S311 - prompts, not secrets
    for _ in range(2):
        record = await send(random_words(rng, system) if system else "", random_words(rng, user), 1, None)
        excess = (record.prompt_tokens or prompt_tokens) - prompt_tokens
        if excess == 0:
            break
        if system and system > excess:  # the template's share goes into the prefix, where there is one
            system -= excess
        else:
            user = max(1, user - excess)
    return system, user


async def measure_sizes(send: Send, shape: Shape) -> Sizes:
    system, user = await calibrate(send, shape.prefix_tokens, shape.prompt_tokens)
    long = (await calibrate(send, 0, INTERFERING_PROMPT_TOKENS))[1] if shape.interfere_every_s else 0
    return Sizes(system, user, long)


async def run_shape(send: Send, shape: Shape, sizes: Sizes, rng: random.Random, max_s: float) -> Result:
    """One run. The same ``rng`` state gives the same prompts and the same arrivals."""
    limit_s = min(max_s, shape.max_s or max_s)
    schedule = None
    if shape.rate is not None:
        schedule = poisson_schedule(shape.rate, rng, shape.requests, shape.duration_s)
    count = len(schedule) if schedule is not None else shape.requests or 0
    system = random_words(rng, sizes.system) if sizes.system else ""
    jobs = [Job(system, random_words(rng, sizes.user), shape.output_tokens) for _ in range(count)]
    background: list[asyncio.Task[Record]] = []
    interferer = None
    if shape.interfere_every_s is not None:
        interferer = asyncio.create_task(
            _interfere(send, background, shape.interfere_every_s, sizes.interfering, rng)
        )
    try:
        if schedule is not None:
            run = await open_loop(send, jobs, schedule, limit_s)
        else:
            run = await closed_loop(send, jobs, shape.clients, limit_s)
    finally:
        answered = [task for task in background if task.done()]
        open_ones = [task for task in background if not task.done()]
        for task in (interferer, *open_ones):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (interferer, *open_ones)), return_exceptions=True)
    return Result(run, [task.result() for task in answered], len(open_ones))


async def _interfere(
    send: Send, background: list[asyncio.Task[Record]], every_s: float, words: int, rng: random.Random
) -> None:
    await asyncio.sleep(INTERFERING_FIRST_S)
    while len(background) < INTERFERING_MOST:
        prompt = random_words(rng, words)
        background.append(asyncio.ensure_future(send("", prompt, INTERFERING_OUTPUT_TOKENS, None)))
        await asyncio.sleep(every_s)
