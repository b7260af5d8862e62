"""What a step of the model has to do, and what this CPU can do: ``roofline``'s measure."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from msgspec import Struct

from pagerelay.common.model.runner import ModelFacts

READ_BYTES = 1 << 30
SQUARES = (1024, 1536, 2048)
REPEATS = 5


class Weights(Struct, frozen=True):
    """Numbers of a model's weights: of all its linears, and of those the output layer's; and the width of
    attention, heads times their size."""

    linear: int
    head: int
    attention_width: int


class Case(Struct, frozen=True):
    """``sequences`` that each compute their last ``rows`` tokens of ``context``."""

    sequences: int
    context: int
    rows: int = 1

    @property
    def name(self) -> str:
        if self.rows > 1:
            return f"prefill {self.rows}" + (f" of {self.context}" if self.context > self.rows else "")
        return f"decode {self.sequences} x {self.context}"

    def bytes_read(self, facts: ModelFacts, weights: Weights) -> int:
        """Of fp32 weights and keys and values, each once."""
        return 4 * weights.linear + self.sequences * self.context * facts.layout(1).block_bytes

    def flops(self, facts: ModelFacts, weights: Weights) -> float:
        """Multiplications and additions; only one row of a sequence goes through the output layer, and a
        row's attention sees what came before it, and itself."""
        rows, seen = self.sequences * self.rows, self.context - (self.rows - 1) / 2
        linear = 2 * (rows * (weights.linear - weights.head) + self.sequences * weights.head)
        return linear + 4 * rows * seen * weights.attention_width * facts.num_layers


class Ceiling(Struct, frozen=True, kw_only=True):
    """What this CPU could do at one moment, on the threads that torch has."""

    read_gb_s: float
    gflop_s: float

    def bounds_ms(self, bytes_read: float, flops: float) -> dict[str, float]:
        """What limits a step → the least milliseconds it can take."""
        return {"reading": bytes_read / self.read_gb_s / 1e6, "arithmetic": flops / self.gflop_s / 1e6}


class Gauge:
    """Measures ceilings. Holds what it reads, in huge pages where the kernel has them, as our weights are."""

    def __init__(self, read_bytes: int = READ_BYTES, squares: Sequence[int] = SQUARES) -> None:
        memory = mmap.mmap(-1, read_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a hint: a kernel without huge pages refuses it
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._block = torch.frombuffer(memory, dtype=torch.float32).fill_(1)  # keeps the memory
        self._squares = [(torch.randn(n, n), torch.randn(n, n)) for n in squares]

    def measure(self) -> Ceiling:
        """Reading: the best of three ways, a sum, one of many rows, and a product with one vector.
        Arithmetic: the best of three square matrix products, fp32."""
        rows, vector = self._block.view(-1, 1024), torch.ones(1024)
        ways = (self._block.sum, lambda: rows.sum(1), lambda: rows @ vector)
        read = self._block.nbytes / min(_best_s(way) for way in ways) / 1e9
        gflop_s = max(
            2 * len(a) ** 3 / _best_s(lambda a=a, b=b: a @ b) / 1e9  # type: ignore[misc]
            for a, b in self._squares
        )
        return Ceiling(read_gb_s=read, gflop_s=gflop_s)


def _best_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
