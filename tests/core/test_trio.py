"""TrioStat against brute force: every split of a partition, after any history of a stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio_model import (
    GRID,
    Stream,
    add_points,
    as_ranges,
    cells_of,
    expire_points,
    partitions,
    points,
    queries,
)

from roost.workload import MachineStats, PartitionStats, Trio

steps = st.lists(
    st.one_of(
        st.tuples(st.just("points"), points),
        st.tuples(st.just("cells"), points),
        st.tuples(st.just("expire"), st.integers(0, 20)),
        st.tuples(st.just("begin"), queries),
        st.tuples(st.just("end"), st.integers(0, 12)),
        st.tuples(st.just("set"), queries),
        st.tuples(st.just("close"), st.none()),
    ),
    max_size=14,
)


def replay(stream: Stream, stats: PartitionStats, history) -> None:
    """Apply the same history to the statistics and to the model; compare after every round."""
    for step, value in history:
        if step == "points":
            inside = stream.inside(value)
            add_points(stats, *cells_of(inside))
            stream.receive(inside)
        elif step == "cells":
            counts = stream.counts(value)
            stats.add_cells(counts, GRID)
            stream.receive(value)
        elif step == "expire":
            expire_points(stats, *cells_of(stream.expire(value)))
        elif step == "begin":
            stats.add_queries(as_ranges(value))
            stream.begin(value)
        elif step == "end":
            stats.end_queries(as_ranges(stream.end(value)))
        elif step == "set":
            stats.set_queries(as_ranges(value))
            stream.replace(value)
        else:
            stats.close_round(stream.fade)
            stream.close()
            stream.compare(stats)


@given(partitions, st.sampled_from([1.0, 0.5]), steps)
def test_every_split_equals_brute_force_counts(rect, fade, history) -> None:
    if fade < 1.0:
        history = [step for step in history if step[0] != "expire"]
    replay(Stream(rect, fade), PartitionStats(7, *rect), [*history, ("close", None)])


def worked_example() -> PartitionStats:
    """The partition of the dissertation's figures: 4 rows by 2 columns."""
    stats = PartitionStats(11, 0, 0, 2, 4)
    # Twice the points of before, as a half of them fades.
    rows = np.array([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)
    add_points(stats, np.arange(16) % 2, rows)
    stats.add_queries(as_ranges([(0, 0, 0, 0), (0, 1, 1, 2), (1, 2, 1, 2), (0, 3, 0, 3)]))
    stats.close_round()
    add_points(stats, np.array([0, 1]), np.array([2, 2]))
    stats.add_queries(as_ranges([(0, 1, 0, 1), (1, 0, 1, 2), (0, 3, 0, 3)]))
    stats.close_round()
    return stats


def test_the_worked_example() -> None:
    stats = worked_example()
    rows = stats.rows
    assert (rows.n[1], rows.q[1], rows.r[1]) == (4, 4, 2)
    assert (rows.n[2], rows.q[2], rows.r[2]) == (8, 5, 4)
    assert (rows.span[2], rows.pre_span[2]) == (2, 1)
    assert (rows.n[3], rows.q[3], rows.r[3]) == (10, 7, 5)
    assert stats.total() == Trio(10, 7, 5)
    assert stats.total().numerator == 350
    first, second = stats.split(vertical=False, at=2)
    assert first.numerator == 4 * 4 * 2
    assert second == Trio(6, 5, 4)
    assert second.numerator == 120


def test_the_collectors_of_the_worked_example() -> None:
    stats = PartitionStats(11, 0, 0, 2, 4)
    add_points(stats, np.array([0, 1]), np.array([2, 2]))
    stats.add_queries(as_ranges([(0, 1, 0, 1), (1, 0, 1, 2)]))
    assert stats.rows.n_new.tolist() == [0, 0, 2, 0]
    assert stats.columns.n_new.tolist() == [1, 1]
    assert stats.rows.q_new.tolist() == [1, 1, 0, 0]
    assert stats.rows.span_new.tolist() == [0, 1, 1, 0]
    assert stats.columns.q_new.tolist() == [1, 1]
    assert stats.columns.span_new.tolist() == [0, 0]


def test_terminations_leave_q_and_do_not_change_r() -> None:
    """A machine that is busy with points does not look idle because queries are terminated."""
    stats = PartitionStats(0, 0, 0, 3, 3)
    ranges = as_ranges([(0, 0, 2, 2)] * 25_000)
    stats.add_queries(np.concatenate([ranges, ranges]))
    stats.close_round()
    add_points(stats, np.repeat([0, 1, 2], 1000), np.repeat([0, 1, 2], 1000))
    stats.end_queries(ranges)
    assert stats.rows.q_gone.tolist() == [25_000, 0, 0]
    assert stats.columns.span_gone.tolist() == [0, 25_000, 25_000]
    assert stats.rows.q_new.tolist() == [0, 0, 0]
    stats.close_round()
    assert stats.rows.r.tolist() == [1000, 2000, 3000]
    assert stats.total() == Trio(3000, 25_000, 3000)
    assert stats.split(vertical=True, at=1) == (Trio(1000, 25_000, 1000), Trio(2000, 25_000, 2000))


@given(partitions, points, queries, queries, queries, queries)
def test_hidden_queries_leave_q_and_r_only_if_they_are_new(
    rect, drawn, old, old_hidden, new, new_hidden
) -> None:
    """Points always count; a split of what is left equals brute force."""
    stream, stats = Stream(rect, 0.5), PartitionStats(0, *rect)
    for part in (old, old_hidden):
        stats.add_queries(as_ranges(part))
    stream.begin(old)
    stats.close_round()
    stream.close()
    for part in (new, new_hidden):
        stats.add_queries(as_ranges(part))
    stream.begin(new)
    inside = stream.inside(drawn)
    add_points(stats, *cells_of(inside))
    stream.receive(inside)
    stats.close_round()
    stream.close()
    hidden = as_ranges([*old_hidden, *new_hidden])
    stats.hide_queries(hidden, np.arange(len(hidden)) >= len(old_hidden))
    stream.compare(stats)


def test_expiry_leaves_what_was_received() -> None:
    stats = PartitionStats(0, 0, 0, 2, 2)
    add_points(stats, np.array([0, 1, 1]), np.array([0, 0, 1]))
    expire_points(stats, np.array([1]), np.array([1]))  # older than a round
    stats.close_round(fade=1.0)
    assert stats.total() == Trio(2, 0, 3)
    assert stats.split(vertical=True, at=1) == (Trio(1, 0, 1), Trio(1, 0, 2))


@pytest.mark.parametrize(("vertical", "at"), [(True, 2), (True, 5), (False, 1), (False, 4)])
def test_a_cut_at_the_border_is_refused(vertical, at) -> None:
    stats = PartitionStats(0, 2, 1, 5, 4)
    with pytest.raises(AssertionError, match="one side of the cut is empty"):
        stats.split(vertical, at)


@given(partitions, points, queries)
def test_features_follow_the_definition(rect, drawn_points, drawn_queries) -> None:
    stats = PartitionStats(0, *rect)
    stream = Stream(rect, 1.0)
    stats.add_queries(as_ranges(drawn_queries[::2]))
    stats.close_round()
    stats.add_queries(as_ranges(drawn_queries[1::2]))
    inside = stream.inside(drawn_points)
    add_points(stats, *cells_of(inside))
    c0, r0, c1, r1 = rect
    stream.begin(drawn_queries)
    n, q = len(inside), stream.queries_in(rect)
    by_row = sum(stream.queries_in((c0, row, c1, row + 1)) for _, row in inside)
    by_column = sum(stream.queries_in((column, r0, column + 1, r1)) for column, _ in inside)
    overlap = by_row * by_column / (n * q) if n * q else 0.0
    assert stats.features().tolist() == pytest.approx([1.0, n, overlap])
    machine = MachineStats([stats, PartitionStats(1, *rect)])
    assert machine.features().tolist() == pytest.approx([2.0, n, overlap])


def test_one_column_has_exact_pairs() -> None:
    stats = PartitionStats(0, 0, 0, 1, 3)
    stats.add_queries(as_ranges([(0, 0, 0, 1), (0, 1, 0, 2)]))
    add_points(stats, np.zeros(4, int), np.array([0, 1, 1, 2]))
    assert stats.features().tolist() == [1.0, 4.0, 1 + 2 + 2 + 1]


def test_a_machine_is_the_sum_of_its_partitions() -> None:
    example = worked_example()
    other = PartitionStats(12, 2, 0, 4, 4)
    machine = MachineStats([example, other])
    machine.add_queries(as_ranges([(1, 0, 2, 0)]))
    machine.add_cells(Stream((0, 0, GRID, GRID), 1.0).counts([(1, 1), (3, 2), (6, 6)]), GRID)
    machine.close_round(fade=1.0)
    assert example.total() == Trio(11, 8, 2)
    assert other.total() == Trio(1, 1, 2)
    assert machine.numerator() == 11 * 8 * 2 + 1 * 1 * 2
    assert machine.received() == 4


@given(partitions, steps)
def test_arrays_hold_everything(rect, history) -> None:
    stats = PartitionStats(3, *rect)
    replay(Stream(rect, 1.0), stats, history)
    back = PartitionStats.from_array(stats.to_array())
    assert (back.partition_id, back.bounds) == (3, rect)
    assert np.array_equal(back.to_array(), stats.to_array())
    machine = MachineStats([PartitionStats(1, 0, 0, 2, 1), stats])
    again = MachineStats.from_arrays(machine.to_arrays())
    assert list(again.partitions) == [1, 3]
    assert np.array_equal(again.partitions[3].to_array(), stats.to_array())
    again.partitions[3].add_queries(as_ranges([rect]))
    assert np.array_equal(machine.partitions[3].to_array(), stats.to_array())
    assert MachineStats.from_arrays(MachineStats().to_arrays()).partitions == {}


def test_storage_is_ten_numbers_a_row_and_column() -> None:
    assert PartitionStats(0, 0, 0, 300, 200).nbytes == pytest.approx(10 * 8 * 500, rel=0.01)
