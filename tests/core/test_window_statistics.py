"""Expiry and TrioStat: with a window, a machine's N is the number of points in it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from trio_model import add_points, expire_points
from window_points import PLANE, TYPES, Point, block_of, random_points

from layouts import random_change, random_layout
from roost.balance import Partition, Plan, Router
from roost.balance.changes import Move, apply_changes
from roost.balance.swarm import ShedRequest, ShedTarget
from roost.kernel.ids import hash_ids
from roost.model.choices import WindowKind
from roost.queries.versions import IndexVersion
from roost.runtime import balancing
from roost.runtime.balancing import SwarmPolicy
from roost.runtime.executor import InProcessExecutor
from roost.stages.contract import Batch, Report, Stage
from roost.stages.matching import GATHERED, Gathered
from roost.stages.routing import SPACE, SpatialRouting
from roost.stages.statistics import Saved, TrioStage, load_statistics
from roost.stages.window import WindowStage
from roost.storage.cache import WorkerCache
from roost.storage.store import Store
from roost.window import WindowSpec
from roost.workload import CellCounts, MachineStats, PartitionStats

MACHINES = 3
SCHEMA = pa.schema(list(TYPES.items()))


def counts_of(points: list[Point]) -> CellCounts:
    block = block_of(points)
    cells, counts = np.unique(PLANE.grid.locate(block.x, block.y), return_counts=True)
    return CellCounts(cells.astype(np.int32), counts.astype(np.int64))


@pytest.mark.parametrize("seed", range(20))
def test_expired_cells_are_expired_points(seed: int) -> None:
    rng = np.random.default_rng(seed)
    by_cell, by_point = (PartitionStats(0, 3, 2, 11, 9) for _ in range(2))
    cells = np.unique(rng.integers(0, 16 * 16, 60))
    counts = CellCounts(cells.astype(np.int32), rng.integers(1, 5, cells.size))
    column, row = np.repeat(cells % 16, counts.counts), np.repeat(cells // 16, counts.counts)
    mine = (column >= 3) & (column < 11) & (row >= 2) & (row < 9)
    by_cell.expire_cells(counts, 16)
    expire_points(by_point, column[mine], row[mine])
    assert np.array_equal(by_cell.to_array(), by_point.to_array())


@pytest.mark.parametrize("moves_only", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_n_counts_the_points_of_the_window_after_any_plan_changes(
    tmp_path: Path, seed: int, moves_only: bool
) -> None:
    """Batches are whole in the window or not at all here, as they are for TrioStat."""
    rng = random.Random(seed)
    layout = random_layout(rng, 16, 16, 6)
    parts = tuple(Partition(n, *s, (rng.randrange(MACHINES),)) for n, s in enumerate(layout))
    plan = before = Plan(0, 16, 16, MACHINES, parts, len(parts))
    store = Store(tmp_path)
    spec = WindowSpec(WindowKind.COUNT, 90)
    window = WindowStage(
        spec, SCHEMA, {}, PLANE, store.files("window"), store.leases, WorkerCache()
    )
    stage = TrioStage(PLANE, store.files("segments"), store.files("trio"), window)
    for one in (window, stage):
        one.open(store)
    batches: list[list[Point]] = []
    for number in range(12):
        points = random_points(rng, 30, PLANE, first=100 * number)
        batches.append(points)
        routings = {SPACE: SpatialRouting(plan, PLANE)}
        old = {SPACE: SpatialRouting(before, PLANE)}
        batch = Batch(number, routings, old, IndexVersion(0, 0, ()), closes_round=True)
        reports = _ran(batch, {"window": window, "statistics": stage}, points, plan)
        for one in (window, stage):
            outcome = one.after(batch, reports, InProcessExecutor())
            batch = replace(batch, outcomes={**batch.outcomes, one.name: outcome})
        store.record(*(fact for outcome in batch.outcomes.values() for fact in outcome.facts))
        for one in (window, stage):
            one.committed(batch, batch.outcomes[one.name])
            one.cleanup()
        # Three are in the window, and the next batch subtracts the one that has just left it.
        check = _check_each if moves_only else _check_all
        check(stage, plan, batches[-4:])
        before, plan = plan, _changed(rng, plan, moves_only)
    store.close()


def _ran(
    batch: Batch, stages: dict[str, Stage], points: list[Point], plan: Plan
) -> dict[str, list[Report]]:
    """Run the machines' share of a batch of routed points."""
    block = block_of(points)
    cells = PLANE.grid.locate(block.x, block.y).astype(np.int32)
    machines = Router(plan).machines_of(cells, hash_ids(block.ids)).tolist()
    tasks = {name: stage.prepare(batch) for name, stage in stages.items()}
    reports: dict[str, list[Report]] = {name: [] for name in stages}
    for machine in range(MACHINES):
        own = [p for p, m in zip(points, machines, strict=True) if m == machine]
        for name, task in tasks.items():
            work = task.build(machine, WorkerCache())
            if own:
                list(work.process(GATHERED, Gathered(block_of(own), None)))
            list(work.finish(None))
            reports[name].append(replace(work.report(), stage=name, machine=machine))
    return reports


@pytest.mark.parametrize(("windowed", "expected"), [(True, 100.0), (False, 50.0)])
def test_shedding_sees_the_same_numbers_as_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windowed: bool, expected: float
) -> None:
    """With a window points do not fade, neither in a report nor when load is to be shed."""
    store = Store(tmp_path)
    spec, files = WindowSpec(WindowKind.COUNT, 90), store.files("trio")
    window = WindowStage(spec, SCHEMA, {}, PLANE, files, store.leases, WorkerCache())
    stage = TrioStage(PLANE, store.files("segments"), files, window if windowed else None)
    stats = PartitionStats(0, 0, 0, 16, 16)
    add_points(stats, np.zeros(100, np.int64), np.zeros(100, np.int64))
    stats.close_round(1.0)
    files.write("0.trio", MachineStats([stats]).to_arrays())
    stage.saved = Saved({0: "0.trio"})
    shed: list[MachineStats] = []
    monkeypatch.setattr(
        balancing, "shed", lambda machine_stats, *request: shed.append(machine_stats) or ()
    )
    SwarmPolicy(stage, {})._shed({0}, {0: 1.0}, 0, ShedRequest((ShedTarget(1, 0.0),), 1.0, 1))
    assert shed[0].partitions[0].total().n == expected
    store.close()


def _changed(rng: random.Random, plan: Plan, moves_only: bool) -> Plan:
    """Return another plan without shared partitions: points of their shares look alike."""
    for _ in range(20):
        change = random_change(rng, plan)
        if change is not None and (isinstance(change, Move) or not moves_only):
            after = apply_changes(plan, [change])
            if all(len(p.machines) == 1 for p in after.partitions):
                return after
    return plan


def _check_all(stage: TrioStage, plan: Plan, batches: list[list[Point]]) -> None:
    """A cut knows rows or columns, not cells, and guesses the other axis; the sum it keeps."""
    total = 0.0
    for machine in range(MACHINES):
        stats = load_statistics(stage.files, stage.saved.names[machine])
        stats.close_round(1.0)
        total += sum(found.rows.n[-1] for found in stats.partitions.values())
    assert total == pytest.approx(sum(map(len, batches)))


def _check_each(stage: TrioStage, plan: Plan, batches: list[list[Point]]) -> None:
    counted = counts_of([point for points in batches for point in points]).dense(256)
    table = counted.reshape(16, 16)
    for machine in range(MACHINES):
        stats = load_statistics(stage.files, stage.saved.names[machine])
        stats.close_round(1.0)
        mine = plan.of_machine(machine)
        assert set(stats.partitions) == {p.partition_id for p in mine}
        for p in mine:
            inside = table[p.row0 : p.row1, p.column0 : p.column1]
            found = stats.partitions[p.partition_id]
            assert found.rows.n[-1] == found.columns.n[-1] == inside.sum()
            assert np.array_equal(found.rows.n, np.cumsum(inside.sum(axis=1)))
            assert np.array_equal(found.columns.n, np.cumsum(inside.sum(axis=0)))
