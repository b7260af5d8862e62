"""A seeded plan of what goes wrong between and inside the processes of a cluster.

Every decision is a pure function of the seed and of what it is about: the n-th message of one direction of
one link of one start of one process, the n-th kill, the n-th partition. So the same seed gives the same plan,
whatever the timing, and the logs of two runs can be compared. ``faulty.py`` carries the plan out.

All links are dialled by a worker (to a router, or to a prefill worker), so it is enough that the dialling
side mistreats what it sends and what it receives; routers and the production code know nothing of it.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from zygote import zygote

from pagerelay.cli.local import Child, LocalCluster
from pagerelay.common.config import Config

STORM_FLAG = "storm"
Link = Literal["router", "peer"]
Direction = Literal["out", "in"]


class Rates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of messages, 0 to 1; at most one of them happens to a message."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    """It and all behind it on its link wait for up to ``delay_s``: a connection keeps its order."""
    reorder: float = 0.0
    """It comes after the next one of its link."""
    truncate: float = 0.0
    corrupt: float = 0.0


class Fate(Struct, frozen=True):
    """What becomes of one message. ``amount`` in [0, 1): how much of a delay, where it is cut or flipped."""

    kind: str
    amount: float = 0.0


PASS = Fate("pass")


class Partitions(Struct, frozen=True, kw_only=True):
    """One worker loses one of its two kinds of links for ``length_s``, once in every ``every_s``."""

    every_s: float
    length_s: float
    workers: tuple[str, ...]


class Point(Struct, frozen=True, kw_only=True):
    """What happens when a request is at a place: a state of its machine ("RUNNING"), "chunk:2" (two chunks of
    its prompt are computed), or "token:7" (its token of index 7 is made, and not sent yet).

    ``victim`` "self" is the process in which it happens; "peer" the worker that a decode worker had the KV
    from.
    """

    role: str
    at: str
    victim: Literal["self", "peer"] = "self"
    attempt: int = 1
    does: Literal["signal", "starve", "break fetch", "stall fetch", "hang"] = "signal"
    """The victim gets ``signal``; no block is found for the request's next token; its fetch fails, or stands
    still before it has begun; the next step takes ``hang_s`` longer."""
    signal: int = 9
    hang_s: float = 0.0


class Plan(Struct, frozen=True, kw_only=True):
    seed: int
    rates: Rates = Rates()
    delay_s: float = 0.2
    damage_blocks: bool = True
    """May damage hit the raw KV frames behind a message? Only the checksum of each block finds that."""
    partitions: Partitions | None = None
    lose: dict[str, int] = {}
    """Message type → how many of them each start of a process loses, from its first."""
    points: dict[str, tuple[Point, ...]] = {}
    """By the request's ``seed``, which travels with it in any sampling: a test names its request by that."""
    folder: str = ""
    """Logs, process ids and ledgers are written here."""

    def number(self, *about: object) -> float:
        """Uniform in [0, 1), a function of the seed and of what it is about."""
        words = json.dumps([self.seed, *map(str, about)]).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") / 2**64

    def fate(self, process: str, link: Link, direction: Direction, n: int) -> Fate:
        dice = self.number(process, link, direction, n)
        for kind in self.rates.__struct_fields__:
            share = getattr(self.rates, kind)
            if dice < share:
                return Fate(kind, self.number(process, link, direction, n, kind))
            dice -= share
        return PASS

    def parted(self, process: str, link: Link, storm_s: float) -> bool:
        """Is this link of this worker cut, ``storm_s`` seconds after the storm began?"""
        plan = self.partitions
        if plan is None:
            return False
        window, into = divmod(storm_s, plan.every_s)
        return into >= plan.every_s - plan.length_s and self.partition(int(window)) == (process, link)

    def partition(self, window: int) -> tuple[str, Link]:
        assert self.partitions is not None
        workers = self.partitions.workers
        worker = workers[int(self.number("partition", window) * len(workers))]
        # A prefill worker dials nobody but its routers.
        peer = worker.startswith("decode") and self.number("partitioned link", window) < 0.5
        return worker, "peer" if peer else "router"

    def victim(self, turn: int, workers: tuple[str, ...]) -> str:
        """Who is killed at the ``turn``-th kill."""
        return workers[int(self.number("kill", turn) * len(workers))]


class FaultyCluster(LocalCluster):
    """A cluster whose workers carry out a plan, read from ``plan.json`` in its folder at each start."""

    def __init__(self, config: Config, plan: Plan, **options: Any) -> None:
        super().__init__(config, **options)
        self.plan_folder = Path(plan.folder)
        self.write_plan(plan)

    def write_plan(self, plan: Plan) -> None:
        self.plan = plan
        (self.plan_folder / "plan.json").write_bytes(msgspec.json.encode(plan))

    def storm(self, on: bool) -> None:
        """Rates and partitions hold between the two calls; points and losses always do."""
        flag = self.plan_folder / STORM_FLAG
        if on:
            new = flag.with_suffix(".new")
            new.write_text(repr(time.monotonic()))  # one clock for all processes of a host
            new.replace(flag)
        else:
            flag.unlink(missing_ok=True)

    def _spawn(self, name: str, role: str, extra: list[str]) -> Child:
        if role != "router":
            extra = [*extra, "--fault-plan", str(self.plan_folder / "plan.json"), "--fault-name", name]
        return super()._spawn(name, role, extra)

    def _popen(self, arguments: list[str]) -> Any:
        return super()._popen(arguments) if arguments[0] == "router" else zygote().fork(arguments)


def read_plan(path: str) -> Plan:
    return msgspec.json.decode(Path(path).read_bytes(), type=Plan)
