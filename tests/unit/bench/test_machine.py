from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import time

import pytest

from pagerelay.bench.machine import (
    Monitor,
    cpu_seconds,
    describe_machine,
    git_commit,
    memory_mib,
    process_tree,
)


def test_the_tree_holds_children_and_their_children() -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()']);"
        "print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {os.getpid(), child.pid, grandchild} <= set(process_tree(os.getpid()))
        assert set(process_tree(child.pid)) == {child.pid, grandchild}
        assert memory_mib(child.pid)[1] > memory_mib(grandchild)[1] > 0
        child.communicate("\n\n")


async def test_the_monitor_sees_memory_and_cpu() -> None:
    async with Monitor(os.getpid()) as monitor:
        end = time.process_time() + 0.15
        while time.process_time() < end:
            pass
        await asyncio.sleep(0.05)
    assert monitor.usage.pss_mib is not None
    assert monitor.usage.rss_mib is not None
    assert 0 < monitor.usage.pss_mib <= monitor.usage.rss_mib * 1.01
    assert monitor.usage.cpu_s is not None
    assert monitor.usage.cpu_s >= 0.1
    assert monitor.usage.other_cores is not None
    assert monitor.usage.other_cores >= 0


async def test_without_a_process_there_is_nothing_to_say() -> None:
    async with Monitor(None) as monitor:
        pass
    assert monitor.usage.pss_mib is None


def test_a_process_that_is_gone_has_used_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert cpu_seconds(child.pid) == 0


def test_the_machine() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.cpu
    assert machine.memory_gib is None or machine.memory_gib > 0


def test_the_commit_is_asked_of_git() -> None:
    commit = git_commit()
    assert commit is None or len(commit.rstrip("+")) == 12


FAULTS = """
import ctypes, resource
from pagerelay.bench.machine import keep_freed_memory
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)

def faults():  # of filling 64 MiB that were filled and freed before
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = library.malloc(64 << 20)
        ctypes.memset(block, 1, 64 << 20)
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), keep_freed_memory(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_stays_and_costs_no_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    as_it_comes, kept, after = done.stdout.split()
    assert kept == "True"
    assert int(after) * 4 < int(as_it_comes)
