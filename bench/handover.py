"""``handover``: what the split adds to the time of the second token, and where a hand-over spends it.

One request at a time on one prefill and one decode worker over shared memory. A stream's second token waits
for the hand-over and for D's first step, later ones only for a step. So the gap before the second token less
the gap before a later one is what the hand-over adds: at most what the prompt's KV takes to copy, and 10 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
from msgspec import Struct

from pagerelay.bench.report import header, number, stamped, write_json
from pagerelay.bench.server import free_port, running
from pagerelay.bench.stats import percentile

PHASES = ("reserve", "announce", "copy", "confirm", "first_step")
BUDGET_MS = 10.0
READY_S = 120.0
TOKENS = 6


class HandoverOptions(Struct, frozen=True, kw_only=True):
    """Checked options. ``prompt_tokens`` of each of ``requests`` prompts; no two begin alike."""

    model_path: str
    requests: int = 200
    prompt_tokens: int = 128
    transport: str = "shm"
    seed: int = 1
    results: str = "bench/results"


class Sample(Struct, frozen=True):
    """One stream, in ms: the gap before the second token, the median of those after it, the phases."""

    second_ms: float
    later_ms: float
    phases: dict[str, float]

    @property
    def added_ms(self) -> float:
        return self.second_ms - self.later_ms


async def one_stream(session: aiohttp.ClientSession, url: str, prompt: Sequence[int]) -> Sample:
    """Raises ``ValueError`` if the stream does not bring all its tokens, through a hand-over."""
    body = {
        "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    arrivals: list[float] = []
    timings: dict[str, Any] = {}
    async with session.post(url + "/generate", json=body) as response:
        if response.status != 200:
            raise ValueError(f"a request failed: {await response.text()}")
        async for raw in response.content:
            if not raw.startswith(b"data: {"):
                continue
            event = json.loads(raw.removeprefix(b"data: "))
            arrived = time.perf_counter()
            arrivals += [arrived for choice in event["choices"] for _ in choice["token_ids"]]
            timings = event.get("timings") or timings
    phases = timings.get("handover_phases_ms")
    if len(arrivals) != TOKENS or not phases:
        raise ValueError(f"{len(arrivals)} of {TOKENS} tokens, phases of the hand-over: {phases}")
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(arrivals)]
    return Sample(gaps[0], float(np.median(gaps[1:])), phases)


async def both_workers(session: aiohttp.ClientSession, url: str) -> None:
    """A router is ready with a decode worker alone, which then computes prompts itself, without a hand-over.

    Raises ``TimeoutError`` if the prefill worker stays away.
    """
    async with asyncio.timeout(READY_S):
        while True:
            async with session.get(url + "/cluster") as response:
                if {worker["role"] for worker in (await response.json())["workers"]} >= {"prefill", "decode"}:
                    return
            await asyncio.sleep(0.1)


def copy_bandwidth() -> float:
    """Bytes per second of one thread's copy of 64 MiB: what shared memory could give at best."""
    source = np.ones(64 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return source.nbytes / best


async def measure_handover(options: HandoverOptions) -> int:
    """Prints the table; 0 if the median stays within the budget."""
    port, rng = free_port(), random.Random(options.seed)  # noqa: S311 - prompts
    words = [
        sys.executable, "-m", "pagerelay.cli", "up", "--port", str(port), "--model", options.model_path,
        "--set", f"worker.transport={options.transport}", "--set", "router.workers_endpoint=tcp://127.0.0.1:0",
    ]  # fmt: skip
    samples: list[Sample] = []
    async with running(words, port) as server, aiohttp.ClientSession() as session:
        await server.wait_ready(READY_S)
        await both_workers(session, server.url)
        for turn in range(options.requests + 5):
            prompt = [10 + rng.randrange(4000) for _ in range(options.prompt_tokens)]
            sample = await one_stream(session, server.url, prompt)
            if turn >= 5:  # the first ones open links and segments
                samples.append(sample)
        async with session.get(server.url + "/cluster") as response:
            workers = (await response.json())["workers"]
    decode = next(worker for worker in workers if worker["role"] == "decode")
    moved = decode["counters"]["fetched_bytes"].get(options.transport, 0) / (options.requests + 5)
    bandwidth = copy_bandwidth()
    budget_ms = BUDGET_MS + moved / bandwidth * 1e3
    added = [sample.added_ms for sample in samples]
    print(f"{len(samples)} requests of {options.prompt_tokens} tokens, {options.transport}, "
          f"{moved / 1e6:.2f} MB each; copy bandwidth {bandwidth / 1e9:.1f} GB/s")  # fmt: skip
    print("| ms | p50 | p99 |\n| --- | --- | --- |")
    rows = [(f"{name} (D)", [s.phases.get(name, 0.0) for s in samples]) for name in PHASES]
    rows += [("gap before the 2nd token", [sample.second_ms for sample in samples])]
    rows += [("gap before later tokens", [sample.later_ms for sample in samples])]
    rows += [("added to the 2nd token", added)]
    for name, values in rows:
        print(f"| {name} | {number(percentile(values, 50))} | {number(percentile(values, 99))} |")
    median = percentile(added, 50) or 0.0
    print(f"budget: {BUDGET_MS:g} ms + bytes/bandwidth = {budget_ms:.2f} ms; median added {median:.2f} ms")
    report = header(options=options, samples=samples, budget_ms=budget_ms)
    print(f"written: {write_json(stamped(options.results, 'handover'), report)}")
    return 0 if median <= budget_ms else 1
