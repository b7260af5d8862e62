"""Other people's clients, unmodified, against a real cluster: ``make test-clients``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running

KEY = "a-key-for-other-clients"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.filterwarnings("default"))  # theirs to mend


@pytest.fixture(scope="session")
def served(tiny_dir: Path) -> Iterator[Cluster]:
    """1 prefill and 1 decode worker, tiny model, an API key."""
    with running(tiny_dir, router__api_keys=KEY) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def key() -> str:
    return KEY
