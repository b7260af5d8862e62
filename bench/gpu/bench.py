"""What every section works with: the device, its findings, its deadline, and clocks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


class OutOfTime(Exception):
    """The section's deadline has passed; what it has found until then stands."""


@dataclass
class Bench:
    """``dry``: on the CPU, with shapes that mean nothing. Findings are written to ``file`` as they come, so
    that they outlive a section that is killed."""

    section: str
    device: torch.device
    dry: bool
    file: Path
    deadline: float
    findings: list[dict[str, Any]] = field(default_factory=list)

    def _add(self, name: str, **fields: Any) -> None:
        self.findings.append({"section": self.section, "name": name, **fields})
        self.file.write_text(json.dumps(self.findings, indent=1), encoding="utf-8")

    def figure(self, name: str, value: float | str | None, unit: str = "", note: str = "") -> None:
        self._add(name, value=value, unit=unit, note=note)

    def check(self, name: str, passed: bool, note: str = "") -> None:
        """One failed check is one of the exit code."""
        self._add(name, passed=bool(passed), note=note)

    def skip(self, name: str, why: str) -> None:
        self._add(name, skipped=why)

    def go_on(self) -> None:
        """Raises :class:`OutOfTime` past the deadline; called between measurements."""
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def sized(self, full: Any, dry: Any) -> Any:
        return dry if self.dry else full

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, function: Callable[[], Any], repeat: int = 20, inner: int = 1) -> float:
        """Median of ``repeat`` runs on the device, each of ``inner`` calls in a row."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            function()
            return 1000 * (time.perf_counter() - began)
        for _ in range(2):
            function()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]  # type: ignore[no-untyped-call]
        for start, end in pairs:
            start.record()
            for _ in range(inner):
                function()
            end.record()
        self.wait()
        middle: float = statistics.median([start.elapsed_time(end) / inner for start, end in pairs])
        return middle

    def host_us(self, function: Callable[[], Any], calls: int = 200) -> float:
        """Microseconds of the host for one call that does not wait for the device."""
        calls = self.sized(calls, 1)
        function()
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        spent = time.perf_counter() - began
        self.wait()
        return 1e6 * spent / calls


def copy_gb_s(bench: Bench, num_bytes: int) -> float:
    """Bytes read and written per second by one large copy on the device, in GB/s: the ceiling of what is
    bound by memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / bench.milliseconds(lambda: target.copy_(source), 10) / 1e6


def matmul_tflop_s(bench: Bench, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
    return 2 * size**3 / bench.milliseconds(lambda: a @ b, 10) / 1e9
