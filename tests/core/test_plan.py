"""Plans: invariant 1 for every strategy, and the properties of each strategy."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import overlapping
from properties import examples
from roost.balance import Partition, Plan, Router, initial_plan
from roost.balance.plan import MACHINES_MAX
from roost.balance.strategies import sampled_costs
from roost.errors import ConfigError
from roost.model.choices import Strategy
from roost.model.space import Grid, Rect

BOUNDS = Rect(0.0, 0.0, 64.0, 48.0)


@st.composite
def costs(draw, grid: Grid) -> np.ndarray:
    """Draw integers, so that sums are exact; often mostly zero, like real load."""
    seed = draw(st.integers(0, 999))
    high = draw(st.sampled_from([1, 2, 50]))
    random = np.random.default_rng(seed)
    cost = random.integers(0, high, (grid.rows, grid.columns)).astype(float)
    return cost * (random.random(cost.shape) < draw(st.sampled_from([0.1, 1.0])))


@st.composite
def plans(draw) -> Plan:
    grid = Grid(BOUNDS, draw(st.integers(1, 24)), draw(st.integers(1, 24)))
    strategy = draw(st.sampled_from(list(Strategy)))
    most = 40 if strategy is Strategy.REPLICATED else min(40, grid.cells)
    machines = draw(st.integers(1, most))
    return initial_plan(strategy, grid, machines, draw(costs(grid)))


def owners(plan: Plan) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Return the machines of each cell, from the partitions cell by cell."""
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {
        (row, column): [] for row in range(plan.rows) for column in range(plan.columns)
    }
    for p in plan.partitions:
        for row in range(p.row0, p.row1):
            for column in range(p.column0, p.column1):
                found[row, column].append(p.machines)
    return found


@given(plans())
@examples(150)
def test_every_cell_has_one_partition_and_every_partition_a_machine(plan: Plan) -> None:
    plan.check_invariants()
    found = owners(plan)
    assert all(len(groups) == 1 for groups in found.values())
    used = {machine for groups in found.values() for machine in groups[0]}
    assert used == set(range(plan.machines)), "no machine stands idle"
    ids = [p.partition_id for p in plan.partitions]
    assert len(set(ids)) == len(ids)
    assert sum(p.cells for p in plan.partitions) == plan.columns * plan.rows


@given(plans(), st.integers(0, 999))
@examples(100)
def test_each_point_goes_to_exactly_one_machine_of_its_cell(plan: Plan, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, plan.columns * plan.rows, 200).astype(np.int32)
    keys = rng.integers(0, 1 << 64, 200, np.uint64)
    machines = Router(plan).machines_of(cells, keys)
    order = rng.permutation(200)
    assert np.array_equal(Router(plan).machines_of(cells[order], keys[order]), machines[order])
    assert machines.shape == cells.shape
    found = owners(plan)
    for cell, machine in zip(cells.tolist(), machines.tolist(), strict=True):
        assert machine in found[divmod(cell, plan.columns)][0]


@given(plans())
@examples(50)
def test_a_plan_round_trips_through_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("step", [1, 2, 3, 6, 256, 1_000_003])
def test_shared_points_are_dealt_out_evenly_by_identifier(step: int) -> None:
    plan = initial_plan(Strategy.REPLICATED, Grid(BOUNDS, 4, 4), 3)
    assert plan.fully_replicated
    keys = step * np.arange(3_000, dtype=np.uint64)
    machines = Router(plan).machines_of(np.zeros(3_000, np.int32), keys)
    shares = Counter(machines.tolist())
    assert all(abs(shares[machine] - 1_000) < 150 for machine in range(3))


def test_a_hot_cell_may_have_several_machines_and_shares_its_points() -> None:
    hot = Partition(0, 0, 0, 1, 1, (1, 2))
    rest = Partition(1, 1, 0, 2, 1, (0,))
    plan = Plan(4, 2, 1, 3, (hot, rest), 10)
    plan.check_invariants()
    assert not plan.fully_replicated
    cells, keys = np.array([0, 1] * 500, np.int32), np.arange(1_000, dtype=np.uint64)
    machines = Router(plan).machines_of(cells, keys)
    assert set(machines[1::2].tolist()) == {0}
    shares = Counter(machines[::2].tolist())
    assert set(shares) == {1, 2} and abs(shares[1] - shares[2]) < 100


# -- uniform: the largest partition by area is halved across its longer side


def halved(columns: int, rows: int, machines: int) -> list[tuple[int, int, int, int]]:
    """Halve the largest area, on tuples; equal areas in order of creation."""
    parts = [(0, 0, columns, rows)]
    while len(parts) < machines:
        areas = [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in parts]
        x0, y0, x1, y1 = parts.pop(areas.index(max(areas)))
        if x1 - x0 >= y1 - y0:
            middle = (x0 + x1) // 2
            parts += [(x0, y0, middle, y1), (middle, y0, x1, y1)]
        else:
            middle = (y0 + y1) // 2
            parts += [(x0, y0, x1, middle), (x0, middle, x1, y1)]
    return sorted(parts)


def rectangles(plan: Plan) -> list[tuple[int, int, int, int]]:
    return sorted((p.column0, p.row0, p.column1, p.row1) for p in plan.partitions)


@given(st.integers(1, 30), st.integers(1, 30), st.data())
@examples(150)
def test_uniform_halves_the_largest_area(columns: int, rows: int, data) -> None:
    machines = data.draw(st.integers(1, min(64, columns * rows)))
    plan = initial_plan(Strategy.UNIFORM, Grid(BOUNDS, columns, rows), machines)
    assert rectangles(plan) == halved(columns, rows, machines)
    assert [len(p.machines) for p in plan.partitions] == [1] * machines


def test_uniform_areas_are_equal_where_they_can_be() -> None:
    for machines in (1, 2, 4, 8, 16, 64):
        plan = initial_plan(Strategy.UNIFORM, Grid(BOUNDS, 1024, 1024), machines)
        assert {p.cells for p in plan.partitions} == {1024 * 1024 // machines}


# -- history: the costliest partition is split where the costs of its sides differ least


def cost_of(cost: np.ndarray, p: Partition) -> float:
    return float(cost[p.row0 : p.row1, p.column0 : p.column1].sum())


def best_difference(cost: np.ndarray, p: Partition) -> float:
    part = cost[p.row0 : p.row1, p.column0 : p.column1]
    cuts = [abs(part[:, :k].sum() - part[:, k:].sum()) for k in range(1, part.shape[1])]
    cuts += [abs(part[:k].sum() - part[k:].sum()) for k in range(1, part.shape[0])]
    return float(min(cuts))


@given(st.integers(1, 12), st.integers(1, 12), st.data())
@examples(100)
def test_history_splits_the_costliest_where_the_costs_of_the_sides_differ_least(
    columns, rows, data
) -> None:
    grid = Grid(BOUNDS, columns, rows)
    cost = data.draw(costs(grid))
    machines = data.draw(st.integers(1, min(12, grid.cells - 1) or 1))
    if grid.cells == 1:
        return
    before = initial_plan(Strategy.HISTORY, grid, machines, cost)
    after = initial_plan(Strategy.HISTORY, grid, machines + 1, cost)
    gone = set(rectangles(before)) - set(rectangles(after))
    made = set(rectangles(after)) - set(rectangles(before))
    (split,) = (Partition(0, *corners, ()) for corners in gone)
    sides = [Partition(0, *corners, ()) for corners in made]
    assert len(sides) == 2
    divisible = [p for p in before.partitions if p.cells > 1]
    assert cost_of(cost, split) == max(cost_of(cost, p) for p in divisible)
    difference = abs(cost_of(cost, sides[0]) - cost_of(cost, sides[1]))
    assert difference == best_difference(cost, split)


def test_history_balances_skew_that_uniform_does_not() -> None:
    grid = Grid(BOUNDS, 100, 100)
    random = np.random.default_rng(11)
    x, y = random.normal(10.0, 3.0, 20_000), random.normal(10.0, 3.0, 20_000)
    history = sampled_costs(grid, x, y, np.empty((0, 4)))
    assert history.sum() == 20_000
    shares = {}
    for strategy in (Strategy.UNIFORM, Strategy.HISTORY):
        plan = initial_plan(strategy, grid, 8, history)
        shares[strategy] = max(cost_of(history, p) for p in plan.partitions) / 20_000
    assert shares[Strategy.UNIFORM] > 0.5
    assert shares[Strategy.HISTORY] < 0.2


@given(st.integers(0, 999), st.integers(0, 30), st.integers(0, 15))
@examples(60)
def test_the_cost_of_a_cell_is_its_points_times_the_queries_over_it(seed, points, queries) -> None:
    grid = Grid(BOUNDS, 8, 6)
    random = np.random.default_rng(seed)
    x, y = random.uniform(-5, 70, points), random.uniform(-5, 55, points)
    low = random.uniform(-10, 60, (queries, 2))
    boxes = np.hstack([low, low + random.uniform(0, 20, (queries, 2))])
    cost = sampled_costs(grid, x, y, boxes)

    def column(value: float) -> int:
        return min(max(math.floor(value / 8.0), 0), 7)

    def row(value: float) -> int:
        return min(max(math.floor(value / 8.0), 0), 5)

    expected = np.zeros((6, 8))
    for px, py in zip(x, y, strict=True):
        over = sum(
            column(x0) <= column(px) <= column(x1) and row(y0) <= row(py) <= row(y1)
            for x0, y0, x1, y1 in boxes
        )
        expected[row(py), column(px)] += 1 + over
    assert cost.tolist() == expected.tolist()


@given(plans(), st.data())
@examples(60)
def test_a_query_is_in_every_partition_it_overlaps_and_in_no_other(plan: Plan, data) -> None:
    columns = sorted(data.draw(st.tuples(*[st.integers(0, plan.columns - 1)] * 2)))
    rows = sorted(data.draw(st.tuples(*[st.integers(0, plan.rows - 1)] * 2)))
    found = {p.partition_id for p in overlapping(plan, columns[0], rows[0], columns[1], rows[1])}
    cells = {
        (row, column)
        for row in range(rows[0], rows[1] + 1)
        for column in range(columns[0], columns[1] + 1)
    }
    assert found == {
        p.partition_id
        for p in plan.partitions
        if any(p.row0 <= row < p.row1 and p.column0 <= column < p.column1 for row, column in cells)
    }


# -- what is refused


@pytest.mark.parametrize("strategy", [Strategy.UNIFORM, Strategy.HISTORY])
def test_more_machines_than_cells_are_refused(strategy: Strategy) -> None:
    grid = Grid(BOUNDS, 2, 2)
    assert len(initial_plan(strategy, grid, 4, np.ones((2, 2))).partitions) == 4
    with pytest.raises(ConfigError) as caught:
        initial_plan(strategy, grid, 5, np.ones((2, 2)))
    assert (caught.value.key, caught.value.got) == ("engine.machines", 5)


@pytest.mark.parametrize("machines", [0, -1, MACHINES_MAX + 1])
def test_invalid_numbers_of_machines_are_refused(machines: int) -> None:
    with pytest.raises(ConfigError) as caught:
        initial_plan(Strategy.REPLICATED, Grid(BOUNDS, 2, 2), machines)
    assert (caught.value.key, caught.value.got) == ("engine.machines", machines)


def test_history_needs_a_sample() -> None:
    with pytest.raises(ConfigError, match=r"engine\.strategy: got 'history', expected a sample"):
        initial_plan(Strategy.HISTORY, Grid(BOUNDS, 4, 4), 2)


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        pytest.param({"row1": 1}, "a cell is in no partition", id="a gap"),
        pytest.param({"column0": 0}, "or in two", id="an overlap"),
        pytest.param({"machines": ()}, "has no machine", id="no machine"),
        pytest.param({"machines": (1, 1)}, "names a machine twice", id="a machine twice"),
        pytest.param({"machines": (2,)}, "a machine is unknown", id="an unknown machine"),
        pytest.param({"column1": 5}, "columns are outside", id="beyond the grid"),
        pytest.param({"row0": -1}, "rows are outside", id="below the grid"),
        pytest.param({"partition_id": 0}, "a partition id occurs twice", id="an id twice"),
    ],
)
def test_check_invariants_finds_invalid_plans(broken: dict, fault: str) -> None:
    left, right = Partition(0, 0, 0, 2, 3, (0,)), Partition(1, 2, 0, 4, 3, (1,))
    Plan(0, 4, 3, 2, (left, right), 10).check_invariants()
    with pytest.raises(AssertionError, match=fault):
        Plan(0, 4, 3, 2, (left, replace(right, **broken)), 10).check_invariants()
