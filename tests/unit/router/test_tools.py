"""Chats with tools: what is taken, refused, and written into the prompt, by templates of five families."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from chat_templates import NAMED, SPECIALS, TEMPLATES
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.chat_template import ChatAbilities, ChatTemplate
from pagerelay.router.text import Tokenizer
from pagerelay.router.tool_calls import ToolRules
from pagerelay.router.tool_grammar import forced_schema
from pagerelay.router.tools import tool_family
from pagerelay.router.validate import Limits, ParsedRequest, parse_request

FAMILIES = sorted(TEMPLATES)
HI = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "日本"]},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
BARE: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALL = {
    "id": "abc456789",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'},
}
ROUND: list[dict[str, Any]] = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc456789", "content": '{"sky": "blue"}'},
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": "and now?"},
]

Load = Callable[[str], tuple[Tokenizer, Any]]


@pytest.fixture
def load(make_folder, byte_backend: Backend) -> Load:
    """A family's tokenizer, and its folder."""

    def make(family: str) -> tuple[Tokenizer, Any]:
        backend = Backend.from_str(byte_backend.to_str())
        backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS[family]])
        folder = make_folder(backend, TEMPLATES[family], family, **NAMED[family])
        return Tokenizer.load(folder), folder

    return make


def limits(tokenizer: Tokenizer, setting: str = "auto") -> Limits:
    return Limits(
        served_name="m",
        vocab_size=tokenizer.vocab_size,
        context_len=8192,
        max_choices=8,
        abilities=tokenizer.abilities,
        tool_family=tool_family(setting, tokenizer.template),
    )


def parse(allowed: Limits, **fields: Any) -> ParsedRequest:
    return parse_request("chat", json.dumps({"model": "m", "messages": HI} | fields).encode(), allowed)


def refuse(allowed: Limits, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(allowed, **fields)
    assert "Error" not in caught.value.message
    return caught.value


def encode(tokenizer: Tokenizer, parsed: ParsedRequest) -> list[int]:
    chat = parsed.chat
    return tokenizer.encode_chat(chat.messages, 8192, chat.variables, chat.continue_final)


# -------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("family", FAMILIES)
def test_same_ids_as_transformers(load: Load, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, folder = load(family)
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    allowed = limits(tokenizer)
    as_objects = json.loads(json.dumps(ROUND))
    as_objects[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Paris", "days": 2}
    bare = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"messages": HI}, {}),
        ({"tools": [WEATHER, BARE]}, {"tools": [WEATHER, bare]}),
        ({"tools": [WEATHER], "tool_choice": "none"}, {}),
        ({"messages": ROUND}, {}),
        ({"messages": ROUND, "tools": [WEATHER], "tool_choice": "auto"}, {"tools": [WEATHER]}),
        ({"messages": ROUND, "add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"messages": ROUND[:4], "continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ]
    if family == "hermes":
        cases += [
            ({"chat_template_kwargs": {"enable_thinking": value}}, {"enable_thinking": value})
            for value in (True, False)
        ]
    if family == "llama3_json":
        cases.append(({"chat_template_kwargs": {"date_string": "1 May"}}, {"date_string": "1 May"}))
    for fields, kwargs in cases:
        messages = as_objects[: len(fields["messages"])] if len(fields.get("messages", HI)) > 1 else HI
        expected = reference.apply_chat_template(
            messages, tokenize=True, return_dict=True, **{"add_generation_prompt": True} | kwargs
        )
        assert encode(tokenizer, parse(allowed, **fields)) == expected["input_ids"], fields
    # C20: the template's own BOS, and no other
    bos = NAMED[family].get("bos_token")
    if bos:
        ids = encode(tokenizer, parse(allowed, messages=ROUND, tools=[WEATHER]))
        assert ids.count(tokenizer._encoder.token_to_id(bos)) == 1


@pytest.mark.parametrize("content", ["  two\r\nlines  ", "blank \n", "x" * 50_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_message_ends_as_in_transformers(load: Load, family: str, content: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, folder = load(family)
    messages = [*HI, {"role": "assistant", "content": content}]
    expected = transformers.AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        messages, tokenize=True, return_dict=True, continue_final_message=True
    )
    ids = tokenizer.encode_chat(messages, None, {"add_generation_prompt": False}, True)
    assert ids == expected["input_ids"]


# ------------------------------------------------------------------------------------------------ abilities


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_makes_use_of(load: Load, family: str) -> None:
    tokenizer, _ = load(family)
    found = tokenizer.abilities
    assert (found.tools, found.calls, found.names) == (True, True, False)
    assert found.part_roles == ({"user"} if family.startswith("mistral") else set())
    own = {"hermes": {"enable_thinking"}, "llama3_json": {"date_string"}}
    assert found.variables == own.get(family, set())
    assert tool_family("auto", tokenizer.template) == family
    assert tool_family("none", tokenizer.template) is None
    assert tool_family("mistral", tokenizer.template) == "mistral"


def test_a_template_without_tools(tokenizer: Tokenizer) -> None:
    assert tokenizer.abilities == ChatAbilities()
    assert tool_family("auto", tokenizer.template) is None
    assert tool_family("auto", None) is None
    allowed = limits(tokenizer, "hermes")
    error = refuse(allowed, tools=[WEATHER])
    assert (error.code, error.param) == ("unsupported_parameter", "tools")
    assert "chat template" in error.message
    assert refuse(allowed, messages=ROUND).param == "messages[1].tool_calls"
    assert refuse(allowed, messages=[*HI, ROUND[2]]).param == "messages[1].role"


@pytest.mark.parametrize("source", ["<|tool▁calls▁begin|>{{ tools }}", "{{ tools }}"])
def test_families_that_are_not_known(source: str) -> None:
    template = ChatTemplate(source, {})
    assert tool_family("auto", template) is None
    error = refuse(
        Limits(served_name="m", vocab_size=9, context_len=9, max_choices=1, abilities=template.abilities),
        tools=[WEATHER],
    )
    assert (error.code, error.param) == ("unsupported_parameter", "tools")
    assert "router.tool_parser" in error.message


def test_names_and_parts_go_where_the_template_writes_them() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}/{{ m.name }}:"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %};{% endfor %}"
    )
    template = ChatTemplate(source, {})
    allowed = Limits(
        served_name="m", vocab_size=9, context_len=9, max_choices=1, abilities=template.abilities
    )
    assert template.abilities.names
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": role, "content": parts, "name": "Zoë"} for role in ("system", "user", "assistant")]
    parsed = parse(allowed, messages=messages)
    assert template.render(parsed.messages) == "".join(
        f"{role}/Zoë:<ab>;" for role in ("system", "user", "assistant")
    )
    # One part: else these halves would become a control token where the template joins them.
    halves = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    (turn,) = parse(allowed, messages=[{"role": "user", "content": halves}]).messages
    assert turn["content"] == [{"type": "text", "text": "<|im_end|>"}]
    one = parse(allowed, messages=[{"role": "user", "content": "ab"}])
    assert template.render(one.messages) == "user/:ab;"


def test_results_of_tools_get_the_name_of_their_call() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if m.name is not defined %}{{ raise_exception('no') }}{% endif %}{{ m.name }}={{ m.content }};"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.abilities.calls
    allowed = Limits(
        served_name="m", vocab_size=9, context_len=9, max_choices=1, abilities=template.abilities
    )
    other = {"role": "tool", "tool_call_id": "abc456789", "content": "x", "name": "mine"}
    parsed = parse(allowed, messages=[*ROUND[:3], other])
    assert template.render(parsed.messages).endswith('get_weather={"sky": "blue"};mine=x;')


# ------------------------------------------------------------------------------------------------ requests


def test_rules_by_which_the_output_is_read(load: Load) -> None:
    allowed = limits(load("hermes")[0])
    names = frozenset({"get_weather", "now"})
    rules = ToolRules("hermes", names)
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": None}, {"parallel_tool_calls": True}):
        assert parse(allowed, tools=[WEATHER, BARE], **fields).tool_rules == rules
    one = parse(allowed, tools=[WEATHER, BARE], parallel_tool_calls=False)
    assert one.tool_rules == ToolRules("hermes", names, parallel=False)
    hidden = parse(allowed, tools=[WEATHER], tool_choice="none")
    assert (hidden.tool_rules, "tools" in hidden.chat.variables) == (None, False)
    for empty in (None, []):
        assert parse(allowed, tools=empty, tool_choice="none", parallel_tool_calls=True) == parse(allowed)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "strict": True}}],
                "guided_regex": "a+",
            },
            "guided_regex",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "strict": True}}],
                "guided_json": "[]",
            },
            "guided_json",
        ),
        ({"tools": [BARE, WEATHER, BARE]}, "tools[2].function.name"),
        ({"tools": [BARE] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [BARE], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [BARE], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [BARE], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (
            {"tools": [BARE], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"documents": [{"title": "x", "text": "y"}]}, "documents"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True, "messages": ROUND[:4]},
            "continue_final_message",
        ),
        ({"continue_final_message": True, "messages": ROUND[:2]}, "continue_final_message"),
    ],
)
def test_bad_requests(load: Load, fields: dict[str, Any], param: str) -> None:
    assert refuse(limits(load("hermes")[0]), **fields).param == param


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [CALL | fields]}


def arguments(text: Any) -> list[dict[str, Any]]:
    return [*HI, call(function={"name": "f", "arguments": text})]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([*HI, call(id=None)], "messages[1].tool_calls[0].id"),
        ([*HI, call(type="custom")], "messages[1].tool_calls[0].type"),
        ([*HI, call(function=None)], "messages[1].tool_calls[0].function"),
        ([*HI, call(function={"name": "f"})], "messages[1].tool_calls[0].function.arguments"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([*HI, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([*HI, {"role": "tool", "tool_call_id": "1"}], "messages[1].content"),
        ([*HI, {"role": "function", "name": "f", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([*HI, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content"),
        ([*HI, {"role": "assistant", "content": "x", "function_call": {}}], "messages[1].function_call"),
        ([*HI, {"role": "assistant", "content": "x", "audio": {"id": "1"}}], "messages[1].audio"),
        *[
            ([{"role": "user", "content": [{"type": kind, kind: {}}]}], "messages[0].content[0].type")
            for kind in ("image_url", "input_audio", "file", "video_url", "refusal")
        ],
        *[
            (arguments(text), "messages[1].tool_calls[0].function.arguments")
            for text in (
                "[]",
                "{",
                "x",
                '{"a": NaN}',
                '{"a": "\\ud83d"}',
                "[" * 5000,
                '{"a":' * 99 + "1" + "}" * 99,
                {},
            )
        ],
    ],
)
def test_bad_messages(load: Load, messages: Any, param: str) -> None:
    assert refuse(limits(load("hermes")[0]), messages=messages).param == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_other_parts_are_refused_by_name(load: Load, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind}]}]
    assert kind in refuse(limits(load("hermes")[0]), messages=messages).message


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00\ud83d"])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(load: Load, half: str, stream: bool) -> None:
    """C10"""
    allowed = limits(load("hermes")[0])
    bodies = [
        '"messages":[{"role":"user","content":"HALF"}]',
        '"messages":[{"role":"user","content":[{"type":"text","text":"HALF"}]}]',
        '"messages":[{"role":"user","name":"HALF","content":"x"}]',
        '"messages":[{"role":"tool","tool_call_id":"HALF","content":"x"}]',
        '"messages":[],"stop":"HALF"',
        '"messages":[],"user":"HALF"',
        '"messages":[],"tools":[{"type":"function","function":{"name":"f","description":"HALF"}}]',
        '"messages":[],"tools":[{"type":"function","function":{"name":"f","parameters":{"HALF":1}}}]',
        '"messages":[],"chat_template_kwargs":{"enable_thinking":"HALF"}',
    ]
    tail = f',"model":"m","stream":{json.dumps(stream)}}}'
    for body in bodies:
        with pytest.raises(InvalidRequest, match="surrogate"):
            parse_request("chat", ("{" + body.replace("HALF", half) + tail).encode(), allowed)
    whole = "{" + bodies[0].replace("HALF", r"\ud83d\ude00") + tail
    assert parse_request("chat", whole.encode(), allowed).messages[0]["content"] == "😀"
    with pytest.raises(InvalidRequest, match="UTF-8"):
        parse_request("chat", b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', allowed)


# -------------------------------------------------------------------------------------- control tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_of_a_client_becomes_a_control_token(load: Load, family: str) -> None:
    tokenizer, _ = load(family)
    allowed = limits(tokenizer)

    def chat(text: str) -> list[int]:
        messages = [
            {"role": "user", "content": text, "name": text},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    CALL | {"function": {"name": text, "arguments": json.dumps({text: [text, {"x": text}]})}}
                ],
            },
            {"role": "tool", "tool_call_id": "abc456789", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]
        parameters = {"type": "object", "properties": {text: {"description": text, "enum": [text]}}}
        tools = [
            {"type": "function", "function": {"name": "f", "description": text, "parameters": parameters}}
        ]
        kwargs = {"date_string": text} if family == "llama3_json" else {}
        return encode(tokenizer, parse(allowed, messages=messages, tools=tools, chat_template_kwargs=kwargs))

    for special in SPECIALS[family]:
        ids, plain = chat(f"a {special} b"), chat("a b")
        special_ids = tokenizer.special_ids
        assert [one for one in ids if one in special_ids] == [one for one in plain if one in special_ids]
        assert tokenizer._decode(ids) == tokenizer._decode(plain).replace("a b", f"a {special} b")


# ------------------------------------------------------------------------------------------------ limits


def test_indented_json_stays_within_the_limits() -> None:
    template = ChatTemplate("{% if tools %}{{ tools | tojson(indent=200) }}{% endif %}", {})
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    assert template.render(HI, {"tools": [{"a": [1, "é"]}]}).startswith("[\n")
    with pytest.raises(InvalidRequest, match="too long a text"):
        template.render(HI, {"tools": [deep] * 500})


def test_a_template_that_drops_the_end_cannot_continue() -> None:
    template = ChatTemplate("{{ messages[0].content[:2] }}", {})
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "assistant", "content": "long"}], continue_final=True)
    assert caught.value.param == "continue_final_message"


# ---------------------------------------------------------------------------------------- forced calls


def test_the_schema_of_forced_calls() -> None:
    tree = {
        "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "rest": {"items": [{"$ref": "#"}]}, "$ref": {}},
        "$defs": {"leaf": {"type": "integer"}},
    }
    tools = [
        {"type": "function", "function": {"name": "tree", "parameters": tree}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    ]
    moved = {
        "type": "object",
        "properties": {
            "leaf": {"$ref": "#/$defs/f0/$defs/leaf"},
            "rest": {"items": [{"$ref": "#/$defs/f0"}]},
            "$ref": {},
        },
        "$defs": {"leaf": {"type": "integer"}},
    }

    def one(name: str, number: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/f{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }

    both = {
        "type": "array",
        "items": {"anyOf": [one("tree", 0), one("now", 1)]},
        "minItems": 1,
        "$defs": {"f0": moved, "f1": {"type": "object"}},
    }
    assert forced_schema(tools) == both
    assert forced_schema(tools, parallel=False) == both | {"maxItems": 1}
    assert forced_schema(tools, "now") == {
        "type": "array",
        "items": {"anyOf": [one("now", 0)]},
        "minItems": 1,
        "maxItems": 1,
        "$defs": {"f0": {"type": "object"}},
    }


def test_a_forced_call_is_a_grammar(load: Load) -> None:
    allowed = limits(load("hermes")[0])
    now = {"type": "function", "function": {"name": "now"}}
    for choice, name in (("required", None), (now, "now")):
        for parallel in (True, False):
            parsed = parse(allowed, tools=[WEATHER, BARE], tool_choice=choice, parallel_tool_calls=parallel)
            assert parsed.grammar is not None
            assert parsed.grammar_param == "tool_choice"
            names = frozenset({"get_weather", "now"})
            assert parsed.tool_rules == ToolRules("forced", names, parallel, name)
            function = {"name": "now", "parameters": {"type": "object", "properties": {}}}
            tools = [WEATHER, {"type": "function", "function": function}]
            assert json.loads(parsed.grammar.text) == forced_schema(tools, name, parallel)
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    assert parse(allowed, tools=[strict], tool_choice="required").grammar is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_functions_are_a_grammar(load: Load, family: str) -> None:
    allowed = limits(load(family)[0])
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    if family == "qwen3_coder":
        assert refuse(allowed, tools=[BARE, strict]).param == "tools[1].function.strict"
        typed = parse(allowed, tools=[WEATHER]).tool_rules
        assert typed is not None
        assert typed.parameters == {"get_weather": WEATHER["function"]["parameters"]}
        return
    for choice in ({}, {"tool_choice": "auto"}):
        parsed = parse(allowed, tools=[strict, BARE], **choice)
        assert parsed.grammar is not None
        assert (parsed.grammar.kind, parsed.grammar_param) == ("lark", "tools")
        assert parsed.tool_rules is not None
        assert (parsed.tool_rules.family, parsed.tool_rules.strict) == (family, {"get_weather"})
    schema = {"type": "object", "properties": {"z": {"type": "null"}}}
    beside = parse(
        allowed,
        tools=[strict],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert beside.grammar is not None
    assert '"null"' in beside.grammar.text
    for fields in ({"tool_choice": "none"}, {"tools": [WEATHER]}):
        free = parse(allowed, **{"tools": [strict], **fields})
        assert free.grammar is None
        assert free.tool_rules is None or not free.tool_rules.strict
    forced = parse(allowed, tools=[strict], tool_choice="required")
    assert forced.grammar is not None
    assert (forced.grammar.kind, forced.grammar_param) == ("json_schema", "tool_choice")
    assert forced.tool_rules is not None
    assert forced.tool_rules.short_ids is family.startswith("mistral")
