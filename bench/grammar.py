"""``grammar``: what holding answers to a grammar costs between two tokens.

One cluster is asked the same questions in each way in turn, never at once, by one client and by several. A
figure is the ratio of a way's mean time per token after the first to that of free answers of the same round,
so that a machine whose speed drifts favours neither. All answers are cut at the same length, before a grammar
is done.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import aiohttp
from msgspec import Struct

from pagerelay.bench.client import Client, Record, Target
from pagerelay.bench.handover import READY_S, both_workers
from pagerelay.bench.report import header, markdown_table, number, stamped, write_json
from pagerelay.bench.server import free_port, running
from pagerelay.bench.stats import percentile
from pagerelay.bench.workloads import random_words

MOST = 1.10
"""Times a free answer's time between tokens."""
_TEXT = {"type": "string", "minLength": 2000}
_RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 4, "maxItems": 4},
        "size": {"type": "object", "properties": {"w": {"type": "number"}, "h": {"type": "number"}}},
        "text": _TEXT,
    },
    "required": ["id", "tags", "size", "text"],
    "additionalProperties": False,
}
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": -999, "maximum": 999}, "minItems": 600}
WAYS: dict[str, dict[str, Any]] = {
    "free": {},
    "object": {"guided_json": _RECORD},
    "numbers": {"guided_json": _NUMBERS},
    "regex": {"guided_regex": "([a-z]{2,9} ){500,600}"},
}


class GrammarOptions(Struct, frozen=True, kw_only=True):
    """``rounds`` of each way with one client, and as many with ``clients`` at a time."""

    model_path: str
    rounds: int = 8
    clients: int = 8
    max_tokens: int = 96
    seed: int = 1
    results: str = "bench/results"


class Sample(Struct, frozen=True):
    """Of one way in one round, in seconds: mean time per token after the first, longest time to the first."""

    tpot_s: float
    ttft_s: float


async def ask(client: Client, questions: list[str], max_tokens: int) -> Sample:
    """All at once. Raises ``ValueError`` if an answer is not whole."""
    records: list[Record] = await asyncio.gather(
        *(client.send("", question, max_tokens) for question in questions)
    )
    for record in records:
        if record.outcome != "ok" or record.tokens != max_tokens:
            raise ValueError(f"{record.tokens} of {max_tokens} tokens: {record.error}")
    tpot, ttft = ([value for value in of if value is not None] for of in zip(
        *((record.tpot_s, record.ttft_s) for record in records), strict=True
    ))  # fmt: skip
    return Sample(sum(tpot) / len(tpot), max(ttft))


async def measure_grammar(options: GrammarOptions) -> int:
    """Prints the table; 0 if no grammar costs a tenth of the time between tokens, by the median."""
    rng = random.Random(options.seed)  # noqa: S311 - prompts
    port = free_port()
    words = [
        *(sys.executable, "-m", "pagerelay.cli", "up", "--port", str(port), "--model", options.model_path),
        *("--set", "router.workers_endpoint=tcp://127.0.0.1:0"),
    ]
    found: dict[int, dict[str, list[Sample]]] = {}
    async with (
        running(words, port) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S * 5)) as session,
    ):
        await server.wait_ready(READY_S)
        await both_workers(session, server.url)
        async with session.get(server.url + "/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        clients = {
            way: Client(Target(server.url + "/v1", model, "completions", fields), session, READY_S)
            for way, fields in WAYS.items()
        }
        first = {way: await ask(client, ["Once"], 4) for way, client in clients.items()}  # grammars are built
        for width in dict.fromkeys((1, options.clients)):
            found[width] = {way: [] for way in WAYS}
            for turn in range(options.rounds):
                questions = [f"Write about {random_words(rng, 8)}:" for _ in range(width)]
                order = list(WAYS)[turn % len(WAYS) :] + list(WAYS)[: turn % len(WAYS)]
                for way in order:
                    found[width][way].append(await ask(clients[way], questions, options.max_tokens))
    rows, cheap = [], True
    for width, of in found.items():
        for way, samples in of.items():
            ratios = [held.tpot_s / free.tpot_s for held, free in zip(samples, of["free"], strict=True)]
            middle = percentile(ratios, 50) or 0.0
            cheap &= middle < MOST
            rows.append(
                [str(width), way, number(1000 * (percentile([s.tpot_s for s in samples], 50) or 0.0)),
                 *(number(value) for value in (middle, min(ratios), max(ratios))),
                 number(1000 * first[way].ttft_s)]
            )  # fmt: skip
    head = [
        "clients",
        "answers",
        "ms a token",
        "ratio, median",
        "least",
        "most",
        "first token, unseen, ms",
    ]
    print(markdown_table(head, rows))
    samples_by_width = {str(width): of for width, of in found.items()}
    report = header(options=options, unseen=first, samples=samples_by_width)
    print(f"written: {write_json(stamped(options.results, 'grammar'), report)}")
    return 0 if cheap else 1
