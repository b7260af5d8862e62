"""``footprint``: what a worker takes, in memory and in time to its first readiness.

Starts a split and a colocated cluster in turn, with a pool small enough for the traffic to fill it, and
watches the worker processes from their start to their last answer. The promise, for each of them:

* resident memory ≤ weights in fp32 + what is touched of the pool + 300 MB, at every sample under traffic
* the kernel's own high-water mark, ``VmHWM``, when the cluster is ready ≤ weights in fp32 + 300 MB
* 10 s from the start of the process until the cluster is ready, with the model converted already

A sample reads all of a process's mappings at once, so that memory and pool are of one moment. What comes and
goes between two samples is not in the first bound's figures; ``VmHWM`` at the end, which has it, is reported
beside them. Resident memory counts every page that the process has, also clean pages of library files that it
shares with others. Pages of another worker's pool, which a decode worker reads from, are that worker's and
are taken out.

With torch 2.13 and transformers 5.24 the imports alone come to 334 MB, before any weight: more than the 300
MB of the first two bounds.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from pathlib import Path

from msgspec import Struct

from pagerelay.bench.load import LoadOptions, Measured, measure
from pagerelay.bench.machine import PROC, process_tree
from pagerelay.bench.report import header, number, stamped, table, write_json
from pagerelay.bench.server import Server, free_port, running
from pagerelay.bench.workloads import Shape
from pagerelay.common.model.fetch import resolve_model
from pagerelay.common.segments import FOLDER

ROLES = ("prefill", "decode", "colocated")
CLUSTERS = {"split": ("--prefill", "1", "--decode", "1"), "colocated": ("--colocated", "1")}
TRAFFIC = {
    "many": Shape(clients=8, requests=16, prompt_tokens=128, output_tokens=16),
    "long": Shape(clients=1, requests=2, prompt_tokens=1024, output_tokens=8),
}
"""2,304 and 2,064 tokens: the default pool of 128 MiB holds 2,912 of SmolLM2's."""
BEYOND_MB = 300.0
READY_S = 10.0
SAMPLE_EVERY_S = 0.1
MB = 1e6


class FootprintOptions(Struct, frozen=True, kw_only=True):
    model: str
    kv_memory_mib: int
    threads: int
    results: str
    seed: int


class Sample(Struct, frozen=True, kw_only=True):
    """A process's resident memory at one moment."""

    rss_mb: float
    pss_mb: float
    own_pool_mb: float
    """Of its own pool, which it may write."""
    peer_pool_mb: float
    """Of other workers' pools, which it only reads."""


class Worker(Struct, kw_only=True):
    """One worker process; sizes in MB (10⁶ bytes)."""

    role: str
    pid: int
    ready_s: float = math.nan
    """From the start of its process until the cluster was ready."""
    loaded_mb: float = math.nan
    """High-water mark when the cluster was ready: weights, no traffic yet."""
    peak_mb: float = math.nan
    """High-water mark at the end, pools and all."""
    own_mb: float = 0.0
    """Greatest resident memory outside pools, of one sample."""
    pool_touched_mb: float = 0.0
    """Of its own pool, at the last sample; so are ``peer_pool_mb`` and ``file_mb``."""
    peer_pool_mb: float = 0.0
    peak_pss_mb: float = 0.0
    file_mb: float = 0.0
    """Of the resident pages, those of files: code of libraries, shared and clean."""

    def note(self, sample: Sample) -> None:
        self.own_mb = max(self.own_mb, sample.rss_mb - sample.own_pool_mb - sample.peer_pool_mb)
        self.peak_pss_mb = max(self.peak_pss_mb, sample.pss_mb)
        self.pool_touched_mb, self.peer_pool_mb = sample.own_pool_mb, sample.peer_pool_mb


class Footprint(Struct, frozen=True, kw_only=True):
    """A worker beside its bound."""

    worker: Worker
    weights_mb: float
    pool_mb: float

    @property
    def beyond_mb(self) -> float:
        """Most memory that was neither weights nor pool. An untouched part of the pool excuses nothing."""
        return self.worker.own_mb - self.weights_mb

    @property
    def loaded_beyond_mb(self) -> float:
        """Most memory that was not weights until the cluster was ready, loading included."""
        return self.worker.loaded_mb - self.weights_mb

    @property
    def ok(self) -> bool:
        within = max(self.beyond_mb, self.loaded_beyond_mb) <= BEYOND_MB
        return within and self.worker.ready_s <= READY_S


def fp32_bytes(folder: Path) -> int:
    """Size of the folder's weights in fp32, whatever they are stored in; a tied weight counts once."""
    elements = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        elements += sum(
            math.prod(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"
        )
    return 4 * elements


def find_workers(pid: int) -> list[Worker]:
    """The worker processes among the descendants of ``pagerelay up``."""
    found = []
    for member in process_tree(pid):
        try:
            words = (PROC / str(member) / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        role = words[words.index("pagerelay.cli") + 1] if "pagerelay.cli" in words[:-1] else ""
        if role in ROLES:
            found.append(Worker(role=role, pid=member))
    return sorted(found, key=lambda worker: ROLES.index(worker.role))


def status_mb(pid: int, field: str) -> float:
    for line in (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / MB
    raise ValueError(f"/proc/{pid}/status has no {field}")


def age_s(pid: int) -> float:
    """Seconds since the process was started."""
    started = int((PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def read_sample(smaps: str) -> Sample:
    """Of the text of ``/proc/PID/smaps``."""
    sums = {"Rss:": 0, "Pss:": 0}
    own = peers = 0
    permissions = ""
    for line in smaps.splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            permissions = head[1] if f"{FOLDER}/pagerelay-" in line else ""
        elif head[0] in sums:
            size = int(head[1])
            sums[head[0]] += size
            if permissions and head[0] == "Rss:":
                own, peers = (own + size, peers) if "w" in permissions else (own, peers + size)
    rss, pss, own_mb, peer_mb = (kib * 1024 / MB for kib in (sums["Rss:"], sums["Pss:"], own, peers))
    return Sample(rss_mb=rss, pss_mb=pss, own_pool_mb=own_mb, peer_pool_mb=peer_mb)


def _sample(workers: list[Worker]) -> None:
    for worker in workers:
        text = (PROC / str(worker.pid) / "smaps").read_text(encoding="utf-8", errors="replace")
        worker.note(read_sample(text))


async def _watch(workers: list[Worker]) -> None:
    """Samples each worker. Runs until cancelled."""
    while True:
        await asyncio.to_thread(_sample, workers)
        await asyncio.sleep(SAMPLE_EVERY_S)


async def _traffic(server: Server, options: FootprintOptions) -> dict[str, Measured]:
    return await measure(
        LoadOptions(base_url=f"{server.url}/v1", shapes=TRAFFIC, seed=options.seed),
        lambda line: print(line, file=sys.stderr, flush=True),
    )


def up_command(flags: tuple[str, ...], options: FootprintOptions, port: int) -> list[str]:
    """A cluster of the code that runs this, whatever ``pagerelay`` stands for on PATH."""
    words = [sys.executable, "-m", "pagerelay.cli", "up", *flags]
    words += ["--model", options.model, "--port", str(port)]
    words += ["--kv-memory-mib", str(options.kv_memory_mib), "--threads", str(options.threads)]
    return [*words, "--workers-endpoint", "tcp://127.0.0.1:0", "--cpu-ops", "c", "--transport", "shm"]


async def one_cluster(
    flags: tuple[str, ...], options: FootprintOptions
) -> tuple[list[Worker], dict[str, Measured]]:
    port = free_port()
    async with running(up_command(flags, options, port), port) as server:
        await server.wait_ready(120)
        workers = find_workers(server.pid)
        for worker in workers:
            worker.ready_s = age_s(worker.pid)
            worker.loaded_mb = status_mb(worker.pid, "VmHWM")
        watch = asyncio.create_task(_watch(workers))
        try:
            measured = await _traffic(server, options)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            if not watch.cancelled():
                watch.result()  # a worker that has gone; its figures would mean nothing
        _sample(workers)
        for worker in workers:
            worker.peak_mb = status_mb(worker.pid, "VmHWM")
            worker.file_mb = status_mb(worker.pid, "RssFile")
        return workers, measured


def footprint_table(found: list[Footprint]) -> str:
    """One column a worker."""
    rows = [
        ("ready after s", [one.worker.ready_s for one in found]),
        ("peak when loaded MB", [one.worker.loaded_mb for one in found]),
        ("  beyond weights", [one.loaded_beyond_mb for one in found]),
        ("most under traffic, without pools MB", [one.worker.own_mb for one in found]),
        ("  weights, fp32", [one.weights_mb for one in found]),
        ("  beyond weights", [one.beyond_mb for one in found]),
        ("  of which files' pages", [one.worker.file_mb for one in found]),
        ("pool MB", [one.pool_mb for one in found]),
        ("  touched", [one.worker.pool_touched_mb for one in found]),
        ("peak after traffic, all pools MB", [one.worker.peak_mb for one in found]),
        ("peak PSS MB", [one.worker.peak_pss_mb for one in found]),
    ]
    cells = [[label, *map(number, values)] for label, values in rows]
    limit = f"≤ {BEYOND_MB:g} MB beyond, ≤ {READY_S:g} s"
    cells.append([limit, *("yes" if one.ok else "NO" for one in found)])
    return table(["worker", *(one.worker.role for one in found)], cells)


async def measure_footprint(options: FootprintOptions) -> int:
    """Prints the table, writes the report; 0 if every bound holds and no request failed."""
    folder = resolve_model(options.model, progress=lambda line: print(line, file=sys.stderr, flush=True))
    weights_mb, pool_mb = fp32_bytes(folder) / MB, options.kv_memory_mib * 2**20 / MB
    found, traffic = [], {}
    for name, flags in CLUSTERS.items():
        workers, traffic[name] = await one_cluster(flags, options)
        found += [Footprint(worker=one, weights_mb=weights_mb, pool_mb=pool_mb) for one in workers]
    print(footprint_table(found))
    failed = sum(one.failed for cluster in traffic.values() for one in cluster.values())
    report = header(
        options=options,
        bounds={"beyond_mb": BEYOND_MB, "ready_s": READY_S},
        workers=[
            {
                "footprint": one,
                "beyond_mb": one.beyond_mb,
                "loaded_beyond_mb": one.loaded_beyond_mb,
                "ok": one.ok,
            }
            for one in found
        ],
        failed_requests=failed,
        traffic=traffic,
    )
    print(f"written: {write_json(stamped(options.results, 'footprint'), report)}")
    return 0 if failed == 0 and all(one.ok for one in found) else 1
