"""``roofline``: a step of the model on this CPU beside what the machine can do, and beside others.

A step's ceiling is the slower of reading its bytes (weights once, each sequence's keys and values once) and
doing its arithmetic, at the rates that reading memory and a large matrix product have on the same threads.
Ceilings and contenders take turns within each of three rounds; medians are reported, and ratios are medians
of the rounds' ratios. Freed memory stays with the process meanwhile: eager attention takes blocks so large
that malloc would have the kernel zero new pages for them in one round and find room for them in another.

A step is what a worker does for it, from its rows to the logits, without sampling. ``host`` is its time
outside the compiled library's calls and torch's linears: Python, checks and copies before a call, and what
transformers' own modules compute.

* ``c``: what a worker runs. ``int8``: the same with ``--cpu-weights int8``.
* ``c unstacked``: the same operations, without the one call for all layers.
* ``torch linear``: the same as ``c unstacked``, with torch's own linears.
* ``transformers``: the model as transformers runs it eagerly, with its own cache.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM, DynamicCache

from pagerelay.bench.ceilings import Case, Ceiling, Gauge, Weights
from pagerelay.bench.machine import keep_freed_memory
from pagerelay.bench.report import header, markdown_table, stamped, table, write_json
from pagerelay.bench.roofline_table import HEAD, NOTE, Line, Measured, table_rows
from pagerelay.bench.stats import median
from pagerelay.common.config import cache_dir
from pagerelay.common.model.batch import Row, build_batch
from pagerelay.common.model.fetch import resolve_model
from pagerelay.common.model.replace import FusedStack
from pagerelay.common.model.runner import ModelFacts, ModelRunner, read_facts
from pagerelay.kernels.cpu_ops import CpuOps
from pagerelay.kernels.torch_ops import TorchOps

BLOCK_SIZE = 16
ROUNDS = 3
ROUND_S, LEAST_STEPS, MOST_STEPS = 1.0, 3, 15
DECODE = (Case(1, 256), Case(4, 256), Case(16, 256), Case(16, 1024))
PREFILL = (Case(1, 512, 512),)

Step = Callable[[], tuple[float, float | None]]
"""Computes a step; seconds of it, and of those the seconds inside operations, where that is known."""


class RooflineOptions(Struct, frozen=True):
    model: str
    threads: int
    results: str


class Clock:
    """The seconds spent in calls; set to 0 before a step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def on_the_clock(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return on_the_clock


class TimedLibrary:
    """The compiled library, its functions on a clock."""

    def __init__(self, library: Any, clock: Clock) -> None:
        self._library, self._clock = library, clock

    def __getattr__(self, name: str) -> Any:
        call = self._clock.timed(getattr(self._library, name))
        setattr(self, name, call)
        return call


def timed_ops(clock: Clock, kernels: Path, threads: int, int8_weights: bool = False) -> CpuOps:
    """The operations as a worker has them, but for the clock between them and their library."""
    ops = CpuOps(kernels, threads, int8_weights=int8_weights)
    ops._lib = TimedLibrary(ops._lib, clock)  # type: ignore[assignment]
    return ops


class Unstacked:
    """The C operations without the one call for all layers."""

    stack = run_stack = None

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class TorchLinears(Unstacked):
    """The same with torch's own linears."""

    def __init__(self, ops: CpuOps, clock: Clock) -> None:
        super().__init__(ops)
        plain = TorchOps()
        self.pack, self.linear, self.embed = plain.pack, clock.timed(plain.linear), clock.timed(plain.embed)


class PagedContender:
    """Our runner with some operations; ValueError where its layers are not, or are, one call as asked."""

    def __init__(self, folder: Path, ops: Any, clock: Clock, pool: torch.Tensor, stacked: bool) -> None:
        self._ops, self._clock, self._pool = ops, clock, pool
        self._runner = ModelRunner(folder, ops)
        if stacked != any(isinstance(part, FusedStack) for part in self._runner.model.modules()):
            raise ValueError(
                f"{folder.name}: its layers {'do not' if stacked else 'still'} run in one call, so these "
                "contenders would not be what they are called; give a model of Llama's, Mistral's or Qwen2's "
                "kind"
            )

    def prepare(self, case: Case) -> Step:
        rows = _rows(case)

        def step() -> tuple[float, float]:
            self._clock.seconds = 0.0
            start = time.perf_counter()
            self._runner.run(build_batch(rows, BLOCK_SIZE, self._ops.min_rows), self._pool)
            return time.perf_counter() - start, self._clock.seconds

        return step


class TransformersContender:
    """The model as it comes, eager, with transformers' own cache."""

    def __init__(self, folder: Path, facts: ModelFacts) -> None:
        self._facts = facts
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        names = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def weights(self) -> Weights:
        linears = [part for part in self._model.modules() if isinstance(part, torch.nn.Linear)]
        return Weights(
            linear=sum(part.weight.numel() for part in linears),
            head=self._model.get_output_embeddings().weight.numel(),
            attention_width=self._model.config.get_text_config().num_attention_heads * self._facts.head_dim,
        )

    def prepare(self, case: Case) -> Step:
        facts, past = self._facts, case.context - case.rows
        shape = (case.sequences, facts.num_kv_heads, past, facts.head_dim)
        kept = [
            (torch.randn(shape) * 0.1, torch.randn(shape) * 0.1)
            for _ in range(facts.num_layers if past else 0)
        ]
        ids = torch.arange(100, 100 + case.rows).repeat(case.sequences, 1)

        def step() -> tuple[float, None]:
            cache = _cache_of(kept)  # each step starts from the same
            start = time.perf_counter()
            with torch.inference_mode():
                self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
            return time.perf_counter() - start, None

        return step


def _cache_of(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """A ``DynamicCache`` that holds these keys and values themselves, no copies."""
    empty = torch.empty(*kept[0][0].shape[:2], 0, kept[0][0].shape[3]) if kept else None
    cache: Any = DynamicCache([(empty, empty) for _ in kept] or None)
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = keys, values
    return cache


def _rows(case: Case) -> list[Row]:
    per = -(-case.context // BLOCK_SIZE)
    order = torch.randperm(case.sequences * per, generator=torch.Generator().manual_seed(0)).tolist()
    start, ids = case.context - case.rows, list(range(100, 100 + case.rows))
    return [Row(ids, start, order[i * per : (i + 1) * per], True) for i in range(case.sequences)]


def _round(step: Step) -> tuple[float, float | None]:
    """Median milliseconds of a step and of its part outside the operations."""
    step()
    total: list[float] = []
    host: list[float | None] = []
    begun = time.perf_counter()
    while len(total) < LEAST_STEPS or (time.perf_counter() - begun < ROUND_S and len(total) < MOST_STEPS):
        seconds, inside = step()
        total.append(seconds * 1e3)
        host.append(None if inside is None else (seconds - inside) * 1e3)
    return median(total) or 0.0, median(host)


def measure_case(
    case: Case, gauge: Gauge, facts: ModelFacts, weights: Weights, contenders: dict[str, Any]
) -> Line:
    """Ceilings and contenders in turn, :data:`ROUNDS` times."""
    ceilings: list[Ceiling] = []
    found = [Measured(contender=name, ms=[], host_ms=[]) for name in contenders]
    steps = [contender.prepare(case) for contender in contenders.values()]
    for _ in range(ROUNDS):
        ceilings.append(gauge.measure())
        for one, step in zip(found, steps, strict=True):
            ms, host_ms = _round(step)
            one.ms.append(ms)
            if host_ms is not None:
                one.host_ms.append(host_ms)
    bytes_read, flops = case.bytes_read(facts, weights), case.flops(facts, weights)
    bounds = [ceiling.bounds_ms(bytes_read, flops) for ceiling in ceilings]
    limits = [max(bound, key=bound.__getitem__) for bound in bounds]
    return Line(
        case=case.name,
        bound=max(limits, key=limits.count),
        ceiling_ms=[max(bound.values()) for bound in bounds],
        read_gb_s=[ceiling.read_gb_s for ceiling in ceilings],
        gflop_s=[ceiling.gflop_s for ceiling in ceilings],
        found=found,
    )


def measure_roofline(options: RooflineOptions) -> int:
    """Prints the table and writes it, and the report."""
    torch.set_num_threads(options.threads)
    folder = resolve_model(options.model, progress=lambda line: print(line, file=sys.stderr, flush=True))
    facts = read_facts(folder, None)
    blocks = max(case.sequences * -(-case.context // BLOCK_SIZE) for case in (*DECODE, *PREFILL))
    pool = torch.randn(blocks, facts.num_layers, 2, facts.num_kv_heads, BLOCK_SIZE, facts.head_dim) * 0.1
    clock, kernels, threads = Clock(), cache_dir() / "kernels", options.threads
    ops = timed_ops(clock, kernels, threads)
    plain = TransformersContender(folder, facts)

    def paged(chosen: Any, stacked: bool) -> PagedContender:
        return PagedContender(folder, chosen, clock, pool, stacked)

    contenders: dict[str, PagedContender | TransformersContender] = {
        "c": paged(ops, True),
        "int8": paged(timed_ops(clock, kernels, threads, int8_weights=True), True),
        "c unstacked": paged(Unstacked(ops), False),
        "torch linear": paged(TorchLinears(ops, clock), False),
        "transformers": plain,
    }
    kept = keep_freed_memory()  # after the weights, which then lie as a worker's do
    gauge, weights, lines = Gauge(), plain.weights(), []
    for case in (*DECODE, *PREFILL):
        lines.append(measure_case(case, gauge, facts, weights, contenders))
        print(f"{case.name}: done", file=sys.stderr, flush=True)
    rows = table_rows(lines)
    print(f"{table(HEAD, rows)}\n\n{NOTE}")
    report = header(
        options=options,
        instruction_set=ops.instruction_set,
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        keeps_freed_memory=kept,
        cases=lines,
    )
    path = write_json(stamped(options.results, "roofline"), report)
    words = f"`{report['command']}`, {report['date']}, {report['machine']['cpu']}, {ops.instruction_set}"
    path.with_suffix(".md").write_text(
        f"{words}\n\n{markdown_table(HEAD, rows)}\n\n{NOTE}\n", encoding="utf-8"
    )
    print(f"written: {path} and {path.with_suffix('.md').name}")
    return 0
