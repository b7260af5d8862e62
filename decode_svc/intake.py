"""Fetching one prompt's KV: while the prefill worker computes, its finished blocks are copied as it announces
them.

1. ``Fetch`` opens the lease from the first block that is not here yet.
2. ``Ready`` names blocks that are final; they are copied at once, into the blocks reserved for them.
3. ``Commit`` says that all have been named, and brings the first token.
   Blocks are compared with their checksums as they arrive, before anything is built on them.
4. ``Release(received)`` asks whether the lease stood until now; only ``Released(ok)`` makes the copy count.

Whatever goes wrong raises :class:`TransferError`, and the request recovers elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from pagerelay.common.aside import run_aside
from pagerelay.common.errors import ConfigError, TransferError
from pagerelay.common.kv.checksum import wrong_blocks
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.wire.messages import (
    AboutLease,
    Commit,
    Fetch,
    HandoverPhases,
    LeaseLost,
    Ready,
    Release,
    Released,
    TokenLogprobs,
)
from pagerelay.common.wire.pools import PoolAddress
from pagerelay.decode_svc.engine import Intake
from pagerelay.decode_svc.peers import PeerLink, loss

NUM_QUESTIONS = 4
"""How often a silent peer is asked; with a quarter of a lease's time between them, for as long as a lease."""


class CorruptBlocks(TransferError):
    """Bytes arrived that are not those of their checksums."""

    def __init__(self, block_ids: list[int]) -> None:
        super().__init__(f"{len(block_ids)} blocks came with other bytes than their checksums say")
        self.block_ids = block_ids
        """The peer's."""


@dataclass(frozen=True, slots=True)
class Fetched:
    first_token: int
    transport: str
    num_bytes: int
    num_blocks: int
    handover_s: float
    """From the commit's arrival to the lease's confirmation: what the split adds after the prefill has
    ended."""
    phases: HandoverPhases
    logprobs: TokenLogprobs | None
    """Of the first token."""


class BackendChoice:
    """Which backend fetches from which peer: the direct one (shared memory or CUDA IPC) where the peer's pool
    opens here, else TCP."""

    def __init__(
        self,
        wanted: str,
        direct: TransferBackend,
        tcp: TransferBackend,
        probe: Callable[[PoolAddress], object],
    ):
        self._wanted = wanted
        self._direct, self._tcp, self._probe = direct, tcp, probe
        self._known: dict[str, TransferBackend] = {}

    def backend(self, peer: str, pool: PoolAddress) -> tuple[TransferBackend, str | None]:
        """(backend, why it is not the direct one or ``None``); the reason is given once per peer.

        Raises :class:`ConfigError` if the direct one is forced and cannot work.
        """
        if peer in self._known:
            return self._known[peer], None
        reason = None
        chosen = self._tcp
        if self._wanted != "tcp":
            try:
                self._probe(pool)
                chosen = self._direct
            except TransferError as error:
                reason = str(error)
                if self._wanted != "auto":
                    raise ConfigError(
                        f"worker.transport is {self._wanted}, which cannot reach {peer}: {reason}"
                    ) from error
        self._known[peer] = chosen
        return chosen, reason

    def is_known(self, peer: str) -> bool:
        return peer in self._known


async def fetch_prompt(
    intake: Intake,
    link: PeerLink,
    backend: TransferBackend,
    pool: KvPool,
    *,
    patience_s: float,
    clock: Callable[[], float],
    checksums: bool = True,
) -> Fetched:
    """Runs the protocol above for one reserved sequence. ``patience_s``: longest silence of the peer between
    renewals and news; it must be shorter than the lease. ``checksums``: compare those that the peer sends."""
    handle, seq = intake.handle, intake.seq
    lease = handle.lease
    if handle.num_tokens != seq.num_given:
        raise TransferError(f"the lease covers {handle.num_tokens} tokens, the job has {seq.num_given}")
    fetch = Fetch(
        lease=lease,
        incarnation=handle.incarnation,
        from_block=intake.from_block,
        layout=pool.layout,
        ticket=handle.ticket,
    )
    opened_at, announced_at = clock(), 0.0
    news = await link.open(fetch)
    missing = set(range(intake.from_block, len(seq.block_ids)))
    commit: Commit | None = None
    moved = 0
    num_blocks = len(missing)
    confirmed = False
    corrupt: list[int] = []
    try:
        while missing or commit is None:
            again = msgspec.structs.replace(fetch, from_block=min(missing, default=len(seq.block_ids)))
            message = await _next(news, link, again, patience_s)
            if isinstance(message, Ready) and not message.block_ids:
                continue  # the peer is there, and computes
            announced_at = announced_at or clock()
            if isinstance(message, Ready):
                if message.first + len(message.block_ids) > len(seq.block_ids):
                    raise TransferError("the peer announced more blocks than the prompt has")
                if len(message.sums) not in (0, len(message.block_ids)):
                    raise TransferError("the peer announced blocks and checksums of different number")
                # What was announced twice, because we asked again, is copied once.
                due = [at for at in range(len(message.block_ids)) if message.first + at in missing]
                sources = [message.block_ids[at] for at in due]
                targets = [seq.block_ids[message.first + at] for at in due]
                moved += await backend.fetch(
                    link, lease, sources, pool.blocks, targets, written=message.written
                )
                # Only of pools in the host's memory: see LeasingEngine.
                if checksums and message.sums and isinstance(pool.blocks, np.ndarray):
                    sums = [message.sums[at] for at in due]
                    wrong = await run_aside(partial(wrong_blocks, pool.blocks, targets, sums))
                    corrupt = [sources[at] for at in wrong]
                    if corrupt:
                        raise CorruptBlocks(corrupt)
                missing.difference_update(message.first + at for at in due)
            elif isinstance(message, Commit):
                if message.num_tokens != seq.num_given:
                    raise TransferError(
                        f"the commit covers {message.num_tokens} tokens, {seq.num_given} are due"
                    )
                commit = message
        copied_at, committed_at = clock(), link.committed_at(lease)
        confirm = Release(lease=lease, received=True)
        await link.send(confirm)
        while not confirmed:
            message = await _next(news, link, confirm, patience_s)
            if isinstance(message, Released):
                if not message.ok:
                    raise TransferError("the lease ran out before the copy was confirmed")
                confirmed = True
        confirmed_at = clock()
        phases = HandoverPhases(
            announce_s=announced_at - opened_at,
            copy_s=copied_at - committed_at,
            confirm_s=confirmed_at - copied_at,
        )
        return Fetched(
            commit.first_token,
            backend.name,
            moved,
            num_blocks,
            confirmed_at - committed_at,
            phases,
            commit.logprobs,
        )
    finally:
        link.close_lease(lease)
        if not confirmed:
            # Give the peer its blocks back now rather than when the lease runs out; if it is gone, that is
            # that.
            with contextlib.suppress(TransferError):
                await link.send(Release(lease=lease, received=False, corrupt=corrupt))


async def _next(
    news: asyncio.Queue[AboutLease], link: PeerLink, question: Fetch | Release, patience_s: float
) -> AboutLease:
    """The lease's next news. When there is none for a while the question is asked again: it, or its answer,
    may have been lost with a connection; asked twice it changes nothing, and it is a sign of life. The peer
    answers each one, so one that does not is gone, also where the router's word of that was lost."""
    for asked in range(1, NUM_QUESTIONS + 1):
        try:
            # Not wait_for: on Python 3.11 it can swallow a cancellation that comes together with the item.
            async with asyncio.timeout(patience_s):
                message = await news.get()
        except TimeoutError:
            if asked < NUM_QUESTIONS:
                await link.send(question)
            continue
        if isinstance(message, LeaseLost):
            raise loss(message)
        return message
    raise TransferError(f"the worker that has the KV did not answer {NUM_QUESTIONS} times")
