"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from pagerelay.client.errors import ClientClosed

T = TypeVar("T")

END_S = 5.0
"""How long what still runs may take to be cancelled when the loop is stopped."""


class LoopThread:
    """Runs coroutines for other threads until :meth:`cancel`. The thread ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._lock = threading.RLock()  # what was accepted stands before the end in the loop's queue
        self._thread = threading.Thread(target=self._serve, name="pagerelay-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    @property
    def here(self) -> bool:
        """Is the caller the loop's own thread? It must not wait for the loop then."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result or exception. Ctrl-C cancels it. Raises :class:`ClientClosed` if the loop is
        stopped, before or meanwhile."""
        if self.here:
            work.close()
            raise RuntimeError("a client's own event loop cannot wait for itself")
        with self._lock:
            if self._stopped:
                work.close()
                raise ClientClosed("the client is closed; make another one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed meanwhile") from None
        finally:
            future.cancel()

    def clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs what ends something; in the loop's own thread without waiting. A stopped loop has ended it."""
        if self.here:
            self._tasks.add(task := self._loop.create_task(work))
            task.add_done_callback(self._tasks.discard)
            return
        with contextlib.suppress(ClientClosed):
            self.run(work)

    def cancel(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancels what runs, takes nothing more, and runs ``last``. For other threads only, once."""
        with self._lock:
            self._stopped = True
            ended = asyncio.run_coroutine_threadsafe(self._cancel(last), self._loop)
        with contextlib.suppress(TimeoutError):
            ended.result(END_S)

    async def _cancel(self, last: Coroutine[Any, Any, None]) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last

    def end(self) -> None:
        """Ends the thread. For other threads only, once, after :meth:`cancel`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
