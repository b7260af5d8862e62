"""Workers for tests, forked by one process that has imported what they need.

Importing torch and transformers takes a worker seconds, and tests start a hundred of them. The process that
asks adopts what the zygote forks for it (it is their subreaper), so that it waits for them, and they end with
it, as if it had started them itself. Tests of the launcher start what users start; so does the cluster that
most tests share.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
IMPORTS = (
    "pagerelay.cli.serve",
    "pagerelay.decode_svc.worker",
    "pagerelay.kernels.cpu_ops",
    "pagerelay.prefill_svc.worker",
    "transformers.models.llama.modeling_llama",
)


class Forked:
    """An adopted child, with what the launcher wants of a ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=os.environ | {"PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, arguments: list[str], *, launched: bool = True) -> tuple[Forked, int]:
        """A process that runs the command with these arguments, and where it announces its events. Its
        standard error is ours. ``launched``: it ends when we do, as a launcher's child."""
        events, announce = os.pipe()
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("PAGERELAY_") or k == "PAGERELAY_CACHE"
        }
        wanted = {
            "arguments": arguments,
            "environment": environment,
            "parent": os.getpid(),
            "launched": launched,
        }
        try:
            socket.send_fds(self._socket, [json.dumps(wanted).encode()], [announce, 2])
        finally:
            os.close(announce)
        answer = self._socket.recv(100)
        if not answer:
            raise RuntimeError("the zygote has ended; see its messages above")
        os.set_blocking(events, False)
        return Forked(int(answer)), events


@functools.cache
def zygote() -> Zygote:
    """The one of this process. It ends with it."""
    return Zygote()


def _serve(asked: socket.socket) -> None:
    from faulty import run_command

    for module in IMPORTS:
        importlib.import_module(module)
    gc.freeze()  # what they all share is not walked, hence not copied
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, 1 << 20, 2)
        if not request:
            return
        read_end, write_end = os.pipe()
        middle = os.fork()
        if middle == 0:
            worker = os.fork()
            if worker == 0:
                os.close(read_end)
                os.close(write_end)
                asked.close()
                _become(json.loads(request), *descriptors, run_command)
            os.write(write_end, str(worker).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        asked.send(os.read(read_end, 100))  # it is theirs now
        for descriptor in (read_end, write_end, *descriptors):
            os.close(descriptor)


def _become(
    wanted: dict[str, Any], announce: int, stderr: int, run_command: Callable[[list[str]], int]
) -> NoReturn:
    code = 70
    try:
        asked_at = time.monotonic()
        while os.getppid() != wanted["parent"]:
            if time.monotonic() > asked_at + 10:
                raise SystemExit(70)  # who asked is gone
            time.sleep(0.001)
        os.setsid()
        for standard in (1, 2):
            os.dup2(stderr, standard)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        flags = ["--announce-fd", str(announce)]
        if wanted["launched"]:
            flags += ["--parent-pid", str(wanted["parent"])]
        code = run_command([*wanted["arguments"], *flags])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve(socket.socket(fileno=int(sys.argv[1])))
