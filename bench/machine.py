"""What ran where, and what it used: memory and CPU of a process tree, other load, the machine itself.

Reads Linux' ``/proc``; where there is none, every figure is ``None``.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

from msgspec import Struct

PROC = Path("/proc")
SAMPLE_EVERY_S = 1.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


class Machine(Struct, frozen=True, kw_only=True):
    cpu: str
    cores: int
    """Cores this process may use."""
    memory_gib: float | None
    system: str
    python: str


class Usage(Struct, frozen=True, kw_only=True):
    """Of a server's process tree while a run lasted."""

    rss_mib: float | None = None
    pss_mib: float | None = None
    """Peak of the tree's memory, shared pages counted once."""
    cpu_s: float | None = None
    cpu_cores: float | None = None
    other_cores: float | None = None
    """Cores that neither the server nor the generator used: noise, near 0 on a quiet machine."""


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` after the command's name (which may hold spaces and brackets)."""
    return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*"):
        try:
            children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue  # ended while we looked
    todo, tree = [pid], []
    while todo:
        tree.append(todo.pop())
        todo += children.get(tree[-1], [])
    return tree


def memory_mib(pid: int) -> tuple[float, float]:
    """Sums of Rss and of Pss over the process tree."""
    sums = {"Rss:": 0, "Pss:": 0}
    for member in process_tree(pid):
        try:
            lines = (PROC / str(member) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, *rest = line.split()
            if name in sums:
                sums[name] += int(rest[0])
    return sums["Rss:"] / 1024, sums["Pss:"] / 1024


def cpu_seconds(pid: int) -> float:
    """CPU time of the process tree so far, children that have been waited for included."""
    ticks = 0
    for member in process_tree(pid):
        try:
            ticks += sum(map(int, _stat(member)[11:15]))
        except (OSError, ValueError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """CPU time of everything on the machine so far: all but idle and waiting for I/O."""
    with (PROC / "stat").open() as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


class Monitor:
    """``async with Monitor(pid) as monitor:`` … then ``monitor.usage``. Without a pid it measures nothing."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid if pid is not None and PROC.is_dir() else None
        self._rss = self._pss = 0.0
        self._task: asyncio.Task[None] | None = None
        self.usage = Usage()

    async def __aenter__(self) -> Monitor:
        if self._pid is not None:
            await self._look(self._pid)  # before the clock starts: it takes a few ms
            self._before = self._read(self._pid)
            self._task = asyncio.create_task(self._sample(self._pid))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid is None or self._task is None:
            return
        wall, server, whole, own = (b - a for a, b in zip(self._before, self._read(self._pid), strict=True))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._look(self._pid)
        self.usage = Usage(
            rss_mib=self._rss or None,
            pss_mib=self._pss or None,
            cpu_s=server,
            cpu_cores=server / wall,
            other_cores=max(0.0, whole - server - own) / wall,
        )

    @staticmethod
    def _read(pid: int) -> tuple[float, float, float, float]:
        return time.perf_counter(), cpu_seconds(pid), machine_cpu_seconds(), time.process_time()

    async def _look(self, pid: int) -> None:
        rss, pss = await asyncio.to_thread(memory_mib, pid)
        self._rss, self._pss = max(self._rss, rss), max(self._pss, pss)

    async def _sample(self, pid: int) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            await self._look(pid)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> Machine:
    cpu = platform.processor() or platform.machine()
    try:
        for line in (PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
        memory_gib: float | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        memory_gib = None
    return Machine(
        cpu=cpu,
        cores=usable_cores(),
        memory_gib=round(memory_gib, 1) if memory_gib else None,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def git_commit() -> str | None:
    """Of the working folder, with ``+`` if it has changes; ``None`` outside a repository or before its first
    commit.
    """
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> str | None:
        done = subprocess.run([git, *words], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - fixed words
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+" if ask("status", "--porcelain", "--untracked-files=no") else "")


def keep_freed_memory() -> bool:
    """Makes this process's malloc keep what is freed, from now on; False where the C library is not glibc.

    Otherwise glibc takes a block above 32 MiB from the kernel each time, to be filled page by page, unless
    what was freed before happens to leave a hole for it: the same work then takes one time or another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))
