"""Guesses by prompt lookup: which there are, and when there are none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagerelay.common.engine.drafting import INDEXED_PER_STEP, Drafting, NgramIndex, Speculation
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.states import DECODE, Machine
from pagerelay.common.wire.sampling import Grammar, SamplingParams

EOS = 99
tokens = st.lists(st.integers(0, 3), max_size=40)


def index_of(ids: list[int], least: int = 2, most: int = 4) -> NgramIndex:
    index = NgramIndex(least, most)
    index.extend(ids, len(ids))
    return index


def searched(ids: list[int], least: int, most: int, count: int) -> list[int]:
    """The same by looking through all of it."""
    for n in range(min(most, len(ids)), least - 1, -1):
        for at in range(len(ids) - 1, n - 1, -1):
            if ids[at - n : at] == ids[-n:]:
                return [ids[at + ahead % (len(ids) - at)] for ahead in range(count)]
    return []


@given(tokens, st.integers(1, 3), st.integers(0, 2), st.integers(1, 6), st.integers(1, 7))
def test_the_index_finds_what_a_search_finds(
    ids: list[int], least: int, more: int, count: int, at_once: int
) -> None:
    index = NgramIndex(least, least + more)
    while index.num_entered < len(ids):
        assert 0 < index.extend(ids, at_once) <= at_once
    assert index.propose(ids, count) == searched(ids, least, least + more, count)


def test_the_longest_n_gram_counts_then_the_latest() -> None:
    ids = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert index_of(ids).propose(ids, 2) == [7, 9]  # after 1 2 3, not after the later 2 3
    assert index_of(ids, most=2).propose(ids, 2) == [8, 1]
    assert index_of([1, 2, 3]).propose([1, 2, 3], 2) == []


def test_a_repetition_is_taken_to_go_on() -> None:
    ids = [5, 6, 7, 6, 7]
    assert index_of(ids).propose(ids, 5) == [6, 7, 6, 7, 6]


# ------------------------------------------------------------------ whose turn it is


def decoding(ids: list[int], **params: Any) -> Sequence:
    """The last token was sampled here."""
    params.setdefault("max_tokens", 100)
    seq = Sequence(
        owner="router",
        request_id="r",
        attempt=1,
        order=1,
        token_ids=ids[:-1],
        sampling=SamplingParams(**params),
        first_index=0,
        machine=Machine(DECODE, "QUEUED"),
    )
    seq.token_ids.append(ids[-1])
    seq.num_computed = seq.num_given
    return seq


REPEATED = [1, 2, 3, 4, 5, 6, 1, 2]


def drafting(max_model_len: int = 1000, **speculation: Any) -> Drafting:
    made = Drafting(Speculation(**speculation), (EOS,), max_model_len)
    made.begin()
    return made


@pytest.mark.parametrize(
    ("params", "most", "max_model_len", "expected"),
    [
        ({}, 9, 1000, [3, 4, 5, 6]),
        ({}, 2, 1000, [3, 4]),
        ({"max_tokens": 4}, 9, 1000, [3, 4]),  # one is out, a third guess could only be followed by a fifth
        ({"max_tokens": 2}, 9, 1000, []),
        ({}, 9, 11, [3, 4]),
        ({}, 9, 9, []),
        ({"stop_token_ids": (5,)}, 9, 1000, [3, 4]),
        ({"stop_token_ids": (5,), "min_tokens": 50}, 9, 1000, [3, 4, 5, 6]),
        ({"grammar": Grammar(kind="regex", text="a")}, 9, 1000, [3, 4, 5, 6]),
        ({"beam_width": 2}, 9, 1000, []),
    ],
)
def test_no_guess_after_which_no_token_could_count(
    params: dict[str, Any], most: int, max_model_len: int, expected: list[int]
) -> None:
    assert drafting(max_model_len).guesses(decoding(REPEATED, **params), most) == expected


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, [3]), (True, [3, EOS, 5, 6])])
def test_no_guess_after_the_end(ignore_eos: bool, expected: list[int]) -> None:
    seq = decoding([1, 2, 3, EOS, 5, 6, 1, 2], ignore_eos=ignore_eos)
    assert drafting().guesses(seq, 9) == expected


def test_none_before_the_first_token_and_none_within_a_step() -> None:
    seq = decoding(REPEATED)
    seq.num_given = seq.num_tokens
    assert drafting().guesses(seq, 9) == []
    seq = decoding(REPEATED)
    seq.queued = 1
    assert drafting().guesses(seq, 9) == []


def test_a_long_prompt_is_entered_over_several_steps() -> None:
    made = drafting(max_model_len=10_000)
    first, second = (decoding(list(range(INDEXED_PER_STEP - 6)) + REPEATED) for _ in range(2))
    assert made.guesses(first, 9) == []
    made.begin()
    assert made.guesses(first, 9) == [3, 4, 5, 6]
    assert made.guesses(second, 9) == []
    made.begin()
    assert made.guesses(second, 9) == [3, 4, 5, 6]


def test_wrong_guesses_are_made_more_and_more_seldom_and_right_ones_change_that() -> None:
    seq, made = decoding([1, 2] * 8), drafting()
    drafted_at = []
    for _ in range(150):
        if made.guesses(seq, 9):
            assert seq.drafter is not None
            drafted_at.append(seq.num_tokens)
            seq.token_ids += [1]
            seq.drafter.told(seq.num_tokens, 4, 1)
        else:
            seq.token_ids += [1]
        made.begin()
    gaps = [after - before for before, after in itertools.pairwise(drafted_at)]
    assert gaps == [1, 3, 7, 15, 31]
    assert seq.drafter is not None
    seq.drafter.told(seq.num_tokens, 4, 2)
    seq.drafter.told(seq.num_tokens, 4, 1)
    assert seq.drafter.resumes_at == seq.num_tokens
