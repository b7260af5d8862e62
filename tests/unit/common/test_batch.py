"""The tensors of one step, number by number."""

from __future__ import annotations

import torch

from pagerelay.common.model.batch import Batch, Row, build_batch


def as_lists(batch: Batch) -> dict[str, list[int] | list[list[int]]]:
    names = ("token_ids", "positions", "slots", "tables", "seq_lens", "query_starts", "logits_rows")
    return {name: getattr(batch, name).tolist() for name in names}


def test_prefill_chunk_and_decode_rows_in_one_step() -> None:
    decode = Row([11], start=6, block_ids=[5, 2], num_logits=1)
    chunk = Row([20, 21, 22], start=3, block_ids=[7, 1, 9], num_logits=0)
    last = Row([30, 31], start=0, block_ids=[4], num_logits=1)
    batch = build_batch([decode, chunk, last], block_size=4, min_rows=1)
    assert as_lists(batch) == {
        "token_ids": [11, 20, 21, 22, 30, 31],
        "positions": [6, 3, 4, 5, 0, 1],
        "slots": [2 * 4 + 2, 7 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, 4 * 4 + 0, 4 * 4 + 1],
        "tables": [[5, 2, 0], [7, 1, 9], [4, 0, 0]],
        "seq_lens": [7, 6, 2],
        "query_starts": [0, 1, 4, 6],
        "logits_rows": [0, 5],
    }
    assert batch.num_logits == 2
    wide = {name: getattr(batch, name).dtype for name in ("token_ids", "positions", "slots", "logits_rows")}
    assert set(wide.values()) == {torch.int64}
    narrow = {getattr(batch, name).dtype for name in ("tables", "seq_lens", "query_starts")}
    assert narrow == {torch.int32}


def test_padding_rows_write_nowhere_and_attend_to_nothing() -> None:
    batch = build_batch([Row([11], start=4, block_ids=[3, 6], num_logits=1)], block_size=4, min_rows=4)
    assert as_lists(batch) == {
        "token_ids": [11, 0, 0, 0],
        "positions": [4, 0, 0, 0],
        "slots": [24, -1, -1, -1],
        "tables": [[3, 6]],
        "seq_lens": [5],
        "query_starts": [0, 1],
        "logits_rows": [0, 0, 0, 0],
    }
    assert batch.num_logits == 1


def test_no_padding_where_there_are_rows_enough() -> None:
    row = Row([1, 2, 3, 4, 5], start=0, block_ids=[0, 1], num_logits=0)
    batch = build_batch([row], block_size=4, min_rows=4)
    assert as_lists(batch)["slots"] == [0, 1, 2, 3, 4]
    assert as_lists(batch)["logits_rows"] == []
    assert batch.num_logits == 0


def test_a_slot_beyond_two_to_the_31_keeps_its_number() -> None:
    block = 2**31 // 16 + 5
    batch = build_batch([Row([1], start=17, block_ids=[0, block], num_logits=1)], 16, 1)
    assert as_lists(batch)["slots"] == [block * 16 + 1]
