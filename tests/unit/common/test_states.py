"""Every drawn move goes, every other raises."""

from __future__ import annotations

import pytest

from pagerelay.common.errors import IllegalMove
from pagerelay.common.states import DECODE, PREFILL, ROUTER, Machine, Table

TABLES = {"router": ROUTER, "prefill": PREFILL, "decode": DECODE}
MOVES = [
    pytest.param(table, start, target, id=f"{name}-{start}-{target}")
    for name, table in TABLES.items()
    for start in table
    for target in table
]


@pytest.mark.parametrize(("table", "start", "target"), MOVES)
def test_move(table: Table, start: str, target: str) -> None:
    machine = Machine(table, start)
    if target in table[start]:
        machine.move(target)
        assert machine.state == target
    else:
        with pytest.raises(IllegalMove, match=f"{start} -> {target} is not drawn"):
            machine.move(target)
        assert machine.state == start


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_is_closed_and_every_state_reaches_an_end(table: Table) -> None:
    assert {target for targets in table.values() for target in targets} <= set(table)
    for start in table:
        seen, todo = set(), [start]
        while todo:
            state = todo.pop()
            if state not in seen:
                seen.add(state)
                todo += table[state]
        assert any(Machine(table, state).ended for state in seen)


@pytest.mark.parametrize(
    ("table", "ends"),
    [
        (ROUTER, {"FINISHED", "FAILED", "ABORTED"}),
        (PREFILL, {"RELEASED", "EXPIRED", "ABORTED"}),
        (DECODE, {"FINISHED", "PREEMPTED", "FETCH_FAILED", "ABORTED", "RELEASED", "EXPIRED"}),
    ],
)
def test_ends(table: Table, ends: set[str]) -> None:
    assert {state for state in table if Machine(table, state).ended} == ends


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_whatever_lives_can_be_aborted(table: Table) -> None:
    assert all("ABORTED" in table[state] for state in table if not Machine(table, state).ended)


def test_an_unknown_state_is_no_move() -> None:
    with pytest.raises(IllegalMove):
        Machine(ROUTER, "QUEUED").move("NOWHERE")
