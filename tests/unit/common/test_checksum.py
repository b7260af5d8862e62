"""The checksum of a block: what it must notice, and that every machine makes the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagerelay.common.kv.checksum import block_sum, wrong_blocks

SIZE = 256


def block(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


@given(at=st.integers(0, SIZE - 1), flip=st.integers(1, 255))
def test_a_changed_byte_changes_the_sum(at: int, flip: int) -> None:
    changed = block()
    changed[at] ^= flip
    assert block_sum(changed) != block_sum(block())


@given(first=st.integers(0, SIZE // 8 - 1), second=st.integers(0, SIZE // 8 - 1))
def test_words_that_change_places_change_the_sum(first: int, second: int) -> None:
    changed = block()
    words = changed.view(np.uint64)
    words[[first, second]] = words[[second, first]]
    assert (block_sum(changed) == block_sum(block())) == (first == second)


@given(cut=st.integers(1, SIZE // 8 - 1))
def test_a_torn_copy_is_noticed(cut: int) -> None:
    torn = block()
    torn[cut * 8 :] = block(2)[cut * 8 :]
    assert block_sum(torn) != block_sum(block())


def test_the_sum_is_part_of_the_protocol() -> None:
    """Workers of different machines and versions compare it."""
    assert block_sum(np.arange(SIZE, dtype=np.uint8)) == 0x8EBF105017012A00
    assert block_sum(np.zeros(SIZE, dtype=np.uint8)) == 0


@pytest.mark.parametrize("wrong", [[], [0], [1, 2]])
def test_wrong_blocks_are_named_by_their_place(wrong: list[int]) -> None:
    blocks = np.stack([block(seed) for seed in range(5)])
    rows = [4, 0, 2]
    sums = [block_sum(blocks[row]) for row in rows]
    for at in wrong:
        blocks[rows[at]][3] ^= 8
    assert wrong_blocks(blocks, rows, sums) == wrong
