"""``kernels``: compiles the Triton kernels for sm_80 and sm_90, without a GPU, and judges their machine code.

The compiler runs in a process of its own (``pagerelay.bench.aot``), which prints a finding a line;
this is the report of them. A failed gate is a failed run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from pagerelay.bench.report import header, stamped, table, write_json

COLUMNS = (
    "registers",
    "spilled bytes",
    "shared KiB",
    "warps",
    "occupancy",
    "16-byte loads",
    "matrix",
    "gates",
)


class KernelOptions(Struct, frozen=True, kw_only=True):
    only: str
    results: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> KernelOptions:
        return cls(only=args.only, results=args.results)


def findings(only: str) -> Iterator[dict[str, Any]]:
    """As the compiler's process prints them. ValueError, with its last words, when it cannot go on."""
    env = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    env.pop("TRITON_INTERPRET", None)  # with it nothing would be compiled
    command = [sys.executable, "-m", "pagerelay.bench.aot", "--only", only]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=env)  # noqa: S603 - our own module
        with process:
            yield from map(json.loads, process.stdout or ())
        if process.returncode:
            said.seek(0)
            words = said.read().strip().splitlines() or ["silently"]
            raise ValueError(f"the compiler's process failed: {words[-1]}")


def row(finding: dict[str, Any]) -> list[str]:
    """One line of the table."""
    kinds = finding["instructions"]
    wide = sum(count for kind, count in kinds.items() if kind in ("LDG.128", "LDGSTS.128"))
    matrix = next((kind for kind in ("HGMMA", "HMMA") if kinds.get(kind)), "-")
    return [
        f"{finding['variant']} {finding['arch']}",
        str(finding["registers"]),
        str(finding["stack_bytes"]),
        f"{finding['shared_bytes'] / 1024:.1f}",
        str(finding["warps"]),
        f"{finding['occupancy']:.0%}",
        str(wide),
        matrix,
        "; ".join(finding["failed"]) or "pass",
    ]


def check_kernels(options: KernelOptions) -> int:
    """Prints the table, writes the report as JSON and Markdown; 0 if every gate was passed, else the number
    of variants that failed, at most 100.
    """
    head, found = {}, []
    for finding in findings(options.only):
        if "variant" in finding:
            found.append(finding)
            print(f"{len(found)}: {finding['variant']} {finding['arch']}", file=sys.stderr, flush=True)
        else:
            head = finding
    if not found:
        raise ValueError(f"no variant is called {options.only}")
    failed = sum(bool(finding["failed"]) for finding in found)
    path = stamped(options.results, "kernels")
    written = write_json(path, header(**head, failed=failed, variants=found))
    rows = [row(finding) for finding in found]
    print(table(("variant", *COLUMNS), rows))
    markdown = ["| " + " | ".join(cells) + " |" for cells in (("variant", *COLUMNS), *rows)]
    markdown.insert(1, "|" + "---|" * (len(COLUMNS) + 1))
    title = f"Triton {head['triton']}: {len(found)} compiled, {failed} failed a gate\n\n"
    written.with_suffix(".md").write_text(title + "\n".join(markdown) + "\n", encoding="utf-8")
    print(f"{title.strip()}; written: {written} and .md")
    return min(failed, 100)
