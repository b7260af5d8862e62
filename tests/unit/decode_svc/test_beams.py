"""Beam search: transformers' answers, from sequences that share what they have in common."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    BLOCK,
    VOCAB,
    FakeRunner,
    HeldRunner,
    RunningStep,
    answer,
    assert_idle,
    decode_engine,
    decode_job,
    greedy,
    prefill_engine,
    run_dry,
    sent_to_router,
)
from handwork import Hands, Request
from reference import BeamReference, ExpectedBeam

from pagerelay.common.engine import core
from pagerelay.common.engine.parts import Outbox
from pagerelay.common.model.batch import Batch
from pagerelay.common.model.runner import ModelRunner, read_facts
from pagerelay.common.model.tiny import make_tiny_model
from pagerelay.common.wire.messages import Beams, Failed, HandedOver, Hypothesis, SamplingParams, Tokens
from pagerelay.kernels.torch_ops import TorchOps

SIZE = 16
STOPS = [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]
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
    eos = read_facts(folder, None).eos_token_ids
    for seed, stops in ((length, None), (length + 1, [*eos, *STOPS])):
        ids = prompt(length, seed)
        ending = {"ignore_eos": True} if stops is None else {"stop_token_ids": tuple(STOPS)}
        params = beams(width, 20, length_penalty=penalty, early_stopping=early, **ending)
        request = engines.submit(ids, params)
        engines.run()
        settings = {"length_penalty": penalty, "early_stopping": early}
        assert_found(request, reference(ids, 20, width, stops, **settings))


EDITS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ({"logit_bias": ((70, 4.0), (71, -3.0))}, {"sequence_bias": [[[70], 4.0], [[71], -3.0]]}),
    ({"min_tokens": 5}, {"min_new_tokens": 5}),
    ({"bad_words": ((70,), (66, 99))}, {"bad_words_ids": [[70], [66, 99]]}),
]


@pytest.mark.parametrize(("ours", "theirs"), EDITS, ids=lambda pair: next(iter(pair)))
def test_transformers_answers_with_changed_likelihoods(
    folder: Path,
    runner: ModelRunner,
    reference: BeamReference,
    ours: dict[str, Any],
    theirs: dict[str, Any],
) -> None:
    engines = hands(runner, read_facts(folder, None))
    request = engines.submit(prompt(20), beams(3, 16, stop_token_ids=tuple(STOPS), **ours))
    engines.run()
    stops = [*read_facts(folder, None).eos_token_ids, *STOPS]
    assert_found(request, reference(prompt(20), 16, 3, stops, **theirs))


# ------------------------------------------------------------------ on a model that reads the KV it is given


class Wide(FakeRunner):
    """Many tokens are likely, and which ones depends on all that came before: beams part and die."""

    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))

    def run(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        return 2 * self.table[super().run(batch, pool).argmax(-1)]


def found_alone(tokens: list[int], params: SamplingParams) -> list[Hypothesis]:
    engine = decode_engine(64, runner=Wide(), max_num_seqs=16)
    engine.submit("r", decode_job("alone", tokens, params), 0.0)
    [hypotheses] = found_by(run_dry(engine))
    assert_idle(engine)
    return hypotheses


def found_by(outbox: Outbox) -> list[list[Hypothesis]]:
    news = [message for _, message in outbox.to_router if isinstance(message, Beams)]
    return [message.hypotheses for message in news if message.hypotheses is not None]


def tokens_of(number: int, length: int) -> list[int]:
    return [1 + (number * 7 + at * 3) % (VOCAB - 1) for at in range(length)]


def test_of_equals_the_likelier_beam_and_the_lower_token_go_first() -> None:
    engine = decode_engine(runner=FakeRunner())
    engine.submit("r", decode_job("a", [5, 6, 7], beams(4, 2, ignore_eos=True)), 0.0)
    [hypotheses] = found_by(run_dry(engine))
    likeliest = answer([5, 6, 7], 2)
    assert hypotheses[0].token_ids == likeliest
    # All others have one unlikely token: after the likeliest first one, or before what is likeliest then.
    others = [token for token in range(VOCAB) if token not in likeliest][:3]
    second = [token for token in range(VOCAB) if token != likeliest[1]][:3]
    assert [one.token_ids for one in hypotheses[1:]] in (
        [[likeliest[0], token] for token in second],
        [[token, *answer([5, 6, 7, token], 1)] for token in others],
    )
    assert {one.finish_reason for one in hypotheses} == {"length"}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_prompt_is_shipped_and_held_once(width: int, length: int) -> None:
    engines = Hands(prefill_engine(runner=Wide()), decode_engine(64, runner=Wide()))
    request = engines.submit(tokens_of(1, length), beams(width, 11, ignore_eos=True))
    engines.deliver_all()
    most = 0
    while not request.over:
        assert engines.step()
        counts = engines.d.counts()
        most = max(most, counts.held)
        emitted = max(len(seq.token_ids) for seq in engines.d.scheduler.running) if not request.over else 11
        tail = -(-(length + emitted) // BLOCK) - length // BLOCK
        assert counts.held <= length // BLOCK + width * tail
    engines.run()
    assert request.hypotheses == found_alone(request.prompt, request.sampling)
    assert engines.num_shipped == -(-length // BLOCK)
    assert most < width * -(-(length + 10) // BLOCK), "nothing was shared"
    assert engines.d.num_copied_blocks > 0


def test_others_in_the_batch_are_not_disturbed() -> None:
    engine = decode_engine(64, max_num_seqs=12, runner=FakeRunner())
    engine.submit("r", decode_job("plain", [1, 2, 3], greedy(20), order=1), 0.0)
    engine.submit("r", decode_job("beams", [1, 2, 3], beams(4, 15), order=2), 0.0)
    engine.submit("r", decode_job("after", [1, 2, 3, 4, 5], greedy(20), order=3), 0.0)
    sent = run_dry(engine)
    for request_id, tokens in (("plain", [1, 2, 3]), ("after", [1, 2, 3, 4, 5])):
        deltas = [d for _, m in sent.to_router if isinstance(m, Tokens) for d in m.deltas]
        first = [m.first for _, m in sent.to_router if isinstance(m, HandedOver)]
        got = {d.index: d.token for d in (*first, *deltas) if d.request_id == request_id}
        assert list(got.values()) == answer(tokens, 20)
    assert not [
        d for _, m in sent.to_router if isinstance(m, Tokens) for d in m.deltas if d.request_id == "beams"
    ]
    assert_idle(engine)


@pytest.mark.parametrize("split", [True, False])
def test_many_searches_with_too_little_memory_all_end(split: bool) -> None:
    limits = {"max_num_seqs": 12, "runner": Wide()}
    engines = Hands(prefill_engine(40, **limits), decode_engine(24, **limits), split=split)
    requests = [
        engines.submit(tokens_of(number, 3 + number), beams(2 + number % 4, 12, ignore_eos=number % 2 == 0))
        for number in range(8)
    ]
    plain = [engines.submit(tokens_of(number, 6), greedy(9)) for number in range(3)]
    engines.run()
    for request in requests:
        assert request.hypotheses == found_alone(request.prompt, request.sampling)
    for request in plain:
        alone = Hands(prefill_engine(runner=Wide()), decode_engine(runner=Wide()))
        again = alone.submit(request.prompt, request.sampling)
        alone.run()
        assert request.emitted == again.emitted
    assert sum(request.preempted for request in requests) > 0
    assert not any(request.failures for request in (*requests, *plain))


def test_places_in_a_step_are_kept() -> None:
    engine = decode_engine(64, max_num_seqs=6, runner=Wide())
    for order in range(1, 6):
        engine.submit("r", decode_job(f"r{order}", tokens_of(order, 4), beams(4, 9), order=order), 0.0)
    engine.submit("r", decode_job("plain", [1, 2], greedy(5), order=6), 0.0)
    while engine.step():
        assert engine.stats.num_seqs <= 6
        engine.check_ledger()
    assert_idle(engine)


def test_a_search_that_lost_its_worker_finds_the_same() -> None:
    engines = Hands(prefill_engine(runner=Wide()), decode_engine(64, runner=Wide()))
    request = engines.submit(tokens_of(2, 9), beams(4, 12, ignore_eos=True))
    engines.deliver_all()
    for _ in range(6):
        engines.step()
    assert not request.over
    engines.lose_decode(decode_engine(64, runner=Wide()))
    engines.run()
    assert request.hypotheses == found_alone(request.prompt, request.sampling)
    assert request.attempt == 2


@pytest.mark.parametrize("end", ["abort", "fail", "owner"])
def test_all_blocks_come_back_whatever_ends_a_search(end: str) -> None:
    held = HeldRunner()
    held.go_on.set()
    engine = decode_engine(64, runner=held)
    engine.submit("r", decode_job("a", tokens_of(1, 6), beams(4, 30, ignore_eos=True)), 0.0)
    for _ in range(5):
        engine.step()
    held.error = RuntimeError("broken") if end == "fail" else None
    with RunningStep(engine, held) as step:
        if end == "abort":
            engine.abort("a", 1)
        elif end == "owner":
            assert engine.drop_owner("r") == 1
        engine.check_ledger()
        assert engine.counts().held > 0, "given back while a step writes to them"
    if end == "fail":
        assert step.error is not None
        assert engine.fail_step("broken") == 4
        assert [m.code for m in sent_to_router(engine) if isinstance(m, Failed)] == ["step_failed"]
    assert_idle(engine)


def test_what_could_never_run_is_refused_with_figures() -> None:
    engine = decode_engine(8, max_num_seqs=4)
    engine.submit("r", decode_job("wide", [1, 2], beams(5, 4)), 0.0)
    engine.submit("r", decode_job("long", [1, 2], beams(4, 24)), 0.0)
    sent = sent_to_router(engine)
    for request_id, needs in (("wide", "5 beams of up to 4 tokens"), ("long", "4 beams of up to 24 tokens")):
        [failed] = [m for m in sent if m.request_id == request_id]
        assert (failed.code, failed.retryable) == ("too_wide", False)
        assert needs in failed.message
        assert "the decode worker has 8 and 4" in failed.message
    assert_idle(engine)


def test_a_search_is_not_handed_over_and_says_again_how_far_it_is() -> None:
    engine = decode_engine(64, runner=Wide())
    engine.submit("r", decode_job("a", tokens_of(1, 6), beams(2, 6, ignore_eos=True)), 0.0)
    for _ in range(4):
        engine.step()
    sent_to_router(engine)
    engine.suspend("a", 1)
    assert sent_to_router(engine) == []
    engine.probe("r", "a", 1, 0)
    assert sent_to_router(engine) == [Beams(request_id="a", attempt=1, num_tokens=4)]
    assert len(found_by(run_dry(engine))) == 1
    assert_idle(engine)


def test_the_last_word_of_a_search_is_said_again() -> None:
    """Whichever beam ended it. Searches and answers that have ended are remembered together."""
    engine = decode_engine(64, runner=Wide(), max_num_seqs=16)
    for number in range(3):
        job = decode_job(f"a{number}", tokens_of(number, 6), beams(3, 6 + number), order=number)
        engine.submit("r", job, 0.0)
    engine.submit("r", decode_job("plain", tokens_of(1, 6), greedy(3)), 0.0)
    sent = [message for _, message in run_dry(engine).to_router if isinstance(message, Beams)]
    last = {message.request_id: message for message in sent if message.hypotheses is not None}
    assert len(last) == 3
    for request_id, message in last.items():
        engine.probe("r", request_id, 1, 0)
        assert sent_to_router(engine) == [message]
        engine.probe("r", request_id, 2, 0)
        assert [m.code for m in sent_to_router(engine) if isinstance(m, Failed)] == ["forgotten"]
    engine.probe("r", "plain", 1, 0)
    assert [type(message) for message in sent_to_router(engine)] == [Tokens]
    assert_idle(engine)


def test_so_many_answers_of_searches_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_TOLD", 40)
    engine = decode_engine(64, runner=Wide())
    for number in range(3):
        engine.submit("r", decode_job(f"a{number}", tokens_of(number, 6), beams(4, 5, ignore_eos=True)), 0.0)
        run_dry(engine)
    found = []
    for number in range(3):
        engine.probe("r", f"a{number}", 1, 0)
        found += [isinstance(message, Beams) for message in sent_to_router(engine)]
    assert found == [False, True, True], "20 tokens each"


def test_one_token_is_a_search_too() -> None:
    engines = Hands(prefill_engine(runner=Wide()), decode_engine(runner=Wide()))
    request = engines.submit(tokens_of(1, 5), beams(3, 1))
    engines.run()
    assert request.hypotheses == found_alone(request.prompt, request.sampling)
    assert [len(one.token_ids) for one in request.hypotheses or []] == [1, 1, 1]
