"""Attention and the pool's writes: every set against an fp64 reference, the C set's bits against themselves.

Whatever a sequence does not own is poisoned: slots and blocks hold NaN, unused table entries name no block.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pagerelay.kernels.cpu_ops import CpuOps
from pagerelay.kernels.torch_ops import TorchOps

EDGES = (1, 15, 16, 17, 31, 32, 33, 100)
LAYERS, LAYER = 3, 1
NO_BLOCK = 2**30
Make = Callable[..., CpuOps]


@dataclass(frozen=True)
class Case:
    pool: Tensor
    query: Tensor
    tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def run(
        self,
        ops: TorchOps | CpuOps,
        scale: float = 0.125,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        return ops.attend(
            *(self.pool, LAYER, self.query, self.tables, self.seq_lens, self.query_starts),
            scale,
            window,
            soft_cap,
        )

    def only(self, sequence: int, start: int, end: int) -> "Case":
        """One sequence's query rows start:end (of those it has) as if that were the whole step."""
        first, last = self.query_starts[sequence : sequence + 2].tolist()
        length = int(self.seq_lens[sequence]) - (last - first) + end
        return replace(
            self,
            query=self.query[first + start : first + end],
            tables=self.tables[sequence : sequence + 1],
            seq_lens=torch.tensor([length], dtype=torch.int32),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
        )


def make_case(
    lengths: Sequence[int],
    rows: Sequence[int],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """A step in which sequence i has lengths[i] tokens, the last rows[i] of them queries; blocks shuffled."""
    torch.manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 3
    owner = torch.full((blocks, LAYERS + 1, 2, kv_heads, block_size, head_dim), float("nan"))
    pool = owner[:, :LAYERS]  # strided in its first dimension
    free = torch.randperm(blocks).tolist()
    tables = torch.full((len(lengths), max(needed) + 2), NO_BLOCK, dtype=torch.int32)
    keys, values = [], []
    for s, length in enumerate(lengths):
        key, value = torch.randn(2, length, kv_heads, head_dim)
        for b in range(needed[s]):
            tables[s, b] = block = free.pop()
            part = slice(b * block_size, (b + 1) * block_size)
            used = len(key[part])
            pool[block, LAYER, 0, :, :used] = key[part].transpose(0, 1)
            pool[block, LAYER, 1, :, :used] = value[part].transpose(0, 1)
        keys.append(key)
        values.append(value)
    starts = torch.tensor([0, *rows]).cumsum(0)
    query = torch.randn(int(starts[-1]) + padding, heads, head_dim)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return Case(pool, query, tables, seq_lens, starts.int(), keys, values)


def reference(
    case: Case, scale: float = 0.125, window: int | None = None, soft_cap: float | None = None
) -> Tensor:
    """Row by row in fp64, from the keys and values as they were made."""
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    starts = case.query_starts.tolist()
    for s, length in enumerate(case.seq_lens.tolist()):
        shared = case.query.shape[1] // case.keys[s].shape[1]
        for row in range(starts[s], starts[s + 1]):
            end = length - starts[s + 1] + row + 1
            seen = slice(max(0, end - window) if window else 0, end)
            key = case.keys[s][seen].double().repeat_interleave(shared, 1)
            value = case.values[s][seen].double().repeat_interleave(shared, 1)
            scores = torch.einsum("hd,lhd->hl", case.query[row].double(), key) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), value)
    return out


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_decode_rows(
    ops: TorchOps | CpuOps, heads: int, kv_heads: int, block_size: int, head_dim: int
) -> None:
    case = make_case(EDGES, [1] * len(EDGES), heads, kv_heads, head_dim, block_size)
    assert_close(case.run(ops), reference(case))


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_prefill_and_decode_rows_in_one_step(ops: TorchOps | CpuOps, block_size: int, head_dim: int) -> None:
    rows = [1, 15, 1, 17, 5, 0, 33, 64]
    case = make_case(EDGES, rows, head_dim=head_dim, block_size=block_size, padding=3)
    got = case.run(ops)
    assert_close(got, reference(case))
    assert (got[-3:] == 0).all()


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(8, 16), (72, 16), (256, 32), (64, 1), (64, 24), (64, 5)]
)
def test_odd_sizes(ops: TorchOps | CpuOps, head_dim: int, block_size: int) -> None:
    case = make_case([33, 100, 7], [33, 40, 1], head_dim=head_dim, block_size=block_size)
    assert_close(case.run(ops), reference(case))


def test_many_heads_to_one_kv_head(ops: TorchOps | CpuOps) -> None:
    case = make_case([40, 5], [3, 5], heads=71, kv_heads=1)
    assert_close(case.run(ops), reference(case))


@pytest.mark.parametrize("window", [1, 7, 16, 33, 64, 1000])
def test_sliding_window(ops: TorchOps | CpuOps, window: int) -> None:
    case = make_case([*EDGES, 90], [1, 15, 1, 17, 5, 1, 33, 100, 1])
    assert_close(case.run(ops, window=window), reference(case, window=window))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("soft_cap", [1.0, 30.0])
def test_soft_cap(ops: TorchOps | CpuOps, soft_cap: float, window: int | None) -> None:
    case = make_case([1, 33, 100], [1, 20, 1])
    expected = reference(case, 0.5, window, soft_cap)
    assert_close(case.run(ops, 0.5, window, soft_cap), expected)


def test_large_scores_neither_overflow_nor_vanish(ops: TorchOps | CpuOps) -> None:
    case = make_case([100, 64], [4, 1])
    assert_close(case.run(ops, scale=8.0), reference(case, scale=8.0))


@pytest.mark.parametrize("block_size", [5, 16, 32, 64])
def test_blocks_behind_the_window_may_be_gone(ops: TorchOps | CpuOps, block_size: int) -> None:
    for oldest in range(60, 97):  # the first key that the first row sees
        case = make_case([100], [3], block_size=block_size)
        window = 100 - 3 - oldest + 1
        expected = case.run(ops, window=window)
        case.tables[0, : oldest // block_size] = NO_BLOCK
        assert torch.equal(case.run(ops, window=window), expected)


@pytest.mark.parametrize("window", [2**31 - 1, 2**63 - 1])
def test_a_window_wider_than_any_sequence_hides_nothing(ops: TorchOps | CpuOps, window: int) -> None:
    case = make_case([100, 33], [40, 1])
    assert torch.equal(case.run(ops, window=window), case.run(ops))


def test_an_empty_step_and_a_step_of_padding(ops: TorchOps | CpuOps) -> None:
    case = make_case([5], [0])
    assert case.run(ops).shape == (0, 6, 64)
    assert (replace(case, query=torch.ones(2, 6, 64)).run(ops) == 0).all()


def test_write_kv_stores_rows_and_skips_minus_one(ops: TorchOps | CpuOps) -> None:
    torch.manual_seed(0)
    pool = torch.full((5, LAYERS + 1, 2, 2, 16, 64), float("nan"))[:, :LAYERS]
    key, value = torch.randn(2, 4, 2, 64)
    slots = torch.tensor([3 * 16 + 15, -1, 0, 4 * 16 + 2])
    ops.write_kv(pool, LAYER, key, value, slots)
    for row, (block, offset) in {0: (3, 15), 2: (0, 0), 3: (4, 2)}.items():
        assert torch.equal(pool[block, LAYER, 0, :, offset], key[row])
        assert torch.equal(pool[block, LAYER, 1, :, offset], value[row])
    assert (~pool.isnan()).sum() == 3 * 2 * 2 * 64


@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 33, 100])
def test_bits_do_not_depend_on_chunks(c_ops: CpuOps, chunk: int, window: int | None) -> None:
    case = make_case([100], [100], heads=9, kv_heads=3)
    whole = case.run(c_ops, window=window)
    for start in range(0, 100, chunk):
        end = min(start + chunk, 100)
        assert torch.equal(case.only(0, start, end).run(c_ops, window=window), whole[start:end])


def test_bits_do_not_depend_on_neighbours(c_ops: CpuOps) -> None:
    rows = [1, 15, 1, 17, 5, 1, 33, 64]
    case = make_case(EDGES, rows, padding=5)
    together = case.run(c_ops)
    for s, count in enumerate(rows):
        first = int(case.query_starts[s])
        assert torch.equal(case.only(s, 0, count).run(c_ops), together[first : first + count])


def test_bits_do_not_depend_on_later_tokens_even_when_these_are_not_finite(c_ops: CpuOps) -> None:
    case = make_case([50], [50])
    clean = case.run(c_ops)
    block, offset = int(case.tables[0, 40 // 16]), 40 % 16
    case.pool[block, LAYER, :, :, offset] = float("inf")
    assert torch.equal(case.run(c_ops)[:40], clean[:40])


@pytest.mark.parametrize("head_dim", [64, 72])
def test_bits_do_not_depend_on_block_size_threads_or_instruction_set(make_c: Make, head_dim: int) -> None:
    lengths, rows = [300, 33, 100], [200, 1, 1]
    small = make_case(lengths, rows, head_dim=head_dim, block_size=16)
    large = make_case(lengths, rows, head_dim=head_dim, block_size=64)
    for s, table in enumerate(large.tables):  # the same keys and values, stored in other blocks
        for i, (key, value) in enumerate(zip(small.keys[s], small.values[s], strict=True)):
            large.pool[int(table[i // 64]), LAYER, :, :, i % 64] = torch.stack((key, value))
    large = replace(large, query=small.query)
    expected = small.run(make_c(1, "avx2"), 0.125, 50, 20.0)
    for threads in (1, 2):
        for case in (small, large):
            assert torch.equal(case.run(make_c(threads, "avx2"), 0.125, 50, 20.0), expected)
            assert torch.equal(case.run(make_c(threads), 0.125, 50, 20.0), expected)


def test_calls_from_several_threads(make_c: Make) -> None:
    ops = make_c(2)
    cases = [make_case([200, 90], [200, 90], seed=seed) for seed in range(3)]
    expected = [case.run(ops) for case in cases]
    equal: list[bool] = []

    def work(i: int) -> None:
        equal.extend(torch.equal(cases[i].run(ops), expected[i]) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 60


def test_bad_indices_are_refused(c_ops: CpuOps) -> None:
    case = make_case([20, 20], [2, 1])
    before = case.pool.clone()
    bad_table = case.tables.clone()
    bad_table[1, 1] = case.pool.shape[0]
    for wrong in (
        replace(case, tables=bad_table),
        replace(case, tables=-bad_table),
        replace(case, seq_lens=torch.tensor([1, 20], dtype=torch.int32)),
        replace(case, seq_lens=torch.tensor([20, 2000], dtype=torch.int32)),
        replace(case, query_starts=torch.tensor([0, 2, 4], dtype=torch.int32)),
        replace(case, query_starts=torch.tensor([0, 3, 2], dtype=torch.int32)),
        replace(case, query_starts=torch.tensor([0, 1, -(2**31)], dtype=torch.int32)),
        replace(case, query_starts=torch.tensor([0, 2**31 - 1, 3], dtype=torch.int32)),
        replace(case, query_starts=torch.tensor([-1, 2, 3], dtype=torch.int32)),
        replace(case, seq_lens=torch.tensor([20, -(2**31)], dtype=torch.int32)),
        replace(case, query=case.query[:, :0]),
        replace(case, query=case.query[:, :3]),
        replace(case, pool=case.pool.to("meta")),
        replace(case, seq_lens=torch.tensor([20], dtype=torch.int32)),
        replace(case, query=case.query[..., :32].contiguous()),
        replace(case, query=case.query.double()),
        replace(case, pool=case.pool.transpose(3, 4)),
    ):
        with pytest.raises(ValueError, match=r"outside|fit|disagree|expected|dense"):
            wrong.run(c_ops)
    with pytest.raises(ValueError, match="window must be a number of keys, not -5"):
        case.run(c_ops, window=-5)
    key = torch.zeros(2, 2, 64)
    for slot in (-2, case.pool.shape[0] * 16):
        with pytest.raises(ValueError, match="outside"):
            c_ops.write_kv(case.pool, LAYER, key, key, torch.tensor([0, slot]))
    assert torch.equal(case.pool.nan_to_num(7), before.nan_to_num(7))
