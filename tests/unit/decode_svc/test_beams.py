"""Beam search: transformers' answers, from sequences that share what they have in common."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    decode_engine,
    greedy,
    prefill_engine,
)
from handwork import Hands, Request
from reference import BeamReference, ExpectedBeam

from pagerelay.common.model.runner import ModelRunner, read_facts
from pagerelay.common.model.tiny import make_tiny_model
from pagerelay.common.wire.messages import SamplingParams
from pagerelay.kernels.torch_ops import TorchOps

SIZE = 16
STOPS = [2, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]
"""Enough ids of the byte tokenizer for answers to end at different lengths."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner(folder, TorchOps())


@pytest.fixture(scope="module")
def reference(folder: Path) -> BeamReference:
    return BeamReference(folder)


def hands(runner: Any, facts: Any, *, split: bool = True, num_blocks: int = 64, **limits: Any) -> Hands:
    common = {"runner": runner, "facts": facts, "block_size": SIZE, "max_batch_tokens": 64} | limits
    return Hands(prefill_engine(num_blocks, **common), decode_engine(num_blocks, **common), split=split)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def beams(width: int, max_tokens: int = 12, **params: Any) -> SamplingParams:
    return greedy(max_tokens, beam_width=width, **params)


def assert_found(request: Request, expected: list[ExpectedBeam]) -> None:
    assert request.hypotheses is not None
    assert [one.token_ids for one in request.hypotheses] == [one.ids for one in expected]
    scores = [one.score for one in request.hypotheses]
    assert scores == pytest.approx([one.score for one in expected], abs=1e-4)


CASES = [
    (width, length, penalty, early)
    for (width, penalty), length, early in zip(
        itertools.product((2, 3, 4, 5), (0.5, 1.0, 2.0)),
        itertools.cycle((1, 15, 16, 17, 40)),
        itertools.cycle((False, True, "never")),
        strict=False,
    )
]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("width", "length", "penalty", "early"), CASES)
def test_transformers_answers(
    folder: Path,
    runner: ModelRunner,
    reference: BeamReference,
    width: int,
    length: int,
    penalty: float,
    early: Any,
    split: bool,
) -> None:
    engines = hands(runner, read_facts(folder, None), split=split)
    for seed, stops in ((length, None), (length + 1, STOPS)):
        ids = prompt(length, seed)
        ending = {"ignore_eos": True} if stops is None else {"stop_token_ids": tuple(stops[1:])}
        params = beams(width, 20, length_penalty=penalty, early_stopping=early, **ending)
        request = engines.submit(ids, params)
        engines.run()
        settings = {"length_penalty": penalty, "early_stopping": early}
        assert_found(request, reference(ids, 20, width, stops, **settings))
