"""Each of P and D killed at every state of a request and at every token of its stream, and each end of a
hand-over from D to D at every state: what clients saw.

``python tests/helpers/killmatrix.py`` prints the whole table; ``make kill-matrix`` calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from chaos import stormy
from cluster import Cluster, sse
from faults import FaultyCluster, Plan, Point

NUM_TOKENS = 42
LAST_INDEX = 40
PROMPT_TOKENS = 90
CHUNK = 32
"""``engine.max_batch_tokens``: the prompt takes three chunks, so P can die between them."""
GAP_S = 4.0
SETTINGS: dict[str, object] = {
    "engine__max_batch_tokens": CHUNK,
    "cache__prefix_cache": "false",
    "router__request_timeout_s": 60,
}
HANDOVER_TOKENS = 120
STATES = {
    role: places.split()
    for role, places in {
        "prefill": "WAITING COMPUTING chunk:1 chunk:2 chunk:3 LEASED RELEASED EXPIRED ABORTED",
        "decode": "QUEUED RESERVED FETCHING READY RUNNING FINISHED PREEMPTED FETCH_FAILED ABORTED",
        "giver": "LEASED RELEASED EXPIRED ABORTED",
        "taker": "QUEUED RESERVED FETCHING READY RUNNING token:60 FINISHED PREEMPTED FETCH_FAILED ABORTED",
    }.items()
}
"""By who dies. A giver is a decode worker that drains and hands its sequence over to the taker."""


def _on(role: str, at: str, **how: Any) -> Point:
    return Point(role=role, at=at, **how)


FIRST = {
    ("prefill", "EXPIRED"): _on("decode", "FETCHING", does="stall fetch"),
    ("prefill", "ABORTED"): _on("decode", "FETCHING"),
    ("decode", "PREEMPTED"): _on("decode", "token:7", does="starve"),
    ("decode", "FETCH_FAILED"): _on("decode", "FETCHING", does="break fetch"),
    ("decode", "ABORTED"): _on("decode", "FETCHING", victim="peer"),
    ("giver", "EXPIRED"): _on("decode", "FETCHING", attempt=2, does="stall fetch"),
    ("giver", "ABORTED"): _on("decode", "FETCHING", attempt=2),
    ("taker", "PREEMPTED"): _on("decode", "token:60", attempt=2, does="starve"),
    ("taker", "FETCH_FAILED"): _on("decode", "FETCHING", attempt=2, does="break fetch"),
    ("taker", "ABORTED"): _on("decode", "FETCHING", attempt=2, victim="peer"),
}
"""What has to go wrong before the state is reached at all."""
DRAIN = _on("decode", "token:3", signal=signal.SIGTERM)


@dataclass(frozen=True)
class Cell:
    role: str
    at: str
    sampled: bool
    seed: int

    @property
    def hands_over(self) -> bool:
        return self.role in ("giver", "taker")

    @property
    def points(self) -> tuple[Point, ...]:
        if self.role == "prefill" and self.at.startswith("token:") and self.at != "token:0":
            return (_on("decode", self.at, victim="peer"),)  # when D makes that token
        role = "decode" if self.hands_over else self.role
        death = _on(role, self.at, attempt=2 if self.role == "taker" else 1)
        first = FIRST.get((self.role, self.at))
        return (*((DRAIN,) if self.hands_over else ()), *((first,) if first else ()), death)

    @property
    def body(self) -> dict[str, Any]:
        prompt = [3 + (self.seed * 7919 + 31 * at) % 4000 for at in range(PROMPT_TOKENS)]
        fields = {"temperature": 0.8, "top_p": 0.95} if self.sampled else {"temperature": 0}
        return {
            "prompt": prompt,
            "max_tokens": HANDOVER_TOKENS if self.hands_over else NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "seed": self.seed,
            **fields,
        }


@dataclass(frozen=True)
class Result:
    cell: Cell
    transport: str
    exact: bool
    killed: bool
    gap_s: float
    recoveries: int
    error: str = ""


def cells(every: int = 1) -> list[Cell]:
    """All, or each ``every``-th of them."""
    places = [(role, state) for role, states in STATES.items() for state in states]
    places += [(role, f"token:{index}") for index in range(LAST_INDEX + 1) for role in ("prefill", "decode")]
    made = [
        Cell(role, at, sampled, 100_000 + 2 * number + sampled)
        for number, (role, at) in enumerate(places)
        for sampled in (False, True)
    ]
    return made[::every]


async def stream(url: str, body: dict[str, Any]) -> tuple[list[int], float, int, str]:
    """(ids, longest wait between two pieces or for the first, recoveries, error code)."""
    ids, longest, recoveries = [], 0.0, 0
    last = time.monotonic()
    async with aiohttp.ClientSession() as session, session.post(url + "/generate", json=body) as response:
        if response.status != 200:
            return [], 0.0, 0, str((await response.json())["error"]["code"])
        async for event in sse(response, body):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if "error" in event:
                return ids, longest, recoveries, str(event["error"]["code"])
            for choice in event["choices"]:
                ids += choice["token_ids"]
            recoveries = (event.get("timings") or {}).get("recoveries", recoveries)
    return ids, longest, recoveries, ""


class Matrix:
    """Runs cells one after another on one cluster; what was killed is started again meanwhile."""

    def __init__(self, cluster: Cluster, transport: str) -> None:
        self.cluster, self.transport = cluster, transport
        assert isinstance(cluster.launcher, FaultyCluster)
        self.names = [child.name for child in cluster.launcher.children if child.name != "router"]

    async def cell(self, cell: Cell, expected: list[int]) -> Result:
        await self.all_here()
        ids, gap_s, recoveries, error = await stream(self.cluster.url, cell.body)
        # FINISHED and P's last states come with or after the client's last byte.
        deadline = time.monotonic() + 2.0
        while not (killed := self._all_happened(cell)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # until the kernel has buried the dead
        return Result(cell, self.transport, ids == expected, killed, gap_s, recoveries, error)

    def _all_happened(self, cell: Cell) -> bool:
        """Every point of the cell, by the workers' logs."""
        logs = (log.read_text() for log in self.cluster.launcher.plan_folder.glob("*.log"))
        return sum(log.count(f" of {cell.seed} : ") for log in logs) == len(cell.points)

    async def all_here(self) -> None:
        """Every start of every worker is here, and nobody who is dead or drains is thought to be. Starts
        again what has ended."""

        async def here() -> bool:
            for name in self.names:
                if self.cluster.child(name).process.poll() is not None:
                    self.cluster.revive(name)
            pids = {self.cluster.child(name).process.pid for name in self.names}
            workers = await self.cluster.workers()
            return {w["pid"] for w in workers} == pids and all(w["state"] == "ready" for w in workers)

        await self.cluster.until("all workers are here", here, 60)


@contextmanager
def doomed(model: Path, wanted: list[Cell], transport: str, **settings: object) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="pagerelay-matrix-") as folder:
        points = {str(cell.seed): cell.points for cell in wanted}
        plan = Plan(seed=0, points=points, folder=folder)
        shape: dict[str, object] = {"cluster__prefill": 2, "cluster__decode": 3}
        shape |= {"worker__drain": "hand-over", "worker__lease_s": 1.6}
        with stormy(model, plan, worker__transport=transport, **(shape | SETTINGS | settings)) as cluster:
            yield cluster


async def undisturbed(model: Path, wanted: list[Cell]) -> list[list[int]]:
    with doomed(model, [], "auto") as calm:
        answers = await asyncio.gather(*(stream(calm.url, cell.body) for cell in wanted))
    assert not any(error for *_, error in answers)
    return [ids for ids, *_ in answers]


async def run_cells(model: Path, wanted: list[Cell], transport: str) -> list[Result]:
    expected = await undisturbed(model, wanted)
    results: list[Result] = []
    with doomed(model, wanted, transport) as cluster:
        matrix = Matrix(cluster, transport)
        for cell, ids in zip(wanted, expected, strict=True):
            results.append(await matrix.cell(cell, ids))
            if not passed(results[-1]):
                print("FAILED", results[-1], file=sys.stderr, flush=True)
            if len(results) % 10 == 0:
                print(f"{transport}: {len(results)} of {len(wanted)} cells", file=sys.stderr, flush=True)
    return results


def passed(result: Result) -> bool:
    return result.exact and result.killed and result.gap_s <= GAP_S


NAMES = {"prefill": "P", "decode": "D", "giver": "D giving", "taker": "D taking"}


def table(results: list[Result]) -> str:
    """A row for each place: cells that passed of those tried, and the longest gap."""
    by_place: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        at = result.cell.at
        if at.startswith("token:") and not result.cell.hands_over:
            tens = int(at[6:]) // 10 * 10
            at = f"token {tens}…{min(tens + 9, LAST_INDEX)}"
        by_place.setdefault((NAMES[result.cell.role], at), []).append(result)
    columns = [(t, s) for t in ("shm", "tcp") for s in (False, True)]
    head = ["killed at", *(f"{t} {'sampled' if s else 'greedy'}" for t, s in columns), "longest gap"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for (role, at), found in by_place.items():
        row = [f"{role} {at}"]
        for transport, sampled in columns:
            here = [r for r in found if r.transport == transport and r.cell.sampled == sampled]
            row.append(f"{sum(map(passed, here))}/{len(here)}")
        row.append(f"{max(r.gap_s for r in found):.2f} s")
        lines.append(" | ".join(row))
    total = sum(map(passed, results))
    exact = sum(result.exact for result in results)
    lines.append(
        f"{total} of {len(results)} cells passed; ids equal in {exact}; "
        f"not killed in {sum(not r.killed for r in results)}; "
        f"longest gap {max(r.gap_s for r in results):.2f} s"
    )
    return "\n".join(f"| {line} |" if "|" in line else line for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="each n-th cell only")
    parser.add_argument("--jobs", type=int, default=3, help="clusters at once, each with its own processes")
    parser.add_argument("--shard", type=int, help="run this share of the cells, and print results as JSON")
    parser.add_argument("--transport", choices=("shm", "tcp"), action="append")
    args = parser.parse_args()
    transports = args.transport or ["shm", "tcp"]
    if args.shard is None:
        words = [sys.executable, __file__, "--every", str(args.every), "--jobs", str(args.jobs)]
        for transport in transports:
            words += ["--transport", transport]
        shards = [
            subprocess.Popen([*words, "--shard", str(number)], stdout=subprocess.PIPE)
            for number in range(args.jobs)
        ]
        results = [
            msgspec.json.decode(line, type=Result)
            for shard in shards
            for line in shard.communicate()[0].splitlines()
        ]
        results.sort(key=lambda result: (result.transport, result.cell.seed))
        wanted = len(cells(args.every)) * len(transports)
        print(table(results))
        return 0 if len(results) == wanted and all(map(passed, results)) else 1
    from pagerelay.common.model.fetch import TINY_MODEL, resolve_model

    model = resolve_model(TINY_MODEL, progress=lambda line: print(line, file=sys.stderr))
    mine = cells(args.every)[args.shard :: args.jobs]
    for transport in transports:
        for result in asyncio.run(run_cells(model, mine, transport)):
            print(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
