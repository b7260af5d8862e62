"""What the model asks of its kernels. ``pagerelay.kernels`` fits this by shape, without importing it.

The torch twins are the specification (shapes, masks, what is never read); see ``kernels/torch_ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


class PagedOps(Protocol):
    name: str
    min_rows: int
    """Rows that a linear must at least have for a row's bits not to depend on how many come with it."""

    def unsupported(self, head_dim: int) -> str | None:
        """Why a model with such heads cannot be served, in one line; ``None``: it can."""
        ...

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

    def rotate_write(
        self, pool: Tensor, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
    ) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...


@runtime_checkable
class SamplingOps(Protocol):
    """Operations that can also choose tokens where the logits are."""

    def choose(self, logits: Tensor, *wishes: Tensor) -> Tensor:
        """Token ids ``[rows]`` int64. wishes, ``[rows]`` each: temperature, top-k, top-p, min-p and the
        uniform number, fp64 but for the int32 top-k."""
        ...


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A decoder layer, ``x += out(attend(qkv(norm(x))))`` then ``x += down(silu_mul(gate_up(norm(x))))``.

    A linear is a packed weight and its bias.
    """

    attention_norm: Tensor
    mlp_norm: Tensor
    eps: float
    qkv: tuple[Any, Tensor | None]
    out: tuple[Any, Tensor | None]
    gate_up: tuple[Any, Tensor | None]
    down: tuple[Any, Tensor | None]
    scale: float
    window: int | None


class StackOps(Protocol):
    """Operations that can also run all decoder layers in one call: those with a ``stack``."""

    def stack(self, layers: Sequence[LayerParts]) -> Any: ...

    def run_stack(
        self,
        stack: Any,
        x: Tensor,
        pool: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        tables: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
    ) -> Tensor: ...
