from __future__ import annotations

import pytest

from pagerelay.bench.client import Outcome, Record
from pagerelay.bench.stats import Slo, figures, median_of, percentile, ratio, summarize


def record(*stamps: float, outcome: Outcome = "ok", tokens: int | None = None, start: float = 0.0) -> Record:
    return Record(
        start=start,
        end=stamps[-1] if stamps else start,
        outcome=outcome,
        error="boom" if outcome == "failed" else None,
        stamps=list(stamps),
        tokens=len(stamps) if tokens is None else tokens,
        prompt_tokens=10,
    )


def test_percentiles_interpolate() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(value) for value in range(101)], 99) == 99.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)


def test_a_summary_counts_ok_failed_and_cut_apart() -> None:
    records = [
        record(0.1, 0.2, 0.4),
        record(0.3, 0.4, outcome="cut"),
        record(outcome="cut"),
        record(0.1, outcome="failed"),
    ]
    found = summarize(records, wall_s=2.0)
    assert (found.requests, found.ok, found.failed, found.cut, found.unserved) == (4, 1, 1, 2, 1)
    assert (found.tokens, found.out_tok_s) == (5, 2.5)
    assert found.ttft_p50 == pytest.approx(200)
    assert found.itl_max == pytest.approx(200)
    assert found.itl_p50 == pytest.approx(100)
    assert found.e2e_p50 == pytest.approx(400)
    assert found.errors == ("boom",)
    assert found.good_share is None


def test_several_tokens_in_a_chunk_show_in_tpot() -> None:
    found = summarize([record(0.0, 1.0, tokens=11)], wall_s=1.0)
    assert found.tpot_p50 == pytest.approx(100)
    assert found.itl_p50 == pytest.approx(1000)
    assert found.tokens_per_chunk == 5.5


def test_nothing_at_all_is_no_error() -> None:
    found = summarize([], wall_s=0.0, slo=Slo(ttft=1))
    assert (found.requests, found.out_tok_s, found.ttft_p50, found.good_share) == (0, None, None, None)


def test_goodput() -> None:
    records = [
        record(0.1, 0.2, 0.3),
        record(0.1, 0.2, 0.9),  # one gap too long
        record(0.5, 0.6),  # first token too late
        record(0.1, 0.2, outcome="cut"),
    ]
    found = summarize(records, wall_s=2.0, slo=Slo.parse("ttft=200, itl=500"))
    assert found.good_share == 0.25
    assert found.good_per_s == 0.5
    assert summarize(records, 2.0, Slo(tpot=150)).good_share == 0.5
    assert summarize(records, 2.0, Slo(e2e=550)).good_share == 0.25


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=x", "ttft=0", "ttft=-1", "ttft=nan", "speed=3", "ttft=1,ttft=2"]
)
def test_a_wrong_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write name=ms|not a number|above 0"):
        Slo.parse(text)


def test_figures_and_their_medians() -> None:
    found = figures(summarize([record(0.1, 0.2)], 1.0), "prefill_")
    assert found["prefill_ok"] == 1
    assert "prefill_errors" not in found
    assert median_of([{"a": 1.0, "b": None}, {"a": 3.0}, {"a": 2.0, "c": 4.0}]) == {
        "a": 2.0,
        "b": None,
        "c": 4.0,
    }
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(3.0, 0.0) is None
    assert ratio(None, 2.0) is None
