"""Snapshot queries: at any time they equal brute force over the points of the window."""

from __future__ import annotations

import datetime as dt
import math
import random
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_window_lineage import next_plan
from window_points import EARTH, PLANE, TYPES, Point, block_of, random_points

from layouts import random_layout
from roost.balance import Partition, Plan, Router
from roost.errors import ConfigError, RequestError, StateError
from roost.kernel.ids import hash_ids
from roost.model.choices import WindowKind
from roost.model.records import Box, Circle, Polygon
from roost.model.space import Outside, Space
from roost.queries.admission import Rules
from roost.queries.snapshots import check_snapshot
from roost.queries.versions import IndexVersion
from roost.runtime.executor import InProcessExecutor
from roost.stages.contract import Batch, Report
from roost.stages.matching import GATHERED, Gathered
from roost.stages.routing import SPACE, SpatialRouting
from roost.stages.window import WindowStage
from roost.storage.cache import WorkerCache
from roost.storage.store import Store
from roost.testing.oracle import covers, haversine
from roost.window import Alias, WindowSpec
from roost.window.aggregate import AggregateSpec
from roost.window.snapshot import (
    Columns,
    SnapshotQuery,
    merge_results,
    plan_scans,
    run_scans,
)
from roost.window.view import (
    WindowFiles,
    lease_view,
    read_view,
    window_files,
)

MACHINES = 3
ATTRIBUTES = pa.schema([*TYPES.items(), ("x", pa.float64()), ("time", pa.int64())])
ALIASES = {"x": Alias.X, "time": Alias.NUMBER}
COLUMNS = Columns("x", "y", "time", "id", pa.int64(), pa.int64(), ATTRIBUTES)
SPECS = [
    WindowSpec(WindowKind.TIME, 30, lateness=30),
    WindowSpec(WindowKind.TIME, 30, lateness=5),
    WindowSpec(WindowKind.TIME, 25, tumbling=True, lateness=1000),
    WindowSpec(WindowKind.COUNT, 70),
    WindowSpec(WindowKind.COUNT, 90, tumbling=True),
    WindowSpec(WindowKind.BYTES, 25_000),
    WindowSpec(WindowKind.BYTES, 40_000, tumbling=True),
]


class Scenario:
    """A stream with plan changes and driver restarts, and a list of all its points."""

    def __init__(self, folder: Path, spec: WindowSpec, space: Space, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.spec, self.space = folder, spec, space
        layout = random_layout(self.rng, space.columns, space.rows, 5)
        parts = tuple(
            Partition(n, *sides, (self.rng.randrange(MACHINES),)) for n, sides in enumerate(layout)
        )
        self.plan = Plan(0, space.columns, space.rows, MACHINES, parts, len(parts))
        self.batches: list[list[Point]] = []
        self.sizes: list[int] = []
        self.open()

    def open(self) -> None:
        """Start a driver on the state directory."""
        self.store = Store(self.folder)
        self.cache = WorkerCache()
        files = window_files(self.store)
        self.stage = WindowStage(
            self.spec, ATTRIBUTES, ALIASES, self.space, files, self.store.leases, self.cache
        )
        self.stage.open(self.store)
        self.stage.cleanup()

    def close(self) -> None:
        self.store.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    @property
    def files(self) -> WindowFiles:
        return WindowFiles(self.stage.files, self.cache)

    def _batch(self, number: int) -> Batch:
        routings = {SPACE: SpatialRouting(self.plan, self.space)}
        return Batch(number, routings, routings, IndexVersion(0, 0, ()))

    def _reports(self, number: int, points: list[Point]) -> list[Report]:
        block = block_of(points)
        cells = self.space.grid.locate(block.x, block.y).astype(np.int32)
        machines = Router(self.plan).machines_of(cells, hash_ids(block.ids))
        task = self.stage.prepare(self._batch(number))
        reports = []
        for machine in range(MACHINES):
            work = task.build(machine, WorkerCache())
            own = [p for p, m in zip(points, machines.tolist(), strict=True) if m == machine]
            cut = self.rng.randint(0, len(own))
            for part in (own[:cut], own[cut:]):
                if part:
                    list(work.process(GATHERED, Gathered(block_of(part), None)))
            list(work.finish(None))
            reports.append(replace(work.report(), machine=machine))
        return reports

    def step(self) -> None:
        rng, batch_id = self.rng, len(self.batches)
        if rng.random() < 0.6:
            self.plan = next_plan(rng, self.plan)
        seen = [p["time"] for points in self.batches for p in points]
        watermark = self.spec.watermark(max(seen, default=None))
        points = random_points(rng, rng.choice([0, 1, 10, 40]), self.space, first=1000 * batch_id)
        for point in points:
            point["time"] += 8 * batch_id
        points = [p for p in points if watermark is None or p["time"] >= watermark]
        reports = self._reports(batch_id, points)
        if rng.random() < 0.3:
            self.reopen()  # the driver stops before its commit, so its files do not count
            reports = self._reports(batch_id, points)
        batch = self._batch(batch_id)
        outcome = self.stage.after(batch, {"window": reports}, InProcessExecutor())
        self.store.record(*outcome.facts)
        if rng.random() < 0.2:
            self.reopen()
        else:
            self.stage.committed(batch, outcome)
            state = self.stage.state()
            self.stage.open(self.store)
            assert self.stage.state() == state
            self.stage.cleanup()
        self.batches.append(points)
        self.sizes.append(sum(r.value.nbytes for r in reports if r.value is not None))

    def window(self) -> list[Point]:
        """Return the live points by the definitions in the documentation."""
        ordered = [
            p for points in self.batches for p in sorted(points, key=lambda p: (p["time"], p["id"]))
        ]
        spec, everything = self.spec, len(ordered)
        if not ordered:
            return []
        if spec.kind is WindowKind.TIME:
            now = max(p["time"] for p in ordered)
            if spec.tumbling:
                return [p for p in ordered if p["time"] >= now // spec.length * spec.length]
            return [p for p in ordered if now - spec.length < p["time"]]
        if spec.kind is WindowKind.COUNT:
            count = (everything - 1) % spec.length + 1 if spec.tumbling else spec.length
            return ordered[-count:]
        return [p for number in self._by_bytes() for p in self.batches[number]]

    def _by_bytes(self) -> list[int]:
        full = [n for n, points in enumerate(self.batches) if points]
        if self.spec.tumbling:
            starts = {n: sum(self.sizes[m] for m in full if m < n) for n in full}
            begun = starts[full[-1]] // self.spec.length
            return [n for n in full if starts[n] // self.spec.length == begun]
        kept = [full.pop()]
        while full and sum(self.sizes[n] for n in [*kept, full[-1]]) <= self.spec.length:
            kept.append(full.pop())
        return kept

    def run(self, query: SnapshotQuery) -> pa.Table:
        rules = Rules(self.space, pa.string(), pa.int64(), ATTRIBUTES)
        check_snapshot(query, rules)
        view = read_view(self.store)
        assert view.batch_id == len(self.batches) - 1
        parts = plan_scans(view, self.files, self.space, query)
        self.files.retain(view.batch_ids)
        dealt = [parts[k::2] for k in range(2)]
        results = [run_scans(query, COLUMNS, group, self.files) for group in dealt]
        table = merge_results(query, COLUMNS, results, view.batch_id)
        assert set(table["at_batch"].to_pylist()) <= {view.batch_id}
        return table


def random_shape(rng: random.Random, space: Space) -> Box | Circle | Polygon:
    b = space.bounds
    x0, x1 = sorted(rng.uniform(b.x0, b.x1) for _ in range(2))
    y0, y1 = sorted(rng.uniform(b.y0, b.y1) for _ in range(2))
    kind = rng.choice(["box", "circle", "polygon"])
    if kind == "box":
        return Box(x0, y0, x1, y1)
    if kind == "circle":
        return Circle(x0, y0, rng.uniform(0, 5e6) if space is EARTH else rng.uniform(0, 8))
    return Polygon(f"POLYGON(({x0} {y0}, {x1} {y0}, {x1} {y1}, {x0} {y0}))")


def covers_point(shape: Box | Circle | Polygon, point: Point, space: Space) -> bool:
    fields: dict[str, Any] = (
        {"wkt": shape.text}
        if isinstance(shape, Polygon)
        else {name: getattr(shape, name) for name in type(shape).__slots__}
    )
    return covers(fields, point["x"], point["y"], space is EARTH)


def distance(point: Point, x: float, y: float, space: Space) -> float:
    if space is EARTH:
        return haversine(x, y, point["x"], point["y"])
    return math.hypot(point["x"] - x, point["y"] - y)


@pytest.mark.sweep([0, 80651], 1, 30)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.length}-{s.tumbling}")
def test_a_snapshot_is_the_window_at_its_batch(
    tmp_path: Path, cleanup: ExitStack, spec: WindowSpec, seed: int
) -> None:
    space = (PLANE, EARTH)[seed % 2]
    scenario = cleanup.enter_context(closing(Scenario(tmp_path, spec, space, seed)))
    found_some = 0
    for _ in range(14):
        scenario.step()
        window = scenario.window()
        rng = scenario.rng
        shape = random_shape(rng, space)
        inside = [p for p in window if covers_point(shape, p, space)]
        found = scenario.run(SnapshotQuery(shape))
        assert sorted(found["id"].to_pylist()) == sorted(p["id"] for p in inside)
        found_some += len(inside)
        everything = scenario.run(SnapshotQuery()).sort_by("id").to_pylist()
        assert [p["id"] for p in everything] == sorted(p["id"] for p in window)
        some = {p["id"]: p for p in window}
        assert all(row[name] == some[row["id"]][name] for row in everything for name in COMPARED)

        rich = [p for p in inside if p["fare"] is not None and p["fare"] > 0 and p["x"] < 9]
        timed = SnapshotQuery(shape, "fare > 0 and x < 9", since=20, until=80)
        wanted = sorted(p["id"] for p in rich if 20 <= p["time"] < 80)
        assert sorted(scenario.run(timed)["id"].to_pylist()) == wanted

        x, y = rng.choice([(p["x"], p["y"]) for p in window] or [(0.0, 0.0)])
        near = scenario.run(SnapshotQuery(Circle(x, y, math.inf), nearest=5)).to_pylist()
        ranked = sorted((distance(p, x, y, space), p["id"]) for p in window)[:5]
        # Distances, not identifiers: on a sphere, two may differ in the last bit only.
        assert [row["distance"] for row in near] == pytest.approx([d for d, _ in ranked], rel=1e-9)
        assert len({row["id"] for row in near}) == len(ranked)

        functions = (("count", None, None), ("sum", "seats", None), ("max", "fare", None))
        (row,) = scenario.run(SnapshotQuery(shape, aggregate=AggregateSpec(functions))).to_pylist()
        seats = [p["seats"] for p in inside if p["seats"] is not None]
        fares = [p["fare"] for p in inside if p["fare"] is not None]
        assert row["count"] == len(inside)
        assert row["sum(seats)"] == (sum(seats) if seats else None)
        assert row["max(fare)"] == max(fares, default=None)
    assert found_some
    listed = {f.file for b in scenario.stage.view.batches for f in b.files}
    listed |= set(scenario.stage.gone)
    assert set(scenario.stage.files.names()) == listed
    assert len(scenario.cache._entries["window"]) <= sum(
        len(batch.files) for batch in scenario.stage.view.batches
    )


COMPARED = ("x", "y", "time", "fare", "seats", "base", "ok")


def test_only_files_that_may_match_are_opened(tmp_path: Path, cleanup: ExitStack) -> None:
    spec = WindowSpec(WindowKind.COUNT, 10**6)
    scenario = cleanup.enter_context(closing(Scenario(tmp_path, spec, PLANE, 3)))
    for _ in range(10):
        scenario.step()
    view = read_view(scenario.store)
    everything = sum(len(batch.files) for batch in view.batches)
    corner = plan_scans(view, scenario.files, PLANE, SnapshotQuery(Box(0, 0, 1.5, 1.5)))
    assert 0 < len(corner) < everything
    assert any(part.partitions is not None for part in corner)
    nowhere = plan_scans(view, scenario.files, PLANE, SnapshotQuery(Box(500, 500, 501, 501)))
    assert nowhere == []
    files = {file.file: file for batch in view.batches for file in batch.files}
    for name, file in files.items():
        x0, y0, x1, y1 = file.bounds
        for box in (Box(x1, y0, x1 + 1, y1), Box(x0 - 1, y0, x0, y1),
                    Box(x0, y1, x1, y1 + 1), Box(x0, y0 - 1, x1, y0)):  # fmt: skip
            scans = plan_scans(view, scenario.files, PLANE, SnapshotQuery(box))
            assert name in {scan.file for scan in scans}, "a point is on the edge"
    for since, until in ((None, 50), (50, None), (40, 60)):
        timed = plan_scans(view, scenario.files, PLANE, SnapshotQuery(since=since, until=until))
        first, last = (since or 0), (10**9 if until is None else until - 1)
        overlap = {n for n, f in files.items() if f.time_max >= first and f.time_min <= last}
        assert {scan.file for scan in timed} == overlap
        assert 0 < len(overlap) < everything


def test_files_of_a_leased_window_stay_until_the_lease_is_released(
    tmp_path: Path, cleanup: ExitStack
) -> None:
    spec = WindowSpec(WindowKind.COUNT, 1)
    scenario = cleanup.enter_context(closing(Scenario(tmp_path, spec, PLANE, 5)))
    while not scenario.window():
        scenario.step()
    reader = cleanup.enter_context(closing(Store(tmp_path, durable=False)))
    lease, view = lease_view(reader)
    held = [file.file for batch in view.batches for file in batch.files]
    assert held
    for _ in range(8):
        scenario.step()
    assert all(scenario.stage.files.path(name).exists() for name in held)
    reader.leases.release(lease)
    for _ in range(8):
        scenario.step()
    assert not any(scenario.stage.files.path(name).exists() for name in held)


def test_leases_expire(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        store.leases.take(0, until=100.0)
        assert store.leases.oldest(now=99.0) == 0
        assert store.leases.oldest(now=101.0) is None
        assert store.leases.oldest(now=99.0) is None


def test_a_state_without_a_window_is_refused(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store, pytest.raises(StateError, match="no window yet"):
        read_view(store)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (SnapshotQuery(Box(2, 0, 1, 1)), "x0 is greater"),
        (SnapshotQuery(Circle(0, 0, math.nan)), "finite"),
        (SnapshotQuery(Circle(0, 0, math.inf)), "finite"),
        (SnapshotQuery(Circle(0, 0, -1)), "radius"),
        (SnapshotQuery(Polygon("POINT(1 1)")), "polygon"),
        (SnapshotQuery(predicate="fare >"), "end"),
        (SnapshotQuery(predicate="colour = 1"), "colour"),
        (SnapshotQuery(Box(0, 0, 1, 1), nearest=3), "circle"),
        (SnapshotQuery(Circle(0, 0, 1), nearest=0), "from 1 up"),
        (SnapshotQuery(Circle(0, 0, 1), nearest=2.5), "from 1 up"),  # type: ignore[arg-type]
        (SnapshotQuery(Circle(0, 0, 1), nearest=True), "from 1 up"),
        (SnapshotQuery(since=dt.datetime(2024, 1, 1, tzinfo=dt.UTC)), "whole numbers"),
        (SnapshotQuery(until=1.5), "whole numbers"),  # type: ignore[arg-type]
        (SnapshotQuery(Circle(0, 0, 1), since=1, nearest=1), "no times"),
        (SnapshotQuery(Circle(math.nan, 0, math.inf), nearest=1), "finite"),
    ],
)
def test_an_invalid_query_is_refused(query: SnapshotQuery, words: str) -> None:
    rules = Rules(PLANE, pa.string(), pa.int64(), ATTRIBUTES)
    with pytest.raises(RequestError, match=words):
        check_snapshot(query, rules)


def test_a_query_outside_the_bounds_is_valid_even_if_such_points_are_rejected() -> None:
    space = replace(PLANE, outside=Outside.DEAD)
    rules = Rules(space, pa.int64(), pa.int64(), ATTRIBUTES)
    check_snapshot(SnapshotQuery(Circle(500.0, 500.0, 1.0)), rules)
    with pytest.raises(RequestError, match="colour"):
        check_snapshot(SnapshotQuery(Circle(500.0, 500.0, 1.0), "colour = 1"), rules)


def test_aggregates_of_identifiers_depend_on_their_type() -> None:
    spec = AggregateSpec((("avg", "id", None),))
    known = Rules(PLANE, pa.string(), pa.int64(), ATTRIBUTES, point_id_type=pa.int64())
    check_snapshot(SnapshotQuery(aggregate=spec), known)
    with pytest.raises(ConfigError, match="numbers"):
        check_snapshot(SnapshotQuery(aggregate=spec), replace(known, point_id_type=pa.string()))


def test_an_aggregate_of_an_unknown_column_is_refused() -> None:
    rules = Rules(PLANE, pa.string(), pa.int64(), ATTRIBUTES)
    spec = AggregateSpec((("sum", "colour", None),))
    with pytest.raises(ConfigError, match="colour"):
        check_snapshot(SnapshotQuery(aggregate=spec), rules)
