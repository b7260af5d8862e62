"""The workers as the router knows them. Liveness by our own monotonic clock: silent for ``suspect_s`` gets
nothing new, silent for ``dead_s`` is dead and everything bound to it recovers elsewhere at once. So it does
when a worker's heartbeat says that its engine has been at one step for ``stuck_s``; that one stays, and gets
work again when the step has ended.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pagerelay.common.wire.account import Counters, Load
from pagerelay.common.wire.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    Layout,
    Message,
    Refused,
    Role,
    Welcome,
)
from pagerelay.router.labels import labelled
from pagerelay.router.policy import WorkerView

log = logging.getLogger(__name__)


NUM_REMEMBERED = 1024
"""Incarnations of the past that are told apart."""
_RANKS: dict[str, int | None] = {"ready": 0, "suspect": 1, "draining": None, "stuck": None}


class Bound(Protocol):
    """A request that some worker holds."""

    def worker_lost(self, worker_id: str, goodbye: bool) -> None: ...

    def leave_decoder(self, worker_id: str) -> None: ...


@dataclass(slots=True)
class WorkerEntry:
    """One live worker. The router's event loop is the only writer."""

    hello: Hello
    identity: bytes
    last_heard: float
    joined_at: float
    load: Load = field(default_factory=Load)
    counters: Counters = field(default_factory=Counters)
    bound: dict[str, Bound] = field(default_factory=dict)
    """request_id → the request that this worker holds something for."""
    tokens_due: dict[str, int] = field(default_factory=dict)
    """request_id → prompt tokens sent to it and not answered by a first token yet."""
    last_chosen: int = 0
    stuck: bool = False
    """Its engine does not come to the end of a step."""

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    def release(self, request_id: str) -> None:
        self.bound.pop(request_id, None)
        self.tokens_due.pop(request_id, None)


class WorkerRegistry:
    def __init__(
        self,
        *,
        model_digest: str,
        clock: Callable[[], float],
        heartbeat_s: float,
        dead_s: float,
        stuck_s: float,
        context_len: int,
    ) -> None:
        self.router_id = secrets.token_hex(8)
        self._model_digest = model_digest
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._dead_s = dead_s
        self._suspect_s = dead_s / 2
        self._stuck_s = stuck_s
        self._context_len = context_len
        self._by_identity: dict[bytes, WorkerEntry] = {}
        self._choices = 0
        self._replaced: OrderedDict[str, None] = OrderedDict()
        """Incarnations whose name a newer one bears: should one still be there, it must not come back and
        forth."""
        self._long_gone = Counters()
        """Totals of those who left before the last ``NUM_REMEMBERED``."""
        self._departed: OrderedDict[str, Counters] = OrderedDict()
        """Totals of incarnations that have gone, so that no counter ever falls; one that comes back brings
        its own."""

    # ------------------------------------------------------------------ coming and going

    def welcome(self, hello: Hello, identity: bytes) -> Message:
        """Registers a worker, or says in one line why it cannot be paired."""
        reason = self._mismatch(hello)
        if reason is not None:
            log.error("refused %s on %s: %s", hello.worker_id, hello.host, reason)
            return Refused(reason=reason, fatal=True)
        now = self._clock()
        known = self._by_identity.get(identity)
        if known is not None and known.hello.epoch != hello.epoch:
            self.remove(known, "it started over")  # it has dropped what we gave it
        if hello.incarnation in self._replaced:
            reason = f"another worker is called {hello.worker_id} now; give each its own worker.name"
            return Refused(reason=reason, fatal=True)
        for entry in [e for e in self.entries() if e.worker_id == hello.worker_id and e.identity != identity]:
            if entry.hello.incarnation != hello.incarnation:
                self._replaced[entry.hello.incarnation] = None
                if len(self._replaced) > NUM_REMEMBERED:
                    self._replaced.popitem(last=False)
            self.remove(entry, "a new incarnation took its place")
        if identity not in self._by_identity:
            counters = self._departed.pop(hello.incarnation, None) or Counters()
            self._by_identity[identity] = WorkerEntry(hello, identity, now, now, counters=counters)
            log.info("%s joined (%s, pid %d on %s)", hello.worker_id, hello.role, hello.pid, hello.host)
        self._by_identity[identity].last_heard = now
        return Welcome(router_id=self.router_id, heartbeat_s=self._heartbeat_s, dead_after_s=self._dead_s)

    def _mismatch(self, hello: Hello) -> str | None:
        if hello.layout.protocol != PROTOCOL:
            return f"protocol: {PROTOCOL} here, {hello.layout.protocol} there"
        if hello.layout.model_digest != self._model_digest:
            theirs = hello.layout.model_digest
            return f"model_digest: {self._model_digest} here, {theirs} there (another model folder?)"
        reference = self.layout()
        difference = reference.difference(hello.layout) if reference is not None else None
        return (
            None
            if difference is None
            else f"{difference} (the first value is that of the workers that are here)"
        )

    def heard(self, entry: WorkerEntry, message: Heartbeat) -> None:
        entry.load, entry.counters = message.load, labelled(message.counters)
        was, entry.stuck = entry.stuck, entry.load.busy_for_s > self._stuck_s
        if entry.stuck and not was:
            text = "%s is stuck: its step has run for %.0f s; %d requests are bound to it"
            log.error(text, entry.worker_id, entry.load.busy_for_s, len(entry.bound))
            for request in list(entry.bound.values()):
                request.worker_lost(entry.worker_id, goodbye=False)
        elif entry.load.hands_over:
            for request in list(entry.bound.values()):
                request.leave_decoder(entry.worker_id)

    def find(self, identity: bytes) -> WorkerEntry | None:
        entry = self._by_identity.get(identity)
        if entry is not None:
            entry.last_heard = self._clock()
        return entry

    def remove(self, entry: WorkerEntry, why: str, goodbye: bool = False) -> None:
        """Forgets a worker; everything bound to it is told. ``goodbye``: it left in order."""
        if self._by_identity.pop(entry.identity, None) is None:
            return
        log.log(
            logging.WARNING if entry.bound else logging.INFO,
            "%s left: %s; %d requests were bound to it",
            entry.worker_id,
            why,
            len(entry.bound),
        )
        self._departed[entry.hello.incarnation] = entry.counters
        if len(self._departed) > NUM_REMEMBERED:
            add_counters(self._long_gone, self._departed.popitem(last=False)[1])
        for request in list(entry.bound.values()):
            request.worker_lost(entry.worker_id, goodbye)

    def pardon(self) -> None:
        """We did not listen for a while (this process was stopped, or its loop busy): silence then proves
        nothing."""
        fresh = self._clock() - self._suspect_s
        for entry in self.entries():
            entry.last_heard = max(entry.last_heard, fresh)

    def expire(self) -> None:
        """Removes the workers that have been silent for too long."""
        now = self._clock()
        for entry in [e for e in self.entries() if now - e.last_heard > self._dead_s]:
            self.remove(entry, f"silent for {now - entry.last_heard:.1f} s")

    # ------------------------------------------------------------------ reading

    def entries(self, *roles: Role) -> list[WorkerEntry]:
        return [e for e in self._by_identity.values() if not roles or e.hello.role in roles]

    def find_alive(self, entry: WorkerEntry) -> bool:
        return self._by_identity.get(entry.identity) is entry

    def by_id(self, worker_id: str) -> WorkerEntry | None:
        return next((e for e in self._by_identity.values() if e.worker_id == worker_id), None)

    def state(self, entry: WorkerEntry) -> str:
        if entry.stuck:
            return "stuck"
        if entry.load.draining:
            return "draining"
        return "suspect" if self._clock() - entry.last_heard > self._suspect_s else "ready"

    def views(self, *roles: Role) -> list[WorkerView]:
        views = []
        for entry in self.entries(*roles):
            blocks = entry.load.blocks
            views.append(
                WorkerView(
                    worker_id=entry.worker_id,
                    rank=_RANKS[self.state(entry)],
                    # Our own books are fresher than the last heartbeat; the heartbeat knows of other routers'
                    # work.
                    outstanding_tokens=max(
                        sum(entry.tokens_due.values()), entry.load.outstanding_prefill_tokens
                    ),
                    num_seqs=max(len(entry.bound), entry.load.running + entry.load.waiting),
                    available_blocks=blocks.free + blocks.cached if blocks.total else entry.hello.num_blocks,
                    max_model_len=entry.hello.max_model_len,
                    last_chosen=entry.last_chosen,
                )
            )
        return views

    def chosen(self, worker_id: str) -> WorkerEntry | None:
        entry = self.by_id(worker_id)
        if entry is not None:
            self._choices += 1
            entry.last_chosen = self._choices
        return entry

    def totals(self) -> Counters:
        """The counters of all workers that are or were here."""
        total = Counters()
        for counters in (
            self._long_gone,
            *self._departed.values(),
            *(entry.counters for entry in self.entries()),
        ):
            add_counters(total, counters)
        return total

    def layout(self) -> Layout | None:
        """What all workers here have in common."""
        return next((e.hello.layout for e in self._by_identity.values()), None)

    @property
    def context_len(self) -> int:
        """Longest prompt + answer that every worker here can hold: the smallest limit on the path."""
        return min([self._context_len, *(e.hello.max_model_len for e in self._by_identity.values())])

    def not_ready(self) -> str | None:
        """Why no request can be served now, or ``None``."""
        here = [e for e in self.entries("decode", "colocated") if self.state(e) == "ready"]
        if not here:
            return "no_decode_worker" if self.entries("prefill") else "no_worker"
        return None


def add_counters(total: Counters, more: Counters) -> None:
    for name in total.__struct_fields__:
        value = getattr(more, name)
        if isinstance(value, dict):
            own = getattr(total, name)
            for key, amount in value.items():
                own[key] = own.get(key, 0) + amount
        else:
            setattr(total, name, getattr(total, name) + value)
