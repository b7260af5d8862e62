"""Figures → a table to read and a JSON file to keep."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pagerelay.bench.machine import describe_machine, git_commit
from pagerelay.bench.stats import Figures

ROWS: tuple[tuple[str, str], ...] = (
    ("requests", "requests"),
    ("ok", "  ok"),
    ("failed", "  failed"),
    ("cut", "  cut by the time limit"),
    ("prompt_tokens", "prompt tokens"),
    ("out_tok_s", "output tokens/s"),
    ("ttft_p50", "TTFT p50 ms"),
    ("ttft_p99", "TTFT p99 ms"),
    ("itl_p50", "ITL p50 ms"),
    ("itl_p99", "ITL p99 ms"),
    ("itl_max", "ITL max ms"),
    ("tpot_p50", "TPOT p50 ms"),
    ("e2e_p50", "e2e p50 ms"),
    ("e2e_p99", "e2e p99 ms"),
    ("good_share", "goodput, share of requests"),
    ("good_per_s", "goodput, requests/s"),
    ("prefill_ok", "long prompts answered"),
    ("prefill_unanswered", "long prompts unanswered"),
    ("prefill_ttft_p50", "long prompts TTFT p50 ms"),
    ("lag_p99", "generator late p99 ms"),
    ("pss_mib", "server memory PSS MiB"),
    ("cpu_ms_per_tok", "server CPU ms/output token"),
    ("cpu_cores", "server CPU cores"),
    ("other_cores", "other load, cores (noise)"),
)
"""Figure → label, in the order of the table. Figures without a row stand in the JSON only."""

NOISE_CORES = 0.2


def number(value: float | None) -> str:
    """Three digits that matter, thousands marked; ``-`` for no value."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text: the first column to the left, the others to the right, a rule under the head."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a Markdown file."""
    align = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, align, *rows))


def figures_table(corner: str, columns: Mapping[str, Figures]) -> str:
    """One column a workload; only the rows that some column has a value for."""
    rows = [
        [label, *(number(column.get(name)) for column in columns.values())]
        for name, label in ROWS
        if any(column.get(name) is not None for column in columns.values())
    ]
    return table([corner, *columns], rows)


def noise_note(found: Iterable[Figures]) -> str | None:
    """A line for figures that were taken beside other work, or ``None``."""
    most = max((figures.get("other_cores") or 0.0 for figures in found), default=0.0)
    if most < NOISE_CORES:
        return None
    return f"noisy: other processes took up to {number(most)} cores; measure again on a quiet machine"


def header(**fields: Any) -> dict[str, Any]:
    """What each report file starts with: enough to run it again and to judge its figures."""
    return {
        "command": shlex.join(["python", "-m", "pagerelay.bench", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "machine": msgspec.to_builtins(describe_machine()),
        **fields,
    }


def write_json(path: str | Path, report: Mapping[str, Any]) -> Path:
    """Makes the folder where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return path


def stamped(folder: str, name: str) -> Path:
    """``folder/name-20260131-235959.json``"""
    return Path(folder) / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
