from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagerelay.bench import __main__ as commands
from pagerelay.bench import roofline
from pagerelay.bench.ceilings import Case, Ceiling, Gauge, Weights
from pagerelay.bench.roofline import Clock, PagedContender, TimedLibrary, TorchLinears, Unstacked
from pagerelay.bench.roofline_table import HEAD, Line, Measured, ratio, spread, steady, table_rows
from pagerelay.common.config import cache_dir
from pagerelay.common.model.runner import ModelFacts, read_facts

FACTS = ModelFacts("digest", 2, 3, 8, 100, 4096, (0,))
WEIGHTS = Weights(linear=1000, head=400, attention_width=72)
KV_BYTES = 2 * 2 * 3 * 8 * 4
"""Of a token: keys and values, layers, heads, their size, fp32."""


def line(c: list[float], other: list[float], ceiling: list[float] | None = None) -> Line:
    found = [
        Measured(contender="c", ms=c, host_ms=[1.0] * len(c)),
        Measured(contender="c unstacked", ms=[2 * ms for ms in c], host_ms=[1.0] * len(c)),
        Measured(contender="transformers", ms=other, host_ms=[]),
    ]
    rates = [1.0] * len(c)
    limits = ceiling or [10.0] * len(c)
    return Line(
        case="decode", bound="reading", ceiling_ms=limits, read_gb_s=rates, gflop_s=rates, found=found
    )


def test_bytes_are_the_weights_and_each_sequences_keys_and_values() -> None:
    assert Case(1, 256).bytes_read(FACTS, WEIGHTS) == 4000 + 256 * KV_BYTES
    assert Case(16, 256).bytes_read(FACTS, WEIGHTS) == 4000 + 16 * 256 * KV_BYTES


def test_flops_of_decode_and_of_a_prompt() -> None:
    assert Case(4, 256).flops(FACTS, WEIGHTS) == 4 * 2 * 1000 + 4 * 4 * 256 * 72 * 2
    seen = sum(range(1, 513))  # a row sees itself and what came before it
    assert Case(1, 512, 512).flops(FACTS, WEIGHTS) == 2 * (512 * 600 + 400) + 4 * seen * 72 * 2
    assert (Case(1, 512, 512).name, Case(1, 768, 512).name) == ("prefill 512", "prefill 512 of 768")


def test_a_ceiling_is_measured_and_divides() -> None:
    found = Gauge(1 << 20, (64,)).measure()
    assert found.read_gb_s > 0
    assert found.gflop_s > 0
    bounds = Ceiling(read_gb_s=2.0, gflop_s=4.0).bounds_ms(4e9, 4e9)
    assert bounds == {"reading": 2000.0, "arithmetic": 1000.0}


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert ratio([10.0, 60.0, 30.0], [10.0, 20.0, 20.0]) == 1.5
    assert steady([10.0, 12.0], [10.0, 10.0])
    assert not steady([10.0, 12.1], [10.0, 10.0])
    assert spread([3.0, 1.0, 2.0]) == "2 (1–3)"
    assert spread([]) == "-"


def test_the_table_shows_the_spread_and_marks_what_is_not_steady() -> None:
    ceiling, c, unstacked, other = table_rows([line([20.0, 20.0, 40.0], [40.0, 80.0, 80.0])])
    assert {len(row) for row in (ceiling, c, unstacked, other)} == {len(HEAD)}
    assert ceiling[:3] == ["decode", "ceiling: reading", "10 (10–10)"]
    assert c == ["decode", "c", "20 (20–40)", "50 %?", "1 (1–1)", "-", "0.500"]
    assert unstacked[5:] == ["2", "-"]
    assert other == ["decode", "transformers", "80 (40–80)", "12 %?", "-", "2?", "1?"]


def test_a_machine_that_slows_down_for_all_leaves_the_ratios_steady() -> None:
    rows = table_rows([line([20.0, 40.0], [40.0, 80.0], ceiling=[10.0, 20.0])])
    assert [row[3] for row in rows[1:]] == ["50 %", "25 %", "25 %"]
    assert rows[-1][5:] == ["2", "1"]


def test_only_the_librarys_calls_are_on_the_clock() -> None:
    clock = Clock()
    held = []
    library = TimedLibrary(SimpleNamespace(ops_linear=lambda x: held.append(clock.seconds) or x + 1), clock)
    assert library.ops_linear(1) == 2
    once = clock.seconds
    assert once > 0
    assert library.ops_linear(2) == 3
    assert held == [0.0, once]
    assert clock.seconds > once

    def broken() -> None:
        raise ValueError("no")

    before = clock.seconds
    with pytest.raises(ValueError, match="no"):
        clock.timed(broken)()
    assert clock.seconds > before


def test_contenders_are_what_they_are_called(tiny_dir: Path) -> None:
    """With the clock, ``c`` keeps its one call for all layers; the others have none, and the same logits."""
    clock, facts, case = Clock(), read_facts(tiny_dir, None), Case(2, 40)
    ops = roofline.timed_ops(clock, cache_dir() / "kernels", 1)
    pool = torch.zeros(6, facts.num_layers, 2, facts.num_kv_heads, roofline.BLOCK_SIZE, facts.head_dim)
    others = (Unstacked(ops), TorchLinears(ops, clock))
    for other in others:
        assert getattr(other, "stack", None) is None
    contenders = [PagedContender(tiny_dir, ops, clock, pool, True)]
    contenders += [PagedContender(tiny_dir, other, clock, pool, False) for other in others]
    for contender in contenders:
        seconds, inside = contender.prepare(case)()
        assert inside is not None
        assert 0 < inside < seconds
    with pytest.raises(ValueError, match="its layers do not run in one call"):
        PagedContender(tiny_dir, Unstacked(ops), clock, pool, True)
    with pytest.raises(ValueError, match="its layers still run in one call"):
        PagedContender(tiny_dir, ops, clock, pool, False)


def test_each_step_of_transformers_starts_from_the_same_cache(tiny_dir: Path) -> None:
    facts = read_facts(tiny_dir, None)
    keys = torch.randn(2, facts.num_kv_heads, 5, facts.head_dim)
    cache = roofline._cache_of([(keys, keys)] * facts.num_layers)
    assert cache.get_seq_length() == 5
    assert all(layer.keys is keys for layer in cache.layers)
    cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    assert cache.get_seq_length() == 6
    assert keys.shape[2] == 5
    assert roofline._cache_of([]).get_seq_length() == 0


def test_a_report_has_a_table_beside_it(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Case(1, 8)
    monkeypatch.setattr(roofline, "DECODE", (small,))
    monkeypatch.setattr(roofline, "PREFILL", (Case(1, 8, 8),))
    monkeypatch.setattr(roofline, "ROUND_S", 0.0)
    monkeypatch.setattr(roofline, "Gauge", lambda: Gauge(1 << 20, (64,)))
    monkeypatch.setattr(roofline, "keep_freed_memory", lambda: True)  # for good, and of the tests' process
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    threads = torch.get_num_threads()
    try:
        assert commands.main(["roofline", "--model", str(tiny_dir), "--results", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    report, text = sorted(tmp_path.iterdir())
    assert (report.suffix, text.suffix, report.stem) == (".json", ".md", text.stem)
    assert '"omp_wait_policy": "ACTIVE"' in report.read_text()
    assert '"keeps_freed_memory": true' in report.read_text()
    lines = text.read_text().splitlines()
    assert f"| {' | '.join(HEAD)} |" in lines
    assert len([row for row in lines if row.startswith("| decode 1 x 8 |")]) == 6  # a ceiling, 5 contenders
    assert text.name in capsys.readouterr().out


def test_the_command_line_imports_no_torch_before_openmp_is_told_to_wait(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    script = (
        "import os, sys\n"
        "from pagerelay.bench.__main__ import main\n"
        "assert 'torch' not in sys.modules\n"
        "code = main(['roofline', '--model', sys.argv[1]])\n"
        "print(code, os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["2", "PASSIVE", "True"], done.stderr
    assert "roofline: model " in done.stderr
    assert "no config.json" in done.stderr
