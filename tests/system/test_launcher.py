"""The command line: what it refuses and how, Ctrl-C, and that nothing outlives the launcher."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from cluster import running
from strict_sse import check_stream
from zygote import Forked, zygote

from pagerelay.cli import local
from pagerelay.cli.local import Child, LocalCluster
from pagerelay.common.config import load_config

COMMAND = [sys.executable, "-m", "pagerelay.cli"]


def run(*arguments: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode not in (0, 1)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("pagerelay: ")
    for word in words:
        assert word in lines[0]


def test_wrong_settings_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "pagerelay.yaml"
    file.write_text("engine: {max_num_seq: 3}\n")
    one_line(run("up", "--config", str(file)), "max_num_seq", str(file))
    file.write_text("engine: {threads: 1, threads: 2}\n")
    one_line(run("up", "--config", str(file)), "threads", "twice")
    one_line(run("up", "--config", str(tmp_path / "none.yaml")), "none.yaml")
    one_line(run("router", "--set", "router.prot=3"), "router.prot")
    one_line(run("decode", "--router", "localhost:5555", "--model", "tiny-llama"), "tcp://HOST:PORT")
    one_line(run("up", "--model", str(tmp_path / "no-model")), "no-model", "no such folder")
    one_line(run("up", "--port", "99999"), "router.port")


def test_off_loopback_needs_a_key(tiny_dir: Path) -> None:
    one_line(
        run("router", "--model", str(tiny_dir), "--workers-endpoint", "tcp://0.0.0.0:0", "--port", "0"),
        "keygen",
        "router.workers_endpoint",
    )


@pytest.mark.parametrize("setting", ["router.port", "router.workers_endpoint"])
def test_port_in_use_names_the_setting(tiny_dir: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {"router.port": "0", "router.workers_endpoint": "tcp://127.0.0.1:0"}
        flags[setting] = str(port) if setting == "router.port" else f"tcp://127.0.0.1:{port}"
        settings = [part for name, value in flags.items() for part in ("--set", f"{name}={value}")]
        one_line(run("router", "--model", str(tiny_dir), *settings), setting, str(port))
        if setting == "router.workers_endpoint":
            return
        result = run("up", "--model", str(tiny_dir), *settings)
        errors = [line for line in result.stderr.splitlines() if line.startswith("pagerelay: ")]
        assert (result.returncode, len(errors)) == (3, 1)


def test_config_prints_what_is_in_force(tmp_path: Path) -> None:
    key = run("keygen").stdout.strip()
    assert len(key) >= 32
    result = run("config", "--set", f"cluster.key={key}", "--decode", "3")
    assert result.returncode == 0
    assert key not in result.stdout
    assert "decode: 3" in result.stdout


@contextmanager
def launched(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``pagerelay up`` in a process group of its own, as a shell would start it; yields it and its URL."""
    command = [
        *COMMAND,
        "up",
        "--model",
        str(model),
        "--port",
        "0",
        "--workers-endpoint",
        "tcp://127.0.0.1:0",
    ]
    command += ["--num-blocks", "256", "--threads", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        url = next(line.split()[2] for line in process.stdout if line.startswith("  generate"))
        yield process, url.removesuffix("/generate")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def pids(url: str) -> list[int]:
    with urllib.request.urlopen(url + "/cluster") as response:
        return [worker["pid"] for worker in json.load(response)["workers"]]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def segments() -> set[str]:
    """Names of all KV pools in shared memory: those of clusters that other tests share, too."""
    return {path.name for path in Path("/dev/shm").glob("pagerelay-*")}


def assert_gone(children: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(gone(pid) for pid in children):
        assert time.monotonic() < deadline, "a child outlived the launcher"
        time.sleep(0.05)


def test_ctrl_c_finishes_what_runs(tiny_dir: Path) -> None:
    with launched(tiny_dir) as (process, url):
        children = pids(url)
        body = json.dumps({"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
        request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as stream:
            first = stream.readline()
            os.kill(process.pid, signal.SIGINT)
            assert check_stream(first + stream.read(), "/generate", json.loads(body)).done
        assert process.wait(30) == 0
        assert_gone(children, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_nothing_outlives_the_launcher(tiny_dir: Path, number: signal.Signals) -> None:
    before = segments()
    with launched(tiny_dir) as (process, url):
        children = pids(url)
        assert segments() > before
        os.kill(process.pid, number)
        process.wait(40)
        assert_gone(children, 5)
    assert segments() == before, "a KV pool was left in memory"


@contextmanager
def by_hand(model: Path) -> Iterator[tuple[Forked, IO[bytes]]]:
    """A worker without a launcher, and its events."""
    command = ["colocated", "--model", str(model), "--router", "tcp://127.0.0.1:9"]
    process, events = zygote().fork([*command, "--num-blocks", "64", "--threads", "1"], launched=False)
    os.set_blocking(events, True)
    with os.fdopen(events, "rb") as lines:
        try:
            yield process, lines
        finally:
            process.kill()
            process.wait()


def pool_of(pid: int) -> Path:
    """The file of a worker's pool, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                if "/pagerelay-" in os.readlink(link) and link.readlink().parent == Path("/dev/shm"):
                    return link.readlink()
        time.sleep(0.01)
    raise AssertionError("the worker has no pool")


@pytest.mark.parametrize(
    ("numbers", "codes"),
    [
        ([signal.SIGTERM], [0]),
        ([signal.SIGTERM, signal.SIGINT], [130]),
        # As the kernel does when a launcher of several threads is killed. The last ones may find the event
        # loop gone and its handlers with it: everything is tidied up by then.
        ([signal.SIGHUP] * 5, [0, -signal.SIGHUP]),
    ],
    ids=["once", "twice", "hang-up"],
)
def test_no_signal_leaves_a_pool(tiny_dir: Path, numbers: list[signal.Signals], codes: list[int]) -> None:
    with by_hand(tiny_dir) as (process, events):
        assert any(b'"ready"' in line for line in events)
        pool = pool_of(process.pid)
        assert pool.exists()
        for number in numbers:
            process.send_signal(number)
            if number == signal.SIGHUP:
                time.sleep(0.01)  # one that waits to be taken swallows the next
        assert process.wait(30) in codes
        assert not pool.exists()


def test_a_signal_while_loading_leaves_no_pool(smollm_dir: Path) -> None:
    """A model that takes its time: the tiny one may be there before the signal is."""
    with by_hand(smollm_dir) as (process, events):
        pool = pool_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
        assert not pool.exists()
        assert not any(b'"ready"' in line for line in events)


def test_nohup_is_heard(tiny_dir: Path) -> None:
    command = ["nohup", *COMMAND, "colocated", "--model", str(tiny_dir), "--router", "tcp://127.0.0.1:9"]
    with subprocess.Popen([*command, "--num-blocks", "64"], stderr=subprocess.DEVNULL) as process:
        try:
            pool_of(process.pid)  # nohup has become the worker, which loads its model
            process.send_signal(signal.SIGHUP)
            time.sleep(1)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, 130)  # it serves, or still loads
        finally:
            process.kill()


async def test_with_keys_only_who_shows_one_is_served(tiny_dir: Path) -> None:
    settings = {"cluster__prefill": 0, "cluster__decode": 0, "cluster__colocated": 1}
    with running(tiny_dir, router__api_keys="a-key-of-ours,another-key", **settings) as cluster:
        assert (await cluster.get("/readyz"))["status"] == "ready"
        assert (await cluster.get("/v1/models"))["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "Bearer another-key", "Content-Type": "application/json"}
        body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        request = urllib.request.Request(cluster.url + "/generate", body, headers)
        with await asyncio.to_thread(urllib.request.urlopen, request) as response:
            assert response.status == 200


@pytest.mark.parametrize("loads", [True, False], ids=["ends-after-ready", "ends-while-loading"])
def test_a_worker_that_cannot_stay_is_started_again_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loads: bool
) -> None:
    """The process is of no matter here: what counts is when a new one is started."""
    launcher = LocalCluster(load_config(None, {}, {}))
    started: list[float] = []
    now = 100.0
    monkeypatch.setattr(local.time, "monotonic", lambda: now)

    class Ended:
        def poll(self) -> int:
            return 1

    def popen(arguments: list[str]) -> tuple[Any, int]:
        started.append(now)
        return Ended(), os.open(os.devnull, os.O_RDONLY)

    process, events = popen([])
    child = Child("decode-1", [], process, events, ready={})
    launcher.children.append(child)
    launcher._popen = popen  # type: ignore[method-assign]
    launcher._selector.close()
    launcher._selector = FakeSelector()  # type: ignore[assignment]
    for _ in range(1100):
        if loads:
            child.ready = {}
        assert launcher.revive_dead()
        now += 0.1
    waits = [round(later - earlier) for earlier, later in itertools.pairwise(started)]
    assert waits == [0, 1, 2, 4, 8], "and then it is left alone"
    said = [line for line in capsys.readouterr().err.splitlines() if "given up until" in line]
    assert len(said) == 1, "once"
    assert said[0].startswith("decode-1 ended (exit code 1) after 5 restarts: given up until ")
    for _ in range(190):
        assert launcher.revive_dead()
        now += 0.1
    assert len(started) == 7, "what was two minutes ago does not count any more"
    os.close(child.events)
    launcher._folder.cleanup()


class FakeSelector:
    def get_map(self) -> dict[int, None]:
        return {}

    def register(self, *_: object) -> None:
        pass


def test_a_worker_that_dies_is_started_again(tiny_dir: Path) -> None:
    with running(tiny_dir, restart=True) as cluster:
        first = cluster.child("decode-1").process.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while cluster.child("decode-1").process.pid == first or cluster.child("decode-1").ready is None:
            assert time.monotonic() < deadline
            cluster.launcher.pump(0.1)
            cluster.launcher.revive_dead()
