"""Tokens from logits: the same sets as transformers' own warpers, randomness keyed by position and nothing
else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagerelay.common.model import sampler
from pagerelay.common.model.logits import told
from pagerelay.common.model.sampler import SampleRequest, sample, uniform
from pagerelay.common.wire.messages import SamplingParams

VOCAB = 50


def logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def request(position: int = 0, forbidden: tuple[int, ...] = (), **params: Any) -> SampleRequest:
    return SampleRequest(SamplingParams(max_tokens=8, **params), position, forbidden)


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers' ``generate`` would draw from."""
    ids, scores = torch.zeros(1, 1, dtype=torch.long), scores.double()[None]
    if params.temperature != 1.0:
        scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(-1)[0]


def test_temperature_nought_is_the_best_logit() -> None:
    rows = logits(5)
    assert sample(rows, [request(temperature=0.0)] * 5) == rows.argmax(-1).tolist()


def test_of_equal_logits_greedy_takes_the_first() -> None:
    rows = torch.zeros(1, 7)
    rows[0, [2, 5]] = 1.0
    assert sample(rows, [request(temperature=0.0)]) == [2]


WARPS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("params", WARPS, ids=str)
def test_what_can_be_drawn_is_what_transformers_could_draw(params: dict[str, Any]) -> None:
    for seed in range(3):
        scores = logits(seed=seed)[0]
        expected = warped(scores, SamplingParams(max_tokens=1, **params))
        rows = scores.repeat(600, 1)
        drawn = set(sample(rows, [request(position, seed=seed, **params) for position in range(600)]))
        assert drawn <= set(expected.nonzero().flatten().tolist())
        # Whatever is likely enough does come.
        assert set((expected > 0.03).nonzero().flatten().tolist()) <= drawn


@pytest.mark.parametrize("params", [WARPS[0], WARPS[-1]], ids=["plain", "all"])
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-squared of 20,000 draws over a small vocabulary."""
    count, vocab = 20_000, 12
    scores = logits(vocab=vocab, seed=3)[0] / 2
    expected = warped(scores, SamplingParams(max_tokens=1, **params)) * count
    drawn = Counter(
        sample(scores.repeat(count, 1), [request(position, seed=11, **params) for position in range(count)])
    )
    bins = [token for token in range(vocab) if expected[token] >= 5]
    assert sum(drawn[token] for token in bins) >= count - 60
    chi2 = sum(float((drawn[token] - expected[token]) ** 2 / expected[token]) for token in bins)
    # 99.99th percentile for 11 degrees of freedom.
    assert chi2 < 37.4, (chi2, drawn, expected)


@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.95, 0.999999])
@pytest.mark.parametrize("flatness", [0.001, 1.0])
def test_the_nucleus_is_the_same_by_a_guess_and_by_a_full_sort(
    top_p: float, flatness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs = (flatness * logits(vocab=3000)[0]).double().round(decimals=3).softmax(-1)  # many ties
    expected = SamplingParams(max_tokens=1, top_p=top_p)
    masks = []
    for guess in (1, 100, 1024, 5000):
        monkeypatch.setattr(sampler, "NUCLEUS_GUESS", guess)
        masks.append(sampler._nucleus(probs, top_p))
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert int(masks[0].sum()) == int((warped(probs.log(), expected) > 0).sum())
    assert float(probs[masks[0]].sum()) >= top_p - 1e-12
    # Of equally likely ones the lower ids are kept.
    least = probs[masks[0]].min()
    ties = (probs == least).nonzero().flatten()
    kept = masks[0][ties].tolist()
    assert kept == sorted(kept, reverse=True)


def test_a_token_does_not_depend_on_the_rows_beside_it() -> None:
    rows = logits(16, vocab=2000)
    requests = [
        request(3 * row, seed=row % 3, top_p=0.9, temperature=0.8 if row % 4 else 0.0) for row in range(16)
    ]
    together = sample(rows.clone(), requests)
    alone = [sample(rows[row : row + 1].clone(), [requests[row]])[0] for row in range(16)]
    backwards = sample(rows.flip(0).clone(), requests[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_seed_choice_and_position_each_change_the_draw(field: str) -> None:
    def draws(**changed: int) -> list[int]:
        made = [request(position, seed=5, choice=1) for position in range(40)]
        for name, value in changed.items():
            made = [
                replace(r, position=r.position + value)
                if name == "position"
                else replace(r, params=msgspec.structs.replace(r.params, **{name: value}))
                for r in made
            ]
        return sample(torch.zeros(40, 1000), made)

    assert draws() == draws()
    same = sum(a == b for a, b in zip(draws(), draws(**{field: 2}), strict=True))
    assert same < 3


def test_uniform_is_fixed_for_ever() -> None:
    """Numbers of a stream that has begun may not change with a new version: a recovery would show."""
    assert uniform(0, 0, 0) == uniform(0, 0, 0)
    values = [uniform(2**64 - 1, 127, position) for position in range(1000)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == 1000
    assert abs(sum(values) / 1000 - 0.5) < 0.05


def test_forbidden_ids_do_not_come() -> None:
    rows = torch.zeros(1, 4)
    rows[0, 1] = 50.0
    assert sample(rows.clone(), [request(temperature=0.0)]) == [1]
    assert sample(rows.clone(), [request(temperature=0.0, forbidden=(1, 0))]) == [2]
    drawn = set(sample(rows.repeat(300, 1), [request(p, forbidden=(1, 3)) for p in range(300)]))
    assert drawn == {0, 2}


def test_forbidding_in_one_row_leaves_the_others_alone() -> None:
    rows = torch.zeros(2, 4)
    rows[:, 1] = 50.0
    assert sample(rows, [request(temperature=0.0, forbidden=(1,)), request(temperature=0.0)]) == [0, 1]


def test_min_tokens_on_a_models_logits() -> None:
    """What a model returns are inference tensors, which nobody may write to outside of inference mode."""
    with torch.inference_mode():
        rows = torch.zeros(1, 4)
        rows[0, 1] = 50.0
    assert sample(rows, [request(temperature=0.0, forbidden=(1,))]) == [0]


def test_nothing_to_sample() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize("penalty", [0.01, 100.0])
@pytest.mark.parametrize("top_p", [5e-324, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e9])
def test_the_most_that_may_be_asked_for_leaves_a_token(
    penalty: float, top_p: float, temperature: float
) -> None:
    params = SamplingParams(
        max_tokens=8,
        temperature=temperature,
        top_p=top_p,
        min_p=1.0,
        top_k=1,
        presence_penalty=2.0,
        frequency_penalty=-2.0,
        repetition_penalty=penalty,
        logit_bias=((3, 100.0), (5, -100.0)),
        bad_words=((7,), (1, 2)),
        allowed_token_ids=tuple(range(40)),
    )
    for scale in (1e-30, 1.0, 1e5):
        logits = scale * torch.randn(2, 50, generator=torch.Generator().manual_seed(4))
        request = SampleRequest(params, 3, forbidden=(0,), prompt=list(range(9)), output=[3, 1])
        for token in sample(logits, [request, request]):
            assert 0 < token < 40
            assert token not in (2, 7)


def test_of_equal_alternatives_the_lower_ids_are_told_of_whatever_else_is_in_the_step() -> None:
    table = torch.randint(0, 40, (2, 5000), generator=torch.Generator().manual_seed(4)).double()
    ranked = [sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0])) for row in table.tolist()]
    for counts in ([3, 3], [0, 20], [20, 1], [7, 2]):
        for row, (one, count) in enumerate(zip(told(table, [9, 9], counts), counts, strict=True)):
            assert (one.logprob, one.top) == (float(table[row, 9]), tuple(ranked[row][:count]))
    few = torch.tensor([[0.5, 2.0, 0.5, 2.0]], dtype=torch.float64)
    assert told(few, [0], [3])[0].top == ((1, 2.0), (3, 2.0), (0, 0.5))
