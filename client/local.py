"""A cluster of one's own: ``pagerelay up`` as a child process that ends with its client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pagerelay.client.errors import StartupError
from pagerelay.client.loop import LoopThread

STOP_TIMEOUT_S = 40.0
"""How long the launcher may take to stop its services before it is killed, which ends them too."""


class LocalCluster:
    """The launcher's process. Its services listen on loopback, on free ports, and want a key."""

    def __init__(self, model: str | None, api_key: str, settings: Mapping[str, object]) -> None:
        self._settings: dict[str, object] = {
            "router.host": "127.0.0.1",
            "router.port": 0,
            "router.workers_endpoint": "tcp://127.0.0.1:0",
            "log_level": "warning",
            **({} if model is None else {"model.path": model}),
            **settings,
        }
        self._api_key = api_key
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, loop: LoopThread) -> str:
        """Fetches the model if need be, and returns the router's URL once every worker has joined. Raises
        :class:`StartupError`; Ctrl-C stops what was started."""
        read_end, write_end = os.pipe()
        try:
            # The kernel ends the launcher with the thread that started it, so the client's own thread does.
            try:
                loop.run(self._spawn(write_end))
            finally:
                os.close(write_end)
            return self._wait(read_end)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(read_end)

    async def _spawn(self, write_end: int) -> None:
        flags = [f"--set={name}={_written(value)}" for name, value in self._settings.items()]
        command = [sys.executable, "-m", "pagerelay.cli", "up", *flags]
        command += ["--announce-fd", str(write_end), "--parent-pid", str(os.getpid())]
        # The key goes by the environment, which other users cannot read.
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PAGERELAY_ROUTER_API_KEYS": self._api_key}
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
            command,
            env=environment,
            pass_fds=(write_end,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the client's alone
        )

    def _wait(self, read_end: int) -> str:
        buffer = b""
        while True:
            data = os.read(read_end, 65536)
            if not data:
                code = self._process.wait() if self._process is not None else None
                raise StartupError(f"the cluster ended while starting (exit code {code}); it has said why")
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                event: dict[str, Any] = json.loads(line)
                if event["event"] == "ready":
                    return str(event["url"])
                if event["event"] == "failed":
                    raise StartupError(str(event["text"]))

    def ended(self) -> int | None:
        """The exit code of a launcher that has ended, or ``None``."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Stops the services and waits for that. May be repeated."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)  # the second one: the launcher ends its services at once
            process.wait()
            raise


def _written(value: object) -> str:
    """As a flag has it: lists by commas, everything else as YAML reads a scalar."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
