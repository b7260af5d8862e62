"""What a request wants done to its logits before a token is chosen, and what it wants told of them.

All of it is arithmetic of one row and its own request, so neither the batch nor the worker enters. Works on
any device: positions and values of all rows go over together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from pagerelay.common.wire.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row to sample: its parameters, the output position, and the ids that may not come yet
    (``min_tokens``)."""

    params: SamplingParams
    position: int
    forbidden: Sequence[int] = ()
    prompt: Sequence[int] | npt.NDArray[np.int64] = ()
    """Token ids before position 0, in any order and as often as one likes: for ``repetition_penalty``."""
    output: Sequence[int] = ()
    """Those from there on, for what ``changes_logits``."""
    mask: npt.NDArray[np.int32] | None = None
    """What the grammar allows, a bit a token: token 32 i + j is bit j of word i."""
    branches: int = 0
    """Above 0: not one token is wanted, but so many of the likeliest, with their log-probabilities."""


SPARE = 8
"""Alternatives looked at beyond those that are told of."""

Send = Callable[[list[npt.NDArray[np.generic]]], Sequence[torch.Tensor]]
"""Takes arrays to the logits' device."""


@dataclass(slots=True)
class _Cells:
    """Single logits of a batch by row and token, with a number for each."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, tokens: Sequence[int], values: Sequence[float]) -> None:
        self.rows += [row] * len(tokens)
        self.tokens += tokens
        self.values += values

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        return [
            np.asarray(self.rows, dtype=np.int64),
            np.asarray(self.tokens, dtype=np.int64),
            np.asarray(self.values, dtype=np.float64),
        ]


def unsound(logits: torch.Tensor) -> torch.Tensor:
    """Which rows of ``logits`` ``[rows, vocab]`` hold NaN or infinity, or −inf alone: bool ``[rows]``, on
    their device. To be asked before they are edited: then −inf stands where no token may come, maybe all
    over."""
    return ~logits.amax(-1).isfinite()  # NaN wins


def edit(logits: torch.Tensor, requests: Sequence[SampleRequest], send: Send) -> None:
    """Changes ``logits`` ``[len(requests), vocab]`` fp32 in place, in the order that
    :class:`SamplingParams` states. Ids outside the vocabulary are the caller's mistake."""
    bias, scaled, lowered, excluded = _Cells(), _Cells(), _Cells(), _Cells()
    masks: list[tuple[int, npt.NDArray[np.int32]]] = []
    for row, request in enumerate(requests):
        params = request.params
        if params.changes_logits:
            bias.add(row, [token for token, _ in params.logit_bias], [by for _, by in params.logit_bias])
            if params.repetition_penalty != 1.0:
                seen = np.union1d(request.prompt, request.output).astype(np.int64).tolist()
                scaled.add(row, seen, [params.repetition_penalty] * len(seen))
            if params.presence_penalty or params.frequency_penalty:
                counts = Counter(request.output)
                by = [params.presence_penalty + params.frequency_penalty * n for n in counts.values()]
                lowered.add(row, list(counts), by)
            bad = _completing(params.bad_words, request)
            excluded.add(row, bad, [0.0] * len(bad))
            mask = request.mask
            if params.allowed_token_ids:
                allowed = _bits(params.allowed_token_ids, logits.shape[1])
                both = allowed if mask is None else allowed & mask
                mask = both if both.any() else mask  # what the grammar wants has to come
            if mask is not None:
                masks.append((row, mask))
        excluded.add(row, request.forbidden, [0.0] * len(request.forbidden))
    if bias.rows:
        row_ids, tokens, values = send(bias.arrays())
        logits.index_put_((row_ids, tokens), values.to(logits.dtype), accumulate=True)
    if scaled.rows:
        row_ids, tokens, values = send(scaled.arrays())
        old, values = logits[row_ids, tokens], values.to(logits.dtype)
        logits.index_put_((row_ids, tokens), torch.where(old > 0, old / values, old * values))
    if lowered.rows:
        row_ids, tokens, values = send(lowered.arrays())
        logits.index_put_((row_ids, tokens), -values.to(logits.dtype), accumulate=True)
    for at, mask in masks:
        octets = send([mask])[0].view(torch.uint8).int()
        logits[at] += _barred(logits.device).index_select(0, octets).flatten()[: logits.shape[1]]
    if excluded.rows:
        counts, masked = Counter(excluded.rows), {at for at, _ in masks}
        emptied = [at for at, count in counts.items() if at in masked or count >= logits.shape[1]]
        before = {at: logits[at].clone() for at in emptied}
        row_ids, tokens, _ = send(excluded.arrays())
        logits.index_put_((row_ids, tokens), logits.new_full((), float("-inf")))
        for at, kept in before.items():
            if bool(logits[at].isneginf().all()):
                logits[at] = kept  # nothing is left: what must come comes too early, or in spite of its name


def _completing(bad_words: Sequence[Sequence[int]], request: SampleRequest) -> list[int]:
    """Last tokens of those bad words whose other tokens are the output's last ones."""
    found = []
    for word in bad_words:
        before = len(word) - 1
        if before <= len(request.output) and list(request.output[len(request.output) - before :]) == list(
            word[:-1]
        ):
            found.append(word[-1])
    return found


@lru_cache
def _barred(device: torch.device) -> torch.Tensor:
    """By octet of a mask, what is added to its 8 logits. Six times as fast as to fill what its bits say."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, 0.0, -np.inf).astype(np.float32)).to(device)


def _bits(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[list(tokens)] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)


def scores(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
    """Log-probabilities fp64 ``[len(rows), vocab]`` of these rows, unchanged; ``None`` for no rows."""
    if not rows:
        return None
    of_rows = torch.empty(len(rows), logits.shape[1], dtype=torch.float64, device=logits.device)
    for at, row in enumerate(rows):  # one by one: a row's sum must not depend on how many there are
        of_rows[at] = logits[row].double().log_softmax(-1)
    return of_rows


def branches(
    logits: torch.Tensor, rows: Sequence[int], requests: Sequence[SampleRequest]
) -> list[TokenLogprobs]:
    """The likeliest next tokens of each row and their log-probabilities, changed as the request wants, best
    first, of equal ones the lower id first: as ``top``, and the very first as the one that is told of. Of a
    row that is :func:`unsound`, what is left of it."""
    of_rows = scores(logits, rows)
    if of_rows is None:
        return []
    edit(of_rows, requests, lambda arrays: [torch.from_numpy(array).to(logits.device) for array in arrays])
    found = []
    for row, request in zip(of_rows, requests, strict=True):
        pairs = _likeliest(row, request.branches)
        found.append(TokenLogprobs(pairs[0][1] if pairs else 0.0, pairs))
    return found


def _likeliest(row: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """So many tokens and their log-probabilities, best first, of equal ones the lower id first."""
    least = row.topk(min(count, row.numel())).values[-1]
    ids = ((row >= least) & row.isfinite()).nonzero()[:, 0]
    best = row[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[best.indices].tolist(), best.values.tolist(), strict=True))[:count]


def told(of_rows: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What is said of one token a row of ``scores``, with so many alternatives, of equal ones the lower id
    first."""
    at = torch.tensor(tokens, device=of_rows.device)
    chosen: list[float] = of_rows.gather(1, at[:, None])[:, 0].tolist()
    most = max(counts)
    if most == 0:
        return [TokenLogprobs(logprob) for logprob in chosen]
    # Which of equal ones topk gives depends on how many it is asked for, and so on the batch: a few more show
    # whether those wanted have equals beyond them.
    best = of_rows.topk(min(most + SPARE, of_rows.shape[1]))
    said = []
    for row, logprob, ids, values, count in zip(
        of_rows, chosen, best.indices.tolist(), best.values.tolist(), counts, strict=True
    ):
        top = tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:count])
        if count and values[count - 1] == values[-1]:
            top = _likeliest(row, count)
        said.append(TokenLogprobs(logprob, top))
    return said
