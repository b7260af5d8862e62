from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pagerelay.bench.__main__ import main
from pagerelay.bench.agree import ANSWER_TOKENS, QUESTIONS, Answer, agreement, ask, sentence
from pagerelay.bench.client import Client

SCRIPT = Path(__file__).with_name("word_server.py")


def test_answers_are_counted_question_by_question() -> None:
    baseline = [Answer(20, 4, "a b c d")] * len(QUESTIONS)
    ours = [Answer(21, 4, "a b c d"), Answer(20, 4, "a b c e"), *baseline[2:]]
    found = agreement(ours, baseline)
    assert (found.asked, found.same_prompt_tokens, found.same_text) == (8, 7, 7)
    assert found.differing == (QUESTIONS[1],)
    assert sentence({"split": found}, "peer") == (
        "same greedy answers as peer: split 7 of 8 texts, 7 prompt lengths"
    )


async def test_a_server_that_fails_is_an_error(client: Client, fake: object) -> None:
    answers = await ask(client)
    assert [answer.tokens for answer in answers] == [ANSWER_TOKENS] * len(QUESTIONS)
    fake.mode = "500"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="did not answer 'What is the capital of France"):
        await ask(client)


def test_compare_asks_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [f"--spec={name}={sys.executable} {SCRIPT} {{port}}" for name in ("one", "two")]
    arguments = [*specs, "--workload", "W4b", "--requests", "3", "--agree", "--rounds", "2"]
    assert main(["compare", *arguments, "--results", str(tmp_path)]) == 0
    assert "same greedy answers as two: one 8 of 8 texts, 8 prompt lengths" in capsys.readouterr().out
    [path] = tmp_path.glob("compare-*.json")
    servers = json.loads(path.read_text())["servers"]
    assert servers["one"]["agreement"]["same_text"] == 8
    assert servers["two"]["agreement"] is None
    assert servers["one"]["median"]["W4b"]["requests"] == 3
    assert [len(turn["answers"]) for turn in servers["one"]["rounds"]] == [8, 0]
