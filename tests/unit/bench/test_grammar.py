"""The bench of grammars, on a cluster of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagerelay.bench.grammar import WAYS, GrammarOptions, measure_grammar


@pytest.mark.slow
async def test_a_small_run_asks_in_every_way(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = GrammarOptions(
        model_path=str(tiny_dir), rounds=1, clients=2, max_tokens=8, results=str(tmp_path)
    )
    assert await measure_grammar(options) in (0, 1)  # which is a matter of time
    (written,) = tmp_path.iterdir()
    samples = json.loads(written.read_text())["samples"]
    assert samples.keys() == {"1", "2"}
    assert all(len(of[way]) == 1 for of in samples.values() for way in WAYS)
    assert "ratio, median" in capsys.readouterr().out
