"""``roost bench trio``: cost, size and accuracy of TrioStat's statistics.

Each group of rows measures one property. *points*: microseconds per point that counting adds to a
batch, and time to close a round. *engine*: microseconds per point in the engine as it runs.
*storage* and *bytes*: numbers stored, and sent each round, compared with AQWA, over partitions,
grid sides and machines (the dissertation's figures 6.2 to 6.4). *busy*: the kernel matches each
machine's points, by hours of the day, and the ranks of the measured times are compared with those
that each model predicts, by Kendall's tau.

TrioStat stores ten numbers for each row and column of every partition: fewest if partitions are
squares, most if they are strips one cell wide. It stores them as float64, AQWA most of its own as
int32, so a ratio of bytes favours TrioStat less than one of numbers. Sizes are those of objects up
to a thousand partitions and a side of 1600 cells, and computed beyond.

A model predicts a round before it observes its times. Machines are measured in turn, several times,
and the minimum counts, so that other work on the host affects all machines alike. The summary's
``kendall`` is that of the model with TrioStat's numbers alone, over both plans.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.balance.plan import Plan, Router
from roost.balance.strategies import initial_plan, sampled_costs
from roost.bench.cases import SEED, Pickups, box_requests, boxes_of, data_dir, load_pickups
from roost.bench.common import Measured, Plot, Row
from roost.bench.streams import admit
from roost.bench.trio_engine import engine_row
from roost.kernel import Index
from roost.kernel.cells import locate_cells
from roost.model.arrays import Floats
from roost.model.choices import Strategy
from roost.model.schemas import PointBlock
from roost.model.space import Grid, Rect, Space
from roost.workload import (
    CellCounter,
    CellCounts,
    CostModel,
    EulerHistogram,
    MachineStats,
    PartitionStats,
    query_ranges,
)
from roost.workload.histogram import CORNERS
from roost.workload.loops import LINES

MACHINES = 22
GRID_SIDE = 1000
BYTES_PER_REPORT = 16
AQWA_NUMBERS = 1 + CORNERS  # of each cell: its points, and the queries of an Euler histogram
PARTITIONS_BUILT = 1000
SIDE_BUILT = 1600
TRIO, CELLS, NUMERATOR = "calibrated-trio", "calibrated-cells", "numerator"
HISTORY_POINTS = 20_000
HOURS = (0, 4, 8, 12, 16, 20)
HOURS_EACH = 4
SHORTEST_S = 1e-3


class Sizes(NamedTuple):
    """Sizes of the measured workloads."""

    queries: tuple[int, ...]
    batch: int
    points_a_round: int
    repeats: int
    batches: int
    engine_batch: int = 1_000_000  # a machine's share decides, so --quick does not shrink it


QUICK = Sizes((100_000,), 200_000, 150_000, 24, 10)
FULL = Sizes((100_000, 1_000_000), 1_000_000, 400_000, 12, 20)


class Load:
    """Points and queries, with the cells of both."""

    def __init__(self, pickups: Pickups, queries: int) -> None:
        self.pickups = pickups
        self.space = Space(Rect(*pickups.bounds), GRID_SIDE, GRID_SIDE)
        grid = self.space.grid
        self.cells = locate_cells(pickups.lon, pickups.lat, grid.edges_x, grid.edges_y)
        self.hours = pc.hour(pickups.event_time).to_numpy()
        self.boxes = boxes_of(pickups, queries, np.random.default_rng(SEED))
        self.ranges = query_ranges(grid, self.boxes)

    def plan(self, strategy: Strategy) -> Plan:
        """Return a static plan."""
        grid = self.space.grid
        at = np.random.default_rng(SEED).integers(0, self.cells.size, HISTORY_POINTS)
        sample = (self.pickups.lon[at], self.pickups.lat[at])
        return initial_plan(strategy, grid, MACHINES, sampled_costs(grid, *sample, self.boxes))


def kendall(first: Floats, second: Floats) -> float:
    """Return Kendall's tau-b of two lists.

    Examples
    --------
    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    0.3333333333333333
    """
    i, j = np.triu_indices(first.size, 1)
    a, b = np.sign(first[i] - first[j]), np.sign(second[i] - second[j])
    untied = float(np.count_nonzero(a)) * float(np.count_nonzero(b))
    return float((a * b).sum() / np.sqrt(untied)) if untied else 0.0


def run(quick: bool) -> Measured:
    """Measure cost, size and accuracy."""
    sizes = QUICK if quick else FULL
    pickups = load_pickups(data_dir())
    load = Load(pickups, sizes.queries[0])
    points = point_row(load, sizes)
    engine = [
        engine_row(pickups, queries, MACHINES, sizes.engine_batch, sizes.batches // 2)
        for queries in sizes.queries
    ]
    closing = close_row(load, sizes)
    storage = [_storage_row(GRID_SIDE, 10**k, "partitions") for k in range(7)]  # figure 6.3
    storage += [_storage_row(100 * 2**k, 1000, "side") for k in range(7)]  # figure 6.4
    sent = bytes_by_machines()
    busy: list[Row] = []
    for queries in sizes.queries:
        if queries != load.boxes.shape[0]:
            load = Load(pickups, queries)
        history, busy_ms = busy_rows(load, Strategy.HISTORY, sizes)
        uniform, _ = busy_rows(load, Strategy.UNIFORM, sizes)
        busy += [*history, *uniform]
    # The model with TrioStat's own numbers only; the one with cells has rows of its own.
    judged = [row["kendall"] for row in busy if row["system"] == TRIO]
    summary = {
        "us_per_point": points["us_per_point"],
        "us_per_point_engine": max(row["us_per_point"] for row in engine),
        "busy_share_engine": max(row["busy_share"] for row in engine),
        "round_close_us": closing["all_machines_us"],
        "kendall": float(np.mean(judged)),
        "bytes_ratio_vs_aqwa": next(r["ratio"] for r in sent if r["machines"] == MACHINES),
    }
    title = "busy time (ms) of each machine in the last round, by rank"
    lines = {name: list(enumerate(values.tolist())) for name, values in busy_ms.items()}
    return Measured(
        [points, *engine, closing, *storage, *sent, *busy],
        summary,
        {"": _sizes_plot(storage, sent), "-busy": Plot("", {title: lines})},
        more={"data": pickups.source},
    )


def _sizes_plot(storage: list[Row], sent: list[Row]) -> Plot:
    names = {"trio, squares": "best_bytes", "trio, strips": "worst_bytes", "aqwa": "aqwa_bytes"}
    panels = {
        f"stored, by {title}": {
            name: {str(r[key]): r[column] for r in storage if r["case"] == f"storage-by-{key}"}
            for name, column in names.items()
        }
        for key, title in (("partitions", "partitions"), ("side", "grid side"))
    }
    panels["sent each round, by machines"] = {
        name: {str(row["machines"]): row[column] for row in sent}
        for name, column in (("trio", "bytes"), ("aqwa", "aqwa_bytes"))
    }
    return Plot("bytes of statistics", panels, columns=len(panels), log=True)


def line_count(side: int, partitions: int, square: bool) -> int:
    """Count the rows and columns of all partitions: the minimum (squares) or maximum (strips)."""
    if square:
        return int(2 * side * partitions**0.5 + 0.5)
    strips = min(partitions, side)
    rest = side - (strips - 1)
    return (strips - 1) * (side + 1) + side + rest + (partitions - strips)


def trio_bytes(side: int, partitions: int, square: bool) -> int:
    """Return the bytes that TrioStat stores."""
    if partitions > PARTITIONS_BUILT or partitions > side:
        return line_count(side, partitions, square) * LINES * 8
    if square:
        plan = initial_plan(Strategy.UNIFORM, Grid(Rect(0, 0, 1, 1), side, side), partitions)
        return sum(PartitionStats(p.partition_id, *p.bounds).nbytes for p in plan.partitions)
    strips = [PartitionStats(k, k, 0, k + 1, side).nbytes for k in range(partitions - 1)]
    return sum(strips) + PartitionStats(partitions, partitions - 1, 0, side, side).nbytes


def aqwa_bytes(side: int) -> tuple[int, int]:
    """Return the bytes that AQWA stores, and those that it sends each round.

    It stores five counters and five prefix sums for each cell, and sends all counters.
    """
    built = min(side, SIDE_BUILT)
    points, sums = np.zeros((built, built), np.int32), np.zeros((built + 1, built + 1), np.int64)
    stored = points.nbytes + sums.nbytes + EulerHistogram(built, built).nbytes
    times = (side / built) ** 2
    return round(stored * times), round(AQWA_NUMBERS * points.nbytes * times)


def _storage_row(side: int, partitions: int, varied: str) -> Row:
    best, worst = (trio_bytes(side, partitions, square) for square in (True, False))
    lines = [line_count(side, partitions, square) for square in (True, False)]
    theirs = aqwa_bytes(side)[0]
    return {
        "case": f"storage-by-{varied}",
        "system": "trio",
        "side": side,
        "partitions": partitions,
        "best_bytes": best,
        "worst_bytes": worst,
        "aqwa_bytes": theirs,
        "best_numbers": LINES * lines[0],
        "worst_numbers": LINES * lines[1],
        "aqwa_numbers": 2 * AQWA_NUMBERS * side * side,
        "ratio_best": theirs / best,
        "ratio_worst": theirs / worst,
    }


def bytes_by_machines() -> list[Row]:
    """Return figure 6.2: bytes that the coordinator receives each round, by machines."""
    sent = aqwa_bytes(GRID_SIDE)[1]
    return [
        {
            "case": "bytes-per-round",
            "system": "trio",
            "machines": machines,
            "bytes": BYTES_PER_REPORT * machines,
            "aqwa_bytes": sent,
            "ratio": sent / (BYTES_PER_REPORT * machines),
        }
        for machines in (MACHINES, 100, 1000, 10_000)
    ]


def machine_stats(plan: Plan) -> list[MachineStats]:
    """Return empty statistics for every machine of a plan."""
    return [
        MachineStats(
            [
                PartitionStats(p.partition_id, *p.bounds)
                for p in plan.partitions
                if machine in p.machines
            ]
        )
        for machine in range(plan.machines)
    ]


def point_row(load: Load, sizes: Sizes) -> Row:
    """Measure the time that statistics take per point, over the machines of a plan."""
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
    """Measure the time to close a round, and to compute the two numbers that a machine reports."""
    stats = machine_stats(load.plan(Strategy.HISTORY))
    _register(stats, load)
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


def _register(stats: list[MachineStats], load: Load) -> None:
    for machine in stats:
        machine.add_queries(load.ranges)
        machine.close_round()


class Fleet:
    """The machines of a plan, each with the index of its queries."""

    def __init__(self, load: Load, plan: Plan) -> None:
        self._load = load
        self._router = Router(plan)
        self._indexes = []
        for p in plan.partitions:
            c0, r0, c1, r1 = load.ranges.T
            mine = (c0 < p.column1) & (c1 >= p.column0) & (r0 < p.row1) & (r1 >= p.row0)
            requests = box_requests(load.boxes[mine])
            with tempfile.TemporaryDirectory() as folder:
                segments = admit(Path(folder), load.space, requests)
            self._indexes.append(Index(load.space, segments))

    def busy_s(self, at: NDArray[np.int64], repeats: int) -> Floats:
        """Measure the time that each machine takes to match some of the points."""
        pickups = self._load.pickups
        owners = self._router.machines_of(self._load.cells[at], at.astype(np.uint64))
        blocks = []
        for machine in range(len(self._indexes)):
            own = at[owners == machine]
            zeros = np.zeros(own.size, np.int64)
            x, y = pickups.lon[own], pickups.lat[own]
            blocks.append(PointBlock(x, y, zeros, pa.array(zeros), {}))
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


def cell_features(plan: Plan, counts: CellCounts, over: Floats) -> Floats:
    """Return the partitions, points and pairs of each machine, from the counts of every cell."""
    points = counts.dense(over.size).reshape(over.shape)
    pairs = points * over
    features = np.zeros((plan.machines, 3))
    for p in plan.partitions:
        mine = (slice(p.row0, p.row1), slice(p.column0, p.column1))
        features[list(p.machines)] += [1.0, points[mine].sum(), pairs[mine].sum()]
    return features


def busy_rows(load: Load, strategy: Strategy, sizes: Sizes) -> tuple[list[Row], dict[str, Floats]]:
    """Compare three models with the measured times of a day's rounds under one plan.

    Returns the rows, and the measured and predicted milliseconds of each machine in the last round.
    """
    plan = load.plan(strategy)
    fleet = Fleet(load, plan)
    stats = machine_stats(plan)
    _register(stats, load)
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
        predicted = {name: model.predict(features[name]) for name, model in models.items()}
        observed = {name: model.observe(features[name], busy) for name, model in models.items()}
        if number:  # the models have observed nothing before the first round
            numerators = np.array([machine.numerator() for machine in stats])
            for name, costs in {NUMERATOR: numerators, **predicted}.items():
                taus[name].append(kendall(costs, busy))
            for name, error in observed.items():
                errors[name].append(error)
    order = np.argsort(busy)
    lines = {name: times[order] * 1e3 for name, times in {"measured": busy, **predicted}.items()}
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
