"""Do two servers do the same work? The same few questions to each, greedily, and the answers side by side.

Equal counts of prompt tokens mean the same template and tokenizer, equal texts the same model: what is left
to compare is speed. Two right engines may still part where the best two logits nearly tie.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from pagerelay.bench.client import Client

QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write one sentence about the year 1969.",
    "Explain why the sky is blue.",
    "Translate to French: good morning, my friend.",
    "List the steps to make tea:\n\n1. Boil water.\n2.",
    "def add(a, b):\n    # what does this function do?",
    "Who wrote Hamlet, and when?",
)
ANSWER_TOKENS = 48


class Answer(Struct, frozen=True):
    prompt_tokens: int | None
    tokens: int
    text: str


class Agreement(Struct, frozen=True):
    """Of one server's answers with the baseline's."""

    asked: int
    same_prompt_tokens: int
    same_text: int
    differing: tuple[str, ...]
    """Questions whose answers differ."""


async def ask(client: Client) -> list[Answer]:
    """One greedy answer of ``ANSWER_TOKENS`` to each question, one after another.

    Raises ``ValueError`` for a request that fails.
    """
    found = []
    for question in QUESTIONS:
        record = await client.send("", question, ANSWER_TOKENS)
        if record.outcome != "ok":
            raise ValueError(f"{client.target.base_url} did not answer {question!r}: {record.error}")
        found.append(Answer(record.prompt_tokens, record.tokens, record.text))
    return found


def agreement(answers: list[Answer], baseline: list[Answer]) -> Agreement:
    pairs = list(zip(answers, baseline, strict=True))
    return Agreement(
        asked=len(pairs),
        same_prompt_tokens=sum(ours.prompt_tokens == theirs.prompt_tokens for ours, theirs in pairs),
        same_text=sum(ours.text == theirs.text for ours, theirs in pairs),
        differing=tuple(
            question
            for question, (ours, theirs) in zip(QUESTIONS, pairs, strict=True)
            if ours.text != theirs.text
        ),
    )


def sentence(found: Mapping[str, Agreement], baseline: str) -> str:
    """One line for the reader."""
    parts = [
        f"{name} {one.same_text} of {one.asked} texts, {one.same_prompt_tokens} prompt lengths"
        for name, one in found.items()
    ]
    return f"same greedy answers as {baseline}: {'; '.join(parts)}"
