"""Shared-memory segments by name: which are ours, and which have lost their owner. Needs nothing heavy."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - the place of POSIX shared memory, not a temporary file
NAME = re.compile(r"pagerelay-[0-9a-f]{32}")

own_segments: set[Path] = set()
"""They go with this process, however it ends, unless it is killed."""
os.register_at_fork(after_in_child=own_segments.clear)


@atexit.register
def remove_own() -> None:
    """Removes this process's segments. What is mapped stays readable where it is."""
    for path in own_segments:
        path.unlink(missing_ok=True)


def sweep_dead_segments() -> None:
    """Removes segments whose owners are gone, however they ended."""
    for path in FOLDER.glob("pagerelay-*"):
        if not NAME.fullmatch(path.name):
            continue
        # An error: it is another user's, was just removed, or is locked, that is, its owner lives.
        with suppress(OSError), os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
