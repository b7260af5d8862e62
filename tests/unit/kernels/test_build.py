"""The compile on first use: where it lands, when it is repeated, and how it can be impossible."""

import os
import stat
from pathlib import Path

import pytest

from pagerelay.kernels import cpu_build
from pagerelay.kernels.cpu_build import KernelUnavailable, build
from pagerelay.kernels.cpu_ops import CpuOps


def script(folder: Path, name: str, body: str) -> str:
    """A stand-in compiler that answers --version and then does what `body` says."""
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "stand-in 1" && exit 0\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


WRITES = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"; echo run >> "$0.log"'


def test_a_library_is_built_once_and_reused(tmp_path: Path) -> None:
    compiler = script(tmp_path, "cc", WRITES)
    first = build(tmp_path / "cache", compiler)
    assert build(tmp_path / "cache", compiler) == first
    assert first.read_text() == "built\n"
    assert Path(f"{compiler}.log").read_text() == "run\n"
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_the_name_depends_on_flags_version_and_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = script(tmp_path, "cc", WRITES)
    names = {build(tmp_path, compiler).name, build(tmp_path, compiler, ["-g"]).name}
    other = script(tmp_path, "cc2", WRITES)
    Path(other).write_text(Path(other).read_text().replace("stand-in 1", "stand-in 2"))
    names.add(build(tmp_path, other).name)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "ops.c").write_text("int x;\n")
    monkeypatch.setattr(cpu_build, "SOURCES", sources)
    names.add(build(tmp_path, compiler).name)
    assert len(names) == 4


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelUnavailable, match="no C compiler on PATH") as caught:
        CpuOps(tmp_path, threads=1)
    assert "gcc" in caught.value.reason


def test_a_compiler_that_fails_leaves_its_first_error_and_no_file(tmp_path: Path) -> None:
    compiler = script(tmp_path, "cc", 'echo "note: x" >&2; echo "ops.c:1: error: odd" >&2; exit 3')
    with pytest.raises(KernelUnavailable, match=r"status 3: ops\.c:1: error: odd"):
        build(tmp_path / "cache", compiler)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/nowhere/at/all\n")
    broken.chmod(0o755)
    with pytest.raises(KernelUnavailable, match="did not run"):
        build(tmp_path / "cache", str(broken))


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelUnavailable, match="cannot write"):
        build(tmp_path / "file" / "cache", script(tmp_path, "cc", WRITES))


def test_a_library_that_is_none(tmp_path: Path) -> None:
    library = tmp_path / "ops.so"
    library.write_text("built")
    with pytest.raises(KernelUnavailable, match="cannot load"):
        CpuOps(tmp_path, threads=1, library=library)


def test_an_instruction_set_the_processor_lacks(cache_dir: Path) -> None:
    with pytest.raises(KernelUnavailable, match="no sse9"):
        CpuOps(cache_dir, threads=1, instruction_set="sse9")


def test_another_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(KernelUnavailable, match="aarch64"):
        CpuOps(tmp_path, threads=1)


def test_threads_must_be_positive(cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="threads"):
        CpuOps(cache_dir, threads=0)


def test_closing_joins_the_helpers(cache_dir: Path) -> None:
    before = len(os.listdir("/proc/self/task"))
    ops = CpuOps(cache_dir, threads=4)
    assert len(os.listdir("/proc/self/task")) == before + 3
    del ops
    assert len(os.listdir("/proc/self/task")) == before
