"""Grammars are tried out where nobody else is hurt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagerelay.common.errors import InvalidRequest
from pagerelay.common.model.tiny import make_tiny_model
from pagerelay.common.wire.sampling import Grammar
from pagerelay.router.grammar_check import GrammarChecker

GOOD = Grammar(kind="regex", text="a+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


@pytest.fixture
async def checker(folder: Path) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(folder, 259)
    yield made
    await made.close()


async def refused(checker: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as info:
        await checker.check(grammar, "the_field")
    assert (info.value.param, info.value.code) == ("the_field", "invalid_grammar")
    assert info.value.message.startswith("the_field cannot be used: ")
    assert "\n" not in info.value.message
    return info.value.message


async def test_faults_are_named_and_the_rest_passes(checker: GrammarChecker) -> None:
    await checker.check(None, "")
    assert checker._child is None  # nobody who asks for nothing waits for it
    await checker.check(GOOD, "the_field")
    child = checker._child
    assert "unclosed group" in await refused(checker, Grammar(kind="regex", text="a("))
    assert "foo" in await refused(checker, Grammar(kind="lark", text="start: foo"))
    assert "foo" in await refused(checker, Grammar(kind="lark", text="root ::= foo"))
    assert '"not"' in await refused(checker, Grammar(kind="json_schema", text='{"not":{}}'))
    assert "nope" in await refused(checker, Grammar(kind="lark", text="start: <|nope|>"))
    await checker.check(Grammar(kind="lark", text="start: <|im_start|>"), "the_field")
    assert checker._child is child


async def test_what_kills_the_child_is_refused_and_the_next_one_is_served(checker: GrammarChecker) -> None:
    patterns = ",".join(f'{{"pattern":".*a{i}.*"}}' for i in range(300))
    endless = Grammar(kind="json_schema", text=f'{{"type":"string","allOf":[{patterns}]}}')
    assert "takes more than 1 s" in await refused(checker, endless)
    assert checker._child is None
    assert "takes more than 1 s" in await refused(checker, endless)
    assert checker._child is None  # it is known
    await checker.check(GOOD, "the_field")


async def test_deep_grammars_break_nothing(checker: GrammarChecker) -> None:
    rules = "".join(f'r{i}: r{i + 1} "x" | "y"\n' for i in range(12_000))
    for grammar in (
        Grammar(kind="lark", text=f'start: r0\n{rules}r12000: "z"\n'),
        Grammar(kind="lark", text="root ::= " + "(" * 100_000),
        Grammar(kind="regex", text="(" * 100_000),
        Grammar(kind="json_schema", text='{"items":' * 20_000 + "{}" + "}" * 20_000),
    ):
        await refused(checker, grammar)
    await checker.check(GOOD, "the_field")


async def test_who_goes_while_it_is_tried_takes_no_answer_along(checker: GrammarChecker) -> None:
    await checker.check(GOOD, "the_field")
    bad = asyncio.create_task(checker.check(Grammar(kind="regex", text="a("), "gone"))
    await asyncio.sleep(0)
    bad.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await bad
    others = [Grammar(kind="regex", text=text) for text in ("b", "c(", "d")]
    found = await asyncio.gather(*(checker.check(g, "f") for g in others), return_exceptions=True)
    assert [isinstance(error, InvalidRequest) for error in found] == [False, True, False]
