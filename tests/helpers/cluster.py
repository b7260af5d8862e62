"""A real cluster for tests: the launcher that users run, on free ports, and a small HTTP client for it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import strict_sse
from strict_sse import StrictStream, check_answer
from zygote import zygote

from pagerelay.cli.local import Child, LocalCluster
from pagerelay.common.config import Config, load_config

FREE_PORTS = {"router.port": "0", "router.workers_endpoint": "tcp://127.0.0.1:0"}


@contextmanager
def running(
    model: Path, *, restart: bool = False, forked: bool = True, **settings: object
) -> Iterator[Cluster]:
    """A cluster with ``settings`` (``cluster__decode=2``), stopped and checked for lost processes afterwards.
    ``forked``: its workers come from the zygote, not by the command that users start them with."""
    flags = FREE_PORTS | {"model.path": str(model), "cache.num_blocks": "512", "engine.threads": "1"}
    flags |= {name.replace("__", "."): str(value) for name, value in settings.items()}
    with tempfile.TemporaryDirectory(prefix="pagerelay-test-") as folder:
        config = load_config(None, flags, {})
        launcher = LoggedCluster(config, Path(folder) / "log", restart=restart, forked=forked)
        with launcher:
            yield Cluster(launcher)
    assert all(child.process.poll() is not None for child in launcher.children)


class LoggedCluster(LocalCluster):
    """Its processes write what they log to a file; ``latest`` are the logs of those that run."""

    latest: ClassVar[list[Path]] = []

    def __init__(self, config: Config, log: Path, *, restart: bool, forked: bool) -> None:
        super().__init__(config, restart=restart, quiet=True)
        self.log = log
        self._forked = forked

    def start(self) -> None:
        self.latest.append(self.log)
        try:
            super().start()
        except BaseException:
            sys.stderr.write(self.log.read_text())
            self._done_with_log()
            raise

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._done_with_log()

    def _done_with_log(self) -> None:
        """Its folder goes with the cluster."""
        if self.log in self.latest:
            self.latest.remove(self.log)

    def _popen(self, arguments: list[str]) -> Any:
        # They inherit the descriptor: for this moment it is the file's.
        ours = os.dup(2)
        with open(self.log, "ab") as file:
            os.dup2(file.fileno(), 2)
            try:
                if self._forked and arguments[0] != "router":
                    return zygote().fork(arguments)
                return super()._popen(arguments)
            finally:
                os.dup2(ours, 2)
                os.close(ours)


class Cluster:
    def __init__(self, launcher: LocalCluster) -> None:
        self.launcher = launcher
        self.url = launcher.url
        self._log_read = 0

    @property
    def folder(self) -> Path:
        """Of the model."""
        return Path(self.launcher._config.model.path)

    # ------------------------------------------------------------------ processes

    def child(self, name: str) -> Child:
        return next(child for child in self.launcher.children if child.name == name)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.child(name).process.pid, number)

    def revive(self, name: str) -> None:
        """Starts a worker that was killed again, as an operator would."""
        child = self.child(name)
        child.process.wait(10)
        os.close(child.events)
        child.process, child.events = self.launcher._popen(child.arguments)

    def fresh_log(self) -> str:
        """What its processes have logged since the last call."""
        assert isinstance(self.launcher, LoggedCluster)
        whole = self.launcher.log.read_bytes()
        fresh, self._log_read = whole[self._log_read :], len(whole)
        return fresh.decode()

    # ------------------------------------------------------------------ state

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
            text = await response.text()
            return json.loads(text) if response.content_type == "application/json" else text

    async def workers(self, role: str | None = None) -> list[dict[str, Any]]:
        return [w for w in (await self.get("/cluster"))["workers"] if role in (None, w["role"])]

    async def until(self, what: str, condition: Any, seconds: float = 10.0) -> None:
        """Polls an async condition; a time limit is a bound on the system, not a measurement."""
        deadline = time.monotonic() + seconds
        while not await condition():
            assert time.monotonic() < deadline, (
                f"after {seconds} s still not: {what}; {await self.get('/cluster')}"
            )
            await asyncio.sleep(0.05)

    async def idle(self, seconds: float = 10.0) -> None:
        """Every block is free or cached again, nothing runs or waits anywhere."""

        async def quiet() -> bool:
            state = await self.get("/cluster")
            loads = [worker["load"] for worker in state["workers"]]
            return not state["requests_running"] and all(
                load["blocks"]["held"] == load["blocks"]["leased"] == load["running"] == load["waiting"] == 0
                and load["blocks"]["free"] + load["blocks"]["cached"] == load["blocks"]["total"]
                for load in loads
            )

        await self.until("idle", quiet, seconds)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry these labels."""
        total = 0.0
        for line in (await self.get("/metrics")).splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    # ------------------------------------------------------------------ requests

    async def generate(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | fields
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + "/generate", json=body) as response,
        ):
            answer = await response.json()
            assert response.status == 200, answer
            check_answer("Generation", answer)
            return answer

    async def ids(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> list[int]:
        return (await self.generate(prompt, max_tokens, **fields))["choices"][0]["token_ids"]

    async def stream(
        self, prompt: str | list[int], max_tokens: int, **fields: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Events of a ``/generate`` stream; an error event comes as it is."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | fields
        body["stream"] = True
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + "/generate", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            async for event in sse(response, body):
                yield event


async def post(cluster: Cluster, path: str, body: Any, **options: Any) -> tuple[int, Any, Any]:
    """(status, answer, headers); an answer in JSON is decoded."""
    async with aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        async with session.post(
            cluster.url + path, data=io.BytesIO(data), headers=headers, **options
        ) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text, response.headers


async def sse(response: aiohttp.ClientResponse, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream that answers ``request``, every byte checked: see :mod:`strict_sse`."""
    async for event in strict_sse.events(response, StrictStream(response.url.path, request)):
        yield event


def joined(events: list[dict[str, Any]]) -> tuple[list[int], str, str | None]:
    """(ids, text, finish reason) of a one-choice stream."""
    choices = [choice for event in events for choice in event["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return ids, "".join(choice["text"] for choice in choices), reasons[0] if reasons else None
