"""Small shares of what ``make chaos``, ``make kill-matrix`` and ``make fuzz`` run at length."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import fuzz as fuzzing
import killmatrix
import pytest
from chaos import STORM, Storm, asks, expected, stormy
from cluster import Cluster
from faults import Partitions, Plan, Point, Rates

from pagerelay.common import states

FAST = Rates(drop=0.01, duplicate=0.01, delay=0.02, corrupt=0.005, reorder=0.005, truncate=0.005)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pagerelay-chaos-") as path:
        yield path


def ledger(folder: str, name: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((Path(folder) / f"{name}.ledger").read_text())
    return state


def test_the_same_seed_gives_the_same_plan() -> None:
    def fates(seed: int) -> list[str]:
        plan = Plan(seed=seed, rates=STORM)
        return [plan.fate("decode-1#0", "router", "out", n).kind for n in range(2000)]

    assert fates(1) == fates(1) != fates(2)
    shares = {kind: fates(1).count(kind) / 2000 for kind in ("drop", "delay", "pass")}
    assert shares["pass"] > 0.9
    assert 0.005 < shares["drop"] < 0.02 < 2 * shares["delay"]
    plan = Plan(seed=3, partitions=Partitions(every_s=30, length_s=3, workers=chaos.WORKERS))
    victims = [plan.partition(window) for window in range(20)]
    assert len(set(victims)) > 3
    worker, link = victims[1]
    assert plan.parted(worker, link, 58.0)
    assert not plan.parted(worker, link, 50.0)
    assert [plan.victim(turn, chaos.WORKERS) for turn in range(9)] == [
        Plan(seed=3).victim(turn, chaos.WORKERS) for turn in range(9)
    ]


async def test_a_storm_leaves_exact_tokens_or_typed_errors_and_no_block_behind(
    tiny_dir: Path, folder: str
) -> None:
    """Messages dropped, repeated, delayed, reordered, damaged; one kill; tcp, so that blocks travel too."""
    wanted = asks(5, 30)
    plan = Plan(seed=5, rates=FAST, folder=folder)
    with stormy(tiny_dir, plan, worker__transport="tcp") as cluster:
        answers = await expected(cluster.url, wanted)
        storm = Storm(cluster, wanted, answers, 2.0)
        outcome = await storm.run(100, 12, 4.0)
    assert not outcome.complaints
    assert outcome.late == 0
    assert set(outcome.leaked.values()) == {0}
    assert outcome.kills
    assert outcome.errors <= 1


def test_the_matrix_has_every_state_of_a_worker() -> None:
    at = {role: {c.at for c in killmatrix.cells() if c.role == role} for role in killmatrix.STATES}
    assert states.PREFILL.keys() <= at["prefill"]
    assert states.DECODE.keys() <= at["decode"] | at["giver"]
    assert states.DECODE.keys() <= at["giver"] | at["taker"]


async def test_killed_at_some_of_the_places_of_the_matrix(tiny_dir: Path) -> None:
    every = killmatrix.cells()
    places = {("prefill", "chunk:2"), ("prefill", "ABORTED"), ("decode", "PREEMPTED")}
    places |= {("giver", "LEASED"), ("taker", "FETCHING")}
    wanted = [c for c in every if (c.role, c.at) in places and c.sampled == (c.seed % 4 > 1)]
    assert len(wanted) == len(places)
    results = await killmatrix.run_cells(tiny_dir, wanted, "shm")
    assert all(map(killmatrix.passed, results)), killmatrix.table(results)


async def test_blocks_of_the_dead_come_back_and_a_restarted_worker_serves_at_once(
    tiny_dir: Path, folder: str
) -> None:
    """D dies with P's blocks leased to it; P dies with D's blocks reserved for it; nobody else restarts."""
    points = {
        "1": (Point(role="decode", at="FETCHING"),),
        "2": (Point(role="prefill", at="chunk:1"),),
    }
    shape: dict[str, object] = killmatrix.SETTINGS | {"cluster__prefill": 1, "cluster__decode": 1}
    with stormy(tiny_dir, Plan(seed=0, points=points, folder=folder), **shape) as cluster:
        for seed, victim, other in ((1, "decode-1", "prefill-1"), (2, "prefill-1", "decode-1")):
            body = killmatrix.Cell("", "", False, seed).body
            pid = cluster.child(other).process.pid
            task = asyncio.create_task(killmatrix.stream(cluster.url, body))
            died_at = await death(cluster, victim)
            await task

            await blocks_back(folder, other, died_at)
            cluster.revive(victim)

            async def here() -> bool:
                pids = {child.process.pid for child in cluster.launcher.children}
                return {w["pid"] for w in await cluster.workers()} == pids - {
                    cluster.child("router").process.pid
                }

            await cluster.until("the restarted worker has joined", here, 30)
            joined_at = time.monotonic()
            ids, _, recoveries, error = await killmatrix.stream(
                cluster.url, killmatrix.Cell("", "", False, 90 + seed).body
            )
            assert (len(ids), recoveries, error) == (killmatrix.NUM_TOKENS, 0, "")
            assert time.monotonic() - joined_at < 5
            assert cluster.child(other).process.pid == pid


async def blocks_back(folder: str, name: str, died_at: float) -> None:
    while True:
        state = ledger(folder, name)
        if state["at"] > died_at and state["free"] + state["cached"] == state["total"]:
            return
        assert time.monotonic() - died_at < 10, state
        await asyncio.sleep(0.05)


async def death(cluster: Cluster, name: str) -> float:
    while cluster.child(name).process.poll() is None:
        await asyncio.sleep(0.01)
    return time.monotonic()


@pytest.mark.slow
async def test_a_decode_worker_stopped_for_ten_seconds_under_load_doubles_nothing(
    tiny_dir: Path, folder: str
) -> None:
    wanted = asks(6, 60)
    with stormy(tiny_dir, Plan(seed=0, folder=folder)) as cluster:
        answers = await expected(cluster.url, wanted)
        storm = Storm(cluster, wanted, answers, 0)

        async def stop() -> None:
            await asyncio.sleep(2)
            cluster.signal("decode-1", signal.SIGSTOP)
            await asyncio.sleep(10)
            cluster.signal("decode-1", signal.SIGCONT)

        stopping = asyncio.create_task(stop())
        outcome = await storm.run(1_000_000, 12, 16.0)
        await stopping
    assert not outcome.complaints
    assert outcome.errors == 0
    assert outcome.slowest_s < 10
    assert set(outcome.leaked.values()) == {0}


async def test_rubbish_on_every_socket_is_counted_and_changes_nothing(tiny_dir: Path) -> None:
    report = await fuzzing.fuzz(tiny_dir, seed=2, frames=1500)
    assert fuzzing.passed(report), fuzzing.table(report)
