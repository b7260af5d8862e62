"""Calls of functions in outputs: every family, cut anywhere, whole and broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagerelay.router.tool_calls import CallDelta, ToolFamily, ToolParser, ToolRules
from pagerelay.router.tool_xml import kinds

NAMES = frozenset({"get_weather", "add"})
FAMILIES: tuple[ToolFamily, ...] = (
    *("hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "forced"),
)
PARAMETERS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {
        "properties": {
            "a": {"type": ["integer", "array", "object", "boolean"]},
            "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "c": {"$ref": "#/$defs/c"},
            "any": {},
        },
        "$defs": {"c": {"type": "string", "enum": ["1", "two"]}},
    },
}
Call = tuple[str, str]


def read(family: ToolFamily | None, pieces: list[str], parallel: bool = True) -> tuple[str, list[Call]]:
    """(text, [(name, arguments)]) as a client adds the pieces up, the order of deltas checked."""
    rules = None if family is None else ToolRules(family, NAMES, parallel, parameters=PARAMETERS)
    parser = ToolParser(rules)
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
    wanted = 9 if family in ("mistral", "mistral_args") else 29
    assert all(len(one) == wanted for one in ids)
    return "".join(texts), [(name, arguments) for name, arguments in calls]


PARIS = '{"city": "Paris", "note": "a } \\" ] <b>"}'
W = f'{{"name": "get_weather", "arguments": {PARIS}}}'
A = '{"name": "add", "arguments": {"a": [1, {"b": 2}]}}'
ADD = ("add", '{"a": [1, {"b": 2}]}')
WEATHER = ("get_weather", PARIS)


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


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
    ("mistral_args", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", "", [WEATHER]),
    ("mistral_args", f"[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{ADD[1]}", "", [ADD]),
    (
        "mistral_args",
        f"So: [TOOL_CALLS] get_weather[ARGS] {PARIS}\n[TOOL_CALLS]add[ARGS]{ADD[1]} end",
        "So:end",
        [WEATHER, ADD],
    ),
    ("mistral_args", '[TOOL_CALLS]add[ARGS]{"a": ', "", [("add", '{"a": ')]),
    (
        "qwen3_coder",
        xml("get_weather", city="Paris", days="3"),
        "",
        [("get_weather", '{"city": "Paris", "days": 3}')],
    ),
    (
        "qwen3_coder",
        "Hm. " + xml("add") + "\n" + xml("add", b="x"),
        "Hm.",
        [("add", "{}"), ("add", '{"b": "x"}')],
    ),
    (
        "qwen3_coder",
        xml("get_weather", city='  a\n"<b>\\ \n'),
        "",
        [("get_weather", '{"city": "  a\\n\\"<b>\\\\ \\n"}')],
    ),
    (
        "qwen3_coder",
        xml("get_weather", city="5", other="7"),
        "",
        [("get_weather", '{"city": "5", "other": "7"}')],
    ),
    (
        "qwen3_coder",
        xml("add", a='[1, {"x": null}]', b="null", c="1"),
        "",
        [("add", '{"a": [1, {"x": null}], "b": null, "c": "1"}')],
    ),
    (
        "qwen3_coder",
        xml("add", a="True", b="3", any="None"),
        "",
        [("add", '{"a": true, "b": "3", "any": null}')],
    ),
    ("qwen3_coder", xml("add", a="many", any='"q"'), "", [("add", '{"a": "many", "any": "\\"q\\""}')]),
    ("qwen3_coder", "a<function=add><parameter=b></parameter></function> b", "ab", [("add", '{"b": ""}')]),
    (
        "qwen3_coder",
        xml("add", b="x")[: -len("</function>\n</tool_call>")] + "</tool_call>",
        "",
        [("add", '{"b": "x"}')],
    ),
    ("qwen3_coder", "<tool_call><function=add>no", "no", [("add", "{}")]),
    ("qwen3_coder", "<tool_call><function=add><parameter=b>x\ny</para", "", [("add", '{"b": "x\\ny</para')]),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=city>x</para",
        "",
        [("get_weather", '{"city": "x</para')],
    ),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>[1, ", "", [("add", '{"a": [1, ')]),
    (
        "qwen3_coder",
        "<tool_call><function=add>\n<parameter=b>\nx\n</parameter>\n<para",
        "<para",
        [("add", '{"b": "x"')],
    ),
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
    ("mistral_args", "[TOOL_CALLS]add"),
    ("mistral_args", "[TOOL_CALLS]add[ARGS]"),
    ("mistral_args", "[TOOL_CALLS]add[ARGS] 7"),
    ("mistral_args", "[TOOL_CALLS]other[ARGS]{}"),
    ("mistral_args", "[TOOL_CALLS]" + "add" * 200 + "[ARGS]{}"),
    ("mistral_args", f"[TOOL_CALLS][{A}]"),
    ("mistral_args", "add[ARGS]{}"),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=add"),
    ("qwen3_coder", f"<tool_call>\n{A}\n</tool_call>"),
    ("qwen3_coder", "<function=>x</function> <parameter=a>"),
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
        "mistral_args": f"a[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{ADD[1]}",
        "qwen3_coder": "a" + xml("add", b="x") + xml("add") + "z",
        "forced": f"[{W},{A}]",
    }
    text = "" if family == "forced" else "a"
    first, end = WEATHER, W
    if family == "mistral_args":
        end = PARIS
    elif family == "qwen3_coder":
        first, end = ("add", '{"b": "x"}'), "</function>"
    assert read(family, [outputs[family]], parallel=False) == (text, [first])
    parser = ToolParser(ToolRules(family, NAMES, parallel=False, parameters=PARAMETERS))
    done = [parser.push(char) and parser.done for char in outputs[family]]
    assert done.index(True) == outputs[family].index(end) + len(end) - 1


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
        *("add[ARGS]", "[CALL_ID]x1", "<function=add>", "<function=", "</function>", "</parameter>"),
        *("<parameter=a>", "<parameter=b>", "<parameter=", "1", "True"),
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
    family=st.sampled_from([family for family in FAMILIES if family != "qwen3_coder"]),
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
        "mistral_args": "".join(f"[TOOL_CALLS]add[ARGS]{text}" for text in texts),
        "forced": listed,
    }[family]
    assert read(family, list(output)) == ("", [("add", text) for text in texts])


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(st.sampled_from("abcd"), VALUES | st.booleans(), max_size=4))
def test_values_in_tags_have_the_types_of_the_schema(values: dict[str, Any]) -> None:
    """What the model was shown as ``values`` is read as that, a text also where it looks like JSON."""
    kinds = {int: "integer", str: "string", bool: "boolean", list: "array", type(None): "null"}
    schema = {"properties": {key: {"type": kinds[type(value)]} for key, value in values.items()}}
    written = {
        key: value
        if isinstance(value, str)
        else str(value)
        if isinstance(value, bool | None)
        else json.dumps(value)
        for key, value in values.items()
    }
    parser = ToolParser(ToolRules("qwen3_coder", NAMES, parameters={"add": schema}))
    deltas = [delta for char in xml("add", **written) for delta in parser.push(char)[1]]
    assert parser.push("", last=True) == ("", [])
    assert deltas[0].name == "add"
    assert json.loads("".join(delta.arguments for delta in deltas)) == values


def test_a_schema_that_refers_to_itself_has_any_type() -> None:
    loop = {
        "properties": {"a": {"$ref": "#/properties/a"}, "b": {"anyOf": [{"$ref": "#/x"}, {"type": "string"}]}}
    }
    assert kinds(loop["properties"]["a"], loop) == kinds({}, {})
    assert kinds(loop["properties"]["b"], loop) == kinds(None, {})
    wide = {"anyOf": [{"anyOf": [{"const": number}]} for number in range(1000)]}
    assert kinds(wide, wide) == kinds({}, {})
    assert kinds({"type": ["string", "null"]}, {}) == {"string", "null"}
