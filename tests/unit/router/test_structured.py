"""What an answer must look like: one grammar, however it is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagerelay.common.errors import InvalidRequest
from pagerelay.common.wire.sampling import Grammar
from pagerelay.router.validate import Limits, finalize, parse_request

LIMITS = Limits(served_name="m", vocab_size=1000, context_len=100, max_choices=4)
SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
ANY_OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')


def grammar(**fields: Any) -> Grammar | None:
    for kind, body in (
        ("chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("completions", {"prompt": "x"}),
        ("generate", {"prompt": "x"}),
    ):
        parsed = parse_request(kind, json.dumps({"model": "m", **body, **fields}).encode(), LIMITS)
        assert finalize(parsed, 5, 100, 0).grammar == parsed.grammar
        assert bool(parsed.grammar_param) == (parsed.grammar is not None)
    return parsed.grammar


def refused(**fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(InvalidRequest) as info:
        grammar(**fields)
    return info.value.param, info.value.code


def of_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": False, "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"response_format": of_schema(SCHEMA)}, Grammar(kind="json_schema", text=TEXT)),
        ({"guided_json": SCHEMA}, Grammar(kind="json_schema", text=TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar(kind="json_schema", text=TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar(kind="json_schema", text=TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar(kind="json_schema", text=TEXT)),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"guided_regex": "a+"}, Grammar(kind="regex", text="a+")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(kind="regex", text="a+")),
        ({"guided_choice": ["a", "ü"]}, Grammar(kind="choice", text='["a","ü"]')),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar(kind="choice", text='["a"]')),
        ({"guided_grammar": "start: A"}, Grammar(kind="lark", text="start: A")),
        ({"structured_outputs": {"grammar": "root ::= A"}}, Grammar(kind="lark", text="root ::= A")),
        ({"response_format": {"type": "text"}, "guided_json": None}, None),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": None}}, Grammar(kind="regex", text="a")),
    ],
)
def test_one_grammar_however_it_is_said(fields: dict[str, Any], meant: Grammar | None) -> None:
    assert grammar(**fields) == meant


INVALID, MISSING, UNSUPPORTED = "invalid_value", "missing_required_parameter", "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", INVALID),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", INVALID),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            INVALID,
        ),
        ({"structured_outputs": {}}, "structured_outputs", INVALID),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", INVALID),
        (
            {"structured_outputs": {"json": {}, "structural_tag": {}}},
            "structured_outputs.structural_tag",
            UNSUPPORTED,
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            UNSUPPORTED,
        ),
        ({"guided_json": True}, "guided_json", INVALID),
        ({"guided_json": "true"}, "guided_json", INVALID),
        ({"guided_json": "{"}, "guided_json", INVALID),
        ({"guided_json": "[" * 100_000}, "guided_json", INVALID),
        ({"guided_json": {"const": "x" * 300_000}}, "guided_json", INVALID),
        ({"guided_regex": "ü" * 140_000}, "guided_regex", INVALID),
        ({"guided_regex": ""}, "guided_regex", INVALID),
        ({"guided_choice": []}, "guided_choice", INVALID),
        ({"guided_choice": [""]}, "guided_choice[0]", INVALID),
        ({"guided_choice": [1]}, "guided_choice[0]", INVALID),
        ({"guided_choice": ["x"] * 1001}, "guided_choice", INVALID),
        ({"guided_grammar": 5}, "guided_grammar", INVALID),
        ({"response_format": {}}, "response_format.type", MISSING),
        ({"response_format": {"type": "regex"}}, "response_format.type", UNSUPPORTED),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", MISSING),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            MISSING,
        ),
        ({"response_format": of_schema([])}, "response_format.json_schema.schema", INVALID),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    assert refused(**fields) == (param, code)
