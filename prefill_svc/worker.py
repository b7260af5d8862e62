"""The prefill worker's process: jobs from routers, KV to decode workers."""

from __future__ import annotations

import msgspec

from pagerelay.common.config import Config
from pagerelay.common.service.build import Parts
from pagerelay.common.service.worker import Worker
from pagerelay.common.wire.account import Load
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.common.wire.messages import (
    FirstToken,
    Message,
    PrefillJob,
    PrefillStarted,
    ToWorker,
)
from pagerelay.prefill_svc.engine import PrefillEngine


class PrefillWorker(Worker):
    role = "prefill"

    def __init__(self, config: Config, keys: CurveKeys | None, parts: Parts) -> None:
        super().__init__(config, keys, parts)
        self.engine: PrefillEngine = PrefillEngine(
            parts.runner, parts.facts, parts.pool, parts.limits, self.leasing()
        )
        self.data = self.make_data_link(self.engine)
        self._times: dict[str, float] = {}
        """request_id → when it was accepted; for durations only."""
        self._began: dict[str, float] = {}
        """request_id → when its prefill began."""

    async def stop_data_link(self) -> None:
        await super().stop_data_link()
        self.parts.backend.close()

    def after_step(self) -> None:
        pass  # decode workers come by themselves

    # ------------------------------------------------------------------ routers

    def submit(self, router_id: str, message: ToWorker) -> None:
        if isinstance(message, PrefillJob):
            self._times.setdefault(message.request_id, self.clock())
            self.engine.submit(router_id, message)

    def outgoing(self, message: Message) -> Message:
        now = self.clock()
        if isinstance(message, PrefillStarted):
            since = self._times.pop(message.request_id, now)
            self._began[message.request_id] = now
            return msgspec.structs.replace(message, queued_s=now - since)
        if isinstance(message, FirstToken):
            since = self._began.pop(message.delta.request_id, now)
            return msgspec.structs.replace(message, prefill_s=now - since)
        return message

    def tick(self) -> None:
        super().tick()
        now = self.clock()
        # Requests that were taken back or failed leave their times behind.
        for times in (self._times, self._began):
            for request_id in [r for r, at in times.items() if now - at > 3600 or not self.engine.knows(r)]:
                del times[request_id]
        self.counters.prompt_tokens_cached = self.engine.num_prompt_tokens_cached

    def load(self) -> Load:
        engine = self.engine
        return Load(
            blocks=engine.counts(),
            waiting=len(engine.scheduler.waiting),
            running=len(engine.scheduler.running),
            outstanding_prefill_tokens=engine.outstanding_tokens(),
            busy_for_s=self.busy_for_s(),
            draining=self.draining,
        )
