"""Grammars in the engine: a mask for each row, and a failure that is one request's own."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from engines import FACTS, VOCAB, assert_idle, decode_engine, decode_job, greedy, run_dry

from pagerelay.common.errors import GrammarError
from pagerelay.common.wire.messages import Failed, HandedOver, Tokens
from pagerelay.common.wire.sampling import Grammar

GRAMMAR = Grammar(kind="regex", text="a")
EOS = FACTS.eos_token_ids[0]


class Allowing:
    """Lets these tokens come, one after the other, and then the end; it must be told all that has come."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def masks(self, output: list[int], draft: list[int]) -> list[bytes]:
        if output != self._tokens[: len(output)]:
            raise GrammarError("this cannot come")
        token = [*self._tokens, EOS][len(output)]
        return [(1 << token).to_bytes(VOCAB // 8, "little")]


class Given:
    def __init__(self, tokens: list[int] | None) -> None:
        self._tokens = tokens
        self.prepared: list[Grammar] = []
        self.compiled: Future[None] = Future()

    def prepare(self, grammar: Grammar) -> Future[None]:
        self.prepared.append(grammar)
        return self.compiled

    def matcher(self, grammar: Grammar, compiled: Future[None] | None = None) -> Allowing:
        assert compiled is not None
        assert compiled.done()
        if self._tokens is None:
            raise GrammarError("too much")
        return Allowing(self._tokens)


def said(outbox: Any) -> tuple[list[int], str | None, list[Failed]]:
    tokens, reason, failed = [], None, []
    for _, message in outbox.to_router:
        deltas = [message.first] if isinstance(message, HandedOver) else []
        deltas = message.deltas if isinstance(message, Tokens) else deltas
        tokens += [delta.token for delta in deltas]
        reason = deltas[-1].finish_reason if deltas else reason
        failed += [message] if isinstance(message, Failed) else []
    return tokens, reason, failed


def run(tokens: list[int] | None, first_index: int = 0, **params: Any) -> Any:
    engine = decode_engine()
    engine._grammars = given = Given(tokens)  # type: ignore[assignment]
    prompt = [1, 2, 3, *(tokens or [])[:first_index]]
    sampling = greedy(grammar=GRAMMAR, **params)
    engine.submit("router", decode_job("r", prompt, sampling, first_index=first_index), 0.0)
    assert given.prepared == [GRAMMAR]
    given.compiled.set_result(None)
    found = said(run_dry(engine))
    assert_idle(engine)
    return found


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3]])
def test_nobody_waits_for_a_grammar_that_is_being_compiled_but_its_own_request(prompt: list[int]) -> None:
    engine = decode_engine()
    engine._grammars = given = Given([5])  # type: ignore[assignment]
    woken: list[bool] = []
    engine.on_ready = lambda: woken.append(True)
    engine.submit("router", decode_job("held", prompt, greedy(grammar=GRAMMAR)), 0.0)
    engine.submit("router", decode_job("free", [4, 5], greedy(max_tokens=3)), 0.0)
    free, _, _ = said(run_dry(engine))
    assert len(free) == 3  # all of the other's, and nothing of its own
    assert engine.knows("held")
    assert not woken
    given.compiled.set_result(None)
    assert woken == [True]
    assert said(run_dry(engine)) == ([5, EOS], "stop", [])
    assert_idle(engine)


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}, {"min_tokens": 8}, {"bad_words": ((5,), (6,))}])
def test_what_must_come_comes_and_then_the_end(params: dict[str, Any]) -> None:
    assert run([5, 6, 7], **params) == ([5, 6, 7, EOS], "stop", [])


def test_ids_that_are_allowed_give_way_to_the_only_one_that_may_come() -> None:
    assert run([5, 6], allowed_token_ids=(5, 9)) == ([5, 6, EOS], "stop", [])


def test_an_answer_is_cut_where_it_has_to_be() -> None:
    assert run([5, 6, 7], max_tokens=2) == ([5, 6], "length", [])


def test_a_recovery_reads_what_was_said_before() -> None:
    assert run([5, 6, 7], first_index=2) == ([7, EOS], "stop", [])


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    engine = decode_engine()
    engine._grammars = given = Given(None)  # type: ignore[assignment]
    given.compiled.set_result(None)
    engine.submit("router", decode_job("bad", [1, 2], greedy(grammar=GRAMMAR)), 0.0)
    engine.submit("router", decode_job("good", [3, 4], greedy(3)), 0.0)
    tokens, reason, failed = said(run_dry(engine))
    assert (len(tokens), reason) == (3, "length")
    assert [(f.request_id, f.code, f.message, f.retryable) for f in failed] == [
        ("bad", "grammar_failed", "too much", False)
    ]
    assert_idle(engine)
