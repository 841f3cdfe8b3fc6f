"""Euler histogram, compared with brute force over queries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trio_model import ranges_on

from roost.workload import EulerHistogram

sides = st.integers(1, 6)


def rectangles(columns: int, rows: int) -> np.ndarray:
    """Every half-open rectangle of a grid, those without cells included."""
    found = [
        (c0, r0, c1, r1)
        for c0 in range(columns + 1)
        for c1 in range(c0, columns + 1)
        for r0 in range(rows + 1)
        for r1 in range(r0, rows + 1)
    ]
    return np.array(found)


def brute(rect: list[int], ranges: np.ndarray, columns: int, rows: int) -> int:
    c0, r0, c1, r1 = rect
    return sum(
        max(a, c0) <= min(c, c1 - 1, columns - 1) and max(b, r0) <= min(d, r1 - 1, rows - 1)
        for a, b, c, d in ranges.tolist()
    )


@given(sides, sides, st.data())
def test_the_histogram_counts_every_rectangle_exactly(columns, rows, data) -> None:
    first, second = data.draw(ranges_on(columns, rows)), data.draw(ranges_on(columns, rows))
    rects = rectangles(columns, rows)
    histogram = EulerHistogram(columns, rows)
    live = np.empty((0, 4), np.int32)
    for ranges, sign in ((first, 1), (second, 1), (first, -1)):
        histogram.add(ranges, sign)
        live = np.concatenate([live, ranges]) if sign > 0 else second
        expected = [brute(rect, live, columns, rows) for rect in rects.tolist()]
        assert histogram.count_many(rects).tolist() == expected
        assert [histogram.count(*rect) for rect in rects.tolist()] == expected
        for row, column in np.ndindex(rows, columns):
            cell = [column, row, column + 1, row + 1]
            assert histogram.per_cell()[row, column] == brute(cell, live, columns, rows)


def test_an_empty_histogram_counts_zero() -> None:
    histogram = EulerHistogram(3, 2)
    assert histogram.count(0, 0, 3, 2) == 0
    assert histogram.count_many(np.empty((0, 4), np.int64)).tolist() == []
    assert histogram.per_cell().tolist() == [[0.0] * 3] * 2
