"""Prefill: prompts in, leased KV blocks and one token out.

The life of a prompt here::

    WAITING    in order of arrival, until blocks for all of it are there
    COMPUTING  in chunks; PrefillStarted has told the router where its KV will be; a decode worker may already
               fetch: each chunk's full blocks are announced (Ready) when the chunk has been computed
    LEASED     the first token is sampled and sent to the router; the rest of the blocks and the token
               (Commit) to D
    RELEASED   D has confirmed its copy, or the first token ended the answer
    EXPIRED    nobody gave a sign of life for lease_s; a late confirmation gets Released(ok=False)
    ABORTED    the router took it back
"""

from __future__ import annotations

from pagerelay.common.engine.leasing import Leasing, LeasingEngine
from pagerelay.common.engine.parts import EngineLimits
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.kv.checksum import block_sum
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.runner import ModelFacts, ModelRunner
from pagerelay.common.states import PREFILL, Machine
from pagerelay.common.wire.messages import (
    FinishReason,
    FirstToken,
    KvHandle,
    PrefillJob,
    PrefillStarted,
    TokenDelta,
)


class PrefillEngine(LeasingEngine):
    def __init__(
        self, runner: ModelRunner, facts: ModelFacts, pool: KvPool, limits: EngineLimits, leasing: Leasing
    ) -> None:
        super().__init__(runner, facts, pool, limits, leasing)
        self.num_prompt_tokens_cached = 0

    # ------------------------------------------------------------------ from the router

    def submit(self, owner: str, job: PrefillJob, now: float) -> None:
        """Queues a prompt."""
        with self.lock:
            seq = self._accept(owner, job, Machine(PREFILL, "WAITING"), now)
            if seq is not None:
                self.scheduler.add_waiting(seq)

    # ------------------------------------------------------------------ the step's callbacks

    def _admitted(self, seq: Sequence) -> None:
        seq.machine.move("COMPUTING")
        self.num_prompt_tokens_cached += seq.num_cached
        self._tell_started(seq, self._open_lease(seq, seq.num_tokens).handle)

    def _tell_started(self, seq: Sequence, handle: KvHandle) -> None:
        started = PrefillStarted(
            request_id=seq.request_id,
            attempt=seq.attempt,
            handle=handle,
            queued_s=0.0,
            num_cached_tokens=seq.num_cached,
        )
        self._outbox.to_router.append((seq.owner, started))

    def _repeat(self, seq: Sequence, next_index: int) -> None:
        lease = self._lease_of.get(seq.request_id)
        if lease is not None:
            self._tell_started(seq, lease.handle)
            if lease.first_token is not None:
                self._tell_first(seq, lease.first_token, seq.first_index, None)
        elif seq.machine.ended:
            token, index = seq.token_ids[-1], seq.first_index
            self._tell_first(seq, token, index, self._reason(seq, token, index))

    def _short(self, seq: Sequence) -> bool:
        return False  # a prompt has all its blocks from the start; this is never asked with one token to go

    def _failed(self, seq: Sequence) -> None:
        self._end(seq, "ABORTED", "the step failed")

    def _goes_on(self, seq: Sequence) -> bool:
        return False  # it leaves with its first token

    def _advanced(self, seq: Sequence) -> None:
        self._announce(self._lease_of[seq.request_id])

    def _sampled(self, seq: Sequence, token: int, index: int) -> bool:
        reason = self._reason(seq, token, index)
        self._tell_first(seq, token, index, reason)
        if reason is not None:
            self._end(seq, "RELEASED", "the first token ended the answer")
            self._keep_answer(seq)
            return False
        seq.machine.move("LEASED")
        self._complete_lease(self._lease_of[seq.request_id], token)
        return False

    def _reason(self, seq: Sequence, token: int, index: int) -> FinishReason | None:
        return seq.finish_reason(token, index, self.facts.eos_token_ids, self.facts.max_model_len)

    def _tell_first(self, seq: Sequence, token: int, index: int, reason: FinishReason | None) -> None:
        delta = TokenDelta(
            request_id=seq.request_id,
            attempt=seq.attempt,
            index=index,
            token=token,
            finish_reason=reason,
            logprobs=seq.logprobs.get(index),
        )
        computed = seq.num_computed - seq.num_cached
        first = FirstToken(delta=delta, prefill_s=0.0, num_computed_tokens=computed)
        self._outbox.to_router.append((seq.owner, first))

    def _computed(self, plan: list[tuple[Sequence, int]]) -> None:
        """Checksums of the blocks that this step has completed, while they are still in the processor's
        caches."""
        blocks = self._summed
        if blocks is None:
            return
        size = self.limits.block_size
        for seq, count in plan:
            done = seq.num_computed + count
            last = self.scheduler.blocks_for(done) if done == seq.num_tokens else done // size
            for block in seq.block_ids[seq.num_computed // size : last]:
                self._sums[block] = block_sum(blocks[block])

    def _end(self, seq: Sequence, state: str, reason: str | None = None) -> None:
        """The one place where a prompt's blocks are given back."""
        seq.machine.move(state)
        self._forget(seq)
        self._close_lease(seq, reason, ended=state in ("RELEASED", "ABORTED"))
        self._leave(seq)

    # ------------------------------------------------------------------ reading

    def outstanding_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""
        with self.lock:
            queues = (*self.scheduler.waiting, *self.scheduler.running)
            return sum(seq.num_remaining for seq in queues)
