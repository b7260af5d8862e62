from __future__ import annotations

import json
import time
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagerelay.common.errors import InvalidRequest
from pagerelay.router import json_body
from pagerelay.router.json_body import MAX_CONTAINERS, MAX_DEPTH, _brackets, _deeper_than, decode_body
from pagerelay.router.schemas import CompletionRequest

DECODER = msgspec.json.Decoder(CompletionRequest)


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode_body(body, DECODER)
    error = caught.value
    assert error.status == 400
    assert "Error" not in error.message
    assert "msgspec" not in error.message
    json.loads(msgspec.json.encode(error.body()))
    return error


@pytest.mark.parametrize(
    "body", [b"", b"  \n", b"[]", b"5", b"null", b'"x"', b"{", b"{}x", b'{"a":1,}', b"\xef\xbb\xbf{}"]
)
def test_no_object(body: bytes) -> None:
    assert refusal(body).param is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"\xff"}',
        b'{"unknown":"\xff"}',
        b'{"prompt":"\xed\xa0\xbd"}',
        '{"prompt":"a"}'.encode("utf-16"),
        b"\xff",
    ],
)
def test_no_utf8(body: bytes) -> None:
    assert "UTF-8" in refusal(body).message


@pytest.mark.parametrize("field", ["prompt", "model", "user", "stop", "unknown"])
@pytest.mark.parametrize("escape", [r"\ud83d", r"\ude00", r"\ud83dx", r"\ud83d\n", r"\ude00\ud83d"])
def test_half_a_surrogate_pair(field: str, escape: str) -> None:
    assert "surrogate" in refusal(b'{"%b":"%b"}' % (field.encode(), escape.encode())).message


def test_a_whole_pair_is_a_character() -> None:
    assert decode_body(rb'{"prompt":"\ud83d\ude00"}', DECODER).prompt == "😀"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', "true", "[]"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_no_number(field: str, value: str) -> None:
    assert refusal(f'{{"prompt":"x","{field}": {value}}}'.encode()).param == field


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-1", "max_tokens must be at least 0"),
        ("99999999999999999999", "max_tokens must be at most 2147483647"),
        ('"5"', "max_tokens must be an integer, not a string"),
        ("5.0", "max_tokens must be an integer, not a number with fraction or exponent"),
        ("5.5", "max_tokens must be an integer, not a number with fraction or exponent"),
        ("1e2", "max_tokens must be an integer, not a number with fraction or exponent"),
        ("true", "max_tokens must be an integer, not true or false"),
    ],
)
def test_words(value: str, words: str) -> None:
    error = refusal(f'{{"max_tokens":{value}}}'.encode())
    assert (error.message, error.param) == (words, "max_tokens")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"stop":""}', "stop"),
        ('{"stop":["a",""]}', "stop[1]"),
        ('{"stop":[' + ",".join(['"a"'] * 17) + "]}", "stop"),
        ('{"stop":"' + "a" * 1025 + '"}', "stop"),
        ('{"stop":[1]}', "stop[0]"),
        ('{"stop_token_ids":[-1]}', "stop_token_ids[0]"),
        ('{"prompt":[[1,-5]]}', "prompt[0][1]"),
        ('{"prompt":[1.0]}', "prompt[0]"),
        ('{"prompt":[true]}', "prompt[0]"),
        ('{"prompt":{}}', "prompt"),
        ('{"stream":1}', "stream"),
        ('{"stream_options":{"include_usage":"yes"}}', "stream_options.include_usage"),
        ('{"seed":9223372036854775808}', "seed"),
        ('{"seed":-9223372036854775809}', "seed"),
        ('{"top_p":0}', "top_p"),
        ('{"top_p":1.1}', "top_p"),
        ('{"top_k":-2}', "top_k"),
        ('{"temperature":-0.5}', "temperature"),
        ('{"temperature":101}', "temperature"),
        ('{"n":0}', "n"),
    ],
)
def test_names_the_field(body: str, param: str) -> None:
    assert refusal(body.encode()).param == param


def test_doubled_keys_last_wins() -> None:
    assert decode_body(b'{"max_tokens":1,"max_tokens":7}', DECODER).max_tokens == 7


# ------------------------------------------------------------------------------------------------ depth


def nested(depth: int, mix: bool = False) -> bytes:
    """An object with ``depth`` levels, its own included."""
    inner = b"1"
    for level in range(depth - 1):
        inner = b'{"a":%b}' % inner if mix and level % 2 else b"[%b]" % inner
    return b'{"unknown":%b}' % inner


@pytest.mark.parametrize("mix", [False, True])
def test_depth_limit_is_exact(mix: bool) -> None:
    decode_body(nested(MAX_DEPTH, mix), DECODER)
    assert "nested deeper" in refusal(nested(MAX_DEPTH + 1, mix)).message


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":' + b"[" * 20_000,
        b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"tools":[{"function":{"parameters":' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}}]}",
        b'{"metadata":' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}",
        b'{"messages":[{"role":"user","content":' + b"[" * 1000 + b"]" * 1000 + b"}]}",
        b"[" * 3_000_000,
        b'{"x":"\\"' + b"[" * 100 + b'","y":' + b"[" * 100,
    ],
)
def test_too_deep(body: bytes) -> None:
    began = time.thread_time()
    assert "nested deeper" in refusal(body).message
    assert time.thread_time() - began < 1


def test_brackets_in_strings_are_no_depth() -> None:
    text = "[[" * 200 + '"\\' + "{{" * 200 + "\\\\"
    assert decode_body(json.dumps({"prompt": text}).encode(), DECODER).prompt == text


def test_wide_is_not_deep() -> None:
    decode_body(b'{"prompt":[' + b",".join([b"[1]"] * 10_000) + b"]}", DECODER)


def depth_of(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(depth_of, children), default=0)


TREES = st.recursive(
    st.text('ab"\\[]{}', max_size=4) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\[', max_size=2), inner, max_size=3)
    ),
    max_leaves=20,
)


def test_number_of_lists_is_bounded() -> None:
    """Each costs many times its two bytes of body."""
    wide = b'{"unknown":[' + b"{}," * (MAX_CONTAINERS - 2)
    decode_body(wide + b"1]}", DECODER)
    assert "more than 100000 lists" in refusal(wide + b"{},1]}").message


@given(TREES, st.integers(0, 6), st.integers(1, 9))
def test_depth_of_any_json(value: Any, limit: int, piece: int) -> None:
    with patch.object(json_body, "_PIECE", piece):
        assert _deeper_than(_brackets(json.dumps(value).encode()), limit) == (depth_of(value) > limit)


@pytest.mark.parametrize("unit", [b'\\"', b'"\\', b'"[', b'[]"', b"[", b"]", b"{}[", b'"a",'])
def test_hostile_bytes_cost_linear_time(unit: bytes) -> None:
    body = b'{"x":"' + unit * (4_000_000 // len(unit))
    began = time.thread_time()
    refusal(body)
    assert time.thread_time() - began < 2
