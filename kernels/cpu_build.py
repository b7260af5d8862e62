"""Compiles `cpu/*.c` to a shared library on first use and keeps it in a cache folder.

The file's name holds a hash of the sources, the flags and the compiler's version, so a change of any of them
builds anew and processes with different versions share a folder safely. The library appears by an atomic
rename: two processes that build at once both succeed.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
COMPILERS = ("cc", "gcc", "clang")
# No -march: each instruction set is enabled in its own file and chosen when the library is opened.
# Contraction is off because results must not depend on where a compiler sees fit to fuse a multiply and an
# add.
FLAGS = (
    *("-std=c11", "-D_DEFAULT_SOURCE", "-O3", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-ffp-contract=off"),
)
COMPILE_SECONDS = 300


class KernelUnavailable(Exception):
    """The C kernels cannot be used here; `reason` says why in one line; take `TorchOps`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def find_compiler(names: Sequence[str] = COMPILERS) -> str:
    """Path of the first of `names` on PATH; KernelUnavailable when there is none."""
    for name in names:
        if found := shutil.which(name):
            return found
    raise KernelUnavailable(f"no C compiler on PATH (looked for {', '.join(names)})")


def build(cache_dir: Path, compiler: str | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """Path of the compiled library in `cache_dir`, compiling it first when it is not there.

    `compiler` is a name or path (default: the first of COMPILERS on PATH). Raises KernelUnavailable when
    there is no compiler, it fails, or the folder cannot be written.
    """
    path = find_compiler((compiler,) if compiler else COMPILERS)
    flags = (*FLAGS, *extra_flags)
    version = _run([path, "--version"], seconds=30)
    library = cache_dir / f"pagerelay-ops-{_digest(flags, version)}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache_dir) as folder:
            fresh = Path(folder) / library.name
            sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
            _run([path, *flags, *sources, "-o", str(fresh), "-lm"], seconds=COMPILE_SECONDS)
            os.replace(fresh, library)
    except OSError as error:
        raise KernelUnavailable(f"cannot write the compiled kernels to {cache_dir}: {error}") from error
    return library


def _digest(flags: Sequence[str], version: str) -> str:
    digest = hashlib.sha256("\0".join((*flags, version)).encode())
    for source in sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _run(command: Sequence[str], seconds: float) -> str:
    """Output of a compiler call; KernelUnavailable with the first error line when it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - the compiler found on PATH with our own flags and sources
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.splitlines() or [""]
        first = next((line for line in lines if "error" in line), lines[0])
        raise KernelUnavailable(f"{command[0]} failed with status {done.returncode}: {first}")
    return done.stdout
