"""KV kept for another worker that fetches it: leases, who may read them, and when they end.

A lease belongs to one sequence and to one reader. Its *ticket* is a secret that only the handle carries,
and the router gives the handle to the worker that it has chosen: so nobody fetches what was not assigned
to it. The first ``Fetch`` with the ticket binds the lease to its connection; from then on only that
connection may read it, confirm it or give it up.

A lease has no deadline until its KV is complete, because computing is a sign of life. After that it ends
``lease_s`` after the reader's last one (``Fetch``, ``Read``, ``Renew``). A copy that is confirmed after
the end is void.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from pagerelay.common.engine.core import NUM_REMEMBERED, EngineCore
from pagerelay.common.engine.parts import EngineLimits
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.kv.checksum import block_sum
from pagerelay.common.kv.memory import Bytes
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.runner import ModelFacts, ModelRunner
from pagerelay.common.wire.messages import Commit, Fetch, KvHandle, LeaseLost, Ready, Released


@dataclass(frozen=True, slots=True)
class Leasing:
    """How an engine gives leases."""

    incarnation: str
    lease_s: float
    handle: Callable[[int, int], KvHandle]
    """``(lease, num_tokens)`` → the handle that tells a reader where to fetch."""
    checksums: bool = True
    gives: bool = True
    """False: no data link serves this engine's KV, so it gives no leases."""


@dataclass(slots=True)
class Lease:
    """KV of one sequence, kept for one reader. The engine, under its lock, is the only writer."""

    id: int
    seq: Sequence
    handle: KvHandle
    peer: bytes | None = None
    announced: int = 0
    """Blocks, from the first, that the peer has been told of or holds already."""
    first_token: int | None = None
    """The token sampled after ``handle.num_tokens``; ``None`` until the KV is complete."""
    deadline: float | None = None
    summed: bool = True
    """Are there checksums of its blocks? See :meth:`LeasingEngine.make_sums`."""


class LeasingEngine(EngineCore):
    """An engine whose sequences' KV other workers may fetch."""

    def __init__(
        self, runner: ModelRunner, facts: ModelFacts, pool: KvPool, limits: EngineLimits, leasing: Leasing
    ) -> None:
        super().__init__(runner, facts, pool, limits)
        self._leasing = leasing
        self._summed: Bytes | None = None
        """Blocks that checksums are made of, ``[num_blocks, block_bytes]``. ``None``: not wanted, or the pool
        lies on a GPU, where each sum would cost a copy to the host and a wait for the step."""
        if leasing.checksums and isinstance(pool.blocks, np.ndarray):
            self._summed = pool.blocks
        self._sums: dict[int, int] = {}
        """Checksums by block id. Subclasses make them, without the lock, before the blocks are announced."""
        self._last_lease = 0
        self.leases: dict[int, Lease] = {}
        self._lease_of: dict[str, Lease] = {}
        self._confirmed: OrderedDict[int, bytes] = OrderedDict()
        """Lease → who has confirmed its copy: a question asked twice is answered twice."""
        self._ended: OrderedDict[int, None] = OrderedDict()
        """Leases whose request had no more need of them: who comes for one is told so. Who comes for any
        other that is not there, one that ran out or that nobody knows, is told that its fetch has failed."""
        self.expired = 0

    # ------------------------------------------------------------------ from the workers that fetch

    def owes_sums(self, lease_id: int) -> bool:
        """Would :meth:`fetch` have to :meth:`make_sums` first?"""
        with self.lock:
            lease = self.leases.get(lease_id)
            return lease is not None and not lease.summed

    def make_sums(self, lease_id: int) -> None:
        """Checksums of a lease whose KV was computed without, on any thread: tens of ms for a long prompt.
        The lease keeps the blocks as they are; should it end meanwhile, nothing is announced."""
        with self.lock:
            lease = self.leases.get(lease_id)
            if lease is None or lease.summed:
                return
            ids = list(lease.seq.block_ids)
        sums = {block: block_sum(self._summed[block]) for block in ids} if self._summed is not None else {}
        with self.lock:
            self._sums.update(sums)
            lease.summed = True

    def fetch(self, peer: bytes, message: Fetch, now: float) -> None:
        """A worker begins to fetch; tells it all that is ready. Repeated, it changes nothing."""
        self.make_sums(message.lease)
        with self.lock:
            if message.incarnation != self._leasing.incarnation:
                self.on_dropped("Fetch", "stale")
                self._lost(peer, message.lease, "the worker that gave this lease is gone")
                return
            lease = self.leases.get(message.lease)
            if lease is None:
                self.on_dropped("Fetch", "late")
                self._lost_already(peer, message.lease)
                return
            if not self._is_ticket(lease, message.ticket) or lease.peer not in (None, peer):
                self.on_dropped("Fetch", "refused")
                self._lost(peer, message.lease, "this lease was given to another worker")
                return
            difference = self.facts.layout(self.limits.block_size).difference(message.layout)
            if difference is not None:
                self.on_dropped("Fetch", "refused")
                self._lost(peer, message.lease, f"the workers do not match: {difference}")
                return
            lease.peer = peer
            lease.announced = message.from_block
            self._touch(lease, now)
            self._announce(lease)
            if lease.first_token is None and lease.announced == message.from_block:
                # It computes: the peer, which cannot tell that from a death, hears that it is here.
                self._outbox.to_peer.append(
                    (peer, Ready(lease=lease.id, first=lease.announced, block_ids=[]))
                )

    def may_read(self, peer: bytes, lease_id: int, block_ids: Seq[int], now: float) -> bool:
        """Are these blocks, each named once, the peer's to read? If so it is a sign of life, else the peer is
        told why not."""
        with self.lock:
            lease = self.leases.get(lease_id)
            wanted = set(block_ids)
            if lease is None:
                self.on_dropped("Read", "late")
                self._lost_already(peer, lease_id)
                return False
            # The other blocks still hold what was in them before: somebody else's prompt.
            final = set(lease.seq.block_ids[: self._num_final(lease)])
            if lease.peer != peer or len(wanted) != len(block_ids) or not wanted <= final:
                self.on_dropped("Read", "refused")
                self._lost(peer, lease_id, "these blocks are not for this worker to read")
                return False
            self._touch(lease, now)
            return True

    def renew(self, tickets: Mapping[int, str], now: float) -> None:
        """Signs of life of a worker that has no room yet: lease → ticket."""
        with self.lock:
            for lease_id, ticket in tickets.items():
                lease = self.leases.get(lease_id)
                if lease is None:
                    self.on_dropped("Renew", "late")
                elif not self._is_ticket(lease, ticket):
                    self.on_dropped("Renew", "refused")
                else:
                    self._touch(lease, now)

    def release(self, peer: bytes, lease_id: int, received: bool, corrupt: Seq[int] = ()) -> None:
        """The reader has its copy (answered: did the lease stand until now?) or does not want it any more
        (not answered). ``corrupt``: blocks of it whose bytes were not those of their checksums."""
        with self.lock:
            lease = self.leases.get(lease_id)
            if lease is None or lease.peer != peer:
                confirmed = lease is None and self._confirmed.get(lease_id) == peer
                if not confirmed:
                    self.on_dropped("Release", "late" if lease is None else "refused")
                if received:
                    self._outbox.to_peer.append((peer, Released(lease=lease_id, ok=confirmed)))
                return
            complete = lease.first_token is not None
            if received:
                self._outbox.to_peer.append((peer, Released(lease=lease_id, ok=complete)))
            for block in set(corrupt) & set(lease.seq.block_ids):
                self.blocks.forget(block)  # should the fault lie here, nobody else shall have it
            if complete:
                if received:
                    self._confirmed[lease_id] = peer
                    if len(self._confirmed) > NUM_REMEMBERED:
                        self._confirmed.popitem(last=False)
                self._end(lease.seq, "RELEASED")
            else:
                lease.peer = None  # still computing: whoever has the ticket may come for it again

    def expire(self, now: float) -> None:
        """Ends the leases that nobody gave a sign of life for. A lease's time begins with the first call
        after its KV was complete: the step that completes it has no clock."""
        with self.lock:
            complete = [lease for lease in self.leases.values() if lease.first_token is not None]
            for lease in complete:
                if lease.deadline is None:
                    lease.deadline = now + self._leasing.lease_s
            for lease in [le for le in complete if le.deadline is not None and le.deadline < now]:
                self.expired += 1
                self._end(lease.seq, "EXPIRED", f"no sign of life for {self._leasing.lease_s:g} s")
                self._tell_failed(
                    lease.seq, "lease_expired", "its KV was not fetched in time", retryable=True
                )

    # ------------------------------------------------------------------ for subclasses

    def _open_lease(self, seq: Sequence, num_tokens: int) -> Lease:
        """A lease on the KV of the sequence's first ``num_tokens`` tokens."""
        self._last_lease += 1
        handle = self._leasing.handle(self._last_lease, num_tokens)
        handle = replace(handle, ticket=secrets.token_hex(16))
        lease = self.leases[self._last_lease] = Lease(self._last_lease, seq, handle)
        self._lease_of[seq.request_id] = lease
        return lease

    def _complete_lease(self, lease: Lease, first_token: int) -> None:
        """All of its KV is there: the blocks are kept for the reader alone from now on."""
        self.scheduler.remove(lease.seq)
        self._hold_as(lease.seq, "lease")
        lease.first_token = first_token
        self._announce(lease)

    def _close_lease(self, seq: Sequence, reason: str | None, ended: bool) -> None:
        """The sequence leaves; its reader is told unless it ended the lease itself (``reason`` ``None``)."""
        lease = self._lease_of.pop(seq.request_id, None)
        if lease is not None:
            del self.leases[lease.id]
            if ended:
                self._ended[lease.id] = None
                if len(self._ended) > NUM_REMEMBERED:
                    self._ended.popitem(last=False)
            if reason is not None and lease.peer is not None:
                self._lost(lease.peer, lease.id, reason, ended)

    def _announce(self, lease: Lease) -> None:
        """Tells the peer every block that is final and that it does not know of, and the commit at the
        end."""
        if lease.peer is None:
            return
        ready = self._num_final(lease)
        if ready > lease.announced:
            ids = lease.seq.block_ids[lease.announced : ready]
            news = Ready(
                lease=lease.id,
                first=lease.announced,
                block_ids=ids,
                written=self.written,
                sums=[self._sums[block] for block in ids] if self._summed is not None else [],
            )
            self._outbox.to_peer.append((lease.peer, news))
            lease.announced = ready
        if lease.first_token is not None:
            commit = Commit(
                lease=lease.id,
                num_tokens=lease.handle.num_tokens,
                first_token=lease.first_token,
                logprobs=lease.seq.logprobs.get(lease.seq.next_index - 1),
            )
            self._outbox.to_peer.append((lease.peer, commit))

    def _num_final(self, lease: Lease) -> int:
        """Blocks, from the first, that are computed and will not change any more."""
        if lease.first_token is not None:
            return len(lease.seq.block_ids)
        return lease.seq.num_computed // self.limits.block_size

    @staticmethod
    def _is_ticket(lease: Lease, ticket: str) -> bool:
        return hmac.compare_digest(ticket.encode(), lease.handle.ticket.encode())

    def _touch(self, lease: Lease, now: float) -> None:
        """A sign of life of the reader."""
        if lease.first_token is not None:
            lease.deadline = now + self._leasing.lease_s

    def _lost_already(self, peer: bytes, lease: int) -> None:
        """Its first token was its last, or it was taken back, and the router knows; or it ran out."""
        self._lost(peer, lease, "there is no such lease any more", lease in self._ended)

    def _lost(self, peer: bytes, lease: int, reason: str, ended: bool = False) -> None:
        self._outbox.to_peer.append((peer, LeaseLost(lease=lease, reason=reason, ended=ended)))
