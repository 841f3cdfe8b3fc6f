"""Which machines' hotspots the guard sees: every machine that a decision relieves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from layouts import random_change, random_layout
from roost.balance import Partition, Plan
from roost.balance.changes import Merge, Move, NoChange, Rebalance, Replan, Split, apply_changes
from roost.guard.sensor import _givers, relieved_machines

SIDE = 12
MACHINES = 4


def owners(plan: Plan) -> dict[tuple[int, int], set[int]]:
    return {
        (column, row): set(p.machines)
        for p in plan.partitions
        for column in range(p.column0, p.column1)
        for row in range(p.row0, p.row1)
    }


def random_plan(rng: random.Random) -> Plan:
    layout = random_layout(rng, SIDE, SIDE, 8)
    parts = [Partition(n, *s, (rng.randrange(MACHINES),)) for n, s in enumerate(layout)]
    return Plan(0, SIDE, SIDE, MACHINES, tuple(parts), len(parts))


@pytest.mark.parametrize("seed", range(30))
def test_machines_give_what_they_owned_before_or_share_it_with_more(seed: int) -> None:
    """Compared with the owners of every cell."""
    rng = random.Random(seed)
    before = plan = random_plan(rng)
    for _ in range(rng.randrange(1, 4)):
        change = random_change(rng, plan)
        if change is not None:
            plan = apply_changes(plan, [change])
    old, new = owners(before), owners(plan)
    expected = {
        m
        for place, machines in old.items()
        for m in machines
        if m not in new[place] or len(new[place]) > len(machines)
    }
    assert _givers(before, plan) == expected


CELLS = tuple(Partition(number, number, 0, number + 1, 1, (number,)) for number in range(4))
PLAN = Plan(0, 4, 1, 4, CELLS, 4)
BUSY = np.array([9.0, 1.0, 8.0, 2.0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param((Move(3, (1,)),), (3,), id="one move, of a machine that is not the busiest"),
        pytest.param((Move(2, (1,)), Move(0, (3,))), (0, 2), id="moves of two machines"),
        pytest.param((Move(2, (2, 1)),), (2,), id="a partition that is shared"),
        pytest.param((Move(2, (1,)), Move(3, (1,))), (2,), id="one of them is no hotspot"),
        pytest.param(
            (
                Replan(
                    (
                        Partition(4, 0, 0, 2, 1, (1,), (0, 1)),
                        Partition(5, 2, 0, 4, 1, (3,), (2, 3)),
                    )
                ),
            ),
            (0, 2),
            id="a new plan",
        ),
    ],
)
def test_every_relieved_machine_has_a_hotspot(changes: tuple, expected: tuple[int, ...]) -> None:
    assert relieved_machines(PLAN, Rebalance(changes, ""), BUSY, hiding=False) == expected


def test_a_split_relieves_the_owner_and_a_merge_relieves_no_machine() -> None:
    wide = Plan(0, 4, 1, 2, (Partition(0, 0, 0, 4, 1, (1,)),), 1)
    busy = np.array([3.0, 2.0])
    split = Split(0, True, 2, (1, 2), ((1,), (0,)))
    assert relieved_machines(wide, Rebalance((split,), ""), busy, hiding=False) == (1,)
    after = apply_changes(wide, [Split(0, True, 2, (1, 2), ((1,), (1,)))])
    merge = Rebalance((Merge((1, 2), 3, (1,)),), "")
    assert relieved_machines(after, merge, busy, hiding=False) == ()
    assert relieved_machines(after, merge, busy, hiding=True) == ()
    assert relieved_machines(after, NoChange(""), np.array([1.0, 9.0]), hiding=False) == ()


def test_a_hotspot_of_hidden_queries_is_seen_beside_that_of_the_decision() -> None:
    decision = Rebalance((Move(3, (1,)),), "")
    assert relieved_machines(PLAN, decision, BUSY, hiding=True) == (0, 3)
    assert relieved_machines(PLAN, NoChange(""), BUSY, hiding=True) == (0,)
    assert relieved_machines(PLAN, NoChange(""), np.ones(4), hiding=True) == ()
