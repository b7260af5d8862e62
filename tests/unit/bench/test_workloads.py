from __future__ import annotations

import random
from typing import Any

import pytest

from pagerelay.bench.client import Client
from pagerelay.bench.workloads import (
    WORKLOADS,
    Shape,
    Sizes,
    calibrate,
    measure_sizes,
    random_words,
    run_shape,
)


@pytest.mark.parametrize(("prefix", "prompt"), [(0, 128), (512, 544), (0, 32), (0, 1024)])
async def test_calibration_takes_the_templates_share_off(client: Client, prefix: int, prompt: int) -> None:
    system, user = await calibrate(client.send, prefix, prompt)
    assert system + user == prompt - 7
    assert (system > 0) == (prefix > 0)
    if prefix:
        assert user == prompt - prefix  # what differs between requests keeps its size
    record = await client.send(random_words(random.Random(1), system) if system else "", "word " * user, 1)
    assert record.prompt_tokens == prompt


async def test_a_prompt_smaller_than_the_template_is_still_a_prompt(client: Client) -> None:
    assert await calibrate(client.send, 0, 3) == (0, 1)


async def test_without_usage_a_word_is_a_token(fake: Any, client: Client) -> None:
    fake.mode = "500"
    assert await calibrate(client.send, 10, 30) == (10, 20)


async def test_only_the_shared_prefix_is_shared(fake: Any, client: Client) -> None:
    shape = Shape(clients=4, requests=6, prefix_tokens=20, prompt_tokens=30, output_tokens=2)
    result = await run_shape(client.send, shape, Sizes(13, 10), random.Random(1), max_s=10)
    assert [record.outcome for record in result.run.records] == ["ok"] * 6
    assert len({body["messages"][0]["content"] for body in fake.bodies}) == 1
    assert len({body["messages"][1]["content"] for body in fake.bodies}) == 6
    assert {record.prompt_tokens for record in result.run.records} == {30}


async def test_the_same_seed_gives_the_same_prompts(fake: Any, client: Client) -> None:
    shape = Shape(rate=200.0, requests=5, prompt_tokens=10, output_tokens=1)
    for _ in range(2):
        await run_shape(client.send, shape, Sizes(0, 3), random.Random(9), max_s=10)
    prompts = [body["messages"][0]["content"] for body in fake.bodies]
    assert sorted(prompts[:5]) == sorted(prompts[5:])


async def test_long_prompts_arrive_beside_the_streams(
    fake: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagerelay.bench.workloads.INTERFERING_FIRST_S", 0.05)
    shape = Shape(clients=2, requests=2, prompt_tokens=20, output_tokens=100, interfere_every_s=0.1)
    fake.gap_s = 0.005
    sizes = await measure_sizes(client.send, shape)
    assert sizes == (0, 13, 1017)
    result = await run_shape(client.send, shape, sizes, random.Random(1), max_s=10)
    assert len(result.run.records) == 2
    assert len(result.interfering) >= 2
    assert {record.prompt_tokens for record in result.interfering} == {1024}
    assert result.unanswered <= 1
    fake.mode = "hang"
    result = await run_shape(client.send, shape, sizes, random.Random(1), max_s=0.5)
    assert [record.outcome for record in result.run.records] == ["cut", "cut"]
    assert (result.interfering, result.unanswered > 1) == ([], True)


def test_the_named_workloads() -> None:
    assert list(WORKLOADS) == ["W1", "W2", "W3", "W4b", "W4l", "W4", "B16", "B1"]
    alone, light, hard = (WORKLOADS[name] for name in ("W4b", "W4l", "W4"))
    assert (
        (alone.prompt_tokens, alone.output_tokens) == (light.prompt_tokens, hard.output_tokens) == (32, 128)
    )
    assert (light.interfere_every_s, hard.interfere_every_s) == (10.0, 2.0)
