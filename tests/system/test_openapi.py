"""A sample of ``make test-openapi``: schemathesis on a running cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import running
from openapi_run import LITTLE, run


@pytest.mark.timeout(300)
def test_a_sample_of_schemathesis(tiny_dir: Path) -> None:
    with running(tiny_dir, **LITTLE) as cluster:
        paths = [
            word
            for path in ("/v1/completions", "/tokenize", "/detokenize")
            for word in ("--include-path", path)
        ]
        code, said, answers = run(cluster.url, 1, "fuzzing", "--max-examples", "5", *paths)
    assert code == 0, said
    assert any(" 200 " in line for line in answers)
    assert any(" 400 " in line for line in answers)
