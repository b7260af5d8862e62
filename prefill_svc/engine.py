"""Prefill: prompts in, leased KV blocks and one token out.

The life of a prompt here::

    WAITING    in order of arrival, until blocks for all of it are there
    COMPUTING  in chunks; PrefillStarted has told the router where its KV will be; a decode worker may already
               fetch: each chunk's full blocks are announced (Ready) when the chunk has been computed
    LEASED     the first token is sampled and sent to the router; the rest of the blocks and the token
    (Commit) to D RELEASED   D has confirmed its copy, or the first token ended the answer EXPIRED    nobody
    gave a sign of life for lease_s; a late confirmation gets Released(ok=False) ABORTED    the router took it
    back

A lease exists from COMPUTING on; it has no deadline until the KV is complete, because computing is a sign of
life.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pagerelay.common.engine.core import EngineCore, EngineLimits
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.runner import ModelFacts, ModelRunner
from pagerelay.common.states import PREFILL, Machine
from pagerelay.common.wire.messages import (
    Commit,
    Fetch,
    FinishReason,
    FirstToken,
    KvHandle,
    LeaseLost,
    PrefillJob,
    PrefillStarted,
    Ready,
    Released,
    TokenDelta,
)


@dataclass(slots=True)
class Lease:
    """KV of one prompt, kept for one decode worker. The engine, under its lock, is the only writer."""

    id: int
    seq: Sequence
    num_tokens: int
    peer: bytes | None = None
    announced: int = 0
    """Blocks, from the first, that the peer has been told of or holds already."""
    first_token: int | None = None
    deadline: float | None = None


class PrefillEngine(EngineCore):
    def __init__(
        self,
        runner: ModelRunner,
        facts: ModelFacts,
        pool: KvPool,
        limits: EngineLimits,
        *,
        incarnation: str,
        lease_s: float,
        handle: Callable[[int, int], KvHandle],
    ) -> None:
        """``handle(lease, num_tokens)`` makes the handle that tells a decode worker where to fetch."""
        super().__init__(runner, facts, pool, limits)
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._handle = handle
        self._last_lease = 0
        self.leases: dict[int, Lease] = {}
        self._lease_of: dict[str, Lease] = {}
        self.expired = 0
        self.num_prompt_tokens_cached = 0

    # ------------------------------------------------------------------ from the router

    def submit(self, owner: str, job: PrefillJob) -> None:
        """Queues a prompt."""
        with self.lock:
            seq = self._accept(owner, job, Machine(PREFILL, "WAITING"))
            if seq is not None:
                self.scheduler.add_waiting(seq)

    # ------------------------------------------------------------------ from decode workers

    def fetch(self, peer: bytes, message: Fetch, now: float) -> None:
        """A decode worker begins to fetch; tells it all that is ready. A second fetch of a lease replaces the
        first."""
        with self.lock:
            if message.incarnation != self._incarnation:
                reason = "the worker that gave this lease is gone"
                self._outbox.to_peer.append((peer, LeaseLost(lease=message.lease, reason=reason)))
                return
            lease = self.leases.get(message.lease)
            if lease is None:
                # It ended (its first token was its last, or it was taken back) before D came, or ran out: the
                # router knows in either case.
                lost = LeaseLost(lease=message.lease, reason="there is no such lease any more", ended=True)
                self._outbox.to_peer.append((peer, lost))
                return
            difference = self.facts.layout(self.limits.block_size).difference(message.layout)
            if difference is not None:
                reason = f"the workers do not match: {difference}"
                self._outbox.to_peer.append((peer, LeaseLost(lease=message.lease, reason=reason)))
                return
            lease.peer = peer
            lease.announced = message.from_block
            self._touch(lease, now)
            self._announce(lease)

    def may_read(self, peer: bytes, lease_id: int, block_ids: Seq[int], now: float) -> bool:
        """Are these blocks the peer's to read? Also a sign of life."""
        with self.lock:
            lease = self.leases.get(lease_id)
            if lease is None or lease.peer != peer or not set(block_ids) <= set(lease.seq.block_ids):
                return False
            self._touch(lease, now)
            return True

    def renew(self, lease_ids: Seq[int], now: float) -> None:
        with self.lock:
            for lease_id in lease_ids:
                if lease_id in self.leases:
                    self._touch(self.leases[lease_id], now)

    def release(self, peer: bytes, lease_id: int, received: bool) -> None:
        """D has its copy (answered: did the lease stand until now?) or does not want it any more (not
        answered)."""
        with self.lock:
            lease = self.leases.get(lease_id)
            mine = lease is not None and lease.peer == peer
            if received:
                ok = mine and lease is not None and lease.first_token is not None
                self._outbox.to_peer.append((peer, Released(lease=lease_id, ok=ok)))
            if lease is not None and mine:
                if lease.first_token is not None:
                    self._end(lease.seq, "RELEASED")
                else:
                    lease.peer = None  # still computing: another decode worker may come for it

    def expire(self, now: float) -> None:
        """Ends the leases that nobody gave a sign of life for. A lease's time begins with the first call
        after its KV was complete: the step that completes it has no clock."""
        with self.lock:
            complete = [lease for lease in self.leases.values() if lease.first_token is not None]
            for lease in complete:
                if lease.deadline is None:
                    lease.deadline = now + self._lease_s
            for lease in [le for le in complete if le.deadline is not None and le.deadline < now]:
                self.expired += 1
                seq = lease.seq
                self._end(seq, "EXPIRED", f"no sign of life for {self._lease_s:g} s")
                self._tell_failed(
                    seq, "lease_expired", "the prompt's KV was not fetched in time", retryable=True
                )

    # ------------------------------------------------------------------ the step's callbacks

    def _admitted(self, seq: Sequence) -> None:
        seq.machine.move("COMPUTING")
        self.num_prompt_tokens_cached += seq.num_cached
        self._last_lease += 1
        lease = Lease(self._last_lease, seq, seq.num_tokens)
        self.leases[lease.id] = lease
        self._lease_of[seq.request_id] = lease
        self._tell_started(lease)

    def _tell_started(self, lease: Lease) -> None:
        seq = lease.seq
        started = PrefillStarted(
            request_id=seq.request_id,
            attempt=seq.attempt,
            handle=self._handle(lease.id, lease.num_tokens),
            queued_s=0.0,
            num_cached_tokens=seq.num_cached,
        )
        self._outbox.to_router.append((seq.owner, started))

    def _repeat(self, seq: Sequence, next_index: int) -> None:
        lease = self._lease_of.get(seq.request_id)
        if lease is not None:
            self._tell_started(lease)
            if lease.first_token is not None:
                self._tell_first(seq, lease.first_token, seq.first_index, None)

    def _short(self, seq: Sequence) -> bool:
        return False  # a prompt has all its blocks from the start; this is never asked with one token to go

    def _failed(self, seq: Sequence) -> None:
        self._end(seq, "ABORTED", "the step failed")

    def _advanced(self, seq: Sequence) -> None:
        self._announce(self._lease_of[seq.request_id])

    def _sampled(self, seq: Sequence, token: int, index: int) -> None:
        reason = seq.finish_reason(token, index, self.facts.eos_token_ids, self.facts.max_model_len)
        self._tell_first(seq, token, index, reason)
        lease = self._lease_of[seq.request_id]
        if reason is not None:
            self._end(seq, "RELEASED", "the first token ended the answer")
            return
        seq.machine.move("LEASED")
        self.scheduler.remove(seq)
        self.blocks.move(seq.block_ids, "held", "leased")
        lease.first_token = token
        self._announce(lease)

    def _tell_first(self, seq: Sequence, token: int, index: int, reason: FinishReason | None) -> None:
        delta = TokenDelta(
            request_id=seq.request_id, attempt=seq.attempt, index=index, token=token, finish_reason=reason
        )
        computed = seq.num_computed - seq.num_cached
        first = FirstToken(delta=delta, prefill_s=0.0, num_computed_tokens=computed)
        self._outbox.to_router.append((seq.owner, first))

    # ------------------------------------------------------------------ leases

    def _touch(self, lease: Lease, now: float) -> None:
        """A sign of life of the decode worker."""
        if lease.first_token is not None:
            lease.deadline = now + self._lease_s

    def _announce(self, lease: Lease) -> None:
        """Tells the peer every block that is final and that it does not know of, and the commit at the
        end."""
        if lease.peer is None:
            return
        done = lease.first_token is not None
        ready = len(lease.seq.block_ids) if done else lease.seq.num_computed // self.limits.block_size
        if ready > lease.announced:
            ids = lease.seq.block_ids[lease.announced : ready]
            self._outbox.to_peer.append(
                (lease.peer, Ready(lease=lease.id, first=lease.announced, block_ids=ids))
            )
            lease.announced = ready
        if lease.first_token is not None:
            commit = Commit(lease=lease.id, num_tokens=lease.num_tokens, first_token=lease.first_token)
            self._outbox.to_peer.append((lease.peer, commit))

    def _end(self, seq: Sequence, state: str, reason: str | None = None) -> None:
        """The one place where a prompt's blocks are given back."""
        leased = seq.machine.state == "LEASED"
        seq.machine.move(state)
        del self._by_request[seq.request_id]
        lease = self._lease_of.pop(seq.request_id, None)
        if lease is not None:
            del self.leases[lease.id]
            if reason is not None and lease.peer is not None:
                ended = state in ("RELEASED", "ABORTED")
                self._outbox.to_peer.append(
                    (lease.peer, LeaseLost(lease=lease.id, reason=reason, ended=ended))
                )
        if leased:
            self.blocks.drop(seq.block_ids, "leased")
            seq.block_ids = []
        else:
            self._leave(seq)

    # ------------------------------------------------------------------ reading

    def outstanding_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""
        with self.lock:
            queues = (*self.scheduler.waiting, *self.scheduler.running)
            return sum(seq.num_remaining for seq in queues)
