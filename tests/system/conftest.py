"""Clusters that tests of this folder share, and one event loop for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running


@pytest.fixture(scope="session")
def split(tiny_dir: Path) -> Iterator[Cluster]:
    """1 prefill and 1 decode worker over shared memory, tiny model; tests leave it idle."""
    with running(tiny_dir) as cluster:
        yield cluster
