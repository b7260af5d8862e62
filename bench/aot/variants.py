"""The kernels' variants that are compiled ahead of time, and what their code must be like.

Shapes of real models: heads per KV head, head dimensions, dtypes, block sizes, decode and prefill rows.
Each variant takes its constants from `launch`, as the launches do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pagerelay.kernels.triton.attend import attend_kernel, merge_kernel
from pagerelay.kernels.triton.attend_plan import plan_attention, power_of_2
from pagerelay.kernels.triton.blocks import copy_blocks_kernel
from pagerelay.kernels.triton.launch import (
    attend_constants,
    copy_constants,
    merge_constants,
    norm_constants,
    sample_constants,
    silu_constants,
    write_constants,
)
from pagerelay.kernels.triton.rows import rms_norm_kernel, silu_mul_kernel, write_kv_kernel
from pagerelay.kernels.triton.sampling import sample_kernel

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
KV_HEADS = 8
LAYERS = 32
PORTABLE_SHARED_BYTES = 99 << 10
"""What the smaller devices of the sm_80 family give one program."""


@dataclass(frozen=True, slots=True)
class Gates:
    """Bounds on one variant's code. Instructions: at least one of each; alternatives are joined by |."""

    registers: int = 255
    shared_bytes: int = PORTABLE_SHARED_BYTES
    buffer_bytes: int = 0
    instructions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel, the types of its arguments, its constants and options by name, and its gates."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    gates: Gates = field(default_factory=Gates)


def variants(arch: int) -> Iterator[Variant]:
    """All of them as one architecture gets them; the order is that of the report."""
    # fp16 differs from bf16 by the type of an instruction only, so one shape stands for it.
    for dtype, head_dims in (("bf16", (128, 64, 80, 96, 256)), ("fp16", (128,)), ("fp32", (128, 64, 256))):
        for head_dim in head_dims:
            yield _attend(arch, "decode", dtype, head_dim, 4, 16)
            yield _attend(arch, "prefill", dtype, head_dim, 4, 16)
    for group in (1, 3, 8):
        yield _attend(arch, "decode", "bf16", 128, group, 16)
        yield _attend(arch, "prefill", "bf16", 128, group, 16)
    for block_size in (32, 64):
        yield _attend(arch, "decode", "bf16", 128, 4, block_size)
        yield _attend(arch, "prefill", "bf16", 128, 4, block_size)
    yield _attend(arch, "decode", "bf16", 128, 4, 16, splits=8)
    yield _attend(arch, "decode", "bf16", 128, 4, 16, splits=8, deterministic=True)
    yield _attend(arch, "decode", "bf16", 256, 2, 16, splits=8, window=4096, soft_cap=50.0)
    yield _attend(arch, "prefill", "bf16", 256, 2, 16, window=4096, soft_cap=50.0)
    for head_dim in (64, 128, 256):
        yield _merge(arch, head_dim, "bf16", decode=True)
    yield _merge(arch, 128, "bf16", decode=False)
    yield from _small("bf16", 4096, 32, 8, 128)
    yield from _small("fp16", 2304, 8, 4, 256)
    yield from _small("fp32", 576, 9, 3, 64)
    for name, pick, place in (("copy", True, True), ("gather", True, False), ("scatter", False, True)):
        yield _copy(name, pick, place)
    for dtype in ("fp32", "bf16"):
        yield _sample(dtype)


def _strides(head_dim: int, block_size: int) -> tuple[int, int, int]:
    head = block_size * head_dim
    return LAYERS * 2 * KV_HEADS * head, head, head_dim


def _attend(
    arch: int,
    rows: str,
    dtype: str,
    head_dim: int,
    group: int,
    block_size: int,
    splits: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    deterministic: bool = False,
) -> Variant:
    itemsize = ITEMSIZE[dtype]
    plan = plan_attention(group, head_dim, itemsize, rows == "decode", deterministic, arch)
    constants = attend_constants(
        plan,
        KV_HEADS,
        group,
        head_dim,
        block_size,
        _strides(head_dim, block_size),
        splits,
        window,
        soft_cap,
        dtype == "bf16",
    )
    if splits == 1:
        constants |= {"part_ptr": None, "lse_ptr": None}
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    scratch = dict.fromkeys(("part_ptr", "lse_ptr"), "*fp32")
    tables = dict.fromkeys(("tables_ptr", "lens_ptr", "starts_ptr"), "*i32")
    numbers = dict.fromkeys(("sequences", "table_stride", "splits", "first_block"), "i32")
    name = f"{rows} {dtype} d{head_dim} group {group} block {block_size}"
    for word, there in (
        (f"splits {splits}", splits > 1),
        (f"window {window}", window),
        (f"cap {soft_cap}", soft_cap),
        ("deterministic", deterministic),
    ):
        name += f" {word}" if there else ""
    # Keys and values of a tile, twice: one pair in use, one on its way.
    pairs = 2 if plan.stages > 2 else 1
    buffers = pairs * 2 * plan.tile * power_of_2(head_dim) * itemsize
    wide = rows == "prefill" and arch >= 90
    matrix = ("HGMMA" if wide else "HMMA",) if itemsize == 2 else ()
    return Variant(
        name,
        attend_kernel,
        {**pointers, **scratch, **tables, **numbers, "scale": "fp32"},
        constants,
        Gates(
            registers=168 if rows == "decode" else 255,
            shared_bytes=PORTABLE_SHARED_BYTES if rows == "decode" or arch < 90 else 163 << 10,
            buffer_bytes=buffers if rows == "decode" else 0,
            instructions=("LDGSTS.128", *matrix),
        ),
    )


def _merge(arch: int, head_dim: int, dtype: str, decode: bool) -> Variant:
    plan = plan_attention(4, head_dim, ITEMSIZE[dtype], decode, arch=arch)
    return Variant(
        f"merge {'decode' if decode else 'prefill'} {dtype} d{head_dim} group 4",
        merge_kernel,
        {
            **dict.fromkeys(("part_ptr", "lse_ptr"), "*fp32"),
            "out_ptr": f"*{dtype}",
            "starts_ptr": "*i32",
            **dict.fromkeys(("sequences", "splits", "first_block"), "i32"),
        },
        merge_constants(plan, KV_HEADS, 4, head_dim),
        Gates(registers=168, instructions=("LDG.128|LDGSTS.128",)),
    )


def _small(dtype: str, width: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[Variant]:
    shape = f"{dtype} {heads}/{kv_heads} heads d{head_dim}"
    wide = Gates(registers=128, instructions=("LDG.128", "STG.128"))
    row = dict.fromkeys(
        ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr", "gate_up_ptr"), f"*{dtype}"
    )
    for add in (False, True):
        constants = norm_constants(width, add)
        if not add:
            constants |= {"residual_ptr": None}
        # A row whose width is no multiple of its threads' share is loaded as narrowly as its end needs.
        name = f"{'add + ' if add else ''}rms norm {dtype} {width}"
        yield Variant(name, rms_norm_kernel, {**row, "eps": "fp32"}, constants, wide)
    # Of a gate that no power of two fits, as most models' are.
    yield Variant(f"silu mul {dtype} {3 * width}", silu_mul_kernel, row, silu_constants(3 * width), wide)
    angles = dict.fromkeys(("cos_ptr", "sin_ptr"), f"*{dtype}")
    pools = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr"), f"*{dtype}")
    strides = ((heads + 2 * kv_heads) * head_dim,) * 3  # of rows that hold query, key and value
    types = {**row, **angles, **pools, "slots_ptr": "*i64"}
    for turned in (0, heads):
        constants = write_constants(turned, kv_heads, head_dim, 16, _strides(head_dim, 16), strides)
        if not turned:
            constants |= dict.fromkeys(("q_ptr", "cos_ptr", "sin_ptr", "out_ptr"))
        name = f"{'rotary + ' if turned else ''}write kv {shape}"
        yield Variant(name, write_kv_kernel, types, constants, wide)


def _copy(name: str, pick: bool, place: bool) -> Variant:
    constants = copy_constants(pick, place, True)
    constants |= {} if pick else {"source_ids_ptr": None}
    constants |= {} if place else {"target_ids_ptr": None}
    pointers = dict.fromkeys(("source_ptr", "target_ptr", "source_ids_ptr", "target_ids_ptr"), "*i32")
    numbers = dict.fromkeys(("words", "source_stride", "target_stride"), "i32")
    return Variant(
        f"{name} blocks",
        copy_blocks_kernel,
        pointers | numbers,
        constants,
        Gates(registers=64, instructions=("LDG.128", "STG.128")),
    )


def _sample(dtype: str) -> Variant:
    numbers = {"top_k_ptr": "*i32", "tokens_ptr": "*i64", "vocab": "i32", "stride": "i32"}
    doubles = dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "uniform_ptr"), "*fp64")
    return Variant(
        f"sample {dtype}",
        sample_kernel,
        {"logits_ptr": f"*{dtype}", **numbers, **doubles},
        sample_constants(True),
        # Four logits a thread: more of them, with their fp64 weights, spill.
        Gates(registers=128, instructions=("LDG.128",) if dtype == "fp32" else ()),
    )
