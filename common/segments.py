"""Shared-memory segments by name: which are ours, and which have lost their owner. Needs nothing heavy."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - the place of POSIX shared memory, not a temporary file
NAME = re.compile(r"pagerelay-[0-9a-f]{32}")


def sweep_dead_segments() -> int:
    """Removes segments whose owners are gone, however they ended. Returns how many."""
    removed = 0
    for path in FOLDER.glob("pagerelay-*"):
        if not NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except OSError:
            pass  # locked: its owner lives
        finally:
            os.close(fd)
    return removed
