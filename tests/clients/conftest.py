"""Other people's clients, unmodified, against a real cluster: ``make test-clients``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_templates import with_tools
from cluster import Cluster, running
from pytest_asyncio import is_async_test

KEY = "a-key-for-other-clients"
LEFT_OUT = {
    "test_serdes": "compares with a file of LangChain's own",
    "test_agent_loop": "the model must call a function because it is asked to",
    "test_tool_calling": "the model must take a number from the prompt",
    "test_tool_calling_async": "the model must take a number from the prompt",
    "test_json_mode": "the model must know from the prompt which keys to write",
    "test_unicode_tool_call_integration": "the model must repeat a name from the prompt",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.filterwarnings("default"))  # theirs to mend
            if is_async_test(item):  # some keep connections for the life of a process, so one loop for all
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            name = item.name.partition("[")[0]
            if name in LEFT_OUT:
                item.add_marker(pytest.mark.skip(reason=LEFT_OUT[name]))


@pytest.fixture(scope="session")
def served(tiny_dir: Path) -> Iterator[Cluster]:
    """1 prefill and 1 decode worker, tiny model, an API key."""
    with running(tiny_dir, router__api_keys=KEY) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def calling(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same with a chat template for tools, as Hermes and Qwen have it."""
    folder = with_tools(tiny_dir, tmp_path_factory.mktemp("hermes"), "hermes")
    with running(folder, router__api_keys=KEY) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def key() -> str:
    return KEY
