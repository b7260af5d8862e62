"""A sample of ``make test-openapi``: schemathesis on a running cluster."""

from __future__ import annotations

from pathlib import Path

from cluster import running
from openapi_run import LITTLE, run


def test_a_sample_of_schemathesis(tiny_dir: Path) -> None:
    with running(tiny_dir, **LITTLE) as cluster:
        code, said, answers = run(cluster.url, 30, 1, "fuzzing", "--max-examples", "6", "--workers", "4")
    assert code == 0, said
    assert answers.total() > 30
