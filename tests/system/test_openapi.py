"""A sample of ``make test-openapi``: schemathesis on a running cluster."""

from __future__ import annotations

from pathlib import Path

from cluster import running
from openapi_run import LITTLE, run


def test_a_sample_of_schemathesis(tiny_dir: Path) -> None:
    with running(tiny_dir, **LITTLE) as cluster:
        code, said, answers = run(
            cluster.url,
            10,
            1,
            "fuzzing",
            *("--max-examples", "3", "--workers", "4", "--include-method", "POST"),
        )
    assert code == 0, said
    assert any(" 200 " in line for line in answers)
    assert any(" 400 " in line for line in answers)
