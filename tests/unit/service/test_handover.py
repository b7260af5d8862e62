"""Both engines together, by hand: the tokens of the split are those of one undisturbed process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import FACTS, answer, decode_engine, greedy, prefill_engine
from handwork import Hands
from reference import Expected
from reference import greedy as generate

from pagerelay.common.model.runner import ModelFacts, ModelRunner, read_facts
from pagerelay.common.wire.messages import SamplingParams
from pagerelay.kernels.torch_ops import TorchOps

LENGTHS = (1, 15, 16, 17, 31, 32, 33)
NUM_TOKENS = 12


def prompts() -> list[list[int]]:
    """One of each block-edge length; each has its own beginning."""
    return [[1000 * (index + 1) + 37 * at for at in range(length)] for index, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner(tiny_dir: Path) -> ModelRunner:
    return ModelRunner(tiny_dir, TorchOps())


@pytest.fixture(scope="module")
def facts(tiny_dir: Path) -> ModelFacts:
    return read_facts(tiny_dir, None)


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> list[Expected]:
    return list(generate(tiny_dir, prompts(), NUM_TOKENS))


def assert_as_expected(emitted: list[int], expected: Expected) -> None:
    """Equal up to the first near-tie of the reference, where rounding may decide."""
    assert len(emitted) == NUM_TOKENS
    assert expected.sure >= NUM_TOKENS // 2
    assert emitted[: expected.sure] == expected.ids[: expected.sure]


@pytest.mark.parametrize(
    ("chunk", "prefix_cache", "split"),
    [
        (16, True, True),
        (23, True, True),
        (23, False, True),
        (256, False, True),
        (23, True, False),
        (256, False, False),
    ],
    ids=str,
)
def test_a_real_model_says_what_generate_says(
    runner: ModelRunner,
    facts: ModelFacts,
    expected: list[Expected],
    chunk: int,
    prefix_cache: bool,
    split: bool,
) -> None:
    common: dict[str, Any] = {
        "runner": runner,
        "facts": facts,
        "block_size": 16,
        "max_batch_tokens": chunk,
        "prefix_cache": prefix_cache,
    }
    hands = Hands(prefill_engine(48, **common), decode_engine(48, **common), split=split)
    requests = [hands.submit(prompt, greedy(NUM_TOKENS, ignore_eos=True)) for prompt in prompts()]
    hands.run()
    for request, reference in zip(requests, expected, strict=True):
        assert_as_expected(request.emitted, reference)
        assert request.reason == "length"
    if not split:
        return
    assert hands.num_shipped == sum(-(-length // 16) for length in LENGTHS)
    # The same prompts once more, longest first: with the cache only partial blocks are shipped.
    again = [hands.submit(prompt, greedy(NUM_TOKENS, ignore_eos=True)) for prompt in prompts()[::-1]]
    hands.num_shipped = 0
    hands.run()
    assert [request.emitted for request in again] == [request.emitted for request in requests[::-1]]
    partial = sum(length % 16 != 0 for length in LENGTHS)
    assert hands.num_shipped == (partial if prefix_cache else sum(-(-length // 16) for length in LENGTHS))


@pytest.mark.parametrize("together", [1, 3, 8])
def test_a_token_does_not_depend_on_who_runs_beside_it(
    runner: ModelRunner, facts: ModelFacts, together: int
) -> None:
    """Sampled at temperature 1 with a seed: the answers of one at a time, and of ``together`` at a time."""

    def sampling(number: int) -> SamplingParams:
        return SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=number, ignore_eos=True)

    def run(at_once: int) -> list[list[int]]:
        common: dict[str, Any] = {"runner": runner, "facts": facts, "block_size": 16, "max_num_seqs": at_once}
        hands = Hands(prefill_engine(40, **common), decode_engine(40, **common))
        requests = [
            hands.submit([50 * number + at for at in range(5 + 4 * number)], sampling(number))
            for number in range(8)
        ]
        hands.run()
        return [request.emitted for request in requests]

    assert run(together) == run(1)


# ------------------------------------------------------------------ with the fake model, which reads all its
# KV


def hands_of(
    prefill_blocks: int = 24,
    decode_blocks: int = 24,
    *,
    split: bool = True,
    lease_s: float = 10.0,
    **limits: Any,
) -> Hands:
    return Hands(
        prefill_engine(prefill_blocks, lease_s=lease_s, **limits),
        decode_engine(decode_blocks, **limits),
        split=split,
    )


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
def test_every_length_up_to_five_blocks(chunk: int, split: bool) -> None:
    hands = hands_of(40, 40, split=split, max_batch_tokens=chunk)
    requests = [hands.submit([length] * length, greedy(6)) for length in range(1, 21)]
    hands.run()
    assert [request.emitted for request in requests] == [answer(r.prompt, 6) for r in requests]
    assert all(request.attempt == 1 or request.preempted for request in requests)


@pytest.mark.parametrize("params", [{}, {"stop": True}, {"min_tokens": 30}], ids=str)
def test_answers_of_one_token_and_of_many_end_alike_wherever_they_end(params: dict[str, Any]) -> None:
    for split in (True, False):
        for max_tokens in (1, 2, 30):
            prompt = [3, 1, 4, 1, 5]
            expected = answer(prompt, max_tokens)
            extra: dict[str, Any] = {"min_tokens": params["min_tokens"]} if "min_tokens" in params else {}
            if "stop" in params:
                extra["stop_token_ids"] = (expected[0],)
                expected = expected[:1]
            hands = hands_of(split=split)
            request = hands.submit(prompt, greedy(max_tokens, **extra))
            hands.run()
            assert request.emitted == expected
            assert request.reason == ("stop" if "stop" in params else "length")


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
def test_with_far_too_little_memory_everybody_finishes_and_the_oldest_undisturbed(
    prefix_cache: bool, split: bool
) -> None:
    hands = hands_of(12, 8, split=split, prefix_cache=prefix_cache)
    requests = [hands.submit([number + 1] * 6, greedy(24)) for number in range(6)]
    hands.run()
    assert [request.emitted for request in requests] == [answer(r.prompt, 24) for r in requests]
    assert requests[0].preempted == 0
    assert sum(request.preempted for request in requests) == hands.d.num_preempted > 0
    assert not any(request.failures for request in requests)


def test_a_lease_that_ran_out_is_recovered_from() -> None:
    hands = hands_of(lease_s=10.0)
    request = hands.submit([5] * 9, greedy(6))
    hands.deliver_all()
    hands.p.step()
    hands.collect()
    hands.p.expire(hands.now)  # the lease's time begins
    hands.now += 20.0
    hands.p.expire(hands.now)
    hands.run()
    assert request.failures == ["lease_expired"]
    assert request.attempt == 2
    assert request.emitted == answer([5] * 9, 6)


def test_many_prompts_with_one_beginning_compute_and_ship_it_once() -> None:
    hands = hands_of()
    beginning = list(range(1, 13))  # 3 blocks
    first = hands.submit([*beginning, 20], greedy(3))
    hands.run()
    hands.num_shipped, computed = 0, hands.p.num_prompt_tokens_cached
    others = [hands.submit([*beginning, 20 + number], greedy(3)) for number in range(1, 5)]
    hands.run()
    assert hands.num_shipped == 4
    assert hands.p.num_prompt_tokens_cached - computed == 4 * 12
    for request in (first, *others):
        assert request.emitted == answer(request.prompt, 3)


def test_the_context_ends_an_answer_at_the_same_place_wherever_it_is_computed() -> None:
    ends = set()
    for split in (True, False):
        hands = hands_of(split=split)
        request = hands.submit([2] * 60, greedy(50))
        hands.run()
        assert request.emitted == answer([2] * 60, FACTS.max_model_len - 60)
        ends.add((request.reason, len(request.emitted)))
    assert ends == {("length", 4)}
