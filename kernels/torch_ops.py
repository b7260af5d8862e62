"""The operations in plain torch: the specification that every faster set is tested against.

Words used throughout: a *row* is one token of this step; a *slot* is one token's place in the pool, numbered
block * block_size + offset. The pool is [blocks, layers, 2 (key, value), kv_heads, block_size, head_dim],
block-major, so that one block holds every layer's keys and values. Only its first dimension may be strided.
All floats are fp32.
"""

import torch
from torch import Tensor
from torch.nn import functional


class TorchOps:
    """See `CpuOps` for the same in C. No method changes its arguments, except `write_kv` the pool."""

    name = "torch"
    min_rows = 4
    """Rows a linear must be padded to for a row's bits not to depend on how many came with it: MKL's sgemm
    takes another path for 1 to 3 rows (measured), and is not promised to keep to one above."""

    def unsupported(self, head_dim: int) -> str | None:
        """Nothing is."""
        return None

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Stores key and value [rows, kv_heads, head_dim] at slots [rows] int64; slot -1 skips a row."""
        kept = slots >= 0
        blocks, offsets = slots[kept] // pool.shape[4], slots[kept] % pool.shape[4]
        pool[blocks, layer, 0, :, offsets] = key[kept]
        pool[blocks, layer, 1, :, offsets] = value[kept]

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
    ) -> Tensor:
        """Causal attention of query [rows, heads, head_dim] over each sequence's slots, to the same shape.

        tables [sequences, max_blocks] int32 are the block ids of each sequence in order; seq_lens [sequences]
        int32 its tokens, those of this step included; query_starts [sequences + 1] int32 says that rows
        starts[s] : starts[s + 1] are the last tokens of sequence s. Rows past the last start are padding and
        come back zero. With `window` a token sees that many keys, itself included; `soft_cap` bends scores to
        cap * tanh(score / cap). Slots at and past a sequence's length do not enter the result.
        """
        out = torch.zeros_like(query)
        starts, lengths = query_starts.tolist(), seq_lens.tolist()
        for s, length in enumerate(lengths):
            rows = query[starts[s] : starts[s + 1]]
            if rows.shape[0]:
                out[starts[s] : starts[s + 1]] = _attend_one(
                    pool[:, layer], rows, tables[s].long(), length, scale, window, soft_cap
                )
        return out

    def pack(self, weight: Tensor) -> Tensor:
        """The form `linear` and `embed` take of weight [out, in]: here the weight itself."""
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> x @ weight.T + bias [..., out]."""
        return functional.linear(x, packed, bias)

    def embed(self, ids: Tensor, packed: Tensor) -> Tensor:
        """Rows ids [rows] int64 of the packed weight [out, in] -> [rows, in], the exact values."""
        return functional.embedding(ids, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., n] / sqrt(mean(x**2) + eps) * weight [n]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def rotate_write(
        self, pool: Tensor, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
    ) -> Tensor:
        """Splits qkv [rows, heads + 2 kv_heads, head_dim]: rotary embedding on queries and keys, keys and
        values to the pool as `write_kv` does; returns the queries [rows, heads, head_dim].

        The embedding pairs i with i + head_dim / 2; cos and sin are [rows, head_dim], each row's half
        repeated twice.
        """
        kv_heads = pool.shape[3]
        query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        self.write_kv(pool, layer, _rotate(key, cos, sin), value, slots)
        return _rotate(query, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [..., 2 n], gate first -> gate * sigmoid(gate) * up [..., n]."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]


def _attend_one(
    pool: Tensor,
    query: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """One sequence: pool [blocks, 2, kv_heads, block_size, head_dim], query [rows, heads, head_dim]."""
    rows, heads, head_dim = query.shape
    kv_heads, block_size = pool.shape[2:4]
    first = max(0, length - rows - window + 1) if window else 0
    first_block = first // block_size
    blocks = pool[table[first_block : -(-length // block_size)]]
    context = blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)
    keys, values = context[:, :, first - first_block * block_size : length - first_block * block_size]

    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped @ keys.transpose(1, 2)[:, None]) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    row_at = torch.arange(length - rows, length)[:, None]
    key_at = torch.arange(first, length)
    hidden = key_at > row_at
    if window:
        hidden |= key_at <= row_at - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out: Tensor = weights @ values[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)
