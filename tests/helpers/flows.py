"""A registry on a clock that tests turn, and links that remember what was sent instead of sending it."""

from __future__ import annotations

import asyncio
from typing import Any

from engines import FACTS, handle_for, make_pool
from msgspec import structs

from pagerelay.common.wire.messages import (
    Abort,
    DecodeJob,
    Failed,
    FinishReason,
    FirstToken,
    HandedOver,
    HandoverPhases,
    Hello,
    KvHandle,
    Preempted,
    PrefillJob,
    PrefillStarted,
    Probe,
    PromptScores,
    SamplingParams,
    Suspend,
    Suspended,
    TokenDelta,
    TokenLogprobs,
    Tokens,
)
from pagerelay.router.beam_flow import BeamFlow
from pagerelay.router.flow import FlowSettings, RequestFlow
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.policy import LeastLoad
from pagerelay.router.registry import WorkerEntry, WorkerRegistry


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def hello(worker_id: str, **changes: Any) -> Hello:
    """Changes may be fields of Hello or of its layout."""
    layout = FACTS.layout(4)
    of_layout = {name: value for name, value in changes.items() if hasattr(layout, name)}
    message = Hello(
        worker_id=worker_id,
        incarnation=f"{worker_id}-1",
        role="decode",
        layout=structs.replace(layout, **of_layout),
        num_blocks=64,
        max_model_len=2000,
        host="here",
    )
    return structs.replace(message, **{name: v for name, v in changes.items() if name not in of_layout})


def registry(clock: Clock) -> WorkerRegistry:
    return WorkerRegistry(
        model_digest="model", clock=clock, heartbeat_s=0.5, dead_s=3.0, stuck_s=60.0, context_len=1000
    )


class Links:
    """Stands in for ``WorkerLinks``: ``sent`` is (worker, message)s, ``broken`` cannot be reached."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self.registry = workers
        self.flows: dict[str, Any] = {}
        self.sent: list[tuple[str, Any]] = []
        self.broken: set[str] = set()

    async def send(
        self, entry: WorkerEntry, message: PrefillJob | DecodeJob | Probe | Suspend | Abort
    ) -> bool:
        self.sent.append((entry.worker_id, message))
        await asyncio.sleep(0)
        if entry.worker_id in self.broken:
            self.registry.remove(entry, "it cannot be reached")
            return False
        return True


class House:
    """A router's inside with some workers, ``House("p1", "p2", "d1")``; c is a colocated one."""

    ROLES = {"p": "prefill", "d": "decode", "c": "colocated"}  # noqa: RUF012 - never changed

    def __init__(self, *workers: str) -> None:
        self.clock = Clock()
        self.registry = registry(self.clock)
        self.links = Links(self.registry)
        self.metrics = RouterMetrics(self.registry)
        self.pool = make_pool(8)
        for worker_id in workers:
            self.join(worker_id)

    def join(self, worker_id: str, **fields: Any) -> WorkerEntry:
        self.registry.welcome(hello(worker_id, role=self.ROLES[worker_id[0]], **fields), worker_id.encode())
        entry = self.registry.by_id(worker_id)
        assert entry is not None
        return entry

    def entry(self, worker_id: str) -> WorkerEntry:
        found = self.registry.by_id(worker_id)
        assert found is not None, f"{worker_id} is not here"
        return found

    def lose(self, worker_id: str) -> None:
        self.registry.remove(self.entry(worker_id), "lost")

    def take_sent(self) -> list[tuple[str, Any]]:
        sent, self.links.sent = self.links.sent, []
        return sent

    def flow(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        max_recoveries: int = 2,
        queue_timeout_s: float = 5.0,
        stall_timeout_s: float = 5.0,
        rejoin_wait_s: float = 0.0,
        probe_s: float = 5.0,
    ) -> Driven:
        kind = BeamFlow if sampling.beam_width else RequestFlow
        flow = kind(
            request_id="r",
            prompt=prompt,
            sampling=sampling,
            links=self.links,  # type: ignore[arg-type]
            policy=LeastLoad(),
            metrics=self.metrics,
            settings=FlowSettings(queue_timeout_s, stall_timeout_s, max_recoveries, rejoin_wait_s, probe_s),
            clock=self.clock,
        )
        return Driven(self, flow, prompt, sampling)

    def dropped(self, reason: str) -> float:
        """Messages dropped for this reason, of whatever kind."""
        return sum(
            sample.value
            for metric in self.metrics.dropped.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.labels["reason"] == reason
        )

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.collector.get_sample_value(f"pagerelay_{metric}_total", labels) or 0.0


class Driven:
    """A flow, and news for it as the workers would send them. ``attempt`` is the current one unless given."""

    def __init__(self, house: House, flow: RequestFlow, prompt: list[int], sampling: SamplingParams) -> None:
        self.house, self.flow = house, flow
        self.prompt, self.sampling = prompt, sampling

    def handle(self, num_tokens: int | None = None) -> KvHandle:
        tokens = len(self.prompt) + len(self.flow.journal.tokens) if num_tokens is None else num_tokens
        return handle_for(1, tokens, self.house.pool)

    def delta(
        self, index: int, token: int, reason: FinishReason | None = None, attempt: int | None = None
    ) -> TokenDelta:
        return TokenDelta(
            request_id="r",
            attempt=self.flow.attempt if attempt is None else attempt,
            index=index,
            token=token,
            finish_reason=reason,
        )

    def news(self, message: Any, worker_id: str = "whoever") -> None:
        self.flow.news(message, worker_id)

    def started(self, attempt: int | None = None) -> None:
        self.news(
            PrefillStarted(
                request_id="r",
                attempt=self.flow.attempt if attempt is None else attempt,
                handle=self.handle(),
                queued_s=0.5,
                num_cached_tokens=0,
            )
        )

    def first(self, index: int, token: int, reason: FinishReason | None = None, **kw: Any) -> None:
        self.news(
            FirstToken(delta=self.delta(index, token, reason, **kw), prefill_s=0.25, num_computed_tokens=1)
        )

    def scores(self) -> None:
        """All of the prompt's."""
        of_prompt = [TokenLogprobs(-0.5)] * (len(self.prompt) - 1)
        self.news(PromptScores(request_id="r", attempt=self.flow.attempt, first=1, scores=of_prompt))

    def handed_over(
        self,
        index: int,
        token: int,
        transport: str = "shm",
        reason: FinishReason | None = None,
        phases: HandoverPhases | None = None,
        **kw: Any,
    ) -> None:
        delta = self.delta(index, token, reason, **kw)
        self.news(
            HandedOver(
                request_id="r",
                attempt=delta.attempt,
                first=delta,
                transport=transport,
                handover_s=0.125,
                num_bytes=10,
                num_computed_tokens=4 if transport == "local" else 0,
                phases=phases,
            )
        )

    def tokens(self, *deltas: TokenDelta) -> None:
        message = Tokens(deltas=list(deltas))
        for position in range(len(deltas)):
            self.flow.tokens(message, position)

    def token(self, index: int, token: int, reason: FinishReason | None = None, **kw: Any) -> None:
        self.tokens(self.delta(index, token, reason, **kw))

    def failed(
        self,
        code: str = "fetch_failed",
        retryable: bool = True,
        attempt: int | None = None,
        worker_id: str = "whoever",
    ) -> None:
        self.news(
            Failed(
                request_id="r",
                attempt=self.flow.attempt if attempt is None else attempt,
                code=code,
                message=f"it is {code}",
                retryable=retryable,
            ),
            worker_id,
        )

    def suspended(self, num_tokens: int, attempt: int | None = None) -> None:
        self.news(
            Suspended(
                request_id="r",
                attempt=self.flow.attempt if attempt is None else attempt,
                handle=self.handle(num_tokens),
            )
        )

    def preempted(self) -> None:
        self.news(Preempted(request_id="r", attempt=self.flow.attempt))

    # ------------------------------------------------------------------ what is due to be sent

    def prefill_job(self, attempt: int = 1, emitted: list[int] | None = None) -> PrefillJob:
        return PrefillJob(
            request_id="r",
            attempt=attempt,
            age_s=0.0,
            token_ids=self.prompt + (emitted or []),
            sampling=self.sampling,
            first_index=len(emitted or []),
        )

    def decode_job(
        self, attempt: int = 1, emitted: list[int] | None = None, local: bool = False
    ) -> DecodeJob:
        return DecodeJob(
            request_id="r",
            attempt=attempt,
            age_s=0.0,
            token_ids=self.prompt + (emitted or []),
            sampling=self.sampling,
            first_index=len(emitted or []),
            handle=None if local else self.handle(len(self.prompt) + len(emitted or [])),
        )

    @staticmethod
    def abort(attempt: int = 1) -> Abort:
        return Abort(request_id="r", attempt=attempt)
