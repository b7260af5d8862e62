"""``speculation``: what guessing tokens by prompt lookup gains where answers copy, and costs where not.

Two clusters of the same shape run side by side, one with ``engine.speculative`` ngram, and are asked the same
in turn, never at once. A figure is the ratio of the two times of one question, so that a machine whose speed
drifts favours neither; the answers must be equal.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from msgspec import Struct

from pagerelay.bench.handover import READY_S, both_workers
from pagerelay.bench.report import header, markdown_table, number, stamped, write_json
from pagerelay.bench.server import Server, free_port, running
from pagerelay.bench.stats import percentile
from pagerelay.bench.workloads import random_words

SENTENCES = (
    "The harbour was quiet when Maria walked down to the boats in the morning.",
    "Two fishermen were mending their nets beside a small green hut.",
    "A letter from the city had come with the last post of the week.",
    "It said that the bridge over the river would be closed until the spring.",
    "Maria read it twice and put it into the pocket of her old coat.",
    "Her brother wanted to sell the house and to move closer to the school.",
    "The children liked the long way home because it led past the bakery.",
    "Nobody knew yet who would look after the garden and the three goats.",
)


class SpeculationOptions(Struct, frozen=True, kw_only=True):
    """``questions`` of each workload, ``clients`` of them at a time."""

    model_path: str
    questions: int = 12
    clients: int = 1
    max_tokens: int = 128
    num_speculative_tokens: int = 4
    seed: int = 1
    results: str = "bench/results"


class Sample(Struct, frozen=True):
    """The same questions asked of both: seconds without and with guesses, tokens, are the answers equal?"""

    plain_s: float
    guessing_s: float
    tokens: int
    equal: bool

    @property
    def speedup(self) -> float:
        return self.plain_s / self.guessing_s


def passage(rng: random.Random) -> str:
    return " ".join(rng.sample(SENTENCES, 5))


def fresh(rng: random.Random, turn: int) -> dict[str, Any]:
    """Sampled, since a small model's greedy answers repeat themselves."""
    text = f"Write a story in which these words come up: {random_words(rng, 8)}"
    return {"text": text, "temperature": 1.0, "seed": turn}


WORKLOADS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "repeat": lambda rng, _: {"text": f"Repeat this text word for word:\n\n{passage(rng)}"},
    "edit": lambda rng, _: {"text": f"Write this text again with Anna instead of Maria:\n\n{passage(rng)}"},
    "fresh": fresh,
}


async def answer(
    session: aiohttp.ClientSession, url: str, question: dict[str, Any], max_tokens: int
) -> tuple[str, int]:
    """Text and number of tokens. Raises ``ValueError`` if there is no answer."""
    body = {"temperature": 0.0} | question
    body |= {"max_tokens": max_tokens, "messages": [{"role": "user", "content": body.pop("text")}]}
    async with session.get(url + "/v1/models") as response:
        body["model"] = (await response.json())["data"][0]["id"]
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        found = await response.json()
        if response.status != 200:
            raise ValueError(f"a request failed: {found}")
    return found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"]


async def compare_once(
    session: aiohttp.ClientSession, urls: tuple[str, str], questions: list[dict[str, Any]], max_tokens: int,
    turn: int,
) -> Sample:  # fmt: skip
    """``urls``: without and with guesses; who is asked first changes with the turn."""
    seconds, answers = [0.0, 0.0], [[("", 0)], [("", 0)]]
    for which in (0, 1) if turn % 2 else (1, 0):
        began = time.perf_counter()
        asked = [answer(session, urls[which], question, max_tokens) for question in questions]
        answers[which] = list(await asyncio.gather(*asked))
        seconds[which] = time.perf_counter() - began
    tokens = sum(count for _, count in answers[0])
    return Sample(seconds[0], seconds[1], tokens, answers[0] == answers[1])


async def guesses(session: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """Tokens drafted and accepted so far, as the decode workers' last heartbeats say."""
    await asyncio.sleep(1.2)
    async with session.get(url + "/cluster") as response:
        counters = [worker["counters"] for worker in (await response.json())["workers"]]
    return sum(c["tokens_drafted"] for c in counters), sum(c["tokens_accepted"] for c in counters)


async def measure_speculation(options: SpeculationOptions) -> int:
    """Prints the table; 0 if all answers were equal and those that copy came sooner."""
    ports = free_port(), free_port()
    words = [
        [sys.executable, "-m", "pagerelay.cli", "up", "--port", str(port), "--model", options.model_path,
         "--set", "router.workers_endpoint=tcp://127.0.0.1:0", "--speculative", speculative,
         "--num-speculative-tokens", str(options.num_speculative_tokens)]
        for port, speculative in zip(ports, ("none", "ngram"), strict=True)
    ]  # fmt: skip
    async with (
        running(words[0], ports[0]) as plain,
        running(words[1], ports[1]) as guessing,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S * 5)) as session,
    ):
        for server in (plain, guessing):
            await server.wait_ready(READY_S)
            await both_workers(session, server.url)
        samples = {name: await _workload(name, session, (plain, guessing), options) for name in WORKLOADS}
    rows = []
    for name, (found, drafted, accepted) in samples.items():
        ratios = [sample.speedup for sample in found]
        kept = accepted / drafted if drafted else 0.0
        rows.append(
            [name, *(number(percentile(ratios, q)) for q in (50, 0, 100)), str(sum(s.tokens for s in found)),
             str(drafted), f"{kept:.0%}", str(sum(not sample.equal for sample in found))]
        )  # fmt: skip
    head = [
        "workload",
        "speed-up, median",
        "least",
        "most",
        "tokens",
        "guessed",
        "right",
        "answers that differ",
    ]
    print(markdown_table(head, rows))
    report = header(options=options, samples={name: found for name, (found, _, _) in samples.items()})
    print(f"written: {write_json(stamped(options.results, 'speculation'), report)}")
    equal = all(sample.equal for found, _, _ in samples.values() for sample in found)
    sooner = (percentile([sample.speedup for sample in samples["repeat"][0]], 50) or 0.0) > 1.0
    return 0 if equal and sooner else 1


async def _workload(
    name: str, session: aiohttp.ClientSession, servers: tuple[Server, Server], options: SpeculationOptions
) -> tuple[list[Sample], int, int]:
    rng = random.Random(f"{options.seed} {name}")  # noqa: S311 - prompts
    urls = servers[0].url, servers[1].url
    before = await guesses(session, urls[1])
    found = []
    for turn in range(0, options.questions, options.clients):
        at_once = [WORKLOADS[name](rng, turn + at) for at in range(options.clients)]
        found.append(await compare_once(session, urls, at_once, options.max_tokens, turn))
    after = await guesses(session, urls[1])
    return found, after[0] - before[0], after[1] - before[1]
