"""Block ids and who holds them. No bytes here, no clocks, no I/O.

Holders are counted per block and kind: a *sequence* computes with it, a *fetch* writes into it, a *lease*
keeps it for a worker that has still to fetch it. The *prefix cache* is a holder too, and the only one that
gives way when room is needed. So a block is in exactly one of four conditions, and ``free + held + leased +
cached == total`` always:

* held: a sequence or a fetch has it (several sequences may share it),
* leased: nobody here uses it, another worker still has to fetch it,
* cached: only the prefix cache knows it,
* free: nobody holds it and nothing in it is worth keeping.

Callers hold the engine's lock; nothing here is thread-safe by itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from pagerelay.common.errors import PagerelayError
from pagerelay.common.wire.account import BlockCounts

Holder = Literal["sequence", "fetch", "lease"]
HOLDERS: tuple[Holder, ...] = get_args(Holder)


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

    @property
    def num_known(self) -> int:
        """Blocks that are known here, those that somebody holds included."""
        return len(self._key_of)

    def forget(self, block: int) -> bool:
        """What the block holds is not to be trusted: no new prompt gets it. True if it waited for
        eviction, and is free now."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._id_of[key]
        return self._evictable.pop(block, 0) is None

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
        self._holders: dict[Holder, list[int]] = {kind: [0] * num_blocks for kind in HOLDERS}
        self._num_with: dict[Holder, int] = dict.fromkeys(HOLDERS, 0)
        """Blocks that have at least one holder of the kind."""
        self._num_held = 0
        self._num_leased_only = 0

    # ---------------------------------------------------------------- reading

    @property
    def available(self) -> int:
        """Blocks that :meth:`take` can give now: the free ones and those it may evict."""
        return len(self._free) + (len(self.cache) if self.cache is not None else 0)

    def is_shared(self, block: int) -> bool:
        """Do several sequences compute with it? Then none of them may write to it."""
        return self._holders["sequence"][block] > 1

    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=self.total,
            free=len(self._free),
            held=self._num_held,
            leased=self._num_leased_only,
            cached=len(self.cache) if self.cache is not None else 0,
            by_sequence=self._num_with["sequence"],
            by_fetch=self._num_with["fetch"],
            by_lease=self._num_with["lease"],
            by_prefix=self.cache.num_known if self.cache is not None else 0,
        )

    def check(self) -> None:
        """Conservation, recounted from scratch. Raises :class:`PagerelayError` with the figures if it is
        broken."""
        conditions = [self._condition(block) for block in range(self.total)]
        held, leased = conditions.count("held"), conditions.count("leased")
        counts = self.counts()
        total = counts.free + held + leased + counts.cached
        kinds = {kind: sum(1 for n in self._holders[kind] if n) for kind in HOLDERS}
        if (
            (held, leased, total) != (counts.held, counts.leased, counts.total)
            or len(set(self._free)) != counts.free
            or any(conditions[block] != "unheld" for block in self._free)
            or kinds != self._num_with
        ):
            raise PagerelayError(
                f"block ledger broken: recounted held {held}, leased {leased}, by kind {kinds}, "
                f"ledger says {counts}"
            )

    def check_holders(self, shares: Iterable[tuple[Holder, Sequence[int]]]) -> None:
        """Compares the books with ``shares``, what each holder says that it has: a block that is held by
        nobody who knows of it would never come back. Raises :class:`PagerelayError` naming such blocks."""
        self.check()
        said: dict[Holder, Counter[int]] = {kind: Counter() for kind in HOLDERS}
        for kind, ids in shares:
            said[kind].update(ids)
        for kind in HOLDERS:
            booked = self._holders[kind]
            wrong = [block for block in range(self.total) if booked[block] != said[kind][block]]
            if wrong:
                raise PagerelayError(
                    f"block ledger broken: {len(wrong)} blocks are not held as their holders ({kind}) say, "
                    f"block {wrong[0]} by {said[kind][wrong[0]]}, booked {booked[wrong[0]]}"
                )

    # ---------------------------------------------------------------- moving

    def take(self, count: int, holder: Holder = "sequence") -> list[int]:
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
            self._count(block, holder, 1)
        return ids

    def share(self, ids: Iterable[int], holder: Holder = "sequence") -> None:
        """One more holder for blocks that are held, leased or cached already."""
        for block in ids:
            if self.cache is not None:
                self.cache.unpark(block)
            self._count(block, holder, 1)

    def drop(self, ids: Sequence[int], holder: Holder = "sequence") -> None:
        """One holder less. A block without holders is cached if the prefix cache knows it, else free."""
        # From the tail, so that eviction takes a chain's end before its beginning.
        for block in reversed(ids):
            self._count(block, holder, -1)
            if self._condition(block) == "unheld":
                if self.cache is not None and block in self.cache:
                    self.cache.park(block)
                else:
                    self._free.append(block)

    def move(self, ids: Iterable[int], source: Holder, target: Holder) -> None:
        """Hands one holder's share of each block to another kind of holder."""
        for block in ids:
            self._count(block, target, 1)
            self._count(block, source, -1)

    def forget(self, block: int) -> None:
        """Takes a block out of the prefix cache, because its bytes are not what they should be."""
        if self.cache is not None and self.cache.forget(block):
            self._free.append(block)

    def _condition(self, block: int) -> Literal["held", "leased", "unheld"]:
        holders = self._holders
        if holders["sequence"][block] or holders["fetch"][block]:
            return "held"
        return "leased" if holders["lease"][block] else "unheld"

    def _count(self, block: int, holder: Holder, change: Literal[1, -1]) -> None:
        was = self._condition(block)
        counts = self._holders[holder]
        if counts[block] + change < 0:
            raise PagerelayError(f"block {block} is dropped by a holder ({holder}) that it does not have")
        counts[block] += change
        if counts[block] == (change == 1):  # the first of its kind came, or the last one went
            self._num_with[holder] += change
        now = self._condition(block)
        self._num_held += (now == "held") - (was == "held")
        self._num_leased_only += (now == "leased") - (was == "leased")
