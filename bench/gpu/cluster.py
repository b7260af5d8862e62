"""The same load for prefill and decode workers, for one worker that does both, and for transformers.

One GPU gives its time to one process after the other: beside a colocated worker the split shows here what it
costs, not what it brings.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pagerelay.bench.gpu.bench import Bench
from pagerelay.bench.gpu.driver import Asked, Driver
from pagerelay.bench.gpu.models import make_folder, random_model
from pagerelay.bench.stats import percentile

ATTENTIONS = ("paged|flash_attention_2", "paged|sdpa", "paged|eager")
"""Of transformers' continuous batching; the first that runs is compared with."""


def workers_and_others(bench: Bench) -> None:
    count, prompt_tokens, answer_tokens, clients = bench.sized((64, 2048, 128, 32), (4, 20, 4, 2))
    draw = random.Random(3)  # noqa: S311 - prompts
    prompts = [[draw.randrange(3, 250) for _ in range(prompt_tokens)] for _ in range(count)]
    bench.figure("load", f"{count} x {prompt_tokens} in, {answer_tokens} out, {clients} at a time")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch), bench.dry)
        together = asyncio.run(_serve(bench, folder, ("colocated",), prompts, answer_tokens, clients))
        bench.go_on()
        split = asyncio.run(_serve(bench, folder, ("prefill", "decode"), prompts, answer_tokens, clients))
        same = sum(a.tokens == b.tokens for a, b in zip(together, split, strict=True))
        # The library's products choose their algorithm by batch size, and near-ties may fall either way.
        bench.figure("answers equal, split and colocated", f"{same} of {count}")
        carried = {asked.transport for asked in split}
        wanted = {"shm"} if bench.dry else {"cuda_ipc"}
        bench.check("blocks went by the direct way", carried == wanted, ", ".join(sorted(carried)))
        taken = [1000 * asked.handover_s for asked in split if asked.handover_s is not None]
        bench.figure("hand-over p50", percentile(taken, 50), "ms", f"p99 {percentile(taken, 99):.1f}")
        bench.go_on()
        _transformers(bench, folder, prompts[: bench.sized(count, 1)], answer_tokens)


async def _serve(
    bench: Bench,
    folder: Path,
    roles: Sequence[str],
    prompts: list[list[int]],
    answer_tokens: int,
    clients: int,
) -> list[Asked]:
    driver = Driver()
    settings = [f"worker.routers=tcp://127.0.0.1:{driver.port}", f"engine.max_num_seqs={clients}"]
    if bench.dry:
        settings += ["cache.num_blocks=64", "engine.threads=1"]
    else:
        share = 0.9 / len(roles)
        settings += [f"engine.device={bench.device}", f"engine.gpu_memory_utilization={share:.2f}"]
    name = " + ".join(roles)
    with ExitStack() as stack:
        processes = []
        for role in roles:
            command = [sys.executable, "-m", "pagerelay.bench.gpu.worker", role, str(folder), *settings]
            processes.append(subprocess.Popen(command))  # noqa: S603 - our own module
            stack.callback(_end, processes[-1])
        began = time.monotonic()
        async with asyncio.timeout(bench.sized(90, 60)):
            await driver.until_joined(*roles)
        bench.figure(f"{name}: start", time.monotonic() - began, "s")
        await driver.ask(prompts[0], 2)  # compiles what is compiled at first use
        began = time.monotonic()
        gate = asyncio.Semaphore(clients)

        async def one(prompt: list[int]) -> Asked:
            async with gate:
                return await driver.ask(prompt, answer_tokens)

        async with asyncio.timeout(bench.sized(60, 60)):
            answers = await asyncio.gather(*map(one, prompts))
        seconds = time.monotonic() - began
    await driver.close()
    first = [1000 * (asked.times[0] - asked.began) for asked in answers]
    gaps = [1000 * (b - a) for asked in answers for a, b in zip(asked.times, asked.times[1:], strict=False)]
    bench.figure(f"{name}: output", len(prompts) * answer_tokens / seconds, "tokens/s")
    for what, values in (("TTFT", first), ("ITL", gaps)):
        bench.figure(f"{name}: {what} p50", percentile(values, 50), "ms", f"p99 {percentile(values, 99):.1f}")
    bench.check(f"{name}: every answer is whole", all(len(a.tokens) == answer_tokens for a in answers))
    return list(answers)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _transformers(bench: Bench, folder: Path, prompts: list[list[int]], answer_tokens: int) -> None:
    from transformers import GenerationConfig

    settings: dict[str, Any] = {"max_new_tokens": answer_tokens, "eos_token_id": -1, "pad_token_id": 0}
    wanted = GenerationConfig(do_sample=False, **settings)  # type: ignore[no-untyped-call]
    dtype = bench.sized(torch.bfloat16, torch.float32)
    for attention in ATTENTIONS[-1:] if bench.dry else ATTENTIONS:
        bench.go_on()
        name = f"transformers, {attention}"
        try:
            with torch.inference_mode(False), torch.no_grad():
                model: object = random_model(folder, dtype, bench.device, attention)
                began = time.monotonic()
                done = model.generate_batch(prompts, generation_config=wanted, progress_bar=False)  # type: ignore[attr-defined]
                seconds = time.monotonic() - began
        except Exception as error:  # whatever another project's code raises here, it is not ours to fail for
            bench.skip(name, f"{type(error).__name__}: {error}"[:120])
            continue
        tokens = sum(len(answer.generated_tokens) for answer in done.values())
        bench.figure(f"{name}: output", tokens / seconds, "tokens/s", f"{tokens} tokens, warm-up included")
        return
