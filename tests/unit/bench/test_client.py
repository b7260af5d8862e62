from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagerelay.bench.client import Client, Target, is_loopback, open_session, served_model


async def test_a_good_stream(fake: Any, client: Client) -> None:
    record = await client.send("be brief", "one two three", 5)
    assert (record.outcome, record.error) == ("ok", None)
    assert (record.tokens, record.prompt_tokens, len(record.stamps)) == (5, 12, 5)
    assert record.text == " ä" * 5
    assert record.ttft_s is not None
    assert record.tpot_s is not None
    assert 0 < record.ttft_s <= record.e2e_s
    assert len(record.gaps_s) == 4
    assert min(record.gaps_s) >= 0
    body = fake.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert (body["temperature"], body["stream"], body["ignore_eos"]) == (0, True, True)


async def test_the_completions_api_and_dropped_fields(fake: Any) -> None:
    target = Target(fake.url, "m", "completions", {"ignore_eos": None, "stream_options": None, "top_k": 3})
    async with open_session() as session:
        record = await Client(target, session, 10).send("a b", "c", 4)
    assert record.outcome == "ok"
    assert (record.tokens, record.prompt_tokens) == (4, None)  # no usage was asked for: chunks are counted
    assert fake.bodies[0]["prompt"] == "a b c"
    assert "ignore_eos" not in fake.bodies[0]
    assert fake.bodies[0]["top_k"] == 3


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("500", "HTTP 500"),
        ("redirect", "HTTP 307"),
        ("error", "the worker was lost"),
        ("broken", "broke off"),
        ("empty", "no content"),
    ],
)
async def test_what_fails_says_why(fake: Any, client: Client, mode: str, error: str) -> None:
    fake.mode = mode
    record = await client.send("", "x", 3)
    assert record.outcome == "failed"
    assert record.error is not None
    assert error in record.error


async def test_nobody_there() -> None:
    async with open_session() as session:
        record = await Client(Target("http://127.0.0.1:1/v1", "m"), session, 5).send("", "x", 1)
    assert record.outcome == "failed"
    assert record.error is not None
    assert "ClientConnector" in record.error


async def test_the_deadline_cuts_and_keeps_what_came(fake: Any, client: Client) -> None:
    fake.mode = "hang"
    now = asyncio.get_running_loop().time()
    record = await client.send("", "x", 9, deadline=now + 0.3)
    assert (record.outcome, record.tokens, len(record.stamps)) == ("cut", 2, 2)
    await asyncio.sleep(0.1)
    assert record.e2e_s < 2


async def test_the_time_limit_of_a_request_is_a_failure(fake: Any) -> None:
    fake.mode = "hang"
    async with open_session() as session:
        record = await Client(Target(fake.url, "m"), session, 0.3).send("", "x", 9)
    assert (record.outcome, record.error) == ("failed", "no end after 0.3 s")


async def test_the_model_is_what_the_server_lists(fake: Any) -> None:
    async with open_session() as session:
        assert await served_model(session, fake.url) == "fake-model"
        with pytest.raises(ValueError, match="is the server up"):
            await served_model(session, "http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.8.9.1", True),
        ("http://localhost:1", True),
        ("http://[::1]:8000/v1", True),
        ("http://127.0.0.1.example.com/v1", False),
        ("http://localhost.example.com", False),
        ("http://10.0.0.1", False),
        ("http://127.0.0.1@example.com/", False),
        ("http:///v1", False),
    ],
)
def test_loopback(url: str, loopback: bool) -> None:
    assert is_loopback(url) is loopback
