"""What a child process owes its launcher: to say how far it is, and never to outlive it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1

log = logging.getLogger("pagerelay.cli")


class Announcer:
    """Writes events as JSON lines to the descriptor that a launcher gave; without one, progress goes to the
    log."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def __call__(self, event: dict[str, Any]) -> None:
        if self._fd is not None:
            try:
                os.write(self._fd, (json.dumps(event) + "\n").encode())
            except OSError:
                self._fd = None  # the launcher has stopped reading, or is gone
        elif event["event"] == "progress":
            print(event["text"], file=sys.stderr, flush=True)
        elif event["event"] == "ready":
            log.info("ready: %s", " ".join(f"{k}={v}" for k, v in event.items() if k != "event"))


def die_with_parent(parent_pid: int) -> None:
    """The kernel sends SIGTERM when the launcher ends, however it ends; an orphan does not drain (see
    ``orphaned``)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it ended before we asked
        raise SystemExit(130)


def orphaned(parent_pid: int | None) -> bool:
    """Has the launcher that started us gone? A service started by hand has none."""
    return parent_pid is not None and os.getppid() != parent_pid
