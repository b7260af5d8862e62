"""Short requests at a cluster on which a seeded plan of faults is carried out, and what came of them.

``python tests/helpers/chaos.py --seed 1 --requests 10000`` prints the table; ``make chaos`` calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from cluster import FREE_PORTS, Cluster, sse
from faults import FaultyCluster, Partitions, Plan, Rates

from pagerelay.common.config import load_config

STORM = Rates(drop=0.01, duplicate=0.01, delay=0.02, corrupt=0.005)
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2", "decode-3")
DEADLINE_S = 30.0
"""``router.request_timeout_s``; a client hears of its request's end at most a second later."""
NUM_DISTINCT = 300
CORRUPT = "pagerelay_corrupt_blocks_total"


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    fields: dict[str, Any]


@dataclass
class Outcome:
    """``ended``: "exact", "wrong", "untyped", or the code of a typed error."""

    ended: Counter[str] = field(default_factory=Counter)
    late: int = 0
    """Requests that ended after their deadline and a second."""
    slowest_s: float = 0.0
    wall_s: float = 0.0
    kills: list[str] = field(default_factory=list)
    partitions: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, float] = field(default_factory=dict)
    corrupt_blocks: float = 0
    """Found by their checksums."""
    leaked: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return sum(self.ended.values()) - self.ended["exact"]


def asks(seed: int, count: int = NUM_DISTINCT) -> list[Ask]:
    """Short requests, a third of them sampled; the same for the same seed."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = [3 + rng.randrange(4000) for _ in range(rng.randint(1, 80))]
        sampled = {"temperature": 0.8, "seed": 1000 + index} if index % 3 == 0 else {"temperature": 0}
        made.append(Ask(prompt, rng.randint(1, 8), {"ignore_eos": True, **sampled}))
    return made


async def ask(session: aiohttp.ClientSession, url: str, one: Ask) -> tuple[list[int], str | None]:
    """(ids, code of the typed error if it ended in one). Anything but the two raises."""
    body = {"prompt": one.prompt, "max_tokens": one.max_tokens, "stream": True, **one.fields}
    async with session.post(url + "/generate", json=body) as response:
        if response.status != 200:
            return [], str((await response.json())["error"]["code"])
        ids: list[int] = []
        error = None
        async for event in sse(response, body):
            if "error" in event:
                error = str(event["error"]["code"])
            for choice in event.get("choices", ()):
                ids += choice["token_ids"]
    return ids, error


async def expected(url: str, wanted: list[Ask]) -> list[list[int]]:
    """The answers of an undisturbed cluster."""
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(ask(session, url, one) for one in wanted))
    assert all(code is None for _, code in answers)
    return [ids for ids, _ in answers]


@contextmanager
def stormy(model: Path, plan: Plan, **settings: object) -> Iterator[Cluster]:
    """A cluster of two prefill and three decode workers under the plan, unless settings say otherwise."""
    flags = FREE_PORTS | {"model.path": str(model), "cache.num_blocks": "160", "engine.threads": "1"}
    flags |= {"cluster.prefill": "2", "cluster.decode": "3", "router.request_timeout_s": str(DEADLINE_S)}
    flags |= {"log_level": "error"}
    flags |= {name.replace("__", "."): str(value) for name, value in settings.items()}
    with FaultyCluster(load_config(None, flags, {}), plan, restart=False, quiet=True) as launcher:
        yield Cluster(launcher)


class Storm:
    """One run. ``kill_every_s`` 0: nobody is killed."""

    def __init__(self, cluster: Cluster, wanted: list[Ask], answers: list[list[int]], kill_every_s: float):
        self.cluster, self.wanted, self.answers = cluster, wanted, answers
        self.kill_every_s = kill_every_s
        assert isinstance(cluster.launcher, FaultyCluster)
        self.launcher = cluster.launcher
        self.plan = cluster.launcher.plan
        self.outcome = Outcome()

    async def run(self, requests: int, clients: int, most_s: float) -> Outcome:
        rng, began = random.Random(self.plan.seed + 1), time.monotonic()
        order = iter([rng.randrange(len(self.wanted)) for _ in range(requests)])
        self.launcher.storm(True)
        killer = asyncio.create_task(self._kill_forever())
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S * 2)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def client() -> None:
                for index in order:
                    await self._one(session, index)
                    if time.monotonic() - began > most_s:
                        return

            await asyncio.gather(*(client() for _ in range(clients)))
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        self.outcome.wall_s = time.monotonic() - began
        self.launcher.storm(False)
        await self._calm(began)
        return self.outcome

    async def _one(self, session: aiohttp.ClientSession, index: int) -> None:
        began, outcome = time.monotonic(), self.outcome
        try:
            ids, code = await ask(session, self.cluster.url, self.wanted[index])
        except (aiohttp.ClientError, ValueError, KeyError, TimeoutError) as error:
            ids, code = [], "untyped"
            outcome.complaints.append(f"request {index}: {type(error).__name__} {error}")
        took_s = time.monotonic() - began
        outcome.slowest_s = max(outcome.slowest_s, took_s)
        outcome.late += took_s > DEADLINE_S + 1
        due = self.answers[index]
        if code is None:
            code = "exact" if ids == due else "wrong"
        elif ids != due[: len(ids)]:
            code = "wrong"  # what came before the error must be right too
        if code == "wrong":
            outcome.complaints.append(f"request {index}: {ids} where {due} were due")
        outcome.ended[code] += 1

    async def _kill_forever(self) -> None:
        turn = 0
        while self.kill_every_s:
            await asyncio.sleep(self.kill_every_s)
            name = self.plan.victim(turn, WORKERS)
            turn += 1
            if self.cluster.child(name).process.poll() is None:
                self.cluster.signal(name, signal.SIGKILL)
                self.outcome.kills.append(name)
                await asyncio.to_thread(self.cluster.child(name).process.wait, 10)
                self.cluster.revive(name)

    async def _calm(self, began: float) -> None:
        """The faults are over: everybody is back soon, and so are the blocks."""
        if self.plan.partitions is not None:
            self.outcome.partitions = int((time.monotonic() - began) // self.plan.partitions.every_s)

        async def all_here() -> bool:
            return len(await self.cluster.workers()) == len(WORKERS)

        await self.cluster.until("all workers are back", all_here, 60)
        await self.cluster.idle(30)
        for log in self.launcher.plan_folder.glob("*.log"):
            words = [line.split() for line in log.read_text().splitlines()]
            self.outcome.faults.update(w[3] for w in words if w[0] in ("router", "peer") and len(w) > 3)
        await self._blocks_back(15.0)
        self.outcome.corrupt_blocks = await self.cluster.metric(CORRUPT)
        for line in (await self.cluster.get("/metrics")).splitlines():
            if line.startswith("pagerelay_recoveries_total{"):
                cause = line.split('"')[1]
                self.outcome.recoveries[cause] = float(line.rpartition(" ")[2])

    async def _blocks_back(self, within_s: float) -> None:
        """By the workers' own ledgers: what no lease and no request accounts for after a lease's time is
        lost."""
        deadline = time.monotonic() + within_s
        while True:
            states = {
                file.stem: json.loads(file.read_text()) for file in self.launcher.plan_folder.glob("*.ledger")
            }
            self.outcome.leaked = {n: s["total"] - s["free"] - s["cached"] for n, s in states.items()}
            if not any(self.outcome.leaked.values()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        self.outcome.complaints += [f"{n}: its ledger is broken" for n, s in states.items() if s["broken"]]


def table(outcome: Outcome, plan: Plan, transport: str) -> str:
    total = sum(outcome.ended.values())
    rows = [
        ("seed, transport", f"{plan.seed}, {transport}"),
        ("requests", f"{total} in {outcome.wall_s:.0f} s"),
        ("exact tokens", f"{outcome.ended['exact']}"),
        ("typed errors", ", ".join(f"{k} {v}" for k, v in sorted(outcome.ended.items()) if k != "exact")),
        ("share of errors", f"{100 * outcome.errors / max(1, total):.2f} %"),
        ("wrong or untyped", f"{outcome.ended['wrong'] + outcome.ended['untyped']}"),
        ("over the deadline", f"{outcome.late} (slowest {outcome.slowest_s:.1f} s of {DEADLINE_S:g} s)"),
        ("blocks leaked", f"{sum(outcome.leaked.values())} on {len(outcome.leaked)} workers"),
        ("kills, partitions", f"{len(outcome.kills)}, {outcome.partitions}"),
        ("faulty messages", ", ".join(f"{k} {v}" for k, v in sorted(outcome.faults.items()))),
        ("corrupt KV blocks", f"{outcome.corrupt_blocks:.0f} found by checksum"),
        ("recoveries", ", ".join(f"{k} {v:.0f}" for k, v in sorted(outcome.recoveries.items()))),
    ]
    return "\n".join(f"| {name:<18}| {value}" for name, value in rows)


async def storm(
    model: Path,
    *,
    seed: int,
    requests: int,
    clients: int = 16,
    most_s: float = 1e9,
    transport: str = "auto",
    kill_every_s: float = 10.0,
    partition_every_s: float = 30.0,
    rates: Rates = STORM,
    damage_blocks: bool = True,
) -> tuple[Outcome, Plan]:
    wanted = asks(seed)
    with tempfile.TemporaryDirectory(prefix="pagerelay-chaos-") as folder:
        plan = Plan(
            seed=seed,
            rates=rates,
            damage_blocks=damage_blocks,
            partitions=Partitions(every_s=partition_every_s, length_s=3.0, workers=WORKERS),
            folder=folder,
        )

        with stormy(model, plan, worker__transport=transport) as cluster:
            answers = await expected(cluster.url, wanted)
            run = Storm(cluster, wanted, answers, kill_every_s)
            return await run.run(requests, clients, most_s), plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED") or 1))
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("MINUTES") or 60))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto")
    parser.add_argument(
        "--damage-blocks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="damage raw KV frames, too; only checksums find that",
    )
    args = parser.parse_args()
    from pagerelay.common.model.fetch import TINY_MODEL, resolve_model

    model = resolve_model(TINY_MODEL, progress=print)
    outcome, plan = asyncio.run(
        storm(
            model,
            seed=args.seed,
            requests=args.requests,
            clients=args.clients,
            most_s=args.minutes * 60,
            transport=args.transport,
            damage_blocks=args.damage_blocks,
        )
    )
    print(table(outcome, plan, args.transport))
    for complaint in outcome.complaints[:20]:
        print(complaint)
    bad = outcome.ended["wrong"] + outcome.ended["untyped"] + outcome.late + sum(outcome.leaked.values())
    return 1 if bad or outcome.errors > 0.01 * sum(outcome.ended.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
