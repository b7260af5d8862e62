from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagerelay.bench import server
from pagerelay.bench.__main__ import main
from pagerelay.bench.compare import Round, Spec, interference, side_by_side
from pagerelay.bench.load import Measured
from pagerelay.bench.machine import process_tree
from pagerelay.bench.server import free_port, running, split_command

SCRIPT = Path(__file__).with_name("word_server.py")


def command(mode: str = "") -> str:
    return f"{sys.executable} {SCRIPT} {{port}} {mode}"


def test_a_command_line_is_split_like_a_shell_does() -> None:
    assert split_command("A=1 B='x y' serve --port 3 C=2") == (
        {"A": "1", "B": "x y"},
        ["serve", "--port", "3", "C=2"],
    )
    with pytest.raises(ValueError, match="no command"):
        split_command("A=1")


def test_a_spec() -> None:
    spec = Spec.parse("split=X=1 pagerelay up --port {port} --set a={b}")
    assert spec.name == "split"
    assert spec.at(81) == ({"X": "1"}, ["pagerelay", "up", "--port", "81", "--set", "a={b}"])
    for wrong in ("pagerelay up", "=serve {port}", "a=serve --port 8000", "a=X={port}"):
        with pytest.raises(ValueError, match=r"NAME=COMMAND|\{port\}|no command"):
            Spec.parse(wrong)


def one_round(alone: float, loaded: float) -> Round:
    return Round(1.0, {"W4b": Measured({"itl_p99": alone}, []), "W4l": Measured({"itl_p99": loaded}, [])})


def test_the_tables_give_medians_spans_and_ratios() -> None:
    rounds = {
        "split": [one_round(10, 12), one_round(10, 16), one_round(10, 14)],
        "colocated": [one_round(10, 70)] * 3,
    }
    assert interference(rounds["split"], "W4l", "W4b") == [1.2, 1.6, 1.4]
    assert interference(rounds["split"], "W4", "W4b") == []
    lines = [line.split("  ") for line in side_by_side(rounds, ["W4b", "W4l"]).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["W4l", "split", "colocated", "split/colocated"] in cells
    assert ["ITL p99 ms", "14 (12-16)", "70", "0.200"] in cells
    assert ["ITL p99, W4l / W4b", "1.40 (1.20-1.60)", "7", "0.200"] in cells


async def test_a_server_is_started_waited_for_and_stopped() -> None:
    port = free_port()
    async with running([sys.executable, str(SCRIPT), str(port)], port) as child:
        assert await child.wait_ready(20) < 20
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    assert child.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_server_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.2)
    port = free_port()
    async with running([sys.executable, str(SCRIPT), str(port), "stubborn"], port) as child:
        await child.wait_ready(20)
    assert child.process.returncode == -9


async def test_a_server_that_dies_leaves_its_last_words() -> None:
    port = free_port()
    async with running([sys.executable, str(SCRIPT), str(port), "dies"], port) as child:
        with pytest.raises(ValueError, match=r"ended with code 1:\nno such model"):
            await child.wait_ready(20)


def test_two_servers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--spec", f"fast={command()}", "--spec", f"slow={command('slow')}", "--workload", "W4b"]
    code = main(["compare", *arguments, "--rounds", "2", "--seed", "1", "--results", str(tmp_path)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "fast/slow" in shown.out
    assert "median of 2 rounds" in shown.out
    order = [line.split(",")[0] for line in shown.err.splitlines() if line.endswith("starting")]
    assert order == ["fast", "slow", "fast", "slow"]
    [path] = tmp_path.glob("compare-*.json")
    servers = json.loads(path.read_text())["servers"]
    fast, slow = (servers[name]["median"]["W4b"] for name in ("fast", "slow"))
    assert (fast["ok"], fast["failed"], fast["tokens"]) == (8, 0, 1024)
    assert fast["prompt_tokens"] == 32
    assert fast["tpot_p50"] < slow["tpot_p50"]
    assert fast["pss_mib"] > 5
    assert len(servers["fast"]["rounds"]) == 2


def test_a_server_that_cannot_start_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["compare", "--spec", f"bad={command('dies')}", "--results", str(tmp_path)])
    assert code == 2
    assert "no such model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_sigterm_takes_the_started_server_along(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pagerelay.bench", "compare", "--spec", f"slow={command('slow')}"]
    with subprocess.Popen(
        [*words, "--workload", "W2", "--results", str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "ready" not in process.stderr.readline():
            assert process.poll() is None
        children = process_tree(process.pid)
        assert len(children) == 2
        process.terminate()
        assert process.wait(20) == 130
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
