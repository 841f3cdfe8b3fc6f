"""Reference model of TrioStat: a stream over one partition, stored as lists."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from roost.workload import CellCounts, PartitionStats, Trio

GRID = 8

Rect = tuple[int, int, int, int]  # half-open, or a query's inclusive range
Cell = tuple[int, int]


def _ordered(low: int, high: int):
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)


def _rect(values) -> Rect:
    (c0, c1), (r0, r1) = values
    return c0, r0, c1 + 1, r1 + 1


partitions = st.tuples(_ordered(0, GRID - 1), _ordered(0, GRID - 1)).map(_rect)
point = st.tuples(st.integers(0, GRID - 1), st.integers(0, GRID - 1))
# Ranges reach beyond the partition, and some miss it.
query = st.tuples(_ordered(0, GRID - 1), _ordered(0, GRID - 1)).map(
    lambda v: (v[0][0], v[1][0], v[0][1], v[1][1])
)
points = st.lists(point, max_size=25)
queries = st.lists(query, max_size=10)


@st.composite
def ranges_on(draw, columns: int, rows: int, reach: int = 3):
    """Ranges of cells, some of them partly or wholly beyond the grid."""
    across, up = st.integers(-reach, columns + reach), st.integers(-reach, rows + reach)
    corners = draw(st.lists(st.tuples(across, up, across, up), max_size=12))
    drawn = [(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in corners]
    return np.array(drawn, np.int32).reshape(-1, 4)


def as_ranges(queries: list[Rect]) -> np.ndarray:
    return np.array(queries, np.int32).reshape(-1, 4)


def cells_of(points: list[Cell]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(points, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def add_points(stats: PartitionStats, columns: np.ndarray, rows: np.ndarray) -> None:
    """Collect points of a partition by definition, without counting them by cell."""
    stats.columns.n_new[:] += np.bincount(columns - stats.column0, minlength=stats.columns.size)
    stats.rows.n_new[:] += np.bincount(rows - stats.row0, minlength=stats.rows.size)


def expire_points(stats: PartitionStats, columns: np.ndarray, rows: np.ndarray) -> None:
    """Subtract points that left the window from N by definition."""
    by_column = np.bincount(columns - stats.column0, minlength=stats.columns.size)
    stats.columns.n[:] -= np.cumsum(by_column)
    stats.rows.n[:] -= np.cumsum(np.bincount(rows - stats.row0, minlength=stats.rows.size))


def holds(rect: Rect, point: Cell) -> bool:
    c0, r0, c1, r1 = rect
    return c0 <= point[0] < c1 and r0 <= point[1] < r1


def overlaps(rect: Rect, query: Rect) -> bool:
    c0, r0, c1, r1 = rect
    return query[0] < c1 and query[2] >= c0 and query[1] < r1 and query[3] >= r0


class Stream:
    """Points and queries of one partition over time."""

    def __init__(self, rect: Rect, fade: float) -> None:
        self.rect = rect
        self.fade = fade
        self.points: list[tuple[Cell, float]] = []
        self.new_points: list[Cell] = []
        self.gone_early: list[Cell] = []
        self.queries: list[Rect] = []
        self.new_queries: list[Rect] = []
        self.received: list[Cell] = []
        self.queries_received: list[Rect] = []

    def inside(self, points: list[Cell]) -> list[Cell]:
        return [point for point in points if holds(self.rect, point)]

    def counts(self, points: list[Cell]) -> CellCounts:
        """Count points by cell of a grid of GRID columns, in any partition."""
        numbers = np.array([row * GRID + column for column, row in points], np.int32)
        cells, counts = np.unique(numbers, return_counts=True)
        return CellCounts(cells.astype(np.int32), counts.astype(np.int64))

    def receive(self, points: list[Cell]) -> None:
        self.new_points += self.inside(points)

    def expire(self, count: int) -> list[Cell]:
        """Expire the oldest points, which may be of the open round."""
        old = [point for point, _ in self.points[:count]]
        early = self.new_points[: count - len(old)]
        self.points = self.points[len(old) :]
        self.new_points = self.new_points[len(early) :]
        self.gone_early += early
        return old + early

    def begin(self, queries: list[Rect]) -> None:
        self.queries = self.queries + queries
        self.new_queries += queries

    def end(self, count: int) -> list[Rect]:
        gone, self.queries = self.queries[:count], self.queries[count:]
        return gone

    def replace(self, queries: list[Rect]) -> None:
        self.queries = list(queries)

    def close(self) -> None:
        self.points = [(point, weight * self.fade) for point, weight in self.points]
        self.points += [(point, 1.0) for point in self.new_points]
        # Points that expired within their own round were received, too.
        self.received = self.new_points + self.gone_early
        self.gone_early = []
        self.new_points = []
        self.queries_received, self.new_queries = self.new_queries, []

    def queries_in(self, rect: Rect) -> int:
        return sum(overlaps(rect, query) for query in self.queries)

    def trio(self, rect: Rect) -> Trio:
        n = sum(weight for point, weight in self.points if holds(rect, point))
        q = self.queries_in(rect)
        r = sum(holds(rect, point) for point in self.received)
        r += sum(overlaps(rect, query) for query in self.queries_received)
        return Trio(n, q, r)

    def compare(self, stats: PartitionStats) -> None:
        """Compare every split, and the whole."""
        assert stats.total() == self.trio(stats.bounds)
        for vertical in (True, False):
            for at in cuts(stats.bounds, vertical):
                sides = halves(stats.bounds, vertical, at)
                assert stats.split(vertical, at) == tuple(self.trio(side) for side in sides)


def cuts(rect: Rect, vertical: bool) -> range:
    low, high = (rect[0], rect[2]) if vertical else (rect[1], rect[3])
    return range(low + 1, high)


def halves(rect: Rect, vertical: bool, at: int) -> tuple[Rect, Rect]:
    c0, r0, c1, r1 = rect
    if vertical:
        return (c0, r0, at, r1), (at, r0, c1, r1)
    return (c0, r0, c1, at), (c0, at, c1, r1)
