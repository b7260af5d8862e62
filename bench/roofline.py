"""``roofline``: a step of the model on this CPU beside what the machine can do, and beside others.

The ceilings are measured in the same run, on the same threads: reading memory, and a large matrix product. A
step's ceiling is the slower of reading its bytes (weights once, each sequence's keys and values once) and
doing its arithmetic. Contenders take turns within each of three rounds; medians are reported, and ratios are
medians of the rounds' ratios. ``host`` is the time of a step outside the operations' calls.

* ``c``: what a worker runs. ``int8``: the same with ``--cpu-weights int8``.
* ``torch linear``: the same with torch's own linears and no call for the whole stack.
* ``transformers``: the model as transformers runs it eagerly, with its own cache.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM, DynamicCache

from pagerelay.bench.report import header, number, stamped, table, write_json
from pagerelay.bench.stats import median
from pagerelay.common.config import cache_dir
from pagerelay.common.model.batch import Batch, Row, build_batch
from pagerelay.common.model.fetch import resolve_model
from pagerelay.common.model.runner import ModelFacts, ModelRunner, read_facts
from pagerelay.kernels.cpu_ops import CpuOps
from pagerelay.kernels.torch_ops import TorchOps

BLOCK_SIZE = 16
ROUNDS = 3
READ_BYTES = 1 << 30


class RooflineOptions(Struct, frozen=True):
    model: str
    threads: int
    results: str


class Case(Struct, frozen=True):
    """``sequences`` that each compute their last ``rows`` tokens of ``context``."""

    sequences: int
    context: int
    rows: int = 1

    @property
    def name(self) -> str:
        if self.rows > 1:
            return f"prefill {self.rows}" + (f" of {self.context}" if self.context > self.rows else "")
        return f"decode {self.sequences} x {self.context}"

    def bytes_read(self, facts: ModelFacts, weights: int) -> int:
        """Of fp32 weights and keys and values, each once."""
        return 4 * weights + self.sequences * self.context * facts.layout(1).block_bytes

    def flops(self, facts: ModelFacts, weights: int, head: int, width: int) -> float:
        """Multiplications and additions; only one row of a sequence goes through the ``head`` weights, and a
        row's attention, ``width`` wide, sees what came before it."""
        rows, seen = self.sequences * self.rows, self.context - (self.rows - 1) / 2
        linear = 2 * (rows * (weights - head) + self.sequences * head)
        return linear + 4 * rows * seen * width * facts.num_layers


DECODE = (Case(1, 256), Case(4, 256), Case(16, 256), Case(16, 1024))
PREFILL = (Case(1, 512, 512),)


class Measured(Struct, kw_only=True):
    """Milliseconds of one contender at one case: a median per round."""

    contender: str
    ms: list[float]
    host_ms: list[float]


class Line(Struct, kw_only=True):
    """One case: its ceiling and the contenders."""

    case: str
    ceiling_ms: float
    bound: str
    found: list[Measured]


class TimedOps:
    """Operations with a clock: the seconds spent in their calls."""

    def __init__(self, ops: Any, without: tuple[str, ...] = ()) -> None:
        self._ops, self._without = ops, without
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(name)
        value = getattr(self._ops, name)
        if not callable(value):
            return value

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return value(*args)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(self, name, timed)
        return timed


class TorchLinears:
    """The C operations with torch's own linears."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        plain = TorchOps()
        self.pack, self.linear, self.embed = plain.pack, plain.linear, plain.embed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class PagedContender:
    """Our runner with some operations."""

    def __init__(self, folder: Path, facts: ModelFacts, ops: TimedOps, pool: torch.Tensor) -> None:
        self._ops, self._pool = ops, pool
        self._runner: ModelRunner = ModelRunner(folder, ops)

    def prepare(self, case: Case) -> Callable[[], float]:
        """A step; it returns the seconds spent in the operations."""
        batch = _batch(case)

        def step() -> float:
            self._ops.seconds = 0.0
            self._runner.run(batch, self._pool)
            return self._ops.seconds

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

    def prepare(self, case: Case) -> Callable[[], float]:
        facts, past = self._facts, case.context - case.rows
        cache = DynamicCache()
        shape = (case.sequences, facts.num_kv_heads, past, facts.head_dim)
        for layer in range(facts.num_layers if past else 0):
            cache.update(torch.randn(shape) * 0.1, torch.randn(shape) * 0.1, layer)
        ids = torch.arange(100, 100 + case.rows).repeat(case.sequences, 1)
        arguments = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1, self._cache_argument: cache}

        def step() -> float:
            with torch.inference_mode():
                self._model(**arguments)
            if past:
                cache.crop(-case.rows)
            else:
                arguments[self._cache_argument] = DynamicCache()
            return 0.0

        return step


def _batch(case: Case) -> Batch:
    per = -(-case.context // BLOCK_SIZE)
    order = torch.randperm(case.sequences * per, generator=torch.Generator().manual_seed(0)).tolist()
    start, ids = case.context - case.rows, list(range(100, 100 + case.rows))
    rows = [Row(ids, start, order[i * per : (i + 1) * per], True) for i in range(case.sequences)]
    return build_batch(rows, BLOCK_SIZE, 1)


def _best_s(work: Callable[[], object], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def read_gb_s() -> float:
    """Best of three ways to read 1 GiB: a sum in torch, one of many rows, and a product with one vector."""
    block = torch.ones(READ_BYTES // 4)
    rows, vector = block.view(-1, 1024), torch.ones(1024)
    ways = (block.sum, lambda: rows.sum(1), lambda: rows @ vector)
    return READ_BYTES / min(_best_s(way) for way in ways) / 1e9


def product_gflop_s() -> float:
    """The best of three square matrix products, fp32."""
    best = 0.0
    for size in (1024, 1536, 2048):
        a, b = torch.randn(size, size), torch.randn(size, size)
        best = max(best, 2 * size**3 / _best_s(lambda a=a, b=b: a @ b) / 1e9)  # type: ignore[misc]
    return best


def _round(step: Callable[[], float]) -> tuple[float, float]:
    """Median milliseconds of a step and of its part outside the operations."""
    step()
    total: list[float] = []
    host: list[float] = []
    begun = time.perf_counter()
    while len(total) < 3 or (time.perf_counter() - begun < 1.0 and len(total) < 15):
        start = time.perf_counter()
        inside = step()
        total.append((time.perf_counter() - start) * 1e3)
        host.append(total[-1] - inside * 1e3)
    return median(total) or 0.0, median(host) or 0.0


def _ratio(found: list[Measured], name: str) -> float | None:
    """How many times faster than ``name`` the first contender is: the median of the rounds."""
    other = next((one for one in found if one.contender == name), None)
    return None if other is None else median(b / a for a, b in zip(found[0].ms, other.ms, strict=True))


def roofline_table(rows: list[Line]) -> str:
    """One line a case."""
    lines = []
    for row in rows:
        ms = {one.contender: median(one.ms) for one in row.found}
        ours = ms["c"] or 0.0
        lines.append(
            [
                row.case,
                f"{number(row.ceiling_ms)} ({row.bound})",
                number(ours),
                f"{100 * row.ceiling_ms / ours:.0f} %",
                number(median(row.found[0].host_ms)),
                number(ms.get("int8")),
                *(
                    f"{number(ms.get(name))} ({number(_ratio(row.found, name))}x)"
                    for name in ("torch linear", "transformers")
                ),
            ]
        )
    head = ["case", "ceiling ms (bound by)", "c ms", "of ceiling", "host ms", "int8 ms"]
    return table([*head, "torch linear ms", "transformers ms"], lines)


def measure_roofline(options: RooflineOptions) -> int:
    """Prints the table and writes the report."""
    torch.set_num_threads(options.threads)
    folder = resolve_model(options.model, progress=lambda line: print(line, file=sys.stderr, flush=True))
    facts = read_facts(folder, None)
    blocks = max(case.sequences * -(-case.context // BLOCK_SIZE) for case in (*DECODE, *PREFILL))
    pool = torch.randn(blocks, facts.num_layers, 2, facts.num_kv_heads, BLOCK_SIZE, facts.head_dim) * 0.1
    kernels, threads = cache_dir() / "kernels", options.threads
    ops = CpuOps(kernels, threads)
    plain = TransformersContender(folder, facts)
    contenders: dict[str, PagedContender | TransformersContender] = {
        "c": PagedContender(folder, facts, TimedOps(ops), pool),
        "int8": PagedContender(folder, facts, TimedOps(CpuOps(kernels, threads, int8_weights=True)), pool),
        "torch linear": PagedContender(
            folder, facts, TimedOps(TorchLinears(ops), ("stack", "run_stack")), pool
        ),
        "transformers": plain,
    }
    config = plain._model.config.get_text_config()
    head = plain._model.get_output_embeddings().weight.numel()
    weights = sum(
        module.weight.numel() for module in plain._model.modules() if isinstance(module, torch.nn.Linear)
    )
    gb_s, gflop_s = read_gb_s(), product_gflop_s()
    print(f"{threads} threads read {gb_s:.1f} GB/s and multiply at {gflop_s:.0f} GFLOP/s", flush=True)
    rows = []
    for case in (*DECODE, *PREFILL):
        reading = case.bytes_read(facts, weights) / gb_s / 1e6
        width = config.num_attention_heads * facts.head_dim
        arithmetic = case.flops(facts, weights, head, width) / gflop_s / 1e6
        found = [Measured(contender=name, ms=[], host_ms=[]) for name in contenders]
        steps = [contender.prepare(case) for contender in contenders.values()]
        for _ in range(ROUNDS):
            for one, step in zip(found, steps, strict=True):
                ms, host_ms = _round(step)
                one.ms.append(ms)
                one.host_ms.append(host_ms)
        bound = "reading" if reading > arithmetic else "arithmetic"
        rows.append(Line(case=case.name, ceiling_ms=max(reading, arithmetic), bound=bound, found=found))
        print(f"{case.name}: done", file=sys.stderr, flush=True)
    print(roofline_table(rows))
    report = header(
        options=options,
        instruction_set=ops.instruction_set,
        read_gb_s=gb_s,
        product_gflop_s=gflop_s,
        cases=rows,
    )
    print(f"written: {write_json(stamped(options.results, 'roofline'), report)}")
    return 0
