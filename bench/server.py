"""A server as a child process: own process group, own port, waited for, and gone afterwards."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

READY_PATHS = ("/readyz", "/health", "/v1/models")
POLL_S = 0.2
STOP_S = 30.0


def free_port() -> int:
    """A port of loopback that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def split_command(text: str) -> tuple[dict[str, str], list[str]]:
    """``"A=1 server --port {port}"`` → environment, words. Raises ``ValueError`` if there is no command."""
    words = shlex.split(text)
    environment: dict[str, str] = {}
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words:
        raise ValueError(f"{text!r}: no command")
    return environment, words


class Server:
    """A running child. ``port`` is where it serves HTTP on loopback."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def last_words(self, lines: int = 8) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    async def wait_ready(self, limit_s: float) -> float:
        """Seconds until one of :data:`READY_PATHS` answered 200. Raises ``ValueError`` with the server's last
        words.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                if self.process.returncode is not None:
                    raise ValueError(
                        f"the server ended with code {self.process.returncode}:\n{self.last_words()}"
                    )
                if await self._answers(session):
                    return clock() - start
                if clock() - start > limit_s:
                    raise ValueError(f"the server was not ready after {limit_s:g} s:\n{self.last_words()}")
                await asyncio.sleep(POLL_S)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        for path in READY_PATHS:
            try:
                async with session.get(self.url + path, allow_redirects=False) as response:
                    if response.status == 200:
                        return True
                    if response.status != 404:  # it has this path, and says that it is not ready
                        return False
            except (aiohttp.ClientError, OSError, TimeoutError):
                return False
        return False

    async def stop(self) -> None:
        """SIGTERM to the leader, time to drain, then SIGKILL to whatever is left of the group."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def running(
    words: Sequence[str], port: int, environment: Mapping[str, str] | None = None, core: int | None = None
) -> AsyncIterator[Server]:
    """Starts the command as leader of a new process group, on one core if asked, and stops it at the end."""
    with tempfile.TemporaryDirectory(prefix="pagerelay-bench-") as folder:
        log = Path(folder) / "log"
        before = os.sched_getaffinity(0) if core is not None else set()
        with log.open("wb") as file:
            try:
                if core is not None:
                    os.sched_setaffinity(0, {core})  # inherited by the child, and taken back below
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env={**os.environ, **(environment or {})},
                    process_group=0,
                )
            finally:
                if core is not None:
                    os.sched_setaffinity(0, before)
        server = Server(process, port, log)
        try:
            yield server
        finally:
            await asyncio.shield(server.stop())
