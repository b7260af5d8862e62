"""Workers and routers that die, stop, come and go: streams lose and repeat nothing, blocks come back, nobody
hangs."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from cluster import Cluster, joined, post, running
from safetensors.numpy import load_file, save_file

NUM_STREAMS = 8
LONG = 150


async def read(cluster: Cluster, index: int, started: asyncio.Event | None = None) -> list[dict[str, Any]]:
    events = []
    fields = {"temperature": 0.8, "seed": index} if index % 2 else {}
    async for event in cluster.stream([index + 3] * 33, LONG, **fields):
        events.append(event)
        if started is not None and len(events) == 5:
            started.set()
    return events


async def undisturbed(cluster: Cluster) -> list[list[int]]:
    return [
        joined(events)[0] for events in await asyncio.gather(*(read(cluster, i) for i in range(NUM_STREAMS)))
    ]


async def test_decode_worker_killed_under_streams(tiny_dir: Path) -> None:
    """The other decode worker takes over; every stream has exactly the tokens of the undisturbed run."""
    with running(tiny_dir, cluster__decode=2) as cluster:
        expected = await undisturbed(cluster)
        started = asyncio.Event()
        tasks = [asyncio.create_task(read(cluster, index, started)) for index in range(NUM_STREAMS)]
        await started.wait()
        cluster.signal("decode-1", signal.SIGKILL)
        assert [joined(await task)[0] for task in tasks] == expected
        assert await cluster.metric("pagerelay_recoveries_total", cause="worker_lost") >= 1
        await cluster.idle()
        assert len(await cluster.workers("decode")) == 1


async def test_prefill_worker_killed_while_prompts_wait(tiny_dir: Path) -> None:
    """With another prefill worker nothing is lost; with none, decode workers compute prompts themselves."""
    with running(tiny_dir, cluster__prefill=2) as cluster:
        prompts = [[index + 3] * 300 for index in range(12)]
        expected = [await cluster.ids(prompt, 8) for prompt in prompts]
        tasks = [asyncio.create_task(cluster.ids([9, *prompt], 8)) for prompt in prompts]
        await asyncio.sleep(0.05)
        cluster.signal("prefill-1", signal.SIGKILL)
        assert all(len(ids) == 8 for ids in await asyncio.gather(*tasks))
        cluster.signal("prefill-2", signal.SIGKILL)

        async def gone() -> bool:
            return not await cluster.workers("prefill")

        await cluster.until("both prefill workers are known to be gone", gone)
        assert [await cluster.ids(prompt, 8) for prompt in prompts] == expected
        assert await cluster.metric("pagerelay_local_prefills_total", reason="no_prefill_worker") >= len(
            prompts
        )
        await cluster.idle()


async def test_last_decode_worker_killed_and_restarted(tiny_dir: Path) -> None:
    """A typed error event within 5 s, 503 with a reason meanwhile, and answers again once a worker is
    back."""
    with running(tiny_dir) as cluster:
        expected = await cluster.ids("hello", 8)
        started = asyncio.Event()
        task = asyncio.create_task(read(cluster, 0, started))
        await started.wait()
        killed_at = time.monotonic()
        cluster.signal("decode-1", signal.SIGKILL)
        events = await task
        assert time.monotonic() - killed_at < 5.0
        assert events[-1]["error"]["code"] == "no_decode_worker"
        assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
        assert (await cluster.get("/readyz"))["reason"] == "no_decode_worker"
        cluster.revive("decode-1")

        async def ready() -> bool:
            return (await cluster.get("/readyz"))["status"] == "ready"

        await cluster.until("the restarted worker serves", ready, 60)
        assert await cluster.ids("hello", 8) == expected
        await cluster.idle()


async def test_stopped_decode_worker_is_left_and_comes_back(tiny_dir: Path) -> None:
    """SIGSTOP is a death that the connection does not show; after SIGCONT its late tokens count for
    nothing."""
    with running(tiny_dir, cluster__decode=2) as cluster:
        expected = await undisturbed(cluster)
        started = asyncio.Event()
        tasks = [asyncio.create_task(read(cluster, index, started)) for index in range(NUM_STREAMS)]
        await started.wait()
        cluster.signal("decode-2", signal.SIGSTOP)
        try:
            assert [joined(await task)[0] for task in tasks] == expected
        finally:
            cluster.signal("decode-2", signal.SIGCONT)

        async def both() -> bool:
            return len(await cluster.workers("decode")) == 2

        await cluster.until("the stopped worker has come back", both)
        await cluster.idle()
        assert await undisturbed(cluster) == expected


async def test_decode_worker_started_by_hand_takes_load_and_leaves(tiny_dir: Path) -> None:
    with running(tiny_dir) as cluster:
        expected = await undisturbed(cluster)
        command = [
            sys.executable,
            "-m",
            "pagerelay.cli",
            "decode",
            "--model",
            str(tiny_dir),
            "--threads",
            "1",
        ]
        command += ["--router", cluster.launcher.workers_endpoint, "--num-blocks", "512"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:

            async def joined_by_two() -> bool:
                return len(await cluster.workers("decode")) == 2

            await cluster.until("the second decode worker has joined", joined_by_two, 60)
            assert await undisturbed(cluster) == expected
            shares = [w["counters"]["tokens_generated"] for w in await cluster.workers("decode")]
            assert all(share > 0 for share in shares)
            tasks = [asyncio.create_task(read(cluster, index)) for index in range(NUM_STREAMS)]
            await asyncio.sleep(0.2)
            process.terminate()  # drains: what runs on it is finished there, new requests go elsewhere
            assert [joined(await task)[0] for task in tasks] == expected
            assert await asyncio.to_thread(process.wait, 30) == 0
        finally:
            process.kill()
            process.wait()

        async def one() -> bool:
            return len(await cluster.workers("decode")) == 1

        await cluster.until("it has left", one)
        assert await cluster.metric("pagerelay_recoveries_total") == 0
        await cluster.idle()


async def test_preemption_under_a_small_pool(tiny_dir: Path) -> None:
    """Far more than fits: the youngest step back and come again, and all give the tokens of an ample pool."""
    prompts = [[index + 3] * 20 for index in range(10)]
    with running(tiny_dir, cache__num_blocks=256) as ample:
        expected = [await ample.ids(prompt, 120) for prompt in prompts]
    with running(tiny_dir, cache__num_blocks=24) as cluster:
        assert await asyncio.gather(*(cluster.ids(prompt, 120) for prompt in prompts)) == expected

        async def stepped_back() -> bool:
            return await cluster.metric("pagerelay_preemptions_total") > 0

        await cluster.until("some stepped back", stepped_back)  # as the next heartbeat says
        await cluster.idle()
        context = (await cluster.get("/cluster"))["context_len"]
        assert context == 24 * 16
        async with aiohttp.ClientSession() as session:
            response = await session.post(cluster.url + "/generate", json={"prompt": [5] * 2000})
            assert response.status == 400


async def test_colocated_workers_give_the_same_tokens(tiny_dir: Path, split: Cluster) -> None:
    prompts = [[index + 3] * (10 * index + 1) for index in range(10)]
    expected = [await split.ids(prompt, 16, seed=3, temperature=0.8) for prompt in prompts]
    with running(tiny_dir, cluster__prefill=0, cluster__decode=0, cluster__colocated=1) as cluster:
        got = await asyncio.gather(*(cluster.ids(prompt, 16, seed=3, temperature=0.8) for prompt in prompts))
        assert list(got) == expected
        await cluster.idle()


@pytest.fixture(scope="module")
def ill(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a token, 77, that its weights know no numbers for."""
    folder = tmp_path_factory.mktemp("ill")
    for file in tiny_dir.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (name,) = (file.name for file in tiny_dir.glob("*.safetensors"))
    weights = load_file(tiny_dir / name)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][77] = np.nan
    save_file(weights, folder / name, metadata={"format": "pt"})
    return folder


async def test_logits_that_are_no_numbers_fail_their_own_request_alone(ill: Path) -> None:
    """By its prompt on the prefill worker, or by a token of its answer on the decode worker."""
    on_d = {"logit_bias": {"77": 100.0}}  # its first token is 77, and there is no second
    with running(ill) as cluster:
        well = [[index + 3] * 33 for index in range(4)]
        expected = [await cluster.ids(prompt, 12) for prompt in well]
        bodies = [
            {"prompt": [5, 77, 6], "max_tokens": 12, "stream": stream, **fields}
            for stream in (False, True)
            for fields in ({}, {"max_tokens": 1})
        ]
        bodies += [{"prompt": [5, 77, 6], **fields} for fields in ({"num_beams": 2}, {"prompt_logprobs": 1})]
        bodies += [{"prompt": [5, 6], "max_tokens": 12, **on_d}]

        async def refused(body: dict[str, Any]) -> None:
            status, answer, _ = await post(cluster, "/generate", body)
            assert status == 500, answer
            error = answer["error"]
            assert (error["code"], error["type"]) == ("bad_logits", "internal_error")
            assert "NaN or infinity" in error["message"]

        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(cluster.ids(prompt, 12)) for prompt in well]
            for body in bodies:
                group.create_task(refused(body))
        assert [answer.result() for answer in answers] == expected
        await cluster.idle()

        async def counted() -> bool:  # it comes with heartbeats
            return await cluster.metric("pagerelay_bad_logits_total") == len(bodies)

        await cluster.until("each is counted", counted)
        assert await cluster.metric("pagerelay_recoveries_total") == 0
