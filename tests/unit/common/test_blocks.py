"""The block ledger: who holds what, what is given out next, what is evicted first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pagerelay.common.errors import PagerelayError
from pagerelay.common.kv.blocks import HOLDERS, BlockPool, PrefixCache


def key(name: str) -> bytes:
    return name.encode()


def drain(pool: BlockPool) -> list[int]:
    """All available blocks in the order in which they are given out."""
    return pool.take(pool.available)


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    """(free, held, leased, cached), recounted first."""
    pool.check()
    c = pool.counts()
    assert c.total == pool.total == c.free + c.held + c.leased + c.cached
    return c.free, c.held, c.leased, c.cached


def cached_pool(num_blocks: int, *chains: str) -> BlockPool:
    """A pool whose first blocks are cached chains: "abc" is three blocks with the keys a, b, c."""
    cache = PrefixCache()
    pool = BlockPool(num_blocks, cache)
    for chain in chains:
        ids = pool.take(len(chain))
        for block, name in zip(ids, chain, strict=True):
            cache.insert(key(name), block)
        pool.drop(ids)
    return pool


# ------------------------------------------------------------------ order


def test_a_fresh_pool_gives_blocks_in_order() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.available == 1
    assert counts(pool) == (1, 3, 0, 0)


def test_freed_blocks_queue_up_behind_the_free_ones_tail_first() -> None:
    pool = BlockPool(6)
    pool.drop(pool.take(3))  # 0, 1, 2
    assert drain(pool) == [3, 4, 5, 2, 1, 0]


def test_cached_blocks_are_given_out_only_when_none_is_free() -> None:
    pool = cached_pool(5, "ab")  # blocks 0, 1
    assert counts(pool) == (3, 0, 0, 2)
    assert pool.take(4) == [2, 3, 4, 1]
    assert counts(pool) == (0, 4, 0, 1)


def test_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() -> None:
    pool = cached_pool(6, "abc", "de")  # abc: 0, 1, 2; de: 3, 4
    assert drain(pool) == [5, 2, 1, 0, 4, 3]


def test_using_a_chain_again_makes_it_the_last_to_go() -> None:
    pool = cached_pool(6, "abc", "de")
    assert pool.cache is not None
    hit = pool.cache.match([key("a"), key("b")])
    assert hit == [0, 1]
    pool.share(hit)
    assert counts(pool) == (1, 2, 0, 3)
    pool.drop(hit)
    # c was not used again: it is the oldest now.
    assert drain(pool) == [5, 2, 4, 3, 1, 0]


def test_held_cached_blocks_are_never_evicted() -> None:
    pool = cached_pool(3, "abc")
    pool.share([0])
    assert pool.available == 2
    assert drain(pool) == [2, 1]
    with pytest.raises(PagerelayError, match="asked for 1 blocks, 0 available"):
        pool.take(1)


def test_an_evicted_block_is_forgotten_by_the_cache() -> None:
    pool = cached_pool(2, "ab")
    assert pool.cache is not None
    assert pool.take(1) == [1]
    assert pool.cache.match([key("a"), key("b")]) == [0]
    assert 1 not in pool.cache
    pool.drop([1])
    assert counts(pool) == (1, 0, 0, 1)


def test_a_hit_ends_at_the_first_miss() -> None:
    pool = cached_pool(4, "ab", "d")
    assert pool.cache is not None
    assert pool.cache.match([key(name) for name in "abcd"]) == [0, 1]
    assert pool.cache.match([key("x"), key("a")]) == []


def test_a_known_key_or_block_is_left_as_it_is() -> None:
    cache = PrefixCache()
    pool = BlockPool(4, cache)
    first, second = pool.take(2)
    cache.insert(key("a"), first)
    cache.insert(key("a"), second)  # the same prompt, computed twice at once
    cache.insert(key("b"), first)
    assert cache.match([key("a")]) == [first]
    assert cache.match([key("b")]) == []
    pool.drop([first, second])
    assert counts(pool) == (3, 0, 0, 1)


# ------------------------------------------------------------------ holders


def test_a_shared_block_is_given_back_by_its_last_holder() -> None:
    pool = BlockPool(3)
    ids = pool.take(2)
    pool.share(ids)
    pool.drop(ids)
    assert counts(pool) == (1, 2, 0, 0)
    pool.drop(ids)
    assert counts(pool) == (3, 0, 0, 0)


def test_a_block_that_is_held_and_leased_counts_as_held() -> None:
    pool = BlockPool(3)
    ids = pool.take(1)
    pool.share(ids, "lease")
    assert counts(pool) == (2, 1, 0, 0)
    pool.drop(ids)
    assert counts(pool) == (2, 0, 1, 0)
    pool.share(ids)
    assert counts(pool) == (2, 1, 0, 0)
    pool.drop(ids, "lease")
    pool.drop(ids)
    assert counts(pool) == (3, 0, 0, 0)


def test_moving_hands_a_share_on_without_setting_the_block_free() -> None:
    pool = cached_pool(4, "a")
    pool.share([0])
    ids = [0, *pool.take(1)]
    pool.move(ids, "sequence", "lease")
    assert counts(pool) == (2, 0, 2, 0)
    pool.drop(ids, "lease")
    assert counts(pool) == (3, 0, 0, 1)


@pytest.mark.parametrize("cache", [None, PrefixCache()])
def test_a_second_drop_raises(cache: PrefixCache | None) -> None:
    pool = BlockPool(2, cache)
    ids = pool.take(1)
    pool.drop(ids)
    with pytest.raises(PagerelayError, match=r"block 0 is dropped by a holder \(sequence\)"):
        pool.drop(ids)
    assert counts(pool) == (2, 0, 0, 0)


def test_dropping_the_wrong_kind_of_share_raises() -> None:
    pool = BlockPool(2)
    ids = pool.take(1, "lease")
    with pytest.raises(PagerelayError, match=r"\(sequence\)"):
        pool.drop(ids)
    pool.drop(ids, "lease")
    assert counts(pool) == (2, 0, 0, 0)


def test_a_broken_ledger_is_found_out() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool._num_held = 0
    with pytest.raises(PagerelayError, match="block ledger broken: recounted held 1"):
        pool.check()


def test_a_block_that_nobody_knows_to_hold_is_found_out() -> None:
    pool = BlockPool(4)
    ids = pool.take(3)
    pool.share(ids[:1])
    pool.check_holders([("sequence", ids), ("sequence", ids[:1])])
    with pytest.raises(PagerelayError, match=r"1 blocks are not held .*block 0 by 1, booked 2"):
        pool.check_holders([("sequence", ids)])
    pool.move(ids[1:], "sequence", "lease")
    with pytest.raises(PagerelayError, match=r"holders \(lease\) say, block 1 by 0, booked 1"):
        pool.check_holders([("sequence", ids[:1]), ("sequence", ids[:1])])


def test_kinds_of_holders_are_counted_apart() -> None:
    pool = cached_pool(4, "a")
    pool.share([0], "lease")
    pool.share([0])
    fetched = pool.take(2, "fetch")
    c = pool.counts()
    assert (c.by_sequence, c.by_fetch, c.by_lease, c.by_prefix) == (1, 2, 1, 1)
    assert counts(pool) == (1, 3, 0, 0)
    pool.move(fetched, "fetch", "sequence")
    pool.drop([0])
    c = pool.counts()
    assert (c.by_sequence, c.by_fetch, c.by_lease, c.by_prefix) == (2, 0, 1, 1)
    assert counts(pool) == (1, 2, 1, 0)


def test_a_block_whose_bytes_are_wrong_is_forgotten() -> None:
    pool = cached_pool(4, "abc")
    assert pool.cache is not None
    pool.share([1])
    pool.forget(0)  # nobody holds it: free at once
    pool.forget(1)  # free when its holder has gone
    pool.forget(3)  # never known
    assert counts(pool) == (2, 1, 0, 1)
    pool.drop([1])
    assert counts(pool) == (3, 0, 0, 1)
    assert pool.cache.match([key("a")]) == pool.cache.match([key("b")]) == []


# ------------------------------------------------------------------ any order of anything


class Ledger(RuleBasedStateMachine):
    """Beside the pool a plain model: block → its holders, one entry a share."""

    shares = Bundle("shares")

    @initialize(num_blocks=st.integers(1, 8), caching=st.booleans())
    def begin(self, num_blocks: int, caching: bool) -> None:
        self.cache = PrefixCache() if caching else None
        self.pool = BlockPool(num_blocks, self.cache)
        self.holders: dict[int, list[str]] = {block: [] for block in range(num_blocks)}
        self.keys: dict[bytes, int] = {}

    @rule(target=shares, count=st.integers(1, 4), holder=st.sampled_from(HOLDERS))
    def take(self, count: int, holder: Any) -> Any:
        if count > self.pool.available:
            with pytest.raises(PagerelayError):
                self.pool.take(count, holder)
            return ([], holder)
        ids = self.pool.take(count, holder)
        assert len(set(ids)) == count
        for block in ids:
            assert not self.holders[block], "somebody else's block was given out"
            self.holders[block].append(holder)
            self.keys = {name: known for name, known in self.keys.items() if known != block}
        return (ids, holder)

    @rule(target=shares, share=shares, holder=st.sampled_from(HOLDERS))
    def share(self, share: Any, holder: Any) -> Any:
        ids = [block for block in share[0] if self.holders[block]]
        self.pool.share(ids, holder)
        for block in ids:
            self.holders[block].append(holder)
        return (ids, holder)

    @rule(target=shares, number=st.integers(0, 5))
    def hit(self, number: int) -> Any:
        if self.cache is None:
            return ([], "sequence")
        ids = self.cache.match([bytes([number])])
        assert ids == ([self.keys[bytes([number])]] if bytes([number]) in self.keys else [])
        self.pool.share(ids)
        for block in ids:
            self.holders[block].append("sequence")
        return (ids, "sequence")

    @rule(share=consumes(shares))
    def drop(self, share: Any) -> None:
        ids, holder = share
        self.pool.drop(ids, holder)
        for block in ids:
            self.holders[block].remove(holder)

    @rule(target=shares, share=consumes(shares), other=st.sampled_from(HOLDERS))
    def move(self, share: Any, other: Any) -> Any:
        ids, holder = share
        self.pool.move(ids, holder, other)
        for block in ids:
            self.holders[block].remove(holder)
            self.holders[block].append(other)
        return (ids, other)

    @rule(share=shares, number=st.integers(0, 5))
    def insert(self, share: Any, number: int) -> None:
        held = [block for block in share[0] if self.holders[block]]
        if self.cache is not None and held:
            self.cache.insert(bytes([number]), held[0])
            if bytes([number]) not in self.keys and held[0] not in self.keys.values():
                self.keys[bytes([number])] = held[0]

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = sum("sequence" in who or "fetch" in who for who in self.holders.values())
        leased = sum({*who} == {"lease"} for who in self.holders.values())
        cached = sum(not self.holders[block] for block in self.keys.values())
        assert counts(self.pool) == (self.pool.total - held - leased - cached, held, leased, cached)
        assert self.pool.available == self.pool.total - held - leased
        c = self.pool.counts()
        kinds = [sum(kind in who for who in self.holders.values()) for kind in HOLDERS]
        assert [c.by_sequence, c.by_fetch, c.by_lease, c.by_prefix] == [*kinds, len(self.keys)]
        self.pool.check_holders((kind, [block]) for block, who in self.holders.items() for kind in who)

    @rule(number=st.integers(0, 5))
    def forget(self, number: int) -> None:
        """The bytes of a cached block proved wrong."""
        block = self.keys.pop(bytes([number]), None)
        if block is not None:
            self.pool.forget(block)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=40)
