"""``roost bench trio``: what TrioStat costs, what it takes, and how well it foretells.

Four questions, each a group of rows. *points*: microseconds a point that statistics add to a
batch, and to close a round. *storage* and *bytes*: numbers kept, and sent each round, against
AQWA's, over partitions, grid sides and machines (the dissertation's figures 6.2 to 6.4). *busy*:
the real kernel matches each machine's points, hour by hour of the day, and the ranks of the
measured times are compared with those that each model gave, in Kendall's tau.

A model predicts a round before it has seen its times. Machines are measured in turn, several times
over, and the least time counts: what else runs on the host then disturbs no machine in particular.
The summary's ``kendall`` is that of the model with TrioStat's numbers alone, over both plans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.balance.plan import Plan, Router
from roost.balance.strategies import History, initial_plan
from roost.bench.cases import SEED, Pickups, boxes_of, data_dir, load_pickups
from roost.bench.common import environment, save_bars_plot, save_lines_plot, write_json
from roost.bench.trio_storage import (
    GRID_SIDE,
    MACHINES,
    Row,
    bytes_by_machines,
    machine_stats,
    storage_by_partitions,
    storage_by_side,
)
from roost.kernel import Index, build_segment, query_schema
from roost.kernel.cells import locate_cells
from roost.model.choices import Strategy
from roost.model.records import BOX, TIME_MAX, TIME_MIN
from roost.model.schemas import PointBlock
from roost.model.space import Rect, Space
from roost.workload import (
    CellCounter,
    CellCounts,
    CostModel,
    EulerHistogram,
    query_ranges,
)

Floats = NDArray[np.float64]

TRIO, CELLS, NUMERATOR = "calibrated-trio", "calibrated-cells", "numerator"
HISTORY_POINTS = 20_000
HOURS = (0, 4, 8, 12, 16, 20)
HOURS_EACH = 4
SHORTEST_S = 1e-3


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    queries: tuple[int, ...]
    batch: int
    points_a_round: int
    repeats: int
    batches: int


QUICK = Sizes((100_000,), 200_000, 150_000, 24, 10)
FULL = Sizes((100_000, 1_000_000), 1_000_000, 400_000, 12, 20)


@dataclass(frozen=True)
class Load:
    """Points with their cells, and queries with theirs."""

    pickups: Pickups
    space: Space
    cells: NDArray[np.int32]
    hours: NDArray[np.int64]
    boxes: Floats
    ranges: NDArray[np.int32]

    @classmethod
    def of(cls, pickups: Pickups, queries: int) -> Load:
        """Draw queries and locate everything."""
        space = Space(Rect(*pickups.bounds), GRID_SIDE, GRID_SIDE)
        grid = space.grid
        boxes = boxes_of(pickups, queries, np.random.default_rng(SEED))
        cells = locate_cells(pickups.lon, pickups.lat, grid.edges_x, grid.edges_y)
        hours = pc.hour(pickups.event_time).to_numpy()
        return cls(pickups, space, cells, hours, boxes, query_ranges(grid, boxes))

    def plan(self, strategy: Strategy) -> Plan:
        """Make a static plan."""
        grid = self.space.grid
        at = np.random.default_rng(SEED).integers(0, self.cells.size, HISTORY_POINTS)
        sample = (self.pickups.lon[at], self.pickups.lat[at])
        return initial_plan(strategy, grid, MACHINES, History.of(grid, *sample, self.boxes))


def kendall(first: Floats, second: Floats) -> float:
    """Kendall's tau-b of two lists, by all pairs.

    Examples
    --------
    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    0.3333333333333333
    """
    i, j = np.triu_indices(first.size, 1)
    a, b = np.sign(first[i] - first[j]), np.sign(second[i] - second[j])
    untied = float(np.count_nonzero(a)) * float(np.count_nonzero(b))
    return float((a * b).sum() / np.sqrt(untied)) if untied else 0.0


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plots."""
    sizes = QUICK if quick else FULL
    pickups = load_pickups(data_dir())
    load = Load.of(pickups, sizes.queries[0])
    points = point_row(load, sizes)
    closing = close_row(load, sizes)
    storage = [*storage_by_partitions(), *storage_by_side()]
    sent = bytes_by_machines()
    busy: list[Row] = []
    for queries in sizes.queries:
        if queries != load.boxes.shape[0]:
            load = Load.of(pickups, queries)
        for strategy in (Strategy.HISTORY, Strategy.UNIFORM):
            rows, lines = busy_rows(load, strategy, sizes)
            busy += rows
            if strategy is Strategy.HISTORY:
                shown = lines
    # The model that has nothing but TrioStat's own numbers; the one with cells has its own rows.
    judged = [row["kendall"] for row in busy if row["system"] == TRIO]
    summary = {
        "us_per_point": points["us_per_point"],
        "round_close_us": closing["all_machines_us"],
        "kendall": float(np.mean(judged)),
        "bytes_ratio_vs_aqwa": next(r["ratio"] for r in sent if r["machines"] == MACHINES),
    }
    result = {
        "bench": "trio",
        "data": pickups.source,
        "rows": [points, closing, *storage, *sent, *busy],
        "environment": environment(),
        "summary": summary,
    }
    write_json(json_path, result)
    _plot(json_path, storage, sent, shown)
    return result


def point_row(load: Load, sizes: Sizes) -> Row:
    """Time of statistics for batches that are spread over the machines of a plan."""
    plan = load.plan(Strategy.HISTORY)
    router = Router(plan)
    stats = machine_stats(plan)
    counter = CellCounter(load.space.grid.cells)
    edges = (load.space.grid.edges_x, load.space.grid.edges_y)
    size = min(sizes.batch, load.cells.size)
    spent = np.zeros((sizes.batches, 4))
    for number in range(sizes.batches):
        start = number * size % (load.cells.size - size + 1)
        batch = slice(start, start + size)
        begun = time.perf_counter()
        cells = locate_cells(load.pickups.lon[batch], load.pickups.lat[batch], *edges)
        spent[number, 3] = time.perf_counter() - begun
        owners = router.machines_of(cells, np.arange(cells.size, dtype=np.uint64))
        for machine, mine in enumerate(stats):
            own = cells[owners == machine]
            begun = time.perf_counter()
            counter.add(own)
            added = time.perf_counter()
            counts = counter.take()
            taken = time.perf_counter()
            mine.add_cells(counts, GRID_SIDE)
            done = time.perf_counter()
            spent[number, :3] += (added - begun, taken - added, done - taken)
    spent = spent[1:] / size * 1e6  # the first batch compiles
    count, take, collect, locate = np.median(spent, axis=0).tolist()
    return {
        "case": "points",
        "system": "trio",
        "machines": MACHINES,
        "batch": size,
        "us_per_point": float(np.median(spent[:, :3].sum(1))),
        "us_per_point_count": count,
        "us_per_point_take": take,
        "us_per_point_collect": collect,
        "us_per_point_locate": locate,
        "paper_us": 0.41,
    }


def close_row(load: Load, sizes: Sizes) -> Row:
    """Time to close a round, and to work out the two numbers that a machine reports."""
    stats = machine_stats(load.plan(Strategy.HISTORY))
    for machine in stats:
        machine.add_queries(load.ranges)
        machine.close_round()
    spent = np.zeros((20 * sizes.batches, 2))
    for number in range(len(spent)):
        begun = time.perf_counter()
        for machine in stats:
            machine.close_round()
        closed = time.perf_counter()
        for machine in stats:
            machine.numerator()
            machine.received()
        spent[number] = closed - begun, time.perf_counter() - closed
    close_us, report_us = (np.median(spent, axis=0) * 1e6).tolist()
    return {
        "case": "round",
        "system": "trio",
        "machines": MACHINES,
        "all_machines_us": close_us,
        "one_machine_us": close_us / MACHINES,
        "report_one_machine_us": report_us / MACHINES,
        "paper_us": 58.0,
    }


class Fleet:
    """The machines of a plan, each with the index of its queries."""

    def __init__(self, load: Load, plan: Plan) -> None:
        self._load = load
        self._router = Router(plan)
        self._indexes = []
        for p in plan.partitions:
            c0, r0, c1, r1 = load.ranges.T
            mine = (c0 < p.column1) & (c1 >= p.column0) & (r0 < p.row1) & (r1 >= p.row0)
            segment = build_segment(box_queries(load.boxes[mine]), load.space)
            self._indexes.append(Index(load.space, [(segment, {})]))

    def busy_s(self, at: NDArray[np.int64], repeats: int) -> Floats:
        """Measure the time of each machine for the points at some places."""
        pickups = self._load.pickups
        owners = self._router.machines_of(self._load.cells[at], at.astype(np.uint64))
        blocks = []
        for machine in range(len(self._indexes)):
            own = at[owners == machine]
            zeros = np.zeros(own.size, np.int64)
            blocks.append(
                PointBlock(pickups.lon[own], pickups.lat[own], zeros, pa.array(zeros), {})
            )
        least = np.full(len(blocks), np.inf)
        for _ in range(repeats):
            for machine, (index, block) in enumerate(zip(self._indexes, blocks, strict=True)):
                times, started, spent = 0, time.process_time(), 0.0
                while spent < SHORTEST_S:
                    for _pairs in index.match(block):
                        pass
                    times += 1
                    spent = time.process_time() - started
                least[machine] = min(least[machine], spent / times)
        return least


def box_queries(boxes: Floats) -> pa.Table:
    """Boxes as admitted queries."""
    count = len(boxes)
    columns = {
        "query_id": np.arange(count),
        "user_id": pa.array(["bench"] * count, pa.string()),
        "kind": np.full(count, BOX, np.int8),
        **dict(zip(("x0", "y0", "x1", "y1"), boxes.T.copy(), strict=True)),
        "live_from": np.full(count, TIME_MIN),
        "live_until": np.full(count, TIME_MAX),
    }
    schema = query_schema(pa.int64())
    arrays = [
        pa.array(columns[f.name]).cast(f.type) if f.name in columns else pa.nulls(count, f.type)
        for f in schema
    ]
    return pa.table(arrays, schema=schema)


def cell_features(plan: Plan, counts: CellCounts, over: Floats) -> Floats:
    """Partitions, points and pairs of each machine, from the counts of every cell."""
    points = counts.dense(over.size).reshape(over.shape)
    pairs = points * over
    features = np.zeros((plan.machines, 3))
    for p in plan.partitions:
        mine = (slice(p.row0, p.row1), slice(p.column0, p.column1))
        features[list(p.machines)] += [1.0, points[mine].sum(), pairs[mine].sum()]
    return features


def busy_rows(load: Load, strategy: Strategy, sizes: Sizes) -> tuple[list[Row], dict[str, Floats]]:
    """Compare three models with the measured times of a day's rounds under one plan.

    Returns the rows, and the milliseconds of each machine in the last round by who says so.
    """
    plan = load.plan(strategy)
    fleet = Fleet(load, plan)
    stats = machine_stats(plan)
    for machine in stats:
        machine.add_queries(load.ranges)
        machine.close_round()
    histogram = EulerHistogram(plan.columns, plan.rows)
    histogram.add(load.ranges)
    over = histogram.per_cell()
    counter = CellCounter(plan.columns * plan.rows)
    models = {TRIO: CostModel(3), CELLS: CostModel(3)}
    taus: dict[str, list[float]] = {name: [] for name in (NUMERATOR, *models)}
    errors: dict[str, list[float]] = {name: [] for name in models}
    for number, hour in enumerate(HOURS):
        inside = (load.hours >= hour) & (load.hours < hour + HOURS_EACH)
        at = np.flatnonzero(inside)[: sizes.points_a_round]
        counter.add(load.cells[at])
        counts = counter.take()
        for machine in stats:
            machine.add_cells(counts, plan.columns)
        features = {
            TRIO: np.array([machine.features() for machine in stats]),
            CELLS: cell_features(plan, counts, over),
        }
        for machine in stats:
            machine.close_round()
        busy = fleet.busy_s(at, sizes.repeats)
        said = {name: model.predict(features[name]) for name, model in models.items()}
        learnt = {name: model.observe(features[name], busy) for name, model in models.items()}
        if number:  # before the first round the models know nothing
            numerators = np.array([machine.numerator() for machine in stats])
            for name, costs in {NUMERATOR: numerators, **said}.items():
                taus[name].append(kendall(costs, busy))
            for name, error in learnt.items():
                errors[name].append(error)
    order = np.argsort(busy)
    lines = {name: times[order] * 1e3 for name, times in {"measured": busy, **said}.items()}
    rows = [
        {
            "case": f"busy-{strategy.value}",
            "system": name,
            "queries": int(load.boxes.shape[0]),
            "machines": plan.machines,
            "points": int(at.size),
            "kendall": float(np.mean(values)),
            "kendall_least": float(np.min(values)),
            "error": float(np.mean(errors[name])) if name in errors else None,
        }
        for name, values in taus.items()
    ]
    return rows, lines


def _plot(json_path: Path, storage: list[Row], sent: list[Row], busy_ms: dict[str, Floats]) -> None:
    def kept(varied: str) -> dict[str, dict[str, float]]:
        names = {"trio, squares": "best_bytes", "trio, strips": "worst_bytes", "aqwa": "aqwa_bytes"}
        rows = [row for row in storage if row["case"] == f"storage-by-{varied}"]
        return {str(row[varied]): {k: row[v] for k, v in names.items()} for row in rows}

    panels = {
        "kept, by partitions": kept("partitions"),
        "kept, by grid side": kept("side"),
        "sent each round, by machines": {
            str(row["machines"]): {"trio": row["bytes"], "aqwa": row["aqwa_bytes"]} for row in sent
        },
    }
    save_bars_plot(json_path.with_suffix(".png"), "bytes of statistics", panels)
    save_lines_plot(
        json_path.with_name(f"{json_path.stem}-busy.png"),
        "busy time (ms) of each machine in the last round, by rank",
        {name: list(enumerate(values.tolist())) for name, values in busy_ms.items()},
    )
