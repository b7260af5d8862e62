"""What the model asks of its kernels. ``pagerelay.kernels`` fits this by shape, without importing it.

The torch twins are the specification (shapes, masks, what is never read); see ``kernels/torch_ops.py``.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class PagedOps(Protocol):
    name: str
    min_rows: int
    """Rows that a linear must at least have for a row's bits not to depend on how many come with it."""

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None: ...

    def attend(
        self,
        pool: Tensor,
        layer: int,
        query: Tensor,
        tables: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor: ...

    def pack(self, weight: Tensor) -> Any: ...

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor: ...

    def embed(self, ids: Tensor, packed: Any) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...
