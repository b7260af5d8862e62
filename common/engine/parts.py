"""What an engine is told at its start, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagerelay.common.engine.drafting import Speculation
from pagerelay.common.wire.messages import Message, TokenDelta, Tokens

MAX_DELTAS = 1024
"""With their log-probabilities less than half of a frame's limit."""


@dataclass(slots=True)
class EngineLimits:
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    prefix_cache: bool = True
    speculation: Speculation | None = None
    step_ahead: bool = False
    """Begin a step while the one before it runs, where the operations can choose tokens on a device."""


@dataclass(slots=True)
class StepStats:
    """What one step did, for metrics."""

    num_seqs: int = 0
    num_prefill_tokens: int = 0
    sampled: int = 0
    drafted: int = 0
    accepted: int = 0
    """Guessed tokens, and those of them that were kept."""
    bad_logits: int = 0
    """Sequences that it failed because their logits held NaN or infinity."""


@dataclass(slots=True)
class Outbox:
    """Messages that an engine wants sent, in order: to routers by id, to decode workers by their link's
    identity."""

    to_router: list[tuple[str, Message]] = field(default_factory=list)
    to_peer: list[tuple[bytes, Message]] = field(default_factory=list)

    def tokens(self, owner: str, deltas: list[TokenDelta]) -> None:
        """In as many messages as it takes for each to fit a frame."""
        for at in range(0, len(deltas), MAX_DELTAS):
            self.to_router.append((owner, Tokens(deltas=deltas[at : at + MAX_DELTAS])))
