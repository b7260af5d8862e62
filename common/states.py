"""The life of a request as drawn tables, one per role. A move that is not drawn raises
:class:`IllegalMove`."""

from __future__ import annotations

from pagerelay.common.errors import IllegalMove

Table = dict[str, frozenset[str]]


def _table(**moves: str) -> Table:
    return {state: frozenset(targets.split()) for state, targets in moves.items()}


ROUTER = _table(
    QUEUED="PREFILLING HANDOFF FAILED ABORTED",  # HANDOFF at once: there is no prefill worker
    PREFILLING="HANDOFF FINISHED RECOVERING FAILED ABORTED",
    HANDOFF="DECODING FINISHED RECOVERING FAILED ABORTED",
    DECODING="FINISHED HANDOFF RECOVERING FAILED ABORTED",  # HANDOFF: to another decode worker
    RECOVERING="PREFILLING HANDOFF FAILED ABORTED",
    FINISHED="",
    FAILED="",
    ABORTED="",
)

PREFILL = _table(
    WAITING="COMPUTING ABORTED",
    COMPUTING="LEASED RELEASED EXPIRED ABORTED",  # RELEASED at once: the first token ended the answer
    LEASED="RELEASED EXPIRED ABORTED",
    RELEASED="",
    EXPIRED="",
    ABORTED="",
)

DECODE = _table(
    QUEUED="RESERVED RUNNING FETCH_FAILED ABORTED",  # RUNNING at once: no handle, the prompt is computed here
    RESERVED="FETCHING FETCH_FAILED ABORTED",
    FETCHING="READY FETCH_FAILED ABORTED",
    READY="RUNNING ABORTED",
    RUNNING="FINISHED PREEMPTED LEASED ABORTED",  # LEASED: another decode worker takes over
    LEASED="RELEASED EXPIRED ABORTED",
    FINISHED="",
    PREEMPTED="",
    RELEASED="",
    EXPIRED="",
    FETCH_FAILED="",
    ABORTED="",
)


class Machine:
    """One request's place in its table."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Table, start: str) -> None:
        self._table = table
        self.state = start

    def move(self, target: str) -> None:
        if target not in self._table[self.state]:
            raise IllegalMove(f"{self.state} -> {target} is not drawn")
        self.state = target

    @property
    def ended(self) -> bool:
        return not self._table[self.state]
