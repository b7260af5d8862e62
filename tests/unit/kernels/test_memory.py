"""The C kernels touch their own memory only, and their threads take turns.

The tests of this folder run again in processes of their own, for a fault or a sanitizer's report ends the
process: between guard pages, and (`make asan`) on a library built with the address and undefined-behaviour
sanitizers. The thread pool is driven from C (tests/native/driver.c), under the thread and address sanitizers.
Every net is proved to hold by a defect that it must report.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pagerelay.kernels.cpu_build import SOURCES, build, find_compiler

pytestmark = pytest.mark.timeout(600)  # whole test runs in children

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "tests" / "native"
THIS = "tests/unit/kernels"
SANITIZERS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
NOT_HERE = 77  # the driver's exit status where the processor lacks the instruction set
SANITIZE = ("-fno-sanitize-recover=all", "-g", "-O1")
ENVIRONMENT = {"UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}


def run(command: list[str], extra: Mapping[str, str], seconds: float = 580) -> tuple[int, str]:
    """Exit status and all output of a child; `extra` is added to its environment."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout


def run_tests(extra: Mapping[str, str], *select: str, seconds: float = 580) -> tuple[int, str]:
    """This folder's tests in a child, except those of the build and these."""
    # -s: what a sanitizer says as it ends the process would be lost with pytest's own capture
    command = [sys.executable, "-m", "pytest", THIS, "-s", "-v", "-x", "-p", "no:cacheprovider"]
    ignored = [f"--ignore={THIS}/test_{name}.py" for name in ("build", "memory")]
    return run([*command, *ignored, *select], extra, seconds)


def assert_passed(status: int, output: str) -> None:
    if status < 0:
        begun = re.findall(r"^tests/\S+::\S+", output, re.MULTILINE)
        pytest.fail(
            f"killed by {signal.Signals(-status).name} in {begun[-1] if begun else 'its set-up'}: "
            f"a kernel touched memory outside its buffers\n{output[-6000:]}"
        )
    if status != 0:
        pytest.fail(f"exit status {status}\n{output[-12000:]}")
    assert re.search(r"\d{2,} passed", output), output[-2000:]  # not all skipped, say for want of AVX2


# ---------------------------------------------------------------- guard pages


@pytest.mark.parametrize("side", ["after", "before"])
def test_no_buffer_is_left_between_guard_pages(cache_dir: Path, side: str) -> None:
    library = str(build(cache_dir))
    extra = {"PAGERELAY_TEST_GUARD": side, "PAGERELAY_TEST_LIBRARY": library}
    assert_passed(*run_tests(extra, "-k", "test_edges"))


@pytest.mark.asan
@pytest.mark.parametrize("side", ["after", "before"])
def test_contract_suite_between_guard_pages(cache_dir: Path, side: str) -> None:
    extra = {"PAGERELAY_TEST_GUARD": side, "PAGERELAY_TEST_LIBRARY": str(build(cache_dir))}
    assert_passed(*run_tests(extra, "-k", "not test_edges"))


# ---------------------------------------------------------------- sanitizers


def preload() -> str:
    """The sanitizer's runtime, which must come first, and the C++ one, whose exceptions it wants to see."""
    names = ("libasan.so", "libstdc++.so.6")
    found = [run([find_compiler(), f"-print-file-name={name}"], {})[1].strip() for name in names]
    return ":".join(found)


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which tests run on a library built with the address sanitizer."""
    flags = (SANITIZERS["address"], *SANITIZE, f"-I{SOURCES}", "-include", str(NATIVE / "exact_scratch.h"))
    library = build(tmp_path_factory.mktemp("sanitized"), extra_flags=flags)
    return {
        "PAGERELAY_TEST_LIBRARY": str(library),
        "LD_PRELOAD": preload(),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's; the library's own are looked for from C
    }


@pytest.mark.asan
def test_contract_suite_under_address_sanitizer(sanitized: dict[str, str]) -> None:
    assert_passed(*run_tests(sanitized))


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """tests/native/driver.c and the kernels as one program per sanitizer."""
    folder = tmp_path_factory.mktemp("drivers")
    sources = [NATIVE / "driver.c", *sorted(SOURCES.glob("isa_*.c"))]
    flags = ["-std=c11", "-D_DEFAULT_SOURCE", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    made = {}
    kinds = {"plain": ()} | {name: (flag, *SANITIZE) for name, flag in SANITIZERS.items()}
    for name, extra in kinds.items():
        made[name] = str(folder / name)
        command = [find_compiler(), *flags, *extra, f"-I{SOURCES}", *map(str, sources)]
        status, output = run([*command, "-o", made[name], "-lm"], {})
        assert status == 0, output
    return made


@pytest.mark.asan
@pytest.mark.parametrize(
    ("sanitizer", "scenario"),
    # A child forked amid calls may find the sanitizer's own allocator locked for ever.
    [*itertools.product(SANITIZERS, ("callers", "cycles", "memory")), ("plain", "fork")],
)
@pytest.mark.parametrize("instruction_set", ["avx2", "avx512"])
def test_pool_and_calls_from_c(
    drivers: dict[str, str], sanitizer: str, instruction_set: str, scenario: str
) -> None:
    status, output = run([drivers[sanitizer], scenario, instruction_set], {})
    if status == NOT_HERE:
        pytest.skip(f"this processor has no {instruction_set}")
    assert (status, output) == (0, "")


# ---------------------------------------------------------------- the nets hold


PLANTED = {
    "overrun": ("address", "heap-buffer-overflow"),
    "leak": ("address", "detected memory leaks"),
    "overflow": ("address", "signed integer overflow"),
    "race": ("thread", "data race"),
}


@pytest.mark.asan
@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_reported(drivers: dict[str, str], defect: str) -> None:
    sanitizer, report = PLANTED[defect]
    status, output = run([drivers[sanitizer], f"planted-{defect}", "avx2"], {})
    assert status != 0
    assert report in output


# A weight that claims one input more than its memory holds.
LIAR = """
import sys
from contextlib import nullcontext
from pathlib import Path
import torch
from guarded import GuardPages
from pagerelay.kernels.cpu_ops import CpuOps, PackedWeight
ops = CpuOps(Path(sys.argv[1]), 1, "avx2", Path(sys.argv[1]))
with GuardPages(sys.argv[2]) if sys.argv[2] else nullcontext():
    panels = torch.zeros(1, 7, 16)
    print("kernel begins", flush=True)
    ops.linear(torch.zeros(1, 8), PackedWeight(panels, None, 16, 8))
"""


def lie(library: str, side: str, extra: Mapping[str, str]) -> tuple[int, str]:
    helpers = os.pathsep.join([str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    return run([sys.executable, "-c", LIAR, library, side], {"PYTHONPATH": helpers, **extra})


def test_an_overrun_faults_at_the_guard_page(cache_dir: Path) -> None:
    status, output = lie(str(build(cache_dir)), "after", {})
    assert (status, output) == (-signal.SIGSEGV, "kernel begins\n")


@pytest.mark.asan
def test_an_overrun_from_python_is_reported(sanitized: dict[str, str]) -> None:
    status, output = lie(sanitized["PAGERELAY_TEST_LIBRARY"], "", sanitized)
    assert status != 0
    assert "kernel begins" in output
    assert "heap-buffer-overflow" in output
