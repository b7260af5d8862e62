"""A request that is answered by beams: the same life, one hand-over of the prompt's KV, no token until the
end.

The decode worker says after each step how far the search is: that it lives. A search that is lost with its
worker begins anew elsewhere, and finds the same.
"""

from __future__ import annotations

from pagerelay.common.wire.messages import Beams, Hypothesis, TokenDelta
from pagerelay.router.flow import RequestFlow
from pagerelay.router.links import RequestNews


class BeamFlow(RequestFlow):
    _newest: Beams | None = None

    async def hypotheses(self) -> list[Hypothesis]:
        """What the search has found, best first. Raises an :class:`ApiError`."""
        while self._newest is None or self._newest.hypotheses is None:
            await self._step()
        self._done = True
        self._move("FINISHED")
        return self._newest.hypotheses

    async def _on_news(self, event: RequestNews) -> list[TokenDelta]:
        if isinstance(event, Beams):
            if self.state == "HANDOFF":
                self._decoding()  # its HandedOver was lost
            if self._newest is None or event.num_tokens > self._newest.num_tokens:
                self._advanced()
            self._newest = event
            return []
        return await super()._on_news(event)

    async def _accept(self, delta: TokenDelta) -> list[TokenDelta]:
        return []  # the likeliest first token: an answer may begin with another one

    async def _dispatch(self) -> None:
        self._newest = None
        await super()._dispatch()
