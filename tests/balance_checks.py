"""Moving loads and their expected matches, plans, reports and statistics.

Expected values are computed from points and requests by brute force, one rectangle at a time. Only
the last part reads the tasks of Roost and their reports.
"""

from __future__ import annotations

import json
import math
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import shapely
from numpy.typing import NDArray
from pytest import approx

from roost import RunConfig
from roost.balance import Partition, Plan
from roost.balance.costs import PER_OBJECT
from roost.kernel import unpack
from roost.model.schemas import request_schema
from roost.model.space import Coordinates, Rect, Space
from roost.queries.partitions import _part, live_ranges
from roost.queries.versions import SegmentRef
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import InProcessExecutor
from roost.stages.contract import MapExecutor, Report, Task
from roost.stages.matching import MatchingTask
from roost.stages.statistics import TrioTask, TrioValue, copy_resident, load_statistics
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.workload import MachineStats

SIDE = 80.0
CELLS = 16  # a power of two: borders are whole numbers without rounding
EDGES = np.array([SIDE / CELLS * k for k in range(CELLS + 1)])
CORNERS = ((12.0, 12.0), (68.0, 12.0), (68.0, 68.0), (12.0, 68.0))
SCHEMA = request_schema(pa.int64(), pa.int64())
FADE = 0.5

Record = dict[str, Any]
Bounds = tuple[float, float, float, float]
Cells = tuple[int, int, int, int]  # half-open rectangle of cells


# --------------------------------------------------------------------------- the load


@dataclass(frozen=True)
class Scenario:
    """Points in batches of equal size, and the requests that arrive before each batch.

    The time of a point is its row times ``tick``, after ``start``.
    """

    xy: np.ndarray  # batches x rows x 2
    requests: list[list[Record]]
    start: int = 1000
    tick: int = 1

    @property
    def batches(self) -> int:
        return self.xy.shape[0]

    @property
    def rows(self) -> int:
        return self.xy.shape[1]

    @cached_property
    def times(self) -> np.ndarray:
        count = self.batches * self.rows
        return (self.start + self.tick * np.arange(count)).reshape(self.batches, self.rows)

    def table(self, first: int = 0, last: int | None = None) -> pa.Table:
        """Return the points of some batches."""
        last = self.batches if last is None else last
        xy = self.xy[first:last].reshape(-1, 2)
        return pa.table(
            {
                "id": np.arange(first * self.rows, last * self.rows),
                "x": xy[:, 0],
                "y": xy[:, 1],
                "event_time": self.times[first:last].reshape(-1),
            }
        )

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "points.parquet"
        pq.write_table(self.table(), path, row_group_size=max(64, self.rows // 3))
        return path

    def block(self, number: int) -> pa.Table:
        """Return the requests that arrive before a batch, for the query log."""
        return pa.Table.from_pylist(self.requests[number], SCHEMA)


def scenario_config(
    scenario: Scenario, folder: Path, engine: Record, balance: Record, **sections: Any
) -> RunConfig:
    """Return the settings of a run of a scenario, whose points are in the folder."""
    points = folder / "points.parquet"
    if not points.exists():
        scenario.write(folder)
    return RunConfig(
        points={"path": str(points)},
        space={
            "bounds": Rect(0.0, 0.0, SIDE, SIDE),
            "grid": (CELLS, CELLS),
            "coordinates": Coordinates.PLANE,
        },
        engine={"batch_rows": scenario.rows, "available_now": True, **engine},
        queries={"id_type": "int"},
        balance=balance,
        **sections,
    )


def crowd(rng: np.random.Generator, rows: int, centre: tuple[float, float] | None) -> np.ndarray:
    """Draw four of five points around a centre, the others anywhere, some on borders or outside."""
    xy = rng.uniform(-8.0, SIDE + 8.0, (rows, 2))
    if centre is not None:
        hot = rng.random(rows) < 0.8
        xy[hot] = np.asarray(centre) + rng.uniform(-11.0, 11.0, (int(hot.sum()), 2))
    border = rng.random((rows, 2)) < 0.1
    xy[border] = np.round(xy[border] / 5.0) * 5.0
    return xy


def some_shape(chance: random.Random) -> Record:
    """Draw a box, circle or polygon, mostly near a corner."""
    if chance.random() < 0.7:
        x, y = (c + chance.uniform(-14, 14) for c in chance.choice(CORNERS))
    else:
        x, y = chance.uniform(-10, SIDE + 10), chance.uniform(-10, SIDE + 10)
    wide, high = chance.uniform(0.5, 20), chance.uniform(0.5, 20)
    kind = chance.choice(["box", "box", "circle", "polygon"])
    if kind == "circle":
        return {"cx": x, "cy": y, "radius": wide / 2}
    if kind == "polygon":
        ring = [(x, y), (x + wide, y), (x + wide, y + high), (x + wide / 3, y + high / 2)]
        return {"wkt": shapely.Polygon(ring).wkt}
    if chance.random() < 0.3:  # borders of cells
        x, y = 5.0 * round(x / 5), 5.0 * round(y / 5)
        wide, high = 5.0 * math.ceil(wide / 5), 5.0 * math.ceil(high / 5)
    return {"x0": x, "y0": y, "x1": x + wide, "y1": y + high}


def drawn(seed: int, centres: Sequence[tuple[float, float] | None], rows: int) -> np.ndarray:
    """Draw the points of batches that each have a centre, or none."""
    rng = np.random.default_rng(seed)
    return np.stack([crowd(rng, rows, centre) for centre in centres])


def spread(seed: int, count: int) -> list[Record]:
    """Draw boxes all over the space that do not expire."""
    rng = np.random.default_rng(seed)
    low, size = rng.uniform(0, SIDE - 6, (count, 2)), rng.uniform(1, 6, (count, 2))
    boxes = np.hstack([low, low + size]).tolist()
    return [box_request(number, *box) for number, box in enumerate(boxes)]


def box_request(number: int, x0: float, y0: float, x1: float, y1: float) -> Record:
    box = {"x0": float(x0), "y0": float(y0), "x1": float(x1), "y1": float(y1)}
    return {"op": "register", "query_id": number, "user_id": "u", **box}


def even(seed: int, batches: int, rows: int) -> Scenario:
    """Draw a load that is uniform in space and time, except for noise."""
    rng = np.random.default_rng(seed)
    low = 5.0 * np.stack(np.meshgrid(range(CELLS), range(CELLS)), axis=-1).reshape(-1, 2)
    low += rng.uniform(0.2, 1.5, low.shape)
    requests = [box_request(k, *place, *(c + 3.0 for c in place)) for k, place in enumerate(low)]
    xy = rng.uniform(0.0, SIDE, (batches, rows, 2))
    return Scenario(xy, [requests, *([] for _ in range(batches - 1))])


def jumping(seed: int, batches: int, rows: int, stay: int = 6, standing: int = 120) -> Scenario:
    """Draw a hotspot that jumps between corners, while queries are added, terminated and expire."""
    chance = random.Random(seed)
    order = (0, 2, 1, 3)
    centres = [CORNERS[order[k // stay % 4]] for k in range(batches)]
    scenario = Scenario(drawn(seed, centres, rows), [[] for _ in range(batches)])
    alive: list[int] = []
    number = 0
    for k, block in enumerate(scenario.requests):
        now = int(scenario.times[k, 0])
        span = rows * scenario.tick
        for _ in range(standing if k == 0 else 7):
            query: Record = {"op": "register", "query_id": number, "user_id": "u"}
            query.update(some_shape(chance))
            if chance.random() < 0.3:
                query["expires_at"] = now + chance.randrange(1, 10 * span)
            elif chance.random() < 0.1:
                query["at"] = now + chance.randrange(0, 2 * span)
            if query.get("at") is None:  # others are never terminated: they might not have started
                alive.append(number)
            block.append(query)
            number += 1
        for _ in range(0 if k == 0 else 4):
            gone = alive.pop(chance.randrange(len(alive)))
            at = None if chance.random() < 0.5 else now + chance.randrange(0, 2 * span)
            block.append({"op": "terminate", "query_id": gone, "user_id": "u", "at": at})
    return scenario


# --------------------------------------------------------------------------- matches


@dataclass
class LiveQuery:
    """A query, and the event times in which it is live."""

    query: Record
    start: float = -math.inf
    until: float = math.inf


def box_around(query: Record) -> Bounds:
    if query.get("wkt"):
        bounds: Bounds = shapely.from_wkt(query["wkt"]).bounds
        return bounds
    if query.get("radius") is not None:
        x, y, r = query["cx"], query["cy"], query["radius"] * (1 + 1e-12)
        return x - r, y - r, x + r, y + r
    return query["x0"], query["y0"], query["x1"], query["y1"]


def cell(value: float) -> int:
    """Return the cell of a coordinate on an axis, by a linear search of the borders."""
    found = 0
    while found < CELLS - 1 and value >= EDGES[found + 1]:
        found += 1
    return found


def inside(query: Record, xy: np.ndarray) -> np.ndarray:
    x, y = xy[:, 0], xy[:, 1]
    if query.get("wkt"):
        return shapely.intersects(shapely.from_wkt(query["wkt"]), shapely.points(x, y))
    if query.get("radius") is not None:
        return (x - query["cx"]) ** 2 + (y - query["cy"]) ** 2 <= query["radius"] ** 2
    return (x >= query["x0"]) & (x <= query["x1"]) & (y >= query["y0"]) & (y <= query["y1"])


class Truth:
    """Expected values of a scenario, batch by batch."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._ranges: dict[int, tuple[int, int, int, int]] = {}

    def live_queries(self, batch: int) -> dict[int, LiveQuery]:
        """Return the queries known to a batch, with the times in which they are live."""
        found: dict[int, LiveQuery] = {}
        for request in (r for block in self.scenario.requests[: batch + 1] for r in block):
            at = -math.inf if request.get("at") is None else request["at"]
            if request["op"] == "register":
                until = request.get("expires_at")
                until = math.inf if until is None else until
                found[request["query_id"]] = LiveQuery(request, at, until)
            else:
                live_query = found[request["query_id"]]
                live_query.until = min(live_query.until, at)
        return found

    def matches(self, batch: int) -> set[tuple[int, int]]:
        xy, times = self.scenario.xy[batch], self.scenario.times[batch]
        found: set[tuple[int, int]] = set()
        for number, live_query in self.live_queries(batch).items():
            hit = (
                inside(live_query.query, xy)
                & (times >= live_query.start)
                & (times < live_query.until)
            )
            rows = np.flatnonzero(hit) + batch * self.scenario.rows
            found.update((number, int(row)) for row in rows)
        return found

    @cached_property
    def all_matches(self) -> list[tuple[int, int, int]]:
        """Batch, query and point of every match of the scenario, sorted."""
        each = ((k, q, p) for k in range(self.scenario.batches) for q, p in self.matches(k))
        return sorted(each)

    def now(self, batch: int) -> float:
        """Return the event time that most points have reached before a batch: their median."""
        if batch == 0:
            return -math.inf
        times = np.sort(self.scenario.times[batch - 1])
        return float(times[(times.size - 1) // 2])

    def range_of(self, query: Record) -> tuple[int, int, int, int]:
        """Return the inclusive range of cells of a query."""
        number = query["query_id"]
        if number not in self._ranges:
            x0, y0, x1, y1 = box_around(query)
            self._ranges[number] = (cell(x0), cell(y0), cell(x1), cell(y1))
        return self._ranges[number]

    def counted(self, batch: int) -> dict[int, tuple[int, int, int, int]]:
        """Return the cells of the queries that are not terminated before a batch."""
        now = self.now(batch)
        return {
            number: self.range_of(live_query.query)
            for number, live_query in self.live_queries(batch).items()
            if live_query.until > now
        }

    def cells(self, batch: int) -> np.ndarray:
        """Count the points of a batch by row and column."""
        table = np.zeros((CELLS, CELLS))
        for x, y in self.scenario.xy[batch].tolist():
            table[cell(y), cell(x)] += 1
        return table


def overlaps(query: tuple[int, int, int, int], rect: Cells) -> bool:
    c0, r0, c1, r1 = query
    return c0 < rect[2] and c1 >= rect[0] and r0 < rect[3] and r1 >= rect[1]


def rect_of(p: Partition) -> Cells:
    return p.column0, p.row0, p.column1, p.row1


def in_partition(queries: dict[int, tuple[int, int, int, int]], p: Partition) -> set[int]:
    return {number for number, cells in queries.items() if overlaps(cells, rect_of(p))}


def read_matches(out: Path) -> list[tuple[int, int, int]]:
    """Return batch, query and point of every published row, sorted, with duplicates."""
    found = []
    for path in (out / "matches").glob("*.parquet"):
        table = pq.ParquetFile(path).read()
        columns = (table[name].to_pylist() for name in ("batch_id", "query_id", "point_id"))
        found += list(zip(*columns, strict=True))
    return sorted(found)


# --------------------------------------------------------------------------- plans


def recorded(state: Path, table: str) -> list[Record]:
    """Return the ``plans`` or ``rounds`` of a state directory in order, read without Roost."""
    db = sqlite3.connect(state / "state.db")
    try:
        statement = "select key, value from facts where tbl = ? order by key"
        rows = db.execute(statement, (table,)).fetchall()
    finally:
        db.close()
    bodies = [json.loads(body) for _, body in rows]
    key = {"plans": "epoch", "rounds": "round"}[table]
    assert [body[key] for body in bodies] == [number for number, _ in rows]
    return bodies


def plans_of(state: Path) -> list[Plan]:
    return [Plan.from_json(body) for body in recorded(state, "plans")]


def cells_of(p: Partition) -> set[tuple[int, int]]:
    return {(c, r) for c in range(p.column0, p.column1) for r in range(p.row0, p.row1)}


def check_plan(plan: Plan, machines: int, grid: tuple[int, int] = (CELLS, CELLS)) -> None:
    """Check invariant 1, cell by cell."""
    owner: dict[tuple[int, int], int] = {}
    assert plan.machines == machines and (plan.columns, plan.rows) == grid
    for p in plan.partitions:
        assert p.machines and len(set(p.machines)) == len(p.machines)
        assert set(p.machines) <= set(range(machines))
        for place in cells_of(p):
            assert place not in owner, f"cell {place} in {owner[place]} and {p.partition_id}"
            owner[place] = p.partition_id
    assert set(owner) == {(c, r) for c in range(grid[0]) for r in range(grid[1])}
    assert len({p.partition_id for p in plan.partitions}) == len(plan.partitions)


def check_history(
    state: Path, *machines: int, grid: tuple[int, int] = (CELLS, CELLS)
) -> list[Plan]:
    """Check all plans of a state directory: complete, ids never reused, parents overlap.

    Without a number of machines, plans may have different numbers.
    """
    rows = recorded(state, "plans")
    plans, strategies = plans_of(state), [row["strategy"] for row in rows]
    known: dict[int, Cells] = {}
    assert [plan.epoch for plan in plans] == list(range(len(plans)))
    for number, plan in enumerate(plans):
        check_plan(plan, *(machines or (plan.machines,)), grid)
        fresh = [p for p in plan.partitions if p.partition_id not in known]
        before = plans[number - 1].partitions if number else ()
        still = {p.partition_id: p for p in before}
        for p in plan.partitions:
            if p in fresh:
                assert p.partition_id > max(known, default=-1), "an id was reused"
                continue
            assert known[p.partition_id] == rect_of(p), f"id {p.partition_id} for another rectangle"
            assert p.partition_id in still, f"id {p.partition_id} was reused"
            assert p.parents == still[p.partition_id].parents
        same = number and strategies[number] == strategies[number - 1]
        if same and plan.machines == plans[number - 1].machines:
            for p in fresh:
                mine = cells_of(p)
                over = {old.partition_id for old in before if mine & cells_of(old)}
                assert set(p.parents) == over and len(p.parents) == len(over)
        else:
            assert len(fresh) == len(plan.partitions), "a new strategy kept a partition"
            assert all(p.parents == () for p in fresh)
        assert all(p.partition_id < plan.next_id for p in plan.partitions)
        known.update((p.partition_id, rect_of(p)) for p in fresh)
    return plans


def assigned_partitions(before: Plan, after: Plan) -> dict[int, list[Partition]]:
    """Return the partitions that machines must load: those with a cell they did not own."""
    had: dict[int, set[tuple[int, int]]] = {m: set() for m in range(after.machines)}
    for p in before.partitions:
        for machine in p.machines:
            had[machine] |= cells_of(p)
    found: dict[int, list[Partition]] = {}
    for p in after.partitions:
        for machine in p.machines:
            if cells_of(p) - had[machine]:
                found.setdefault(machine, []).append(p)
    return found


def check_rounds(state: Path) -> list[Record]:
    """Check that rounds and plans agree; return the rounds that changed the plan."""
    rounds, plans = recorded(state, "rounds"), recorded(state, "plans")
    assert [row["round"] for row in rounds] == list(range(len(rounds)))
    assert all(isinstance(row["reason"], str) and row["reason"] for row in rounds)
    changed = [row for row in rounds if row["next_epoch"] is not None]
    for row in rounds:
        assert bool(row["changes"]) == (row["next_epoch"] is not None)
        assert row["imbalance"] >= 1.0 and row["seconds"] >= 0.0
    assert all(row["next_epoch"] == row["epoch"] + 1 for row in changed)
    assert {row["next_epoch"] for row in changed} <= {plan["epoch"] for plan in plans}
    for plan in plans:
        made = [row for row in changed if row["next_epoch"] == plan["epoch"]]
        assert len(made) <= 1
        if made:
            assert plan["strategy"] == made[0]["strategy"]
    return changed


# --------------------------------------------------------------------------- statistics


@dataclass
class Accuracy:
    """Accuracy of a partition's statistics.

    Along an axis that was never cut across, points are exact, and so is their sum unless a cut
    was along an axis that was not exact. The error of other values is at most the remaining weight
    of the points from before the cut.
    """

    columns: bool = True
    rows: bool = True
    total: bool = True
    doubt: float = 0.0  # weight of points older than the partition, as of the last close
    young: bool = False  # no round closed since then: new queries are known only along the cut
    merged: bool = False


@dataclass
class Reference:
    """Points by cell, halved in every round; queries now, and those received in the open round."""

    truth: Truth
    faded: np.ndarray = field(default_factory=lambda: np.zeros((CELLS, CELLS)))
    new: np.ndarray = field(default_factory=lambda: np.zeros((CELLS, CELLS)))
    queries: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    received: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    plan: Plan | None = None
    accuracy: dict[int, Accuracy] = field(default_factory=dict)

    def batch(self, number: int, plan: Plan, closes: bool) -> None:
        """Add one batch; ``closes`` if a round ended with the previous batch."""
        if closes:
            self.faded = FADE * self.faded + self.new
            self.new = np.zeros_like(self.new)
            self.received = {}
            for accuracy in self.accuracy.values():
                accuracy.doubt *= FADE
                accuracy.young = accuracy.merged = False
        self.queries = self.truth.counted(number)
        if self.plan is None:
            self.accuracy = {p.partition_id: Accuracy() for p in plan.partitions}
        elif plan.epoch != self.plan.epoch:
            self._reshape(plan)
        if self.plan is not None:
            block = self.truth.scenario.requests[number]
            new = {r["query_id"] for r in block if r["op"] == "register"}
            self.received |= {k: range_ for k, range_ in self.queries.items() if k in new}
        self.plan = plan
        self.new += self.truth.cells(number)

    def _reshape(self, plan: Plan) -> None:
        assert self.plan is not None
        before = {p.partition_id: p for p in self.plan.partitions}
        after: dict[int, Accuracy] = {}
        for p in plan.partitions:
            if p.partition_id in before:
                after[p.partition_id] = self.accuracy[p.partition_id]
                continue
            parents = [before[number] for number in p.parents]
            columns = all(self.accuracy[q.partition_id].columns for q in parents)
            rows = all(self.accuracy[q.partition_id].rows for q in parents)
            doubt = sum(self.accuracy[q.partition_id].doubt for q in parents)
            total = all(self.accuracy[q.partition_id].total for q in parents)
            made = Accuracy(columns, rows, total, doubt, young=True, merged=len(parents) > 1)
            if len(parents) == 1:
                self._cut(made, parents[0], p)
            after[p.partition_id] = made
        self.accuracy = after

    def _cut(self, made: Accuracy, parent: Partition, p: Partition) -> None:
        """Derive the accuracy of a part: columns are cut first, then what is left by rows."""
        c0, r0, c1, r1 = rect_of(parent)
        if (c0, c1) != (p.column0, p.column1):
            made.total &= made.columns
            made.rows = False
            made.doubt += self.points((p.column0, r0, p.column1, r1), self.faded)
        if (r0, r1) != (p.row0, p.row1):
            made.total &= made.rows
            made.columns = False
            made.doubt += self.points(rect_of(p), self.faded)

    @staticmethod
    def points(rect: Cells, table: np.ndarray) -> float:
        return float(table[rect[1] : rect[3], rect[0] : rect[2]].sum())

    def n(self, rect: Cells) -> float:
        """Count the points as of the end of the open round."""
        return FADE * self.points(rect, self.faded) + self.points(rect, self.new)

    def q(self, rect: Cells) -> int:
        return sum(overlaps(query, rect) for query in self.queries.values())

    def r(self, rect: Cells) -> float:
        queries = sum(overlaps(query, rect) for query in self.received.values())
        return self.points(rect, self.new) + queries

    def work(self, rect: Cells) -> float:
        """Return the estimated work: rows and columns are taken as independent."""
        sums = []
        for vertical in (True, False):
            low, high = (rect[0], rect[2]) if vertical else (rect[1], rect[3])
            total = 0.0
            for at in range(low, high):
                line = (
                    (at, rect[1], at + 1, rect[3]) if vertical else (rect[0], at, rect[2], at + 1)
                )
                # A query counts as received where it starts.
                new = [query for query in self.received.values() if overlaps(query, rect)]
                starts = (max(query[0 if vertical else 1], low) for query in new)
                received = self.points(line, self.new) + sum(start == at for start in starts)
                total += received * self.q(line)
            sums.append(total)
        known = self.r(rect) * self.q(rect)
        return PER_OBJECT * self.r(rect) + (sums[0] * sums[1] / known if known else 0.0)


def halves(rect: Cells, vertical: bool) -> list[tuple[int, Cells, Cells]]:
    """Return every straight cut of a rectangle, with its two sides."""
    c0, r0, c1, r1 = rect
    if vertical:
        return [(at, (c0, r0, at, r1), (at, r0, c1, r1)) for at in range(c0 + 1, c1)]
    return [(at, (c0, r0, c1, at), (c0, at, c1, r1)) for at in range(r0 + 1, r1)]


# --------------------------------------------------------------------------- what tasks report


@dataclass(frozen=True)
class MachineResult:
    """Metrics of one machine in a batch, from the reports of its stages."""

    machine: int
    points: int
    checks: int
    matches: int
    busy_s: float
    load_s: float
    loaded_bytes: int
    loaded_queries: int
    cost: float
    received: float


@dataclass
class Seen:
    """The input of the tasks of a batch, and their reports."""

    batch_id: int
    plan: Plan
    results: list[MachineResult]
    slots: dict[int, set[int]]  # queries of each partition, including terminated ones
    live: dict[int, int]  # number of live ones
    stats: dict[int, MachineStats]  # of each machine, in the open round


Busy = Callable[[int, Report], float]


def simulated_seconds(number: int, report: Report) -> float:
    """Compute the seconds that a machine is busy from its points and checks, without a clock."""
    return 1e-4 + 2e-6 * report.counts["points"] + 2e-8 * report.counts["checks"]


def counted(busy: Busy, number: int, report: Report) -> Report:
    """Replace the measured times of a report by those of the work, so that decisions repeat."""
    if report.stage != "matching":
        return replace(report, seconds=0.0)
    load_s = 1e-9 * report.counts["loaded_bytes"]
    counts = {**report.counts, "load_s": load_s}
    return replace(report, counts=counts, seconds=busy(number, report) + load_s)


class InProcessCounted(InProcessExecutor):
    """Runs batches in this process with counted times.

    Each batch is noted in ``seen``, if there is such a list; ``in_job`` is called after its tasks.
    """

    def __init__(
        self,
        busy: Busy = simulated_seconds,
        seen: list[Seen] | None = None,
        in_job: Callable[[int], None] = lambda number: None,
        **settings: Any,
    ) -> None:
        super().__init__(measure=lambda report: counted(busy, self._number, report), **settings)
        self._number = 0
        self._seen = seen
        self._in_job = in_job

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        self._number = tasks["matching"].number  # type: ignore[attr-defined]
        reports = super().run(inputs, chain, tasks, placement)
        if self._seen is not None:
            self._seen.append(observe(tasks, reports, self))
        self._in_job(self._number)
        return reports


def slots_in(
    files: Files, cache: WorkerCache, refs: Sequence[SegmentRef], partition: Partition, space: Space
) -> dict[str, NDArray[np.int64]]:
    """Return the slots of each segment in a partition, including terminated ones."""
    area = replace(partition, machines=(), parents=())
    return {ref.file: np.unique(_part(files, cache, ref.file, area, space).owners) for ref in refs}


def written_statistics(task: TrioTask, report: Report, executor: MapExecutor) -> MachineStats:
    """Read the statistics that a task wrote, perhaps to a folder of its executor."""
    name, path = report.value.file, task.files.path(report.value.file)
    copied = not path.exists()
    if copied:
        call = partial(copy_resident, task.files)
        assert executor.map(call, [name], [report.executor]) == [True]
    found = load_statistics(task.files, name)
    if copied:
        path.unlink()  # the next task shall find its own
    return found


def observe(
    tasks: Mapping[str, Any], reports: Mapping[str, Sequence[Report]], executor: MapExecutor
) -> Seen:
    task: MatchingTask = tasks["matching"]
    trio = tasks.get("statistics")
    folder, refs, cache = task.folder, task.segments, WorkerCache()
    names = {ref.file: unpack(folder.map(ref.file)).ids for ref in refs}
    slots, live = {}, {}
    now = trio.now if isinstance(trio, TrioTask) else 0
    for p in task.plan.partitions:
        found = slots_in(folder, cache, refs, p, task.space)
        listed = [names[file][int(k)].as_py() for file in found for k in found[file]]
        assert len(set(listed)) == len(listed), "a query occurs twice in a partition"
        slots[p.partition_id] = set(listed)
        live[p.partition_id] = len(live_ranges(folder, cache, refs, p, task.space, now).ranges)
    noted = {report.machine: report for report in reports.get("statistics", ())}
    results = []
    for report in reports["matching"]:
        other = noted.get(report.machine, Report(None, {"loaded_queries": 0}))
        value = other.value if isinstance(other.value, TrioValue) else None
        counts = report.counts
        results.append(
            MachineResult(
                report.machine,
                int(counts["points"]),
                int(counts["checks"]),
                int(counts["matches"]),
                report.seconds,
                counts["load_s"],
                int(counts["loaded_bytes"]),
                int(other.counts["loaded_queries"]),
                0.0 if value is None else value.cost,
                0.0 if value is None else value.received,
            )
        )
    stats = {
        machine: written_statistics(trio, report, executor)
        for machine, report in noted.items()
        if isinstance(trio, TrioTask)
    }
    return Seen(task.number, task.plan, results, slots, live, stats)


def check_statistics(truth: Truth, seen: Sequence[Seen], ended: set[int]) -> dict[str, int]:
    """Compare every statistic of every batch with its expected value; count them by kind."""
    reference = Reference(truth)
    done = {"exact": 0, "bounded": 0, "received": 0, "reports": 0}
    for one in seen:
        reference.batch(one.batch_id, one.plan, one.batch_id - 1 in ended)
        by_machine = {result.machine: result for result in one.results}
        for machine in range(one.plan.machines):
            own = one.plan.of_machine(machine)
            stats = one.stats[machine]
            assert set(stats.partitions) == {p.partition_id for p in own}
            stats.close_round()
            for p in own:
                check_partition(reference, stats.partitions[p.partition_id], done)
            check_report(reference, [rect_of(p) for p in own], by_machine[machine], done)
    return done


def check_partition(reference: Reference, found: Any, done: dict[str, int]) -> None:
    rect = (found.column0, found.row0, found.column1, found.row1)
    accuracy = reference.accuracy[found.partition_id]
    total = found.total()
    assert total.q == approx(reference.q(rect), rel=1e-12)
    least = 1e-6 if accuracy.total else 0.5 * accuracy.doubt + 1e-6
    assert abs(total.n - reference.n(rect)) <= least
    for vertical, exact in ((True, accuracy.columns), (False, accuracy.rows)):
        for at, first, second in halves(rect, vertical):
            for side, trio in zip((first, second), found.split(vertical, at), strict=True):
                # A partition cut in mid-round has shares of the open round's queries: rounding.
                assert trio.q == approx(reference.q(side), rel=1e-12)
                if exact:
                    assert trio.n == approx(reference.n(side))
                    done["exact"] += 1
                else:
                    assert abs(trio.n - reference.n(side)) <= 0.5 * accuracy.doubt + 1e-6
                    done["bounded"] += 1
                assert trio.r == approx(reference.r(side))
                done["received"] += 1


def check_report(
    reference: Reference,
    rects: Sequence[Any],
    result: MachineResult,
    done: dict[str, int],
) -> None:
    """Check the two numbers of a machine."""
    assert result.received == approx(sum(reference.r(rect) for rect in rects))
    assert result.cost == approx(sum(reference.work(rect) for rect in rects))
    done["reports"] += 1
