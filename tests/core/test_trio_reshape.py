"""TrioStat when partitions are cut and merged: exact counts, and estimates in proportion."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from trio_model import Stream, as_ranges, cuts, halves, partitions, point, query

from roost.workload import PartitionStats

few = st.tuples(st.lists(point, max_size=8), st.lists(query, max_size=5), st.integers(0, 4))
rounds = st.lists(few, max_size=3)


def run(stream: Stream, stats: list[PartitionStats], history, *, close_last: bool = True) -> None:
    """Apply rounds to a stream and its partitions; the last round may stay open."""
    for number, (new_points, new_queries, ended) in enumerate(history, 1):
        gone = stream.end(ended)
        stream.begin(new_queries)
        stream.receive(new_points)
        for part in stats:
            part.end_queries(as_ranges(gone))
            part.add_queries(as_ranges(new_queries))
            part.add_cells(stream.counts(new_points), 8)
        if close_last or number < len(history):
            stream.close()
            for part in stats:
                part.close_round(1.0)


@st.composite
def cut_partitions(draw):
    rect = draw(partitions)
    vertical = draw(st.booleans())
    assume(cuts(rect, vertical))
    return rect, vertical, draw(st.sampled_from(cuts(rect, vertical)))


def check_along(stream: Stream, part: PartitionStats, vertical: bool) -> None:
    assert astuple(part.total()) == pytest.approx(astuple(stream.trio(part.bounds)))
    for at in cuts(part.bounds, vertical):
        expected = tuple(stream.trio(side) for side in halves(part.bounds, vertical, at))
        assert part.split(vertical, at) == expected


def check_queries(stream: Stream, part: PartitionStats, vertical: bool) -> None:
    for at in cuts(part.bounds, vertical):
        sides = halves(part.bounds, vertical, at)
        expected = [stream.queries_in(side) for side in sides]
        assert [t.q for t in part.split(vertical, at)] == pytest.approx(expected)


def check_totals_agree(part: PartitionStats) -> None:
    by_row, by_column = part.rows.numbers[:3, -1], part.columns.numbers[:3, -1]
    assert by_row.tolist() == pytest.approx(by_column.tolist())
    for line in (5, 6, 8):
        sums = (part.rows.numbers[line].sum(), part.columns.numbers[line].sum())
        assert sums[0] == pytest.approx(sums[1])


@given(cut_partitions(), rounds, rounds)
def test_a_cut_is_exact_along_its_axis_and_stays_so(where, before, after) -> None:
    rect, vertical, at = where
    stream, whole = Stream(rect, 1.0), PartitionStats(0, *rect)
    run(stream, [whole], before)
    parts = whole.cut(vertical, at, 5, 6, as_ranges(stream.queries))
    assert tuple(part.bounds for part in parts) == halves(rect, vertical, at)
    assert [part.partition_id for part in parts] == [5, 6]
    for part in parts:
        check_totals_agree(part)
        check_along(stream, part, vertical)
        check_queries(stream, part, not vertical)
    run(stream, list(parts), after)
    for part in parts:
        check_along(stream, part, vertical)
        check_queries(stream, part, not vertical)
        assert part._axes(vertical)[1].total().n == pytest.approx(stream.trio(part.bounds).n)


@given(cut_partitions(), rounds)
def test_a_cut_in_an_open_round_is_exact_once_it_is_closed(where, history) -> None:
    rect, vertical, at = where
    stream, whole = Stream(rect, 1.0), PartitionStats(0, *rect)
    run(stream, [whole], history, close_last=False)
    parts = whole.cut(vertical, at, 1, 2, as_ranges(stream.queries))
    stream.close()
    for part in parts:
        check_totals_agree(part)
        part.close_round(1.0)
        check_along(stream, part, vertical)
        check_queries(stream, part, not vertical)


@given(cut_partitions(), rounds)
def test_without_queries_the_other_axis_is_shared_in_proportion(where, history) -> None:
    rect, vertical, at = where
    stream, whole = Stream(rect, 1.0), PartitionStats(0, *rect)
    run(stream, [whole], history)
    estimates = whole.split(vertical, at)
    for part, estimate in zip(whole.cut(vertical, at, 1, 2), estimates, strict=True):
        check_totals_agree(part)
        check_along(stream, part, vertical)
        across, all_across = part._axes(vertical)[1], whole._axes(vertical)[1]
        for line, mine in ((0, estimate.n), (1, estimate.q)):
            every = all_across.numbers[line]
            if every[-1] > 0:
                assert across.numbers[line] == pytest.approx(every * (mine / every[-1]))


@given(cut_partitions(), rounds, rounds)
def test_joined_parts_are_exact_when_queries_are_given(where, before, after) -> None:
    rect, vertical, at = where
    stream = Stream(rect, 1.0)
    sides = halves(rect, vertical, at)
    parts = [PartitionStats(k, *side) for k, side in enumerate(sides)]
    run(stream, parts, before)
    whole = PartitionStats.merged(9, parts, as_ranges(stream.queries))
    assert (whole.partition_id, whole.bounds) == (9, rect)
    for direction in (True, False):
        for cut in cuts(rect, direction):
            expected = [stream.trio(side) for side in halves(rect, direction, cut)]
            found = whole.split(direction, cut)
            assert [(t.n, t.q) for t in found] == [(t.n, t.q) for t in expected]
    run(stream, [whole], [*after, ([], [], 0)])
    stream.compare(whole)


@given(cut_partitions(), rounds)
def test_joining_in_an_open_round_is_exact_once_it_is_closed(where, history) -> None:
    rect, vertical, at = where
    stream = Stream(rect, 1.0)
    parts = [PartitionStats(k, *side) for k, side in enumerate(halves(rect, vertical, at))]
    run(stream, parts, history, close_last=False)
    whole = PartitionStats.merged(9, parts, as_ranges(stream.queries))
    whole.close_round(1.0)
    stream.close()
    for direction in (True, False):
        check_queries(stream, whole, direction)
        for cut in cuts(rect, direction):
            expected = [stream.trio(side).n for side in halves(rect, direction, cut)]
            assert [t.n for t in whole.split(direction, cut)] == expected


@given(cut_partitions(), rounds)
def test_without_queries_those_across_the_border_count_twice(where, history) -> None:
    rect, vertical, at = where
    stream = Stream(rect, 1.0)
    sides = halves(rect, vertical, at)
    parts = [PartitionStats(k, *side) for k, side in enumerate(sides)]
    run(stream, parts, history)
    whole = PartitionStats.merged(9, parts)
    check_totals_agree(whole)
    assert whole.total().q == sum(stream.queries_in(side) for side in sides)
    assert whole.total().n == stream.trio(rect).n
    assert whole.total().r >= 0


@given(cut_partitions(), rounds)
def test_cutting_and_joining_gives_back_the_points(where, history) -> None:
    rect, vertical, at = where
    stream, whole = Stream(rect, 1.0), PartitionStats(0, *rect)
    run(stream, [whole], history, close_last=False)
    ranges = as_ranges(stream.queries)
    back = PartitionStats.merged(0, whole.cut(vertical, at, 1, 2, ranges), ranges)
    for mine, before in ((back.rows, whole.rows), (back.columns, whole.columns)):
        assert mine.n == pytest.approx(before.n)
        assert mine.n_new == pytest.approx(before.n_new)
        net, net_before = mine.q_new - mine.q_gone, before.q_new - before.q_gone
        assert mine.q + np.cumsum(net) == pytest.approx(before.q + np.cumsum(net_before))
        spans, spans_before = mine.span - mine.span_gone, before.span - before.span_gone
        assert spans + mine.span_new == pytest.approx(spans_before + before.span_new)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param((5, 0, 7, 4), id="a gap between them"),
        pytest.param((4, 1, 7, 4), id="sides of different length"),
        pytest.param((0, 0, 4, 4), id="the same place"),
    ],
)
def test_parts_that_are_no_rectangle_are_refused(second) -> None:
    parts = (PartitionStats(0, 0, 0, 4, 4), PartitionStats(1, *second))
    assert PartitionStats.merged(2, parts) is None


@given(rounds, rounds)
def test_five_parts_that_no_straight_cut_divides_are_merged_exactly(before, after) -> None:
    # Around the cell in the middle: no two of the five partitions form a rectangle.
    rects = [(0, 0, 2, 1), (2, 0, 3, 2), (1, 2, 3, 3), (0, 1, 1, 3), (1, 1, 2, 2)]
    stream = Stream((0, 0, 3, 3), 1.0)
    parts = [PartitionStats(k, *rect) for k, rect in enumerate(rects)]
    run(stream, parts, before)
    whole = PartitionStats.merged(9, parts, as_ranges(stream.queries))
    run(stream, [whole], [*after, ([], [], 0)])
    stream.compare(whole)


def test_corrections_that_cancel_are_spread_evenly() -> None:
    whole = PartitionStats(0, 0, 0, 2, 4)
    whole.add_queries(as_ranges([(1, 0, 1, 3)]))
    whole.close_round()
    whole.set_queries(as_ranges([(0, 0, 0, 3)]))
    first, second = whole.cut(True, 1, 1, 2)
    assert first.columns.q_gone.tolist() == [-1.0]
    assert first.rows.q_gone.tolist() == [-0.25] * 4
    assert second.rows.q_gone.tolist() == [0.25] * 4


@given(cut_partitions(), rounds, st.lists(point, max_size=8), st.lists(query, max_size=5))
def test_correcting_a_cut_receives_no_queries(where, history, points, queries) -> None:
    """A machine that recounts all queries after a cut receives only those that are new."""
    rect, vertical, at = where
    stream, whole = Stream(rect, 1.0), PartitionStats(0, *rect)
    run(stream, [whole], history)
    parts = whole.cut(vertical, at, 1, 2)
    stream.receive(points)
    stream.begin(queries)
    stream.close()
    for part in parts:
        part.add_cells(stream.counts(points), 8)
        part.add_queries(as_ranges(queries))
        part.set_queries(as_ranges(stream.queries))
        part.close_round(1.0)
        assert part.total().r == stream.trio(part.bounds).r
        for one in (True, False):
            for line in cuts(part.bounds, one):
                expected = [stream.trio(side).r for side in halves(part.bounds, one, line)]
                assert [t.r for t in part.split(one, line)] == expected
