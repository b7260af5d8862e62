"""The same prompts served in every way there is, and the bits that come of it.

A :class:`Way` says how prompts are served: none of its settings may change a bit. :func:`serve` plays it with
real engines, real kernels and the real transports, and returns a :class:`Record`: of every token a digest of
the logits it was sampled from, of every prompt one of the KV of all its positions in all layers, and the
tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from engines import decode_engine, prefill_engine
from ferry import Ferry
from handwork import Hands, Request

from pagerelay.common.engine.core import EngineCore
from pagerelay.common.engine.drafting import Drafting, Speculation
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.model.batch import Batch
from pagerelay.common.model.runner import ModelFacts, ModelRunner
from pagerelay.common.wire.messages import SamplingParams

BLOCK_SIZE = 16
BATCH_SIZES = tuple(range(2, 33))

# What decides the bits: one reference each.
ASKED: dict[str, tuple[Any, ...]] = {"weights": ("fp32", "int8"), "sampling": ("greedy", "seeded")}
# What must not.
SERVED: dict[str, tuple[Any, ...]] = {
    "instruction_set": ("avx512", "avx2"),
    "threads": (1, 2),
    "placed": ("colocated", "shm", "tcp"),
    "chunk": (16, 64, 512),
    "batched": (True, False),
    "recovered": (True, False),
    "prefix_cache": (True, False),
    "guessed": (True, False),
}


@dataclass(frozen=True)
class Way:
    """``chunk``: tokens of one step at most. ``batched``: 2 to 32 prompts at a time, else one alone.
    ``recovered``: each time a decode worker is lost when half of the tokens are out. ``guessed``: the tokens
    are computed ahead of time, from guesses that are right but for every third position's."""

    weights: str = "fp32"
    sampling: str = "greedy"
    instruction_set: str = "avx512"
    threads: int = 1
    placed: str = "colocated"
    chunk: int = 8192
    batched: bool = False
    recovered: bool = False
    prefix_cache: bool = False
    guessed: bool = False

    def __str__(self) -> str:
        return " ".join(
            f"{name}={value}" if isinstance(value, bool | int) else value
            for name, value in asdict(self).items()
        )

    def reference(self, instruction_set: str) -> Way:
        """The same asked of one undisturbed engine: one prompt alone, in one chunk, on one thread."""
        return Way(**{name: getattr(self, name) for name in ASKED}, instruction_set=instruction_set)


def all_ways(instruction_sets: Seq[str]) -> list[Way]:
    """Every setting with every other; those that share kernels follow each other."""
    settings = ASKED | SERVED | {"instruction_set": tuple(instruction_sets)}
    return [
        Way(**dict(zip(settings, values, strict=True))) for values in itertools.product(*settings.values())
    ]


def covering(ways: Seq[Way], strength: int = 2) -> list[Way]:
    """Few of ``ways`` in which any ``strength`` settings that meet at all still meet, in the order given.

    Greedy: the next is always the one with most meetings not seen yet.
    """
    meetings = {way: set(itertools.combinations(asdict(way).items(), strength)) for way in ways}
    due = set().union(*meetings.values())
    chosen: set[Way] = set()
    while due:
        best = max(ways, key=lambda way: len(meetings[way] & due))
        chosen.add(best)
        due -= meetings[best]
    return [way for way in ways if way in chosen]


@dataclass
class Record:
    logits: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(prompt, context length) → digest of the logits that follow that context."""
    kv: dict[int, bytes] = field(default_factory=dict)
    """Prompt → digest of the KV of all its positions, when its last token is sampled."""
    ids: dict[int, list[int]] = field(default_factory=dict)
    batch_sizes: set[int] = field(default_factory=set)
    num_recovered: int = 0
    num_accepted: int = 0
    """Rows behind right guesses."""
    num_cached: int = 0
    """Prompt tokens that the prefill worker found in its prefix cache."""

    def differences(self, other: Record) -> list[str]:
        """Every place where the two are not the same, KV first: it says how deep the fault lies."""
        found = []
        for name in ("kv", "ids", "logits"):
            mine, theirs = getattr(self, name), getattr(other, name)
            found += [f"{name} of {key}" for key in sorted(mine | theirs) if mine.get(key) != theirs.get(key)]
        return found

    def digest(self) -> str:
        """One of all, to compare with another process."""
        parts = (sorted(self.logits.items()), sorted(self.kv.items()), sorted(self.ids.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def num_compared(self) -> int:
        return len(self.logits) + len(self.kv) + sum(map(len, self.ids.values()))


Look = Callable[[int, int, torch.Tensor], None]


class Guesses(Drafting):
    """Knows the answers; every third position's token is another one."""

    def __init__(self, ids: dict[int, list[int]]) -> None:
        super().__init__(Speculation(), (), 0)
        self._ids = ids

    def guesses(self, seq: Sequence, most: int) -> list[int]:
        if seq.num_tokens == seq.num_given:
            return []
        # Not the last one: nothing may follow it.
        ids = self._ids[int(seq.request_id)][seq.next_index : -1][:most]
        return [token ^ (not at % 3) for at, token in enumerate(ids, seq.num_tokens)]


class Spy:
    """A :class:`ModelRunner` that notes what it computes in a :class:`Record`. Request ids are the prompts'
    numbers; ``last`` is the context length from which each prompt's last token is sampled. Rows behind wrong
    guesses are of no answer."""

    def __init__(
        self,
        runner: ModelRunner,
        record: Record,
        last: Seq[int],
        look: Look | None,
        ids: dict[int, list[int]],
    ) -> None:
        self.ops = runner.ops
        self.engine: EngineCore
        self._runner, self._record, self._last, self._look, self._ids = runner, record, last, look, ids

    def run(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        logits = self._runner.run(batch, pool)
        last_rows = (batch.query_starts[1:] - 1).tolist()
        for row, at in enumerate(batch.logits_rows[: batch.num_logits].tolist()):
            index = next(index for index, last in enumerate(last_rows) if at <= last)
            length = int(batch.seq_lens[index]) - (last_rows[index] - at)
            self._note(length, batch.tables[index], logits[row], pool)
        return logits

    def _note(self, length: int, table: torch.Tensor, logits: torch.Tensor, pool: torch.Tensor) -> None:
        # The block of the last position is being written, so it has one holder.
        block = int(table[(length - 1) // BLOCK_SIZE])
        (owner,) = (seq for seq in self.engine.scheduler.running if block in seq.block_ids)
        number = int(owner.request_id)
        guessed = owner.draft[: length - owner.num_tokens] if length > owner.num_tokens else []
        if guessed != self._ids.get(number, guessed)[owner.next_index :][: len(guessed)]:
            return
        self._record.num_accepted += len(guessed) > 0
        digest = hashlib.sha256(logits.numpy()).digest()
        before = self._record.logits.setdefault((number, length), digest)
        assert before == digest, f"prompt {number}: computed again at {length}, its logits are others"
        if self._look is not None:
            self._look(number, length, logits)
        if length == self._last[number]:
            # [blocks, layers, key|value, heads, slots, head_dim], to one row a position whatever the blocks
            kv = pool[table[: -(-length // BLOCK_SIZE)].long()].movedim(4, 1).flatten(0, 1)[:length]
            self._record.kv[number] = hashlib.sha256(kv.contiguous().numpy()).digest()


def batch_sizes() -> Iterator[int]:
    """2 to 32 without end, mixed. Ways that share the iterator go through all sizes together."""
    return itertools.cycle(random.Random(32).sample(BATCH_SIZES, len(BATCH_SIZES)))


def groups(count: int, way: Way, sizes: Iterator[int]) -> Iterator[list[int]]:
    """Which prompts are served together; each way mixes them differently."""
    if not way.batched:
        yield from ([number] for number in range(count))
        return
    numbers = random.Random(str(way)).sample(range(count), count)
    while numbers:
        size = next(sizes)
        yield numbers[:size]
        numbers = numbers[size:]


def with_families(prompts: Seq[list[int]], every: int = 8, shared: int = 40) -> list[list[int]]:
    """The prompts, but ``every`` so many one begins like the one before it: work for the prefix caches."""
    return [
        prompts[number - 1][:shared] + prompt if number % every == every - 1 else prompt
        for number, prompt in enumerate(prompts)
    ]


class FerryHands(Hands):
    def __init__(self, *engines: Any, ferry: Ferry | None) -> None:
        super().__init__(*engines, split=ferry is not None)
        self._ferry = ferry

    def copy(self, lease: int, sources: list[int], targets: list[int]) -> None:
        assert self._ferry is not None
        self._ferry.copy(lease, sources, targets)


def sampling_of(way: Way, number: int, num_tokens: int) -> SamplingParams:
    varied: dict[str, Any] = {"temperature": 0.0}
    if way.sampling == "seeded":
        varied = {"temperature": 0.8, "top_p": 0.95 if number % 4 == 0 else 1.0, "seed": number}
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **varied)


def serve(
    way: Way,
    runner: ModelRunner,
    facts: ModelFacts,
    prompts: Seq[list[int]],
    num_tokens: int,
    sizes: Iterator[int],
    look: Look | None = None,
    ids: dict[int, list[int]] | None = None,
) -> Record:
    """Serves all prompts that way, in groups of ``sizes`` where they are batched.

    ``runner`` has the way's kernels; ``look(prompt, context length, logits)`` sees every row when it is
    computed; ``ids`` are the answers, for a way that guesses them. Fails if a request does, or if
    blocks are lost.
    """
    record = Record()
    torch.set_num_threads(way.threads)
    longest = max(map(len, prompts)) + num_tokens
    num_blocks = (16 if way.batched else 3) * -(-longest // BLOCK_SIZE)
    common: dict[str, Any] = {
        "facts": facts,
        "block_size": BLOCK_SIZE,
        "max_batch_tokens": way.chunk,
        "max_num_seqs": BATCH_SIZES[-1],
        "prefix_cache": way.prefix_cache,
    }
    last = [len(prompt) + num_tokens - 1 for prompt in prompts]

    def engine(make: Callable[..., Any], **more: Any) -> Any:
        spy = Spy(runner, record, last, look, ids or {})
        spy.engine = made = make(num_blocks, runner=spy, **common, **more)
        if way.guessed:
            made.scheduler.drafting = Guesses(ids or {})
        return made

    with (
        closing(Ferry(way.placed, facts, BLOCK_SIZE, num_blocks))
        if way.placed != "colocated"
        else (nullcontext()) as ferry
    ):
        pools = ({"pool": ferry.source}, {"pool": ferry.target}) if ferry is not None else ({}, {})
        hands = FerryHands(engine(prefill_engine, **pools[0]), engine(decode_engine, **pools[1]), ferry=ferry)

        def lose() -> None:
            """Another worker in the lost one's place; its memory has nothing of the lost one's."""
            pool = hands.d.pool
            pool.tensor.fill_(float("nan"))
            record.num_recovered += hands.lose_decode(engine(decode_engine, pool=pool))

        for group in groups(len(prompts), way, sizes):
            requests = [
                hands.submit(prompts[number], sampling_of(way, number, num_tokens), str(number))
                for number in group
            ]
            if way.recovered:
                run_to_half(hands, requests, num_tokens)
                lose()
            hands.run()
            record.batch_sizes.add(len(group))
            for number, request in zip(group, requests, strict=True):
                assert (request.reason, request.failures) == ("length", [])
                record.ids[number] = request.emitted
        record.num_cached = hands.p.num_prompt_tokens_cached
    return record


def run_to_half(hands: Hands, requests: Seq[Request], num_tokens: int) -> None:
    hands.deliver_all()
    while sum(len(request.emitted) for request in requests) < len(requests) * num_tokens / 2:
        assert hands.step(), "nothing to do, and half of the tokens are not out"
