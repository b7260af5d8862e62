"""Records → figures: percentiles, goodput under an SLO, medians of repeats. Times are given out in ms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from pagerelay.bench.client import Record

Figures = dict[str, float | None]


def percentile(values: Sequence[float], q: float) -> float | None:
    """By linear interpolation between the two nearest; ``None`` for no data."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q)) if len(values) else None


def median(values: Iterable[float | None]) -> float | None:
    return percentile([value for value in values if value is not None], 50)


class Slo(Struct, frozen=True):
    """What a request must keep to count as good, in ms; ``None`` sets no limit.

    ``itl`` limits the *largest* gap between two chunks of the request, ``tpot`` its mean time per token after
    the first.
    """

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """``"ttft=2000,itl=500"``. Raises ``ValueError`` naming what is wrong."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in cls.__struct_fields__ or name in limits:
                raise ValueError(
                    f"{part.strip()!r}: write name=ms, at most once for {', '.join(cls.__struct_fields__)}"
                )
            try:
                limits[name] = float(value)
            except ValueError:
                raise ValueError(f"{part.strip()!r}: {value!r} is not a number of ms") from None
            if not limits[name] > 0:
                raise ValueError(f"{part.strip()!r}: a limit is above 0 ms")
        return cls(**limits)

    def met_by(self, record: Record) -> bool:
        """Failed and cut requests meet no SLO."""
        if record.outcome != "ok":
            return False
        pairs = (
            (self.ttft, record.ttft_s),
            (self.itl, max(record.gaps_s, default=0.0)),
            (self.tpot, record.tpot_s),
            (self.e2e, record.e2e_s),
        )
        return all(limit is None or value is None or value * 1e3 <= limit for limit, value in pairs)


class Summary(Struct, frozen=True, kw_only=True):
    """One run of one kind of traffic. Gaps (ITL) are pooled over requests; cut requests count with what they
    got.
    """

    requests: int
    ok: int
    failed: int
    cut: int
    unserved: int
    """Of the cut ones, those that got no token at all."""
    tokens: int
    tokens_per_chunk: float | None
    """Above 1, a chunk carries several tokens and ITL overstates the gap between tokens; TPOT does not."""
    prompt_tokens: float | None
    wall_s: float
    out_tok_s: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    itl_max: float | None
    tpot_p50: float | None
    e2e_p50: float | None
    e2e_p99: float | None
    good_share: float | None
    """Share of all requests that met the SLO; ``None`` without one."""
    good_per_s: float | None
    errors: tuple[str, ...]


def _ms(values: Iterable[float | None]) -> list[float]:
    return [value * 1e3 for value in values if value is not None]


def summarize(records: Sequence[Record], wall_s: float, slo: Slo | None = None) -> Summary:
    ok = [record for record in records if record.outcome == "ok"]
    cut = [record for record in records if record.outcome == "cut"]
    served = ok + [record for record in cut if record.stamps]
    ttft = _ms(record.ttft_s for record in served)
    itl = _ms(gap for record in served for gap in record.gaps_s)
    e2e = _ms(record.e2e_s for record in ok)
    tokens = sum(record.tokens for record in served)
    chunks = sum(len(record.stamps) for record in served)
    good = sum(slo.met_by(record) for record in records) if slo else None
    return Summary(
        requests=len(records),
        ok=len(ok),
        failed=len(records) - len(ok) - len(cut),
        cut=len(cut),
        unserved=len(ok) + len(cut) - len(served),
        tokens=tokens,
        tokens_per_chunk=tokens / chunks if chunks else None,
        prompt_tokens=median(record.prompt_tokens for record in ok),
        wall_s=wall_s,
        out_tok_s=tokens / wall_s if wall_s > 0 else None,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        itl_p50=percentile(itl, 50),
        itl_p99=percentile(itl, 99),
        itl_max=max(itl, default=None),
        tpot_p50=percentile(_ms(record.tpot_s for record in served), 50),
        e2e_p50=percentile(e2e, 50),
        e2e_p99=percentile(e2e, 99),
        good_share=good / len(records) if good is not None and records else None,
        good_per_s=good / wall_s if good is not None and wall_s > 0 else None,
        errors=tuple(sorted({record.error for record in records if record.error})[:3]),
    )


def figures(part: Struct, prefix: str = "") -> Figures:
    """The numbers of a struct, by name; other fields are left out."""
    found: Figures = {}
    for name, value in msgspec.structs.asdict(part).items():
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            found[prefix + name] = value
    return found


def median_of(runs: Sequence[Figures]) -> Figures:
    """Field by field, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: median(run.get(name) for run in runs) for name in names}


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
