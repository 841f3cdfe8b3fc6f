"""Load reduction: the greedy subset, and four binary searches against every cut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio_model import add_points, cuts

from properties import examples
from roost.balance.costs import Cost, ProductCost, WorkCost
from roost.balance.reduction import best_split, best_subset
from roost.workload.trio import PartitionStats, Trio

PRODUCT = ProductCost()


def cost_of(trio: Trio, received: float) -> float:
    return trio.n * trio.q * trio.r / received


whole_costs = st.dictionaries(st.integers(0, 9), st.integers(0, 40).map(float), max_size=7)


@given(whole_costs, st.integers(0, 100))
def test_a_subset_fits_and_is_at_least_half_of_the_best_that_fits(
    costs: dict[int, float], limit: int
) -> None:
    chosen = best_subset(costs, float(limit))
    total = sum(costs[number] for number in chosen)
    assert len(set(chosen)) == len(chosen)
    assert total <= limit
    subsets = (c for size in range(len(costs) + 1) for c in combinations(costs.values(), size))
    best = max(sum(c) for c in subsets if sum(c) <= limit)
    assert total >= best / 2
    assert all(costs[number] > 0 for number in chosen)


def test_the_costliest_come_first_and_ties_go_to_the_lower_id() -> None:
    assert best_subset({3: 2.0, 1: 2.0, 2: 5.0, 4: 9.0}, 7.0) == [2, 1]


def random_stats(rng: np.random.Generator, ended: bool = False) -> PartitionStats:
    """Rounds of skewed points and queries; in the last one, queries may be terminated."""
    wide, high = (int(side) for side in rng.integers(1, 20, 2))
    stats = PartitionStats(0, 3, 5, 3 + wide, 5 + high)

    def add_skewed(count: int) -> None:
        skew = rng.uniform(0.5, 3.0, 2)
        columns = (rng.random(count) ** skew[0] * wide).astype(np.int64)
        add_points(stats, 3 + columns, 5 + (rng.random(count) ** skew[1] * high).astype(np.int64))

    def ranges(count: int) -> np.ndarray:
        low = rng.integers(0, (3 + wide, 5 + high), (count, 2))
        return np.concatenate([low, low + rng.integers(0, 8, (count, 2))], 1).astype(np.int32)

    first = ranges(int(rng.integers(1, 60)))
    stats.add_queries(first)
    for _ in range(int(rng.integers(1, 4))):
        add_skewed(int(rng.integers(1, 300)))
        stats.add_queries(ranges(int(rng.integers(0, 20))))
        stats.close_round()
    if ended:
        add_skewed(int(rng.integers(1, 60)))
        stats.end_queries(first[: int(rng.integers(1, len(first) + 1))])
        stats.close_round()
    return stats


def random_case(rng: np.random.Generator, stats: PartitionStats) -> tuple:
    """A machine with this partition and perhaps others, a cheaper one, and R(S)."""
    received = float(rng.uniform(100.0, 1000.0))
    high = cost_of(stats.total(), received) * rng.uniform(1.0, 2.0)
    return stats, high, high * rng.random(), received, PRODUCT


def lowest_cost(
    stats: PartitionStats, high: float, low: float, received: float, cost: Cost
) -> float:
    """Return the lowest cost of the costlier machine over all cuts, or without a cut."""
    rest = high - cost.of(stats) / received
    best = high
    for vertical in (True, False):
        for at in cuts(stats.bounds, vertical):
            sides = [side / received for side in cost.sides(stats)(vertical, at)]
            for moved, kept in (sides, sides[::-1]):
                best = min(best, max(rest + kept, low + moved))
    return best


@given(st.integers(0, 2**32))
@examples(150)
def test_four_searches_find_the_best_cut_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stats = random_stats(rng)
    stats, high, low, received, cost = random_case(rng, stats)
    found, best = (f(stats, high, low, received, cost) for f in (best_split, lowest_cost))
    assert (found.higher if found else high) == best
    work = WorkCost(float(rng.choice([0.0, 5.0, 50.0])))
    high = work.of(stats) / received * rng.uniform(1.0, 2.0)
    found, best = (f(stats, high, high * 0.4, received, work) for f in (best_split, lowest_cost))
    assert (found.higher if found else high) == pytest.approx(best)


@st.composite
def small_cuts(draw: st.DrawFn) -> tuple[PartitionStats, float, float, float, Cost]:
    """Partitions with one cut per axis, which the search looks at, and many of equal cost."""
    column0, row0 = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    wide, high = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    stats = PartitionStats(0, column0, row0, column0 + wide, row0 + high)
    cells = st.tuples(st.integers(column0, column0 + wide - 1), st.integers(row0, row0 + high - 1))
    ranges = st.builds(
        lambda a, b: (min(a[0], b[0]), min(a[1], b[1]), max(a[0], b[0]), max(a[1], b[1])),
        cells,
        cells,
    )
    points = np.array(draw(st.lists(cells, min_size=1, max_size=8)))
    stats.add_queries(np.array(draw(st.lists(ranges, min_size=1, max_size=4)), np.int32))
    add_points(stats, points[:, 0], points[:, 1])
    stats.close_round()
    rest, low = draw(st.sampled_from([0.0, 4.0])), draw(st.sampled_from([0.0, 1.0, 6.0]))
    return stats, rest + stats.total().numerator, low, 1.0, PRODUCT


def first_in_order(
    stats: PartitionStats, cost_high: float, cost_low: float
) -> tuple[bool, int, bool] | None:
    """Sort all cuts: higher cost, difference, columns before rows, lower line, moved side."""
    rest = cost_high - stats.total().numerator
    found = []
    for by_rows, lines in (
        (False, range(stats.column0 + 1, stats.column1)),
        (True, range(stats.row0 + 1, stats.row1)),
    ):
        for line in lines:
            first, second = (part.numerator for part in stats.split(not by_rows, line))
            for second_moves, (kept, moved) in enumerate([(second, first), (first, second)]):
                costs = (rest + kept, cost_low + moved)
                rank = (max(costs), max(costs) - min(costs), by_rows, line, second_moves)
                if max(costs) < cost_high:
                    found.append(rank)
    if not found:
        return None
    _, _, by_rows, line, second_moves = min(found)
    return not by_rows, line, not second_moves


@given(small_cuts())
@examples(150)
def test_cuts_of_equal_cost_are_chosen_in_a_fixed_order(case: tuple) -> None:
    stats, cost_high, cost_low, _, _ = case
    expected = first_in_order(stats, cost_high, cost_low)
    choice = best_split(*case)
    found = None if choice is None else (choice.vertical, choice.at, choice.move_first)
    assert found == expected


def test_terminated_queries_do_not_mislead_the_search() -> None:
    # R counts what was received, so more rows never received less.
    rng = np.random.default_rng(1)
    for _ in range(300):
        case = random_case(rng, random_stats(rng, ended=True))
        found, best = best_split(*case), lowest_cost(*case)
        assert (found.higher if found else case[1]) == best


def test_costs_after_a_cut_are_those_of_the_parts() -> None:
    rng = np.random.default_rng(3)
    stats = random_stats(rng)
    case = random_case(rng, stats)
    choice = best_split(*case)
    assert choice is not None
    parts = stats.cut(choice.vertical, choice.at, 1, 2)
    moved, kept = parts if choice.move_first else parts[::-1]
    _, high, low, received, _ = case
    rest = high - cost_of(stats.total(), received)
    assert choice.cost_low == pytest.approx(low + cost_of(moved.total(), received))
    assert choice.cost_high == pytest.approx(rest + cost_of(kept.total(), received))
    assert choice.difference == pytest.approx(abs(choice.cost_high - choice.cost_low))


def test_one_cell_cannot_be_cut() -> None:
    stats = PartitionStats(0, 2, 2, 3, 3)
    add_points(stats, np.array([2]), np.array([2]))
    stats.add_queries(np.array([[0, 0, 9, 9]], np.int32))
    stats.close_round()
    assert best_split(stats, 10.0, 0.0, 1.0, PRODUCT) is None


def test_a_row_of_two_equal_cells_is_cut_in_the_middle() -> None:
    stats = PartitionStats(0, 0, 0, 2, 1)
    add_points(stats, np.array([0, 1]), np.array([0, 0]))
    stats.add_queries(np.array([[0, 0, 0, 0], [1, 0, 1, 0]], np.int32))
    stats.close_round()
    choice = best_split(stats, 16.0, 0.0, 1.0, PRODUCT)
    assert choice is not None
    assert (choice.vertical, choice.at, choice.move_first) == (True, 1, True)
    assert (choice.cost_high, choice.cost_low) == (2.0, 2.0)


def test_of_mirrored_cuts_the_lower_line_is_chosen() -> None:
    """Both move two of three equal cells, one the first two, one the last two."""
    stats = PartitionStats(0, 0, 0, 3, 1)
    add_points(stats, np.array([0, 1, 2]), np.zeros(3, np.int64))
    stats.add_queries(np.array([[c, 0, c, 0] for c in range(3)], np.int32))
    stats.close_round()
    choice = best_split(stats, 100.0 + stats.total().numerator, 0.0, 1.0, PRODUCT)
    assert choice is not None
    assert (choice.vertical, choice.at, choice.move_first) == (True, 1, False)
    assert choice.cost_high > choice.cost_low


def test_the_papers_criterion_is_the_smallest_difference() -> None:
    rng = np.random.default_rng(5)
    differ = 0
    for _ in range(60):
        case = random_case(rng, random_stats(rng))
        higher, closer = best_split(*case), best_split(*case, least_higher=False)
        if higher is None or closer is None:
            assert higher is closer is None
            continue
        assert closer.difference <= higher.difference + 1e-9
        assert higher.higher <= closer.higher + 1e-9
        differ += higher != closer
    assert differ > 3


@given(st.integers(0, 2**32))
@examples(60)
def test_work_counts_pairs_and_a_cut_saves_none(seed: int) -> None:
    """Where rows and columns are independent, work is exact: compared with every point and query.

    The pieces of any cut cost what the whole did; the papers' product falls.
    """
    rng = np.random.default_rng(seed)
    stats = PartitionStats(0, 0, 0, 8, 6)
    by_column, by_row = rng.integers(1, 9, 8), rng.integers(1, 9, 6)
    across = np.sort(rng.integers(0, 8, (5, 2)), axis=1)
    along = np.sort(rng.integers(0, 6, (4, 2)), axis=1)
    ranges = np.array([[a[0], b[0], a[1], b[1]] for a in across for b in along], np.int32)
    stats.add_queries(ranges)
    stats.close_round()
    pairs, points = 0, 0
    for row, column in np.ndindex(6, 8):
        count = int(by_row[row] * by_column[column])
        add_points(stats, np.full(count, column), np.full(count, row))
        over = (ranges[:, 0] <= column) & (column <= ranges[:, 2])
        over &= (ranges[:, 1] <= row) & (row <= ranges[:, 3])
        pairs, points = pairs + count * int(over.sum()), points + count
    stats.close_round()
    work = WorkCost(50.0)
    assert work.of(stats) == pytest.approx(pairs + 50.0 * points)
    for vertical in (True, False):
        for at in cuts(stats.bounds, vertical):
            assert sum(work.sides(stats)(vertical, at)) == pytest.approx(work.of(stats))
            assert sum(PRODUCT.sides(stats)(vertical, at)) < PRODUCT.of(stats)
