"""Plan changes: application, parents in the previous plan, validation, partitions to load."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import cells_of, layouts, random_change, random_layout
from properties import examples
from roost.balance import Partition, Plan
from roost.balance.changes import (
    Change,
    Merge,
    Move,
    Replan,
    Split,
    apply_changes,
    arrivals,
    change_to_json,
    overlap_cells,
)

# 0 0 1
# 0 0 2
PLAN = Plan(
    4,
    3,
    2,
    3,
    (
        Partition(0, 0, 0, 2, 2, (0,)),
        Partition(1, 2, 0, 3, 1, (1,)),
        Partition(2, 2, 1, 3, 2, (1,)),
    ),
    7,
)


@given(layouts(side=6), st.integers(0, 2**32), st.integers(0, 12))
@examples(150)
def test_a_list_of_changes_equals_single_changes_with_parents_in_the_previous_plan(
    plan: Plan, seed: int, count: int
) -> None:
    rng = random.Random(seed)
    changes, stepwise = [], plan
    for _ in range(count):
        change = random_change(rng, stepwise)
        if change is not None:
            changes.append(change)
            stepwise = apply_changes(stepwise, [change])
            stepwise.check_invariants()
    after = apply_changes(plan, changes)
    after.check_invariants()
    assert after.epoch == plan.epoch + 1
    assert after.next_id == stepwise.next_id

    def shape(p: Partition) -> Partition:
        return replace(p, parents=())

    assert set(map(shape, after.partitions)) == set(map(shape, stepwise.partitions))
    old = {p.partition_id: p for p in plan.partitions}
    for p in after.partitions:
        if p.partition_id in old:
            assert p.parents == old[p.partition_id].parents
        else:
            under = {n for n, q in old.items() if cells_of(q) & cells_of(p)}
            assert set(p.parents) == under
            assert len(p.parents) == len(under)


@given(layouts(side=6), st.integers(0, 2**32), st.integers(0, 6))
@examples(100)
def test_a_machine_loads_exactly_the_partitions_it_did_not_fully_own(
    plan: Plan, seed: int, count: int
) -> None:
    rng = random.Random(seed)
    after = plan
    for _ in range(count):
        change = random_change(rng, after)
        after = after if change is None else apply_changes(after, [change])
    held: dict[int, set] = {machine: set() for machine in range(plan.machines)}
    for p in plan.partitions:
        for machine in p.machines:
            held[machine] |= cells_of(p)
    expected: dict[int, set] = {}
    for p in after.partitions:
        for machine in p.machines:
            if not cells_of(p) <= held[machine]:
                expected.setdefault(machine, set()).add(p.partition_id)
    assert {m: set(ids) for m, ids in arrivals(plan, after).items()} == expected


@given(layouts(side=6), st.integers(0, 2**32))
@examples(100)
def test_a_replan_is_adopted_unchanged(plan: Plan, seed: int) -> None:
    rng = random.Random(seed)
    shapes = {(p.column0, p.row0, p.column1, p.row1): p for p in plan.partitions}
    partitions = []
    for number, sides in enumerate(random_layout(rng, plan.columns, plan.rows, 12), plan.next_id):
        new = Partition(number, *sides, (rng.randrange(plan.machines),))
        under = [q.partition_id for q in plan.partitions if cells_of(q) & cells_of(new)]
        partitions.append(shapes.get(sides, replace(new, parents=tuple(under))))
    after = apply_changes(plan, [Replan(tuple(partitions))])
    after.check_invariants()
    assert after.partitions == tuple(partitions)
    assert after.epoch == plan.epoch + 1
    assert after.next_id >= plan.next_id


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (Move(9, (0,)), "no partition 9"),
        (Move(0, ()), "no such machines"),
        (Move(0, (1, 1)), "no such machines"),
        (Move(0, (3,)), "no such machines"),
        (Split(0, True, 0, (7, 8), ((0,), (1,))), "does not divide"),
        (Split(0, False, 2, (7, 8), ((0,), (1,))), "does not divide"),
        (Split(0, True, 1, (6, 8), ((0,), (1,))), "used before"),
        (Split(0, True, 1, (7, 7), ((0,), (1,))), "used before"),
        (Split(0, True, 1, (7, 8), ((0,), ())), "no such machines"),
        (Split(5, True, 1, (7, 8), ((0,), (1,))), "no partition 5"),
        (Merge((1,), 7, (1,)), "two or more"),
        (Merge((1, 1), 7, (1,)), "two or more"),
        (Merge((0, 1), 7, (1,)), "different owners"),
        (Merge((1, 2), 6, (1,)), "used before"),
        (Merge((1, 2), 7, (-1,)), "no such machines"),
        (Merge((1, 6), 7, (1,)), "no partition 6"),
    ],
)
def test_invalid_changes_are_refused(change: Change, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        apply_changes(PLAN, [change])


def test_a_union_must_be_a_rectangle() -> None:
    one_owner = apply_changes(PLAN, [Move(0, (1,))])
    with pytest.raises(ValueError, match="not form a rectangle"):
        apply_changes(one_owner, [Merge((0, 1), 7, (1,))])
    assert len(apply_changes(one_owner, [Merge((0, 1, 2), 7, (1,))]).partitions) == 1


def test_a_change_cannot_be_applied_twice() -> None:
    split = Split(0, True, 1, (7, 8), ((0,), (2,)))
    after = apply_changes(PLAN, [split])
    with pytest.raises(ValueError, match="no partition 0"):
        apply_changes(after, [split])
    with pytest.raises(ValueError, match="no partition 0"):
        apply_changes(PLAN, [split, Move(0, (1,))])


WHOLE = Partition(7, 0, 0, 3, 2, (0,), (0, 1, 2))


@pytest.mark.parametrize(
    ("partitions", "fault"),
    [
        ((), "no partition"),
        ((replace(WHOLE, column1=2, parents=(0,)),), "a cell is in no partition"),
        ((WHOLE, PLAN.partitions[1]), "a cell is in no partition or in two"),
        ((replace(WHOLE, row1=3),), "not made from"),
        ((replace(WHOLE, parents=(0, 1)),), "not made from"),
        ((replace(WHOLE, column1=2, parents=(0, 1)),), "not made from"),
        ((replace(WHOLE, parents=(0, 1, 2, 6)),), "unknown parents"),
        ((replace(WHOLE, parents=(0, 0, 1, 2)),), "unknown parents"),
        ((replace(WHOLE, partition_id=6),), "used before"),
        ((replace(WHOLE, partition_id=0),), "without a new id"),
        ((replace(WHOLE, machines=()),), "no such machines"),
        ((WHOLE, WHOLE), "id occurs twice"),
    ],
)
def test_an_invalid_replan_is_refused(partitions: tuple[Partition, ...], fault: str) -> None:
    assert apply_changes(PLAN, [Replan((WHOLE,))]).next_id == 8
    with pytest.raises(ValueError, match=fault):
        apply_changes(PLAN, [Replan(partitions)])


@pytest.mark.parametrize("sides", [(3, 0, 4, 2), (0, 2, 3, 3), (1, 0, 1, 2), (0, 1, 3, 1)], ids=str)
def test_a_kept_partition_outside_the_grid_or_without_cells_is_refused(
    sides: tuple[int, int, int, int],
) -> None:
    outside = Plan(0, 3, 2, 3, (*PLAN.partitions, Partition(3, *sides, (0,))), 7)
    with pytest.raises(ValueError, match="outside the grid"):
        apply_changes(outside, [Replan(outside.partitions)])


def test_a_replan_must_be_the_only_change() -> None:
    for changes in ([Move(0, (1,)), Replan((WHOLE,))], [Replan((WHOLE,)), Move(7, (1,))]):
        with pytest.raises(ValueError, match="alone"):
            apply_changes(PLAN, changes)


def test_a_machine_with_the_queries_loads_nothing() -> None:
    shared = apply_changes(PLAN, [Move(0, (0, 2))])
    assert arrivals(PLAN, shared) == {2: (0,)}
    assert arrivals(shared, apply_changes(shared, [Move(0, (2,))])) == {}
    assert arrivals(PLAN, apply_changes(PLAN, [Merge((1, 2), 7, (1, 0))])) == {0: (7,)}


def test_changes_are_stored_as_json() -> None:
    split = Split(0, True, 1, (7, 8), ((0,), (1, 2)))
    changes = [Move(3, (1, 2)), split, Merge((1, 2), 7, (1,)), Replan((WHOLE,))]
    whole = [WHOLE.partition_id, 0, 0, WHOLE.column1, WHOLE.row1]
    assert json.loads(json.dumps([change_to_json(change) for change in changes])) == [
        {"kind": "move", "partition_id": 3, "machines": [1, 2]},
        {
            "kind": "split",
            "partition_id": 0,
            "vertical": True,
            "at": 1,
            "ids": [7, 8],
            "machines": [[0], [1, 2]],
        },
        {"kind": "merge", "partition_ids": [1, 2], "new_id": 7, "machines": [1]},
        {"kind": "replan", "partitions": [[*whole, list(WHOLE.machines), list(WHOLE.parents)]]},
    ]


def test_overlap_is_counted_in_cells() -> None:
    a, b = Partition(0, 0, 0, 4, 3, ()), Partition(1, 2, 1, 9, 9, ())
    assert overlap_cells(a, b) == len(cells_of(a) & cells_of(b)) == 4
    assert overlap_cells(a, Partition(2, 5, 5, 6, 6, ())) == 0
