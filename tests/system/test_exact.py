"""The split is invisible: the same tokens whatever the shape of the cluster, and transformers' own."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from cluster import Cluster, running
from reference import Expected, greedy, prompts

NUM_TOKENS = 32
SHAPES = [
    pytest.param({"cluster__prefill": p, "cluster__decode": p, "worker__transport": t}, id=f"{p}P{p}D-{t}")
    for p in (1, 2)
    for t in ("shm", "tcp")
]
COLOCATED = {"cluster__prefill": 0, "cluster__decode": 0, "cluster__colocated": 1}


async def ask_all(
    cluster: Cluster, wanted: list[list[int]], at_once: int, **fields: object
) -> list[list[int]]:
    gate = asyncio.Semaphore(at_once)

    async def ask(index: int) -> list[int]:
        async with gate:
            return await cluster.ids(wanted[index], NUM_TOKENS, seed=index, **fields)

    return list(await asyncio.gather(*(ask(index) for index in range(len(wanted)))))


def assert_equal(got: list[list[int]], expected: list[Expected]) -> None:
    sure = sum(want.sure for want in expected)
    assert sure >= 0.9 * NUM_TOKENS * len(expected), "near-ties leave too little to compare"
    for index, (ids, want) in enumerate(zip(got, expected, strict=True)):
        assert len(ids) == NUM_TOKENS
        assert ids[: want.sure] == want.ids[: want.sure], f"prompt {index}"


async def check_shape(
    model: Path,
    shape: dict[str, object],
    wanted: list[list[int]],
    expected: list[Expected],
    sampled: dict[str, list[list[int]]] | None,
) -> dict[str, float]:
    """All prompts alone and 16 at a time, greedy and (with ``sampled``) seeded; returns what the metrics say
    of the shape."""
    split = "cluster__colocated" not in shape
    with running(model, cache__num_blocks=1024, **shape) as cluster:
        for at_once in (16, 1):
            assert_equal(await ask_all(cluster, wanted, at_once), expected)
            if sampled is None:
                continue
            seeded = await ask_all(cluster, wanted, at_once, temperature=0.8)
            assert sampled.setdefault("ids", seeded) == seeded, f"seeded ids differ, {at_once} at a time"
        await cluster.idle()
        facts = {
            "recomputed": await cluster.metric("pagerelay_decode_recomputed_tokens_total"),
            "local": await cluster.metric("pagerelay_local_prefills_total"),
            "recoveries": await cluster.metric("pagerelay_recoveries_total"),
            "received": await cluster.metric("pagerelay_worker_prompt_tokens_total", source="received"),
        }
        used = {kind for worker in await cluster.workers() for kind in worker["transports_in_use"]}
    assert facts["recoveries"] == 0
    if split:
        assert facts["recomputed"] == facts["local"] == 0
        assert facts["received"] > 0
    else:
        assert facts["received"] == 0
    assert used == ({shape["worker__transport"]} if split else set())
    return facts


@pytest.fixture(scope="module")
def tiny_expected(tiny_dir: Path) -> tuple[list[list[int]], list[Expected]]:
    wanted = prompts(tiny_dir, 24, longest=200)
    return wanted, list(greedy(tiny_dir, wanted, NUM_TOKENS))


@pytest.fixture(scope="module")
def seeded_ids() -> dict[str, list[list[int]]]:
    return {}


@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        pytest.param(
            COLOCATED | {"engine__threads": 2, "engine__max_batch_tokens": 16}, id="colocated-small-chunks"
        ),
        pytest.param(
            {"worker__transport": "shm", "engine__threads": 2, "engine__max_batch_tokens": 16},
            id="1P1D-small-chunks",
        ),
    ],
)
async def test_same_tokens_tiny_model(
    tiny_dir: Path,
    tiny_expected: tuple[list[list[int]], list[Expected]],
    seeded_ids: dict[str, list[list[int]]],
    shape: dict[str, object],
) -> None:
    wanted, expected = tiny_expected
    assert (
        len({tuple(want.ids) for want in expected}) > len(expected) // 2
    )  # the prompts matter to the answers
    await check_shape(tiny_dir, shape, wanted, expected, seeded_ids)


async def test_same_tokens_without_a_compiler(
    tiny_dir: Path, tiny_expected: tuple[list[list[int]], list[Expected]]
) -> None:
    """Torch's own kernels serve where no C compiler is found."""
    wanted, expected = tiny_expected
    shape = {"worker__transport": "shm", "engine__cpu_ops": "torch"}
    # No seeded ids: these kernels do not promise that a row's last bits are free of its batch.
    await check_shape(tiny_dir, shape, wanted, expected, None)


async def test_same_tokens_real_model(smollm_dir: Path) -> None:
    """A sample of ``make exact`` on SmolLM2."""
    wanted = prompts(smollm_dir, 10, longest=100)
    expected = list(greedy(smollm_dir, wanted, NUM_TOKENS))
    with running(smollm_dir) as cluster:
        assert_equal(await ask_all(cluster, wanted, 10), expected)
        assert await cluster.metric("pagerelay_decode_recomputed_tokens_total") == 0


@pytest.mark.exact
@pytest.mark.timeout(7200)
async def test_exact(smollm_dir: Path) -> None:
    """100 prompts, every shape, on SmolLM2. Prints one line a shape."""
    wanted = prompts(smollm_dir, int(os.environ.get("EXACT_PROMPTS", "100")))
    expected = list(greedy(smollm_dir, wanted, NUM_TOKENS))
    sure = sum(want.sure for want in expected)
    print(
        f"\n{len(wanted)} prompts, {sum(map(len, wanted))} tokens; {sure} of {NUM_TOKENS * len(wanted)} sure"
    )
    sampled: dict[str, list[list[int]]] = {}
    for shape in SHAPES:
        settings = shape.values[0]
        assert isinstance(settings, dict)
        facts = await check_shape(smollm_dir, settings, wanted, expected, sampled)
        print(
            f"{shape.id}: equal, alone and 16 at a time, greedy and seeded; {json.dumps(facts)}", flush=True
        )
