"""The sets of operations under one contract: the torch twins, and Triton's kernels.

Triton's run on the device where there is one, and else in its interpreter, on the CPU (`tests/conftest.py`
says which). They are imported once, by the first test that wants them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagerelay.kernels.torch_ops import TorchOps
from pagerelay.kernels.triton import missing

MODULES = ("attend", "attend_plan", "blocks", "checks", "launch", "ops", "rows", "sampling")


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") or not torch.cuda.is_available() else "cuda"


@pytest.fixture(scope="session")
def kernels(device: str) -> SimpleNamespace:
    """The modules of `pagerelay.kernels.triton` by name; skips where Triton is not installed."""
    if reason := missing():
        pytest.skip(reason)
    found = {name: importlib.import_module(f"pagerelay.kernels.triton.{name}") for name in MODULES}
    assert found["launch"].INTERPRETED is (device == "cpu")
    return SimpleNamespace(**found)


@pytest.fixture(scope="session")
def make_triton(kernels: SimpleNamespace) -> Callable[..., Any]:
    make: Callable[..., Any] = kernels.ops.TritonOps
    return make


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return TorchOps()
    return request.getfixturevalue("make_triton")()
