"""Workers that are stopped on purpose: nothing fails, nothing is computed twice, nothing is left behind."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, joined, running

PROMPTS = [[index + 3] * (20 + 13 * index) for index in range(3)]
LENGTH = 600


def sampling(index: int) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": index} if index % 2 else {}


async def answer(cluster: Cluster, index: int) -> list[int]:
    events = [event async for event in cluster.stream(PROMPTS[index], LENGTH, **sampling(index))]
    assert "error" not in events[-1], events[-1]
    return joined(events)[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_worker_restarted_under_load_and_no_request_fails(tiny_dir: Path) -> None:
    """A decode worker that stops hands its sequences over; each stream has the tokens of an undisturbed
    run."""
    with running(tiny_dir, restart=True, cluster__decode=2, worker__drain="hand-over") as cluster:
        expected = await asyncio.gather(*(answer(cluster, index) for index in range(len(PROMPTS))))
        stop = asyncio.Event()
        served = 0

        async def load(index: int) -> None:
            nonlocal served
            while not stop.is_set():
                assert await answer(cluster, index) == expected[index]
                served += 1
                await asyncio.sleep(0.2)  # the starting processes need the processor too

        def restarted(name: str, pid: int) -> None:
            """Looks after the processes, as the launcher's own loop does, until the new one is ready."""
            deadline = time.monotonic() + 90
            child = cluster.child(name)
            while child.process.pid == pid or child.ready is None:
                assert time.monotonic() < deadline, f"{name} has not come back"
                cluster.launcher.pump(0.05)
                cluster.launcher.revive_dead()

        loads = [asyncio.create_task(load(index)) for index in range(len(PROMPTS))]
        try:
            for name in ("decode-1", "prefill-1", "decode-2"):
                before = served

                async def runs_something(name: str = name) -> bool:
                    return any(w["id"] == name and w["load"]["running"] for w in await cluster.workers())

                if name.startswith("decode"):
                    await cluster.until(f"{name} has something to hand over", runs_something)
                pid = cluster.child(name).process.pid
                cluster.signal(name, signal.SIGTERM)
                await asyncio.to_thread(restarted, name, pid)

                async def back(name: str = name, pid: int = pid) -> bool:
                    return any(w["id"] == name and w["pid"] != pid for w in await cluster.workers())

                await cluster.until(f"{name} serves again", back)
                assert served > before
        finally:
            stop.set()
        await asyncio.gather(*loads)
        assert await cluster.metric("pagerelay_moved_requests_total") > 0
        assert await cluster.metric("pagerelay_recoveries_total") == 0
        assert await cluster.metric("pagerelay_ledger_faults_total") == 0
        await cluster.idle()
