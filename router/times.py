"""How long the stages of one request took, for its timings and for ``/metrics``."""

from __future__ import annotations

from pagerelay.common.wire.messages import FirstToken, HandedOver, PrefillStarted
from pagerelay.router.labels import transport_label
from pagerelay.router.metrics import RouterMetrics


class FlowTimes:
    """Durations in seconds, as far as they are known."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.handover_s: float | None = None
        self.phases: dict[str, float] = {}
        """Those of HandoverPhases, and first_step."""
        self._metrics = metrics
        self._step_due: tuple[float, int] | None = None
        """Loop time at which D had the KV, until its first step is measured; index of the token given with
        it."""

    def queued(self, event: PrefillStarted) -> None:
        self.queue_s = event.queued_s
        self._metrics.queue.observe(event.queued_s)

    def prefilled(self, event: FirstToken) -> None:
        self.prefill_s = event.prefill_s
        self._metrics.prefill.observe(event.prefill_s)

    def hands_off(self) -> None:
        """Another decode worker is to take it: the last one's first step will not be seen any more."""
        self._step_due = None

    def handed_over(self, event: HandedOver, now: float) -> None:
        if event.transport == "local":
            self._metrics.recomputed_tokens.inc(event.num_computed_tokens)
            return
        self.handover_s = event.handover_s
        transport = transport_label(event.transport)
        self._metrics.handover.labels(transport=transport).observe(event.handover_s)
        if event.phases is not None:
            for name in event.phases.__struct_fields__:
                self._phase(name.removesuffix("_s"), getattr(event.phases, name))
        self._step_due = now, event.first.index
        self._metrics.handover_bytes.labels(transport=transport).inc(event.num_bytes)

    def decoded(self, index: int, now: float) -> None:
        """The decode worker brought the token at ``index``."""
        if self._step_due is not None and index > self._step_due[1]:
            self._phase("first_step", now - self._step_due[0])
            self._step_due = None

    def _phase(self, name: str, seconds: float) -> None:
        self.phases[name] = seconds
        self._metrics.handover_phases.labels(phase=name).observe(seconds)
