"""Batches on their way to the device, and decode steps played on recorded sizes, without a device."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagerelay.common.model.batch import Batch, Row, build_batch
from pagerelay.common.model.device_sampler import DeviceSampler, sampler_for
from pagerelay.common.model.feed import Feed, packed_bytes
from pagerelay.common.model.graphs import DecodeGraphs, graph_sizes
from pagerelay.common.model.sampler import SampleRequest, sample
from pagerelay.common.wire.messages import SamplingParams
from pagerelay.kernels.torch_ops import TorchOps

CPU = torch.device("cpu")
VOCAB, MAX_BLOCKS = 50, 6


def decoding(count: int, seed: int = 0) -> Batch:
    draw = random.Random(seed)
    rows = [
        Row([draw.randrange(VOCAB)], draw.randrange(60), draw.sample(range(40), 4), True)
        for _ in range(count)
    ]
    return build_batch(rows, 16, 1)


def meaning(batch: Batch) -> torch.Tensor:
    """Logits [rows, VOCAB] that tell all that a row's step reads."""
    seen = batch.tables.double().sum(1) + 100 * batch.seq_lens + 7 * batch.positions + batch.slots
    starts = batch.query_starts.long()
    assert (starts[1:] - starts[:-1] == 1).all()
    logits = torch.zeros(batch.token_ids.numel(), VOCAB)
    logits[:, 0], logits[:, 1] = seen.float(), batch.token_ids.float()
    return logits[batch.logits_rows]


class Recorder:
    """A capture that notes how often each function is played, and refuses one that has not run before."""

    def __init__(self) -> None:
        self.played: list[int] = []

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        number = len(self.played)
        self.played.append(0)

        def replay() -> None:
            self.played[number] += 1
            function()

        return replay


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def graphs(recorder: Recorder, sizes: list[int]) -> DecodeGraphs:
    return DecodeGraphs(meaning, Feed(CPU), sizes, MAX_BLOCKS, recorder)


def test_every_batch_size_is_played_on_the_next_larger_graph(recorder: Recorder) -> None:
    made = graphs(recorder, [1, 2, 4, 8])
    for count in (3, 8, 1, 2, 5, 4, 3):
        batch = decoding(count, seed=count)
        assert made.takes(batch)
        got = made.run(batch)
        assert got.shape == (count, VOCAB)
        assert torch.equal(got, meaning(batch)), f"{count} sequences"
    assert recorder.played == [2, 3, 1, 1], "of 8, 4, 2 and 1"


def test_padding_writes_nowhere_and_has_no_length(recorder: Recorder) -> None:
    seen: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        seen.append(Batch(*(getattr(batch, name).clone() for name in batch.__slots__[:7]), batch.num_logits))
        return meaning(batch)

    made = DecodeGraphs(forward, Feed(CPU), [4], MAX_BLOCKS, recorder)
    made.run(decoding(4))
    made.run(decoding(1))
    warm, last = seen[0], seen[-1]
    assert warm.slots.tolist() == [-1] * 4
    assert warm.seq_lens.tolist() == [0] * 4
    assert last.slots[1:].tolist() == [-1] * 3
    assert last.seq_lens[1:].tolist() == [0] * 3
    assert not last.tables[1:].any(), "nothing is left of the step before"
    assert last.tables.shape == (4, MAX_BLOCKS)


def test_what_is_not_a_decode_step_is_not_taken(recorder: Recorder) -> None:
    made = graphs(recorder, [1, 2])
    prompt, decode = Row([1, 2, 3], 0, [0], True), Row([1], 5, [1], True)
    assert made.takes(build_batch([decode], 16, 1))
    assert not made.takes(build_batch([prompt], 16, 1))
    assert not made.takes(build_batch([prompt, decode], 16, 1))
    assert not made.takes(build_batch([Row([1], 5, [1], False)], 16, 1)), "a prompt's last but one token"
    assert not made.takes(decoding(3)), "more than the largest"
    assert not made.takes(build_batch([Row([1], 5, list(range(MAX_BLOCKS + 1)), True)], 16, 1))


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64)[-3:] == [48, 56, 64]
    assert graph_sizes(1000)[-2:] == [240, 256]


def test_a_batch_arrives_as_it_was() -> None:
    feed = Feed(CPU)
    for count in (5, 400, 1, 0):
        rows = [Row([1, 2, 3], 4, [0, 9], True)] * max(count, 1)
        batch = build_batch(rows, 16, 1)
        there = batch.sent(feed)
        for name in ("token_ids", "positions", "slots", "tables", "seq_lens", "query_starts", "logits_rows"):
            assert torch.equal(getattr(there, name), getattr(batch, name)), name
            assert getattr(there, name).dtype is getattr(batch, name).dtype
        assert there.num_logits == batch.num_logits


def test_what_was_sent_outlives_later_batches() -> None:
    feed = Feed(CPU)
    kept = [feed.send([np.full(5, n), np.zeros(0), np.full((2, 2), n, np.int32)]) for n in range(5)]
    for n, (numbers, none, square) in enumerate(kept):
        assert (numbers == n).all()
        assert (square == n).all()
        assert (none.numel(), square.shape) == (0, (2, 2))
        assert square.data_ptr() % 16 == numbers.data_ptr() % 16
    assert packed_bytes([np.zeros(5), np.zeros(1, np.int32)]) == 48 + 16


class Choosing:
    """The CPU's rule behind the device's interface."""

    def choose(self, logits: torch.Tensor, *wishes: torch.Tensor) -> torch.Tensor:
        temperature, top_k, top_p, min_p, drawn = (wish.tolist() for wish in wishes)
        self.drawn = drawn
        asked = [
            SampleRequest(SamplingParams(max_tokens=1, temperature=t, top_k=k, top_p=p, min_p=m, seed=9), 3)
            for t, k, p, m in zip(temperature, top_k, top_p, min_p, strict=True)
        ]
        return torch.tensor(sample(logits, asked))


def test_wishes_reach_the_device() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    wishes = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}]
    best = logits.topk(3).indices.tolist()
    asked = [
        SampleRequest(SamplingParams(max_tokens=1, seed=9, **wish), 3, forbidden)
        for wish, forbidden in zip(wishes, ([best[0][0], best[0][1]], (), [best[2][0]], ()), strict=True)
    ]
    ops = Choosing()
    got = DeviceSampler(ops)(logits.clone(), asked)
    assert got == sample(logits.clone(), asked)
    assert got[0] == best[0][2]
    assert ops.drawn[0] == 0.0
    assert all(0 <= number < 1 for number in ops.drawn[1:])
    assert DeviceSampler(ops)(logits[:0], []) == []


def test_operations_without_a_sampler_use_the_one_on_the_cpu() -> None:
    assert sampler_for(TorchOps()) is sample
