"""Grammars of strict calls: what the library takes and refuses, and that it is read as it is meant."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from pagerelay.common.errors import GrammarError
from pagerelay.common.grammar import Grammars, allows
from pagerelay.common.wire.sampling import Grammar
from pagerelay.router.text import Tokenizer as Router
from pagerelay.router.tool_calls import CallDelta, ToolFamily, ToolParser, ToolRules, whole_calls
from pagerelay.router.tool_grammar import STRICT, strict_calls

EOS = 2
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
OTHERS = ["<think>", "[THINK]"]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"b": {"type": "string", "enum": ["x", "y"]}},
}
SAY = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "n": {"type": ["string", "null"]}},
    "required": ["text"],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "say", "parameters": SAY}},
    {"type": "function", "function": {"name": "free", "parameters": ADD}},
]
ANSWER = {
    "type": "object",
    "properties": {"z": {"type": "null"}},
    "required": ["z"],
    "additionalProperties": False,
}
RIGHT, WRONG = '{"a": 1, "b": "x"}', '{"a": 1, "b": "z"}'
FAMILIES: tuple[ToolFamily, ...] = ("hermes", "llama3_json", "mistral", "mistral_args")


def calls(family: ToolFamily, *of: tuple[str, str]) -> str:
    """As a model of the family writes them."""
    match family:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in of
            )
        case "llama3_json":
            return "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in of)
        case "mistral":
            listed = ", ".join(f'{{"name": "{name}", "arguments": {given}}}' for name, given in of)
            return f"[TOOL_CALLS][{listed}]"
        case _:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in of)


class Held:
    """One vocabulary; ``spelled``: its marks are no tokens of their own."""

    def __init__(self, folder: Path, tiny_dir: Path, spelled: bool) -> None:
        self.tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
        if not spelled:  # Qwen's marks are added, but not special; Mistral's are special
            tokens = [AddedToken(t, special=t.startswith("["), normalized=False) for t in (*MARKS, *OTHERS)]
            self.tokenizer.add_tokens(tokens)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.router = Router.load(folder)
        self.tokens = self.router.whole_tokens
        self.grammars = Grammars(folder, self.tokenizer.get_vocab_size(), [EOS])
        self.plain = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))

    def grammar(self, family: ToolFamily, answer: dict[str, Any] | None = None) -> Grammar:
        rules = ToolRules(family, frozenset({"add", "say", "free"}), strict=frozenset({"add", "say"}))
        return Grammar(kind="lark", text=strict_calls(rules, TOOLS, self.tokens, answer))

    def takes(self, grammar: Grammar, text: str, plain: bool = False) -> str:
        """``end`` if it may end there, ``open`` if only more text may follow, or where it is refused."""
        ids = (self.plain if plain else self.tokenizer).encode(text, add_special_tokens=False).ids
        masks = self.grammars.matcher(grammar).masks([], ids)
        if len(masks) <= len(ids):
            return "refused behind " + repr(
                self.tokenizer.decode(ids[: len(masks) - 1], skip_special_tokens=False)
            )
        return "end" if allows(masks[-1], EOS) else "open"


@pytest.fixture(scope="module", params=[False, True], ids=["tokens", "spelled"])
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Held:
    return Held(tmp_path_factory.mktemp("vocabulary"), tiny_dir, request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_keep_to_their_schema(held: Held, family: ToolFamily) -> None:
    grammar = held.grammar(family)
    one, two = calls(family, ("add", RIGHT)), calls(family, ("say", '{"text": "a { ] < b"}'), ("add", RIGHT))
    lead = {"llama3_json": "<|python_tag|>"}.get(family, "")
    good = [
        "",
        "hello",
        "a < b, [x] <too",
        one,
        two,
        f"é🦜 so: {lead}{one}",
        calls(family, ("free", '{"what": "ever"}')),
    ]
    if family != "llama3_json":
        good += [f"{one}\nand {two} done"]
    for plain in (False, True):
        for text in good:
            assert held.takes(grammar, text, plain) == "end", text
        cut = one[:-1] if one.endswith(("}", "]")) else one.removesuffix("</tool_call>")
        assert held.takes(grammar, cut, plain) == "open"
        for bad in (("add", WRONG), ("say", '{"n": "x"}'), ("other", "{}"), ("add", '{"a": "1", "b": "x"}')):
            found = held.takes(grammar, "" + calls(family, bad), plain)
            assert found.startswith("refused"), (bad, found)
            found = held.takes(grammar, f"so {lead}{calls(family, bad)}", plain)
            assert found.startswith("refused"), (bad, found)
        if family != "llama3_json":
            mark = "[TOOL_CALLS]" if "mistral" in family else "<tool_call>"
            assert held.takes(grammar, f"hm {mark} and so on", plain).startswith("refused")


@pytest.mark.parametrize("family", FAMILIES)
def test_beside_an_answer_of_a_schema(held: Held, family: ToolFamily) -> None:
    grammar = held.grammar(family, ANSWER)
    good = [
        '{"z": null}',
        calls(family, ("add", RIGHT)),
        calls(family, ("add", RIGHT), ("say", '{"text": "a"}')),
    ]
    bad = ["hello", '{"y": 1}', calls(family, ("add", WRONG)), '{"z": null} ' + calls(family, ("add", RIGHT))]
    for plain in (False, True):
        assert [held.takes(grammar, text, plain) for text in good] == ["end"] * 3
        assert all(held.takes(grammar, text, plain).startswith("refused") for text in bad)


def test_tokens_that_are_no_text(held: Held) -> None:
    """They come as without a grammar, but never between two halves of a mark."""
    if "[THINK]" not in held.tokens:
        return
    grammar = held.grammar("hermes")
    assert (
        held.takes(grammar, "<think>a[THINK]b<|im_start|>" + calls("hermes", ("add", RIGHT)) + "<think>")
        == "end"
    )
    assert held.takes(grammar, "<think>" + calls("hermes", ("add", WRONG))).startswith("refused")
    assert held.takes(grammar, "<tool[THINK]_call>").startswith("refused")
    assert held.takes(grammar, "a <[THINK]").startswith("refused")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_taken_is_read(held: Held, family: ToolFamily) -> None:
    """The calls that the grammar lets through are the parser's, streamed in any pieces."""
    text = calls(family, ("add", RIGHT), ("say", '{"text": "{<[;"}'), ("free", "{}"))
    names = frozenset({"add", "say", "free"})
    parser = ToolParser(ToolRules(family, names, parameters={"add": ADD, "say": SAY, "free": ADD}))
    found = [parser.push(char) for char in text] + [parser.push("", last=True)]
    assert "".join(said for said, _ in found) == ""
    read = [(call.name, json.loads(call.arguments)) for call in whole_calls(d for _, ds in found for d in ds)]
    assert read == [("add", json.loads(RIGHT)), ("say", {"text": "{<[;"}), ("free", {})]
    assert held.takes(held.grammar(family), text) == "end"


def test_a_schema_that_cannot_be_compiled(held: Held) -> None:
    rules = ToolRules("hermes", frozenset({"f"}), strict=frozenset({"f"}))
    function = {"name": "f", "parameters": {"properties": {"x": {"type": "strange"}}}}
    text = strict_calls(rules, [{"type": "function", "function": function}], held.tokens, None)
    with pytest.raises(GrammarError):
        held.grammars.matcher(Grammar(kind="lark", text=text))


PIECES = [
    *("<tool", "_", "call", ">", "<", "[", "TO", "OL", "_CALLS", "]", "<|", "python", "tag", "|>", "{", "}"),
    *('"', ";", "\n", "name", '":', "add", "say", "arguments", "parameters", "a", "b", "x", "1", ",", "text"),
    *("AR", "GS", *MARKS, *OTHERS),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_walk_leads_around_a_schema(held: Held, family: ToolFamily) -> None:
    """Whatever tokens are taken among those that may come: every call that the parser finds is one, special
    tokens left out of the text as for a client."""
    grammar, pick = held.grammar(family), random.Random(family)
    liked = [one for piece in PIECES for one in held.tokenizer.encode(piece, add_special_tokens=False).ids]
    rules = ToolRules(family, frozenset({"add", "say", "free"}))
    num_calls = 0
    for _ in range(15):
        matcher, ids = held.grammars.matcher(grammar), list[int]()
        parser = ToolParser(rules)
        detokenizer = held.router.detokenizer(True, parser.marks)
        deltas: list[CallDelta] = []
        begun = held.plain.encode("ab " + STRICT[family], add_special_tokens=False).ids
        begun = begun[: pick.randrange(2 * len(begun))]
        for step in range(70):
            (mask,) = matcher.masks(ids)
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            may = [token for token in liked if bits[token] and token != EOS]
            if step < len(begun):
                ids.append(begun[step])
            elif may and pick.random() < 0.9:
                ids.append(pick.choice(may))
            else:
                some = bits.nonzero()[0]
                ids.append(int(some[pick.randrange(len(some))]))
            assert bits[ids[-1]]
            if ids[-1] == EOS:
                break
            deltas += parser.push(detokenizer.push(ids[-1]))[1]
        deltas += parser.push(detokenizer.flush(), last=True)[1]
        calls = whole_calls(deltas)
        for call in calls if ids[-1] == EOS else calls[:-1]:
            schema = {"add": ADD, "say": SAY}.get(call.name or "", {"type": "object"})
            jsonschema_rs.validate(schema, json.loads(call.arguments))
        num_calls += len(calls)
    assert num_calls > 2
