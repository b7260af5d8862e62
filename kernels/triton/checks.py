"""What the kernels' callers must keep to. Shapes, dtypes and devices only: a value would have to be waited
for.
"""

import torch
from torch import Tensor

from pagerelay.kernels.triton.launch import INTERPRETED

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_same(first: Tensor, *others: Tensor) -> None:
    """ValueError unless all are of one supported dtype and on one device that the kernels run on."""
    if first.dtype not in DTYPES:
        raise ValueError(f"expected fp32, fp16 or bf16, got {first.dtype}")
    if first.device.type != ("cpu" if INTERPRETED else "cuda"):
        hint = "" if INTERPRETED else "; set TRITON_INTERPRET=1 before the start to run it on the CPU"
        raise ValueError(f"these kernels do not run on {first.device}{hint}")
    for tensor in others:
        if tensor.dtype is not first.dtype or tensor.device != first.device:
            raise ValueError(
                f"expected {first.dtype} on {first.device}, got {tensor.dtype} on {tensor.device}"
            )


def pool_shape(pool: Tensor) -> tuple[int, int, int, int]:
    """blocks, kv_heads, block_size, head_dim of a pool [blocks, layers, 2, kv_heads, block_size, head_dim].

    Strides are free but for the last, so layer-major or token-major pools are views in this order.
    """
    if pool.dim() != 6 or pool.shape[2] != 2 or pool.stride(5) != 1:
        raise ValueError(f"not a pool: {tuple(pool.shape)} {pool.dtype} strides {pool.stride()}")
    blocks, _, _, kv_heads, block_size, head_dim = pool.shape
    return blocks, kv_heads, block_size, head_dim


def check_rows_dense(x: Tensor) -> None:
    """ValueError unless each x[row] of x [rows, heads, head_dim] is contiguous."""
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        raise ValueError(f"rows must be contiguous inside: {tuple(x.shape)} strides {x.stride()}")


def check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """ValueError unless cos and sin [rows, head_dim] fit x [rows, heads, head_dim]."""
    rows, _, head_dim = x.shape
    if cos.shape != (rows, head_dim) or sin.shape != cos.shape or head_dim % 2:
        raise ValueError(f"cos {tuple(cos.shape)} does not fit {tuple(x.shape)}")
    if not (cos.is_contiguous() and sin.is_contiguous()) or {cos.device, sin.device} != {x.device}:
        raise ValueError("cos and sin must be contiguous, and where the rows are")
