"""Beam search over the split: the answers and scores of one worker, and transformers' own."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, running
from reference import BeamReference, ExpectedBeam, prompts

SHAPES: dict[str, dict[str, Any]] = {
    "1P1D-shm": {"worker__transport": "shm"},
    "1P1D-tcp": {"worker__transport": "tcp"},
    "colocated": {"cluster__prefill": 0, "cluster__decode": 0, "cluster__colocated": 1},
}
NUM_TOKENS = 16
ASKED = [
    (width, penalty, early) for width, penalty in ((2, 1.0), (3, 0.5), (4, 2.0), (5, 1.0)) for early in (0, 1)
]


async def search(cluster: Cluster, prompt: list[int], width: int, **fields: Any) -> list[dict[str, Any]]:
    fields = {"max_tokens": NUM_TOKENS, "num_beams": width, "n": width} | fields
    answer = await cluster.generate(prompt, **fields)
    choices: list[dict[str, Any]] = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(width))
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    return choices


def assert_found(choices: list[dict[str, Any]], expected: list[ExpectedBeam]) -> None:
    assert [choice["token_ids"] for choice in choices] == [one.ids for one in expected]
    scores = [choice["score"] for choice in choices]
    assert scores == pytest.approx([one.score for one in expected], abs=1e-4)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the first shape has found: the others find the same to the last bit."""
    return {}


@pytest.fixture(scope="module")
def tiny_expected(tiny_dir: Path) -> tuple[list[list[int]], list[list[ExpectedBeam]]]:
    reference, wanted = BeamReference(tiny_dir), prompts(tiny_dir, len(ASKED), longest=70)
    found = [
        reference(prompt, NUM_TOKENS, width, length_penalty=penalty, early_stopping=bool(early))
        for prompt, (width, penalty, early) in zip(wanted, ASKED, strict=True)
    ]
    return wanted, found


@pytest.mark.parametrize("shape", SHAPES)
async def test_same_answers_tiny_model(
    tiny_dir: Path,
    tiny_expected: tuple[list[list[int]], list[list[ExpectedBeam]]],
    found: dict[str, Any],
    shape: str,
) -> None:
    wanted, expected = tiny_expected
    with running(tiny_dir, **SHAPES[shape]) as cluster:
        plain = asyncio.create_task(cluster.ids(wanted[-1], 40))
        got = await asyncio.gather(
            *(
                search(cluster, prompt, width, length_penalty=penalty, early_stopping=bool(early))
                for prompt, (width, penalty, early) in zip(wanted, ASKED, strict=True)
            )
        )
        for choices, expected_beams in zip(got, expected, strict=True):
            assert_found(choices, expected_beams)
        assert found.setdefault("beams", got) == got
        assert found.setdefault("plain", await plain) == await plain
        await cluster.idle()

        async def counted() -> bool:
            return await cluster.metric("pagerelay_copied_blocks_total") > 0

        await cluster.until("copied blocks are counted", counted)
        assert await cluster.metric("pagerelay_recoveries_total") == 0


async def test_a_decode_worker_is_killed_while_it_searches(tiny_dir: Path) -> None:
    wanted = prompts(tiny_dir, 3, longest=70)
    with running(tiny_dir, cluster__decode=2) as cluster:

        def ask() -> list[asyncio.Task[list[dict[str, Any]]]]:
            return [asyncio.create_task(search(cluster, prompt, 4, max_tokens=250)) for prompt in wanted]

        expected = await asyncio.gather(*ask())
        await cluster.idle()
        tasks = ask()

        busy: list[str] = []

        async def searching() -> bool:
            workers = await cluster.workers("decode")
            busy[:] = [worker["id"] for worker in workers if worker["load"]["running"] >= 4]
            return bool(busy)

        await cluster.until("they search", searching)
        cluster.signal(busy[0], signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        assert await cluster.metric("pagerelay_recoveries_total", cause="worker_lost") >= 1
        await cluster.idle()


async def test_every_endpoint_one_shipment_and_what_does_not_fit(tiny_dir: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["one", "two"], "use_beam_search": True, "best_of": 3, "n": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], "num_beams": 3, "n": 2},
    }

    async def post(cluster: Cluster, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(cluster.url + route, json=body) as response,
        ):
            return response.status, await response.json()

    async def shipped(cluster: Cluster) -> float:
        await asyncio.sleep(0.6)  # the next heartbeat
        return await cluster.metric("pagerelay_fetched_bytes_total")

    with running(tiny_dir, engine__max_num_seqs=4, cache__prefix_cache="false") as cluster:
        name = (await cluster.get("/v1/models"))["data"][0]["id"]
        for route, fields in bodies.items():
            body = {"model": name, "max_tokens": 8, **fields}
            status, answer = await post(cluster, route, body)
            assert status == 200, answer
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
            assert len(answer["choices"]) == (4 if "prompt" in body else 2)
        for width, max_tokens in ((5, 8), (4, 8000)):
            body = {"prompt": "one", "num_beams": width, "max_tokens": max_tokens}
            status, answer = await post(cluster, "/generate", body)
            assert (status, answer["error"]["param"]) == (400, "num_beams")
            assert f"{width} beams" in answer["error"]["message"]
        prompt = prompts(tiny_dir, 6, longest=200)[-1]
        before = await shipped(cluster)
        await cluster.ids(prompt, NUM_TOKENS)
        once = await shipped(cluster) - before
        assert once > 0
        await search(cluster, prompt, 4)
        assert await shipped(cluster) - before == 2 * once
        await cluster.idle()


async def test_same_answers_real_model(smollm_dir: Path) -> None:
    reference = BeamReference(smollm_dir)
    wanted = prompts(smollm_dir, 8, longest=40)[3:5]
    with running(smollm_dir) as cluster:
        got = await asyncio.gather(*(search(cluster, prompt, 3) for prompt in wanted))
    for prompt, choices in zip(wanted, got, strict=True):
        assert_found(choices, reference(prompt, NUM_TOKENS, 3))
