"""Everything that crosses a process boundary. One union per link; nothing else is ever sent.

=================  ============================================================================
link               messages
=================  ============================================================================
worker → router    Hello, Heartbeat, PrefillStarted, FirstToken, PromptScores, HandedOver, Tokens, Beams,
                   Preempted, Suspended, Failed, Goodbye
router → worker    Welcome, Refused, Beat, Drain, PrefillJob, DecodeJob, Suspend, Probe, Abort
D → P              Fetch, Read, Renew, Release, Attach, Detached
P → D              Ready, Blocks (+ one raw frame a block), Commit, Released, LeaseLost, Detach
=================  ============================================================================

Ids are made by the router and never by a client: ``request_id`` names one choice of one HTTP request,
``attempt`` counts its dispatches. News about an older attempt is dropped and counted by whoever receives it.
On the data link P stands for whoever gives a lease: a decode worker that hands its sequences over does so
too. Times on the wire are durations in seconds, never clock readings: no two hosts' clocks are ever compared.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from pagerelay.common.wire.account import Counters, Load
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.common.wire.sampling import Count as Count
from pagerelay.common.wire.sampling import FinishReason as FinishReason
from pagerelay.common.wire.sampling import Hypothesis as Hypothesis
from pagerelay.common.wire.sampling import SamplingParams as SamplingParams
from pagerelay.common.wire.sampling import TokenDelta as TokenDelta
from pagerelay.common.wire.sampling import TokenLogprobs as TokenLogprobs

PROTOCOL = 3

Role = Literal["prefill", "decode", "colocated"]

Age = Annotated[float, Meta(ge=0, le=1e9)]
"""Seconds."""
Interval = Annotated[float, Meta(gt=0, le=86400)]
"""Seconds. Bounds are checked when a message is decoded, and refuse NaN."""


class Message(Struct, frozen=True, kw_only=True, gc=False, tag=True, array_like=False):
    """Base of all messages: immutable, tagged by class name, unknown optional fields tolerated."""


# ------------------------------------------------------------------------------------------------ values


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
    weights: str = "fp32"
    """What the model computes with: fp32 or int8. Other weights make another KV of the same tokens."""

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


class KvHandle(Struct, frozen=True, kw_only=True):
    """A lease on the KV of one sequence on another worker; all a decode worker needs to fetch it."""

    worker_id: str
    incarnation: str
    lease: int
    data_endpoint: str
    pool: PoolAddress
    layout: Layout
    num_tokens: int
    lease_s: Interval
    """How long the lease stands after a sign of life: the reader gives them more often than that."""
    ticket: str = ""
    """Secret of the lease: who shows it was sent by the router."""


# ------------------------------------------------------------------------------------- worker → router


class Hello(Message, frozen=True):
    worker_id: str
    incarnation: str
    role: Role
    layout: Layout
    num_blocks: int
    max_model_len: int
    transport: str = ""
    ops: str = ""
    prefix_cache: bool = False
    pid: int = 0
    host: str = ""
    epoch: int = 0
    """Grows when the worker drops what this router gave it: a Hello of the same epoch is a mere
    repetition."""


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


class Beams(Message, frozen=True):
    """A beam search has made ``num_tokens`` steps; at its end also what it has found, best first."""

    request_id: str
    attempt: int
    num_tokens: int
    hypotheses: list[Hypothesis] | None = None


class PromptScores(Message, frozen=True):
    """Log-probabilities of the prompt's tokens ``first, first + 1, …``; each part comes once, in order, and
    all of them before the first token."""

    request_id: str
    attempt: int
    first: Annotated[int, Meta(ge=1)]
    scores: list[TokenLogprobs]


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
    num_bytes: Count
    num_computed_tokens: Count = 0
    """Prompt tokens that D had to compute itself: 0 wherever the split did its work."""
    phases: HandoverPhases | None = None


class Preempted(Message, frozen=True):
    request_id: str
    attempt: int


class Suspended(Message, frozen=True):
    """Answer to ``Suspend``: the KV of all tokens but the last one sent waits under this lease."""

    request_id: str
    attempt: int
    handle: KvHandle


class Failed(Message, frozen=True):
    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool


class Goodbye(Message, frozen=True):
    pass


# ------------------------------------------------------------------------------------- router → worker


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
    age_s: Age
    """Since the request arrived at the router, at this dispatch: the oldest goes first."""
    token_ids: list[int]
    sampling: SamplingParams
    first_index: Count
    """Output position of the token this prefill samples; above 0 when it resumes an answer."""


class DecodeJob(Message, frozen=True):
    request_id: str
    attempt: int
    age_s: Age
    token_ids: list[int]
    sampling: SamplingParams
    first_index: Count
    handle: KvHandle | None
    """``None``: no prefill worker serves this request; compute the prompt here."""


class Suspend(Message, frozen=True):
    """Stop decoding this request and keep its KV under a lease, for another decode worker to go on with."""

    request_id: str
    attempt: int


class Probe(Message, frozen=True):
    """Nothing was heard of this request for a while: say again what the router may have missed, output tokens
    from ``next_index`` on, or that the request is not here (``Failed(forgotten)``)."""

    request_id: str
    attempt: int
    next_index: Count


class Abort(Message, frozen=True):
    request_id: str
    attempt: int


# ------------------------------------------------------------------------------------------------ D → P


class Fetch(Message, frozen=True):
    """Opens the fetch of a lease. Blocks before ``from_block`` are already on D and are not announced."""

    lease: int
    incarnation: str
    """Of the worker that gave the lease: another process at its address must not take it for its own."""
    from_block: Count
    layout: Layout
    ticket: str = ""


class Read(Message, frozen=True):
    """TCP only: send me these blocks. What a reader has asked for and not got is its credit in use."""

    lease: int
    block_ids: list[int]


class Renew(Message, frozen=True):
    """Lease → ticket of requests that wait for room on D."""

    tickets: dict[int, str]


class Release(Message, frozen=True):
    """``received`` true: the copy is complete, may I use it? ``Released.ok`` answers. False: no longer
    wanted."""

    lease: int
    received: bool
    corrupt: list[int] = field(default_factory=list)
    """Blocks whose bytes were not those of their checksums."""


class Attach(Message, frozen=True):
    """CUDA IPC only: I am about to open your pool; it stays until I say ``Detached``, or am gone."""


class Detached(Message, frozen=True):
    """Your pool is closed here, or could not be opened."""


# ------------------------------------------------------------------------------------------------ P → D


class Ready(Message, frozen=True):
    """Blocks ``first .. first + len(block_ids)`` of the prompt are final and may be read.

    A GPU may still be at work on them: then they are final once the pool's event number ``written`` has come
    to pass.
    """

    lease: int
    first: Count
    block_ids: list[int]
    written: int | None = None
    sums: list[int] = field(default_factory=list)
    """Their checksums, in the same order; empty if P makes none, as for a pool in GPU memory."""


class Blocks(Message, frozen=True):
    """TCP only: the bytes of these blocks follow, one raw frame each, in this order."""

    lease: int
    block_ids: list[int]


class Commit(Message, frozen=True):
    """All blocks have been announced: ``num_tokens`` tokens of KV, and the token sampled after them."""

    lease: int
    num_tokens: int
    first_token: int
    logprobs: TokenLogprobs | None = None
    """Of that token."""


class Released(Message, frozen=True):
    lease: int
    ok: bool


class LeaseLost(Message, frozen=True):
    lease: int
    reason: str
    ended: bool = False
    """True: nothing went wrong, the request has ended on P or was taken back."""


class Detach(Message, frozen=True):
    """CUDA IPC only: this worker ends, close its pool now."""


ToRouter = (
    Hello
    | Heartbeat
    | PrefillStarted
    | FirstToken
    | Tokens
    | Beams
    | PromptScores
    | HandedOver
    | Preempted
    | Suspended
    | Failed
    | Goodbye
)
ToWorker = Welcome | Refused | Beat | Drain | PrefillJob | DecodeJob | Suspend | Probe | Abort
ToPrefill = Fetch | Read | Renew | Release | Attach | Detached
AboutLease = Ready | Blocks | Commit | Released | LeaseLost
ToDecode = AboutLease | Detach
