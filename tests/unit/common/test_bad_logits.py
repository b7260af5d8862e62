"""Logits that hold NaN or infinity fail the one request that they are of, and nobody beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from engines import (
    FakeRunner,
    answer,
    assert_idle,
    copied_token,
    decode_engine,
    decode_job,
    greedy,
    prefill_engine,
    prefill_job,
    run_dry,
    sent_to_peer,
    sent_to_router,
)
from late import LateDevice, LateRunner

from pagerelay.common.engine.core import EngineCore
from pagerelay.common.engine.drafting import Speculation
from pagerelay.common.model.device_sampler import DeviceSampler
from pagerelay.common.model.logits import unsound
from pagerelay.common.model.sampler import BAD, SampleRequest, sample
from pagerelay.common.wire.messages import (
    Beams,
    Failed,
    Fetch,
    FirstToken,
    HandedOver,
    LeaseLost,
    SamplingParams,
    Tokens,
)

PROMPT = list(range(1, 11))
SICK = [31, 30, 29]
"""What begins like this is answered by something that is no number."""
VALUES = [math.nan, math.inf]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 1.0, "logit_bias": ((3, -100.0),), "allowed_token_ids": (1, 2), "bad_words": ((2,),)},
]


class Choosing:
    """Operations that choose the likeliest, whatever the logits are."""

    name = "choosing"

    def choose(self, logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


@pytest.mark.parametrize("wishes", WISHES)
@pytest.mark.parametrize("make", [lambda: sample, lambda: DeviceSampler(Choosing())], ids=["cpu", "device"])
def test_a_row_that_is_no_numbers_gets_no_token(make: Any, wishes: dict[str, Any]) -> None:
    rows = 3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    asked = [SampleRequest(SamplingParams(max_tokens=8, seed=row, **wishes), 2) for row in range(6)]
    expected = make()(rows.clone(), asked)
    rows[1, 7], rows[2, 3] = math.nan, math.inf
    rows[4] = -math.inf
    got = make()(rows, asked)
    assert [got[row] for row in (1, 2, 4)] == [BAD] * 3
    assert [got[row] for row in (0, 3, 5)] == [expected[row] for row in (0, 3, 5)]


def test_what_may_not_come_is_not_taken_for_it() -> None:
    """A token that the model itself rules out, and a request that rules out everything."""
    rows = torch.zeros(2, 6)
    rows[0, 1] = -math.inf
    assert unsound(rows).tolist() == [False, False]
    everything = tuple((token,) for token in range(6))
    allowed = np.asarray([0b110], dtype=np.int32)
    for wishes in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}):
        params = SamplingParams(max_tokens=8, bad_words=everything, **wishes)
        for request in (SampleRequest(params, 0), SampleRequest(params, 0, mask=allowed)):
            assert BAD not in sample(rows.clone(), [request, request])


def sick_from(count: int, value: float = math.nan) -> Any:
    """Of the sick one's contexts, those with so many tokens or more."""
    return lambda tokens: value if tokens[:3] == SICK and len(tokens) >= count else None


def told(messages: list[Any]) -> dict[str, list[int]]:
    """The tokens of each request."""
    found: dict[str, dict[int, int]] = {}
    for message in messages:
        deltas = message.deltas if isinstance(message, Tokens) else []
        deltas = [message.first] if isinstance(message, HandedOver) else deltas
        for delta in deltas:
            found.setdefault(delta.request_id, {})[delta.index] = delta.token
    return {request_id: [tokens[at] for at in sorted(tokens)] for request_id, tokens in found.items()}


def assert_failed_alone(engine: EngineCore, messages: list[Any]) -> None:
    (failed,) = (message for message in messages if isinstance(message, Failed))
    assert (failed.request_id, failed.code, failed.retryable) == ("sick", "bad_logits", False)
    assert "NaN or infinity" in failed.message
    assert_idle(engine)
    assert engine.blocks.cache is not None


SCORED = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=2)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("sampling", "ill_from", "said"),
    [
        pytest.param(greedy(6), 3, 0, id="first"),
        pytest.param(greedy(6), 6, 3, id="later"),
        pytest.param(greedy(6, logprobs=3), 6, 3, id="logprobs"),
        pytest.param(SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9), 4, 1, id="drawn"),
        pytest.param(greedy(6, beam_width=3), 3, 0, id="beams-first"),
        pytest.param(greedy(6, beam_width=3), 5, 1, id="beams-later"),
        pytest.param(SCORED, 2, 0, id="scored"),
    ],
)
def test_it_fails_its_own_request_on_d(
    sampling: SamplingParams, ill_from: int, said: int, value: float
) -> None:
    engine = decode_engine(64)
    runner = engine._launcher._runner
    assert isinstance(runner, FakeRunner)
    prompt = [*SICK, 5, 6] if sampling is SCORED else SICK
    if sampling is SCORED:
        runner.sick = lambda tokens: value if tokens == SICK[:2] else None
    else:
        runner.sick = sick_from(ill_from, value)
    engine.submit("router", decode_job("well", PROMPT, greedy(8)), 0.0)
    engine.submit("router", decode_job("sick", prompt, sampling, order=2), 0.0)
    engine.submit("router", decode_job("beams", PROMPT[:5], greedy(8, beam_width=2), order=3), 0.0)
    messages = [message for _, message in run_dry(engine).to_router]
    assert_failed_alone(engine, messages)
    tokens = told(messages)
    assert tokens["well"] == answer(PROMPT, 8)
    assert len(tokens.get("sick", [])) == said
    found = [m for m in messages if isinstance(m, Beams) and m.request_id == "beams" and m.hypotheses]
    assert len(found) == 1


def test_it_is_counted_and_its_kv_is_given_to_nobody() -> None:
    engine = decode_engine(64)
    runner = engine._launcher._runner
    assert isinstance(runner, FakeRunner)
    runner.sick = sick_from(9)
    engine.submit("router", decode_job("sick", [*SICK, *PROMPT[:5]], greedy(6)), 0.0)
    counted = 0
    while engine.step():
        counted += engine.stats.bad_logits
    assert counted == 1
    assert told(sent_to_router(engine))["sick"] == answer([*SICK, *PROMPT[:5]], 1)
    assert engine.counts().cached == 0


def test_it_fails_its_own_request_on_p_and_d_hears_that_it_ended() -> None:
    engine = prefill_engine(64)
    runner = engine._launcher._runner
    assert isinstance(runner, FakeRunner)
    runner.sick = sick_from(3)
    engine.submit("router", prefill_job("sick", [*SICK, *range(20)], greedy(6)), 0.0)
    engine.submit("router", prefill_job("well", PROMPT, greedy(6), order=2), 0.0)
    runner.during = lambda: engine.fetch(
        b"d",
        Fetch(
            lease=1,
            incarnation=engine.leases[1].handle.incarnation,
            from_block=0,
            layout=engine.leases[1].handle.layout,
            ticket=engine.leases[1].handle.ticket,
        ),
        0.0,
    )
    sent = run_dry(engine)
    messages = [message for _, message in sent.to_router]
    (failed,) = (message for message in messages if isinstance(message, Failed))
    assert (failed.request_id, failed.code, failed.retryable) == ("sick", "bad_logits", False)
    assert [m.delta.token for m in messages if isinstance(m, FirstToken)] == answer(PROMPT, 1)
    assert [m.ended for _, m in sent.to_peer if isinstance(m, LeaseLost)] == [True]
    engine.abort("well", 1)
    assert sent_to_peer(engine) == []
    assert_idle(engine)


@pytest.mark.parametrize("wrong_guess", [False, True])
def test_after_guesses_it_counts_only_where_the_answer_comes_to_it(wrong_guess: bool) -> None:
    """A guess that is wrong may lead to anything."""
    prompt = [*SICK, *PROMPT, *SICK, *PROMPT]
    right = answer(prompt, 12, copied_token)

    def sick(tokens: list[int]) -> float | None:
        on_the_way = tokens == (prompt + right)[: len(tokens)]
        return math.nan if len(tokens) > len(prompt) + 4 and on_the_way != wrong_guess else None

    engine = decode_engine(64, runner=FakeRunner(copied_token), speculation=Speculation(4, 2, 4))
    runner = engine._launcher._runner
    assert isinstance(runner, FakeRunner)
    runner.sick = sick
    engine.submit("router", decode_job("sick", prompt, greedy(12)), 0.0)
    messages = [message for _, message in run_dry(engine).to_router]
    if wrong_guess:
        assert told(messages)["sick"] == right
        assert_idle(engine)
    else:
        assert told(messages)["sick"] == right[:5]
        assert_failed_alone(engine, messages)


@pytest.mark.parametrize("value", VALUES)
def test_with_the_next_step_begun_already(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice().use(monkeypatch)
    engine = decode_engine(64, runner=LateRunner(device), step_ahead=True)
    runner = engine._launcher._runner
    assert isinstance(runner, LateRunner)
    runner.sick = sick_from(6, value)
    engine.submit("router", decode_job("well", PROMPT, greedy(8)), 0.0)
    engine.submit("router", decode_job("sick", SICK, greedy(8), order=2), 0.0)
    messages = [message for _, message in run_dry(engine).to_router]
    assert_failed_alone(engine, messages)
    assert told(messages) == {"well": answer(PROMPT, 8), "sick": answer(SICK, 3)}
    assert "step 2" in device.log
