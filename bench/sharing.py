"""``sharing``: KV that several answers to one prompt need, and beams, beside as many requests of their own.

One prefill and one decode worker. A figure is the most blocks that the decode worker held, as its heartbeats
say, while ``n`` answers (or a search of so many beams) were computed; alone it is as many requests at once,
each with a prompt of its own of the same length.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from msgspec import Struct

from pagerelay.bench.handover import READY_S, both_workers
from pagerelay.bench.report import header, markdown_table, stamped, write_json
from pagerelay.bench.server import free_port, running

HEARTBEAT_S = 0.1
WIDTHS = (2, 4, 6, 8)
VOCAB = 20_000
"""Prompts are of ids below this: any model's vocabulary has them."""


class SharingOptions(Struct, frozen=True, kw_only=True):
    """Each prompt has ``prompt_tokens``, each answer ``max_tokens``."""

    model_path: str
    prompt_tokens: int = 512
    max_tokens: int = 64
    seed: int = 1
    results: str = "bench/results"


class Sample(Struct, frozen=True):
    """Most blocks held on the decode worker, and KV bytes shipped to it."""

    blocks: int
    shipped: int


class Meter:
    """Looks at the decode worker while something runs."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def _decoder(self) -> tuple[int, int]:
        """Blocks held now, bytes fetched so far."""
        async with self._session.get(self._url + "/cluster") as response:
            workers = (await response.json())["workers"]
        (worker,) = [worker for worker in workers if worker["role"] == "decode"]
        return worker["load"]["blocks"]["held"], sum(worker["counters"]["fetched_bytes"].values())

    async def measure(self, bodies: Sequence[dict[str, Any]]) -> Sample:
        """Sends all at once. Raises ``ValueError`` if one is refused."""
        await asyncio.sleep(10 * HEARTBEAT_S)
        _, before = await self._decoder()
        asked = asyncio.gather(*(self._ask(body) for body in bodies))
        most = 0
        while not asked.done():
            await asyncio.sleep(HEARTBEAT_S / 2)
            most = max(most, (await self._decoder())[0])
        await asked
        await asyncio.sleep(10 * HEARTBEAT_S)
        return Sample(most, (await self._decoder())[1] - before)

    async def _ask(self, body: dict[str, Any]) -> None:
        async with self._session.post(self._url + "/generate", json=body) as response:
            if response.status != 200:
                raise ValueError(f"a request failed: {await response.text()}")
            await response.read()


async def measure_sharing(options: SharingOptions) -> int:
    """Prints the table; 0 if what was shared was shipped once, and held by fewer blocks than alone."""
    rng = random.Random(options.seed)  # noqa: S311 - prompts

    def body(**fields: Any) -> dict[str, Any]:
        prompt = [rng.randrange(1000, VOCAB) for _ in range(options.prompt_tokens)]
        return {"prompt": prompt, "max_tokens": options.max_tokens, "ignore_eos": True} | fields

    ways: dict[str, Callable[[int], list[dict[str, Any]]]] = {
        "alone": lambda width: [body(seed=at) for at in range(width)],
        "n": lambda width: [body(n=width, seed=1)],
        "beams": lambda width: [body(n=width, use_beam_search=True, temperature=0)],
    }
    port = free_port()
    words = [
        *(sys.executable, "-m", "pagerelay.cli", "up", "--port", str(port), "--model", options.model_path),
        *("--set", "router.workers_endpoint=tcp://127.0.0.1:0", "--set", f"router.heartbeat_s={HEARTBEAT_S}"),
    ]
    found: dict[str, dict[int, Sample]] = {way: {} for way in ways}
    async with (
        running(words, port) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S * 5)) as session,
    ):
        await server.wait_ready(READY_S)
        await both_workers(session, server.url)
        meter = Meter(session, server.url)
        for width in (1, *WIDTHS):
            for way, bodies in ways.items():
                if width > 1 or way == "alone":
                    found[way][width] = await meter.measure(bodies(width))
    one = found["alone"][1]
    rows = []
    for width in WIDTHS:
        alone = found["alone"][width].blocks
        shared = [found[way][width] for way in ("n", "beams")]
        rows.append(
            [str(width), str(alone)]
            + [cell for it in shared for cell in (str(it.blocks), f"{1 - it.blocks / alone:.0%}")]
            + [f"{it.shipped / one.shipped:.2f}" for it in shared]
        )
    head = ["answers or beams", "blocks alone", "n: blocks", "saved", "beams: blocks", "saved"]
    print(markdown_table([*head, "n: bytes / one", "beams: bytes / one"], rows))
    print(
        f"{options.prompt_tokens} + {options.max_tokens} tokens, one answer alone holds {one.blocks} blocks"
    )
    report = header(
        options=options, samples={way: {str(w): s for w, s in of.items()} for way, of in found.items()}
    )
    print(f"written: {write_json(stamped(options.results, 'sharing'), report)}")
    shared_all = [found[way][width] for way in ("n", "beams") for width in WIDTHS]
    fewer = all(found[way][w].blocks < found["alone"][w].blocks for way in ("n", "beams") for w in WIDTHS)
    return 0 if fewer and all(sample.shipped == one.shipped for sample in shared_all) else 1
