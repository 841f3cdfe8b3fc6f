"""Lineage: stored points are found under any sequence of plans, and entries expire."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import cells_of, layouts, overlapping, random_change, random_layout
from properties import examples
from roost.balance import Partition, Plan
from roost.balance.changes import Replan, Split, apply_changes, overlap_cells
from roost.window import Lineage

Cell = tuple[int, int]


def next_plan(rng: random.Random, plan: Plan) -> Plan:
    """The next plan: by a list of changes, by a replan, or without parents."""
    kind = rng.choice(["changes", "changes", "changes", "replan", "fresh"])
    layout = random_layout(rng, plan.columns, plan.rows, rng.randrange(8))
    if kind == "fresh":
        fresh = tuple(Partition(n, *sides, (0,)) for n, sides in enumerate(layout))
        first = Plan(0, plan.columns, plan.rows, plan.machines, fresh, len(fresh))
        return first.renumbered(plan.epoch + 1, plan.next_id)
    if kind == "replan":
        new = []
        for number, sides in enumerate(layout, plan.next_id):
            made = Partition(number, *sides, (rng.randrange(plan.machines),))
            parents = [p.partition_id for p in plan.partitions if overlap_cells(p, made)]
            new.append(Partition(number, *sides, made.machines, tuple(parents)))
        return apply_changes(plan, [Replan(tuple(new))])
    for _ in range(10):
        change = random_change(rng, plan)
        if change is not None:
            return apply_changes(plan, [change])
    return apply_changes(plan, [])


def write_points(rng: random.Random, plan: Plan, stored: dict[int, list[Cell]]) -> None:
    """Points of a batch go to the partition that has their cell now."""
    for p in plan.partitions:
        if rng.random() < 0.4:
            stored.setdefault(p.partition_id, []).append(rng.choice(sorted(cells_of(p))))


def random_range(rng: random.Random, plan: Plan) -> tuple[int, int, int, int]:
    columns = sorted(rng.choices(range(plan.columns), k=2))
    rows = sorted(rng.choices(range(plan.rows), k=2))
    return columns[0], rows[0], columns[1], rows[1]


def check(rng: random.Random, lineage: Lineage, plan: Plan, stored: dict[int, list[Cell]]) -> None:
    wanted = random_range(rng, plan)
    column0, row0, column1, row1 = wanted
    asked = {p.partition_id for p in overlapping(plan, *wanted)}
    holding = {
        number
        for number, cells in stored.items()
        if any(column0 <= c <= column1 and row0 <= r <= row1 for c, r in cells)
    }
    for needed in (lineage.needed(asked, stored), lineage.needed(asked, set(stored), wanted)):
        assert holding <= needed <= set(stored)
    present = [p.partition_id for p in plan.partitions]
    assert lineage.needed(present, stored) == set(stored)


@given(layouts(side=6), st.integers(0, 2**32), st.integers(1, 25))
@examples(80)
def test_every_stored_point_is_found_after_any_plan_changes(
    plan: Plan, seed: int, epochs: int
) -> None:
    rng = random.Random(seed)
    lineage = Lineage()
    stored: dict[int, list[Cell]] = {}
    ever: dict[int, Partition] = {}
    for _ in range(epochs):
        lineage = lineage.with_plan(plan)
        ever.update((p.partition_id, p) for p in plan.partitions)
        for _ in range(rng.randrange(3)):
            write_points(rng, plan, stored)
        check(rng, lineage, plan, stored)
        if rng.random() < 0.5:  # points of any partition may expire, in any order
            for number in rng.sample(sorted(stored), rng.randint(0, len(stored))):
                del stored[number]
            lineage = lineage.expire(stored)
            check(rng, lineage, plan, stored)
            present = {p.partition_id for p in plan.partitions}
            idle = set(lineage.known) - present - set(stored)
            assert present | set(stored) <= set(lineage.known)
            # Entries without points are older than the plan and lead to points.
            assert all(lineage.needed([number], stored) for number in idle)
        if rng.random() < 0.3:
            lineage = Lineage.from_json(json.loads(json.dumps(lineage.to_json())))
        plan = next_plan(rng, plan)
    lineage = lineage.expire([])
    assert set(lineage.known) == set(lineage.present)


@given(layouts(side=5), st.integers(0, 2**32))
def test_needed_partitions_overlap_the_query(plan: Plan, seed: int) -> None:
    rng = random.Random(seed)
    lineage = Lineage()
    ever: dict[int, Partition] = {}
    for _ in range(8):
        lineage = lineage.with_plan(plan)
        ever.update((p.partition_id, p) for p in plan.partitions)
        column0, row0, column1, row1 = wanted = random_range(rng, plan)
        box = Partition(-1, column0, row0, column1 + 1, row1 + 1, ())
        asked = [p.partition_id for p in overlapping(plan, *wanted)]
        touching = {number for number, p in ever.items() if overlap_cells(p, box)}
        assert lineage.needed(asked, ever, wanted) == touching
        plan = next_plan(rng, plan)


def halves(epoch: int, number: int, first: int) -> Plan:
    plan = Plan(epoch, 4, 4, 2, (Partition(number, 0, 0, 4, 4, (0,)),), number + 1)
    return apply_changes(plan, [Split(number, True, 2, (first, first + 1), ((0,), (1,)))])


def test_a_chain_is_kept_over_a_parent_without_points() -> None:
    lineage = Lineage().with_plan(Plan(0, 4, 4, 2, (Partition(0, 0, 0, 4, 4, (0,)),), 1))
    plan = halves(0, 0, 1)
    lineage = lineage.with_plan(plan)
    plan = apply_changes(plan, [Split(2, False, 2, (3, 4), ((0,), (1,)))])
    lineage = lineage.with_plan(plan)
    lineage = lineage.expire({0})
    assert lineage.needed([4], {0}) == {0}
    assert set(lineage.known) == {0, 1, 2, 3, 4}
    lineage = lineage.expire({1})
    assert lineage.needed([4], {0, 1}) == set()
    assert set(lineage.known) == {1, 3, 4}


def test_the_same_plan_again_changes_nothing_and_an_older_one_is_refused() -> None:
    first = Plan(0, 4, 4, 2, (Partition(0, 0, 0, 4, 4, (0,)),), 1)
    lineage = Lineage()
    assert lineage.epoch == -1
    lineage = lineage.with_plan(first)
    lineage = lineage.with_plan(halves(0, 0, 1))
    assert lineage.with_plan(halves(0, 0, 1)) == lineage
    with pytest.raises(ValueError, match="plan 0 is older than the present plan 1"):
        lineage.with_plan(first)


def test_a_missing_plan_is_refused() -> None:
    lineage = Lineage().with_plan(Plan(0, 4, 4, 2, (Partition(0, 0, 0, 4, 4, (0,)),), 1))
    with pytest.raises(ValueError, match=r"unknown parents \[9\]"):
        lineage.with_plan(halves(5, 9, 10))
