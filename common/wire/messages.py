"""Everything that crosses a process boundary. One union per link; nothing else is ever sent.

=================  ============================================================================
link               messages
=================  ============================================================================
worker → router    Hello, Heartbeat, PrefillStarted, FirstToken, Tokens, Preempted, Failed, Goodbye
router → worker    Welcome, Refused, Beat, Drain, PrefillJob, DecodeJob, Ask, Abort
D → P              Fetch, Read, Renew, Release
P → D              Ready, Blocks (+ one raw frame a block), Commit, Released, LeaseLost
=================  ============================================================================

Ids are made by the router and never by a client: ``request_id`` names one choice of one HTTP request,
``attempt`` counts its dispatches. News about an older attempt is dropped and counted by whoever receives it.
Times on the wire are durations in seconds, never clock readings: no two hosts' clocks are ever compared.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

PROTOCOL = 1

Role = Literal["prefill", "decode", "colocated"]
FinishReason = Literal["stop", "length"]

Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Interval = Annotated[float, Meta(gt=0, le=86400)]
"""Seconds. Bounds are checked when a message is decoded, and refuse NaN."""


class Message(Struct, frozen=True, kw_only=True, gc=False, tag=True, array_like=False):
    """Base of all messages: immutable, tagged by class name, unknown optional fields tolerated."""


# ------------------------------------------------------------------------------------------------ values


class SamplingParams(Struct, frozen=True, kw_only=True, gc=False):
    """How to choose tokens; validated by the router, and by bounds at decoding.

    Randomness is a function of (``seed``, ``choice``, output position) alone, so neither the batch nor the
    worker nor a recovery changes a token. ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p``
    0 are off. ``max_tokens`` and ``min_tokens`` count output tokens from position 0, those before a recovery
    included.
    """

    max_tokens: Natural
    temperature: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    seed: Natural = 0
    choice: Natural = 0
    min_tokens: Natural = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class Layout(Struct, frozen=True, kw_only=True):
    """What two workers must agree on before one may read the other's KV; compared at registration and at
    fetch."""

    protocol: int
    model_digest: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def block_bytes(self) -> int:
        width = {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * width

    def difference(self, other: Layout) -> str | None:
        """``None`` if equal, else the first differing field with both values."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} here, {theirs!r} there"
        return None


class PoolAddress(Struct, frozen=True, kw_only=True):
    """Where a pool's bytes can be read. ``kind`` "shm": a segment name under /dev/shm; "tcp": the data
    endpoint alone.

    ``host_id`` is the kernel's boot id and ``nonce`` stands in the segment's header: a reader proves that it
    has opened the right memory before it trusts a byte of it.
    """

    kind: Literal["shm", "tcp"]
    num_blocks: int
    block_bytes: int
    host_id: str = ""
    segment: str = ""
    nonce: str = ""


class KvHandle(Struct, frozen=True, kw_only=True):
    """A lease on the KV of one prompt on a prefill worker; all a decode worker needs to fetch it."""

    worker_id: str
    incarnation: str
    lease: int
    data_endpoint: str
    pool: PoolAddress
    layout: Layout
    num_tokens: int


class BlockCounts(Struct, frozen=True, kw_only=True):
    """The ledger: ``free + held + leased + cached == total`` always."""

    total: int = 0
    free: int = 0
    held: int = 0
    leased: int = 0
    cached: int = 0


class Load(Struct, frozen=True, kw_only=True):
    """A worker's own account of itself, sent with each heartbeat; the worker is its only writer."""

    blocks: BlockCounts = field(default_factory=BlockCounts)
    waiting: int = 0
    running: int = 0
    outstanding_prefill_tokens: int = 0
    busy_for_s: float = 0.0
    """Seconds since the running engine step began; 0 between steps. A stuck engine shows here."""
    draining: bool = False


class TokenDelta(Struct, frozen=True, kw_only=True, gc=False):
    """One output token. ``index`` is its position in the output, so a repeated one is recognised and
    dropped."""

    request_id: str
    attempt: int
    index: int
    token: int
    finish_reason: FinishReason | None = None


# ------------------------------------------------------------------------------------------------ worker →
# router


class Hello(Message, frozen=True):
    worker_id: str
    incarnation: str
    role: Role
    layout: Layout
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    data_endpoint: str = ""
    transport: str = ""
    ops: str = ""
    pid: int = 0
    host: str = ""


class Counters(Struct, kw_only=True):
    """Totals since the worker started; the router turns them into Prometheus counters.

    Written in place: the step figures by the engine's thread alone, all others by the event loop alone.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_received: int = 0
    tokens_generated: int = 0
    steps: int = 0
    step_seqs: int = 0
    step_seconds: float = 0.0
    leases_expired: int = 0
    preemptions: int = 0
    dropped_messages: int = 0
    fetched_blocks: dict[str, int] = field(default_factory=dict)
    """By transport in use."""
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    fallbacks: int = 0
    """Fetches that had to use tcp although automatic choice would have preferred shared memory."""


class Heartbeat(Message, frozen=True):
    load: Load
    counters: Counters


class PrefillStarted(Message, frozen=True):
    request_id: str
    attempt: int
    handle: KvHandle
    queued_s: float
    num_cached_tokens: int


class FirstToken(Message, frozen=True):
    delta: TokenDelta
    prefill_s: float
    num_computed_tokens: int


class Tokens(Message, frozen=True):
    deltas: list[TokenDelta]


class HandoverPhases(Struct, frozen=True, kw_only=True):
    """Where a hand-over spent its time on D, in seconds: from the job's arrival to its blocks being reserved;
    from asking P to its first announcement (P computes); from the commit's arrival to the last block's copy
    (what was left after P's last chunk); from there to P's word that the lease stood."""

    reserve_s: float = 0.0
    announce_s: float = 0.0
    copy_s: float = 0.0
    confirm_s: float = 0.0


class HandedOver(Message, frozen=True):
    """D holds the whole KV and has confirmed it; decoding starts.

    ``first`` repeats the token that P sampled: should P's own message be lost with P, the stream has no gap.
    """

    request_id: str
    attempt: int
    first: TokenDelta
    transport: str
    handover_s: float
    num_bytes: int
    num_computed_tokens: int = 0
    """Prompt tokens that D had to compute itself: 0 wherever the split did its work."""
    phases: HandoverPhases | None = None


class Preempted(Message, frozen=True):
    request_id: str
    attempt: int


class Failed(Message, frozen=True):
    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool


class Goodbye(Message, frozen=True):
    pass


# ------------------------------------------------------------------------------------------------ router →
# worker


class Welcome(Message, frozen=True):
    router_id: str
    heartbeat_s: Interval
    dead_after_s: Interval


class Refused(Message, frozen=True):
    reason: str
    fatal: bool
    """True: this worker can never be paired as it is configured. False: say Hello again (the router
    restarted)."""


class Beat(Message, frozen=True):
    """Answer to a heartbeat: the router is alive."""


class Drain(Message, frozen=True):
    pass


class PrefillJob(Message, frozen=True):
    request_id: str
    attempt: int
    order: int
    """Arrival number at the router: smaller is older, and older goes first."""
    token_ids: list[int]
    sampling: SamplingParams
    first_index: Natural
    """Output position of the token this prefill samples; above 0 when it resumes an answer."""


class DecodeJob(Message, frozen=True):
    request_id: str
    attempt: int
    order: int
    token_ids: list[int]
    sampling: SamplingParams
    first_index: Natural
    handle: KvHandle | None
    """``None``: no prefill worker serves this request; compute the prompt here."""


class Ask(Message, frozen=True):
    """Nothing was heard of this request for a while, or a token is missing: a message may have been lost.

    Who has the request says again what there is to say of it, its tokens from ``next_index`` on; who has it
    not answers ``Failed(message_lost)``. Asked twice it changes nothing.
    """

    request_id: str
    attempt: int
    next_index: Natural


class Abort(Message, frozen=True):
    request_id: str
    attempt: int


# ------------------------------------------------------------------------------------------------ D → P


class Fetch(Message, frozen=True):
    """Opens the fetch of a lease. Blocks before ``from_block`` are already on D and are not announced."""

    lease: int
    incarnation: str
    """Of the worker that gave the lease: another process at its address must not take it for its own."""
    from_block: Natural
    layout: Layout


class Read(Message, frozen=True):
    """TCP only: send me these blocks. What a reader has asked for and not got is its credit in use."""

    lease: int
    block_ids: list[int]


class Renew(Message, frozen=True):
    leases: list[int]


class Release(Message, frozen=True):
    """``received`` true: the copy is complete, may I use it? ``Released.ok`` answers. False: no longer
    wanted."""

    lease: int
    received: bool


# ------------------------------------------------------------------------------------------------ P → D


class Ready(Message, frozen=True):
    """Blocks ``first .. first + len(block_ids)`` of the prompt are final and may be read."""

    lease: int
    first: Natural
    block_ids: list[int]


class Blocks(Message, frozen=True):
    """TCP only: the bytes of these blocks follow, one raw frame each, in this order."""

    lease: int
    block_ids: list[int]


class Commit(Message, frozen=True):
    """All blocks have been announced: ``num_tokens`` tokens of KV, and the token sampled after them."""

    lease: int
    num_tokens: int
    first_token: int


class Released(Message, frozen=True):
    lease: int
    ok: bool


class LeaseLost(Message, frozen=True):
    lease: int
    reason: str
    ended: bool = False
    """True: nothing went wrong, the request has ended on P or was taken back."""


ToRouter = (
    Hello | Heartbeat | PrefillStarted | FirstToken | Tokens | HandedOver | Preempted | Failed | Goodbye
)
ToWorker = Welcome | Refused | Beat | Drain | PrefillJob | DecodeJob | Ask | Abort
ToPrefill = Fetch | Read | Renew | Release
ToDecode = Ready | Blocks | Commit | Released | LeaseLost
