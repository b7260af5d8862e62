"""Does fetching overlap computing? A prefill worker behind a line of 1 Gbit/s, in a network namespace.

Needs root and iproute2 (``ip``, ``tc``). The router and the decode worker are in one namespace, the prefill
worker in another; between them is a pair of virtual interfaces with a token bucket on both ends. With chunked
prefill all but the last chunk's blocks should be on D before P has finished: what is left then may take 1.2
times what the last chunk's own bytes take on that line. ``python tests/helpers/overlap.py --model FOLDER``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from pagerelay.common.wire.auth import new_cluster_key

NEAR, FAR = f"pr{os.getpid()}d", f"pr{os.getpid()}p"
NEAR_ADDRESS, FAR_ADDRESS = "10.213.0.1", "10.213.0.2"
BLOCK = 16


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def line(near: str, far: str, mbit: int) -> Iterator[None]:
    """Two namespaces with a limited line between them; gone afterwards, whatever happens."""
    try:
        for name in (near, far):
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", near, "link", "add", "line", "type", "veth", "peer", "name", "line", "netns", far)
        for name, address in ((near, NEAR_ADDRESS), (far, FAR_ADDRESS)):
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "line")
            sh("ip", "-n", name, "link", "set", "line", "up")
            rate = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
            sh("tc", "-n", name, "qdisc", "add", "dev", "line", "root", "tbf", *rate)
        yield
    finally:
        for name in (near, far):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def services(model: Path, chunk: int, prompt: int) -> Iterator[str]:
    """Router and decode worker near, prefill worker far. Gives the router's URL (in the near namespace)."""
    with tempfile.TemporaryDirectory(prefix="pagerelay-overlap-") as folder:
        key = Path(folder) / "key"
        key.write_text(new_cluster_key())
        key.chmod(0o600)
        blocks = str(4 * (prompt // BLOCK + 8))
        common = ["--model", str(model), "--cluster-key-file", str(key)]
        worker = [*common, "--router", f"tcp://{NEAR_ADDRESS}:5555", "--threads", "1", "--transport", "tcp"]
        worker += ["--num-blocks", blocks, "--set", f"engine.max_batch_tokens={chunk}"]
        worker += ["--set", "cache.prefix_cache=false"]
        far = ["--set", f"worker.data_host={FAR_ADDRESS}"]
        near = [*common, "--port", "8000", "--workers-endpoint", f"tcp://{NEAR_ADDRESS}:5555"]
        children = []
        try:
            for name, role, flags in (
                (NEAR, "router", near),
                (NEAR, "decode", worker),
                (FAR, "prefill", [*worker, *far]),
            ):
                words = ["ip", "netns", "exec", name, sys.executable, "-m", "pagerelay.cli", role, *flags]
                children.append(subprocess.Popen(words, start_new_session=True))
            yield "http://127.0.0.1:8000"
        finally:
            for child in children:
                child.send_signal(signal.SIGTERM)
            for child in children:
                try:
                    child.wait(15)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


async def measure(url: str, requests: int, prompt_tokens: int) -> list[dict[str, Any]]:
    """Runs in the near namespace: timings of each request."""
    rng, found = random.Random(4), []
    async with aiohttp.ClientSession() as session:
        deadline = time.monotonic() + 120
        while True:
            try:
                async with session.get(url + "/cluster") as response:
                    if len((await response.json())["workers"]) == 2:
                        break
            except (aiohttp.ClientError, OSError):
                pass
            assert time.monotonic() < deadline, "the workers did not join"
            await asyncio.sleep(0.2)
        for _ in range(requests):
            prompt = [10 + rng.randrange(4000) for _ in range(prompt_tokens)]
            body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            async with session.post(url + "/generate", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                found.append(answer["timings"])
        async with session.get(url + "/cluster") as response:
            workers = (await response.json())["workers"]
    decode = next(w for w in workers if w["role"] == "decode")
    assert set(decode["transports_in_use"]) == {"tcp"}, decode["transports_in_use"]
    return [*found, {"bytes": decode["counters"]["fetched_bytes"]["tcp"] / requests}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    prompt = args.chunk * args.chunks
    if args.inside:
        print(json.dumps(asyncio.run(measure(args.inside, args.requests, prompt))))
        return 0
    with line(NEAR, FAR, args.mbit), services(args.model, args.chunk, prompt) as url:
        inside = [sys.executable, __file__, "--model", str(args.model), "--inside", url]
        inside += ["--requests", str(args.requests), "--chunk", str(args.chunk), "--chunks", str(args.chunks)]
        out = subprocess.run(
            ["ip", "netns", "exec", NEAR, *inside], check=True, capture_output=True, text=True
        )
        *timings, moved = json.loads(out.stdout)
    last = moved["bytes"] / args.chunks
    due_ms = last * 8 / (args.mbit * 1e6) * 1e3
    left = sorted(one["handover_phases_ms"]["copy"] for one in timings)
    prefill = statistics.median(one["prefill_ms"] for one in timings)
    print(
        f"{args.requests} prompts of {prompt} tokens in chunks of {args.chunk}, "
        f"{moved['bytes'] / 1e6:.1f} MB each, {args.mbit} Mbit/s: "
        f"last chunk {last / 1e6:.1f} MB = {due_ms:.0f} ms on the line; "
        f"prefill {prefill:.0f} ms"
    )
    print(
        f"left after P's last chunk: median {statistics.median(left):.0f} ms, longest {left[-1]:.0f} ms; "
        f"limit {1.2 * due_ms:.0f} ms; all at once would be {due_ms * args.chunks:.0f} ms"
    )
    return 0 if statistics.median(left) <= 1.2 * due_ms else 1


if __name__ == "__main__":
    sys.exit(main())
