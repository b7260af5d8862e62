"""The phases of ``router``: requests to a router whose workers are scripted, and what came of them."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pagerelay.bench.lean import Connection, Reply
from pagerelay.bench.machine import cpu_seconds, machine_cpu_seconds
from pagerelay.bench.server import Server
from pagerelay.bench.stats import Figures, percentile, ratio

READY_S = 60.0
PHASE_S = 240.0
NO_ROW = 2**31 - 1
"""A seed outside the table: when these tokens leave is not noted."""
PROMPT = (
    "The quick brown fox jumps over the lazy dog and then walks back home along the quiet river bank. " * 4
)


class Scripted:
    """The scripted workers' process and the table of when their tokens left."""

    def __init__(self, process: asyncio.subprocess.Process, times: NDArray[np.int64]) -> None:
        self._process = process
        self.times = times

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_welcome(self) -> None:
        """Raises ``ValueError`` if the router does not take the workers in."""
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), READY_S)
        except TimeoutError:
            line = b""
        if not line:
            raise ValueError("the router did not take the scripted workers in")

    async def set_step(self, step_ms: float) -> None:
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        self._process.stdin.write(f"{step_ms}\n".encode())
        await self._process.stdin.drain()
        await asyncio.sleep(0.2)


@asynccontextmanager
async def scripted_workers(
    endpoint: str, model_path: str, rows: int, columns: int
) -> AsyncIterator[Scripted]:
    with tempfile.TemporaryDirectory(prefix="pagerelay-bench-") as folder:
        path = Path(folder) / "times"
        times = np.memmap(path, dtype=np.int64, mode="w+", shape=(rows, columns))
        words = [
            sys.executable, "-m", "pagerelay.bench.scripted",
            "--endpoint", endpoint, "--model-path", model_path,
            "--times", str(path), "--shape", str(rows), str(columns),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, process_group=0
        )
        assert process.stdin is not None  # noqa: S101 - for the type checker
        try:
            yield Scripted(process, times)
        finally:
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                await process.wait()


class Phase(Struct, frozen=True, kw_only=True):
    """``count`` requests over ``clients`` connections; the decode worker takes ``step_ms`` a step.

    The clients begin evenly over ``spread_s``, so that they do not all ask at the same moment.
    """

    clients: int
    count: int
    tokens: int
    step_ms: float
    stream: bool
    spread_s: float = 0.0

    def body(self, model: str, seed: int) -> bytes:
        request: dict[str, Any] = {
            "model": model,
            "prompt": f"{seed % 9973} {PROMPT}",
            "max_tokens": self.tokens,
            "stream": self.stream,
            "seed": seed,
            "ignore_eos": True,
        }
        return msgspec.json.encode(request)


async def run_phase(phase: Phase, server: Server, scripted: Scripted, model: str, first_row: int) -> Figures:
    """Stream i has row ``first_row + i`` of the table. Raises ``ValueError`` if answers stay away."""
    await scripted.set_step(phase.step_ms)
    seeds = [first_row + place if phase.stream else NO_ROW for place in range(phase.count)]
    bodies = [phase.body(model, seed) for seed in seeds]
    before = _clocks(server, scripted)
    try:
        async with asyncio.timeout(PHASE_S):
            replies = await _ask(bodies, phase, server.port)
    except TimeoutError:
        raise ValueError(f"{phase.count} requests were not answered within {PHASE_S:g} s") from None
    spent = [b - a for a, b in zip(before, _clocks(server, scripted), strict=True)]
    wall_s, router_s, ours_s, machine_s = spent
    if error := next((reply.error for reply in replies if reply.error), None):
        print(f"a request failed: {error}", file=sys.stderr)
    figures = _summary(phase, replies, wall_s, router_s)
    figures["our_cores"] = ours_s / wall_s
    figures["other_cores"] = max(0.0, machine_s - router_s - ours_s) / wall_s
    if phase.stream:
        figures |= _latencies(replies, scripted.times[first_row:])
    return figures


def _clocks(server: Server, scripted: Scripted) -> tuple[float, float, float, float]:
    """Now, and the CPU time so far of the router, of clients and scripted workers, of the whole machine."""
    ours = time.process_time() + cpu_seconds(scripted.pid)
    return time.perf_counter(), cpu_seconds(server.pid), ours, machine_cpu_seconds()


async def _ask(bodies: Sequence[bytes], phase: Phase, port: int) -> list[Reply]:
    """A closed loop; a lost connection is a failed reply, and its client connects again."""
    loop, host = asyncio.get_running_loop(), f"127.0.0.1:{port}"
    replies = [Reply() for _ in bodies]
    waiting = iter(range(len(bodies)))

    async def client(number: int) -> None:
        await asyncio.sleep(phase.spread_s * number / phase.clients)
        connection: Connection | None = None
        for place in waiting:
            try:
                if connection is None or connection.closed:
                    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                replies[place] = await connection.request(host, "/v1/completions", bodies[place])
            except OSError as error:
                replies[place] = Reply(error=str(error))
        if connection is not None:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(min(phase.clients, len(bodies))):
            group.create_task(client(number))
    return replies


def _summary(phase: Phase, replies: Sequence[Reply], wall_s: float, router_s: float) -> Figures:
    good = [reply for reply in replies if reply.error is None]
    tokens = sum(reply.tokens for reply in good)
    e2e_ms = [(reply.end_ns - reply.sent_ns) / 1e6 for reply in good]
    offered = phase.clients * 1e3 / phase.step_ms if phase.stream and phase.step_ms else None
    return {
        "requests": phase.count,
        "failed": phase.count - len(good),
        "miscounted": sum(reply.tokens != phase.tokens for reply in good),
        "wall_s": wall_s,
        "requests_per_s": len(good) / wall_s,
        "offered_tokens_per_s": offered,
        "tokens_per_s": tokens / wall_s,
        "tokens_per_piece": ratio(tokens, sum(len(reply.arrivals) for reply in good)),
        "router_cores": router_s / wall_s,
        "cpu_us_per_request": ratio(router_s * 1e6, len(good)),
        "cpu_us_per_token": ratio(router_s * 1e6, tokens),
        "e2e_p50": percentile(e2e_ms, 50),
        "e2e_p99": percentile(e2e_ms, 99),
    }


def _latencies(replies: Sequence[Reply], times: NDArray[np.int64]) -> Figures:
    """TTFT, and for every token from leaving the worker to its text at the client. In ms."""
    ttft = [(reply.arrivals[0][0] - reply.sent_ns) / 1e6 for reply in replies if reply.arrivals]
    added: list[float] = []
    for left_ns, reply in zip(times, replies, strict=False):
        added += token_latencies_ms(reply.arrivals, left_ns)
    return {
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
        "added_p50": percentile(added, 50),
        "added_p99": percentile(added, 99),
        "added_max": max(added, default=None),
    }


def token_latencies_ms(arrivals: Sequence[tuple[int, int]], left_ns: NDArray[np.int64]) -> list[float]:
    """Of each token of one stream, by position: from ``left_ns[position]`` to the text it came in."""
    found, position = [], 0
    for arrived_ns, tokens in arrivals:
        for index in range(position, min(position + tokens, len(left_ns))):
            if left_ns[index]:
                found.append((arrived_ns - int(left_ns[index])) / 1e6)
        position += tokens
    return found
