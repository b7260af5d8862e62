"""What is shipped: one top-level name, every module, the C sources, nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("bench", "cli", "client", "common", "decode_svc", "kernels", "prefill_svc", "router")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(the sources, the names in the wheel); built from a copy, which leaves nothing in the checkout."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(work), str(source)], check=True, timeout=100)
    [wheel] = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return source, archive.namelist()


@pytest.fixture
def wheel_names(built: tuple[Path, list[str]]) -> list[str]:
    return built[1]


def test_the_only_top_level_name_is_pagerelay(wheel_names: list[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names} == {"pagerelay", "pagerelay-0.1.0.dist-info"}
    assert "pagerelay/__init__.py" not in wheel_names  # a namespace: others may add rooms of their own


def test_every_module_is_in_it(built: tuple[Path, list[str]]) -> None:
    source, wheel_names = built
    ours = {
        f"pagerelay/{path.relative_to(source)}" for room in ROOMS for path in (source / room).rglob("*.py")
    }
    assert ours == {name for name in wheel_names if name.endswith(".py")}


def test_c_sources_and_licence_are_in_it(wheel_names: list[str]) -> None:
    sources = {f"pagerelay/{path.relative_to(ROOT)}" for path in (ROOT / "kernels" / "cpu").glob("*.[ch]")}
    assert sources <= set(wheel_names)
    assert "pagerelay-0.1.0.dist-info/licenses/LICENSE" in wheel_names


def test_nothing_else_is_in_it(wheel_names: list[str]) -> None:
    kinds = (".py", ".c", ".h", ".json", ".yaml", ".typed")
    strangers = [n for n in wheel_names if ".dist-info/" not in n and not n.endswith(kinds)]
    assert strangers == []
