"""The bench of guessed tokens, on clusters of the tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pagerelay.bench import speculation
from pagerelay.bench.speculation import WORKLOADS, Sample, SpeculationOptions, measure_speculation


def test_the_questions_depend_on_the_seed_alone() -> None:
    for make in WORKLOADS.values():
        first, again, other = (make(random.Random(seed), 0)["text"] for seed in (1, 1, 2))
        assert first == again != other
    assert Sample(3.0, 2.0, 10, True).speedup == 1.5


@pytest.mark.slow
async def test_a_small_run_asks_both_the_same(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "SENTENCES", ("ab", "cd", "ef", "gh", "ij", "kl"))
    options = SpeculationOptions(
        model_path=str(tiny_dir), questions=2, clients=2, max_tokens=8, results=str(tmp_path)
    )
    assert await measure_speculation(options) in (0, 1)  # which is a matter of time
    (written,) = tmp_path.iterdir()
    samples = json.loads(written.read_text())["samples"]
    assert samples.keys() == WORKLOADS.keys()
    assert all(sample["equal"] for found in samples.values() for sample in found)
    assert "answers that differ" in capsys.readouterr().out
