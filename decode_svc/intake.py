"""Fetching one prompt's KV: while the prefill worker computes, its finished blocks are copied as it announces them.

1. ``Fetch`` opens the lease from the first block that is not here yet.
2. ``Ready`` names blocks that are final; they are copied at once, into the blocks reserved for them.
3. ``Commit`` says that all have been named, and brings the first token.
4. ``Release(received)`` asks whether the lease stood until now; only ``Released(ok)`` makes the copy count.

Whatever goes wrong raises :class:`TransferError`, and the request recovers elsewhere. A lease is renewed while we
wait, so that a long queue on either side does not run it out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from pagerelay.common.errors import ConfigError, TransferError
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.wire.messages import Commit, Fetch, LeaseLost, PoolAddress, Ready, Released, ToDecode
from pagerelay.decode_svc.engine import Intake
from pagerelay.decode_svc.peers import PeerLink


class LeaseEnded(TransferError):
    """Nothing went wrong: the request has no more need of a decode worker."""


@dataclass(frozen=True, slots=True)
class Fetched:
    first_token: int
    transport: str
    num_bytes: int
    num_blocks: int
    handover_s: float
    """From the commit's arrival to the lease's confirmation: what the split adds after the prefill has ended."""


class BackendChoice:
    """Which backend fetches from which peer: shared memory where the peer's segment opens here, else TCP."""

    def __init__(
        self, wanted: str, shm: TransferBackend, tcp: TransferBackend, probe: Callable[[PoolAddress], object]
    ):
        self._wanted = wanted
        self._shm, self._tcp, self._probe = shm, tcp, probe
        self._known: dict[str, TransferBackend] = {}

    def backend(self, peer: str, pool: PoolAddress) -> tuple[TransferBackend, str | None]:
        """(backend, why it is not shared memory or ``None``); the reason is given once per peer.

        Raises :class:`ConfigError` if shared memory is forced and cannot work.
        """
        if peer in self._known:
            return self._known[peer], None
        reason = None
        chosen = self._tcp
        if self._wanted != "tcp":
            try:
                self._probe(pool)
                chosen = self._shm
            except TransferError as error:
                reason = str(error)
                if self._wanted == "shm":
                    raise ConfigError(
                        f"worker.transport is shm, which cannot reach {peer}: {reason}"
                    ) from error
        self._known[peer] = chosen
        return chosen, reason


async def fetch_prompt(
    intake: Intake,
    link: PeerLink,
    backend: TransferBackend,
    pool: KvPool,
    *,
    patience_s: float,
    clock: Callable[[], float],
) -> Fetched:
    """Runs the protocol above for one reserved sequence. ``patience_s``: longest silence of the peer between renewals
    and news; it must be shorter than the lease."""
    handle, seq = intake.handle, intake.seq
    lease = handle.lease
    if handle.num_tokens != seq.num_given:
        raise TransferError(f"the lease covers {handle.num_tokens} tokens, the job has {seq.num_given}")
    news = await link.open(Fetch(lease=lease, from_block=intake.from_block, layout=pool.layout))
    missing = set(range(intake.from_block, len(seq.block_ids)))
    commit: Commit | None = None
    committed_at = 0.0
    moved = 0
    num_blocks = len(missing)
    confirmed = False
    try:
        while missing or commit is None:
            message = await _next(news, link, lease, patience_s)
            if isinstance(message, Ready):
                span = range(message.first, message.first + len(message.block_ids))
                if not missing.issuperset(span):
                    raise TransferError("the peer announced blocks that were not asked for")
                targets = [seq.block_ids[index] for index in span]
                moved += await backend.fetch(link, lease, message.block_ids, pool.blocks, targets)
                missing.difference_update(span)
            elif isinstance(message, Commit):
                if message.num_tokens != seq.num_given:
                    raise TransferError(
                        f"the commit covers {message.num_tokens} tokens, {seq.num_given} are due"
                    )
                commit, committed_at = message, clock()
        await link.release(lease, received=True)
        while not confirmed:
            message = await _next(news, link, lease, patience_s)
            if isinstance(message, Released):
                if not message.ok:
                    raise TransferError("the lease ran out before the copy was confirmed")
                confirmed = True
        return Fetched(commit.first_token, backend.name, moved, num_blocks, clock() - committed_at)
    finally:
        link.close_lease(lease)
        if not confirmed:
            # Give the peer its blocks back now rather than when the lease runs out; if it is gone, that is that.
            with contextlib.suppress(TransferError):
                await link.release(lease, received=False)


async def _next(news: asyncio.Queue[ToDecode], link: PeerLink, lease: int, patience_s: float) -> ToDecode:
    """The lease's next news, renewing it while there is none."""
    while True:
        try:
            message = await asyncio.wait_for(news.get(), patience_s)
        except TimeoutError:
            await link.renew([lease])
            continue
        if isinstance(message, LeaseLost):
            if message.ended:
                raise LeaseEnded(message.reason)
            raise TransferError(f"the lease is gone: {message.reason}")
        return message
