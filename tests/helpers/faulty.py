"""``pagerelay`` with a plan of faults in front: what ``zygote.py`` runs in place of the command.

It takes its own two flags off the command line, mistreats the sockets that this process dials with, watches
the requests for the plan's points, and then is the ordinary command.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from faults import PASS, STORM_FLAG, Direction, Fate, Link, Plan, Point, read_plan
from msgspec.structs import replace

from pagerelay.cli.main import main
from pagerelay.common import states
from pagerelay.common.wire import sockets


class Faults:
    """The plan as this start of this process carries it out; writes its decisions to a log."""

    def __init__(self, plan: Plan, name: str, start: int) -> None:
        self.plan, self.name = plan, name
        self._process = f"{name}#{start}"
        self._counts: dict[tuple[Link, Direction], int] = {}
        self._lost: dict[str, int] = {}
        self._flag, self._looked_at = Path(plan.folder) / STORM_FLAG, 0.0
        self._storm_at: float | None = None
        self._log = open(Path(plan.folder) / f"{self._process}.log", "a", buffering=1)  # noqa: SIM115

    def fate(self, link: Link, direction: Direction, frames: list[bytes]) -> Fate:
        n = self._counts[link, direction] = self._counts.get((link, direction), -1) + 1
        storm_s = self._storm_s()
        kind = message_type(frames)
        if self._lost.get(kind, 0) < self.plan.lose.get(kind, 0):
            self._lost[kind] = self._lost.get(kind, 0) + 1
            fate = Fate("drop")
        elif storm_s is None:
            return PASS
        elif self.plan.parted(self.name, link, storm_s):
            return Fate("drop")
        else:
            fate = self.plan.fate(self._process, link, direction, n)
        if fate.kind != "pass":
            self.note(f"{link} {direction} {n} {fate.kind} {fate.amount:.6f} {kind}")
        return fate

    def _storm_s(self) -> float | None:
        """Seconds since the storm began, ``None`` in calm weather; looked up now and then."""
        now = time.monotonic()
        if now - self._looked_at > 0.05:
            self._looked_at = now
            try:
                self._storm_at = float(self._flag.read_text())
            except FileNotFoundError:
                self._storm_at = None
        return None if self._storm_at is None else now - self._storm_at

    def note(self, line: str) -> None:
        self._log.write(line + "\n")


def message_type(frames: list[bytes]) -> str:
    """The tag of a message, without decoding all of it: msgspec writes it first."""
    head = bytes(frames[0][:64]) if frames else b""
    at = head.find(b"\xa4type")
    if at < 0 or at + 6 > len(head):
        return "?"
    return head[at + 6 : at + 6 + (head[at + 5] & 31)].decode("ascii", "replace")


def damaged(frames: list[bytes], fate: Fate, plan: Plan) -> list[bytes]:
    """One frame cut, or one bit of it flipped, at the place that the fate names."""
    if not plan.damage_blocks:
        return [*damaged(frames[:1], fate, replace(plan, damage_blocks=True)), *frames[1:]]
    total = sum(map(len, frames))
    if not total:
        return frames
    place, out = int(fate.amount * total), list(frames)
    for index, frame in enumerate(frames):
        if place < len(frame):
            if fate.kind == "truncate":
                out[index] = frame[:place]
            else:
                flipped = bytearray(frame)
                flipped[place] ^= 1 << int(fate.amount * 997) % 8
                out[index] = bytes(flipped)
            break
        place -= len(frame)
    return out


class FaultySocket(sockets.ClientSocket):
    """A dialling socket on a bad line, in both directions."""

    faults: Faults

    def __init__(self, endpoint: str, identity: bytes, keys: Any, setting: str, *rest: Any, **more: Any):
        super().__init__(endpoint, identity, keys, setting, *rest, **more)
        self._link: Link = "router" if setting == "worker.routers" else "peer"
        self._waiting: deque[tuple[float, list[bytes]]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._held: list[bytes] | None = None
        self._arrived: deque[list[bytes]] = deque()
        self._held_in: list[bytes] | None = None

    async def send(self, *frames: Any) -> None:
        copied = [bytes(frame) for frame in frames]
        fate = self.faults.fate(self._link, "out", copied)
        if fate.kind == "drop":
            return
        if fate.kind in ("truncate", "corrupt"):
            copied = damaged(copied, fate, self.faults.plan)
        if fate.kind == "reorder" and self._held is None:
            self._held = copied
            return
        batch = [copied, copied] if fate.kind == "duplicate" else [copied]
        if self._held is not None:
            batch, self._held = [*batch, self._held], None
        wait_s = fate.amount * self.faults.plan.delay_s if fate.kind == "delay" else 0.0
        if not self._waiting and not wait_s:
            for one in batch:
                await super().send(*one)
            return
        last = self._waiting[-1][0] if self._waiting else 0.0
        due = max(last, time.monotonic() + wait_s)
        self._waiting.extend((due, one) for one in batch)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._send_waiting())

    async def _send_waiting(self) -> None:
        while self._waiting:
            due, frames = self._waiting[0]
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            try:
                await super().send(*frames)
            except sockets.PeerUnreachable:
                self.faults.note(f"{self._link} out undeliverable")
            self._waiting.popleft()

    async def receive(self) -> list[memoryview]:
        while not self._arrived:
            frames = [bytes(frame) for frame in await super().receive()]
            fate = self.faults.fate(self._link, "in", frames)
            if fate.kind == "drop":
                continue
            if fate.kind == "delay":
                await asyncio.sleep(fate.amount * self.faults.plan.delay_s)
            if fate.kind in ("truncate", "corrupt"):
                frames = damaged(frames, fate, self.faults.plan)
            if fate.kind == "reorder" and self._held_in is None:
                self._held_in = frames
                continue
            self._arrived.extend([frames] * (2 if fate.kind == "duplicate" else 1))
            if self._held_in is not None:
                self._arrived.append(self._held_in)
                self._held_in = None
        return [memoryview(frame) for frame in self._arrived.popleft()]

    def close(self, linger_ms: int = sockets.LINGER_MS) -> None:
        if self._pump is not None:
            self._pump.cancel()
        super().close(linger_ms)


# ------------------------------------------------------------------------------------------------ points


class WatchedMachine(states.Machine):
    """A request's machine that tells where the request is."""

    __slots__ = ("seq", "watch")

    def __init__(self, table: states.Table, start: str) -> None:
        super().__init__(table, start)
        self.watch: Any = None

    def move(self, target: str) -> None:
        super().move(target)
        if self.watch is not None:
            self.watch(self.seq, target)


def watch_requests(faults: Faults) -> None:
    """Patches the engines so that every place of a request is looked up in the plan's points."""
    from pagerelay.common.engine.core import EngineCore
    from pagerelay.common.engine.scheduler import Scheduler
    from pagerelay.common.errors import TransferError
    from pagerelay.common.model.runner import ModelRunner
    from pagerelay.common.service.worker import Worker
    from pagerelay.decode_svc import engine as decode
    from pagerelay.decode_svc import worker as decode_worker
    from pagerelay.prefill_svc import engine as prefill

    plan, folder = faults.plan, Path(faults.plan.folder)
    role = faults.name.partition("-")[0]
    givers: dict[str, str] = {}
    chunks: dict[str, int] = {}

    starved: set[str] = set()
    fetches: dict[str, str] = {}
    hangs: list[float] = []

    def at(seq: Any, place: str) -> None:
        for point in plan.points.get(str(seq.sampling.seed), ()):
            if (point.role, point.at, point.attempt) == (role, place, seq.attempt):
                carry_out(point, seq)

    def carry_out(point: Point, seq: Any) -> None:
        head = f"point {point.at} of {seq.sampling.seed} : {point.does}"
        if point.does != "signal":
            faults.note(head)
        if point.does == "starve":
            starved.add(seq.request_id)
        elif point.does == "hang":
            hangs.append(point.hang_s)
        elif point.does != "signal":
            fetches[seq.request_id] = point.does
        else:
            send_signal(point, seq, head)

    def send_signal(point: Point, seq: Any, head: str) -> None:
        pid = os.getpid()
        if point.victim == "peer":
            file = folder / f"{givers.get(seq.request_id)}.pid"
            if not file.exists():
                return
            pid = int(file.read_text())
        faults.note(f"{head} {point.signal} to {point.victim}")
        os.kill(pid, point.signal)

    has_room, run_model, fetch_prompt = Scheduler._has_room, ModelRunner.run, decode_worker.fetch_prompt

    def watched_has_room(self: Any, sequence: Any) -> bool:
        if sequence.request_id not in starved:
            return has_room(self, sequence)
        starved.discard(sequence.request_id)
        return bool(self._on_short(sequence)) and has_room(self, sequence)

    def watched_run_model(self: Any, *rest: Any) -> Any:
        if hangs:
            time.sleep(hangs.pop())
        return run_model(self, *rest)

    async def watched_fetch(intake: Any, *rest: Any, **more: Any) -> Any:
        does = fetches.pop(intake.seq.request_id, "")
        if does == "break fetch":
            raise TransferError("the plan breaks this fetch")
        if does == "stall fetch":
            await asyncio.sleep(3600)
        return await fetch_prompt(intake, *rest, **more)

    accept, sampled, fetched = EngineCore._accept, decode.DecodeEngine._sampled, decode.DecodeEngine.fetched

    def watched_accept(self: Any, owner: str, job: Any, machine: Any, *rest: Any) -> Any:
        seq = accept(self, owner, job, machine, *rest)
        if seq is not None:
            if getattr(job, "handle", None) is not None:
                givers[job.request_id] = job.handle.worker_id
            machine.seq, machine.watch = seq, at
            at(seq, machine.state)
        return seq

    def watched_sampled(self: Any, seq: Any, token: int, index: int) -> bool:
        goes_on = sampled(self, seq, token, index)
        at(seq, f"token:{index}")
        return goes_on

    def watched_fetched(self: Any, seq: Any, *rest: Any, **more: Any) -> None:
        fetched(self, seq, *rest, **more)
        at(seq, f"token:{seq.first_index}")

    advanced = prefill.PrefillEngine._advanced

    def watched_advanced(self: Any, seq: Any) -> None:
        advanced(self, seq)
        chunks[seq.request_id] = chunks.get(seq.request_id, 0) + 1
        at(seq, f"chunk:{chunks[seq.request_id]}")

    first_sampled = prefill.PrefillEngine._sampled

    def watched_first(self: Any, seq: Any, token: int, index: int) -> bool:
        goes_on = first_sampled(self, seq, token, index)
        at(seq, f"token:{index}")
        return goes_on

    check = Worker._check_ledger

    def watched_check(self: Any) -> None:
        check(self)
        counts = self.engine.counts()
        load = self.load()
        state = {
            "at": time.monotonic(),
            "broken": self.counters.ledger_faults > 0,
            "waiting": load.waiting,
            "running": load.running,
            **{name: getattr(counts, name) for name in counts.__struct_fields__},
        }
        new = folder / f"{faults.name}.new"
        new.write_text(json.dumps(state))
        new.replace(folder / f"{faults.name}.ledger")

    run = Worker.run

    async def watched_run(self: Any, *rest: Any) -> int:
        (folder / f"{self.worker_id}.pid").write_text(str(os.getpid()))
        return await run(self, *rest)

    Scheduler._has_room = watched_has_room  # type: ignore[method-assign]
    ModelRunner.run = watched_run_model  # type: ignore[method-assign]
    decode_worker.fetch_prompt = watched_fetch
    prefill.Machine = decode.Machine = WatchedMachine  # type: ignore[misc]
    EngineCore._accept = watched_accept  # type: ignore[method-assign]
    decode.DecodeEngine._sampled = watched_sampled  # type: ignore[method-assign]
    decode.DecodeEngine.fetched = watched_fetched  # type: ignore[method-assign]
    prefill.PrefillEngine._sampled = watched_first  # type: ignore[method-assign]
    prefill.PrefillEngine._advanced = watched_advanced  # type: ignore[method-assign]
    Worker._check_ledger = watched_check  # type: ignore[method-assign]
    Worker.run = watched_run  # type: ignore[method-assign]


def install(plan: Plan, name: str) -> None:
    starts = Path(plan.folder) / f"{name}.starts"
    start = len(starts.read_text()) if starts.exists() else 0
    with starts.open("a") as file:
        file.write("|")
    faults = FaultySocket.faults = Faults(plan, name, start)
    sockets.ClientSocket = FaultySocket  # type: ignore[misc]
    # The modules that dial took the name when they were imported, or will take it from here.
    for module in list(sys.modules.values()):
        if getattr(module, "ClientSocket", None) not in (None, FaultySocket) and module is not sockets:
            module.ClientSocket = FaultySocket  # type: ignore[attr-defined]
    watch_requests(faults)


def run_command(arguments: list[str]) -> int:
    mine = {}
    for flag in ("--fault-plan", "--fault-name"):
        if flag in arguments:
            where = arguments.index(flag)
            mine[flag] = arguments[where + 1]
            del arguments[where : where + 2]
    if mine:
        install(read_plan(mine["--fault-plan"]), mine["--fault-name"])
    return main(arguments)
