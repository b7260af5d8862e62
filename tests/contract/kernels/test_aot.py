"""The kernels compiled for real architectures, without a device: what their machine code needs and does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagerelay.bench import __main__ as bench
from pagerelay.bench.kernels import findings
from pagerelay.kernels.triton import missing

FEW = "decode bf16 d128 group 4 block 64,add + rms norm bf16,gather blocks"
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was compiled before is taken."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.usefixtures("cache")
def test_a_few_variants_pass_their_gates() -> None:
    head, *found = findings(FEW)
    assert head["triton"]
    assert [(one["variant"], one["arch"]) for one in found if one["failed"]] == []
    assert {one["arch"] for one in found} == {"sm_80", "sm_90"}
    assert len(found) == 6
    decode = [one for one in found if one["variant"].startswith("decode")]
    for one in decode:
        assert one["instructions"]["LDGSTS.128"] > 0
        assert one["instructions"]["HMMA"] > 0
        assert one["shared_bytes"] >= 2 * 2 * 64 * 128 * 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_variants_pass_their_gates(tmp_path: Path) -> None:
    assert bench.main(["kernels", "--results", str(tmp_path)]) == 0
    [path] = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert report["failed"] == 0
    assert path.with_suffix(".md").read_text().count("\n") == len(report["variants"]) + 4


def test_no_such_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["kernels", "--only", "abacus", "--results", str(tmp_path)]) == 2
    assert "no variant is called abacus" in capsys.readouterr().err


def test_the_interpreter_compiles_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagerelay.bench.aot"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr


@pytest.fixture
def aot(kernels: SimpleNamespace) -> Any:
    import pagerelay.bench.aot.__main__ as module

    return module


def test_gates_see_what_they_are_for(aot: Any) -> None:
    """Code that is bad in every way fails in every way; code as it should be passes."""
    from pagerelay.bench.aot.cubin import Code
    from pagerelay.bench.aot.variants import Gates, Variant

    gates = Gates(128, 96 << 10, 32 << 10, ("LDGSTS.128", "LDG.128|STG.128"))
    variant = Variant("x", None, {}, {}, gates)
    good = Code(128, 0, 0, 64 << 10, 4, {"LDGSTS.128": 1, "STG.128": 1})
    assert aot.failed_gates(variant, good, 80) == []
    for bad, words in (
        (
            Code(129, 8, 2, 100 << 10, 4, {}),
            ("spills", "129 registers", "at most", "LDGSTS.128", "or STG.128"),
        ),
        (Code(12, 0, 0, 1024, 4, {"LDGSTS.128": 1, "LDG.128": 1}), ("buffers",)),
    ):
        failed = aot.failed_gates(variant, bad, 80)
        assert len(failed) == len(words)
        for word, said in zip(words, failed, strict=True):
            assert word in said


def test_occupancy(aot: Any) -> None:
    from pagerelay.bench.aot.cubin import Code

    def share(registers: int, shared_bytes: int, warps: int, arch: int = 90) -> float:
        return Code(registers, 0, 0, shared_bytes, warps, {}).occupancy(arch)

    assert share(32, 0, 4) == 1.0
    assert share(128, 0, 4) == 0.25
    assert share(129, 0, 4) == 3 / 16
    assert share(64, 72 << 10, 4) == 3 / 16
    assert share(64, 72 << 10, 4, 80) == 2 / 16
    assert share(16, 0, 1) == 0.5
