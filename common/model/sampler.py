"""Choosing tokens. A token is a function of its own logits and of (seed, choice, position): nothing else
enters.

So the batch, the worker and a recovery cannot change it. The order of the filters is transformers' own:
temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from pagerelay.common.model.logits import SampleRequest as SampleRequest
from pagerelay.common.model.logits import edit, unsound

BAD = -1
"""In the place of a token, where a row held NaN or infinity: nothing can be chosen by it."""


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) keyed by its arguments alone: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(
        struct.pack("<QQQ", seed, choice, position), digest_size=8, person=b"pagerelay-sample"
    )
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
    """One token id or ``BAD`` per row of ``logits`` ``[len(requests), vocab]`` fp32, which it may write
    to."""
    bad = unsound(logits).tolist()
    edit(logits, requests, lambda arrays: [torch.from_numpy(array) for array in arrays])
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, request in enumerate(requests):
        if bad[row]:
            tokens[row] = BAD
        elif request.params.temperature > 0.0:
            tokens[row] = _draw(logits[row], request)
    return tokens


def _draw(logits: torch.Tensor, request: SampleRequest) -> int:
    params = request.params
    scores = logits.double() / params.temperature
    if 0 < params.top_k < scores.numel():
        kth = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    probs = scores.softmax(-1)
    if params.top_p < 1.0:
        probs = torch.where(_nucleus(probs, params.top_p), probs, 0.0)
    if params.min_p > 0.0:
        probs = torch.where(probs < params.min_p * probs.max(), 0.0, probs)
    # Inverse of the distribution in vocabulary order: no sort decides, so near-equal logits cannot swap
    # places.
    cumulative = probs.cumsum(-1)
    point = uniform(params.seed, params.choice, request.position) * float(cumulative[-1])
    chosen = int(torch.searchsorted(cumulative, point, right=True))
    return min(chosen, int(probs.nonzero()[-1]))


NUCLEUS_GUESS = 1024


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask of the smallest set of tokens that reaches ``top_p``; of equally likely ones the lower ids come
    first.

    A full sort of the vocabulary costs twelve times as much as the largest thousand, which nearly always
    suffice.
    """
    top = probs.topk(min(NUCLEUS_GUESS, probs.numel())).values
    if float(top.sum()) < top_p:
        top = probs.sort(descending=True).values
    # A token falls out if those before it reach top_p already.
    kept = int((top.cumsum(-1) - top < top_p).sum())
    least = top[kept - 1]
    mask = probs > least
    ties = (probs == least).nonzero().flatten()
    mask[ties[: kept - int(mask.sum())]] = True
    return mask
