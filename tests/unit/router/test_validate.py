from __future__ import annotations

import gc
import json
import logging
import time
from typing import Any

import pytest

from pagerelay.common.errors import ContextLengthExceeded, InvalidRequest, NotFound
from pagerelay.common.wire.messages import SamplingParams
from pagerelay.router.schemas import NOT_YET, ChatRequest, CompletionRequest, GenerateRequest
from pagerelay.router.validate import Kind, Limits, ParsedRequest, check_prompts, finalize, parse_request

LIMITS = Limits(served_name="smol", vocab_size=1000, context_len=8192, max_choices=128)
KINDS: tuple[Kind, ...] = ("generate", "completions", "chat")
STRUCTS = {"generate": GenerateRequest, "completions": CompletionRequest, "chat": ChatRequest}
HI = [{"role": "user", "content": "hi"}]


def parse(kind: Kind, **fields: Any) -> ParsedRequest:
    base: dict[str, Any] = {"model": "smol", **({"messages": HI} if kind == "chat" else {"prompt": "hi"})}
    return parse_request(kind, json.dumps(base | fields).encode(), LIMITS)


def refuse(kind: Kind, **fields: Any) -> InvalidRequest:
    gc.disable()  # a collection of all that the test run has in memory takes longer than what is timed here
    began = time.thread_time()  # our own time, whatever else the machine does
    try:
        with pytest.raises(InvalidRequest) as caught:
            parse(kind, **fields)
        assert time.thread_time() - began < 0.5
    finally:
        gc.enable()
    assert "Error" not in caught.value.message
    return caught.value


# ------------------------------------------------------------------------------------------------ model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "model", ["other", "", "SMOL", "smol ", "../../etc/passwd", "smol\0", "x" * 10_000_000]
)
def test_another_model(kind: Kind, model: str) -> None:
    with pytest.raises(NotFound) as caught:
        parse(kind, model=model)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert len(caught.value.message) < 200
    assert "\0" not in caught.value.message


def test_no_model() -> None:
    assert parse("generate", model=None).model == "smol"
    for kind in ("completions", "chat"):
        assert refuse(kind, model=None).param == "model"


# ------------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("kind", ["generate", "completions"])
@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 999]], [[1], [2, 999]]),
        ("", [""]),
    ],
)
def test_prompts(kind: Kind, prompt: Any, prompts: list[Any]) -> None:
    parsed = parse(kind, prompt=prompt)
    assert parsed.prompts == prompts
    assert parsed.num_prompts == parsed.num_choices == len(prompts)


@pytest.mark.parametrize("kind", ["generate", "completions"])
@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        (["a", 1], "prompt"),
        (["a", [1]], "prompt"),
        ([1, [1]], "prompt"),
        ([1, 1000], "prompt[1]"),
        ([[1], [5, 2, 1000]], "prompt[1][2]"),
        ([-1], "prompt[0]"),
        (5, "prompt"),
    ],
)
def test_bad_prompts(kind: Kind, prompt: Any, param: str) -> None:
    assert refuse(kind, prompt=prompt).param == param


def test_absent_prompt_and_messages() -> None:
    for kind, field in (("generate", "prompt"), ("completions", "prompt"), ("chat", "messages")):
        with pytest.raises(InvalidRequest) as caught:
            parse_request(kind, b'{"model":"smol"}', LIMITS)
        assert caught.value.param == field


def test_prompts_without_tokens_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompts(parse("completions", prompt=["hi", ""]), [[1], []], 100)
    assert (caught.value.param, caught.value.code) == ("prompt[1]", "empty_prompt")
    with pytest.raises(InvalidRequest) as caught:
        check_prompts(parse("completions", prompt=""), [[]], 100)
    assert caught.value.param == "prompt"
    check_prompts(parse("completions", prompt=["a", "b"]), [[1], [2]], 100)


def test_too_long_prompts_are_named() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"100 tokens.*100") as caught:
        check_prompts(parse("completions", prompt=["a", "b"]), [[1], [1] * 100], 100)
    assert (caught.value.param, caught.value.code) == ("prompt[1]", "context_length_exceeded")
    with pytest.raises(ContextLengthExceeded) as caught:
        check_prompts(parse("chat"), [[1] * 300_000], 8192)
    assert caught.value.param == "messages"


# ------------------------------------------------------------------------------------------------ chat


def test_messages() -> None:
    parsed = parse(
        "chat",
        messages=[
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d", "name": "ignored"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
            {"role": "user", "content": "", "tool_calls": []},
        ],
    )
    assert [(m["role"], m["content"]) for m in parsed.messages] == [
        ("system", "s"),
        ("system", "d"),
        ("user", "a\nb"),
        ("assistant", ""),
        ("user", ""),
    ]
    assert all(set(message) == {"role", "content"} for message in parsed.messages)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        (
            [
                *HI,
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                },
            ],
            "messages[1].content[0].type",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        (HI * 5000, "messages"),
    ],
)
def test_bad_messages(messages: Any, param: str) -> None:
    assert refuse("chat", messages=messages).param == param


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(("kind", "expected"), [("generate", 128), ("completions", 16), ("chat", 8182)])
def test_default_max_tokens(kind: Kind, expected: int) -> None:
    for fields in ({}, {"max_tokens": None}):
        assert finalize(parse(kind, **fields), 10, 8192, 0).max_tokens == expected


def test_max_tokens_fits_the_context() -> None:
    parsed = parse("completions", max_tokens=65_535)
    assert finalize(parsed, 8000, 8192, 0).max_tokens == 192
    assert finalize(parsed, 8191, 8192, 0).max_tokens == 1
    for num_tokens in (8192, 8193, 300_000):
        with pytest.raises(ContextLengthExceeded, match=rf"8192 tokens.*has {num_tokens}"):
            finalize(parsed, num_tokens, 8192, 0)


def test_max_completion_tokens_wins() -> None:
    assert parse("chat", max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert parse("chat", max_tokens=5, max_completion_tokens=None).max_tokens == 5
    assert refuse("chat", max_completion_tokens=0).param == "max_completion_tokens"


def test_min_tokens() -> None:
    assert refuse("chat", min_tokens=20, max_tokens=10).param == "min_tokens"
    assert "the default" in refuse("completions", min_tokens=20).message
    assert finalize(parse("chat", min_tokens=20), 8190, 8192, 0).min_tokens == 2
    assert finalize(parse("chat", min_tokens=20, max_tokens=20), 5, 8192, 0).min_tokens == 20


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-6])
def test_greedy(temperature: float) -> None:
    parsed = parse("chat", temperature=temperature, seed=7, top_p=0.5, top_k=3, min_p=0.1)
    sampling = finalize(parsed, 5, 100, 0)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)


def test_sampling_is_passed_on() -> None:
    parsed = parse(
        "completions", temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=7, max_tokens=9, min_tokens=2,
        ignore_eos=True, stop_token_ids=[5, 6, 5], stop=["x", "x", "y"], include_stop_str_in_output=True,
        skip_special_tokens=False, stream=True, stream_options={"include_usage": True}, user="me",
    )  # fmt: skip
    assert finalize(parsed, 5, 100, 0) == SamplingParams(
        max_tokens=9, temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=7, choice=0, min_tokens=2,
        ignore_eos=True, stop_token_ids=(5, 6),
    )  # fmt: skip
    assert parsed.stop == ("x", "y")
    assert parsed.include_stop_str_in_output
    assert not parsed.skip_special_tokens
    assert parsed.stream
    assert parsed.include_usage
    assert parsed.user == "me"
    assert parse("chat", stop="one").stop == ("one",)


@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_top_k_off(top_k: int | None) -> None:
    assert parse("chat", top_k=top_k).top_k == 0


def test_seeds() -> None:
    given = parse("chat", seed=-1, n=4)
    assert [finalize(given, 5, 100, choice).choice for choice in range(4)] == [0, 1, 2, 3]
    assert {finalize(given, 5, 100, choice).seed for choice in range(4)} == {2**64 - 1}
    drawn = parse("chat", n=4)
    assert len({finalize(drawn, 5, 100, choice).seed for choice in range(4)}) == 4
    batch = parse("completions", prompt=["a", "b", "c"], n=2, seed=3)
    assert batch.num_choices == 6
    assert [finalize(batch, 5, 100, choice).choice for choice in range(6)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
def test_seeds_fit_the_wire(seed: int) -> None:
    assert 0 <= finalize(parse("chat", seed=seed), 5, 100, 0).seed < 2**64


# ------------------------------------------------------------------------------------------------ fan-out


def test_fan_out() -> None:
    assert refuse("chat", n=10**6).param == "n"
    assert refuse("chat", n=129).param == "n"
    assert refuse("completions", prompt=["a"] * 65, n=2).param == "n"
    assert refuse("completions", prompt=["a"] * 100_000).param == "prompt"
    assert parse("completions", prompt=["a"] * 64, n=2).num_choices == 128
    assert refuse("chat", stop=["x"] * 10_000).param == "stop"
    assert refuse("chat", stop="x" * 1_000_000).param == "stop"
    assert refuse("completions", logprobs=10**6).param == "logprobs"
    assert refuse("chat", logit_bias={str(at): 1 for at in range(49_152)}).param == "logit_bias"
    assert refuse("chat", logit_bias={"1": 1e308}).param == "logit_bias"
    assert refuse("chat", kv_transfer_params={"do_remote_decode": True}).param == "kv_transfer_params"
    assert refuse("chat", stop_token_ids=list(range(129))).param == "stop_token_ids"
    assert refuse("chat", stop_token_ids=[1, 1000]).param == "stop_token_ids[1]"


# ------------------------------------------------------------------------------------------------ unsupported


MEANT = {
    "echo": True,
    "top_logprobs": 2,
    "suffix": "x",
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{}],
    "function_call": "auto",
    "chat_template": "{{ 1 }}",
    "chat_template_kwargs": {"chat_template": "x"},
    "documents": [{}],
    "modalities": ["text", "audio"],
    "audio": {},
    "logits_processors": ["x"],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "prompt_embeds": "x",
    "web_search_options": {},
    "kv_transfer_params": {},
}


HONOURED = {
    ("completions", "echo"),
    ("chat", "top_logprobs"),
    ("chat", "add_generation_prompt"),
    ("chat", "continue_final_message"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", sorted(MEANT))
def test_refused_by_name(kind: Kind, field: str) -> None:
    if (kind, field) in HONOURED:
        return
    error = refuse(kind, **{field: MEANT[field]})
    assert (error.code, error.param) == ("unsupported_parameter", field)


def test_every_refused_field_is_tested() -> None:
    assert set(MEANT) == set(NOT_YET)


@pytest.mark.parametrize("kind", KINDS)
def test_neutral_values_are_accepted(kind: Kind) -> None:
    plain = parse(kind)
    for field, values in NOT_YET.items():
        for value in values:
            assert parse(kind, **{field: value}) == plain
    assert parse(kind, best_of=1) == plain
    assert parse(kind, add_special_tokens=kind != "chat") == plain


def test_special_tokens_truncation_and_ids() -> None:
    assert refuse("chat", add_special_tokens=True).param == "add_special_tokens"
    assert not parse("completions", add_special_tokens=False).add_special_tokens
    assert parse("chat", truncate_prompt_tokens=5).truncate_prompt_tokens == 5
    assert refuse("chat", truncate_prompt_tokens=-1).param == "truncate_prompt_tokens"
    assert parse("chat", return_token_ids=True).return_token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_all_null_is_all_absent(kind: Kind) -> None:
    names = set(STRUCTS[kind].__struct_fields__) - {"model", "prompt", "messages"}
    assert parse(kind, **dict.fromkeys(names)) == parse(kind)


@pytest.mark.parametrize("field", ["echo", "tools", "suffix"])
def test_zero_is_not_false(field: str) -> None:
    assert refuse("completions", **{field: 0}).param == field


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_at_all_are_refused_unless_the_prompt_is_the_answer(kind: Kind) -> None:
    assert refuse(kind, max_tokens=0).param == "max_tokens"
    if kind == "completions":
        assert refuse(kind, max_tokens=0, echo=False).param == "max_tokens"
        assert parse(kind, max_tokens=0, echo=True).max_tokens == 0


def test_logprobs_are_a_number_or_a_wish() -> None:
    for kind in ("generate", "completions"):
        assert [parse(kind, logprobs=n).logprobs for n in (None, False, 0, 20)] == [None, None, 0, 20]
        assert refuse(kind, logprobs=True).param == "logprobs"
        assert refuse(kind, logprobs=21).param == "logprobs"
    assert parse("chat", logprobs=True).logprobs == 0
    assert parse("chat", logprobs=True, top_logprobs=20).logprobs == 20
    assert refuse("chat", logprobs=5).param == "logprobs"
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        assert refuse("chat", **fields).param == "top_logprobs"
    for kind in KINDS:
        assert parse(kind, prompt_logprobs=3).scores_prompt == 3
        assert refuse(kind, prompt_logprobs=3, stream=True).param == "prompt_logprobs"
    assert parse("completions", echo=True, logprobs=2, stream=True).scores_prompt == 2
    assert parse("completions", echo=True).scores_prompt is None


def test_best_of() -> None:
    for kind in ("generate", "completions"):
        parsed = parse(kind, n=2, best_of=5)
        assert (parsed.n, parsed.num_choices) == (2, 5)
        assert finalize(parsed, 3, 100, 1).logprobs == 0
        assert refuse(kind, n=2, best_of=1).param == "best_of"
        assert refuse(kind, n=2, best_of=3, stream=True).param == "best_of"
        assert refuse(kind, best_of=129).param == "n"
    assert refuse("chat", best_of=2).code == "unsupported_parameter"


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_outside_the_vocabulary(field: str) -> None:
    value: Any = {"1000": 1.0} if field == "logit_bias" else [5, 1000]
    assert refuse("chat", **{field: value}).param.startswith(field)


def test_logit_bias_is_by_id() -> None:
    assert parse("chat", logit_bias={"7": -100, "3": 2.5}).logit_bias == ((3, 2.5), (7, -100.0))
    for bad in ({"x": 1}, {"-1": 1}, {"1": 101}, {"1": None}, [1]):
        assert refuse("chat", logit_bias=bad).param.startswith("logit_bias")


def test_stream_options() -> None:
    for fields in ({}, {"stream": False}, {"stream": None}):
        assert refuse("chat", stream_options={"include_usage": True}, **fields).param == "stream_options"
    for usage in (False, None):
        assert not parse("chat", stream=True, stream_options={"include_usage": usage}).include_usage
    assert not parse("chat", stream=True).include_usage


def test_unknown_fields_are_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    marker = "ZEBRA-7391"
    with caplog.at_level(logging.DEBUG, "pagerelay"):
        parse("chat", **{"zz\nz": marker, "metadata": {"a": marker}, "x" * 500: 1})
        parse("chat")
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert line.startswith("3 unknown fields ignored: 'metadata'")
    assert marker not in line
    assert "\n" not in line
    assert len(line) < 300
