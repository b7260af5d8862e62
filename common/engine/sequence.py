"""One choice of one request, as an engine sees it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagerelay.common.grammar import Matcher
from pagerelay.common.kv.blocks import Holder
from pagerelay.common.model.logits import SampleRequest
from pagerelay.common.states import Machine
from pagerelay.common.wire.messages import Beams
from pagerelay.common.wire.sampling import FinishReason, SamplingParams, TokenLogprobs, named_tokens

if TYPE_CHECKING:
    from pagerelay.common.engine.drafting import Drafter


class Sequence:
    """Tokens, blocks and counts. ``num_computed`` catches up with ``num_tokens``: prefill, chunk, resume and
    decode are that one loop.

    ``token_ids`` starts as the job's tokens (a prompt, and after a recovery the answer so far) and grows by
    what is sampled. ``first_index`` is the output position of the first token sampled here. ``order`` is
    when the request arrived at its router, by this worker's clock: smaller is older, whatever router it is.
    The engine, under its lock, is the only writer.
    """

    __slots__ = (
        "attempt",
        "beams",
        "block_ids",
        "compiling",
        "copied_block",
        "distinct_prompt",
        "doomed",
        "draft",
        "drafter",
        "first_index",
        "holder",
        "keys",
        "logprobs",
        "machine",
        "matcher",
        "num_cached",
        "num_computed",
        "num_given",
        "num_known_blocks",
        "order",
        "owner",
        "pending",
        "queued",
        "request_id",
        "sampling",
        "token_ids",
        "width",
    )

    def __init__(
        self,
        *,
        owner: str,
        request_id: str,
        attempt: int,
        order: float,
        token_ids: Seq[int],
        sampling: SamplingParams,
        first_index: int,
        machine: Machine,
    ) -> None:
        self.owner = owner
        """The router that this sequence belongs to."""
        self.request_id = request_id
        self.attempt = attempt
        self.order = order
        self.token_ids = list(token_ids)
        self.num_given = len(self.token_ids)
        self.sampling = sampling
        self.first_index = first_index
        self.machine = machine
        self.num_computed = 0
        self.num_cached = 0
        """Tokens whose KV was found in this worker's prefix cache."""
        self.block_ids: list[int] = []
        self.holder: Holder = "sequence"
        """As what it holds its blocks: it computes with them, they are being fetched, or kept for a peer."""
        self.keys: list[bytes] = []
        """Prefix-cache keys of its full blocks, made as far as they were needed."""
        self.num_known_blocks = 0
        """Blocks, from the first, that the prefix cache has been told of."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        """What was said of the tokens sampled here, by output position, where it was asked for."""
        self.draft: list[int] = []
        """Guesses at the tokens to come, computed in the next step beside the last token: those that are
        sampled are kept."""
        self.matcher: Matcher | None = None
        """Where the output is in its grammar; made when it is first asked, from the output so far."""
        self.drafter: Drafter | None = None
        """Makes the guesses, where there are any."""
        self.copied_block: int | None = None
        """A block that others write to as well: the next step copies it into the one that has come in its
        place."""
        self.beams: Beams | None = None
        """The last word of the search that it was one of."""
        self.width = 1
        """Sequences that it is, or will soon become."""
        self.queued = 0
        """Tokens whose KV is being computed by steps that are not applied yet."""
        self.pending = 0
        """Tokens that these steps sample and that it goes on from: part of ``token_ids`` once they are
        known."""
        self.compiling: Future[Any] | None = None
        """Its grammar: nothing is sampled before that is compiled."""
        self.distinct_prompt: npt.NDArray[np.int64] | None = None
        """The ids of its prompt, each once, where they are needed for every token."""
        self.doomed = False
        """Removed while in a step; its blocks are given back when the step has ended."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_told(self) -> int:
        """Log-probabilities, and tokens of a search's answers, that are kept of it beside its own tokens."""
        found = (self.beams and self.beams.hypotheses) or []
        return len(self.logprobs) + sum(len(one.token_ids) for one in found)

    @property
    def num_due(self) -> int:
        """Tokens whose KV no step has been given yet."""
        return self.num_remaining + self.pending - self.queued

    @property
    def in_step(self) -> bool:
        """Its blocks are being read and written: they may not be given back yet."""
        return self.queued > 0

    @property
    def next_index(self) -> int:
        """Output position of the token after those that are here."""
        return self.first_index + len(self.token_ids) - self.num_given

    @property
    def waits_for_grammar(self) -> bool:
        return self.compiling is not None and not self.compiling.done()

    @property
    def num_prompt(self) -> int:
        """Tokens before output position 0."""
        return self.num_given - self.first_index

    @property
    def scores_prompt(self) -> bool:
        """Are the prompt's log-probabilities wanted, and not told by an earlier attempt?"""
        return self.sampling.prompt_logprobs is not None and self.first_index == 0

    def misfit(self, max_model_len: int, vocab_size: int) -> tuple[str, str] | None:
        """Why it cannot be computed here: an error's code and message. In a step it would fail everybody."""
        if not 1 <= self.num_tokens <= max_model_len:
            return "too_long", f"{self.num_tokens} tokens do not fit this worker's limit of {max_model_len}"
        named = (*self.token_ids, *named_tokens(self.sampling))
        if min(named) < 0 or max(named) >= vocab_size:
            return "bad_job", f"token ids from {min(named)} to {max(named)}, the vocabulary has {vocab_size}"
        return None

    def finish_reason(self, token: int, index: int, eos: Seq[int], max_model_len: int) -> FinishReason | None:
        """Does ``token`` at output position ``index``, already appended, end the answer? Those of beams end
        with the search."""
        params = self.sampling
        if params.beam_width:
            return None
        if params.grammar is not None and token in eos:
            return "stop"  # nothing may follow
        if index + 1 >= params.min_tokens and token in self.stops(eos):
            return "stop"
        return "length" if self.ends_at(index, max_model_len) else None

    def ends_at(self, index: int, max_model_len: int) -> bool:
        """Is there no room for another token after output position ``index``?"""
        return index + 1 >= self.sampling.max_tokens or self.num_prompt + index + 1 >= max_model_len

    def sample_request(self, eos: Seq[int], guessed: Seq[int] = ()) -> SampleRequest:
        """For the token after those here, pending and ``guessed``."""
        index = self.next_index + self.pending + len(guessed)
        if not self.sampling.changes_logits:
            return SampleRequest(self.sampling, index, self._forbidden(index, eos))
        return SampleRequest(
            self.sampling,
            index,
            self._forbidden(index, eos),
            prompt=self._distinct_prompt() if self.sampling.repetition_penalty != 1.0 else (),
            output=[*self.token_ids[self.num_prompt :], *guessed],
            # Of a beam at most so many can be among the best that go on, beside those that end there.
            branches=width + len(self.stops(eos)) if (width := self.sampling.beam_width) else 0,
        )

    def _distinct_prompt(self) -> npt.NDArray[np.int64]:
        if self.distinct_prompt is None:
            self.distinct_prompt = np.unique(np.asarray(self.token_ids[: self.num_prompt], dtype=np.int64))
        return self.distinct_prompt

    def _forbidden(self, index: int, eos: Seq[int]) -> tuple[int, ...]:
        """Ids that may not be sampled at ``index``: because ``min_tokens`` is not reached, or because a
        grammar goes on and end tokens are ignored."""
        params = self.sampling
        held = eos if params.ignore_eos and params.grammar is not None else ()
        return (*held, *(self.stops(eos) if index < params.min_tokens else ()))

    def stops(self, eos: Seq[int]) -> tuple[int, ...]:
        """Ids that end an answer, once there are ``min_tokens``."""
        return (*self.sampling.stop_token_ids, *(() if self.sampling.ignore_eos else eos))
