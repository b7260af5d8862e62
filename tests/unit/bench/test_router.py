from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pagerelay.bench import router
from pagerelay.bench.__main__ import main

STUB = Path(__file__).with_name("stub_router.py")
SMALL = ["--requests", "100", "--clients", "4", "--streams", "6", "--stream-tokens", "12", "--step-ms", "5"]


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    config = {"vocab_size": 3, "max_position_embeddings": 512, "eos_token_id": 0}
    vocabulary = {"a": 0, "Ġtime": 1, "Ġway": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}))
    return tmp_path


def test_all_phases(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router, "router_command", lambda: [sys.executable, str(STUB)])
    monkeypatch.setattr(router, "IDLE_REQUESTS", 10)
    monkeypatch.setattr(router, "MODERATE_TOKENS", 10)
    cores = os.sched_getaffinity(0)
    code = main(["router", "--model-path", str(model_path), *SMALL, "--results", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert code == 0, shown
    assert "per core, from CPU time" in shown.out
    assert os.sched_getaffinity(0) == cores
    [path] = (tmp_path / "out").glob("router-*.json")
    phases = json.loads(path.read_text())["phases"]
    assert list(phases) == ["idle", "short answers", "streams", "flood", "moderate load"]
    assert [(phase["failed"], phase["miscounted"]) for phase in phases.values()] == [(0, 0)] * 5
    assert phases["short answers"]["requests_per_s"] > 20
    for name in ("idle", "streams", "flood", "moderate load"):
        assert 0 < phases[name]["added_p50"] <= phases[name]["added_p99"] < 1000
        assert phases[name]["ttft_p50"] > 0
    assert phases["moderate load"]["wall_s"] > 8 * router.MODERATE_STEP_MS / 1e3


def test_a_router_that_cannot_start_is_one_clear_error(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        router, "router_command", lambda: [sys.executable, "-c", "raise SystemExit('no port')"]
    )
    monkeypatch.setattr(router, "READY_S", 3.0)
    assert main(["router", "--model-path", str(model_path), *SMALL]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("no port")
