"""``make test-openapi``: schemathesis on a cluster of the tiny model, for as long as asked.

``python tests/helpers/openapi_run.py --minutes 5`` prints how often each route answered what, and fails for a
server error, an answer or a status that /openapi.json does not name, or a body that it forbids and the server
takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from cluster import running

from pagerelay.common.model.fetch import TINY_MODEL, resolve_model

# Not every body that fits the document can be answered: prompts may be too long, fields exclude each other.
LITTLE = {"model__max_model_len": 48, "router__max_choices": 8}
"""So that no body asks for more than a few seconds of work."""
LEFT_OUT = "positive_data_acceptance"


def run(url: str, seed: int, phases: str, *more: str) -> tuple[int, str, Counter[str]]:
    """(exit code, what schemathesis said, answers by route and status)"""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers")
        answers.touch()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
                *("--checks", "all", "--exclude-checks", LEFT_OUT, "--phases", phases),
                *("--seed", str(seed), "--generation-database", "none"),
                *("--request-timeout", "60", "--continue-on-failure", "--no-color", "--warnings", "off"),
                *more,
            ],
            cwd=folder,
            env=os.environ
            | {
                "SCHEMATHESIS_HOOKS": "openapi_hooks",
                "OPENAPI_ANSWERS": str(answers),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    return done.returncode, done.stdout, Counter(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with running(resolve_model(TINY_MODEL, progress=print), **LITTLE) as cluster:
        code, said, answers = run(
            cluster.url, asked.seed, "coverage,fuzzing", "--max-time", str(round(asked.minutes * 60))
        )
    print(said)
    for line, count in sorted(answers.items()):
        print(f"{count:7}  {line}")
    print(f"{answers.total()} answers, exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
