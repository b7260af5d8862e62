"""What a service owes whoever started it: to say how far it is, to end when told, and never to outlive a
launcher."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pagerelay.common.segments import remove_own

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


class Signals:
    """What ends this process, and when.

    At SIGTERM and SIGINT it ends in order, at a second one at once. At SIGHUP, of which many may come, in
    order too: the kernel sends it when the launcher has ended, however it did, or a terminal is closed.
    """

    def __init__(self, parent_pid: int | None) -> None:
        """``parent_pid``: the launcher's, where one started us. Until :meth:`serve`, a signal unwinds what is
        being done, so that no pool and no half file stays."""
        self._parent_pid = parent_pid
        self._asked = False
        if parent_pid is not None:
            # The kernel sends one for each thread of the launcher that ends after the one that started us, so
            # SIGTERM, of which the second means haste, would not do. A launcher under nohup ignores SIGHUP,
            # and we inherit that.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
            if self.orphaned():  # it ended before we asked
                raise SystemExit(130)
        for number in (signal.SIGTERM, signal.SIGINT, *hang_up()):
            signal.signal(number, self._unwind)

    def orphaned(self) -> bool:
        """Has the launcher that started us gone? Then there is nobody to finish anything for. A service that
        was started by hand has none."""
        return self._parent_pid is not None and os.getppid() != self._parent_pid

    def serve(self, stop: Callable[[], None]) -> None:
        """From now on, signals call ``stop``, from the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, *hang_up()):
            loop.add_signal_handler(number, self._stop, number, stop)
        if self._asked:  # while loading, and whatever ran then has swallowed it
            stop()

    def _unwind(self, number: int, frame: object) -> None:
        if self._first(number):
            raise SystemExit(130)

    def _stop(self, number: int, stop: Callable[[], None]) -> None:
        if self._first(number):
            stop()

    def _first(self, number: int) -> bool:
        """Was nothing asked for before? A second signal that means haste does not return."""
        if self._asked and number != signal.SIGHUP:
            log.warning("second signal: ending now")
            remove_own()
            os._exit(130)
        first, self._asked = not self._asked, True
        return first


def hang_up() -> list[signal.Signals]:
    """SIGHUP, but where ``nohup`` told us to ignore it."""
    return [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
