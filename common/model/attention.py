"""Our attention inside transformers' own modelling code: one function behind its ``AttentionInterface``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from pagerelay.common.model.batch import StepContext

IMPLEMENTATION = "pagerelay"


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: StepContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes this step's keys and values into the pool, then attends over the pool through the block tables.

    query ``[1, heads, T, head_dim]``, key and value ``[1, kv_heads, T, head_dim]`` → ``[1, T, heads,
    head_dim]``.
    """
    batch, layer = paged.batch, int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    paged.ops.write_kv(paged.pool, layer, k, v, batch.slots)
    out = paged.ops.attend(
        paged.pool,
        layer,
        q,
        batch.tables,
        batch.seq_lens,
        batch.query_starts,
        scaling if scaling is not None else q.shape[-1] ** -0.5,
        sliding_window,
        softcap,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
