"""``roofline``'s figures as a table: one line a contender, all of a case below each other."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from pagerelay.bench.report import number
from pagerelay.bench.stats import median

STEADY = 1.2
"""A ratio whose rounds lie further apart than this factor is marked."""
MARK = "?"
BASES = ("c", "c unstacked")
HEAD = (
    "case",
    "contender",
    "ms (lowest–highest)",
    "of ceiling",
    "host ms",
    *(f"times {base}" for base in BASES),
)
NOTE = (
    f"Medians of the rounds. {MARK}: the rounds' ratios differ by more than 20 %; do not rely on it. "
    "int8 reads a quarter of the weights' bytes; the ceiling is that of fp32."
)


class Measured(Struct, kw_only=True):
    """Milliseconds of one contender at one case: a median per round. ``host_ms`` is empty where the time of
    the operations is not known."""

    contender: str
    ms: list[float]
    host_ms: list[float]


class Line(Struct, kw_only=True):
    """One case: its ceiling in each round, what sets it, and the contenders."""

    case: str
    bound: str
    ceiling_ms: list[float]
    read_gb_s: list[float]
    gflop_s: list[float]
    found: list[Measured]


def spread(values: Sequence[float]) -> str:
    """``median (lowest–highest)``"""
    if not values:
        return "-"
    return f"{number(median(values))} ({number(min(values))}–{number(max(values))})"


def ratio(values: Sequence[float], per: Sequence[float]) -> float | None:
    """The median of the rounds' ratios."""
    return median(a / b for a, b in zip(values, per, strict=True))


def steady(values: Sequence[float], per: Sequence[float]) -> bool:
    """Whether the rounds' ratios lie within :data:`STEADY` of each other."""
    ratios = [a / b for a, b in zip(values, per, strict=True)]
    return max(ratios) <= STEADY * min(ratios)


def _times(one: Measured, found: Sequence[Measured], base: str) -> str:
    per = next((other.ms for other in found if other.contender == base), None)
    if per is None or one.contender == base:
        return "-"
    return number(ratio(one.ms, per)) + ("" if steady(one.ms, per) else MARK)


def table_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Under :data:`HEAD`; a case opens with its ceiling."""
    rows = []
    for line in lines:
        blank = [""] * (len(HEAD) - 3)
        rows.append([line.case, f"ceiling: {line.bound}", spread(line.ceiling_ms), *blank])
        for one in line.found:
            share = 100 * (ratio(line.ceiling_ms, one.ms) or 0.0)
            rows.append(
                [
                    line.case,
                    one.contender,
                    spread(one.ms),
                    f"{share:.0f} %" + ("" if steady(line.ceiling_ms, one.ms) else MARK),
                    spread(one.host_ms),
                    *(_times(one, line.found, base) for base in BASES),
                ]
            )
    return rows
