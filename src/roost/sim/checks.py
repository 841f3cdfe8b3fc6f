"""Brute-force checks of invariants 1, 2, 5 and 6 of a simulated cluster, after every step.

The checks are written from the definitions. They inspect every cell, every query and every cut, and
use only the results of the code under test:

1. Every cell is in exactly one partition, every partition has machines; each point went to one.
2. Every machine has exactly the queries that overlap its partitions. A query arrives as in the
   engine: through the index on registration, through ``arrivals`` when a plan changes, and
   otherwise only from partitions that the machine had before.
5. The statistics of every partition and of every cut are the true counts.
6. A plan change affects only the partitions it names, a machine loads a partition only if it did
   not own all its cells, and data stored under an earlier plan is found through parents: a snapshot
   of a window of some rounds, over the partitions of the lineage, has all its points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Merge, Move, Replan, Split, arrivals
from roost.balance.global_index import GlobalIndex
from roost.balance.plan import Partition, Plan
from roost.model.arrays import Ints
from roost.sim.policies import Driver, SimulatedRound, StatisticsDriver
from roost.sim.workloads import QueryTable, Rect, overlap
from roost.window import Lineage
from roost.workload.trio import PartitionStats, Trio

# Rounds of stored data that snapshots must find.
_WINDOW_ROUNDS = 6


class InvariantError(AssertionError):
    """An invariant is violated; the message has its number, the round and the seed."""


class Checker:
    """Observes a cluster and raises :class:`InvariantError` if an invariant is violated."""

    def __init__(self, seed: int, plan: Plan, query_table: QueryTable, fade: float) -> None:
        self._seed, self._fade = seed, fade
        self._step = "start"
        self._query_table = query_table
        self._plan = plan
        self._index = GlobalIndex(plan)
        # Ids of the queries of each machine's share of a partition.
        self._held = {
            (machine, p.partition_id): self._overlapping(p)
            for p in plan.partitions
            for machine in p.machines
        }
        # Partition of each cell and points by cell of the last rounds.
        self._stored: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._lineage = Lineage()
        self._random = np.random.default_rng(seed)
        self._registered = self._terminated = np.empty(0, np.int64)
        self._points_before: dict[tuple[int, int], list[float]] = {}
        self._check_plan(plan)

    def _require(self, holds: bool, invariant: int, text: str) -> None:
        if not holds:
            raise InvariantError(f"invariant {invariant}, seed {self._seed}, {self._step}: {text}")

    def _overlapping(self, p: Partition) -> set[int]:
        """Return the ids of the live queries that overlap a partition."""
        return set(self._query_table.within(*p.bounds).tolist())

    # The steps of a round.

    def requests(self, number: int, registered: Ints, terminated: Ints) -> None:
        """Check after queries were registered and terminated."""
        self._step = f"round {number}, requests"
        self._registered, self._terminated = registered, terminated
        for query in [*registered.tolist(), *terminated.tolist()]:
            for p in self._index.query_overlap(*self._query_table.ranges[query].tolist()):
                for machine in p.machines:
                    held = self._held[machine, p.partition_id]
                    held.add(query) if query in registered else held.discard(query)
        self._check_queries()

    def before_close(self, number: int, view: SimulatedRound, driver: Driver) -> None:
        """Check the points of a round, distributed and not yet counted."""
        self._step = f"round {number}, points"
        points, plan = view.points, view.plan
        table = plan.cell_table().reshape(-1)
        for slot, (machine, k) in enumerate(zip(points.machine, points.partition, strict=True)):
            owns = int(machine) in plan.partitions[k].machines
            self._require(owns, 1, f"machine {machine} received points of partition {k}")
            inside = bool(np.all(table[points.slot(slot)[0]] == k))
            self._require(inside, 1, f"partition {k} received points of other cells")
        self._points_before = {
            key: [trio.n for _, trio in _sides(stats)] for key, stats in _statistics(driver)
        }

    def after_close(self, number: int, view: SimulatedRound, driver: Driver) -> None:
        """Check the statistics of a closed round, and record where its data is stored."""
        self._step = f"round {number}, statistics"
        plan, points = view.plan, view.points
        shape = (plan.rows, plan.columns)
        ids = np.array([p.partition_id for p in plan.partitions])
        counted = dict(_statistics(driver))
        if counted:
            keys = zip(points.machine.tolist(), ids[points.partition].tolist(), strict=True)
            slots = {key: slot for slot, key in enumerate(keys)}
            same = slots.keys() == counted.keys()
            self._require(same, 5, "statistics of other partitions than the plan's")
            for key, slot in slots.items():
                own = np.bincount(*points.slot(slot), plan.rows * plan.columns).reshape(shape)
                self._check_statistics(key, counted[key], own)
        stored = np.bincount(points.cells, points.counts, plan.rows * plan.columns)
        entry = (ids[plan.cell_table()], stored.reshape(shape).astype(np.int64))
        self._stored = [*self._stored, entry][-_WINDOW_ROUNDS:]
        self._check_snapshot(plan)
        self._registered = self._terminated = np.empty(0, np.int64)

    def changed(
        self, number: int, before: Plan, after: Plan, changes: Sequence[Change], moved: int
    ) -> None:
        """Check after a plan change."""
        self._step = f"round {number}, change to epoch {after.epoch}"
        self._plan = after
        self._check_plan(after)
        self._check_named(before, after, changes)
        self._check_parents(before, after)
        self._move_queries(before, after, moved)
        self._index = GlobalIndex(after)
        self._check_index()
        self._check_queries()

    def _check_snapshot(self, plan: Plan) -> None:
        """Check that a snapshot of a random range finds all points through the lineage."""
        held = {int(k) for table, points in self._stored for k in np.unique(table[points > 0])}
        self._lineage = self._lineage.with_plan(plan).expire(held)
        column0, column1 = np.sort(self._random.integers(0, plan.columns, 2)).tolist()
        row0, row1 = np.sort(self._random.integers(0, plan.rows, 2)).tolist()
        cells = (column0, row0, column1, row1)
        needed = self._lineage.needed(self._lineage.present_in(cells), held, cells)
        inside = np.s_[row0 : row1 + 1, column0 : column1 + 1]
        for age, (table, points) in enumerate(reversed(self._stored)):
            found = points[inside][np.isin(table[inside], list(needed))].sum()
            expected = points[inside].sum()
            text = f"a snapshot of {cells} has {found} of {expected} points, {age} rounds old"
            self._require(bool(found == expected), 6, text)

    # Invariant 1.

    def _check_plan(self, plan: Plan) -> None:
        try:
            plan.check_invariants()
        except AssertionError as error:
            self._require(False, 1, str(error))

    def _check_index(self) -> None:
        for p in self._plan.partitions:
            for row, column in product(range(p.row0, p.row1), range(p.column0, p.column1)):
                found = self._index.partition_at(column, row)
                self._require(found == p, 1, f"the index is wrong at {column}, {row}")

    # Invariant 2.

    def _check_queries(self) -> None:
        slots = {(m, p.partition_id) for p in self._plan.partitions for m in p.machines}
        self._require(slots == self._held.keys(), 2, "queries are held for other partitions")
        for p in self._plan.partitions:
            expected = self._overlapping(p)
            for machine in p.machines:
                held = self._held[machine, p.partition_id]
                text = f"machine {machine}, partition {p.partition_id}: "
                text += f"lacks {sorted(expected - held)}, has {sorted(held - expected)} too many"
                self._require(held == expected, 2, text)

    def _move_queries(self, before: Plan, after: Plan, moved: int) -> None:
        """Load arriving partitions, and derive the others from what each machine has."""
        loads = arrivals(before, after)
        was = self._held
        self._held = {}
        total = 0
        for p in after.partitions:
            for machine in p.machines:
                arrives = p.partition_id in loads.get(machine, ())
                known = sum(_common(q, p) for q in before.of_machine(machine))
                text = f"machine {machine}, partition {p.partition_id}"
                self._require(arrives == (known < p.cells), 6, f"arrivals are wrong for {text}")
                if arrives:
                    self._held[machine, p.partition_id] = self._overlapping(p)
                    total += len(self._held[machine, p.partition_id])
                    continue
                own = set().union(*(ids for (m, _), ids in was.items() if m == machine))
                over = overlap(self._query_table.ranges, p.bounds)
                self._held[machine, p.partition_id] = own & set(np.flatnonzero(over).tolist())
        named = {(m, k) for m, ids in loads.items() for k in ids}
        strangers = named - self._held.keys()
        self._require(not strangers, 6, f"arrivals at machines that do not own: {strangers}")
        self._require(total == moved, 6, f"{moved} queries are reported as moved, not {total}")

    # Invariant 5.

    def _check_statistics(
        self, key: tuple[int, int], stats: PartitionStats, points: NDArray[Any]
    ) -> None:
        query_table = self._query_table
        for before, (side, trio) in zip(self._points_before[key], _sides(stats), strict=True):
            column0, row0, column1, row1 = side
            n = float(points[row0:row1, column0:column1].sum())
            over = overlap(query_table.ranges, side)
            queries = float(over[query_table.live].sum())
            received = n + int(over[self._registered].sum())
            expected = (before * self._fade + n, queries, received)
            pairs = zip((trio.n, trio.q, trio.r), expected, strict=True)
            if any(abs(a - b) > 1e-6 + 1e-9 * b for a, b in pairs):
                text = f"machine {key[0]}, partition {key[1]}, cells {side}: {trio}, not {expected}"
                self._require(False, 5, text)

    # Invariant 6.

    def _check_named(self, before: Plan, after: Plan, changes: Sequence[Change]) -> None:
        self._require(after.epoch == before.epoch + 1, 6, "an epoch was left out")
        self._require(after.next_id >= before.next_id, 6, "ids may be reused")
        named = set().union(*(_named(change, before) for change in changes))
        old = {p.partition_id: p for p in before.partitions}
        new = {p.partition_id: p for p in after.partitions}
        for number in (old.keys() | new.keys()) - named:
            same = old.get(number) == new.get(number)
            self._require(same, 6, f"partition {number} changed without being named")
        for number in new.keys() - old.keys():
            self._require(number >= before.next_id, 6, f"id {number} was used before")

    def _check_parents(self, before: Plan, after: Plan) -> None:
        """Check that parents are exact: by induction, they lead to all earlier partitions."""
        old = {p.partition_id: p for p in before.partitions}
        for p in after.partitions:
            was = old.get(p.partition_id)
            if was is not None:
                same = was.bounds == p.bounds and was.parents == p.parents
                self._require(same, 6, f"partition {p.partition_id} changed but not its id")
                continue
            expected = sorted(q.partition_id for q in before.partitions if _common(q, p))
            text = f"partition {p.partition_id} has parents {p.parents}, not {expected}"
            self._require(sorted(p.parents) == expected, 6, text)


def _common(a: Partition, b: Partition) -> int:
    """Count the common cells."""
    columns = set(range(a.column0, a.column1)) & set(range(b.column0, b.column1))
    rows = set(range(a.row0, a.row1)) & set(range(b.row0, b.row1))
    return len(columns) * len(rows)


def _statistics(driver: Driver) -> Iterator[tuple[tuple[int, int], PartitionStats]]:
    """Yield statistics by machine and partition, if the driver has any."""
    if isinstance(driver, StatisticsDriver):
        for machine, stats in enumerate(driver.statistics.machines):
            for number, partition in stats.partitions.items():
                yield (machine, number), partition


def _sides(stats: PartitionStats) -> Iterator[tuple[Rect, Trio]]:
    """Yield the rectangle and the terms of the whole, and of both sides of every cut."""
    column0, row0, column1, row1 = stats.bounds
    yield stats.bounds, stats.total()
    for at in range(column0 + 1, column1):
        rects = (column0, row0, at, row1), (at, row0, column1, row1)
        yield from zip(rects, stats.split(True, at), strict=True)
    for at in range(row0 + 1, row1):
        rects = (column0, row0, column1, at), (column0, at, column1, row1)
        yield from zip(rects, stats.split(False, at), strict=True)


def _named(change: Change, before: Plan) -> set[int]:
    """Return the ids of the partitions that a change may affect."""
    if isinstance(change, Move):
        return {change.partition_id}
    if isinstance(change, Split):
        return {change.partition_id, *change.ids}
    if isinstance(change, Merge):
        return {*change.partition_ids, change.new_id}
    assert isinstance(change, Replan)
    return {p.partition_id for p in set(before.partitions) ^ set(change.partitions)}
