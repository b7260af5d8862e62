"""Guesses in the decode engine: fewer steps, the same messages, and every block where it was."""

from __future__ import annotations

from typing import Any

import pytest
from engines import (
    BLOCK,
    FACTS,
    FakeRunner,
    HeldRunner,
    RunningStep,
    answer,
    assert_idle,
    copied_token,
    decode_engine,
    decode_job,
    greedy,
    run_dry,
    sent_to_router,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pagerelay.common.engine.drafting import Drafting, Speculation
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.wire.messages import (
    Failed,
    HandedOver,
    Preempted,
    SamplingParams,
    Suspended,
    TokenDelta,
    Tokens,
)
from pagerelay.decode_svc.engine import DecodeEngine

PROMPT = list(range(1, 11))
SPECULATION = Speculation(num_tokens=4, min_ngram=2, max_ngram=4)


class Knowing(Drafting):
    """Guesses what the model will say, but each token at a position divisible by ``wrong`` wrongly."""

    def __init__(self, wrong: int = 1000) -> None:
        super().__init__(SPECULATION, FACTS.eos_token_ids, FACTS.max_model_len)
        self._wrong = wrong

    def guesses(self, seq: Sequence, most: int) -> list[int]:
        left = seq.sampling.max_tokens - seq.next_index - 1
        if seq.num_tokens == seq.num_given or left < 1:
            return []
        right = answer(seq.token_ids, min(most, 4, left))
        positions = range(seq.num_tokens, seq.num_tokens + 4)
        return [
            1 + token % 30 if at % self._wrong == 0 else token
            for at, token in zip(positions, right, strict=False)
        ]


def engine_of(runner: Any = None, drafting: Drafting | None = None, **kwargs: Any) -> DecodeEngine:
    kwargs.setdefault("speculation", SPECULATION)
    engine = decode_engine(runner=runner or FakeRunner(copied_token), **kwargs)
    if drafting is not None:
        engine.scheduler.drafting = drafting
    return engine


def deltas(messages: list[Any]) -> list[TokenDelta]:
    found = []
    for message in messages:
        if isinstance(message, HandedOver):
            found.append(message.first)
        elif isinstance(message, Tokens):
            found += message.deltas
    return found


def ids_of(messages: list[Any], request_id: str = "r") -> list[int]:
    """In order, without a gap, the reason on the last alone."""
    mine = [delta for delta in deltas(messages) if delta.request_id == request_id]
    assert [delta.index for delta in mine] == list(range(mine[0].index, mine[0].index + len(mine)))
    assert all(delta.finish_reason is None for delta in mine[:-1])
    return [delta.token for delta in mine]


def test_right_guesses_come_in_one_message_and_save_steps() -> None:
    runner = FakeRunner()
    engine = engine_of(runner, Knowing())
    engine.submit("router", decode_job("r", PROMPT, greedy(11)), 0.0)
    sent = [message for _, message in run_dry(engine).to_router]
    assert ids_of(sent) == answer(PROMPT, 11)
    assert [len(message.deltas) for message in sent if isinstance(message, Tokens)] == [5, 5]
    assert deltas(sent)[-1].finish_reason == "length"
    assert runner.steps == [10, 5, 5]
    assert_idle(engine)


def test_an_answer_that_repeats_itself_takes_fewer_steps() -> None:
    steps = {}
    for speculation in (None, SPECULATION):
        runner = FakeRunner(copied_token)
        engine = engine_of(runner, speculation=speculation)
        engine.submit("router", decode_job("r", PROMPT, greedy(50)), 0.0)
        assert ids_of([message for _, message in run_dry(engine).to_router]) == answer(
            PROMPT, 50, copied_token
        )
        steps[speculation is not None] = len(runner.steps)
    assert steps[False] == 50
    assert steps[True] < 45


def test_it_counts_what_it_guessed() -> None:
    engine = engine_of(FakeRunner(), Knowing(wrong=14))
    engine.submit("router", decode_job("r", PROMPT, greedy(11)), 0.0)
    engine.step()
    engine.step()  # 11 is known; 11, 12 and 13 are guessed rightly, 14 wrongly
    assert (engine.stats.sampled, engine.stats.drafted, engine.stats.accepted) == (4, 4, 3)
    assert engine.stats.num_seqs == 1


def test_wrong_guesses_give_their_blocks_back_when_the_step_is_over() -> None:
    engine = engine_of(FakeRunner(), Knowing(wrong=1))
    engine.submit("router", decode_job("r", PROMPT, greedy(20)), 0.0)
    for _ in range(12):
        engine.step()
        engine.check_ledger()
        (seq,) = engine.scheduler.running
        assert len(seq.block_ids) <= -(-seq.num_tokens // BLOCK)


def test_a_guess_takes_no_block_that_somebody_may_need() -> None:
    """Two sequences run and two blocks are left: those are for them."""
    runner = FakeRunner()
    engine = engine_of(runner, Knowing(), num_blocks=6, prefix_cache=False)
    for name in "ab":
        engine.submit("router", decode_job(name, PROMPT[:7], greedy(6), order=ord(name)), 0.0)
    engine.step()
    engine.take_outbox()
    assert engine.counts().free == 2
    engine.step()
    assert runner.steps[-1] == 2  # both at the end of a block: no guess fits
    engine.step()
    assert not any(isinstance(message, Preempted) for message in sent_to_router(engine))


def test_guesses_stay_within_the_budget_and_the_rows() -> None:
    for limits in ({"max_num_seqs": 4}, {"max_batch_tokens": 4}):
        runner = FakeRunner()
        engine = engine_of(runner, Knowing(), num_blocks=64, **limits)
        for order in range(3):
            engine.submit("router", decode_job(f"r{order}", [order + 1, 2, 3], greedy(8), order=order), 0.0)
        sent = [message for _, message in run_dry(engine).to_router]
        assert max(runner.steps[3:]) == 4
        for order in range(3):
            assert ids_of(sent, f"r{order}") == answer([order + 1, 2, 3], 8)


def test_an_end_within_right_guesses_is_the_end() -> None:
    expected = answer(PROMPT, 5)
    engine = engine_of(FakeRunner(), Knowing())
    engine.submit("router", decode_job("r", PROMPT, greedy(20, stop_token_ids=(expected[3],))), 0.0)
    sent = [message for _, message in run_dry(engine).to_router]
    assert ids_of(sent) == expected[:4]
    assert deltas(sent)[-1].finish_reason == "stop"
    assert_idle(engine)


def test_blocks_of_right_guesses_are_cached_and_those_of_wrong_ones_are_not() -> None:
    """The next turn of a chat finds the whole answer but its last token; its KV is that of the tokens."""
    for wrong in (1000, 3, 1):
        engine = engine_of(FakeRunner(), Knowing(wrong), num_blocks=32)
        engine.submit("router", decode_job("r", PROMPT, greedy(11)), 0.0)
        run_dry(engine)
        told = [*PROMPT, *answer(PROMPT, 11)]
        engine.submit("router", decode_job("again", [*told, 3], greedy(4)), 0.0)
        sent = [message for _, message in run_dry(engine).to_router]
        assert ids_of(sent, "again") == answer([*told, 3], 4)
        (handed,) = (message for message in sent if isinstance(message, HandedOver))
        assert handed.num_computed_tokens == 22 - 20
        assert_idle(engine)


def test_the_youngest_makes_room_and_the_oldest_is_never_preempted() -> None:
    engine = engine_of(num_blocks=10, prefix_cache=False)
    for order in range(3):
        engine.submit("router", decode_job(f"r{order}", [order + 1] * 8, greedy(24), order=order), 0.0)
    sent = [message for _, message in run_dry(engine).to_router]
    preempted = [message.request_id for message in sent if isinstance(message, Preempted)]
    assert preempted == ["r2", "r1"]
    assert ids_of(sent, "r0") == answer([1] * 8, 24, copied_token)
    assert_idle(engine)


@pytest.mark.parametrize("wrong", [1000, 2, 1])
def test_it_goes_on_elsewhere(wrong: int) -> None:
    """What is handed over is the KV of the tokens that are known, in just the blocks for it."""
    runner = HeldRunner()
    engine = engine_of(runner, Knowing(wrong))
    engine.submit("router", decode_job("r", PROMPT, greedy(30)), 0.0)
    runner.go_on.set()
    engine.step()
    with RunningStep(engine, runner):
        engine.suspend("r", 1)
    sent = sent_to_router(engine)
    ids = ids_of(sent)
    assert ids == answer(PROMPT, len(ids))
    (suspended,) = (message for message in sent if isinstance(message, Suspended))
    assert suspended.handle.num_tokens == len(PROMPT) + len(ids) - 1
    engine.check_ledger()
    (seq,) = engine._by_request.values()
    assert len(seq.block_ids) == -(-suspended.handle.num_tokens // BLOCK)
    kv = engine.pool.tensor[seq.block_ids][:, 0, 0, 0, :, 0].flatten()[: suspended.handle.num_tokens]
    assert kv.int().tolist() == seq.token_ids[:-1]
    engine.abort("r", 1)
    assert_idle(engine)


def test_what_is_taken_back_or_fails_within_a_step_gives_all_blocks_back() -> None:
    for fails in (False, True):
        runner = HeldRunner()
        engine = engine_of(runner, Knowing())
        engine.submit("router", decode_job("r", PROMPT, greedy(30)), 0.0)
        runner.go_on.set()
        engine.step()
        runner.error = RuntimeError("broken") if fails else None
        with RunningStep(engine, runner):
            if not fails:
                engine.abort("r", 1)
            engine.check_ledger()
        if fails:
            engine.fail_step("broken")
            assert any(isinstance(message, Failed) for message in sent_to_router(engine))
        assert_idle(engine)


request = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=20),
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 40), "min_tokens": st.integers(0, 12)},
        optional={
            "stop_token_ids": st.sampled_from([(3,), (5, 9), (0,)]),
            "temperature": st.just(1.0),
            "seed": st.integers(0, 9),
            "frequency_penalty": st.sampled_from([-1.0, 2.0]),
            "repetition_penalty": st.just(1.5),
            "bad_words": st.just(((3, 4), (8,))),
            "logit_bias": st.just(((0, 9.0), (7, 5.0))),
            "logprobs": st.integers(0, 3),
        },
    ),
)


@settings(max_examples=60)
@given(st.lists(request, min_size=1, max_size=5), st.integers(16, 40), st.booleans())
def test_the_same_messages_as_without(
    requests: list[tuple[list[int], dict[str, Any]]], num_blocks: int, cached: bool
) -> None:
    """Whatever is asked, together and in little room: tokens, log-probabilities and reasons."""
    told = []
    for speculation in (None, Speculation(num_tokens=3, min_ngram=1, max_ngram=3)):
        of_each = {}
        engine = engine_of(speculation=speculation, num_blocks=num_blocks, prefix_cache=cached)
        for order, (prompt, params) in enumerate(requests):
            sampling = SamplingParams(**({"temperature": 0.0} | params))
            engine.submit("router", decode_job(f"r{order}", prompt, sampling, order=order), 0.0)
        sent = [message for _, message in run_dry(engine).to_router]
        preempted = {message.request_id for message in sent if isinstance(message, Preempted)}
        for order in range(len(requests)):
            if f"r{order}" not in preempted:
                ids_of(sent, f"r{order}")
            of_each[order] = [delta for delta in deltas(sent) if delta.request_id == f"r{order}"]
        assert_idle(engine)
        told.append(of_each)
    for order in range(len(requests)):
        without, with_guesses = told[0][order], told[1][order]
        common = min(len(without), len(with_guesses))  # either may have been preempted
        assert without[:common] == with_guesses[:common]
