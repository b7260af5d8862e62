from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from pagerelay.bench import traffic
from pagerelay.bench.client import Record
from pagerelay.bench.traffic import Job, closed_loop, open_loop, poisson_schedule


class Recorder:
    """Answers after ``takes_s``, unless the deadline cuts it; remembers how many were open at once."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.open = self.most = 0
        self.sent: list[str] = []

    async def __call__(self, system: str, user: str, max_tokens: int, deadline: float | None) -> Record:
        clock = asyncio.get_running_loop().time
        record = Record(clock())
        self.sent.append(user)
        self.open += 1
        self.most = max(self.most, self.open)
        left = self.takes_s if deadline is None else min(self.takes_s, deadline - clock())
        await asyncio.sleep(left)
        self.open -= 1
        record.end, record.outcome = clock(), "ok" if left == self.takes_s else "cut"
        return record


def jobs(count: int) -> list[Job]:
    return [Job("", str(number), 1) for number in range(count)]


def test_the_schedule_is_the_seeds_alone() -> None:
    one = poisson_schedule(5.0, random.Random(3), requests=200)
    assert one == poisson_schedule(5.0, random.Random(3), requests=200)
    assert one != poisson_schedule(5.0, random.Random(4), requests=200)
    assert one == sorted(one)
    assert len(one) == 200
    assert one[0] > 0


def test_the_schedule_has_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = poisson_schedule(50.0, random.Random(0), duration_s=400.0)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.02, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert times[-1] < 400.0


def test_whichever_bound_comes_first_ends_the_schedule() -> None:
    assert len(poisson_schedule(10.0, random.Random(0), requests=5, duration_s=100)) == 5
    assert len(poisson_schedule(10.0, random.Random(0), requests=5000, duration_s=1)) < 50


def test_a_schedule_without_bound_or_beyond_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_REQUESTS", 100)
    for arguments in (
        {"rate": 0.0, "requests": 1},
        {"rate": float("nan"), "requests": 1},
        {"rate": 1.0},
        {"rate": 1.0, "duration_s": 1e9},
        {"rate": 1000.0, "duration_s": 10.0},
    ):
        with pytest.raises(ValueError, match=r"rate|needs|duration|more than"):
            poisson_schedule(rng=random.Random(0), **arguments)  # type: ignore[arg-type]


async def test_a_closed_loop_keeps_its_number_of_clients() -> None:
    send = Recorder(0.01)
    run = await closed_loop(send, jobs(10), clients=3, limit_s=10)
    assert (len(run.records), send.most, run.unsent) == (10, 3, 0)
    assert send.sent == [str(number) for number in range(10)]


async def test_a_closed_loop_ends_at_its_limit() -> None:
    run = await closed_loop(Recorder(0.2), jobs(10), clients=2, limit_s=0.3)
    assert [record.outcome for record in run.records] == ["ok", "ok", "cut", "cut"]
    assert run.unsent == 6
    assert run.wall_s < 1


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    send = Recorder(0.3)
    run = await open_loop(send, jobs(10), [number * 0.01 for number in range(10)], limit_s=10)
    assert send.most == 10
    assert len(run.records) == len(run.lags_s) == 10
    assert all(0 <= lag < 0.2 for lag in run.lags_s)


async def test_an_open_loop_ends_at_its_limit_and_never_overfills(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await open_loop(Recorder(0.01), jobs(3), [0.0, 0.01, 5.0], limit_s=0.1)
    assert (len(run.records), run.unsent) == (2, 1)
    monkeypatch.setattr(traffic, "MAX_IN_FLIGHT", 2)
    run = await open_loop(Recorder(0.2), jobs(3), [0.0, 0.0, 0.0], limit_s=10)
    assert sorted(record.outcome for record in run.records) == ["failed", "ok", "ok"]
