"""The operation sets under test: torch, and C once per instruction set this machine has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pagerelay.kernels.cpu_build import KernelUnavailable, build
from pagerelay.kernels.cpu_ops import CpuOps
from pagerelay.kernels.torch_ops import TorchOps

Make = Callable[..., CpuOps]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the compiled library; skips where this machine cannot have one."""
    folder = tmp_path_factory.mktemp("ops")
    try:
        build(folder)
    except KernelUnavailable as error:
        pytest.skip(error.reason)
    return folder


@pytest.fixture(scope="session")
def make_c(cache_dir: Path) -> Make:
    """CpuOps by thread count and instruction set; skips where the processor lacks the set."""

    def make(threads: int = 1, instruction_set: str | None = None, int8_weights: bool = False) -> CpuOps:
        try:
            return CpuOps(cache_dir, threads, instruction_set, int8_weights=int8_weights)
        except KernelUnavailable as error:
            pytest.skip(error.reason)

    return make


@pytest.fixture(params=["torch", "avx2", "avx512"])
def ops(request: pytest.FixtureRequest) -> TorchOps | CpuOps:
    if request.param == "torch":
        return TorchOps()
    made: CpuOps = request.getfixturevalue("make_c")(2, request.param)
    return made


@pytest.fixture(params=["avx2", "avx512"])
def c_ops(request: pytest.FixtureRequest, make_c: Make) -> CpuOps:
    return make_c(1, request.param)
