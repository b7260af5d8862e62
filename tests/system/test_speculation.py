"""Guessed tokens are invisible: the same answers to the last bit, only in fewer steps."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, running

TOKENS = 40
PROMPT = [*range(40, 60), 260, 1000, 7, 260, 1000, 7, 260]
GUESSING = {"engine__speculative": "ngram", "engine__prompt_lookup_min": 1}
FEW: dict[str, Any] = {"allowed_token_ids": [7, 260, 1000]}
"""Answers of three tokens: many guesses are right, and many wrong."""
ASKED: list[dict[str, Any]] = [
    {},
    FEW,
    FEW | {"logprobs": 3},
    FEW | {"temperature": 1.0, "seed": 3, "logprobs": 0, "prompt_logprobs": 1},
    FEW | {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.3, "presence_penalty": -0.5},
    FEW | {"temperature": 1.3, "seed": 5, "repetition_penalty": 1.2, "top_k": 2},
    FEW | {"temperature": 1.0, "seed": 6, "stop_token_ids": [1000], "min_tokens": 25},
    FEW | {"temperature": 1.0, "seed": 7, "stop_token_ids": [260], "ignore_eos": False},
    FEW | {"temperature": 1.0, "seed": 8, "bad_words": ["the"], "n": 3},
    {"logit_bias": {"2": 9.0, "260": 9.0}, "temperature": 1.0, "seed": 9, "ignore_eos": False},
    {"temperature": 1.0, "seed": 10},
    {"guided_regex": "(ab|ba| ab| ba){8,90}", "temperature": 1.0, "seed": 11},
    {"guided_json": {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 9}, "ignore_eos": False},
]


async def answers(cluster: Cluster) -> list[Any]:
    asked = [cluster.generate(PROMPT, TOKENS + at, **fields) for at, fields in enumerate(ASKED)]
    return [answer["choices"] for answer in await asyncio.gather(*asked)]


@pytest.fixture(scope="module")
def guessing(tiny_dir: Path) -> Iterator[Cluster]:
    with running(tiny_dir, cluster__decode=2, **GUESSING) as cluster:
        yield cluster


async def test_the_same_answers_with_and_without_guesses(
    split: Cluster, guessing: Cluster, tiny_dir: Path
) -> None:
    expected = await answers(split)
    reasons = [choice["finish_reason"] for choices in expected for choice in choices]
    assert "stop" in reasons
    assert "length" in reasons
    assert await answers(guessing) == expected
    await guessing.idle()

    async def counted() -> bool:
        drafted = await guessing.metric("pagerelay_drafted_tokens_total")
        accepted = await guessing.metric("pagerelay_accepted_tokens_total")
        return drafted > accepted > 50

    await guessing.until("guesses are counted", counted)
    assert await split.metric("pagerelay_drafted_tokens_total") == 0
    shape = {"cluster__prefill": 0, "cluster__decode": 0, "cluster__colocated": 1}
    with running(tiny_dir, **shape, **GUESSING) as colocated:
        assert await answers(colocated) == expected
        await colocated.idle()


async def test_a_killed_worker_and_right_guesses(split: Cluster, guessing: Cluster) -> None:
    """Runs last here: the cluster is one worker short afterwards."""
    fields = FEW | {"temperature": 1.0, "seed": 30, "logprobs": 1}
    expected = (await split.generate(PROMPT, 120, **fields))["choices"][0]
    ids: list[int] = []
    told: list[Any] = []
    killed = False
    async for event in guessing.stream(PROMPT, 120, **fields):
        assert "error" not in event, event
        for choice in event["choices"]:
            ids += choice["token_ids"]
            told += choice["logprobs"]
        if len(ids) >= 10 and not killed:
            (pid,) = [w["pid"] for w in await guessing.workers("decode") if w["requests"]]
            os.kill(pid, signal.SIGKILL)
            killed = True
    assert (ids, told) == (expected["token_ids"], expected["logprobs"])
    await guessing.idle()
