"""Answers with several features at once that guess tokens, are preempted, or lose their decode worker: what
the client has in the end is what one undisturbed worker says, which guesses none."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos import stormy
from cluster import Cluster
from faults import Plan, Point
from features import FEATURES, GENERATE, GRAMMARS, TOOLS, Fields, ask, request, together

PROMPT = [*range(40, 60), 260, 1000, 7, 260, 1000, 7, 260]
TEXT = "the one and the other and the one and the other"
FEW: Fields = {"allowed_token_ids": [7, 260, 1000]}
"""Answers of three tokens: many guesses are right, and many wrong."""
GUESSING = {"engine__speculative": "ngram", "engine__prompt_lookup_min": 1}
MANY = 16
HEARD = 6
"""Tokens of each case's stream before its decode worker is killed."""
STREAMED: Fields = {"stream": True, "stream_options": {"include_usage": True}}
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 40}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": _NUMBERS}, "required": ["x"]},
    },
}
_CALL = r'<tool_call>\{"name": "f", "arguments": \{"x": [0-9]{16,20}\}\}</tool_call>'
_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
_LONG = {"max_tokens": 300, "temperature": 0.9}
CASES: dict[str, Fields] = {
    "sampling": {"logit_bias": {"260": 1.0}, "logprobs": 2} | _PENALTIES | _LONG,
    "grammar": {"guided_json": _NUMBERS, "logprobs": 2} | _PENALTIES | _LONG,
    "guesses": _LONG | {"guided_regex": "(ab|ba| ab| ba){200,400}", "max_tokens": 400},
    "tools": {"tools": [_TOOL], "structured_outputs": {"regex": f"({_CALL}){{4}}"}}
    | _LONG
    | {"max_tokens": 240},
    "tools forced": {"tools": [_TOOL], "tool_choice": "required", "logprobs": 1} | _LONG,
    "n": {"n": 3, "logprobs": 1} | _LONG,
    "stop": _LONG,
    "beams": {"num_beams": 3, "n": 3, "max_tokens": 300},
}
SEEDS = {name: 700 + number for number, name in enumerate(CASES)}
SHORT_AT = {"guesses": "token:250", "beams": "RUNNING"}
"""When there is no block for a case's next token; else at "token:60"."""


@pytest.fixture(scope="module")
def doomed(tools_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two decode workers that guess, and have no block for a case once in each of its answers."""
    points = {
        str(seed): (Point(role="decode", at=SHORT_AT.get(name, "token:60"), does="starve"),)
        for name, seed in SEEDS.items()
    }
    plan = Plan(seed=0, points=points, folder=str(tmp_path_factory.mktemp("plan")))
    shape = {"cluster__prefill": 1, "cluster__decode": 2, "cache__num_blocks": 2000}
    with stormy(tools_dir, plan, **shape, **GUESSING) as cluster:
        yield cluster


@dataclass(frozen=True)
class Asked:
    route: str
    body: Fields
    alone: Any
    """What an undisturbed worker says."""

    @property
    def streamed(self) -> Fields:
        return self.body if "num_beams" in self.body else self.body | STREAMED


async def asked_alone(colocated: Cluster, seeds: dict[str, int]) -> dict[str, Asked]:
    made = {name: request(PROMPT, TEXT, fields | {"seed": seeds[name]}) for name, fields in CASES.items()}
    text = (await ask(colocated, *made["stop"]))["choices"][0]["text"]
    # The first is there but for its last character, the second to its end: all is held back for long.
    made["stop"][1]["stop"] = [text[20:700] + "\0", text[30:800]]
    alone = await asyncio.gather(*(ask(colocated, *one) for one in made.values()))
    found = {name: Asked(*made[name], answer) for name, answer in zip(made, alone, strict=True)}
    assert found["stop"].alone["choices"][0]["finish_reason"] == "stop"
    assert len(found["tools"].alone["choices"][0]["message"]["tool_calls"]) == 4
    return found


async def test_guesses_change_nothing_beside_any_feature(doomed: Cluster, colocated: Cluster) -> None:
    gate = asyncio.Semaphore(8)

    async def one(name: str) -> None:
        fields = together(name) if name in GRAMMARS | TOOLS else FEW | together(name)
        route, body = request(PROMPT, TEXT, {"max_tokens": 24} | fields)
        async with gate:
            assert await ask(doomed, route, body) == await ask(colocated, route, body), name

    await asyncio.gather(*map(one, FEATURES))

    async def guessed() -> bool:
        return await doomed.metric("pagerelay_accepted_tokens_total") > 20

    await doomed.until("some guesses were right", guessed)


async def test_preempted_in_mid_stream(doomed: Cluster, colocated: Cluster) -> None:
    """One after the other: who is preempted is the youngest."""
    asked = await asked_alone(colocated, SEEDS)
    for times, (name, one) in enumerate(asked.items(), 1):
        assert await ask(doomed, one.route, one.streamed) == one.alone, name
        assert await doomed.metric("pagerelay_recoveries_total", cause="preempted") >= times, name
    await doomed.idle()


async def test_killed_in_mid_stream(doomed: Cluster, colocated: Cluster) -> None:
    """Runs last here: the cluster is one worker short afterwards."""
    # The plan knows nothing of these seeds: nobody is preempted.
    unmarked = {name: seed + 100 for name, seed in SEEDS.items()}
    asked = await asked_alone(colocated, unmarked)
    filler = {"prompt": PROMPT, "max_tokens": 3000, "n": MANY, "stream": True, "ignore_eos": True}
    fills = asyncio.Event()
    filling = asyncio.create_task(ask(doomed, GENERATE, filler, lambda _: fills.set()))
    await fills.wait()

    async def filled() -> bool:
        return any(worker["requests"] == MANY for worker in await doomed.workers("decode"))

    # It has more to do than the other will have: that one gets all cases.
    await doomed.until("all choices of the filler are on one worker", filled)
    heard = dict.fromkeys(asked, 0)

    def hear(name: str, event: Any) -> None:
        heard[name] += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])

    tasks: dict[str, asyncio.Task[Any]] = {}

    async def begin(names: list[str]) -> None:
        for name in names:
            one = asked[name]
            tasks[name] = asyncio.create_task(ask(doomed, one.route, one.streamed, partial(hear, name)))
        while min(heard[name] for name in names if name != "beams") < HEARD:
            assert not any(task.done() for task in tasks.values())
            await asyncio.sleep(0.002)

    constrained = ["grammar", "guesses", "tools", "tools forced"]
    await begin(constrained)  # their grammars are built first, for which the others would not wait
    await begin([name for name in asked if name not in constrained])
    lost = len(CASES) + 2  # one has three choices

    async def killed() -> bool:
        for worker in await doomed.workers("decode"):
            if worker["requests"] == lost:
                doomed.signal(worker["id"], signal.SIGKILL)
                return True
        return False

    await doomed.until(f"all are on one worker: {heard}", killed)
    filling.cancel()
    for name, task in tasks.items():
        assert await task == asked[name].alone, name
    assert await doomed.metric("pagerelay_recoveries_total", cause="worker_lost") == lost
    await asyncio.gather(filling, return_exceptions=True)
    await doomed.idle()
