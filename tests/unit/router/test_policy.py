"""Routing is a pure function of a snapshot."""

from __future__ import annotations

from typing import Any

import pytest

from pagerelay.router.policy import LeastLoad, WorkerView


def view(worker_id: str, **fields: Any) -> WorkerView:
    return WorkerView(
        **{
            "worker_id": worker_id,
            "rank": 0,
            "outstanding_tokens": 0,
            "num_seqs": 0,
            "available_blocks": 100,
            "max_model_len": 1000,
            "last_chosen": 0,
        }
        | fields
    )


policy = LeastLoad()


def decode(workers: list[WorkerView], blocks_needed: int, final_len: int = 1) -> str | None:
    return policy.decode(workers, blocks_needed, final_len)


def any_blocks(workers: list[WorkerView], final_len: int) -> str | None:
    return policy.decode(workers, 1, final_len)


choosers = pytest.mark.parametrize("choose", [policy.prefill, any_blocks], ids=["prefill", "decode"])


@choosers
def test_nobody_there(choose: Any) -> None:
    assert choose([], 1) is None
    assert choose([view("a", rank=None)], 1) is None
    assert choose([view("a", max_model_len=79)], 80) is None


@choosers
def test_a_late_worker_only_if_no_other_is_there(choose: Any) -> None:
    busy = view("busy", outstanding_tokens=9999, num_seqs=99, available_blocks=0)
    assert choose([view("late", rank=1), busy], 1) == "busy"
    assert choose([view("late", rank=1), view("draining", rank=None)], 1) == "late"
    # One that is there but can never hold it is no other.
    assert choose([view("late", rank=1), view("small", max_model_len=79)], 80) == "late"


@choosers
def test_one_that_cannot_hold_the_longest_answer_is_never_chosen(choose: Any) -> None:
    small = view("small", max_model_len=99)
    busy = view("busy", outstanding_tokens=9999, num_seqs=99, max_model_len=100)
    assert choose([small, busy], 100) == "busy"
    assert choose([small], 100) is None
    assert choose([small], 99) == "small"


@choosers
def test_of_equals_the_one_that_waited_longest(choose: Any) -> None:
    views = [view("a", last_chosen=3), view("b", last_chosen=1), view("c", last_chosen=2)]
    assert choose(views, 1) == "b"
    assert choose(views[::-1], 1) == "b"


def test_prefill_goes_where_the_fewest_tokens_are_due() -> None:
    views = [
        view("a", outstanding_tokens=50),
        view("b", outstanding_tokens=10, num_seqs=40),
        view("c", outstanding_tokens=11),
    ]
    assert policy.prefill(views, 1) == "b"


def test_decode_goes_where_there_is_room_then_where_few_are_then_where_most_blocks_are() -> None:
    full = view("full", num_seqs=1, available_blocks=3)
    many = view("many", num_seqs=9, available_blocks=50)
    few = view("few", num_seqs=2, available_blocks=10)
    wide = view("wide", num_seqs=2, available_blocks=20)
    assert decode([full, many, few, wide], 5) == "wide"
    assert decode([full, many, few], 5) == "few"
    assert decode([full, many], 5) == "many"
    assert decode([full], 5) == "full"
    assert decode([full, many, few, wide], 3) == "full"


def test_choosing_changes_nothing() -> None:
    views = [view("a"), view("b")]
    assert [decode(views, 1) for _ in range(5)] == ["a"] * 5
