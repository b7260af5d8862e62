"""Work beside the event loop that nobody walks away from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_aside(work: Callable[[], T], executor: Executor | None = None) -> T:
    """Runs ``work`` on the executor, else on one of the loop's threads. Cancelled, it returns only when the
    work has stopped: the blocks that it reads or writes are somebody else's afterwards."""
    working = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(working)
    finally:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
