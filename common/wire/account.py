"""A worker's own account of itself, sent with each heartbeat: the worker is its only writer."""

from __future__ import annotations

from msgspec import Struct, field


class BlockCounts(Struct, frozen=True, kw_only=True):
    """The ledger: ``free + held + leased + cached == total`` always.

    ``by_…`` count the blocks that have at least one holder of that kind; a block may have several kinds.
    """

    total: int = 0
    free: int = 0
    held: int = 0
    leased: int = 0
    cached: int = 0
    by_sequence: int = 0
    by_fetch: int = 0
    by_lease: int = 0
    by_prefix: int = 0
    """Known to the prefix cache; only those that nobody else holds are ``cached``."""


class Load(Struct, frozen=True, kw_only=True):
    """A worker's own account of itself, sent with each heartbeat; the worker is its only writer."""

    blocks: BlockCounts = field(default_factory=BlockCounts)
    waiting: int = 0
    running: int = 0
    outstanding_prefill_tokens: int = 0
    busy_for_s: float = 0.0
    """Seconds since the running engine step began; 0 between steps. A stuck engine shows here."""
    draining: bool = False
    hands_over: bool = False
    """It drains, and its running sequences may be taken elsewhere: ``Suspend`` them."""


class Counters(Struct, kw_only=True):
    """Totals since the worker started; the router turns them into Prometheus counters.

    Written in place: the step figures by the engine's thread alone, all others by the event loop alone.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_received: int = 0
    tokens_generated: int = 0
    tokens_drafted: int = 0
    """Guessed, computed beside a known one."""
    tokens_accepted: int = 0
    """Guesses that turned out right: they are among those generated."""
    steps: int = 0
    step_seqs: int = 0
    step_seconds: float = 0.0
    leases_expired: int = 0
    preemptions: int = 0
    copied_blocks: int = 0
    """Blocks that beams shared until one of them wrote to it."""
    corrupt_blocks: int = 0
    """Fetched blocks whose bytes were not those of their checksums: never used, the request recovered."""
    bad_logits: int = 0
    """Sequences that failed because their logits held NaN or infinity."""
    ledger_faults: int = 0
    """Times that the block ledger was found broken: always 0, or there is a fault in pagerelay."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Messages that came to nothing, by "kind/reason": late, repeated, stale, refused, malformed,
    unreachable."""
    fetched_blocks: dict[str, int] = field(default_factory=dict)
    """By transport in use."""
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    fallbacks: int = 0
    """Peers reached over tcp although automatic choice would have preferred shared memory or CUDA IPC."""
