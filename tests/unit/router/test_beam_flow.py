"""A beam search as the router sees it: that it goes on counts, and what it has found at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engines import greedy
from flows import Driven, House

from pagerelay.common.errors import InvalidRequest, WorkerLost
from pagerelay.common.wire.codec import MAX_NEWS_BYTES, encode
from pagerelay.common.wire.messages import Beams, DecodeJob, Hypothesis, PrefillJob, Probe, SamplingParams
from pagerelay.common.wire.sampling import MAX_BEAM_TOKENS, MAX_BEAMS
from pagerelay.router.beam_flow import BeamFlow

PROMPT = [5, 6, 7]
FOUND = [
    Hypothesis(token_ids=[9, 0], score=-0.5, finish_reason="stop"),
    Hypothesis(token_ids=[8, 8, 8], score=-0.75, finish_reason="length"),
]


def search(house: House, max_tokens: int = 8, **settings: Any) -> Driven:
    return house.flow(PROMPT, greedy(max_tokens, beam_width=2), **settings)


def told(driven: Driven, num_tokens: int, found: list[Hypothesis] | None = None, attempt: int = 0) -> None:
    news = Beams(
        request_id="r", attempt=attempt or driven.flow.attempt, num_tokens=num_tokens, hypotheses=found
    )
    driven.news(news)


async def begin(driven: Driven) -> asyncio.Task[list[Hypothesis]]:
    assert isinstance(driven.flow, BeamFlow)
    await driven.flow.start()
    return asyncio.create_task(driven.flow.hypotheses())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_one_hand_over_and_all_answers_at_the_end(max_tokens: int) -> None:
    house = House("p1", "d1")
    driven = search(house, max_tokens)
    finding = await begin(driven)
    driven.started()
    driven.first(0, 9)
    driven.handed_over(0, 9)
    for step in (1, 2):
        told(driven, step)
    told(driven, 3, FOUND)
    assert await finding == FOUND
    assert [type(message) for _, message in house.take_sent()] == [PrefillJob, DecodeJob]
    await driven.flow.close()
    assert house.take_sent() == []  # those who had it know that it is over
    assert not any(entry.bound for entry in house.registry.entries())


async def test_a_lost_search_begins_anew_with_the_prompt_alone() -> None:
    house = House("p1", "d1", "d2")
    driven = search(house)
    finding = await begin(driven)
    driven.started()
    driven.first(0, 9)
    driven.handed_over(0, 9)
    told(driven, 5)
    await settle()
    house.take_sent()
    house.lose("d1" if driven.flow._place.decodes_on("d1") else "d2")
    await settle()
    [(_, job)] = [sent for sent in house.take_sent() if isinstance(sent[1], PrefillJob)]
    assert (job.token_ids, job.first_index, job.attempt) == (PROMPT, 0, 2)
    driven.started()
    told(driven, 9, FOUND[:1], attempt=1)  # of the lost one: late
    driven.handed_over(0, 9)
    told(driven, 1)
    await settle()
    assert not finding.done()
    told(driven, 2, FOUND)
    assert await finding == FOUND
    await driven.flow.close()


async def test_only_steps_count_as_progress() -> None:
    """A worker that says the same again and again is stuck."""
    house = House("d1")
    driven = search(house, stall_timeout_s=0.05, probe_s=0.01, max_recoveries=0)
    finding = await begin(driven)
    told(driven, 1)  # its HandedOver was lost
    while not finding.done():
        told(driven, 1)
        await asyncio.sleep(0.005)
    with pytest.raises(WorkerLost, match="silent"):
        await finding
    assert any(isinstance(message, Probe) for _, message in house.take_sent())
    await driven.flow.close()


async def test_the_last_word_is_asked_for_where_it_was_lost() -> None:
    house = House("d1")
    driven = search(house, probe_s=0.01, max_recoveries=0)
    finding = await begin(driven)
    driven.handed_over(0, 9)
    told(driven, 2)
    probes: list[Any] = []
    async with asyncio.timeout(5):
        while not probes:
            await asyncio.sleep(0.005)
            probes = [message for _, message in house.take_sent() if isinstance(message, Probe)]
    told(driven, 3, FOUND)
    assert await finding == FOUND
    assert driven.flow.recoveries == 0
    await driven.flow.close()


async def test_what_does_not_fit_is_the_clients_to_change() -> None:
    house = House("d1")
    driven = search(house)
    finding = await begin(driven)
    driven.failed("too_wide", retryable=False)
    with pytest.raises(InvalidRequest, match="it is too_wide; ask for fewer beams or a smaller max_tokens"):
        await finding
    await driven.flow.close()


async def test_a_search_is_not_asked_to_move() -> None:
    house = House("p1", "d1", "d2")
    driven = search(house)
    finding = await begin(driven)
    driven.started()
    driven.handed_over(0, 9)
    await settle()
    house.take_sent()
    for worker_id in ("d1", "d2"):
        driven.flow.leave_decoder(worker_id)
    await settle()
    assert house.take_sent() == []
    finding.cancel()
    await driven.flow.close()


def test_the_longest_answers_fit_a_frame() -> None:
    share = MAX_BEAM_TOKENS // MAX_BEAMS
    one = Hypothesis(token_ids=[2**31 - 1] * share, score=-1.5, finish_reason="length")
    news = Beams(request_id="r" * 64, attempt=1, num_tokens=share, hypotheses=[one] * MAX_BEAMS)
    assert len(encode(news)) < MAX_NEWS_BYTES
    assert SamplingParams(max_tokens=1).beam_width == 0
