from __future__ import annotations

import mmap
import resource
import time

import numpy as np
import pytest

from pagerelay.common.transport.populate import PIECE, Populating

PAGE = mmap.PAGESIZE


def mapped(size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


def faults_of_writing(memory: np.ndarray) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[::PAGE] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def finish(populating: Populating) -> None:
    deadline = time.monotonic() + 30
    while populating.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("size", [PAGE, 3 * PIECE, 2 * PIECE + PAGE])
def test_pages_are_there_before_their_first_use(size: int) -> None:
    memory = mapped(size)
    finish(Populating(memory, write=True))
    assert faults_of_writing(memory) < max(size // PAGE // 8, 1)  # they would be one a page
    assert not memory[1::PAGE].any()


def test_stopped_it_touches_nothing_any_more() -> None:
    populating = Populating(mapped(1 << 30), write=True)
    populating.stop()
    assert not populating.running


def test_a_kernel_that_does_not_know_the_request_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagerelay.common.transport.populate._WRITE", 12345)
    finish(Populating(memory := mapped(4 * PAGE), write=True))
    assert not memory.any()
