"""How paged attention is cut by shape: rows and keys a program, warps, pipeline depth, splits.

Plain numbers, without a device: what is launched and what is compiled ahead of time come from here both.
"""

from dataclasses import dataclass

MIN_SPLIT_TOKENS = 256
"""Context under which another split costs more than it brings."""
FIXED_SPLIT_TOKENS = 512
"""Where deterministic mode cuts every context."""
MAX_SPLITS = 64
SCRATCH_BYTES = 256 << 20
"""Bound of the parts that one launch leaves to be merged; longer steps are cut."""


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """The shape of one program, and its launch options."""

    rows: int
    m: int
    merge: int
    tile: int
    split_tiles: int
    warps: int
    stages: int

    def programs(self, rows: int, sequences: int) -> int:
        """Programs over `rows` rows of `sequences` sequences; some too many, as they may begin anywhere."""
        return rows if self.rows == 1 else rows // self.rows + sequences

    def splits(self, programs: int, max_context: int, wanted_programs: int) -> int:
        """Programs per context, of at most max_context tokens; wanted_programs keep the device busy."""
        if self.split_tiles:
            return -(-max_context // (self.split_tiles * self.tile))
        most = min(MAX_SPLITS, -(-max_context // MIN_SPLIT_TOKENS))
        return max(1, min(most, wanted_programs // max(programs, 1)))

    @property
    def min_split_tiles(self) -> int:
        return MIN_SPLIT_TOKENS // self.tile


def plan_attention(
    group: int, head_dim: int, itemsize: int, decode: bool, deterministic: bool = False, arch: int = 90
) -> AttendPlan:
    """group: query heads per KV head; itemsize: bytes of an element; decode: as many rows as sequences;
    arch: ten times the device's compute capability.

    Deterministic mode has one plan for decode and prefill, since another number of rows may take another
    matrix instruction: products of 16 rows, cut every `FIXED_SPLIT_TOKENS`. Its price: a prefill program
    reads the context for 16 rows instead of 128 and never uses wgmma, and small batches are not cut finer
    to fill the device, nor is a context of a few hundred tokens cut at all.
    """
    padded = power_of_2(head_dim)
    row_bytes = padded * itemsize
    if decode or deterministic or itemsize == 4:  # fp32 has no tensor cores: more rows spill
        target, warps = 16, 4
        tile = 64 if row_bytes <= 256 else 32
        if itemsize == 4:
            tile = 32 if padded <= 64 else 16
    else:  # a warpgroup's wgmma takes 64 rows; on sm_80 wider tiles spill
        target, warps = (128 if padded <= 128 else 64), 8
        tile = 64 if arch >= 90 and padded <= 128 else 32
        if arch < 90 and padded > 128:  # two tiles of 32 and the query outgrow that family's smaller devices
            tile = 16
    rows = 1 if decode and not deterministic else max(1, target // group)
    m = max(target, power_of_2(rows * group))
    stages = 3 if tile * row_bytes <= 16 << 10 else 2
    if target == 64 and tile == 16:  # one tile's products are over before the next one is there
        stages = 4
    return AttendPlan(
        rows=rows,
        m=m,
        merge=power_of_2(rows * group),
        tile=tile,
        split_tiles=FIXED_SPLIT_TOKENS // tile if deterministic else 0,
        warps=8 if m >= 128 else warps,
        stages=stages,
    )
