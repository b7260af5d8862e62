"""``load``: traffic to a running server."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from pagerelay.bench.client import Api, Client, Target, open_session, served_model
from pagerelay.bench.machine import Monitor
from pagerelay.bench.report import figures_table, header, noise_note, number, write_json
from pagerelay.bench.stats import Figures, Slo, figures, median_of, percentile, ratio, summarize
from pagerelay.bench.workloads import Shape, Sizes, measure_sizes, random_words, run_shape

Say = Callable[[str], None]


class LoadOptions(Struct, frozen=True, kw_only=True):
    """Checked options of one measuring of one server."""

    base_url: str
    shapes: Mapping[str, Shape]
    seed: int
    model: str | None = None
    api: Api = "chat"
    extra_body: dict[str, Any] = field(default_factory=dict)
    repeat: int = 1
    pid: int | None = None
    slo: Slo | None = None
    max_s: float = 150.0
    timeout_s: float = 300.0
    api_key_env: str | None = None


class OneRun(Struct, frozen=True):
    figures: Figures
    errors: tuple[str, ...]
    sample: str
    load_before: float


class Measured(Struct, frozen=True):
    """Everything about one workload on one server."""

    median: Figures
    runs: list[OneRun]

    @property
    def failed(self) -> int:
        return sum(int(run.figures.get("failed") or 0) for run in self.runs)


async def run_once(
    client: Client, shape: Shape, sizes: Sizes, rng: random.Random, options: LoadOptions
) -> OneRun:
    load_before = os.getloadavg()[0]
    async with Monitor(options.pid) as monitor:
        result = await run_shape(client.send, shape, sizes, rng, options.max_s)
    records, wall_s = result.run.records, result.run.wall_s
    summary = summarize(records, wall_s, options.slo)
    found = figures(summary) | figures(monitor.usage)
    found["unsent"] = result.run.unsent
    if result.run.lags_s:
        found["lag_p99"] = (percentile(result.run.lags_s, 99) or 0.0) * 1e3
    tokens, errors = summary.tokens, summary.errors
    if shape.interfere_every_s is not None:
        beside = summarize(result.interfering, wall_s)
        found |= figures(beside, "prefill_")
        found["prefill_unanswered"] = result.unanswered
        tokens, errors = tokens + beside.tokens, errors + beside.errors
    if monitor.usage.cpu_s is not None:
        found["cpu_ms_per_tok"] = ratio(monitor.usage.cpu_s * 1e3, tokens)
    return OneRun(found, errors, records[0].text[:120] if records else "", load_before)


async def measure(
    options: LoadOptions, say: Say, sizes_known: dict[str, Sizes] | None = None
) -> dict[str, Measured]:
    """Warms the server up, calibrates, runs each workload ``repeat`` times.

    ``sizes_known`` carries calibrations from one start of the same server to the next. Raises ``ValueError``
    if the server does not answer the warm-up.
    """
    sizes_known = {} if sizes_known is None else sizes_known
    api_key = os.environ.get(options.api_key_env) if options.api_key_env else None
    measured: dict[str, Measured] = {}
    async with open_session(api_key=api_key) as session:
        model = options.model or await served_model(session, options.base_url)
        client = Client(
            Target(options.base_url, model, options.api, options.extra_body), session, options.timeout_s
        )
        warm_up = await client.send("", random_words(random.Random(1), 16), 8)  # noqa: S311 - a prompt
        if warm_up.outcome != "ok":
            raise ValueError(f"the warm-up request to {options.base_url} failed: {warm_up.error}")
        for name, shape in options.shapes.items():
            if name not in sizes_known:
                sizes_known[name] = await measure_sizes(client.send, shape)
            runs = []
            for turn in range(options.repeat):
                rng = random.Random(f"{options.seed}/{name}/{turn}")  # noqa: S311 - prompts and arrivals
                runs.append(await run_once(client, shape, sizes_known[name], rng, options))
                say(f"{name} {turn + 1}/{options.repeat}: {one_line(runs[-1])}")
            measured[name] = Measured(median_of([run.figures for run in runs]), runs)
    return measured


def one_line(run: OneRun) -> str:
    shown = (
        "ok",
        "failed",
        "cut",
        "wall_s",
        "out_tok_s",
        "ttft_p50",
        "itl_p50",
        "itl_p99",
        "itl_max",
        "other_cores",
    )
    words = [f"{name}={number(run.figures[name])}" for name in shown if run.figures.get(name) is not None]
    return " ".join(words + [f"error: {error}" for error in run.errors])


async def load(options: LoadOptions, label: str, json_path: str | None) -> int:
    """Prints the table; 0 if no request failed."""
    measured = await measure(options, lambda line: print(line, file=sys.stderr, flush=True))
    print(figures_table(label or "median of runs", {name: one.median for name, one in measured.items()}))
    if options.slo:
        limits = ", ".join(
            f"{name} ≤ {number(value)} ms" for name, value in figures(options.slo).items() if value
        )
        print(f"goodput: requests with {limits}")
    if note := noise_note(run.figures for one in measured.values() for run in one.runs):
        print(note)
    if json_path:
        print(f"written: {write_json(json_path, header(label=label, options=options, workloads=measured))}")
    return 1 if any(one.failed for one in measured.values()) else 0
