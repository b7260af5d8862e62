"""``gpu-check``: everything that only a GPU can prove, in one call of less than ten minutes.

Each section runs in a process of its own, so that one that hangs, is killed or loses its CUDA context takes
no other with it; what it has found until then is on disk. ``--dry-run`` goes the same ways on the CPU, with
Triton's interpreter and shapes that mean nothing, and in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from pagerelay.bench.report import header, number, table, write_json

SECTIONS: dict[str, tuple[str, str, float]] = {
    "versions": ("basics", "versions", 30),
    "ceilings": ("basics", "ceilings", 30),
    "correct": ("correct", "kernels", 150),
    "handover": ("handover", "between_processes", 70),
    "attention": ("attention", "decode_and_prefill", 80),
    "steps": ("steps", "model_steps", 90),
    "cluster": ("cluster", "workers_and_others", 130),
}
"""Name → module of ``bench.gpu``, function, seconds at most; in the order of their worth."""
GRACE_S = 10.0
"""Between the moment from which a section begins nothing new and the one at which it is killed."""
MOST_LINES = 60


class GpuCheckOptions(Struct, frozen=True, kw_only=True):
    out: str
    only: tuple[str, ...] = ()
    dry_run: bool = False
    device: str = "cuda"
    one_section: bool = False
    """This process is the one of the section named by ``only``."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> GpuCheckOptions:
        only = tuple(word for word in args.only.split(",") if word)
        unknown = [word for word in only if word not in SECTIONS]
        if unknown:
            raise ValueError(f"unknown section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
        return cls(
            out=args.out, only=only, dry_run=args.dry_run, device=args.device, one_section=args.one_section
        )


def gpu_check(options: GpuCheckOptions) -> int:
    """Prints the table, writes ``gpu-check.json`` beside the sections' own files; returns the number of
    checks that failed, at most 100."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.one_section:
        return run_section(options.only[0], options, out)
    found: list[dict[str, Any]] = []
    began = time.monotonic()
    for name in options.only or SECTIONS:
        print(f"{time.monotonic() - began:5.0f} s  {name}", file=sys.stderr, flush=True)
        file = _file(out, name)
        file.unlink(missing_ok=True)
        trouble = _here(name, options, out) if options.dry_run else _apart(name, options, out)
        found += json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        if trouble:
            found.append({"section": name, "name": "ran through", "passed": False, "note": trouble})
        report = header(dry_run=options.dry_run, seconds=round(time.monotonic() - began, 1), findings=found)
        write_json(out / "gpu-check.json", report)
    failed = sum(finding.get("passed") is False for finding in found)
    print(summary(found))
    left = ", ".join(name for name in SECTIONS if options.only and name not in options.only) or "none"
    print(f"{failed} checks failed; sections not run: {left}; written: {out / 'gpu-check.json'}")
    return min(failed, 100)


def _file(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def _apart(name: str, options: GpuCheckOptions, out: Path) -> str:
    """Runs a section in a process of its own; what went wrong, if anything did."""
    limit = SECTIONS[name][2]
    command = [sys.executable, "-m", "pagerelay.bench", "gpu-check", "--one-section", "--only", name]
    command += ["--device", options.device, "--out", str(out)]
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)  # noqa: S603 - our own module
        try:
            code = process.wait(limit + GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its own children too
            process.wait()
            return f"killed after {limit + GRACE_S:.0f} s; see {name}.log"
    return f"ended with {code}; see {name}.log" if code else ""


def _here(name: str, options: GpuCheckOptions, out: Path) -> str:
    try:
        run_section(name, options, out)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def run_section(name: str, options: GpuCheckOptions, out: Path) -> int:
    """In this process. What the section raises is the caller's; running out of time is a finding."""
    import importlib

    import torch

    from pagerelay.bench.gpu.bench import Bench, OutOfTime

    module, function, seconds = SECTIONS[name]
    device = torch.device("cpu" if options.dry_run else options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bench = Bench(name, device, options.dry_run, _file(out, name), time.monotonic() + seconds)
    run: Callable[[Bench], None] = getattr(importlib.import_module(f"pagerelay.bench.gpu.{module}"), function)
    try:
        with torch.inference_mode():
            run(bench)
    except OutOfTime:
        bench.skip("the rest", f"no time left after {seconds:.0f} s")
    return 0


def summary(found: Sequence[dict[str, Any]]) -> str:
    """At most 60 lines: what failed and what was skipped first, then figures, then the checks that passed,
    counted by section."""
    rows = [[f["section"], f["name"], "FAILED", f.get("note", "")] for f in found if f.get("passed") is False]
    rows += [[f["section"], f["name"], "skipped", f["skipped"]] for f in found if "skipped" in f]
    figures = [f for f in found if "value" in f]
    passed: dict[str, int] = {}
    for finding in found:
        passed[finding["section"]] = passed.get(finding["section"], 0) + (finding.get("passed") is True)
    ends = [[name, "checks passed", str(count), ""] for name, count in passed.items() if count]
    room = MOST_LINES - 4 - len(rows) - len(ends)
    if len(figures) > room:
        ends.append(["", f"{len(figures) - max(room - 1, 0)} more figures", "", "in gpu-check.json"])
        figures = figures[: max(room - 1, 0)]
    for finding in figures:
        value = finding["value"]
        shown = value if isinstance(value, str) else number(value)
        rows.append([finding["section"], finding["name"], f"{shown} {finding['unit']}", finding["note"]])
    lines = table(("section", "what", "found", "note"), rows + ends).splitlines()
    return "\n".join(line[:150] for line in lines[: MOST_LINES - 2])
