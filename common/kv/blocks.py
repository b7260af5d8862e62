"""Block ids and who holds them. No bytes here, no clocks, no I/O.

A block is in exactly one of four conditions, so ``free + held + leased + cached == total`` always:

* held: a sequence computes with it (several sequences may share it),
* leased: no sequence here uses it, a decode worker still has to fetch it,
* cached: nobody holds it, the prefix cache could give it to a new prompt, and evicts it when space is needed,
* free: nobody holds it and nothing in it is worth keeping.

Callers hold the engine's lock; nothing here is thread-safe by itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Literal

from pagerelay.common.errors import PagerelayError
from pagerelay.common.wire.messages import BlockCounts

Holder = Literal["held", "leased"]


class PrefixCache:
    """Hash chain → block id. The only evictor: least recently used first, a chain's tail before its head."""

    def __init__(self) -> None:
        self._id_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Ids of the longest cached prefix; a hit ends at the first miss."""
        ids: list[int] = []
        for key in keys:
            block = self._id_of.get(key)
            if block is None:
                break
            ids.append(block)
        return ids

    def insert(self, key: bytes, block: int) -> None:
        """Remembers a full block. A key or block already known is left as it is."""
        if key not in self._id_of and block not in self._key_of:
            self._id_of[key] = block
            self._key_of[block] = key

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        return len(self._evictable)

    def park(self, block: int) -> None:
        """Nobody holds the block any more: it may be evicted from now on."""
        self._evictable[block] = None

    def unpark(self, block: int) -> None:
        self._evictable.pop(block, None)

    def evict(self) -> int:
        """Forgets the least recently used unheld block and returns its id."""
        block, _ = self._evictable.popitem(last=False)
        del self._id_of[self._key_of.pop(block)]
        return block


class BlockPool:
    """Who holds each block; hands out free ones, evicting cached ones when it must."""

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        self.total = num_blocks
        self.cache = cache
        self._free: deque[int] = deque(range(num_blocks))
        self._holders: dict[Holder, list[int]] = {"held": [0] * num_blocks, "leased": [0] * num_blocks}
        self._num_held = 0
        self._num_leased_only = 0

    # ---------------------------------------------------------------- reading

    @property
    def available(self) -> int:
        """Blocks that :meth:`take` can give now: the free ones and those it may evict."""
        return len(self._free) + (len(self.cache) if self.cache is not None else 0)

    def counts(self) -> BlockCounts:
        cached = len(self.cache) if self.cache is not None else 0
        return BlockCounts(
            total=self.total,
            free=len(self._free),
            held=self._num_held,
            leased=self._num_leased_only,
            cached=cached,
        )

    def check(self) -> None:
        """Conservation, recounted from scratch. Raises :class:`PagerelayError` with the figures if it is
        broken."""
        held = sum(1 for n in self._holders["held"] if n)
        leased = sum(
            1 for h, n in zip(self._holders["held"], self._holders["leased"], strict=True) if n and not h
        )
        counts = self.counts()
        total = counts.free + held + leased + counts.cached
        if (held, leased, total) != (counts.held, counts.leased, counts.total) or len(
            set(self._free)
        ) != counts.free:
            raise PagerelayError(
                f"block ledger broken: recounted held {held}, leased {leased}, ledger says {counts}"
            )

    # ---------------------------------------------------------------- moving

    def take(self, count: int, holder: Holder = "held") -> list[int]:
        """``count`` blocks for one new holder. The caller has checked ``available``."""
        if count > self.available:
            raise PagerelayError(f"asked for {count} blocks, {self.available} available")
        ids = []
        for _ in range(count):
            if self._free:
                ids.append(self._free.popleft())
            else:
                assert self.cache is not None  # noqa: S101 - available counted it
                ids.append(self.cache.evict())
        for block in ids:
            self._add(block, holder)
        return ids

    def share(self, ids: Iterable[int], holder: Holder = "held") -> None:
        """One more holder for blocks that are held, leased or cached already."""
        for block in ids:
            if self.cache is not None:
                self.cache.unpark(block)
            self._add(block, holder)

    def drop(self, ids: Sequence[int], holder: Holder = "held") -> None:
        """One holder less. A block without holders is cached if the prefix cache knows it, else free."""
        # From the tail, so that eviction takes a chain's end before its beginning.
        for block in reversed(ids):
            self._remove(block, holder)
            if not self._holders["held"][block] and not self._holders["leased"][block]:
                if self.cache is not None and block in self.cache:
                    self.cache.park(block)
                else:
                    self._free.append(block)

    def move(self, ids: Iterable[int], source: Holder, target: Holder) -> None:
        """Hands one holder's share of each block to another kind of holder."""
        for block in ids:
            self._add(block, target)
            self._remove(block, source)

    def _add(self, block: int, holder: Holder) -> None:
        held, leased = self._holders["held"], self._holders["leased"]
        if holder == "held":
            if not held[block]:
                self._num_held += 1
                self._num_leased_only -= 1 if leased[block] else 0
            held[block] += 1
        else:
            if not held[block] and not leased[block]:
                self._num_leased_only += 1
            leased[block] += 1

    def _remove(self, block: int, holder: Holder) -> None:
        held, leased = self._holders["held"], self._holders["leased"]
        counts = self._holders[holder]
        if not counts[block]:
            raise PagerelayError(f"block {block} is dropped by a holder ({holder}) that it does not have")
        counts[block] -= 1
        if holder == "held":
            if not held[block]:
                self._num_held -= 1
                self._num_leased_only += 1 if leased[block] else 0
        elif not held[block] and not leased[block]:
            self._num_leased_only -= 1
