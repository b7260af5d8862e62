"""Constants and options of each launch, by shape. What runs and what is compiled ahead of time take them from
here.
"""

import os
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from pagerelay.kernels.triton.attend_plan import AttendPlan, power_of_2


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, JITFunction)
"""Whether TRITON_INTERPRET was set when the kernels were imported: they run on the CPU, in numpy."""

COMPILER: dict[str, Any] = {"enable_fp_fusion": True}
"""Said here, since Triton's default is about to change; it warns until it is also said in the environment."""
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

HEADS_SPAN = 8
"""Heads that one program turns or stores."""
TURN_WARPS = 2
"""So few that each thread has 16 bytes of a half head to load."""
SILU_SPAN = 1024
COPY_SPAN_WORDS = 4096
SAMPLE_SPAN = 2048

Constants = dict[str, Any]


def attend_constants(
    plan: AttendPlan,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    strides: tuple[int, int, int],
    splits: int,
    window: int | None,
    soft_cap: float | None,
    bf16: bool,
) -> Constants:
    """Of `attend_kernel`; strides: of a block, a head and a token in the pool, in elements."""
    return {
        **merge_constants(plan, kv_heads, group, head_dim),
        **dict(zip(("STRIDE_BLOCK", "STRIDE_HEAD", "STRIDE_TOKEN"), strides, strict=True)),
        "BLOCK": block_size,
        "M": plan.m,
        "TILE": plan.tile,
        "SPLIT": splits > 1,
        "SPLIT_TILES": plan.split_tiles,
        "MIN_SPLIT_TILES": plan.min_split_tiles,
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap or 0.0,
        "UPCAST": INTERPRETED and bf16,
        "STAGES": plan.stages,
        "num_warps": plan.warps,
    }


def merge_constants(plan: AttendPlan, kv_heads: int, group: int, head_dim: int) -> Constants:
    """Of `merge_kernel`."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": power_of_2(head_dim),
        "ROWS": plan.rows,
        "MERGE": plan.merge,
        "num_warps": max(1, min(plan.merge * power_of_2(head_dim) // 1024, 16)),
        **COMPILER,
    }


def write_constants(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    strides: tuple[int, int, int],
    row_strides: tuple[int, int, int],
) -> Constants:
    """Of `write_kv_kernel`; heads of the query to turn, 0 for a plain write.

    strides: of a block, a head and a token in the pool; row_strides: of a row of query, key, value; in
    elements.
    """
    return {
        **dict(zip(("Q_STRIDE", "K_STRIDE", "V_STRIDE"), row_strides, strict=True)),
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": power_of_2(head_dim),
        **dict(zip(("STRIDE_BLOCK", "STRIDE_HEAD", "STRIDE_TOKEN"), strides, strict=True)),
        "BLOCK": block_size,
        "SPAN": min(HEADS_SPAN, power_of_2(max(kv_heads, heads))),
        "ROTARY": heads > 0,
        "num_warps": TURN_WARPS,
        **COMPILER,
    }


def norm_constants(width: int, add: bool) -> Constants:
    """Of `rms_norm_kernel`: the whole row at once."""
    padded = power_of_2(width)
    warps = min(max(padded // 512, 1), 16)
    return {"WIDTH": width, "PADDED": padded, "ADD": add, "num_warps": warps, **COMPILER}


def silu_constants(width: int) -> Constants:
    """Of `silu_mul_kernel`; width: of the gate, a constant of the model. Eight elements a thread."""
    span = min(SILU_SPAN, max(256, power_of_2(width)))
    return {"WIDTH": width, "SPAN": span, "num_warps": span // 256, **COMPILER}


def copy_constants(pick: bool, place: bool, aligned: bool) -> Constants:
    """Of `copy_blocks_kernel`."""
    return {"PICK": pick, "PLACE": place, "ALIGNED": aligned, "SPAN": COPY_SPAN_WORDS, "num_warps": 8}


def sample_constants(aligned: bool) -> Constants:
    """Of `sample_kernel`. Its sums are not fused: a product that is rounded is what the CPU sampler adds."""
    return {"ALIGNED": aligned, "TILE": SAMPLE_SPAN, "num_warps": 16, "enable_fp_fusion": False}
