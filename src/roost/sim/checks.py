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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Merge, Move, Replan, Split, arrivals
from roost.balance.global_index import GlobalIndex
from roost.balance.plan import Partition, Plan
from roost.sim.policies import Driver, RoundView
from roost.sim.workloads import Ids, QueryTable, Ranges
from roost.window import Lineage
from roost.workload.trio import PartitionStats, Trio

# Rounds of stored data that snapshots must find.
_WINDOW_ROUNDS = 6
_TOLERANCE = 1e-9


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
        self._held: dict[tuple[int, int], set[int]] = {}
        for p in plan.partitions:
            for machine in p.machines:
                self._held[machine, p.partition_id] = self._overlapping(p)
        self._parents = {p.partition_id: p.parents for p in plan.partitions}
        self._tables: list[NDArray[np.int64]] = []
        self._stored: list[NDArray[np.int64]] = []
        self._lineage = Lineage()
        self._random = np.random.default_rng(seed)
        self._new: Ids = np.empty(0, np.int64)
        self._gone: Ids = np.empty(0, np.int64)
        self._points_before: dict[tuple[int, int], list[float]] = {}
        self._check_plan(plan)

    def _require(self, holds: bool, invariant: int, text: str) -> None:
        if not holds:
            message = f"invariant {invariant}, seed {self._seed}, {self._step}: {text}"
            raise InvariantError(message)

    def _overlapping(self, p: Partition) -> set[int]:
        """Return the ids of the live queries that overlap a partition, one by one."""
        return {
            int(number)
            for number in np.flatnonzero(self._query_table.live)
            if _overlaps(self._query_table.ranges[number], p)
        }

    # The steps of a round.

    def requests(self, number: int, new: Ids, gone: Ids) -> None:
        """Check after queries were registered and terminated."""
        self._step = f"round {number}, requests"
        self._new, self._gone = new, gone
        for query in [*new.tolist(), *gone.tolist()]:
            for p in self._index.query_overlap(*self._query_table.ranges[query].tolist()):
                for machine in p.machines:
                    held = self._held[machine, p.partition_id]
                    held.add(query) if query in new else held.discard(query)
        self._check_queries()

    def before_close(self, number: int, seen: RoundView, driver: Driver) -> None:
        """Check the points of a round, distributed and not yet counted."""
        self._step = f"round {number}, points"
        dealt, plan = seen.dealt, seen.plan
        table = _table_of_numbers(plan).reshape(-1)
        for slot, (machine, k) in enumerate(zip(dealt.machine, dealt.partition, strict=True)):
            owns = int(machine) in plan.partitions[k].machines
            self._require(owns, 1, f"machine {machine} was dealt points of partition {k}")
            inside = bool(np.all(table[dealt.slot(slot)[0]] == k))
            self._require(inside, 1, f"partition {k} was dealt points of other cells")
        self._points_before = {
            key: [side.n for _, cut in _cuts(stats) for side in cut]
            for key, stats in _statistics(driver)
        }

    def after_close(self, number: int, seen: RoundView, driver: Driver) -> None:
        """Check the statistics of a closed round, and record where its data is stored."""
        self._step = f"round {number}, statistics"
        plan, dealt = seen.plan, seen.dealt
        slots = zip(dealt.machine.tolist(), dealt.partition.tolist(), strict=True)
        counted = dict(_statistics(driver))
        if counted:
            expected = {(m, plan.partitions[k].partition_id): s for s, (m, k) in enumerate(slots)}
            same = expected.keys() == counted.keys()
            self._require(same, 5, "statistics of other partitions than the plan's")
            for key, slot in expected.items():
                points = np.zeros(plan.rows * plan.columns)
                cells, counts = dealt.slot(slot)
                points[cells] = counts
                self._check_statistics(key, counted[key], points.reshape(plan.rows, plan.columns))
        ids = np.array([p.partition_id for p in plan.partitions])
        self._tables = [*self._tables, ids[_table_of_numbers(plan)]][-_WINDOW_ROUNDS:]
        dense = np.bincount(dealt.cells, dealt.counts, plan.rows * plan.columns)
        stored = dense.reshape(plan.rows, plan.columns).astype(np.int64)
        self._stored = [*self._stored, stored][-_WINDOW_ROUNDS:]
        self._check_snapshot(plan)
        self._new = self._gone = np.empty(0, np.int64)

    def changed(
        self, number: int, before: Plan, after: Plan, changes: Sequence[Change], moved: int
    ) -> None:
        """Check after a plan change."""
        self._step = f"round {number}, change to epoch {after.epoch}"
        self._plan = after
        self._check_plan(after)
        self._check_named(before, after, changes)
        self._check_lineage(before, after)
        self._move_queries(before, after, moved)
        self._index = GlobalIndex(after)
        self._check_index()
        self._check_queries()

    def _check_snapshot(self, plan: Plan) -> None:
        """Check that a snapshot of a random range finds all points through the lineage."""
        rounds = list(zip(self._tables, self._stored, strict=True))
        held = {int(number) for table, points in rounds for number in np.unique(table[points > 0])}
        self._lineage = self._lineage.with_plan(plan).expire(held)
        column0, column1 = np.sort(self._random.integers(0, plan.columns, 2)).tolist()
        row0, row1 = np.sort(self._random.integers(0, plan.rows, 2)).tolist()
        cells = (column0, row0, column1, row1)
        needed = self._lineage.needed(self._lineage.present_in(cells), held, cells)
        inside = np.s_[row0 : row1 + 1, column0 : column1 + 1]
        for age, (table, points) in enumerate(reversed(rounds)):
            found = points[inside][np.isin(table[inside], list(needed))].sum()
            wanted = points[inside].sum()
            text = f"a snapshot of {cells} has {found} of {wanted} points, {age} rounds old"
            self._require(bool(found == wanted), 6, text)

    # Invariant 1.

    def _check_plan(self, plan: Plan) -> None:
        covered = np.zeros((plan.rows, plan.columns), np.int64)
        for p in plan.partitions:
            covered[p.row0 : p.row1, p.column0 : p.column1] += 1
            known = all(0 <= machine < plan.machines for machine in p.machines)
            once = len(set(p.machines)) == len(p.machines) > 0
            self._require(known and once, 1, f"machines {p.machines} of {p.partition_id}")
            self._require(p.partition_id < plan.next_id, 1, f"id {p.partition_id} comes again")
        self._require(bool((covered == 1).all()), 1, "a cell is in no partition or in two")
        ids = {p.partition_id for p in plan.partitions}
        self._require(len(ids) == len(plan.partitions), 1, "a partition id occurs twice")

    def _check_index(self) -> None:
        table = _table_of_numbers(self._plan)
        for row in range(self._plan.rows):
            for column in range(self._plan.columns):
                right = self._plan.partitions[table[row, column]]
                found = self._index.partition_at(column, row)
                self._require(found == right, 1, f"the index is wrong at {column}, {row}")

    # Invariant 2.

    def _check_queries(self) -> None:
        slots = {(m, p.partition_id) for p in self._plan.partitions for m in p.machines}
        self._require(slots == self._held.keys(), 2, "queries are held for other partitions")
        for p in self._plan.partitions:
            right = self._overlapping(p)
            for machine in p.machines:
                held = self._held[machine, p.partition_id]
                text = f"machine {machine}, partition {p.partition_id}: "
                text += f"lacks {sorted(right - held)}, has {sorted(held - right)} too many"
                self._require(held == right, 2, text)

    def _move_queries(self, before: Plan, after: Plan, moved: int) -> None:
        """Load arriving partitions, and derive the others from what each machine has."""
        loads = arrivals(before, after)
        was = self._held
        self._held = {}
        total = 0
        for p in after.partitions:
            for machine in p.machines:
                arrives = p.partition_id in loads.get(machine, ())
                known = sum(machine in q.machines and _common(q, p) for q in before.partitions)
                text = f"machine {machine}, partition {p.partition_id}"
                self._require(arrives == (known < p.cells), 6, f"arrivals are wrong for {text}")
                if arrives:
                    self._held[machine, p.partition_id] = self._overlapping(p)
                    total += len(self._held[machine, p.partition_id])
                    continue
                own = [ids for (m, _), ids in was.items() if m == machine]
                self._held[machine, p.partition_id] = {
                    query
                    for ids in own
                    for query in ids
                    if _overlaps(self._query_table.ranges[query], p)
                }
        owners = {(m, p.partition_id) for p in after.partitions for m in p.machines}
        named = {(m, k) for m, ids in loads.items() for k in ids}
        self._require(named <= owners, 6, f"arrivals at machines that do not own: {named - owners}")
        self._require(total == moved, 6, f"{moved} queries are said to move, {total} do")

    # Invariant 5.

    def _check_statistics(
        self, key: tuple[int, int], stats: PartitionStats, points: NDArray[np.float64]
    ) -> None:
        before = iter(self._points_before[key])
        for (column0, row0, column1, row1), cut in _cuts(stats):
            for trio, side in zip(cut, _sides(stats, column0, row0, column1, row1), strict=True):
                n = float(points[side[1] : side[3], side[0] : side[2]].sum())
                right = self._true_trio(next(before), n, side)
                given = (trio.n, trio.q, trio.r)
                if any(
                    abs(a - b) > 1e-6 + _TOLERANCE * b for a, b in zip(given, right, strict=True)
                ):
                    text = f"cells {side}: {trio}, not {right}"
                    self._require(False, 5, f"machine {key[0]}, partition {key[1]}, {text}")

    def _true_trio(
        self, before: float, points: float, side: tuple[int, int, int, int]
    ) -> tuple[float, float, float]:
        ranges, live = self._query_table.ranges, self._query_table.live
        queries = _count(ranges[live], side)
        net = _count(ranges[self._new], side) - _count(ranges[self._gone], side)
        return before * self._fade + points, float(queries), max(points + net, 0.0)

    # Invariant 6.

    def _check_named(self, before: Plan, after: Plan, changes: Sequence[Change]) -> None:
        self._require(after.epoch == before.epoch + 1, 6, "an epoch was left out")
        self._require(after.next_id >= before.next_id, 6, "ids may come again")
        named = set().union(*(_named(change, before) for change in changes))
        old = {p.partition_id: p for p in before.partitions}
        new = {p.partition_id: p for p in after.partitions}
        for number in old.keys() | new.keys():
            if number not in named:
                same = old.get(number) == new.get(number)
                self._require(same, 6, f"partition {number} changed without being named")
        for number in new.keys() - old.keys():
            fresh = number >= before.next_id and number not in self._parents
            self._require(fresh, 6, f"id {number} was used before")

    def _check_lineage(self, before: Plan, after: Plan) -> None:
        old = {p.partition_id: p for p in before.partitions}
        for p in after.partitions:
            was = old.get(p.partition_id)
            if was is not None:
                same = _bounds(was) == _bounds(p) and was.parents == p.parents
                self._require(same, 6, f"partition {p.partition_id} kept its id, not itself")
                continue
            right = {q.partition_id for q in before.partitions if _common(q, p)}
            text = f"partition {p.partition_id} has parents {p.parents}, not {sorted(right)}"
            self._require(sorted(p.parents) == sorted(right), 6, text)
            self._parents[p.partition_id] = p.parents
        ids = np.array([p.partition_id for p in after.partitions])[_table_of_numbers(after)]
        for table in self._tables:
            for now, then in np.unique(np.stack([ids.ravel(), table.ravel()]), axis=1).T.tolist():
                text = f"data stored under {then} is not found from {now}"
                self._require(then in self._ancestors(now), 6, text)

    def _ancestors(self, number: int) -> set[int]:
        found, waiting = set(), [number]
        while waiting:
            at = waiting.pop()
            if at not in found:
                found.add(at)
                waiting.extend(self._parents[at])
        return found


def _bounds(p: Partition | PartitionStats) -> tuple[int, int, int, int]:
    return p.column0, p.row0, p.column1, p.row1


def _overlaps(query: Ranges, p: Partition) -> bool:
    column0, row0, column1, row1 = query.tolist()
    columns = column0 < p.column1 and column1 >= p.column0
    return bool(columns and row0 < p.row1 and row1 >= p.row0)


def _common(a: Partition, b: Partition) -> int:
    """Count the common cells."""
    columns = set(range(a.column0, a.column1)) & set(range(b.column0, b.column1))
    rows = set(range(a.row0, a.row1)) & set(range(b.row0, b.row1))
    return len(columns) * len(rows)


def _count(ranges: Ranges, side: tuple[int, int, int, int]) -> int:
    """Count the queries that overlap a half-open rectangle, by comparing each."""
    column0, row0, column1, row1 = side
    columns = (ranges[:, 0] < column1) & (ranges[:, 2] >= column0)
    return int((columns & (ranges[:, 1] < row1) & (ranges[:, 3] >= row0)).sum())


def _table_of_numbers(plan: Plan) -> NDArray[np.int64]:
    """Return the index in the plan of each cell's partition."""
    table = np.full((plan.rows, plan.columns), -1)
    for number, p in enumerate(plan.partitions):
        table[p.row0 : p.row1, p.column0 : p.column1] = number
    return table


def _statistics(driver: Any) -> Iterator[tuple[tuple[int, int], PartitionStats]]:
    """Yield statistics by machine and partition, if the driver has any."""
    statistics = getattr(driver, "statistics", None)
    for machine, stats in enumerate(statistics.machines if statistics else ()):
        for number, partition in stats.partitions.items():
            yield (machine, number), partition


def _cuts(stats: PartitionStats) -> Iterator[tuple[tuple[int, int, int, int], tuple[Trio, ...]]]:
    """Yield the whole, then both sides of every cut, with the rectangle of the first side."""
    column0, row0, column1, row1 = _bounds(stats)
    yield (column0, row0, column1, row1), (stats.total(),)
    for at in range(column0 + 1, column1):
        yield (column0, row0, at, row1), stats.split(True, at)
    for at in range(row0 + 1, row1):
        yield (column0, row0, column1, at), stats.split(False, at)


def _sides(
    stats: PartitionStats, column0: int, row0: int, column1: int, row1: int
) -> list[tuple[int, int, int, int]]:
    """Return the first side, and the rest of the partition if any."""
    first = (column0, row0, column1, row1)
    if column1 < stats.column1:
        return [first, (column1, row0, stats.column1, row1)]
    if row1 < stats.row1:
        return [first, (column0, row1, column1, stats.row1)]
    return [first]


def _named(change: Change, before: Plan) -> set[int]:
    """Return the ids of the partitions that a change may affect."""
    if isinstance(change, Move):
        return {change.partition_id}
    if isinstance(change, Split):
        return {change.partition_id, *change.ids}
    if isinstance(change, Merge):
        return {*change.partition_ids, change.new_id}
    assert isinstance(change, Replan)
    kept = set(before.partitions)
    ids = {p.partition_id for p in change.partitions if p not in kept}
    return ids | {p.partition_id for p in set(kept) - set(change.partitions)}
