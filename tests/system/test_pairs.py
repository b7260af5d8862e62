"""Everything that a request can ask for beside everything else: the same answer, or the same refusal, on both
sides of the split, to the last bit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, running
from features import FEATURES, SAMPLING, ask, refused, request, together
from reference import prompts
from tokenizers import Tokenizer

LENGTHS = (1, 16, 37)
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not set(pair) <= SAMPLING.keys()  # test_sampling.py has those
]
MUST_STOP = ("stop", "stop kept", "stop ids", "eos heard", "regex", "choice", "gbnf")


@pytest.fixture(scope="module")
def tools_split(tools_dir: Path) -> Iterator[Cluster]:
    with running(tools_dir) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def asked(tiny_dir: Path) -> list[tuple[list[int], str]]:
    """Prompts of these lengths, and their texts."""
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    (long,) = [one for one in prompts(tiny_dir, 40) if len(one) >= max(LENGTHS)][:1]
    return [(long[:length], tokenizer.decode(long[:length])) for length in LENGTHS]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_each_pair_says_the_same_on_both_sides_of_the_split(
    tools_split: Cluster, colocated: Cluster, asked: list[tuple[list[int], str]], half: int
) -> None:
    pairs = PAIRS[half::2]
    gate = asyncio.Semaphore(8)
    answers: dict[tuple[str, str], Any] = {}
    differ: dict[tuple[str, str], Any] = {}

    async def one(number: int, pair: tuple[str, str]) -> None:
        route, body = request(*asked[number % 3], together(*pair))
        plain = dict(body)
        if frozenset(pair) not in refused():
            # What is streamed there is not here: the pieces make the whole.
            plain = {key: value for key, value in body.items() if not key.startswith("stream")}
        async with gate:
            answers[pair], alone = await asyncio.gather(
                ask(tools_split, route, body), ask(colocated, route, plain)
            )
        if answers[pair] != alone:
            differ[pair] = answers[pair], alone

    await asyncio.gather(*(one(*numbered) for numbered in enumerate(pairs)))
    assert not differ
    no = {frozenset(pair) for pair, answer in answers.items() if isinstance(answer, tuple)}
    assert no == {frozenset(pair) for pair in pairs} & refused()
    ended: dict[str, set[str]] = {name: set() for name in FEATURES}
    for pair, answer in answers.items():
        if isinstance(answer, tuple):
            status, code, param = answer
            assert status == 400, (pair, answer)
            assert code in ("invalid_value", "unsupported_parameter"), (pair, answer)
            assert param.split(".")[0] in together(*pair), (pair, answer)
            continue
        for name in pair:
            ended[name] |= {choice["finish_reason"] for choice in answer["choices"]}
    assert all("stop" in ended[name] for name in MUST_STOP), ended
    assert "tool_calls" in ended["tools called"] & ended["tools forced"]
    for cluster in (tools_split, colocated):
        await cluster.idle()
        assert await cluster.metric("pagerelay_recoveries_total") == 0
