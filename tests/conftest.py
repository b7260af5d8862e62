"""Shared by all tests: model folders, a clean environment, skips for what this machine lacks."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import taps
from hypothesis import settings

from pagerelay.common.config import DEFAULT_MODEL, Config
from pagerelay.common.model.fetch import TINY_MODEL, resolve_model

# A developer's own settings must not change what is tested. PAGERELAY_CACHE only says where models are.
_SETTINGS = ("PAGERELAY_CONFIG", *(f"PAGERELAY_{section}_".upper() for section in Config.__struct_fields__))
for name in [n for n in os.environ if f"{n}_".startswith(_SETTINGS) and n != "PAGERELAY_CACHE"]:
    del os.environ[name]
# Where there is no GPU, Triton's kernels run in its interpreter. Triton reads this when it is first imported,
# which torch does by itself sooner or later, and again when a kernel runs.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Processes inherit that a signal is ignored, as nohup and shells that start tests in the background have it.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)
# Nothing in a test asks the model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("pagerelay", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
# The stateful tests go much further then: see tests/unit/service/test_machines.py.
settings.register_profile("long", settings.get_profile("pagerelay"))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pagerelay"))


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, fp32; fetched once per machine."""
    return resolve_model(DEFAULT_MODEL, progress=print)


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """Two seeded random layers with SmolLM2's real tokenizer; see ``pagerelay.common.model.tiny``."""
    return resolve_model(TINY_MODEL, progress=print)


@pytest.fixture(scope="session")
def tapped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        taps.install(patch)
        yield


@pytest.fixture(autouse=True)
def every_stream_is_strict(tapped: None) -> Iterator[None]:
    """Whatever client of this process has read a router's stream: it was one of events that are as they have
    to be."""
    yield
    taps.check_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests live for the whole run: a collection that walks them again and again takes most of a
    second, and falls into whichever test is being timed."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
