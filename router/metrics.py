"""Prometheus metrics. Labels come from closed sets alone: routes, outcomes, causes, transports, live worker
ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagerelay.common.wire.account import Counters
from pagerelay.router.registry import WorkerEntry, WorkerRegistry

RECOVERY_CAUSES = {
    *("worker_lost", "lease_expired", "fetch_failed", "step_failed"),
    *("stall", "forgotten", "handover_failed", "preempted", "prompt_scores_lost"),
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouterMetrics:
    def __init__(self, registry: WorkerRegistry) -> None:
        self.collector = CollectorRegistry()
        collector = self.collector
        self.requests = Counter(
            "pagerelay_requests",
            "HTTP requests by route and outcome",
            ["route", "outcome"],
            registry=collector,
        )
        self.timeouts = Counter(
            "pagerelay_timeouts",
            "Time limits of requests that ran out, by their error code",
            ["limit"],
            registry=collector,
        )
        self.running = Gauge("pagerelay_requests_running", "Requests in the house", registry=collector)
        self.prompt_tokens = Counter(
            "pagerelay_prompt_tokens", "Tokens of accepted prompts", registry=collector
        )
        self.output_tokens = Counter("pagerelay_output_tokens", "Tokens given to clients", registry=collector)
        self.ttft = Histogram(
            "pagerelay_time_to_first_token_seconds",
            "Arrival to first token",
            buckets=_SECONDS,
            registry=collector,
        )
        self.itl = Histogram(
            "pagerelay_inter_token_latency_seconds",
            "Gap between a choice's tokens",
            buckets=_SECONDS,
            registry=collector,
        )
        self.e2e = Histogram(
            "pagerelay_request_seconds", "Arrival to last token", buckets=_SECONDS, registry=collector
        )
        self.queue = Histogram(
            "pagerelay_queue_seconds",
            "Wait for a prefill worker to begin",
            buckets=_SECONDS,
            registry=collector,
        )
        self.prefill = Histogram(
            "pagerelay_prefill_seconds", "Prefill begun to first token", buckets=_SECONDS, registry=collector
        )
        self.handover = Histogram(
            "pagerelay_handover_seconds",
            "Prefill ended to KV confirmed on the decode worker",
            ["transport"],
            buckets=_SECONDS,
            registry=collector,
        )
        self.handover_phases = Histogram(
            "pagerelay_handover_phase_seconds",
            "Where hand-overs spent their time: reserve, announce, copy, confirm, first_step",
            ["phase"],
            buckets=(0.0005, *_SECONDS),
            registry=collector,
        )
        self.handover_bytes = Counter(
            "pagerelay_handover_bytes", "KV bytes shipped", ["transport"], registry=collector
        )
        self.recomputed_tokens = Counter(
            "pagerelay_decode_recomputed_tokens",
            "Prompt tokens that decode workers computed themselves",
            registry=collector,
        )
        self.local_prefills = Counter(
            "pagerelay_local_prefills",
            "Prompts sent to a decode worker without a prefill worker",
            ["reason"],
            registry=collector,
        )
        self.recoveries = Counter(
            "pagerelay_recoveries", "Requests dispatched anew", ["cause"], registry=collector
        )
        self.moved = Counter(
            "pagerelay_moved_requests",
            "Running requests handed over from a draining decode worker to another",
            registry=collector,
        )
        self.dropped = Counter(
            "pagerelay_dropped_messages",
            "Workers' messages that the router dropped",
            ["kind", "reason"],
            registry=collector,
        )
        self.loop_lag = Gauge(
            "pagerelay_event_loop_lag_seconds", "How late the router's own timer was", registry=collector
        )
        self.collector.register(_Workers(registry))

    def recovered(self, cause: str) -> None:
        """Counts a request dispatched anew. ``cause`` may come from a worker, who could call it anything."""
        self.recoveries.labels(cause=cause if cause in RECOVERY_CAUSES else "other").inc()

    def drop(self, kind: str, reason: str) -> None:
        """Counts a message that came to nothing. Both labels are from closed sets."""
        self.dropped.labels(kind=kind, reason=reason).inc()

    def unauthorized(self, route: str) -> None:
        """Counts a request that showed no valid API key."""
        self.requests.labels(route=route, outcome="unauthorized").inc()

    def expose(self) -> bytes:
        return generate_latest(self.collector)


class _Workers(Collector):
    """The workers' own account of themselves, from their last heartbeats."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        entries = self._registry.entries()
        yield from self._gauges(entries)
        yield from _counters(self._registry.totals())

    @staticmethod
    def _gauges(entries: Iterable[WorkerEntry]) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "pagerelay_blocks", "KV blocks by condition", labels=["worker", "role", "condition"]
        )
        holders = GaugeMetricFamily(
            "pagerelay_block_holders",
            "KV blocks with at least one holder of the kind",
            labels=["worker", "role", "kind"],
        )
        seqs = GaugeMetricFamily("pagerelay_sequences", "Sequences", labels=["worker", "role", "condition"])
        due = GaugeMetricFamily(
            "pagerelay_outstanding_prefill_tokens",
            "Prompt tokens not computed yet",
            labels=["worker", "role"],
        )
        up = GaugeMetricFamily("pagerelay_worker_up", "Workers that are here", labels=["worker", "role"])
        for entry in entries:
            who = [entry.worker_id, entry.hello.role]
            load = entry.load
            for condition in ("total", "free", "held", "leased", "cached"):
                blocks.add_metric([*who, condition], getattr(load.blocks, condition))
            for kind in ("sequence", "fetch", "lease", "prefix"):
                holders.add_metric([*who, kind], getattr(load.blocks, f"by_{kind}"))
            seqs.add_metric([*who, "running"], load.running)
            seqs.add_metric([*who, "waiting"], load.waiting)
            due.add_metric(who, load.outstanding_prefill_tokens)
            up.add_metric(who, 1)
        yield from (blocks, holders, seqs, due, up)


def _counters(total: Counters) -> Iterator[Metric]:
    prompt = CounterMetricFamily(
        "pagerelay_worker_prompt_tokens", "Prompt tokens by where their KV came from", labels=["source"]
    )
    prompt.add_metric(["computed"], total.prompt_tokens_computed)
    prompt.add_metric(["received"], total.prompt_tokens_received)
    prompt.add_metric(["cached"], total.prompt_tokens_cached)
    yield prompt
    for transport, name, help_text in (
        (total.fetched_blocks, "pagerelay_fetched_blocks", "KV blocks fetched"),
        (total.fetched_bytes, "pagerelay_fetched_bytes", "KV bytes fetched"),
    ):
        family = CounterMetricFamily(name, help_text, labels=["transport"])
        for kind, amount in transport.items():
            family.add_metric([kind], amount)
        yield family
    dropped = CounterMetricFamily(
        "pagerelay_worker_dropped_messages",
        "Messages that workers dropped or could not deliver",
        labels=["kind", "reason"],
    )
    for key, amount in total.dropped.items():
        kind, _, reason = key.partition("/")
        dropped.add_metric([kind, reason], amount)
    yield dropped
    for name, value, help_text in (
        ("pagerelay_engine_steps", total.steps, "Engine steps"),
        (
            "pagerelay_engine_step_sequences",
            total.step_seqs,
            "Sequences summed over steps: / steps = batch size",
        ),
        ("pagerelay_engine_step_seconds", total.step_seconds, "Time spent in steps"),
        ("pagerelay_worker_tokens", total.tokens_generated, "Tokens sampled"),
        ("pagerelay_drafted_tokens", total.tokens_drafted, "Tokens guessed by speculative decoding"),
        ("pagerelay_accepted_tokens", total.tokens_accepted, "Guessed tokens that were right"),
        (
            "pagerelay_corrupt_blocks",
            total.corrupt_blocks,
            "Fetched KV blocks that did not match their checksum",
        ),
        ("pagerelay_bad_logits", total.bad_logits, "Sequences failed for NaN or infinity in their logits"),
        ("pagerelay_ledger_faults", total.ledger_faults, "Block ledgers found broken; always 0"),
        ("pagerelay_leases_expired", total.leases_expired, "Leases that ran out"),
        ("pagerelay_copied_blocks", total.copied_blocks, "Blocks copied before a beam wrote to a shared one"),
        ("pagerelay_preemptions", total.preemptions, "Sequences preempted for want of blocks"),
        (
            "pagerelay_transport_fallbacks",
            total.fallbacks,
            "Peers reached over tcp although shm or cuda_ipc was preferred",
        ),
    ):
        yield CounterMetricFamily(name, help_text, value=value)
