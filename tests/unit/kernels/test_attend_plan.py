"""How paged attention is cut by shape; runs without Triton."""

from __future__ import annotations

import itertools

import pytest

from pagerelay.kernels.triton.attend_plan import FIXED_SPLIT_TOKENS, MAX_SPLITS, plan_attention, power_of_2

SHAPES = list(itertools.product((1, 3, 4, 8, 71), (64, 80, 128, 256), (2, 4), (80, 90)))


def test_power_of_2() -> None:
    assert [power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


@pytest.mark.parametrize(("group", "head_dim", "itemsize", "arch"), SHAPES)
def test_rows_fit_the_product(group: int, head_dim: int, itemsize: int, arch: int) -> None:
    for decode, deterministic in itertools.product((True, False), (True, False)):
        plan = plan_attention(group, head_dim, itemsize, decode, deterministic, arch)
        assert plan.rows * group <= plan.merge <= plan.m
        assert plan.m >= 16
        assert plan.tile in (16, 32, 64)
        assert plan.min_split_tiles >= 1


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_prefill_fits_every_device_of_the_sm_80_family(group: int, head_dim: int) -> None:
    plan = plan_attention(group, head_dim, 2, False, arch=80)
    row_bytes = 2 * power_of_2(head_dim)
    query, weights = plan.m * row_bytes, plan.m * plan.tile * 2
    assert query + weights + (plan.stages - 1) * 2 * plan.tile * row_bytes <= 99 << 10


@pytest.mark.parametrize(("group", "head_dim", "itemsize", "arch"), SHAPES)
def test_deterministic_mode_has_one_plan(group: int, head_dim: int, itemsize: int, arch: int) -> None:
    plan = plan_attention(group, head_dim, itemsize, True, True, arch)
    assert plan == plan_attention(group, head_dim, itemsize, False, True, arch)
    assert plan.split_tiles * plan.tile == FIXED_SPLIT_TOKENS
    assert [plan.splits(programs, 1500, 264) for programs in (1, 1000)] == [3, 3]


def test_splits_fill_the_device_but_stay_long_enough() -> None:
    plan = plan_attention(4, 128, 2, True)
    assert plan.splits(1, 100, 33) == 1
    assert plan.splits(1, 1024, 33) == 4
    assert plan.splits(8, 100_000, 33) == 4
    assert plan.splits(64, 100_000, 33) == 1
    assert plan.splits(1, 10**6, 10**6) == MAX_SPLITS


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 100])
def test_programs_cover_all_rows_wherever_sequences_begin(rows: int) -> None:
    plan = plan_attention(4, 128, 2, False)
    for cut in range(rows + 1):
        needed = -(-cut // plan.rows) + -(-(rows - cut) // plan.rows)
        last = (
            cut // plan.rows + 1 + -(-(rows - cut) // plan.rows)
        )  # the second sequence's, as the kernel counts
        assert needed <= last <= plan.programs(rows, 2)
