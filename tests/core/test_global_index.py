"""The global index equals brute force; the papers' search misses partitions."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import cells_of, layouts, overlapping
from properties import examples
from roost.balance import Partition, Plan
from roost.balance.changes import Split, apply_changes
from roost.balance.global_index import GlobalIndex


@st.composite
def ranges(draw: st.DrawFn, plan: Plan) -> tuple[int, int, int, int]:
    """Draw an inclusive range of cells."""
    columns = sorted(draw(st.tuples(*[st.integers(0, plan.columns - 1)] * 2)))
    rows = sorted(draw(st.tuples(*[st.integers(0, plan.rows - 1)] * 2)))
    return columns[0], rows[0], columns[1], rows[1]


def brute(plan: Plan, cells: tuple[int, int, int, int]) -> set[int]:
    column0, row0, column1, row1 = cells
    ranges = {(c, r) for c in range(column0, column1 + 1) for r in range(row0, row1 + 1)}
    return {p.partition_id for p in plan.partitions if cells_of(p) & ranges}


def papers_search(index: GlobalIndex, cells: tuple[int, int, int, int]) -> set[int]:
    """Search as the papers' ``queryOverlap`` does."""
    column0, row0, column1, row1 = cells
    check, result = [(column0, row0)], set()
    while check:
        column, row = check.pop()
        if column > column1 or row > row1:
            continue
        p = index.partition_at(column, row)
        if p.partition_id not in result:
            check.append((p.column1, row))
            check.append((column, p.row1))
            result.add(p.partition_id)
    return result


@given(st.data(), layouts())
@examples(300)
def test_queries_find_every_partition_once(data: st.DataObject, plan: Plan) -> None:
    index = GlobalIndex(plan)
    cells = data.draw(ranges(plan))
    found = [p.partition_id for p in index.query_overlap(*cells)]
    assert len(found) == len(set(found))
    assert set(found) == brute(plan, cells)
    assert set(found) == {p.partition_id for p in overlapping(plan, *cells)}


@given(layouts())
@examples(60)
def test_the_partition_of_every_cell_is_found(plan: Plan) -> None:
    index = GlobalIndex(plan)
    for p in plan.partitions:
        assert all(index.partition_at(*cell) is p for cell in cells_of(p))


@given(layouts(), st.integers(0, 2**32))
@examples(60)
def test_many_queries_at_once(plan: Plan, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sides = (plan.columns, plan.rows)
    two = np.stack([rng.integers(0, sides, (50, 2)), rng.integers(0, sides, (50, 2))])
    ranges = np.concatenate([two.min(0), two.max(0)], axis=1).astype(np.int32)
    queries, numbers = GlobalIndex(plan).overlaps_many(ranges)
    assert bool(np.all(np.diff(queries) >= 0))
    pairs = list(zip(queries.tolist(), numbers.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    found = {(query, plan.partitions[number].partition_id) for query, number in pairs}
    assert found == {(q, n) for q in range(50) for n in brute(plan, tuple(ranges[q].tolist()))}


MIDDLE = Plan(
    0,
    3,
    2,
    1,
    tuple(
        Partition(number, *sides, (0,))
        for number, sides in enumerate(
            [(0, 0, 1, 1), (1, 0, 2, 2), (2, 0, 3, 1), (0, 1, 1, 2), (2, 1, 3, 2)]
        )
    ),
    5,
)


def test_the_papers_search_misses_a_partition_beside_a_high_one() -> None:
    # 0 1 2    From 0, the stack leads over 3 to 1 in the second row and on to 4. In the first
    # 3 1 4    row 1 is then known already, so the search does not continue to its right.
    index = GlobalIndex(MIDDLE)
    everything = (0, 0, 2, 1)
    assert papers_search(index, everything) == {0, 1, 3, 4}
    assert {p.partition_id for p in index.query_overlap(*everything)} == {0, 1, 2, 3, 4}


def test_no_smaller_layout_shows_the_miss() -> None:
    rng = random.Random(0)
    for columns, rows in ((2, 2), (2, 3), (3, 1)):
        for _ in range(300):
            plan = _random_plan(rng, columns, rows)
            index = GlobalIndex(plan)
            whole = (0, 0, columns - 1, rows - 1)
            assert papers_search(index, whole) == brute(plan, whole)


def _random_plan(rng: random.Random, columns: int, rows: int) -> Plan:
    plan = Plan(0, columns, rows, 1, (Partition(0, 0, 0, columns, rows, (0,)),), 1)
    for _ in range(rng.randrange(6)):
        p = rng.choice(plan.partitions)
        vertical = rng.random() < 0.5
        low, high = (p.column0, p.column1) if vertical else (p.row0, p.row1)
        if high - low > 1:
            ids = (plan.next_id, plan.next_id + 1)
            cut = Split(p.partition_id, vertical, rng.randrange(low + 1, high), ids, ((0,), (0,)))
            plan = apply_changes(plan, [cut])
    return plan


def test_few_cells_are_visited() -> None:
    side = 1000
    halves = (Partition(0, 0, 0, 500, side, (0,)), Partition(1, 500, 0, side, side, (0,)))
    index = GlobalIndex(Plan(0, side, side, 1, halves, 2))
    # Had it to visit each of a million cells for each of these, it would not end in the test.
    ranges = np.tile(np.array([[0, 0, side - 1, side - 1]], np.int32), (200_000, 1))
    queries, numbers = index.overlaps_many(ranges)
    assert queries.size == 400_000
    assert numbers.sum() == 200_000


def test_no_queries_overlap_nothing() -> None:
    queries, numbers = GlobalIndex(MIDDLE).overlaps_many(np.empty((0, 4), np.int32))
    assert queries.size == numbers.size == 0


@pytest.mark.parametrize("cells", [(-1, 0, 0, 0), (0, 0, 3, 0), (0, 0, 0, 2), (2, 0, 1, 0)])
def test_ranges_beyond_the_grid_fail_an_assertion(cells: tuple[int, int, int, int]) -> None:
    with pytest.raises(AssertionError, match="outside the grid"):
        GlobalIndex(MIDDLE).query_overlap(*cells)
