"""Masks: what may come next, from the output alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pagerelay.common.errors import GrammarError
from pagerelay.common.grammar import NUM_KEPT, Grammars, allows
from pagerelay.common.wire.sampling import Grammar

VOCAB = 49_152
EOS = (0, 2)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(tiny_dir: Path) -> Grammars:
    return Grammars(tiny_dir, VOCAB, (*EOS, VOCAB + 5))


def allowed(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(at) for at in bits.nonzero()[0]]


def takes(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """May ``text`` come, token by token, and end there?"""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    try:
        masks = grammars.matcher(grammar).masks([], ids)
    except GrammarError:
        return False
    return len(masks) == len(ids) + 1 and allows(masks[-1], EOS[0])


def test_a_mask_depends_on_the_output_alone(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Read in one piece, token by token, or as a guess: the same masks."""
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    ids = tokenizer.encode('{"name": "Ann", "age": 7}', add_special_tokens=False).ids
    guessed = grammars.matcher(grammar).masks([], ids)
    stepwise = grammars.matcher(grammar)
    for at in range(len(ids) + 1):
        assert stepwise.masks(ids[:at]) == [guessed[at]]
        assert stepwise.masks(ids[:at], ids[at : at + 3])[0] == guessed[at]  # and a guess leaves no trace
        assert grammars.matcher(grammar).masks(ids[:at]) == [guessed[at]]
        if at < len(ids):
            assert allows(guessed[at], ids[at])
    assert allowed(guessed[-1]) == list(EOS)
    assert {len(mask) for mask in guessed} == {VOCAB // 8}
    control = [token for token in range(17) if token not in EOS]
    assert not any(allows(mask, token) for mask in guessed for token in control)


def test_a_guess_ends_where_it_may_not_go_on(grammars: Grammars, tokenizer: Tokenizer) -> None:
    one, two, other = (tokenizer.encode(text, add_special_tokens=False).ids[0] for text in "axq")
    matcher = grammars.matcher(Grammar(kind="regex", text="[abc][xyz]"))
    assert len(matcher.masks([], [one, other, two])) == 2
    assert len(matcher.masks([], [other, one])) == 1
    assert [len(allowed(mask)) for mask in matcher.masks([one], [two, EOS[1], one])] == [3, 2, 2]
    with pytest.raises(GrammarError):
        matcher.masks([one, other])


CHOICES = [
    "a/b",
    "new\nline",
    'q"uote',
    "back\\slash",
    "ünï",
    "nul\0",
    "a.b*",
    "😀",
    " led",
    "{}[]",
    "\x7f\x01",
]


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_are_taken_by_the_letter(grammars: Grammars, tokenizer: Tokenizer, choice: str) -> None:
    grammar = Grammar(kind="choice", text=json.dumps(CHOICES))
    assert takes(grammars, tokenizer, grammar, choice)
    assert not takes(grammars, tokenizer, grammar, choice + "x")
    assert not takes(grammars, tokenizer, grammar, "aXb")


def test_kinds(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for grammar, good, bad in (
        (Grammar(kind="regex", text="(a|b/)+"), "ab/a", "ac"),
        (Grammar(kind="lark", text='start: "x" start | "y"'), "xxy", "xx"),
        (Grammar(kind="lark", text='root ::= "x" root | "y"'), "xxy", "xx"),
        (Grammar(kind="json_schema", text='{"type":"object"}'), '{"a": [1, {"b": null}]}', "[]"),
        (Grammar(kind="json_schema", text=json.dumps(SCHEMA)), '{"name":"x","age":3}', '{"age":3}'),
    ):
        assert takes(grammars, tokenizer, grammar, good), grammar
        assert not takes(grammars, tokenizer, grammar, bad), grammar


def test_blanks_come_to_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = Grammar(kind="json_schema", text='{"type":"array","items":{"type":"null"}}')
    assert takes(grammars, tokenizer, grammar, "[" + "\n " * 32 + "null]")
    assert not takes(grammars, tokenizer, grammar, "[" + "\n " * 33 + "null]")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="a("),
        Grammar(kind="lark", text="start: foo"),
        Grammar(kind="lark", text="root ::= ("),
        Grammar(kind="json_schema", text='{"type":"foo"}'),
        Grammar(kind="json_schema", text="[]"),
        Grammar(kind="choice", text="{"),
        Grammar(kind="regex", text="a?" * 2000),  # too much for the library
    ],
)
def test_what_cannot_be_used_says_why_in_a_line(grammars: Grammars, grammar: Grammar) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError) as info:
            grammars.matcher(grammar)
        assert str(info.value)
        assert "\n" not in str(info.value)


def test_compiled_grammars_are_kept_and_not_too_many(grammars: Grammars) -> None:
    def prepare(number: int) -> object:
        return grammars.prepare(Grammar(kind="regex", text=f"x{number}"))

    first = prepare(0)
    for number in range(1, NUM_KEPT):
        prepare(number)
    assert prepare(0) is first
    prepare(NUM_KEPT)
    assert prepare(0) is first
    assert len(grammars._kept) == NUM_KEPT


def test_a_model_without_an_end_cannot_end(tiny_dir: Path) -> None:
    for made in (Grammars(tiny_dir, VOCAB, ()), Grammars(None, VOCAB, EOS)):
        with pytest.raises(GrammarError, match="end token"):
            made.matcher(Grammar(kind="regex", text="a"))
