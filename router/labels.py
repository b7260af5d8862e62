"""Labels of metrics that come from workers, who could call anything anything: what is not from its closed set
is ``other``, so no number of names makes more time series."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from msgspec.structs import replace

from pagerelay.common.wire.account import Counters
from pagerelay.common.wire.messages import ToDecode, ToPrefill, ToRouter, ToWorker

OTHER = "other"
_TRANSPORTS = {"shm", "tcp", "cuda_ipc"}
_MESSAGES = {kind.__name__ for kind in get_args(ToRouter | ToWorker | ToPrefill | ToDecode)}
_KINDS = _MESSAGES | {"TokenDelta", "unknown"}
_REASONS = {"late", "repeated", "stale", "refused", "malformed", "unreachable"}


def transport_label(name: str) -> str:
    return name if name in _TRANSPORTS else OTHER


def _drop_label(key: str) -> str:
    kind, _, reason = key.partition("/")
    return f"{kind if kind in _KINDS else OTHER}/{reason if reason in _REASONS else OTHER}"


def labelled(counters: Counters) -> Counters:
    """The same figures, by names that are known."""
    return replace(
        counters,
        dropped=_by(_drop_label, counters.dropped),
        fetched_blocks=_by(transport_label, counters.fetched_blocks),
        fetched_bytes=_by(transport_label, counters.fetched_bytes),
    )


def _by(label: Callable[[str], str], counts: dict[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for key, amount in counts.items():
        total[label(key)] = total.get(label(key), 0) + amount
    return total
