"""Clusters that tests of this folder share, and one event loop for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import HERMES
from cluster import Cluster, LoggedCluster, running
from features import SERVED
from rows import after


@pytest.fixture(scope="session")
def split(tiny_dir: Path) -> Iterator[Cluster]:
    """1 prefill and 1 decode worker over shared memory, tiny model, started as users do; tests leave it
    idle."""
    with running(tiny_dir, forked=False) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tools_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that knows tools."""
    folder = tmp_path_factory.mktemp("models") / SERVED
    folder.mkdir()
    for file in tiny_dir.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(HERMES)
    return folder


@pytest.fixture(scope="session")
def colocated(tools_dir: Path) -> Iterator[Cluster]:
    """The tiny model on one worker that does both: what the split is compared with; tests leave it idle."""
    with running(tools_dir, cluster__prefill=0, cluster__decode=0, cluster__colocated=1) as cluster:
        yield cluster


@pytest.fixture
async def row(split: Cluster) -> AsyncIterator[Cluster]:
    """``split``, which has to be as before when the test is over."""
    split.fresh_log()
    yield split
    await after(split)


@pytest.fixture(scope="session")
def roomy(tiny_dir: Path) -> Iterator[Cluster]:
    """As ``split``, with place for ten streams of 4 x 4,000 tokens, and without patience for those who do
    not read."""
    more = {"cache__num_blocks": 10_500, "router__write_timeout_s": 1.5, "router__keepalive_s": 0.3}
    with running(tiny_dir, **more) as cluster:
        yield cluster


@pytest.fixture
async def wide_row(roomy: Cluster) -> AsyncIterator[Cluster]:
    """``roomy``, which has to be as before when the test is over."""
    roomy.fresh_log()
    yield roomy
    await after(roomy)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """A test that fails shows what the clusters that run have logged."""
    report = yield
    if report.failed:
        for log in LoggedCluster.latest:
            report.sections.append((f"log of {log.parent.name}", log.read_text()[-5000:]))
    return report
