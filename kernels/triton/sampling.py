"""Choosing tokens on the device by the rule of the CPU sampler, with no value read back in between.

One program a row. Temperature, top-k, top-p, min-p in that order, then the inverse of the distribution in
vocabulary order at a uniform number that the caller has drawn: keyed by (seed, choice, position), it is
known before the step, so a row's token depends on its own logits and its key alone. Probabilities are fp64,
as on the CPU; their sums run over tiles of the vocabulary, so they differ in the last bits from a sum that
runs token by token, and a uniform number that falls between the two picks the neighbour.

Top-k and top-p need no sort: the logits' bits, mapped to integers in ascending order, are searched bit by
bit for the threshold, one pass over the row for each of 32 bits. Of equal logits at the threshold top-k
keeps all, and top-p the lower ids that it needs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagerelay.kernels.triton.launch import sample_constants


@dataclass(frozen=True, slots=True)
class SampleRows:
    """What `sample` needs to know of each row, on the device.

    temperature, top_p, min_p, uniform [rows] fp64; top_k [rows] int32. Temperature 0 is greedy; top_k 0,
    top_p 1, min_p 0 mean none; uniform in [0, 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


@triton.jit
def _keys(x):
    """fp32 as int64 in the same order; -0 counts as 0, as in a comparison."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def _load(row_ptr, tile, vocab, TILE: tl.constexpr):
    ids = tile * TILE + tl.arange(0, TILE)
    return ids, tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(x, temperature, most):
    """Probabilities in units of the likeliest token's."""
    return tl.exp(x.to(tl.float64) / temperature - most)


@triton.jit
def _search(row_ptr, vocab, temperature, most, floor, goal, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The smallest key above which less than `goal` lies: of tokens with COUNT, else of weight, of keys from
    floor.
    """
    low = tl.full([], -2147483648, tl.int64)
    for bit in range(32):
        middle = low + (tl.full([], 1, tl.int64) << (31 - bit)) - 1
        above = tl.full([], 0.0, tl.float64)
        for tile in range(tl.cdiv(vocab, TILE)):
            _, x = _load(row_ptr, tile, vocab, TILE)
            keys = _keys(x)
            counted = (keys > middle) & (keys >= floor)
            if COUNT:
                above += tl.sum(counted.to(tl.float64), 0)
            else:
                above += tl.sum(tl.where(counted, _weights(x, temperature, most), 0.0), 0)
        low = tl.where(above < goal, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["vocab", "stride"])
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    tokens_ptr,
    vocab,
    stride,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows,). logits [rows, vocab], rows `stride` apart; tokens [rows] int64.

    ALIGNED: vocab and stride are multiples of 8.
    """
    if ALIGNED:  # for 16-byte loads, which the compiler cannot know to be allowed
        stride = stride // 8 * 8
        vocab = vocab // 8 * 8
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    tiles = tl.cdiv(vocab, TILE)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for tile in range(tiles):
        _, x = _load(row_ptr, tile, vocab, TILE)
        here = tl.max(x, 0)
        token = tl.where(here > best, tile * TILE + tl.argmax(x, 0), token)
        best = tl.maximum(best, here)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        most = best.to(tl.float64) / temperature
        floor = tl.full([], -2147483648, tl.int64)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            floor = _search(row_ptr, vocab, temperature, most, floor, top_k.to(tl.float64), True, TILE)
        # Of the tokens at the key `least` those up to the id `last` are in the nucleus.
        least = floor
        last = vocab
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            mass = tl.full([], 0.0, tl.float64)
            for tile in range(tiles):
                _, x = _load(row_ptr, tile, vocab, TILE)
                mass += tl.sum(tl.where(_keys(x) >= floor, _weights(x, temperature, most), 0.0), 0)
            goal = top_p * mass
            least = _search(row_ptr, vocab, temperature, most, floor, goal, False, TILE)
            before = tl.full([], 0.0, tl.float64)
            for tile in range(tiles):
                _, x = _load(row_ptr, tile, vocab, TILE)
                before += tl.sum(tl.where(_keys(x) > least, _weights(x, temperature, most), 0.0), 0)
            ties = tl.full([], 0, tl.int32)
            last = tl.full([], -1, tl.int32)
            for tile in range(tiles):
                ids, x = _load(row_ptr, tile, vocab, TILE)
                tie = (_keys(x) == least).to(tl.int32)
                rank = ties + tl.cumsum(tie, 0) - tie
                within = (tie > 0) & (before + rank.to(tl.float64) * _weights(x, temperature, most) < goal)
                last = tl.maximum(last, tl.max(tl.where(within, ids, -1), 0))
                ties += tl.sum(tie, 0)
        min_p = tl.load(min_p_ptr + row)
        total = tl.full([], 0.0, tl.float64)
        for tile in range(tiles):
            total += tl.sum(_kept(row_ptr, tile, vocab, temperature, most, least, last, min_p, TILE), 0)
        point = tl.load(uniform_ptr + row) * total
        passed = tl.full([], 0.0, tl.float64)
        chosen = vocab
        fallback = tl.full([], 0, tl.int32)
        for tile in range(tiles):
            ids = tile * TILE + tl.arange(0, TILE)
            kept = _kept(row_ptr, tile, vocab, temperature, most, least, last, min_p, TILE)
            reached = (kept > 0) & (passed + tl.cumsum(kept, 0) > point)
            chosen = tl.minimum(chosen, tl.min(tl.where(reached, ids, vocab), 0))
            fallback = tl.maximum(fallback, tl.max(tl.where(kept > 0, ids, 0), 0))
            passed += tl.sum(kept, 0)
        token = tl.where(chosen < vocab, chosen, fallback)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def _kept(row_ptr, tile, vocab, temperature, most, least, last, min_p, TILE: tl.constexpr):
    """Weights of a tile's tokens, zero for those that the filters drop."""
    ids, x = _load(row_ptr, tile, vocab, TILE)
    keys = _keys(x)
    weights = _weights(x, temperature, most)
    inside = (keys > least) | ((keys == least) & (ids <= last))
    return tl.where(inside & (weights >= min_p), weights, 0.0)


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """One token id per row of logits [rows, vocab] fp32, fp16 or bf16 -> [rows] int64 on the device.

    ValueError where `rows` does not fit. Logits are finite or -inf (never chosen), one per row at least
    finite.
    """
    count, vocab = logits.shape
    for name in ("temperature", "top_k", "top_p", "min_p", "uniform"):
        wanted = torch.int32 if name == "top_k" else torch.float64
        found = getattr(rows, name)
        if found.dtype is not wanted or found.shape != (count,) or not found.is_contiguous():
            raise ValueError(
                f"{name} must be [{count}] {wanted}, contiguous, not {tuple(found.shape)} {found.dtype}"
            )
    if logits.stride(1) != 1:
        raise ValueError("the logits of a row must be contiguous")
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        sample_kernel[(count,)](
            logits,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.uniform,
            tokens,
            vocab,
            logits.stride(0),
            **sample_constants((vocab | logits.stride(0)) % 8 == 0),
        )
    return tokens
