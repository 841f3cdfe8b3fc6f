"""Expiry and TrioStat: with a window, a machine's N is the number of points in it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from window_points import PLANE, TYPES, Point, block_of, random_points

from layouts import random_change, random_layout
from roost.balance import Partition, Plan, Router
from roost.balance.changes import Move, apply_changes
from roost.balance.swarm import ShedRequest
from roost.engine import balancer
from roost.engine.balancer import RoundSetup, SwarmBalancer
from roost.engine.decode import PointSchema
from roost.engine.machine_stats import keep_statistics, load_statistics
from roost.engine.messages import BatchTask, MachineResult, TrioTask, WindowTask
from roost.engine.window_writer import WindowWriter
from roost.state.admission import Rules
from roost.state.queries import QuerySet
from roost.state.querylog import SqliteQueryLog
from roost.state.segments import write_arrays
from roost.state.store import Commit, Intent, Store
from roost.state.windows import WindowKeeper
from roost.window import WindowKind, WindowSpec
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
    by_point.expire_points(column[mine], row[mine])
    assert np.array_equal(by_cell.to_array(), by_point.to_array())


@pytest.mark.parametrize("moves_only", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_n_is_the_points_of_the_window_whatever_becomes_of_the_plan(
    tmp_path: Path, seed: int, moves_only: bool
) -> None:
    """Batches are whole in the window or not at all here, as they are for TrioStat."""
    rng = random.Random(seed)
    layout = random_layout(rng, 16, 16, 6)
    parts = tuple(Partition(n, *s, (rng.randrange(MACHINES),)) for n, s in enumerate(layout))
    plan = before = Plan(0, 16, 16, MACHINES, parts, len(parts))
    store = Store(tmp_path)
    keeper = WindowKeeper(store, WindowSpec(WindowKind.COUNT, 90), SCHEMA, {})
    stats_folder, queries = tmp_path / "trio", tmp_path / "segments"
    stats_folder.mkdir()
    files: dict[int, str] = {}
    batches: list[list[Point]] = []
    for batch_id in range(12):
        points = random_points(rng, 30, PLANE, first=100 * batch_id)
        batches.append(points)
        gone = tuple(str(keeper.folder / file.file) for file in keeper.gone)
        trio = TrioTask(str(stats_folder), dict(files), before, True, 0, 1.0, gone)
        schema = PointSchema("x", "y", "time", "id", pa.int64(), pa.int64(), SCHEMA)
        task = BatchTask(batch_id, PLANE, plan, str(queries), (), schema, (), pa.string(), None, "")
        block = block_of(points)
        machines = Router(plan).machines_of(PLANE.grid.locate(block.x, block.y)).tolist()
        written = []
        for machine in range(MACHINES):
            own = [p for p, m in zip(points, machines, strict=True) if m == machine]
            result = MachineResult(machine)
            keep_statistics(task, trio, counts_of(own), result)
            (files[machine],) = result.trio_files
            writer = WindowWriter(
                task, WindowTask(str(keeper.folder), keeper.stored, {}, 0), machine, Router(plan)
            )
            if own:
                writer.add(block_of(own), None)
            made = writer.close()
            written += [] if made is None else [made]
        store.put_intent(Intent(batch_id, plan.epoch, 0))
        after = keeper.preview(batch_id, plan, written)
        store.put_commit(Commit(batch_id, (), {}), keeper.change(after))
        keeper.committed(after)
        keeper.sweep()
        # Three are in the window, and the one that just left it is taken out by the next batch.
        check = _check_each if moves_only else _check_all
        check(files, plan, batches[-4:])
        before, plan = plan, _changed(rng, plan, moves_only)


@pytest.mark.parametrize(("kept", "expected"), [(True, 100.0), (False, 50.0)])
def test_a_machine_is_asked_with_the_numbers_that_it_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, expected: float
) -> None:
    """With a window points do not fade, neither in a report nor when load is to be shed."""
    store = Store(tmp_path)
    spec = WindowSpec(WindowKind.COUNT, 90)
    keeper = WindowKeeper(store, spec, SCHEMA, {}) if kept else None
    log = SqliteQueryLog(tmp_path / "queries.db")
    queries = QuerySet(store, log, Rules(PLANE, pa.string(), pa.int64()))
    swarm = SwarmBalancer(RoundSetup(store, queries, 1, windows=keeper))
    stats = PartitionStats(0, 0, 0, 16, 16)
    stats.add_points(np.zeros(100, np.int64), np.zeros(100, np.int64))
    stats.close_round(1.0)
    path = tmp_path / "0.trio"
    write_arrays(path, MachineStats([stats]).to_arrays())
    swarm._files = {0: str(path)}
    asked: list[MachineStats] = []
    monkeypatch.setattr(
        balancer, "shed", lambda machine_stats, *request: asked.append(machine_stats) or ()
    )
    swarm._ask(np.empty((0, 4), np.int32), 0, ShedRequest(1, 0.0, 1.0, 1))
    assert asked[0].partitions[0].total().n == expected


def _changed(rng: random.Random, plan: Plan, moves_only: bool) -> Plan:
    """Another plan, in which no partition is shared: shares of its points are not told apart."""
    for _ in range(20):
        change = random_change(rng, plan)
        if change is not None and (isinstance(change, Move) or not moves_only):
            after = apply_changes(plan, [change])
            if all(len(p.machines) == 1 for p in after.partitions):
                return after
    return plan


def _check_all(files: dict[int, str], plan: Plan, batches: list[list[Point]]) -> None:
    """A cut knows rows or columns, not cells, and guesses the other axis; the sum it keeps."""
    total = 0.0
    for machine in range(MACHINES):
        stats = load_statistics(Path(files[machine]))
        stats.close_round(1.0)
        total += sum(found.rows.n[-1] for found in stats.partitions.values())
    assert total == pytest.approx(sum(map(len, batches)))


def _check_each(files: dict[int, str], plan: Plan, batches: list[list[Point]]) -> None:
    counted = counts_of([point for points in batches for point in points]).dense(256)
    table = counted.reshape(16, 16)
    for machine in range(MACHINES):
        stats = load_statistics(Path(files[machine]))
        stats.close_round(1.0)
        mine = plan.of_machine(machine)
        assert set(stats.partitions) == {p.partition_id for p in mine}
        for p in mine:
            inside = table[p.row0 : p.row1, p.column0 : p.column1]
            found = stats.partitions[p.partition_id]
            assert found.rows.n[-1] == found.columns.n[-1] == inside.sum()
            assert np.array_equal(found.rows.n, np.cumsum(inside.sum(axis=1)))
            assert np.array_equal(found.columns.n, np.cumsum(inside.sum(axis=0)))
