"""Tokens chosen on the device are those of the CPU sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagerelay.common.model.sampler import SampleRequest, uniform
from pagerelay.common.model.sampler import sample as sample_on_cpu
from pagerelay.common.wire.messages import SamplingParams

VOCAB = 1000
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB + 5},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
]
Choose = Callable[[Tensor, Sequence[SampleRequest]], list[int]]


def requests(count: int, **params: Any) -> list[SampleRequest]:
    return [
        SampleRequest(SamplingParams(max_tokens=8, seed=row, choice=row % 3, **params), position=row * 7)
        for row in range(count)
    ]


def logits(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def choose(kernels: SimpleNamespace, device: str) -> Choose:
    """The kernel behind the CPU sampler's signature; uniform numbers are drawn beforehand, on the host."""

    def on_device(scores: Tensor, asked: Sequence[SampleRequest]) -> list[int]:
        def column(dtype: torch.dtype, values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        params = [request.params for request in asked]
        rows = kernels.sampling.SampleRows(
            temperature=column(torch.float64, [p.temperature for p in params]),
            top_k=column(torch.int32, [p.top_k for p in params]),
            top_p=column(torch.float64, [p.top_p for p in params]),
            min_p=column(torch.float64, [p.min_p for p in params]),
            uniform=column(
                torch.float64, [uniform(r.params.seed, r.params.choice, r.position) for r in asked]
            ),
        )
        tokens: list[int] = kernels.sampling.sample(scores.to(device), rows).tolist()
        return tokens

    return on_device


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_same_tokens(choose: Choose, params: dict[str, Any]) -> None:
    scores, asked = logits(6), requests(6, **params)
    assert choose(scores, asked) == sample_on_cpu(scores.clone(), asked)


@pytest.mark.parametrize("vocab", [1, 7, 2048, 2049, 6001])
def test_vocabularies_that_fill_tiles_or_not(choose: Choose, vocab: int) -> None:
    scores = logits(4, vocab)
    for params in ({"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9}):
        asked = requests(4, **params)
        assert choose(scores, asked) == sample_on_cpu(scores.clone(), asked)


def test_rows_of_different_wishes_in_one_batch(choose: Choose) -> None:
    asked = [requests(12, **params)[row] for row, params in enumerate(FILTERS)]
    scores = logits(12)
    together = choose(scores, asked)
    assert together == sample_on_cpu(scores.clone(), asked)
    for row in range(12):
        assert choose(scores[row : row + 1], asked[row : row + 1]) == [together[row]]


def test_equal_logits(choose: Choose) -> None:
    """Greedy takes the first, top-k keeps all at its threshold, top-p the lowest ids."""
    flat = torch.zeros(3, 40)
    flat[:, [3, 30]] = 1.0
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.3}, {"top_p": 0.02}):
        asked = requests(3, **params)
        assert choose(flat, asked) == sample_on_cpu(flat.clone(), asked)
    assert set(choose(flat, requests(3, top_p=0.02))) == {3}


def test_forbidden_tokens_and_huge_logits(choose: Choose) -> None:
    scores = logits(3, scale=1e4)
    scores[:, ::2] = float("-inf")
    scores[0, 1:] = float("-inf")
    scores[0, 0] = -0.0
    for params in ({"temperature": 0.0}, {}, {"top_k": 900}, {"top_p": 0.999, "min_p": 1e-9}):
        asked = requests(3, **params)
        assert choose(scores, asked) == sample_on_cpu(scores.clone(), asked)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_whatever_is_chosen_where_there_are_no_numbers_is_an_id(
    choose: Choose, params: dict[str, Any]
) -> None:
    """The next step may begin with it before anybody has seen that it means nothing."""
    scores, asked = logits(5), requests(5, **params)
    expected = sample_on_cpu(scores.clone(), asked)
    scores[0], scores[1, VOCAB - 1], scores[2, 0] = float("nan"), float("nan"), float("inf")
    got = choose(scores, asked)
    assert got[3:] == expected[3:]
    assert all(0 <= token < VOCAB for token in got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision(choose: Choose, dtype: torch.dtype) -> None:
    """Coarse values are full of ties."""
    scores = logits(4).to(dtype)
    for params in ({}, {"top_k": 50}, {"top_p": 0.7}):
        asked = requests(4, **params)
        assert choose(scores, asked) == sample_on_cpu(scores.float(), asked)


def test_rows_of_logits_may_lie_apart(choose: Choose) -> None:
    whole, asked = logits(6, 1003), requests(6, top_p=0.9)
    assert choose(whole[::2, 3:], asked[:3]) == sample_on_cpu(whole[::2, 3:].clone(), asked[:3])


def test_what_does_not_fit_is_refused(kernels: SimpleNamespace, device: str) -> None:
    def column(dtype: torch.dtype, rows: int = 2) -> Tensor:
        return torch.ones(rows, dtype=dtype, device=device)

    wide = column(torch.float64)
    good = {
        "temperature": wide,
        "top_k": column(torch.int32),
        "top_p": wide,
        "min_p": wide,
        "uniform": wide,
    }
    scores = logits(2).to(device)
    for name, wrong in (("top_k", wide), ("uniform", column(torch.float32)), ("min_p", wide[:1])):
        with pytest.raises(ValueError, match=name):
            kernels.sampling.sample(scores, kernels.sampling.SampleRows(**{**good, name: wrong}))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.sampling.sample(scores.T.contiguous().T, kernels.sampling.SampleRows(**good))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_same_tokens_many_times(choose: Choose, params: dict[str, Any]) -> None:
    """Sums in another order may move an edge of the distribution by its last bits; here none does."""
    scores, asked = logits(400, 5000, seed=1), requests(400, **params)
    pairs = zip(choose(scores, asked), sample_on_cpu(scores.clone(), asked), strict=True)
    assert sum(ours != theirs for ours, theirs in pairs) == 0
