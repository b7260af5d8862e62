"""Several answers to one prompt: its KV is computed and shipped once.

The first choice goes its ordinary way. When its decode worker has the KV, the others start there: they hold
the prompt's full blocks together, by the prefix cache, and compute only what follows them (less than a block)
for themselves, from where each samples its own first token. Nobody writes to a block that others hold. An
answer that recovers does so alone, like any other.
"""

from __future__ import annotations

import asyncio


class PromptShare:
    """Belongs to the choices of one prompt."""

    def __init__(self) -> None:
        self._settled = asyncio.Event()
        self._worker_id: str | None = None

    def settle(self, worker_id: str | None) -> None:
        """The first choice's KV is on this decode worker, or it has come to its end without one. Only the
        first word counts."""
        if not self._settled.is_set():
            self._worker_id = worker_id
            self._settled.set()

    async def worker_id(self) -> str | None:
        """Where the others start, once that is known; ``None``: wherever there is room."""
        await self._settled.wait()
        return self._worker_id
