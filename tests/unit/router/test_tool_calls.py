"""Calls of functions in outputs: the three families, cut anywhere, whole and broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagerelay.router.tool_calls import CallDelta, ToolFamily, ToolParser, ToolRules

NAMES = frozenset({"get_weather", "add"})
FAMILIES: tuple[ToolFamily, ...] = ("hermes", "llama3_json", "mistral", "forced")
Call = tuple[str, str]


def read(family: ToolFamily | None, pieces: list[str], parallel: bool = True) -> tuple[str, list[Call]]:
    """(text, [(name, arguments)]) as a client adds the pieces up, the order of deltas checked."""
    parser = ToolParser(None if family is None else ToolRules(family, NAMES, parallel))
    texts: list[str] = []
    calls: list[list[str]] = []
    ids: list[str] = []
    for number, piece in enumerate([*pieces, ""]):
        text, deltas = parser.push(piece, last=number == len(pieces))
        texts.append(text)
        for delta in deltas:
            if delta.name is not None:
                assert delta == CallDelta(len(calls), "", delta.id, delta.name)
                ids.append(delta.id or "")
                calls.append([delta.name, ""])
            else:
                assert delta.id is None
                assert delta.arguments
                assert delta.index == len(calls) - 1
                calls[-1][1] += delta.arguments
    assert len(set(ids)) == len(calls)
    wanted = 9 if family == "mistral" else 29
    assert all(len(one) == wanted for one in ids)
    return "".join(texts), [(name, arguments) for name, arguments in calls]


PARIS = '{"city": "Paris", "note": "a } \\" ] <b>"}'
W = f'{{"name": "get_weather", "arguments": {PARIS}}}'
A = '{"name": "add", "arguments": {"a": [1, {"b": 2}]}}'
ADD = ("add", '{"a": [1, {"b": 2}]}')
WEATHER = ("get_weather", PARIS)

OUTPUTS: list[tuple[ToolFamily, str, str, list[Call]]] = [
    ("hermes", f"<tool_call>\n{W}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"<tool_call>{W}</tool_call><tool_call>{A}</tool_call>", "", [WEATHER, ADD]),
    (
        "hermes",
        f"Let me look.\n\n<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{A}\n</tool_call>\n",
        "Let me look.",
        [WEATHER, ADD],
    ),
    ("hermes", f"a <tool_call>\n{W}\n</tool_call>\n b", "ab", [WEATHER]),
    ("hermes", f"<tool_call>\n{W}", "", [WEATHER]),
    ("hermes", f"<tool_call>\n{W[:-1]}\n</tool_call> x", "x", [WEATHER]),  # a bracket left out
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a":1}')]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a":1}')],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}, "id": 3}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),  # max_tokens
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": [1}\n</tool_call>',
        "",
        [("add", '{"a": [1}\n')],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {} junk', "junk", [("add", "{}")]),
    ("llama3_json", W, "", [WEATHER]),
    ("llama3_json", W.replace("arguments", "parameters"), "", [WEATHER]),
    ("llama3_json", f"\n<|python_tag|>{W}", "", [WEATHER]),
    ("llama3_json", f"Sure. <|python_tag|>{W}; {A}", "Sure.", [WEATHER, ADD]),
    ("llama3_json", f"{W};{A}; and more", "; and more", [WEATHER, ADD]),
    ("llama3_json", '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    ("mistral", f"[TOOL_CALLS][{W}]", "", [WEATHER]),
    ("mistral", f"[TOOL_CALLS] [{W}, {A}]", "", [WEATHER, ADD]),
    ("mistral", f'So: [TOOL_CALLS]\n[ {W[:-1]}, "id": "012345678"}} ]', "So:", [WEATHER]),
    ("forced", f"[{W}, {A}]", "", [WEATHER, ADD]),
]

TEXTS: list[tuple[ToolFamily, str]] = [
    *[
        (family, text)
        for family in FAMILIES
        for text in ("", " \n", "hello\n", "a < b [x] {y: 1}", "é🦜" * 9)
    ],
    ("hermes", "<tool_call>"),
    ("hermes", "so <tool_call"),
    ("hermes", "a\n<tool_call>\n\n"),
    ("hermes", "</tool_call> \n"),
    ("hermes", "<tool_call>no</tool_call>"),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "other", "parameters": 1, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": 7}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {'[:-1]),
    ("hermes", '<tool_call>{"name": 5, "id": </tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "add"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": ' + "[" * 5000 + "]" * 5000 + "}"),
    ("hermes", "x" + " " * 100 + "<tool_call>" + " " * 100 + "{"),
    ("llama3_json", '{"answer": {"name": "add", "parameters": {}}}'),
    ("llama3_json", 'text {"name": "add", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", '[TOOL_CALLS]["add"]'),
    ("mistral", f"[TOOL_CALLS]{A}"),
    ("mistral", f"[{A}]"),
    ("forced", "[]"),
    ("forced", W),
]


@pytest.mark.parametrize(("family", "output", "text", "calls"), OUTPUTS)
def test_calls_are_found(family: ToolFamily, output: str, text: str, calls: list[Call]) -> None:
    assert read(family, [output]) == (text, calls)
    assert read(family, list(output)) == (text, calls)


@pytest.mark.parametrize(("family", "output"), TEXTS)
def test_all_else_is_text(family: ToolFamily, output: str) -> None:
    assert read(family, [output]) == (output, [])
    assert read(family, list(output)) == (output, [])


def test_a_broken_call_of_a_list_is_text() -> None:
    output = f'[TOOL_CALLS][{W}, {{"name": "other", "arguments": {{}}}}]'
    text, calls = read("mistral", [output])
    assert (text, calls) == (', {"name": "other", "arguments": {}}]', [WEATHER])


def test_after_a_broken_call_the_next_is_found() -> None:
    output = f"<tool_call>oops <tool_call>\n{A}\n</tool_call>"
    assert read("hermes", list(output)) == ("<tool_call>oops", [ADD])


def test_without_rules_all_is_text() -> None:
    output = f" <tool_call>{W}</tool_call> "
    assert read(None, list(output)) == (output, [])
    assert ToolParser(None).marks == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_only(family: ToolFamily) -> None:
    outputs = {
        "hermes": f"a<tool_call>{W}</tool_call><tool_call>{A}</tool_call>z",
        "llama3_json": f"a<|python_tag|>{W};{A}",
        "mistral": f"a[TOOL_CALLS][{W},{A}]",
        "forced": f"[{W},{A}]",
    }
    text = "" if family == "forced" else "a"
    assert read(family, [outputs[family]], parallel=False) == (text, [WEATHER])
    parser = ToolParser(ToolRules(family, NAMES, parallel=False))
    done = [parser.push(char) and parser.done for char in outputs[family]]
    assert done.index(True) == outputs[family].index(W) + len(W) - 1


def test_text_and_arguments_come_at_once() -> None:
    parser = ToolParser(ToolRules("hermes", NAMES))
    assert parser.push("Hello ") == ("Hello", [])  # the blank may belong to a call
    assert parser.push("you <tool") == (" you", [])
    assert parser.push("_call>") == ("", [])
    assert parser.push('{"name": "add", "arguments": ')[1] == []
    header, piece = parser.push('{"a')[1]
    assert (header.name, header.arguments, piece.arguments) == ("add", "", '{"a')
    assert parser.push('": 1}') == ("", [CallDelta(0, '": 1}')])
    assert parser.push("}") == ("", [])


WORDS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[",
            "]",
            ",",
            ";",
            " ",
            "\n",
            "{",
            "}",
        ),
        *(
            '"',
            '\\"',
            "<",
            "hello",
            "é",
            W,
            A,
            W[:-1],
            '{"name": "',
            "add",
            '", "arguments": ',
            '{"a": 1}',
            '"id": 1',
        ),
        *('{"arguments": ', ', "name": "add"}', "null", " " * 70),
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    words=st.lists(WORDS, max_size=14),
    data=st.data(),
    parallel=st.booleans(),
)
def test_cuts_change_nothing(family: ToolFamily, words: list[str], data: Any, parallel: bool) -> None:
    output = "".join(words)
    cuts = data.draw(st.lists(st.integers(0, len(output)), max_size=10).map(sorted))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    whole = read(family, [output], parallel)
    assert read(family, pieces, parallel) == whole
    assert read(family, list(output), parallel) == whole
    text, calls = whole
    if not calls:
        assert text == output
    for name, arguments in calls:
        assert name in NAMES
        assert arguments.startswith("{")


VALUES = st.none() | st.integers() | st.text(max_size=8) | st.lists(st.text(max_size=3), max_size=2)


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    arguments=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=3),
    ascii_only=st.booleans(),
)
def test_any_arguments_pass_unchanged(
    family: ToolFamily, arguments: list[dict[str, Any]], ascii_only: bool
) -> None:
    texts = [json.dumps(one, ensure_ascii=ascii_only) for one in arguments]
    calls = [f'{{"name": "add", "arguments": {text}}}' for text in texts]
    listed = "[" + ", ".join(calls) + "]"
    output = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
        "llama3_json": "; ".join(calls),
        "mistral": f"[TOOL_CALLS]{listed}",
        "forced": listed,
    }[family]
    assert read(family, list(output)) == ("", [("add", text) for text in texts])
