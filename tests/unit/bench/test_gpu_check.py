"""``gpu-check`` without a GPU: its dry run, and what becomes of sections that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagerelay.bench import __main__ as bench
from pagerelay.bench import gpu_check
from pagerelay.bench.gpu_check import SECTIONS, summary
from pagerelay.kernels.triton import missing

needs_triton = pytest.mark.skipif(
    bool(missing()) or not os.environ.get("TRITON_INTERPRET"), reason=missing() or "not in the interpreter"
)


def dry_run(out: Path, only: str = "") -> tuple[int, list[dict[str, Any]]]:
    code = bench.main(["gpu-check", "--dry-run", "--only", only, "--out", str(out)])
    return code, json.loads((out / "gpu-check.json").read_text())["findings"]


@needs_triton
@pytest.mark.timeout(240)
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sections that are quick, and the one with another process."""
    chosen = [name for name in SECTIONS if name not in ("correct", "cluster")]
    code, found = dry_run(tmp_path, ",".join(chosen))
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert {finding["section"] for finding in found} == set(chosen)
    assert sum(finding.get("passed", False) for finding in found) > 9
    assert shown.count("\n") <= 60
    assert "sections not run: correct, cluster" in shown
    for name in chosen:
        assert (tmp_path / f"{name}.json").is_file()


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_of_everything(tmp_path: Path) -> None:
    code, found = dry_run(tmp_path)
    assert code == 0
    assert {finding["section"] for finding in found} == set(SECTIONS)
    assert [finding["name"] for finding in found if finding["name"] == "blocks went by the direct way"]


def test_no_such_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["gpu-check", "--only", "magic", "--out", str(tmp_path)]) == 2
    assert "unknown section magic; known: versions" in capsys.readouterr().err


class Child:
    """A section's process that writes some findings, then ends with ``code`` or never."""

    code: int | None = 0
    findings: list[dict[str, Any]] = []  # noqa: RUF012 - set by each test
    killed: list[int] = []  # noqa: RUF012

    def __init__(self, command: list[str], **_: Any) -> None:
        self.pid = 77
        out = Path(command[command.index("--out") + 1])
        name = command[command.index("--only") + 1]
        (out / f"{name}.json").write_text(json.dumps([{"section": name, **f} for f in self.findings]))

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None and timeout is not None:
            raise subprocess.TimeoutExpired("section", timeout)
        return self.code or 0


@pytest.mark.parametrize(
    ("code", "said"), [(0, ""), (139, "ended with 139; see ceilings.log"), (None, "killed after 40 s")]
)
def test_a_section_that_goes_wrong_is_one_failure_and_the_next_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, said: str
) -> None:
    monkeypatch.setattr(Child, "code", code)
    monkeypatch.setattr(Child, "findings", [{"name": "copy", "value": 7.0, "unit": "GB/s", "note": ""}])
    killed: list[int] = []
    started = SimpleNamespace(Popen=Child, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu_check, "subprocess", started)
    monkeypatch.setattr(gpu_check.os, "killpg", lambda pid, _: killed.append(pid))
    status = bench.main(["gpu-check", "--only", "versions,ceilings", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu-check.json").read_text())["findings"]
    assert [f["section"] for f in found if "value" in f] == ["versions", "ceilings"], "both were looked at"
    failed = [f for f in found if f.get("passed") is False]
    assert status == len(failed) == (2 if said else 0)
    assert all(f["note"].startswith(said) for f in failed if f["section"] == "ceilings")
    assert killed == ([77, 77] if code is None else [])


def test_a_section_out_of_time_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "correct", ("correct", "kernels", -1.0))
    if missing():
        pytest.skip("no Triton")
    code, found = dry_run(tmp_path, "correct")
    assert code == 0
    assert found[-1]["skipped"].startswith("no time left")


def test_the_summary_is_short_and_begins_with_what_is_wrong() -> None:
    found: list[dict[str, Any]] = [
        {"section": "a", "name": f"figure {n}", "value": float(n), "unit": "GB/s", "note": ""}
        for n in range(200)
    ]
    found += [{"section": "a", "name": f"check {n}", "passed": n != 3, "note": "x"} for n in range(50)]
    found.append({"section": "b", "name": "device", "skipped": "dry run"})
    lines = summary(found).splitlines()
    assert len(lines) <= 60
    assert "check 3" in lines[2]
    assert "FAILED" in lines[2]
    assert "skipped" in lines[3]
    assert "more figures" in "\n".join(lines)
    assert "49" in next(line for line in lines if "checks passed" in line)
