"""What a process loads: the router no tensors, nobody the folders under their bare names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "triton", "cupy"}


def python(code: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize(
    "module",
    [
        "pagerelay.router.app",
        "pagerelay.cli.main",
        "pagerelay.cli.terminal",
        "pagerelay.client",
        "pagerelay.bench.__main__",
        "pagerelay.common.config",
        "pagerelay.common.wire.messages",
        "pagerelay.common.model.fetch",
    ],
)
def test_a_light_module_loads_no_tensor_library(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*{HEAVY} & set(sys.modules))"
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["kernels", "common", "router"])
def test_no_folder_is_importable_under_its_bare_name(name: str) -> None:
    done = python(f"import importlib.util; print(importlib.util.find_spec({name!r}))", ROOT)
    assert done.stdout.strip() == "None", done.stderr


@pytest.mark.parametrize("module", ["pagerelay.cli", "pagerelay.kernels", "pagerelay.common.wire"])
def test_the_package_is_found_from_anywhere(module: str, tmp_path: Path) -> None:
    done = python(f"import {module}; print({module}.__file__)", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_command_and_the_load_generator_start_from_anywhere(tmp_path: Path) -> None:
    for command in (["-m", "pagerelay.bench", "--help"], ["-m", "pagerelay.cli", "--help"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout.lower()


ABSENT = """
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "cupy", "cupyx"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
needing = []
for module in MODULES:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] in {"triton", "cupy", "cupyx"}, error
        needing.append(module)
from pagerelay.kernels.triton import missing
print(missing())
print(*needing)
"""


def test_without_triton_and_cupy_only_the_modules_that_are_written_in_them_are_missing(
    tmp_path: Path,
) -> None:
    rooms = ("bench", "cli", "client", "common", "decode_svc", "kernels", "prefill_svc", "router")
    files = (file for room in rooms for file in (ROOT / room).rglob("*.py"))
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files if file.stem != "__main__"]
    modules = sorted(".".join(("pagerelay", *part)).removesuffix(".__init__") for part in parts)
    assert len(modules) > 100
    done = python(ABSENT.replace("MODULES", repr(modules)), tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stderr
    remedy, needing = done.stdout.splitlines()
    assert "pip install" in remedy
    inside = {f"pagerelay.kernels.triton.{path.stem}" for path in (ROOT / "kernels" / "triton").glob("*.py")}
    inside -= {f"pagerelay.kernels.triton.{name}" for name in ("__init__", "attend_plan")}
    measuring = ("pagerelay.bench.aot.", "pagerelay.bench.gpu.")
    assert {name for name in needing.split() if not name.startswith(measuring)} == inside
