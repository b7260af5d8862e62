from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pagerelay.bench.__main__ import main


async def run(*arguments: str) -> int:
    """The command line in a thread of its own: it brings its own event loop."""
    return await asyncio.to_thread(main_in_thread, arguments)


def main_in_thread(arguments: tuple[str, ...]) -> int:
    try:
        return main(["load", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


async def test_a_closed_loop(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    code = await run(
        "--base-url", fake.url, "--concurrency", "3", "--requests", "9", "--prompt-tokens", "40",
        "--output-tokens", "5", "--slo", "ttft=5000,itl=5000", "--pid", str(os.getpid()), "--json", str(path),
    )  # fmt: skip
    assert code == 0
    shown = capsys.readouterr().out
    assert "closed 3" in shown
    assert "goodput" in shown
    report = json.loads(path.read_text())
    assert {"command", "date", "git_commit", "machine", "options", "workloads"} <= report.keys()
    figures = report["workloads"]["closed 3"]["median"]
    assert (figures["ok"], figures["failed"], figures["tokens"], figures["prompt_tokens"]) == (9, 0, 45, 40)
    assert (figures["good_share"], figures.get("lag_p99")) == (1, None)
    assert figures["pss_mib"] > 1
    assert figures["cpu_ms_per_tok"] >= 0


async def test_an_open_loop(fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = await run(
        "--base-url", fake.url, "--rate", "100", "--duration", "0.5", "--seed", "3", "--output-tokens", "2",
        "--api", "completions", "--json", str(path),
    )  # fmt: skip
    assert code == 0
    figures = json.loads(path.read_text())["workloads"]["open 100/s"]["median"]
    assert 25 < figures["ok"] < 90
    assert figures["lag_p99"] >= 0


async def test_a_named_workload(fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = await run("--base-url", fake.url, "--workload", "W1,W3", "--repeat", "2", "--json", str(path))
    assert code == 0
    workloads = json.loads(path.read_text())["workloads"]
    assert list(workloads) == ["W1", "W3"]
    assert len(workloads["W3"]["runs"]) == 2
    assert [workloads[name]["median"]["prompt_tokens"] for name in workloads] == [128, 544]


async def test_failed_requests_show_in_the_exit_code(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.mode = "500"
    assert await run("--base-url", fake.url, "--workload", "W1") == 2
    assert "warm-up" in capsys.readouterr().err
    assert await run("--base-url", "http://127.0.0.1:1/v1", "--workload", "W1") == 2
    assert "is the server up" in capsys.readouterr().err


HERE = ("--base-url", "http://127.0.0.1/v1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "http://10.1.2.3/v1"], "--allow-remote"),
        (["--base-url", "http://example.com/v1"], "--allow-remote"),
        (["--base-url", "127.0.0.1:80"], "http://"),
        ([*HERE, "--workload", "W9"], "unknown workload W9"),
        ([*HERE, "--rate", "1"], "--requests"),
        ([*HERE, "--rate", "1", "--concurrency", "1"], "one of"),
        ([*HERE, "--concurrency", "0"], "between"),
        ([*HERE, "--concurrency", "1", "--duration", "5"], "--duration"),
        ([*HERE, "--slo", "fast=1"], "write name=ms"),
        ([*HERE, "--extra-body", "[]"], "JSON object"),
        ([*HERE, "--rate", "1", "--requests", "1", "--prefix-tokens", "128"], "smaller"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["load", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
