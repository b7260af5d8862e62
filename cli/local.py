"""``pagerelay up``: a whole cluster as child processes of this one.

The children are in process groups of their own, so that Ctrl-C reaches only the launcher, which then drains
them in order: router first, then the workers. A worker that ends by itself is started again, a few times.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from pagerelay.cli.process import Announcer, hang_up
from pagerelay.common.config import DEFAULT_GPU_MEMORY_UTILIZATION, Config
from pagerelay.common.errors import StartupError
from pagerelay.common.model.fetch import resolve_model
from pagerelay.common.segments import sweep_dead_segments
from pagerelay.common.wire.address import parse

START_TIMEOUT_S = 180.0
RESTART_DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Waits before the restarts of one worker within ``RESTART_WINDOW_S``; after the last one it is left
alone until the first lies that far back."""
RESTART_WINDOW_S = 120.0


@dataclass(slots=True)
class Child:
    """One service's process."""

    name: str
    arguments: list[str]
    process: subprocess.Popen[bytes]
    events: int
    buffer: bytes = b""
    ready: dict[str, Any] | None = None
    restarts: list[float] = field(default_factory=list)
    """When it was started again, lately."""
    restart_at: float | None = None
    """When it is due to be started again."""
    failed: str | None = None
    """Why it did not start, in its own words."""
    given_up: bool = False
    """It was restarted as often as it may be for now, and that was said."""


class ChildEnded(Exception):
    """A service ended while starting. With code 2 or 3 it has said why, in its own one line (``text``)."""

    def __init__(self, name: str, code: int, text: str | None) -> None:
        super().__init__(f"{name} ended while starting (exit code {code}); see its messages above")
        self.code = code
        self.text = text


class LocalCluster:
    """Starts, watches and stops the processes. Use as a context manager; leaving it stops everything."""

    def __init__(self, config: Config, *, restart: bool = True, quiet: bool = False) -> None:
        self._config = config
        self._restart = restart
        self._quiet = quiet
        self._folder = tempfile.TemporaryDirectory(prefix="pagerelay-")
        self._selector = selectors.DefaultSelector()
        self.children: list[Child] = []
        self.url = ""
        self.workers_endpoint = ""
        self.interrupted = False

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Returns when the router answers and every worker has joined it. Raises :class:`StartupError`."""
        config = self._config
        model = resolve_model(config.model.path, progress=self._say)
        workers = ["prefill"] * config.cluster.prefill + ["decode"] * config.cluster.decode
        workers += ["colocated"] * config.cluster.colocated
        if not workers:
            raise StartupError(
                "cluster: no workers; set cluster.prefill and cluster.decode, or cluster.colocated"
            )
        threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // len(workers))
        effective = msgspec.to_builtins(config)
        effective["model"] |= {"path": str(model), "served_name": config.model.served_name or model.name}
        effective["engine"]["threads"] = threads
        if config.engine.gpu_memory_utilization is None:  # all of them are on one GPU
            share = math.floor(100 * DEFAULT_GPU_MEMORY_UTILIZATION / len(workers)) / 100
            effective["engine"]["gpu_memory_utilization"] = share
        self._file = Path(self._folder.name) / "pagerelay.yaml"
        self._file.touch(mode=0o600)
        self._file.write_text(yaml.safe_dump(effective), encoding="utf-8")
        router = self._spawn("router", "router", [])
        self._until(lambda: router.ready is not None, "the router starts")
        assert router.ready is not None  # noqa: S101 - the line above waited for it
        self.url, self.workers_endpoint = router.ready["url"], router.ready["workers_endpoint"]
        names = {role: 0 for role in workers}
        for role in workers:
            names[role] += 1
            name = f"{role}-{names[role]}"
            self._spawn(name, role, ["--router", self.workers_endpoint, "--name", name])
        self._until(
            lambda: all(child.ready is not None for child in self.children), "the workers load the model"
        )
        self._until(lambda: len(self.cluster()["workers"]) >= len(workers), "the workers join")

    def _spawn(self, name: str, role: str, extra: list[str]) -> Child:
        arguments = [role, "--config", str(self._file), *extra]
        process, events = self._popen(arguments)
        child = Child(name, arguments, process, events)
        self.children.append(child)
        self._selector.register(events, selectors.EVENT_READ, child)
        return child

    def _popen(self, arguments: list[str]) -> tuple[subprocess.Popen[bytes], int]:
        read_end, write_end = os.pipe()
        # What the environment says is in the file already; there it could override our flags.
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("PAGERELAY_") or k == "PAGERELAY_CACHE"
        }
        environment |= {"PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", "pagerelay.cli", *arguments]
        command += ["--announce-fd", str(write_end), "--parent-pid", str(os.getpid())]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
                command,
                env=environment,
                pass_fds=(write_end,),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        return process, read_end

    # ------------------------------------------------------------------ watching

    def pump(self, timeout_s: float) -> None:
        """Reads the children's events for up to ``timeout_s``; starts again what ended by itself."""
        for key, _ in self._selector.select(timeout_s):
            child: Child = key.data
            data = os.read(child.events, 65536)
            if not data:
                self._selector.unregister(child.events)
                continue
            child.buffer += data
            *lines, child.buffer = child.buffer.split(b"\n")
            for line in lines:
                self._event(child, json.loads(line))

    def _event(self, child: Child, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            self._say(f"{child.name}: {event['text']}")
        elif event["event"] == "ready":
            child.ready = event
            self._say(f"{child.name}: ready")
        elif event["event"] == "failed":
            child.failed = event["text"]

    def _until(self, done: Any, what: str) -> None:
        began = told = time.monotonic()
        while not done():
            if self.interrupted:
                raise KeyboardInterrupt
            now = time.monotonic()
            if now - began > START_TIMEOUT_S:
                raise StartupError(f"gave up after {START_TIMEOUT_S:g} s while {what}")
            if now - told > 5:
                told = now
                self._say(f"… {what} ({now - began:.0f} s)")
            self.pump(0.1)
            for child in self.children:
                if child.process.poll() is not None and child.ready is None:
                    self.pump(0)  # its last words
                    raise ChildEnded(child.name, child.process.returncode, child.failed)

    def watch(self) -> None:
        """Serves until interrupted, or until the router ends by itself."""
        while not self.interrupted:
            self.pump(0.2)
            if not self.revive_dead():
                return

    def revive_dead(self) -> bool:
        """Starts again what ended by itself; false if the cluster cannot go on."""
        for child in self.children:
            code = child.process.poll()
            if code is not None and not self._revive(child, code):
                return False
        return True

    def _revive(self, child: Child, code: int) -> bool:
        """False if the cluster cannot go on without this child."""
        if child.name == "router":
            self._say(f"the router ended (exit code {code})")
            return False
        if not self._restart:
            return True
        now = time.monotonic()
        child.restarts = [at for at in child.restarts if now - at < RESTART_WINDOW_S]
        if len(child.restarts) == len(RESTART_DELAYS_S):
            if not child.given_up:
                child.given_up = True
                until = time.localtime(time.time() + child.restarts[0] + RESTART_WINDOW_S - now)
                self._say(
                    f"{child.name} ended (exit code {code}) after {len(child.restarts)} restarts: given up "
                    f"until {time.strftime('%H:%M:%S', until)}; see its messages above"
                )
            return True
        child.given_up = False
        if child.restart_at is None:
            delay = RESTART_DELAYS_S[len(child.restarts)]
            child.restart_at = now + delay
            self._say(
                f"{child.name} ended (exit code {code}); starting it again"
                + (f" in {delay:g} s" * (delay > 0))
            )
        if now < child.restart_at:
            return True
        child.restart_at = None
        child.restarts.append(now)
        if child.events in self._selector.get_map():
            self._selector.unregister(child.events)
        os.close(child.events)
        child.process, child.events = self._popen(child.arguments)
        child.ready, child.buffer = None, b""
        self._selector.register(child.events, selectors.EVENT_READ, child)
        return True

    def cluster(self) -> Any:
        """``GET /cluster``."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5)
        try:
            connection.request("GET", "/cluster")
            return json.loads(connection.getresponse().read())
        except OSError as error:
            raise StartupError(f"the router at {self.url} does not answer: {error}") from error
        finally:
            connection.close()

    # ------------------------------------------------------------------ stop

    def stop(self) -> None:
        """Drains: the router finishes its requests first, then the workers end. Interrupted again, ends them
        now."""
        router = [child for child in self.children if child.name == "router"]
        workers = [child for child in self.children if child.name != "router"]
        for group in (router, workers):
            for child in group:
                if child.process.poll() is None:
                    child.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self._config.router.drain_s + 10
            self.interrupted = False
            while any(child.process.poll() is None for child in group):
                if self.interrupted or time.monotonic() > deadline:
                    self.kill()
                    break
                time.sleep(0.05)
        self.kill()
        self._selector.close()
        self._folder.cleanup()

    def kill(self) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
        sweep_dead_segments()  # a killed worker leaves its KV pool in memory

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
        except BaseException:
            self.kill()
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _say(self, line: str) -> None:
        if not self._quiet:
            print(line, file=sys.stderr, flush=True)


def up(config: Config, announce: Announcer | None = None) -> int:
    """The command. Checks what it can before anything is started. A program is told the URL by ``announce``,
    a person by the banner."""
    parse(config.router.workers_endpoint, "router.workers_endpoint")
    config.cluster_key()
    resolve_model(config.model.path, progress=lambda line: print(line, file=sys.stderr, flush=True))
    cluster = LocalCluster(config)

    def interrupt(number: int, frame: object) -> None:
        cluster.interrupted = True

    for number in (signal.SIGINT, signal.SIGTERM, *hang_up()):
        signal.signal(number, interrupt)
    try:
        with cluster:
            if announce is not None:
                announce({"event": "ready", "url": cluster.url, "workers_endpoint": cluster.workers_endpoint})
            else:
                print(_banner(cluster, config), flush=True)
            cluster.watch()
            if not cluster.interrupted:
                return 1
            if announce is None:
                print("draining; Ctrl-C again ends at once", file=sys.stderr, flush=True)
    except ChildEnded as ended:
        if ended.code in (2, 3):
            if announce is not None:
                announce({"event": "failed", "text": ended.text or str(ended)})
            return ended.code
        raise StartupError(str(ended)) from ended
    return 0


def _banner(cluster: LocalCluster, config: Config) -> str:
    shown = cluster.cluster()
    pools = ", ".join(
        f"{worker['id']} ({worker['ops']}, pool in {worker['pool']})" for worker in shown["workers"]
    )
    example = json.dumps({"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0})
    return f"""
pagerelay is up: {shown["model"]} on {pools}

  generate     POST {cluster.url}/generate
  OpenAI API        {cluster.url}/v1  (completions, chat/completions, models)
  cluster      GET  {cluster.url}/cluster
  metrics      GET  {cluster.url}/metrics
  more workers pagerelay decode --router {cluster.workers_endpoint}

Try it:

  curl -s {cluster.url}/generate -H 'Content-Type: application/json' -d '{example}'

Ctrl-C stops it."""
