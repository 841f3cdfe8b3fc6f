"""TrioStat: statistics of a partition that give its cost and the cost of both sides of any cut.

The cost of a partition is ``N * Q * R / R(S)``: the points it has seen, the queries over it, and
its share of the objects received in the last round. A partition stores ten numbers per row and
column, so the cost of both sides of any straight cut takes constant time, and only two sums leave
the machine. *Collectors* count the open round; one pass at its end adds them up.

A query is counted where it starts (``Q``) and separately in each further row or column that it
spans (``span``), after clipping to the partition. So both sides of a cut are exact: a query across
the cut is counted once on each side.

Choices that the papers leave open: terminated queries have collectors of their own, for the same
rows and columns. They leave ``Q`` and ``span`` at the end of the round and do not change ``R``:
``R`` is what was received, and a termination does not undo that. Nor does the expiry of a point,
which leaves ``N`` when it leaves the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.workload.cells import CellCounts
from roost.workload.loops import (
    LINES,
    N_NEW,
    PRE_SPAN,
    Q_GONE,
    Q_NEW,
    SPAN,
    SPAN_GONE,
    SPAN_NEW,
    N,
    Q,
    R,
    axis_overlap,
    change_ranges,
    close_partition,
    collect_cells,
    count_ranges,
)

Numbers = NDArray[np.float64]
Ranges = NDArray[np.int32]
HEADER = 5


@dataclass(frozen=True, slots=True)
class Trio:
    """The three terms of a cost: points, queries, objects received in the last round."""

    n: float
    q: float
    r: float

    @property
    def numerator(self) -> float:
        """Cost before the division by R(S)."""
        return self.n * self.q * self.r


class AxisStats:
    """The ten numbers of each row, or of each column, of a partition: views of ``numbers``.

    Cumulative over the rows are ``n`` (points), ``q`` (queries, counted where they start) and ``r``
    (points and queries received in the last round). ``span`` and ``pre_span`` count queries that
    span the border to the previous row: all, and those received in the last round. The others are
    collectors of the open round.
    """

    def __init__(self, numbers: Numbers) -> None:
        assert numbers.shape[0] == LINES
        self.numbers = numbers
        self.size = int(numbers.shape[1])
        self.n, self.q, self.r, self.span, self.pre_span = numbers[:N_NEW]
        self.n_new, self.q_new, self.span_new, self.q_gone, self.span_gone = numbers[N_NEW:]

    def split(self, at: int) -> tuple[Trio, Trio]:
        """Return the terms of both sides of a cut before line ``at``."""
        assert 0 < at < self.size, "one side of the cut is empty"
        n, q, r = self.numbers[: R + 1, at - 1].tolist()
        n_all, q_all, r_all = self.numbers[: R + 1, -1].tolist()
        q_rest = q_all - q + float(self.span[at])
        r_rest = r_all - r + float(self.pre_span[at])
        return _trio(n, q, r), _trio(n_all - n, q_rest, r_rest)

    def total(self) -> Trio:
        """Return the terms of all lines together."""
        return _trio(*self.numbers[: R + 1, -1].tolist())


def _trio(n: float, q: float, r: float) -> Trio:
    return Trio(max(n, 0.0), max(q, 0.0), max(r, 0.0))


def _starts(cumulative: Numbers) -> Numbers:
    """Invert a cumulative sum."""
    return np.diff(cumulative, prepend=0.0)


def _cut_along(whole: Numbers, first: Numbers, second: Numbers) -> None:
    """Divide the axis that is cut, exactly.

    Queries that span the cut start at the cut in the second part.
    """
    at = first.shape[1]
    first[:] = whole[:, :at]
    second[:] = whole[:, at:]
    second[N] -= whole[N, at - 1]
    second[Q] += whole[SPAN, at] - whole[Q, at - 1]
    second[R] += whole[PRE_SPAN, at] - whole[R, at - 1]
    second[Q_NEW, 0] += whole[SPAN_NEW, at]
    second[Q_GONE, 0] += whole[SPAN_GONE, at]
    second[[SPAN, PRE_SPAN, SPAN_NEW, SPAN_GONE], 0] = 0.0


def _cut_across(whole: Numbers, along: Numbers, across: Numbers) -> None:
    """Assign a part its share of the other axis, by the part's totals along the cut axis."""
    for line, span in ((N, None), (Q, SPAN), (R, PRE_SPAN)):
        share = _share(_starts(whole[line]), float(along[line, -1]), across[line])
        np.cumsum(across[line], out=across[line])
        if span is not None:
            across[span] = whole[span] * share
    for line, span in ((N_NEW, None), (Q_NEW, SPAN_NEW), (Q_GONE, SPAN_GONE)):
        share = _share(whole[line], float(along[line].sum()), across[line])
        if span is not None:
            across[span] = whole[span] * share


def _share(values: Numbers, total: float, out: Numbers) -> float:
    """Scale values to a total; distribute it evenly if they give no proportion."""
    everything = float(values.sum())
    share = total / everything if everything else -1.0
    if not 0.0 <= share <= 1.0:
        # Corrections of both signs cancel out, so the sum gives no proportion.
        out[:] = total / values.size
        return 0.0
    out[:] = values * share
    return share


class PartitionStats:
    """Statistics of one partition, a half-open rectangle of cells.

    They start without points, with the queries of ``ranges`` as if registered in earlier rounds.

    Examples
    --------
    >>> stats = PartitionStats(0, 0, 0, 4, 2)
    >>> stats.add_cells(CellCounts(np.array([0, 7], np.int32), np.array([1, 1])), 4)
    >>> stats.add_queries(np.array([[1, 0, 9, 0]], np.int32))
    >>> stats.close_round()
    >>> stats.split(vertical=True, at=2)
    (Trio(n=1.0, q=1.0, r=2.0), Trio(n=1.0, q=1.0, r=2.0))
    """

    def __init__(
        self,
        partition_id: int,
        column0: int,
        row0: int,
        column1: int,
        row1: int,
        ranges: Ranges | None = None,
    ) -> None:
        assert column0 < column1 and row0 < row1, "the partition has no cells"
        width, height = column1 - column0, row1 - row0
        self.partition_id = partition_id
        self.column0, self.row0, self.column1, self.row1 = column0, row0, column1, row1
        flat = np.zeros(HEADER + LINES * (width + height))
        flat[:HEADER] = (partition_id, column0, row0, column1, row1)
        self._adopt(flat)
        if ranges is not None:
            self._recount(ranges, (self.rows, self.columns))

    def _adopt(self, flat: Numbers) -> None:
        """Use an array for all numbers; the rows and columns are views of it."""
        cut = LINES * (self.row1 - self.row0)
        self._flat, self._numbers = flat, flat[HEADER:]
        self.rows = AxisStats(self._numbers[:cut].reshape(LINES, -1))
        self.columns = AxisStats(self._numbers[cut:].reshape(LINES, -1))

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """The half-open rectangle ``column0, row0, column1, row1``."""
        return self.column0, self.row0, self.column1, self.row1

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes."""
        return int(self._flat.nbytes)

    def add_cells(self, counts: CellCounts, grid_columns: int) -> None:
        """Collect points counted by cell; cells of other partitions are ignored."""
        axes = (self.rows.numbers, self.columns.numbers)
        collect_cells(counts.cells, counts.counts, grid_columns, self.bounds, *axes)

    def expire_cells(self, counts: CellCounts, grid_columns: int) -> None:
        """Subtract points that left the window from N; cells of other partitions are ignored.

        Points of the open round may be subtracted: N is right once the round is closed.
        """
        column, row = counts.cells % grid_columns, counts.cells // grid_columns
        mine = (self.column0 <= column) & (column < self.column1)
        mine &= (self.row0 <= row) & (row < self.row1)
        gone = counts.counts[mine]
        for axis, lines in ((self.columns, column - self.column0), (self.rows, row - self.row0)):
            axis.n[:] -= np.cumsum(np.bincount(lines[mine], gone, axis.size))

    def add_queries(self, ranges: Ranges) -> None:
        """Collect received queries by their inclusive cell ranges, clipped to the partition."""
        self._collect(Q_NEW, ranges)

    def end_queries(self, ranges: Ranges) -> None:
        """Collect terminated queries, clipped to the partition."""
        self._collect(Q_GONE, ranges)

    def _collect(self, line: int, ranges: Ranges, sign: float = 1.0) -> None:
        if len(ranges):
            lines = (self.rows.numbers[line:], self.columns.numbers[line:])
            count_ranges(ranges, sign, self.bounds, *lines)

    def change_queries(self, left: Ranges, came: Ranges, received: NDArray[np.bool_]) -> None:
        """Collect a difference of two sets of queries; only those received count in R.

        A query that left and came, because it is in another file now, has not changed.
        """
        change_ranges(left, came, received, self.bounds, self.rows.numbers, self.columns.numbers)

    def set_queries(self, ranges: Ranges) -> None:
        """Collect as terminated whatever is not among these queries, which are all.

        Queries received in the open round must have been added. Closing the round then leaves
        exactly these queries. Where a cut left estimates, the collectors also correct them.
        """
        for axis, counts in zip((self.rows, self.columns), self._count(ranges), strict=True):
            axis.q_gone[:] = _starts(axis.q) + axis.q_new - counts[0]
            axis.span_gone[:] = axis.span + axis.span_new - counts[1]

    def hide_queries(self, ranges: Ranges, received: NDArray[np.bool_]) -> None:
        """Take queries out of closed rounds, as if they had never been received.

        ``received`` says which of them arrived in the last round: only those leave R.
        """
        hidden, arrived = self._count(ranges), self._count(ranges[received])
        for axis, gone, new in zip((self.rows, self.columns), hidden, arrived, strict=True):
            axis.q[:] -= np.cumsum(gone[0])
            axis.span[:] -= gone[1]
            axis.r[:] -= np.cumsum(new[0])
            axis.pre_span[:] -= new[1]

    def _count(self, ranges: Ranges) -> tuple[Numbers, Numbers]:
        """Count starts and spans of queries, by row and by column."""
        by_row, by_column = np.zeros((2, self.rows.size)), np.zeros((2, self.columns.size))
        count_ranges(ranges, 1.0, self.bounds, by_row, by_column)
        return by_row, by_column

    def _recount(self, ranges: Ranges, axes: Iterable[AxisStats]) -> None:
        """Recompute the queries of closed rounds from all queries and the open round's."""
        by_row, by_column = self._count(ranges)
        for axis in axes:
            counts = by_row if axis is self.rows else by_column
            axis.q[:] = np.cumsum(counts[0] - axis.q_new + axis.q_gone)
            axis.span[:] = counts[1] - axis.span_new + axis.span_gone

    def close_round(self, fade: float = 0.5) -> None:
        """Add the collectors to the closed rounds and reset them.

        ``fade`` is the weight of the points of earlier rounds: one half as in the paper, 1.0 if a
        window expires points.
        """
        close_partition(self._numbers, self.rows.size, fade)

    def total(self) -> Trio:
        """Return the terms of the partition's cost, as of the last closed round."""
        return self.rows.total()

    def split(self, vertical: bool, at: int) -> tuple[Trio, Trio]:
        """Return the terms of both parts of a cut, in constant time.

        A vertical cut divides columns. ``at`` is the first column or row of the second part.
        """
        if vertical:
            return self.columns.split(at - self.column0)
        return self.rows.split(at - self.row0)

    def features(self) -> Numbers:
        """Estimate the work of the open round: partitions, points, candidate pairs.

        A candidate pair is a point and a query over its cell. The estimate assumes that rows and
        columns are independent.
        """
        points, queries, by_row = axis_overlap(self.rows.numbers)
        by_column = axis_overlap(self.columns.numbers)[2]
        pairs = by_row * by_column / (points * queries) if points * queries > 0 else 0.0
        return np.array([1.0, points, max(pairs, 0.0)])

    def cut(
        self, vertical: bool, at: int, first_id: int, second_id: int, ranges: Ranges | None = None
    ) -> tuple[PartitionStats, PartitionStats]:
        """Divide the statistics like the partition.

        Along the axis that is cut, all numbers stay exact. Along the other, only the totals of the
        parts are known, and each row's (or column's) numbers are divided in proportion to them; in
        later rounds, exact counts replace the fading estimates. With the ranges of all queries of
        the partition, including those of the open round, query counts are exact along both axes.
        """
        c0, r0, c1, r1 = self.bounds
        if vertical:
            first = PartitionStats(first_id, c0, r0, at, r1)
            second = PartitionStats(second_id, at, r0, c1, r1)
        else:
            first = PartitionStats(first_id, c0, r0, c1, at)
            second = PartitionStats(second_id, c0, at, c1, r1)
        along, across = self._axes(vertical)
        sides = first._axes(vertical), second._axes(vertical)
        _cut_along(along.numbers, sides[0][0].numbers, sides[1][0].numbers)
        for part, (part_along, part_across) in zip((first, second), sides, strict=True):
            _cut_across(across.numbers, part_along.numbers, part_across.numbers)
            if ranges is not None:
                part._recount(ranges, [part_across])
        return first, second

    @classmethod
    def merged(
        cls, partition_id: int, parts: Sequence[PartitionStats], ranges: Ranges | None = None
    ) -> PartitionStats | None:
        """Merge the statistics of disjoint partitions, or return None if they form no rectangle.

        Points are exact. A query across a border is counted on both sides: without the ranges of
        all queries it stays counted twice, and R counts it twice until the next round is closed.
        """
        rects = np.array([part.bounds for part in parts])
        column0, row0 = rects[:, :2].min(axis=0).tolist()
        column1, row1 = rects[:, 2:].max(axis=0).tolist()
        whole = cls(partition_id, column0, row0, column1, row1)
        if (rects[:, 2:] - rects[:, :2]).prod(axis=1).sum() != whole.rows.size * whole.columns.size:
            return None
        for part in parts:
            for total, axis, first in (
                (whole.rows, part.rows, part.row0 - row0),
                (whole.columns, part.columns, part.column0 - column0),
            ):
                end = first + axis.size
                total.numbers[:, first:end] += axis.numbers
                # N, Q and R are cumulative.
                total.numbers[: R + 1, end:] += axis.numbers[: R + 1, -1:]
        if ranges is not None:
            whole._recount(ranges, (whole.rows, whole.columns))
        return whole

    def _axes(self, vertical: bool) -> tuple[AxisStats, AxisStats]:
        """Return the axis that a cut divides, then the other."""
        return (self.columns, self.rows) if vertical else (self.rows, self.columns)

    def to_array(self) -> Numbers:
        """Return a copy of all numbers as one array."""
        return self._flat.copy()

    @classmethod
    def from_array(cls, array: Numbers) -> PartitionStats:
        """Invert :meth:`to_array`; the array may be longer, and is copied."""
        stats = cls.__new__(cls)
        stats.partition_id, *bounds = map(int, array[:HEADER].tolist())
        stats.column0, stats.row0, stats.column1, stats.row1 = bounds
        lines = stats.column1 - stats.column0 + stats.row1 - stats.row0
        stats._adopt(array[: HEADER + LINES * lines].copy())
        return stats


class MachineStats:
    """Statistics of the partitions of one machine, by identifier in ``partitions``."""

    def __init__(self, partitions: Iterable[PartitionStats] = ()) -> None:
        self.partitions = {stats.partition_id: stats for stats in partitions}

    def add_cells(self, counts: CellCounts, grid_columns: int) -> None:
        """Collect points counted by cell, each in its partition."""
        for stats in self.partitions.values():
            stats.add_cells(counts, grid_columns)

    def expire_cells(self, counts: CellCounts, grid_columns: int) -> None:
        """Subtract points that left the window from N."""
        for stats in self.partitions.values():
            stats.expire_cells(counts, grid_columns)

    def add_queries(self, ranges: Ranges) -> None:
        """Collect received queries in every partition they overlap."""
        for stats in self.partitions.values():
            stats.add_queries(ranges)

    def hide_queries(self, ranges: Ranges, received: NDArray[np.bool_]) -> None:
        """Take queries out of the closed rounds of every partition."""
        for stats in self.partitions.values():
            stats.hide_queries(ranges, received)

    def close_round(self, fade: float = 0.5) -> None:
        """Close the round of every partition."""
        for stats in self.partitions.values():
            stats.close_round(fade)

    def numerator(self) -> float:
        """Return the machine's cost before the division by R(S): the first number it reports."""
        return sum(stats.total().numerator for stats in self.partitions.values())

    def received(self) -> float:
        """Return R(m): points and queries received in the last round, the second number."""
        return sum(stats.total().r for stats in self.partitions.values())

    def features(self) -> Numbers:
        """Return the sum of the partitions' features, for the open round."""
        return sum((stats.features() for stats in self.partitions.values()), np.zeros(3))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all numbers as named arrays, for one file."""
        parts = [stats._flat for stats in self.partitions.values()]
        return {"trio": np.concatenate([np.empty(0), *parts])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> MachineStats:
        """Invert :meth:`to_arrays`."""
        rest = arrays["trio"]
        parts = []
        while rest.size:
            parts.append(PartitionStats.from_array(rest))
            rest = rest[parts[-1].nbytes // rest.itemsize :]
        return cls(parts)
