"""One request in the words of four servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.validate import Limits, ParsedRequest, parse_request

LIMITS = Limits(served_name="smol", vocab_size=100, context_len=50, max_choices=8)


def parse(**body: Any) -> ParsedRequest:
    return parse_request("generate", json.dumps(body).encode(), LIMITS)


OURS = parse(
    prompt="a",
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    stop=["x"],
    seed=3,
    logprobs=2,
)


def test_vllm() -> None:
    asked = parse(prompt=["a", "b"], max_tokens=7, use_beam_search=False, n=2, best_of=2)
    assert (asked.prompts, asked.max_tokens, asked.n) == (["a", "b"], 7, 2)


def test_sglang() -> None:
    params = {"max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5}
    params |= {"stop": ["x"], "sampling_seed": 3}
    assert parse(text="a", sampling_params=params, return_logprob=True, top_logprobs_num=2) == OURS
    assert parse(input_ids=[[1], [2]]).prompts == [[1], [2]]
    assert parse(text=["a", "b"]).prompts == ["a", "b"]
    assert parse(text="a", sampling_params={"no_stop_trim": True}).include_stop_str_in_output
    assert parse(text="a", return_logprob=True).logprobs == 0
    assert parse(text="a", return_logprob=False, logprob_start_len=-1).logprobs is None


def test_tgi() -> None:
    params = {"max_new_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5}
    params |= {"stop": ["x"], "seed": 3, "top_n_tokens": 2, "details": True, "do_sample": True}
    assert parse(inputs="a", parameters=params) == OURS
    assert parse(inputs="a", parameters={"do_sample": False}).temperature == 0
    assert parse(inputs="a", parameters={"truncate": 5}).truncate_prompt_tokens == 5
    assert parse(inputs="a", parameters={"decoder_input_details": True}).prompt_logprobs == 0
    neutral = {"watermark": False, "typical_p": 1, "return_full_text": False, "adapter_id": None}
    assert parse(inputs="a", parameters=neutral) == parse(prompt="a")


def test_the_same_twice_is_no_contradiction() -> None:
    asked = parse(prompt="a", max_tokens=7, sampling_params={"max_new_tokens": 7, "max_tokens": 7})
    assert asked.max_tokens == 7


@pytest.mark.parametrize(
    ("grammar", "ours"),
    [
        ({"type": "regex", "value": "a+"}, {"guided_regex": "a+"}),
        ({"type": "json", "value": {"type": "null"}}, {"guided_json": {"type": "null"}}),
        (
            {"type": "json_schema", "value": {"name": "x", "schema": {"type": "null"}}},
            {"guided_json": {"type": "null"}},
        ),
    ],
    ids=str,
)
def test_grammars_of_tgi(grammar: dict[str, Any], ours: dict[str, Any]) -> None:
    assert parse(inputs="a", parameters={"grammar": grammar}) == parse(prompt="a", **ours)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "text": "a"}, "text"),
        ({"prompt": "a", "inputs": "b"}, "inputs"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        (
            {"prompt": "a", "max_tokens": 5, "sampling_params": {"max_new_tokens": 6}},
            "sampling_params.max_new_tokens",
        ),
        ({"inputs": "a", "parameters": {"do_sample": False, "temperature": 1}}, "parameters.do_sample"),
        ({"inputs": "a", "parameters": {"watermark": True}}, "parameters.watermark"),
        ({"inputs": "a", "parameters": {"grammar": "a"}}, "parameters.grammar"),
        (
            {"inputs": "a", "parameters": {"grammar": {"type": "bnf", "value": "a"}}},
            "parameters.grammar.type",
        ),
        (
            {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": {}}}},
            "parameters.grammar.value",
        ),
        (
            {
                "inputs": "a",
                "guided_regex": "b",
                "parameters": {"grammar": {"type": "regex", "value": "a"}},
            },
            "parameters.grammar",
        ),
        ({"inputs": "a", "parameters": {"best_of": 2, "max_new_tokens": 0}}, "parameters.max_new_tokens"),
        ({"inputs": ["a"]}, "inputs"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "image_data": "http://somewhere"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_hidden_states": 0}, "return_hidden_states"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input_ids": [100]}, "prompt[0]"),
        ({"sampling_params": {}}, "prompt"),
    ],
    ids=str,
)
def test_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**body)
    assert refused.value.param == param
