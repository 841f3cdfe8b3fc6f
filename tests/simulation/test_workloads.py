"""Simulated load: distributions of points and queries, and query counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loads import hotspot_loads

from roost.balance.plan import Partition, Plan
from roost.sim.policies import Network
from roost.sim.scenario import Faults
from roost.sim.slots import PlanSlots
from roost.sim.workloads import CellHotspot, LoadSource, LoadSpec, QueryTable
from roost.workload.cells import CellCounts


def drawn_queries(seed: int, columns: int = 9, rows: int = 7) -> QueryTable:
    random = np.random.default_rng(seed)
    query_table = QueryTable(columns, rows)
    low = np.column_stack([random.integers(0, columns, 40), random.integers(0, rows, 40)])
    high = np.minimum(low + random.integers(0, 5, (40, 2)), [columns - 1, rows - 1])
    query_table.register(np.hstack([low, high]).astype(np.int32))
    query_table.end(np.flatnonzero(random.random(40) < 0.3))
    return query_table


@given(st.integers(0, 10_000))
def test_counts_over_cells_and_rectangles_equal_brute_force(seed: int) -> None:
    query_table = drawn_queries(seed)
    for row in range(query_table.rows):
        for column in range(query_table.columns):
            over = query_table.within(column, row, column + 1, row + 1)
            assert query_table.over[row, column] == len(over)
    random = np.random.default_rng(seed)
    low = np.column_stack([random.integers(0, 9, 30), random.integers(0, 7, 30)])
    high = np.minimum(low + random.integers(1, 6, (30, 2)), [9, 7])
    rects = np.hstack([low, high])
    assert query_table.counts(rects).tolist() == [
        len(query_table.within(*rect)) for rect in rects.tolist()
    ]


def test_queries_are_found_by_range_until_terminated() -> None:
    query_table = QueryTable(4, 4)
    ids = query_table.register(np.array([[0, 0, 1, 1], [1, 1, 3, 3]], np.int32))
    assert query_table.within(1, 1, 2, 2).tolist() == [0, 1]
    query_table.end(ids[:1])
    assert query_table.within(0, 0, 4, 4).tolist() == [1]
    with pytest.raises(AssertionError, match="terminated twice"):
        query_table.end(ids[:1])


@given(st.integers(0, 10_000), st.integers(0, 5))
def test_every_point_goes_to_one_owner(seed: int, turn: int) -> None:
    random = np.random.default_rng(seed)
    at = int(random.integers(1, 6))
    owners = [tuple(random.permutation(5)[: random.integers(1, 6)].tolist()) for _ in range(2)]
    parts = (Partition(0, 0, 0, at, 4, owners[0]), Partition(1, at, 0, 6, 4, owners[1]))
    points = random.integers(0, 9, 24)
    slots = PlanSlots(Plan(0, 6, 4, 5, parts, 2))
    placed = slots.distribute(CellCounts.of(points), turn)
    assert (
        np.bincount(placed.cells, weights=placed.counts, minlength=24).tolist() == points.tolist()
    )
    for slot, (machine, number) in enumerate(zip(placed.machine, placed.partition, strict=True)):
        cells, counts = placed.slot(slot)
        assert machine in parts[number].machines
        assert bool(np.all((cells % 6 < at) == (number == 0)))
        assert bool(np.all(np.diff(cells) > 0))
        # In turn: no owner has more than one point of a cell more than another.
        assert bool(np.all(np.abs(counts - points[cells] / len(parts[number].machines)) < 1))
    shares = slots.shares(points.astype(float))
    assert shares.sum() == pytest.approx(points.sum())
    mine = placed.by_machine(placed.counts.astype(float), 5)
    assert bool(np.all(np.abs(shares - mine) <= 24))


@pytest.mark.parametrize("name", list(hotspot_loads()))
def test_the_papers_loads_have_all_points_and_queries(name: str) -> None:
    load = hotspot_loads(40)[name]
    source = LoadSource(load, 30, 20, seed=1)
    query_table = QueryTable(30, 20)
    for number in range(40):
        source.requests(number, query_table)
        assert source.weights(number).sum() == pytest.approx(1.0)
        assert source.points(number, 1_000).sum() == 1_000
    assert len(query_table.live_ids()) == load.queries


def test_a_hotspot_has_its_share_of_points_and_its_queries() -> None:
    spot = CellHotspot((0.2, 0.2), 10, 20, share=0.5, side=0.2, queries=80)
    source = LoadSource(LoadSpec(queries=10, towns=0, hotspots=(spot,)), 40, 40, seed=3)
    query_table = QueryTable(40, 40)
    inside = [source.weights(number)[4:12, 4:12].sum() for number in range(25)]
    live = []
    for number in range(25):
        source.requests(number, query_table)
        live.append(len(query_table.live_ids()))
    even = 64 / 1600
    assert inside[9] == pytest.approx(even) == inside[20]
    assert inside[10] == pytest.approx(0.5 + 0.5 * even)
    assert (live[9], live[10], live[13], live[19], live[20]) == (10, 30, 90, 90, 10)


def test_intensity_rises_and_falls() -> None:
    bell = CellHotspot((0.5, 0.5), 10, 21, intensity="normal")
    shares = [bell.share_at(number) for number in range(30)]
    assert np.argmax(shares) == 15
    assert shares[15] == pytest.approx(0.4)
    assert shares[9] == shares[21] == 0.0
    assert shares[12] == pytest.approx(shares[18])


def test_a_load_is_the_same_for_the_same_seed() -> None:
    def drawn(seed: int) -> list[object]:
        source, query_table = LoadSource(LoadSpec(churn=9), 20, 20, seed), QueryTable(20, 20)
        return [
            [ids.tolist() for ids in source.requests(number, query_table)]
            + source.points(number, 500).tolist()
            for number in range(3)
        ] + query_table.ranges.tolist()

    assert drawn(5) == drawn(5) != drawn(6)


def test_a_network_loses_and_repeats_at_the_given_rates() -> None:
    lossy = Network(Faults(loss=0.3, repeat=0.2), np.random.default_rng(1))
    arrived = np.bincount(lossy.carry(range(10_000)), minlength=10_000)
    lost, once, twice = np.bincount(arrived).tolist()
    assert lost == pytest.approx(3_000, rel=0.1)
    assert twice == pytest.approx(1_400, rel=0.1)
    assert lost + once + twice == 10_000
    perfect = Network(Faults(), np.random.default_rng(1))
    assert perfect.carry(range(5)) == list(range(5))
