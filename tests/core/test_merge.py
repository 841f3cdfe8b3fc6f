"""Merging of adjacent partitions of one machine, until no rectangle remains."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given

from layouts import cells_of, layouts
from properties import examples
from roost.balance import Partition, Plan
from roost.balance.changes import Merge, apply_changes, arrivals
from roost.balance.merge import adjacent_merges


def fills_a_rectangle(parts: tuple[Partition, ...]) -> bool:
    cells = set().union(*(cells_of(p) for p in parts))
    columns, rows = {c for c, _ in cells}, {r for _, r in cells}
    wide = max(columns) - min(columns) + 1
    return len(cells) == wide * (max(rows) - min(rows) + 1)


@given(layouts(side=6, machines=2))
@examples(200)
def test_merging_is_complete_and_moves_no_query(plan: Plan) -> None:
    merges = adjacent_merges(plan)
    after = apply_changes(plan, merges)
    after.check_invariants()
    assert arrivals(plan, after) == {}
    owners = {p.partition_id: p.machines for p in plan.partitions}
    for merge in merges:
        assert {owners[number] for number in merge.partition_ids} == {merge.machines}
    for machine in range(plan.machines):
        own = [p for p in after.partitions if p.machines == (machine,)]
        for size in range(2, min(len(own), 7) + 1):
            if len(own) <= 12:
                assert not any(map(fills_a_rectangle, combinations(own, size)))
    assert adjacent_merges(after) == ()


def test_a_row_and_a_column_become_one_merge() -> None:
    quarters = [(0, 0, 1, 1), (1, 0, 2, 1), (0, 1, 1, 2), (1, 1, 2, 2)]
    partitions = tuple(Partition(n, *sides, (0,)) for n, sides in enumerate(quarters))
    plan = Plan(0, 2, 2, 1, partitions, 4)
    assert adjacent_merges(plan) == (Merge((0, 1, 2, 3), 4, (0,)),)


def test_five_around_a_centre_are_a_rectangle_although_no_two_are() -> None:
    sides = [(0, 0, 2, 1), (2, 0, 3, 2), (1, 2, 3, 3), (0, 1, 1, 3), (1, 1, 2, 2)]
    partitions = tuple(Partition(n, *s, (1,)) for n, s in enumerate(sides))
    plan = Plan(0, 3, 3, 2, partitions, 9)
    plan.check_invariants()
    assert adjacent_merges(plan) == (Merge((0, 1, 2, 3, 4), 9, (1,)),)
    hole = (*partitions[:4], replace(partitions[4], machines=(0,)))
    assert adjacent_merges(replace(plan, partitions=hole)) == ()


def test_a_rectangle_of_five_does_not_undo_merges_beside_it() -> None:
    wheel = [(0, 0, 2, 1), (2, 0, 3, 2), (1, 2, 3, 3), (0, 1, 1, 3), (1, 1, 2, 2)]
    sides = [*wheel, (3, 0, 4, 1), (4, 0, 5, 1)]
    partitions = [Partition(n, *s, (1,)) for n, s in enumerate(sides)]
    partitions.append(Partition(7, 3, 1, 5, 3, (0,)))
    plan = Plan(0, 5, 3, 2, tuple(partitions), 8)
    plan.check_invariants()
    assert adjacent_merges(plan) == (Merge((5, 6), 8, (1,)), Merge((0, 1, 2, 3, 4), 9, (1,)))


def test_shared_partitions_are_not_merged() -> None:
    halves = (Partition(0, 0, 0, 1, 1, (0, 1)), Partition(1, 1, 0, 2, 1, (0, 1)))
    assert adjacent_merges(Plan(0, 2, 1, 2, halves, 2)) == ()


def test_partitions_with_a_partly_common_side_are_not_merged() -> None:
    parts = (
        Partition(0, 0, 0, 1, 2, (0,)),
        Partition(1, 1, 0, 2, 1, (0,)),
        Partition(2, 1, 1, 2, 2, (1,)),
    )
    assert adjacent_merges(Plan(0, 2, 2, 2, parts, 3)) == ()
