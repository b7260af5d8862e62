"""Other people's clients, unmodified, against a real cluster: ``make test-clients``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running
from pytest_asyncio import is_async_test

KEY = "a-key-for-other-clients"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.filterwarnings("default"))  # theirs to mend
            if is_async_test(item):  # some keep connections for the life of a process, so one loop for all
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            if item.name == "test_serdes":
                item.add_marker(pytest.mark.skip(reason="compares with a file of LangChain's own"))


@pytest.fixture(scope="session")
def served(tiny_dir: Path) -> Iterator[Cluster]:
    """1 prefill and 1 decode worker, tiny model, an API key."""
    with running(tiny_dir, router__api_keys=KEY) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def key() -> str:
    return KEY
