"""The operation sets under test: torch, and C once per instruction set this machine has.

test_memory.py runs these tests a second time in processes of their own, to find touches of foreign memory:
`PAGERELAY_TEST_LIBRARY` then names the library to test (built with sanitizers), `PAGERELAY_TEST_GUARD`
("before", "after") puts every tensor next to a page that faults.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from guarded import GuardPages

from pagerelay.kernels.cpu_build import KernelUnavailable, build, find_compiler
from pagerelay.kernels.cpu_ops import CpuOps
from pagerelay.kernels.torch_ops import TorchOps

Make = Callable[..., CpuOps]

LIBRARY = os.environ.get("PAGERELAY_TEST_LIBRARY")
GUARD = os.environ.get("PAGERELAY_TEST_GUARD")
C_SETS = ["avx2", "avx512"]


@pytest.fixture(autouse=True)
def guard_pages() -> Iterator[None]:
    with GuardPages(GUARD) if GUARD else nullcontext():
        yield


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the compiled library; skips where this machine cannot have one."""
    folder = tmp_path_factory.mktemp("ops")
    if LIBRARY:
        return folder
    try:
        find_compiler()
    except KernelUnavailable as error:
        pytest.skip(error.reason)
    build(folder)
    return folder


@pytest.fixture(scope="session")
def make_c(cache_dir: Path) -> Make:
    """CpuOps by thread count and instruction set; skips where the processor lacks the set."""

    def make(threads: int = 1, instruction_set: str | None = None, int8_weights: bool = False) -> CpuOps:
        try:
            library = Path(LIBRARY) if LIBRARY else None
            return CpuOps(cache_dir, threads, instruction_set, library, int8_weights)
        except KernelUnavailable as error:
            pytest.skip(error.reason)

    return make


@pytest.fixture(params=C_SETS if LIBRARY or GUARD else ["torch", *C_SETS])
def ops(request: pytest.FixtureRequest) -> TorchOps | CpuOps:
    if request.param == "torch":
        return TorchOps()
    made: CpuOps = request.getfixturevalue("make_c")(2, request.param)
    return made


@pytest.fixture(params=C_SETS)
def c_ops(request: pytest.FixtureRequest, make_c: Make) -> CpuOps:
    return make_c(1, request.param)
