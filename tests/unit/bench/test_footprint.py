from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pagerelay.bench.footprint import (
    Footprint,
    FootprintOptions,
    Sample,
    Worker,
    age_s,
    find_workers,
    footprint_table,
    fp32_bytes,
    read_sample,
    status_mb,
    up_command,
)

SMAPS = """\
7f00-8f00 rw-s 00000000 00:19 7     /dev/shm/pagerelay-0a1b
Size:               2000 kB
Rss:                1000 kB
Pss:                 700 kB
VmFlags: rd wr sh
9f00-af00 r--s 00000000 00:19 8     /dev/shm/pagerelay-2c3d
Rss:                 500 kB
bf00-cf00 rw-p 00000000 00:00 0     [heap]
Rss:               90000 kB
"""


def test_its_own_pool_and_what_it_reads_of_others() -> None:
    found = read_sample(SMAPS)
    assert (found.own_pool_mb, found.peer_pool_mb) == (1.024, 0.512)
    assert (found.rss_mb, found.pss_mb) == (91500 * 1024 / 1e6, 700 * 1024 / 1e6)


def test_memory_and_pool_are_of_one_moment() -> None:
    """A peak while the pool was empty is not excused by the pool that is filled afterwards."""
    worker = Worker(role="decode", pid=1)
    worker.note(Sample(rss_mb=700.0, pss_mb=600.0, own_pool_mb=0.0, peer_pool_mb=0.0))
    worker.note(Sample(rss_mb=790.0, pss_mb=500.0, own_pool_mb=100.0, peer_pool_mb=50.0))
    assert (worker.own_mb, worker.pool_touched_mb, worker.peer_pool_mb) == (700.0, 100.0, 50.0)
    assert worker.peak_pss_mb == 600.0


def test_the_cluster_is_of_the_code_that_runs_this() -> None:
    options = FootprintOptions(model="m", kv_memory_mib=64, threads=2, results="r", seed=1)
    words = up_command(("--colocated", "1"), options, 8123)
    assert words[:6] == [sys.executable, "-m", "pagerelay.cli", "up", "--colocated", "1"]
    assert words[words.index("--port") + 1] == "8123"
    assert words[words.index("--kv-memory-mib") + 1] == "64"


def test_weights_count_in_fp32_and_a_tied_one_once(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((4, 8), np.float16), "b": np.zeros(3, np.float32)}, tmp_path / "model.safetensors"
    )
    assert fp32_bytes(tmp_path) == 4 * 35


@pytest.mark.parametrize(
    ("under_traffic", "loaded", "ready", "ok"),
    [
        (820.0, 800.0, 5.0, True),
        (850.0, 800.0, 5.0, False),
        (820.0, 850.0, 5.0, False),
        (820.0, 800.0, 11.0, False),
    ],
)
def test_each_bound_counts(under_traffic: float, loaded: float, ready: float, ok: bool) -> None:
    worker = Worker(role="decode", pid=1, own_mb=under_traffic, loaded_mb=loaded, ready_s=ready)
    found = Footprint(worker=worker, weights_mb=538.0, pool_mb=134.0)
    assert found.ok is ok
    assert footprint_table([found]).splitlines()[-1].split()[-1] == ("yes" if ok else "NO")


def test_workers_are_found_by_their_command_line() -> None:
    words = [sys.executable, "-c", "input()", "-m", "pagerelay.cli"]
    with (
        subprocess.Popen([*words, "prefill"], stdin=subprocess.PIPE) as prefill,
        subprocess.Popen([*words, "router"], stdin=subprocess.PIPE) as router,
        subprocess.Popen([*words, "decode"], stdin=subprocess.PIPE) as decode,
    ):
        time.sleep(0.05)
        ours = {prefill.pid, router.pid, decode.pid}  # other tests' clusters may be children here too
        found = [(one.role, one.pid) for one in find_workers(os.getpid()) if one.pid in ours]
        assert found == [("prefill", prefill.pid), ("decode", decode.pid)]
        assert 0 <= age_s(prefill.pid) < 60
        assert status_mb(prefill.pid, "VmHWM") > 1
        for child in (prefill, router, decode):
            child.communicate(b"\n")
