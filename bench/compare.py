"""``compare``: starts several servers in turn, runs the same traffic on each, sets the figures side by side.

Rounds alternate (A B, A B, …), so that a machine which grows slower over time does not favour one of them.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from msgspec import Struct

from pagerelay.bench.agree import Agreement, Answer, agreement, ask, sentence
from pagerelay.bench.client import Client, Target, open_session, served_model
from pagerelay.bench.load import LoadOptions, Measured, measure
from pagerelay.bench.report import ROWS, header, noise_note, number, stamped, table, write_json
from pagerelay.bench.server import free_port, running, split_command
from pagerelay.bench.stats import Figures, median, median_of, ratio
from pagerelay.bench.workloads import Shape, Sizes

INTERFERENCE = (("W4l", "W4b"), ("W4", "W4b"))


class Spec(Struct, frozen=True):
    """One server to compare: ``NAME=[VAR=VALUE …] COMMAND … {port} …``"""

    name: str
    command: str

    @classmethod
    def parse(cls, text: str) -> Spec:
        name, separator, command = text.partition("=")
        if not separator or not name.strip():
            raise ValueError(f"{text!r}: write NAME=COMMAND")
        if "{port}" not in command:
            raise ValueError(f"{name}: the command must hold {{port}}, where the server's HTTP port goes")
        split_command(command)
        return cls(name.strip(), command.strip())

    def at(self, port: int) -> tuple[dict[str, str], list[str]]:
        """Environment and words for this port. Only ``{port}`` is replaced, other braces stay."""
        return split_command(self.command.replace("{port}", str(port)))


class CompareOptions(Struct, frozen=True, kw_only=True):
    specs: tuple[Spec, ...]
    shapes: dict[str, Shape]
    rounds: int
    ready_s: float
    results: str
    seed: int
    model: str | None
    api: Any
    extra_body: dict[str, Any]
    slo: Any
    max_s: float
    timeout_s: float
    agree: bool = False
    """Ask each server the same questions in its first round."""


class Round(Struct, frozen=True):
    """One start of one server."""

    ready_s: float
    workloads: dict[str, Measured]
    answers: list[Answer] = []

    def figures(self, workload: str) -> Figures:
        return self.workloads[workload].median


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def one_round(spec: Spec, turn: int, options: CompareOptions, sizes: dict[str, Sizes]) -> Round:
    port = free_port()
    environment, words = spec.at(port)
    _say(f"{spec.name}, round {turn + 1}/{options.rounds}: starting")
    async with running(words, port, environment) as server:
        ready_s = await server.wait_ready(options.ready_s)
        _say(f"{spec.name}: ready after {ready_s:.1f} s")
        traffic = LoadOptions(
            base_url=f"{server.url}/v1",
            shapes=options.shapes,
            seed=options.seed + turn,
            model=options.model,
            api=options.api,
            extra_body=options.extra_body,
            pid=server.pid,
            slo=options.slo,
            max_s=options.max_s,
            timeout_s=options.timeout_s,
        )
        answers = await _answers(traffic) if options.agree and turn == 0 else []
        measured = await measure(traffic, lambda line: _say(f"{spec.name} {line}"), sizes)
        return Round(ready_s, measured, answers)


async def _answers(options: LoadOptions) -> list[Answer]:
    async with open_session() as session:
        model = options.model or await served_model(session, options.base_url)
        # Servers differ in what they do at an end token that is to be ignored; here each may end.
        body = options.extra_body | {"ignore_eos": None}
        target = Target(options.base_url, model, options.api, body)
        return await ask(Client(target, session, options.timeout_s))


def _agreements(rounds: dict[str, list[Round]]) -> dict[str, Agreement]:
    """Of each server with the last, the baseline."""
    *others, baseline = rounds
    wanted = rounds[baseline][0].answers
    return {name: agreement(rounds[name][0].answers, wanted) for name in others}


def interference(rounds: list[Round], loaded: str, alone: str) -> list[float]:
    """ITL p99 beside long prompts over ITL p99 without them, a round: 1 means that they do not matter."""
    found = []
    for one in rounds:
        if loaded in one.workloads and alone in one.workloads:
            value = ratio(one.figures(loaded).get("itl_p99"), one.figures(alone).get("itl_p99"))
            if value is not None:
                found.append(value)
    return found


def _cell(values: list[float | None]) -> str:
    """Median, and the span where there is more than one round."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or min(known) == max(known):
        return number(median(known))
    return f"{number(median(known))} ({number(min(known))}-{number(max(known))})"


def side_by_side(rounds: dict[str, list[Round]], workloads: list[str]) -> str:
    """One block a workload; the ratio columns divide each server's median by that of the last server, the
    baseline.
    """
    names = list(rounds)
    baseline = names[-1]
    head = [*names, *(f"{name}/{baseline}" for name in names[:-1])]

    def row(label: str, values: dict[str, list[float | None]]) -> list[str]:
        middle = {name: median(found) for name, found in values.items()}
        ratios = [number(ratio(middle[name], middle[baseline])) for name in names[:-1]]
        return [label, *(_cell(values[name]) for name in names), *ratios]

    blocks = []
    for workload in workloads:
        rows = []
        for figure, label in ROWS:
            values = {name: [one.figures(workload).get(figure) for one in rounds[name]] for name in names}
            if any(value is not None for found in values.values() for value in found):
                rows.append(row(label, values))
        blocks.append(table([workload, *head], rows))
    derived = []
    for loaded, alone in INTERFERENCE:
        spread = {name: [*interference(rounds[name], loaded, alone)] for name in names}
        if all(spread.values()):
            derived.append(
                row(f"ITL p99, {loaded} / {alone}", {name: list(found) for name, found in spread.items()})
            )
    if derived:
        blocks.append(table(["decode beside prefill", *head], derived))
    return "\n\n".join(blocks)


async def compare(options: CompareOptions) -> int:
    """Prints the tables, writes the report; 0 if no request failed."""
    rounds: dict[str, list[Round]] = {spec.name: [] for spec in options.specs}
    sizes: dict[str, dict[str, Sizes]] = {spec.name: {} for spec in options.specs}
    for turn in range(options.rounds):
        for spec in options.specs:
            rounds[spec.name].append(await one_round(spec, turn, options, sizes[spec.name]))
    print(side_by_side(rounds, list(options.shapes)))
    if options.rounds > 1:
        print(f"\nmedian of {options.rounds} rounds (lowest-highest)")
    agreements = _agreements(rounds) if options.agree else {}
    if agreements:
        print(sentence(agreements, options.specs[-1].name))
    done = [one.figures(name) for found in rounds.values() for one in found for name in options.shapes]
    if note := noise_note(done):
        print(note)
    servers = {
        name: {
            "median": {
                workload: median_of([one.figures(workload) for one in found]) for workload in options.shapes
            },
            "interference": {f"{a}/{b}": median(interference(found, a, b)) for a, b in INTERFERENCE},
            "agreement": agreements.get(name),
            "rounds": found,
        }
        for name, found in rounds.items()
    }
    report = header(options=msgspec.to_builtins(options), servers=servers)
    print(f"written: {write_json(stamped(options.results, 'compare'), report)}")
    return (
        1
        if any(one.failed for found in rounds.values() for turn in found for one in turn.workloads.values())
        else 0
    )
