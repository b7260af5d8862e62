"""Clusters that tests of this folder share, and one event loop for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_templates import HERMES
from cluster import Cluster, running
from features import SERVED


@pytest.fixture(scope="session")
def split(tiny_dir: Path) -> Iterator[Cluster]:
    """1 prefill and 1 decode worker over shared memory, tiny model; tests leave it idle."""
    with running(tiny_dir) as cluster:
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
