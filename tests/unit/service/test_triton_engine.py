"""Engines on the Triton kernels, in the interpreter or on a device: the ids of the torch twins, with decode
steps launched one by one and played as graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import decode_engine, make_pool, prefill_engine
from handwork import Hands

from pagerelay.common.model import sampler
from pagerelay.common.model.feed import Feed
from pagerelay.common.model.graphs import CudaCapture
from pagerelay.common.model.logits import SampleRequest
from pagerelay.common.model.runner import ModelRunner, read_facts
from pagerelay.common.model.tiny import make_tiny_model
from pagerelay.common.wire.messages import SamplingParams
from pagerelay.kernels.torch_ops import TorchOps
from pagerelay.kernels.triton import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

BLOCK_SIZE, NUM_BLOCKS, LONGEST = 16, 24, 96
PROMPTS = [[(17 * n + 31 * i) % 250 + 5 for i in range(length)] for n, length in enumerate((5, 16, 37))]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.1, "seed": 6, "top_k": 30, "min_p": 0.05, "min_tokens": 4},
]
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a vocabulary of bytes: the interpreter is slow at choosing from a large one."""
    made = tmp_path_factory.mktemp("tiny")
    make_tiny_model(made)
    return made


def device() -> torch.device:
    interpreted = os.environ.get("TRITON_INTERPRET") or not torch.cuda.is_available()
    return torch.device("cpu" if interpreted else "cuda")


def on_host(function: Callable[[], None]) -> Callable[[], None]:
    """Stands for a recorded graph where there are none."""
    return function


def served(
    folder: Path,
    runner: Any,
    recorded: bool = False,
    step_ahead: bool = False,
    **wanted: Any,
) -> list[list[int]]:
    """The prompts' ids by a prefill and a decode engine, all at once."""
    facts = read_facts(folder, None)
    pools = [make_pool(NUM_BLOCKS, BLOCK_SIZE, facts) for _ in range(2)]
    for pool in pools:
        pool.tensor = pool.tensor.to(device() if runner.ops.name == "triton" else "cpu")
    if recorded:
        capture = CudaCapture() if device().type == "cuda" else on_host
        runner.record_decode_steps(pools[1].tensor, [1, 2, 4], LONGEST, capture)
    common: dict[str, Any] = {
        "runner": runner,
        "facts": facts,
        "block_size": BLOCK_SIZE,
        "max_batch_tokens": 32,
        "step_ahead": step_ahead,
    }
    made = prefill_engine(pool=pools[0], **common), decode_engine(pool=pools[1], **common)

    class Copying(Hands):
        def copy(self, lease: int, sources: list[int], targets: list[int]) -> None:
            self.d.pool.tensor[targets] = self.p.pool.tensor[sources]

    hands = Copying(*made)
    requests = [
        hands.submit(prompt, SamplingParams(**{"max_tokens": NUM_TOKENS, **wishes, **wanted}))
        for prompt, wishes in zip(PROMPTS, WISHES, strict=True)
    ]
    hands.run()
    assert [request.failures for request in requests] == [[]] * len(requests)
    return [request.emitted for request in requests]


def test_the_same_ids_as_the_torch_twins(folder: Path) -> None:
    from pagerelay.kernels.triton.ops import TritonOps

    expected = served(folder, ModelRunner(folder, TorchOps()))
    assert all(len(ids) == NUM_TOKENS or ids[-1] in (0, 2) for ids in expected)
    assert served(folder, ModelRunner(folder, TritonOps(), feed=Feed(device()))) == expected
    runner = ModelRunner(folder, TritonOps(deterministic=True), feed=Feed(device()))
    assert served(folder, runner, recorded=True, step_ahead=True) == expected


class Choosing(TorchOps):
    """The torch twins, with the choice of tokens where the logits are."""

    def choose(self, logits: torch.Tensor, *wishes: torch.Tensor) -> torch.Tensor:
        tokens = []
        for row, wish in zip(logits, zip(*(wish.tolist() for wish in wishes), strict=True), strict=True):
            temperature, top_k, top_p, min_p, number = wish
            params = SamplingParams(
                max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
            )
            with patch.object(sampler, "uniform", lambda *_, number=number: number):
                tokens += sampler.sample(row[None].clone(), [SampleRequest(params, 0)])
        return torch.tensor(tokens)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("step_ahead", [False, True])
def test_the_torch_twins_by_the_device_s_way(folder: Path, recorded: bool, step_ahead: bool) -> None:
    """Batches by the feed, tokens of steps begun ahead filled in behind it, graphs or none."""
    twins = ModelRunner(folder, TorchOps())
    stop = served(folder, twins, max_tokens=20)[1][7]
    wanted = {"max_tokens": 20, "stop_token_ids": (stop,)}
    expected = served(folder, twins, **wanted)
    assert sorted(map(len, expected))[0] < 20 == len(expected[0])
    runner = ModelRunner(folder, Choosing(), feed=Feed(torch.device("cpu")))
    assert served(folder, runner, recorded, step_ahead, **wanted) == expected
