"""Rubbish for every socket of every role of a running cluster, and what became of the cluster.

The workers of the cluster have two routers: the real one, and this process, which so has its hands on all
four kinds of sockets: the router's towards workers, the workers' towards routers, P's towards decode workers,
and D's towards prefill workers. ``python tests/helpers/fuzz.py`` prints the table; ``make fuzz`` calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from cluster import FREE_PORTS, Cluster
from odd_frames import PROMPT, Fuzz, samples

from pagerelay.cli.local import Child, LocalCluster
from pagerelay.common.config import load_config
from pagerelay.common.wire import messages as m
from pagerelay.common.wire.codec import Decoder, encode

GROWTH_MIB = 50


class TwoRouters(LocalCluster):
    """A cluster whose workers dial a second router too."""

    second = ""

    def _spawn(self, name: str, role: str, extra: list[str]) -> Child:
        if role != "router":
            extra = ["--router", f"{extra[1]},{self.second}"]
        return super()._spawn(name, role, extra)


@dataclass
class Target:
    name: str
    sent: int = 0
    wrong: int = 0
    """Frames that must be refused."""
    counted: float = 0.0
    grown_mib: float = 0.0


@dataclass
class Report:
    targets: list[Target] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no memory")


class Attack:
    """``peers``: role → (identity at our router socket, what it said of itself)."""

    def __init__(self, cluster: Cluster, context: Any, router: Any, rng: random.Random) -> None:
        self.cluster, self.context, self.router, self.rng = cluster, context, router, rng
        self.peers: dict[str, tuple[bytes, m.Hello]] = {}
        self.handle: m.KvHandle | None = None
        self._decode: Decoder[Any] = Decoder(m.ToRouter)
        self._tasks = [asyncio.create_task(self._be_a_router())]

    async def _be_a_router(self) -> None:
        while True:
            identity, frame = (await self.router.recv_multipart())[:2]
            message = self._decode(frame)
            if isinstance(message, m.Hello):
                self.peers[message.role] = identity, message
                welcome = m.Welcome(router_id="fuzz", heartbeat_s=0.2, dead_after_s=3.0)
                await self.router.send_multipart([identity, encode(welcome)])
            elif isinstance(message, m.Heartbeat):
                await self.router.send_multipart([identity, encode(m.Beat())])
            elif isinstance(message, m.PrefillStarted) and message.request_id == "seed":
                self.handle = message.handle

    async def until(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.peers
            await asyncio.sleep(0.05)

    async def run(self, each: int, expected: list[int]) -> Report:
        await self.until(lambda: {"prefill", "decode"} <= set(self.peers))
        prefill, decode = self.peers["prefill"], self.peers["decode"]
        sampling = m.SamplingParams(max_tokens=3, temperature=0.0)
        job = m.PrefillJob(
            request_id="seed", attempt=1, age_s=0.0, token_ids=PROMPT, sampling=sampling, first_index=0
        )
        await self.router.send_multipart([prefill[0], encode(job)])
        await self.until(lambda: self.handle is not None)
        assert self.handle is not None
        # Under a name of its own: who has a worker's name takes that worker's place, as a restart does.
        ghost = msgspec.structs.replace(decode[1], worker_id="ghost", incarnation="ghost", num_blocks=1)
        valid = samples(ghost, self.handle)
        report, pids = Report(), {w["role"]: w["pid"] for w in await self.cluster.workers()}
        self.workers = set(pids.values())
        pids["router"] = self.cluster.child("router").process.pid
        for name, role, send in (
            ("router ← workers", "router", self._to_router()),
            ("P ← router", "prefill", self._to_worker(prefill[0])),
            ("D ← router", "decode", self._to_worker(decode[0])),
            ("P ← D", "prefill", self._to_prefill(self.handle.data_endpoint)),
            ("D ← P", "decode", self._to_decode(decode[0])),
        ):
            union = {"router": "ToRouter", "D": "ToPrefill", "P": "ToDecode", "worker": "ToWorker"}
            kind = "worker" if name.endswith("← router") else name.split("← ")[1]
            kind = {"workers": "router"}.get(kind, kind)
            fuzz = Fuzz(self.rng, getattr(m, union[kind]), valid[union[kind]])
            target = Target(name)
            await self._attack(target, fuzz, send, role, pids[role], each, expected, report)
            report.targets.append(target)
        return report

    async def _attack(
        self, target: Target, fuzz: Fuzz, send: Any, role: str, pid: int, each: int, expected: list[int],
        report: Report,
    ) -> None:  # fmt: skip
        before_mib, before = rss_mib(pid), await self._dropped(role)
        put = await anext(send)
        for number in range(each):
            frames, wrong = fuzz.frames()
            if await put(frames):
                target.sent += 1
                target.wrong += wrong
            if number % 200 == 199:
                await asyncio.sleep(0.01)
        deadline = time.monotonic() + 20
        while (counted := await self._dropped(role) - before) < target.wrong and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        target.counted = counted
        await send.aclose()
        try:
            await self.cluster.until("the ghosts have gone", self._only_workers, 20)
            async with asyncio.timeout(30):
                if await self.cluster.ids(PROMPT, 12) != expected:
                    report.complaints.append(f"after {target.name}: another answer")
        except (AssertionError, TimeoutError, OSError) as error:
            report.complaints.append(f"after {target.name}: {type(error).__name__} {str(error)[:300]}")
        for child in self.cluster.launcher.children:
            if child.process.poll() is not None:
                report.complaints.append(f"after {target.name}: {child.name} ended ({child.process.poll()})")
        if Path(f"/proc/{pid}").exists():
            target.grown_mib = rss_mib(pid) - before_mib

    async def _only_workers(self) -> bool:
        return {w["pid"] for w in await self.cluster.workers() if w["id"] != "ghost"} == self.workers and len(
            await self.cluster.workers()
        ) == len(self.workers)

    async def _dropped(self, role: str) -> float:
        if role != "router":
            found = await self.cluster.workers(role)
            return float(found[0]["counters"]["dropped"].get("unknown/malformed", 0)) if found else 0.0
        return await self.cluster.metric(
            "pagerelay_dropped_messages_total", kind="unknown", reason="malformed"
        )

    # ------------------------------------------------------------------ the sockets

    async def _to_router(self) -> Any:
        """A new identity now and then: a router keeps something about each."""
        sockets: list[Any] = []
        count = 0

        async def put(frames: list[bytes]) -> bool:
            nonlocal count
            if count % 500 == 0:
                sockets.append(self.context.socket(zmq.DEALER))
                sockets[-1].linger = 5000
                sockets[-1].connect(self.cluster.launcher.workers_endpoint)
                if len(sockets) > 3:
                    sockets.pop(0).close()
            count += 1
            await sockets[-1].send_multipart(frames)
            return True

        try:
            yield put
        finally:
            for socket in sockets:
                socket.close()

    async def _to_worker(self, identity: bytes) -> Any:
        async def put(frames: list[bytes]) -> bool:
            await self.router.send_multipart([identity, *frames])
            return True

        yield put

    async def _to_prefill(self, endpoint: str) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 5000
        socket.connect(endpoint)

        async def put(frames: list[bytes]) -> bool:
            await socket.send_multipart(frames)
            return True

        try:
            yield put
        finally:
            socket.close()

    async def _to_decode(self, decoder: bytes) -> Any:
        """A prefill worker of ours: D dials it because a job's handle says so, again after each failure."""
        assert self.handle is not None
        ours = self.context.socket(zmq.ROUTER)
        port = ours.bind_to_random_port("tcp://127.0.0.1")
        peer = b""
        handle = msgspec.structs.replace(
            self.handle, data_endpoint=f"tcp://127.0.0.1:{port}", incarnation="fuzz"
        )
        jobs = 0

        async def dial() -> None:
            nonlocal peer, jobs
            if jobs:
                gone = m.Abort(request_id=f"fuzz-{jobs}", attempt=1)
                await self.router.send_multipart([decoder, encode(gone)])
            jobs += 1
            job = m.DecodeJob(
                request_id=f"fuzz-{jobs}", attempt=1, age_s=0.0, token_ids=PROMPT,
                sampling=m.SamplingParams(max_tokens=2, temperature=0.0), first_index=0, handle=handle,
            )  # fmt: skip
            await self.router.send_multipart([decoder, encode(job)])
            if not peer:
                peer = (await ours.recv_multipart())[0]

        count = 0

        async def put(frames: list[bytes]) -> bool:
            nonlocal count
            if count % 5 == 0:
                await dial()
            count += 1
            await ours.send_multipart([peer, *frames])
            return True

        try:
            yield put
        finally:
            gone = m.Abort(request_id=f"fuzz-{jobs}", attempt=1)
            await self.router.send_multipart([decoder, encode(gone)])
            ours.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextmanager
def attackable(model: Path, second: str, **settings: object) -> Iterator[Cluster]:
    flags = FREE_PORTS | {"model.path": str(model), "cache.num_blocks": "512", "engine.threads": "1"}
    flags |= {"log_level": "error"} | {n.replace("__", "."): str(value) for n, value in settings.items()}
    launcher = TwoRouters(load_config(None, flags, {}), restart=False, quiet=True)
    launcher.second = second
    with launcher:
        yield Cluster(launcher)


async def fuzz(model: Path, *, seed: int, frames: int) -> Report:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    second = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    try:
        with attackable(model, second) as cluster:
            expected = await cluster.ids(PROMPT, 12)
            for _ in range(20):
                await cluster.ids([7, *PROMPT], 12)  # what grows once has grown
            attack = Attack(cluster, context, router, random.Random(seed))
            try:
                return await attack.run(frames // 5, expected)
            finally:
                await attack.close()
    finally:
        router.close()
        context.destroy(linger=0)


def table(report: Report) -> str:
    lines = ["| socket | frames | to be refused | counted | memory |", "| --- | --- | --- | --- | --- |"]
    for one in report.targets:
        lines.append(
            f"| {one.name} | {one.sent} | {one.wrong} | {one.counted:.0f} | {one.grown_mib:+.1f} MiB |"
        )
    return "\n".join([*lines, *report.complaints])


def passed(report: Report) -> bool:
    return not report.complaints and all(
        one.counted >= one.wrong and one.grown_mib < GROWTH_MIB for one in report.targets
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=100_000)
    args = parser.parse_args()
    from pagerelay.common.model.fetch import TINY_MODEL, resolve_model

    report = asyncio.run(fuzz(resolve_model(TINY_MODEL, progress=print), seed=args.seed, frames=args.frames))
    print(table(report))
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
