"""Points and queries by cell, compared with counting them one by one."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.model.space import Grid, Rect
from roost.workload import CellCounter, CellCounts, query_ranges


def as_dict(counts: CellCounts) -> dict[int, int]:
    assert counts.cells.dtype == np.int32
    assert counts.counts.dtype == np.int64
    assert (np.diff(counts.cells) > 0).all()
    assert (counts.counts > 0).all()
    return dict(zip(counts.cells.tolist(), counts.counts.tolist(), strict=True))


@given(st.integers(1, 700), st.data())
def test_take_returns_the_counts_since_the_last_call(size, data) -> None:
    counter = CellCounter(size)
    cell = st.integers(0, size - 1)
    for batches in data.draw(st.lists(st.lists(st.lists(cell, max_size=40), max_size=3))):
        for batch in batches:
            counter.add(np.array(batch, np.int32))
        assert as_dict(counter.take()) == dict(Counter(chain.from_iterable(batches)))


@pytest.mark.parametrize("cell", [-1, 10, 2**31 - 1])
def test_a_cell_outside_the_grid_is_refused_without_side_effects(cell) -> None:
    counter = CellCounter(10)
    with pytest.raises(IndexError, match="outside the grid"):
        counter.add(np.array([3, cell, 4], np.int32))
    assert as_dict(counter.take()) == {3: 1}
    assert as_dict(counter.take()) == {}


tables = st.lists(st.dictionaries(st.integers(0, 30), st.integers(1, 9)), max_size=4)


@given(tables)
def test_joined_counts_are_sums(parts) -> None:
    counted = [
        CellCounts(
            np.array(sorted(part), np.int32), np.array([part[c] for c in sorted(part)], np.int64)
        )
        for part in parts
    ]
    joined = CellCounts.joined(counted)
    expected = sum((Counter(part) for part in parts), Counter())
    assert as_dict(joined) == dict(expected)
    assert joined.points == sum(expected.values())
    assert joined.dense(31).tolist() == [expected[cell] for cell in range(31)]


def test_ranges_are_the_cells_of_the_corners() -> None:
    grid = Grid(Rect(0.0, 0.0, 8.0, 4.0), 8, 4)
    boxes = np.array([[-5.0, 1.0, 2.0, 3.5], [7.9, 3.9, 50.0, 50.0], [3.0, 0.5, 3.0, 0.5]])
    assert query_ranges(grid, boxes).tolist() == [[0, 1, 2, 3], [7, 3, 7, 3], [3, 0, 3, 0]]
    assert query_ranges(grid, np.empty((0, 4))).shape == (0, 4)
