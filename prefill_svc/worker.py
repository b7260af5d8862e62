"""The prefill worker's process: jobs from routers, KV to decode workers."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(slots=True)
class _Times:
    """When a job was accepted, began to be computed and had its first token, by the worker's clock."""

    accepted: float
    began: float | None = None
    ended: float | None = None


class PrefillWorker(Worker):
    role = "prefill"

    def __init__(self, config: Config, keys: CurveKeys | None, parts: Parts) -> None:
        super().__init__(config, keys, parts)
        self.engine: PrefillEngine = PrefillEngine(
            parts.runner, parts.facts, parts.pool, parts.limits, self.leasing()
        )
        self.data = self.make_data_link(self.engine)
        self._times: dict[tuple[str, int], _Times] = {}
        """(request_id, attempt) → when it came to what; for durations only."""

    async def stop_data_link(self) -> None:
        await super().stop_data_link()
        self.parts.backend.close()

    def after_step(self) -> None:
        pass  # decode workers come by themselves

    # ------------------------------------------------------------------ routers

    def submit(self, router_id: str, message: ToWorker) -> None:
        if isinstance(message, PrefillJob):
            self._times.setdefault((message.request_id, message.attempt), _Times(self.clock()))
            self.engine.submit(router_id, message, self.clock())

    def outgoing(self, message: Message) -> Message:
        # A router may ask to hear either again: the durations are those of the first time.
        if isinstance(message, PrefillStarted):
            times = self._times.get((message.request_id, message.attempt))
            if times is not None:
                times.began = self.clock() if times.began is None else times.began
                return msgspec.structs.replace(message, queued_s=times.began - times.accepted)
        elif isinstance(message, FirstToken):
            times = self._times.get((message.delta.request_id, message.delta.attempt))
            if times is not None and times.began is not None:
                times.ended = self.clock() if times.ended is None else times.ended
                return msgspec.structs.replace(message, prefill_s=times.ended - times.began)
        return message

    def tick(self) -> None:
        super().tick()
        for key in [key for key in self._times if not self.engine.knows(key[0])]:
            del self._times[key]
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
