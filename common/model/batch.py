"""The tensors of one step. The model call sees these and never a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagerelay.common.model.feed import Feed
from pagerelay.common.model.ops import PagedOps


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence contributes to a step: ``token_ids`` at positions ``start, start + 1, …`` of its
    context; the logits after the last ``num_logits`` of them are wanted."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat tensors for T rows of S sequences; decode rows and prefill chunks share a step.

    token_ids, positions, slots ``[T]`` int64; tables ``[S, max_blocks]`` int32; seq_lens ``[S]`` int32
    (context length including this step's rows); query_starts ``[S + 1]`` int32; logits_rows ``[R]`` int64,
    the rows whose logits are wanted (R ≥ ``num_logits``: the surplus is padding).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    logits_rows: torch.Tensor
    num_logits: int
    late_ids: torch.Tensor | None = None
    """``[n]`` int64 on the model's device: what token ids below 0 stand for, −1 − k for the k-th of them."""

    def sent(self, feed: Feed) -> Batch:
        """The same on the model's device."""
        tensors = (
            *(self.token_ids, self.positions, self.slots, self.tables),
            *(self.seq_lens, self.query_starts, self.logits_rows),
        )
        sent = batch_of(feed.send([tensor.numpy() for tensor in tensors]), self.num_logits)
        fill_late(sent.token_ids, self.late_ids)
        return sent


def batch_of(tensors: Sequence[torch.Tensor], num_logits: int) -> Batch:
    """Of the tensors in the order of the fields."""
    token_ids, positions, slots, tables, seq_lens, query_starts, logits_rows = tensors
    return Batch(
        token_ids, positions, slots, tables, seq_lens, query_starts, logits_rows, num_logits=num_logits
    )


def fill_late(token_ids: torch.Tensor, late_ids: torch.Tensor | None) -> None:
    """Puts, in place and on the device, the late ids where ``token_ids`` stands for one."""
    if late_ids is not None:
        known = late_ids[(~token_ids).clamp_(min=0)]
        torch.where(token_ids < 0, known, token_ids, out=token_ids)


def build_batch(rows: Sequence[Row], block_size: int, min_rows: int) -> Batch:
    """Lays out one step. Padding rows, where ``min_rows`` asks for them, write nowhere (slot −1) and attend
    to nothing."""
    lengths = [len(row.token_ids) for row in rows]
    total = sum(lengths)
    padded = max(total, min_rows)
    token_ids = np.zeros(padded, dtype=np.int64)
    positions = np.zeros(padded, dtype=np.int64)
    slots = np.full(padded, -1, dtype=np.int64)
    tables = np.zeros((len(rows), max(len(row.block_ids) for row in rows)), dtype=np.int32)
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    seq_lens = np.zeros(len(rows), dtype=np.int32)
    logits_rows: list[int] = []
    at = 0
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        here = slice(at, at + length)
        token_ids[here] = row.token_ids
        span = np.arange(row.start, row.start + length, dtype=np.int64)
        positions[here] = span
        blocks = np.asarray(row.block_ids, dtype=np.int32)
        tables[index, : len(blocks)] = blocks
        slots[here] = blocks[span // block_size].astype(np.int64) * block_size + span % block_size
        at += length
        query_starts[index + 1] = at
        seq_lens[index] = row.start + length
        logits_rows += range(at - row.num_logits, at)
    num_logits = len(logits_rows)
    if num_logits:
        logits_rows += [logits_rows[-1]] * (min_rows - num_logits)
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        tables=torch.from_numpy(tables),
        seq_lens=torch.from_numpy(seq_lens),
        query_starts=torch.from_numpy(query_starts),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
        num_logits=num_logits,
    )


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the attention layers need beside their own tensors; handed through the model's keyword
    arguments."""

    batch: Batch
    pool: torch.Tensor
    ops: PagedOps
