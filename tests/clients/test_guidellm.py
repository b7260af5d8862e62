"""guidellm, a load generator: a few requests of each kind, none of which may fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster

pytest.importorskip("guidellm")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions"])
def test_a_bounded_run(
    served: Cluster, key: str, tiny_dir: Path, tmp_path: Path, request_format: str
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += [
        "--backend",
        f"kind=openai_http,target={served.url},api_key={key},request_format={request_format}",
        "--tokenizer",
        f"kind=huggingface_auto,model={tiny_dir}",
        "--data",
        "kind=synthetic_text,prompt_tokens=40,output_tokens=8",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        "kind=max_requests,count=6",
        "--output",
        f"kind=json,path={report}",
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = json.loads(report.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)
    assert run["metrics"]["output_token_count"]["successful"]["mean"] == 8
