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

from pagerelay.cli.local import Child, LocalCluster
from pagerelay.common.config import load_config
from pagerelay.common.errors import WireError
from pagerelay.common.wire import messages as m
from pagerelay.common.wire.codec import CRC_BYTES, Decoder, encode, sealed

PROMPT = [11] * 40
GROWTH_MIB = 50
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"), "", "x" * 5000,
    b"\xff", [], {}, [[]], {"type": "Abort"}, [2**40] * 3, [-1], ["a"], "r", 1,
]  # fmt: skip


def samples(hello: m.Hello, handle: m.KvHandle) -> dict[str, list[m.Message]]:
    """Valid messages of every type, by the union they belong to; the raw material."""
    delta = m.TokenDelta(request_id="r", attempt=1, index=0, token=5)
    sampling = m.SamplingParams(max_tokens=3, temperature=0.0)
    job: dict[str, Any] = {
        "request_id": "r", "attempt": 1, "order": 1, "token_ids": PROMPT, "sampling": sampling,
        "first_index": 0,
    }  # fmt: skip
    return {
        "ToRouter": [
            hello,
            m.Heartbeat(load=m.Load(), counters=m.Counters()),
            m.PrefillStarted(request_id="r", attempt=1, handle=handle, queued_s=0.0, num_cached_tokens=0),
            m.FirstToken(delta=delta, prefill_s=0.0, num_computed_tokens=1),
            m.Tokens(deltas=[delta, delta]),
            m.HandedOver(
                request_id="r", attempt=1, first=delta, transport="shm", handover_s=0.1, num_bytes=1
            ),
            m.Preempted(request_id="r", attempt=1),
            m.Failed(request_id="r", attempt=1, code="c", message="m", retryable=True),
            m.Goodbye(),
        ],
        "ToWorker": [
            m.Welcome(router_id="fuzz", heartbeat_s=0.5, dead_after_s=3.0),
            m.Refused(reason="no", fatal=False),
            m.Beat(),
            m.PrefillJob(**job),
            m.DecodeJob(**job, handle=handle),
            m.DecodeJob(**job, handle=None),
            m.Ask(request_id="r", attempt=1, next_index=0),
            m.Abort(request_id="r", attempt=1),
        ],
        "ToPrefill": [
            m.Fetch(lease=1, incarnation=handle.incarnation, from_block=0, layout=hello.layout),
            m.Read(lease=1, block_ids=[0, 1]),
            m.Renew(leases=[1]),
            m.Release(lease=1, received=True),
        ],
        "ToDecode": [
            m.Ready(lease=handle.lease, first=0, block_ids=[0, 1, 2]),
            m.Blocks(lease=handle.lease, block_ids=[0]),
            m.Commit(lease=handle.lease, num_tokens=len(PROMPT), first_token=5),
            m.Released(lease=handle.lease, ok=True),
            m.LeaseLost(lease=handle.lease, reason="gone"),
        ],
    }


class Fuzz:
    """Frames of one union: random, damaged, and well formed with odd values."""

    def __init__(self, rng: random.Random, union: Any, valid: list[m.Message]) -> None:
        self.rng, self.valid = rng, valid
        self._decode: Decoder[Any] = Decoder(union)

    def frames(self) -> tuple[list[bytes], bool]:
        """One message, and whether it is one that must be refused and counted."""
        while True:
            frames = self._frames()
            try:
                message = self._decode(frames[0])
            except WireError:
                return frames, True
            # These two end a worker by design, whoever may send them has the cluster's key.
            if isinstance(message, m.Drain) or (isinstance(message, m.Refused) and message.fatal):
                continue
            return frames, False

    def _frames(self) -> list[bytes]:
        rng = self.rng
        body = encode(rng.choice(self.valid))[:-CRC_BYTES]
        kind = rng.randrange(5)
        if kind == 0:
            return [rng.randbytes(rng.randrange(300)), *(rng.randbytes(20) for _ in range(rng.randrange(3)))]
        if kind == 1:
            return [self._damaged(sealed(body))]
        if kind == 2:
            return [sealed(self._damaged(body))]
        fields = self._odd(msgspec.msgpack.decode(body))
        frame = sealed(msgspec.msgpack.encode(fields))
        return [frame] if kind == 3 else [frame, rng.randbytes(rng.randrange(5000))]

    def _damaged(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(len(data) + 1)
            match self.rng.randrange(4):
                case 0 if at < len(data):
                    data[at] ^= 1 << self.rng.randrange(8)
                case 1:
                    data[at:at] = self.rng.randbytes(self.rng.randint(1, 4))
                case 2:
                    del data[at : at + self.rng.randint(1, 4)]
                case _:
                    del data[at:]
            if not data:
                break
        return bytes(data)

    def _odd(self, fields: Any) -> Any:
        """One value somewhere inside is replaced."""
        if isinstance(fields, dict) and fields and self.rng.random() < 0.9:
            name = self.rng.choice([key for key in fields if key != "type"] or list(fields))
            return fields | {name: self._odd(fields[name])}
        if isinstance(fields, list) and fields and self.rng.random() < 0.5:
            at = self.rng.randrange(len(fields))
            return [*fields[:at], self._odd(fields[at]), *fields[at + 1 :]]
        if isinstance(fields, int) and self.rng.random() < 0.3:
            return fields + self.rng.randint(-3, 3)
        return self.rng.choice(ODD)


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
            request_id="seed", attempt=1, order=1, token_ids=PROMPT, sampling=sampling, first_index=0
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
            ("P ← D", "prefill", self._to_prefill(prefill[1].data_endpoint)),
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
            return float(found[0]["counters"]["dropped_messages"]) if found else 0.0
        return await self.cluster.metric("pagerelay_dropped_messages_total")

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
                request_id=f"fuzz-{jobs}", attempt=1, order=1, token_ids=PROMPT,
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
