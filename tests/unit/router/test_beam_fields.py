"""What requests say of beam search: both dialects, and what cannot be had beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.validate import Kind, Limits, ParsedRequest, finalize, parse_request

LIMITS = Limits(served_name="smol", vocab_size=1000, context_len=200_000, max_choices=16)
KINDS: tuple[Kind, ...] = ("generate", "completions", "chat")


def parse(kind: Kind = "generate", **fields: Any) -> ParsedRequest:
    body = {"messages": [{"role": "user", "content": "x"}]} if kind == "chat" else {"prompt": "x"}
    return parse_request(kind, json.dumps({"model": "smol", **body, **fields}).encode(), LIMITS)


def refused(kind: Kind = "generate", **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, **fields)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "width", "n"),
    [
        ({"num_beams": 4}, 4, 1),
        ({"num_beams": 4, "n": 3}, 4, 3),
        ({"use_beam_search": True, "n": 2}, 2, 2),
        ({"use_beam_search": True, "best_of": 5, "n": 2}, 5, 2),
        ({"use_beam_search": True, "num_beams": 3}, 3, 1),
        ({"num_beams": 3, "best_of": 3}, 3, 1),
        ({"num_beams": 1}, 0, 1),
        ({"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}, 0, 1),
    ],
)
def test_width(kind: Kind, fields: dict[str, Any], width: int, n: int) -> None:
    parsed = parse(kind, **fields)
    assert (parsed.beam_width, parsed.n, parsed.num_choices) == (width, n, 1)
    assert finalize(parsed, 5, 100, 0).beam_width == width


def test_sampling_is_that_of_the_search() -> None:
    parsed = parse(num_beams=2, length_penalty=0.5, early_stopping="never", max_tokens=150_000)
    sampling = finalize(parsed, 5, LIMITS.context_len, 0)
    assert (sampling.temperature, sampling.length_penalty, sampling.early_stopping) == (0.0, 0.5, "never")
    assert sampling.max_tokens == 75_000  # what fits one message with the other beam's


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True}, "n"),
        ({"use_beam_search": True, "n": 2, "best_of": 1}, "best_of"),
        ({"num_beams": 65}, "num_beams"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "n": 3}, "n"),
        ({"num_beams": 2, "best_of": 3}, "best_of"),
        ({"num_beams": 17}, "n"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"num_beams": 2, "length_penalty": 11}, "length_penalty"),
        ({"num_beams": 2, "stream": True}, "stream"),
        ({"num_beams": 2, "temperature": 0.7}, "temperature"),
        ({"num_beams": 2, "presence_penalty": 0.5}, "presence_penalty"),
        ({"num_beams": 2, "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"num_beams": 2, "stop": ["x"]}, "stop"),
        ({"num_beams": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_refused(kind: Kind, fields: dict[str, Any], param: str) -> None:
    assert refused(kind, **fields).param == param


def test_refused_where_there_is_such_a_field() -> None:
    assert refused(num_beams=2, logprobs=0).param == "logprobs"
    assert refused("chat", num_beams=2, logprobs=True).param == "logprobs"
    assert refused("completions", num_beams=2, echo=True).param == "echo"


def test_neutral_values_do_no_harm() -> None:
    neutral = {"temperature": 0, "stop": [], "stream": False, "presence_penalty": 0, "logprobs": False}
    assert parse(num_beams=2, **neutral) == parse(num_beams=2, temperature=0)
