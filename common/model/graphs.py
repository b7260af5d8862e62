"""CUDA graphs of decode steps: what the host launches for one token per sequence, recorded once per batch
size and played back by one call.

A decode step of a small batch takes the host longer to launch, some hundred kernels, than the GPU to
compute. A graph fixes addresses and grids, so each recorded size has inputs of its own at fixed places, block
tables as wide as the longest context, and rows to spare: a step is played on the next larger size, its last
rows being padding (length 0, slot -1), which write nowhere and attend to nothing. The sizes share the memory
of what is in between; logits are copied to one place for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagerelay.common.model.batch import Batch, batch_of, fill_late
from pagerelay.common.model.feed import Feed, packed_bytes, views

LARGEST = 256

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records the launches of a function that has run before; what it returns plays them. The function itself is
one that records nothing, for tests and dry runs."""


class CudaCapture:
    """Real graphs; all of one instance share their memory, so only one of them is played at a time."""

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a transport's) may allocate and copy meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            function()
        self._memory = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record, ascending, up to ``max_num_seqs`` or 256; few rows too many in each gap."""
    most = min(max_num_seqs, LARGEST)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, LARGEST + 1, 16)]
    return [size for size in steps if size < most] + [most]


@dataclass(frozen=True, slots=True)
class _Graph:
    packed: Tensor
    """The inputs, one behind the other, as ``Feed`` sends them."""
    replay: Callable[[], None]


class DecodeGraphs:
    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        feed: Feed,
        sizes: Sequence[int],
        max_blocks: int,
        capture: Capture,
    ) -> None:
        """``forward``: logits ``[size, vocab]`` of a batch on the device. ``max_blocks``: of one context."""
        self._forward, self._feed, self._max_blocks, self._capture = forward, feed, max_blocks, capture
        self._logits = torch.empty(0)
        """Of the largest size; the first that is recorded makes it."""
        self._graphs: dict[int, _Graph] = {}
        for size in sorted(sizes, reverse=True):  # the largest first: the others fit into its memory
            self._graphs[size] = self._record(size)

    def _record(self, size: int) -> _Graph:
        arrays = padded(None, size, self._max_blocks)
        packed = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=self._feed.device)
        self._feed.send(arrays, packed)
        batch = batch_of(views(packed, arrays), size)
        # Compiles each kernel and lets libraries allocate; neither is allowed while a graph is recorded.
        warm = self._forward(batch)
        if not self._logits.numel():
            self._logits = torch.empty_like(warm)
        target = self._logits[:size]
        del warm

        def compute() -> None:
            target.copy_(self._forward(batch))

        return _Graph(packed, self._capture(compute))

    def takes(self, batch: Batch) -> bool:
        """Is every sequence of ``batch`` (on the host) a decoding one, and is there a graph large enough?"""
        sequences = batch.seq_lens.numel()
        one_row_each = batch.token_ids.numel() == sequences == batch.num_logits
        return (
            one_row_each and 0 < sequences <= max(self._graphs) and batch.tables.shape[1] <= self._max_blocks
        )

    def run(self, batch: Batch) -> Tensor:
        """Logits ``[sequences, vocab]`` of a batch that :meth:`takes` agrees to; valid until the next
        call."""
        sequences = batch.seq_lens.numel()
        size = min(size for size in self._graphs if size >= sequences)
        graph = self._graphs[size]
        token_ids, *_ = self._feed.send(padded(batch, size, self._max_blocks), graph.packed)
        fill_late(token_ids, batch.late_ids)
        graph.replay()
        return self._logits[:sequences]


def padded(batch: Batch | None, size: int, max_blocks: int) -> list[NDArray[Any]]:
    """A decode batch's arrays, in the order of ``Batch``, filled up with padding to ``size`` sequences; of
    padding alone for ``None``."""
    tokens, positions = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    slots = np.full(size, -1, dtype=np.int64)
    tables = np.zeros((size, max_blocks), dtype=np.int32)
    lengths = np.zeros(size, dtype=np.int32)
    if batch is not None:
        count, width = batch.tables.shape
        tokens[:count] = batch.token_ids.numpy()
        positions[:count] = batch.positions.numpy()
        slots[:count] = batch.slots.numpy()
        tables[:count, :width] = batch.tables.numpy()
        lengths[:count] = batch.seq_lens.numpy()
    starts = np.arange(size + 1, dtype=np.int32)
    return [tokens, positions, slots, tables, lengths, starts, np.arange(size, dtype=np.int64)]
