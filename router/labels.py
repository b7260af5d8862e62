"""Labels of metrics that come from workers, who could call anything anything: what is not from its closed set
is ``other``, so no number of names makes more time series."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from pagerelay.common.wire.account import Counters
from pagerelay.common.wire.messages import Message

_KINDS = {"TokenDelta", "unknown", *(kind.__name__ for kind in Message.__subclasses__())}
_REASONS = {"late", "repeated", "stale", "refused", "malformed", "unreachable"}


def transport_label(name: str) -> str:
    return name if name in ("shm", "tcp", "cuda_ipc") else "other"


def labelled(counters: Counters) -> Counters:
    """The same figures, by names that are known."""
    dropped, blocks, sizes = Counter[str](), Counter[str](), Counter[str]()
    for key, amount in counters.dropped.items():
        kind, _, reason = key.partition("/")
        kind, reason = kind if kind in _KINDS else "other", reason if reason in _REASONS else "other"
        dropped[f"{kind}/{reason}"] += amount
    for total, by_name in ((blocks, counters.fetched_blocks), (sizes, counters.fetched_bytes)):
        for name, amount in by_name.items():
            total[transport_label(name)] += amount
    return replace(counters, dropped=dict(dropped), fetched_blocks=dict(blocks), fetched_bytes=dict(sizes))
