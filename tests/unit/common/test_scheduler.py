"""Who runs in the next step, and on how many tokens: exact plans of drawn situations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import BLOCK, greedy

from pagerelay.common.engine.scheduler import Scheduler
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.hashing import PrefixHasher
from pagerelay.common.kv.blocks import BlockPool, PrefixCache
from pagerelay.common.states import DECODE, Machine


class Desk:
    """A scheduler with a budget of 16 tokens, and what it did."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        budget: int = 16,
        max_num_seqs: int = 8,
        cache: bool = True,
        on_short: Callable[[Sequence], bool] | None = None,
    ) -> None:
        self.blocks = BlockPool(num_blocks, PrefixCache() if cache else None)
        self.admitted: list[str] = []
        self.scheduler = Scheduler(
            self.blocks,
            PrefixHasher("model", BLOCK),
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=budget,
            on_admit=lambda sequence: self.admitted.append(sequence.request_id),
            on_short=on_short or (lambda sequence: pytest.fail("nobody is short of blocks")),
        )
        self.sequences: dict[str, Sequence] = {}

    def add(self, name: str, num_tokens: int, order: int | None = None, start: int = 0) -> Sequence:
        """A waiting prompt of tokens that no other one has, unless ``start`` says otherwise."""
        order = len(self.sequences) + 1 if order is None else order
        start = start or 1000 * (len(self.sequences) + 1)
        sequence = Sequence(
            owner="router",
            request_id=name,
            attempt=1,
            order=order,
            token_ids=range(start, start + num_tokens),
            sampling=greedy(),
            first_index=0,
            machine=Machine(DECODE, "RUNNING"),
        )
        self.sequences[name] = sequence
        self.scheduler.add_waiting(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """One plan, computed: whoever has all its KV then has one token more."""
        plan = self.scheduler.plan()
        for sequence, count in plan:
            assert sequence.block_ids
            assert count <= sequence.num_remaining
            sequence.num_computed += count
            self.scheduler.cache_full_blocks(sequence)
            if sequence.num_remaining == 0:
                sequence.token_ids.append(7)
        self.blocks.check()
        assert len({sequence.request_id for sequence, _ in plan}) == len(plan)
        return {sequence.request_id: count for sequence, count in plan}

    def leave(self, name: str) -> None:
        sequence = self.sequences[name]
        self.scheduler.remove(sequence)
        self.blocks.drop(sequence.block_ids)
        sequence.block_ids = []


# ------------------------------------------------------------------ the budget


def test_nothing_to_do() -> None:
    assert Desk().step() == {}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_then_decodes() -> None:
    desk = Desk()
    desk.add("a", 40)
    assert [desk.step() for _ in range(5)] == [{"a": 16}, {"a": 16}, {"a": 8}, {"a": 1}, {"a": 1}]


def test_half_of_the_budget_is_the_oldest_prompts_and_the_shortest_of_the_rest_come_first() -> None:
    desk = Desk()
    desk.add("a", 40)
    desk.add("b", 12)
    desk.add("c", 3)
    # a: 8 of 16; of the other 8, c needs 3 and b gets 5.
    assert desk.step() == {"a": 8, "b": 5, "c": 3}
    # c decodes; of 15 a gets 7, b its last 7, and what is left goes to a again.
    assert desk.step() == {"c": 1, "a": 8, "b": 7}
    assert desk.step() == {"b": 1, "c": 1, "a": 14}


def test_what_the_others_leave_goes_to_the_oldest() -> None:
    desk = Desk()
    desk.add("a", 40)
    desk.add("b", 2)
    assert desk.step() == {"a": 14, "b": 2}


def test_what_the_oldest_leaves_goes_to_the_others() -> None:
    desk = Desk()
    desk.add("a", 3)
    desk.add("b", 40)
    assert desk.step() == {"a": 3, "b": 13}


def test_a_stream_of_short_prompts_never_stops_a_long_one_nor_it_them() -> None:
    desk = Desk(num_blocks=200, max_num_seqs=20)
    desk.add("long", 100)
    for number in range(4):
        name = f"short{number}"
        desk.add(name, 7)
        plan = desk.step()
        # Each of the short ones before decodes; half of what is left is enough for the new one.
        assert (plan["long"], plan[name]) == (9 - number, 7)
        assert sum(plan.values()) == 16


def test_decoding_comes_first() -> None:
    desk = Desk()
    desk.add("a", 4)
    desk.add("b", 4)
    assert desk.step() == {"a": 4, "b": 4}
    desk.add("c", 40)
    assert desk.step() == {"a": 1, "b": 1, "c": 14}
    assert list(desk.step()) == ["a", "b", "c"]


def test_more_sequences_decode_than_the_budget_has_tokens_and_none_is_starved() -> None:
    desk = Desk(num_blocks=200, max_num_seqs=32)
    names = [f"{number:02}" for number in range(32)]
    for name in names:
        desk.add(name, 1)
    assert [desk.step() for _ in range(3)] == [dict.fromkeys(names, 1)] * 3


def test_a_prompt_goes_on_beside_more_that_decode_than_the_budget_has_tokens() -> None:
    desk = Desk(num_blocks=200, max_num_seqs=64)
    names = [f"{number:02}" for number in range(32)]
    for name in names:
        desk.add(name, 1)
    desk.add("long", 9)
    desk.add("longer", 9)
    decode = dict.fromkeys(names, 1)
    # A quarter of 16, and half of that for the oldest prompt.
    assert desk.step() == decode | {"long": 2, "longer": 2}
    assert desk.step() == decode | {"long": 2, "longer": 2}


def test_a_budget_of_one_moves_the_oldest_prompt_and_all_that_decode() -> None:
    desk = Desk(budget=1)
    desk.add("a", 3)
    desk.add("b", 3)
    assert [desk.step() for _ in range(4)] == [{"a": 1}, {"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]


def test_a_chunk_that_leaves_one_token_is_finished_like_a_decode_row() -> None:
    desk = Desk()
    desk.add("a", 17)
    assert [desk.step() for _ in range(3)] == [{"a": 16}, {"a": 1}, {"a": 1}]


# ------------------------------------------------------------------ admission


def test_who_arrived_first_enters_first_whenever_it_was_added() -> None:
    desk = Desk()
    desk.add("young", 4, order=9)
    desk.add("old", 4, order=3)
    desk.step()
    assert desk.admitted == ["old", "young"]
    assert [sequence.request_id for sequence in desk.scheduler.running] == ["old", "young"]


def test_a_prompt_that_does_not_fit_holds_up_those_behind_it() -> None:
    desk = Desk(num_blocks=6)
    desk.add("a", 12)  # 3 blocks
    desk.add("b", 16)  # 4 blocks
    desk.add("c", 1)
    assert list(desk.step()) == ["a"]
    assert desk.admitted == ["a"]
    desk.leave("a")
    assert desk.step() == {"b": 15, "c": 1}


def test_each_running_sequence_keeps_a_block_of_headroom() -> None:
    desk = Desk(num_blocks=6)
    desk.add("a", 4)
    desk.step()
    desk.add("b", 20)  # 5 blocks: just what there is, but a may want one
    assert desk.step() == {"a": 1}
    assert desk.admitted == ["a"]
    desk.leave("a")
    assert desk.step() == {"b": 16}


def test_alone_a_prompt_may_take_every_block() -> None:
    desk = Desk(num_blocks=4)
    desk.add("a", 16)
    assert desk.step() == {"a": 16}
    assert desk.blocks.available == 0


def test_no_more_than_max_num_seqs() -> None:
    desk = Desk(max_num_seqs=2)
    for name in "abc":
        desk.add(name, 2)
    assert desk.step() == {"a": 2, "b": 2}
    desk.leave("a")
    assert desk.step() == {"b": 1, "c": 2}


def test_those_who_hold_blocks_elsewhere_count() -> None:
    desk = Desk(max_num_seqs=2)
    desk.scheduler.num_elsewhere = 1
    desk.add("a", 2)
    desk.add("b", 2)
    assert desk.step() == {"a": 2}


def test_removing_what_waits() -> None:
    desk = Desk()
    desk.add("a", 4)
    desk.scheduler.remove(desk.sequences["a"])
    desk.scheduler.remove(desk.sequences["a"])
    assert desk.step() == {}


# ------------------------------------------------------------------ the prefix cache


@pytest.mark.parametrize(
    ("num_tokens", "cached_blocks", "left"),
    [(3, 0, 3), (4, 0, 4), (5, 1, 1), (7, 1, 3), (8, 1, 4), (9, 2, 1), (12, 2, 4), (13, 3, 1), (15, 3, 3)],
)
def test_a_hit_leaves_at_least_one_token_to_compute(num_tokens: int, cached_blocks: int, left: int) -> None:
    desk = Desk()
    desk.add("first", 12, start=500)
    desk.step()
    known = list(desk.sequences["first"].block_ids)
    desk.leave("first")
    again = desk.add("again", num_tokens, start=500)
    assert desk.step() == {"again": left}
    assert again.num_cached == 4 * cached_blocks
    assert again.block_ids[:cached_blocks] == known[:cached_blocks]


def test_a_hit_shares_the_blocks_of_one_who_still_runs() -> None:
    desk = Desk(num_blocks=8)
    first = desk.add("first", 12, start=500)
    desk.step()
    again = desk.add("again", 14, start=500)
    assert desk.step() == {"first": 1, "again": 2}
    assert again.block_ids[:3] == first.block_ids[:3]
    assert desk.blocks.counts().held == 5
    desk.leave("first")
    assert desk.blocks.counts().held == 4


def test_nothing_is_shared_without_a_cache() -> None:
    desk = Desk(cache=False)
    desk.add("first", 12, start=500)
    desk.step()
    desk.leave("first")
    desk.add("again", 12, start=500)
    assert desk.step() == {"again": 12}


def test_a_hit_that_cannot_be_admitted_lets_its_blocks_go_again() -> None:
    desk = Desk(num_blocks=6)
    desk.add("first", 8, start=500)  # 2 blocks, cached
    desk.step()
    desk.leave("first")
    desk.add("big", 12)
    desk.step()
    desk.add("again", 16, start=500)
    assert desk.step() == {"big": 1}
    counts = desk.blocks.counts()
    assert (counts.free, counts.held, counts.cached) == (0, 4, 2)


# ------------------------------------------------------------------ a block is missing


def test_who_is_short_asks_and_runs_if_room_was_made() -> None:
    asked: list[str] = []

    def make_room(sequence: Sequence) -> bool:
        asked.append(sequence.request_id)
        desk.leave("b")
        return True

    desk = Desk(num_blocks=3, on_short=make_room)
    desk.add("a", 4)
    desk.add("b", 1)
    assert desk.step() == {"a": 4, "b": 1}
    desk.blocks.take(1)  # somebody else's
    assert desk.step() == {"a": 1}
    assert asked == ["a"]
    assert desk.sequences["a"].block_ids == [0, 1]


def test_who_is_thrown_out_itself_does_not_run() -> None:
    def make_room(sequence: Sequence) -> bool:
        assert sequence.request_id == "b"
        desk.leave("b")
        return True

    desk = Desk(num_blocks=3, on_short=make_room)
    desk.add("a", 4)
    desk.add("b", 3)
    assert [desk.step() for _ in range(3)] == [{"a": 4, "b": 3}, {"a": 1, "b": 1}, {"a": 1}]


def test_one_for_whom_no_room_can_be_made_sits_out() -> None:
    desk = Desk(num_blocks=2, on_short=lambda sequence: False)
    desk.add("a", 4)
    desk.step()
    desk.blocks.take(1)
    assert desk.step() == {}
    assert [sequence.request_id for sequence in desk.scheduler.running] == ["a"]
