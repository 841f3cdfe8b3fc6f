"""Decisions of a balancing policy, as values: move, split, merge or replace partitions.

A policy never modifies a plan. It returns a :class:`Rebalance` or a :class:`NoChange`, each with a
reason for the log, and :func:`apply_changes` computes the next plan or raises ``ValueError``:
changes are exchanged between machines, so a response may arrive after the plan has changed.

Partition ids are never reused. The parents of a new partition are partitions of the *previous*
plan, even if several changes led to it through intermediate partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from roost.balance.plan import Partition, Plan, enclosing


@dataclass(frozen=True, slots=True)
class Move:
    """Assign a partition to other machines; several machines share it. It keeps its id."""

    partition_id: int
    machines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Split a partition in two; the second part begins at column or row ``at``."""

    partition_id: int
    vertical: bool
    at: int
    ids: tuple[int, int]
    machines: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge partitions that have the same owners and form a rectangle."""

    partition_ids: tuple[int, ...]
    new_id: int
    machines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replan:
    """Replace all partitions; must be the only change.

    A partition that keeps its id keeps its rectangle. Every other partition has a new id and its
    direct parents: the old partitions that it overlaps.
    """

    partitions: tuple[Partition, ...]


Change = Move | Split | Merge | Replan


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Changes to apply, in order, and the reason.

    ``machines`` is their number from then on, if it changes: see :class:`Resize`.
    """

    changes: tuple[Change, ...]
    reason: str
    machines: int | None = None


@dataclass(frozen=True, slots=True)
class NoChange:
    """Keep the plan, and the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Plan a layout for another number of machines, and the reason.

    By itself it moves nothing. The planners that decide after it fill machines that come, and empty
    those that leave, in one change of the layout.
    """

    machines: int
    reason: str


Decision = Rebalance | NoChange


def apply_changes(plan: Plan, changes: Sequence[Change], machines: int | None = None) -> Plan:
    """Compute the plan of the next epoch, on ``machines`` machines.

    Raises ValueError if a change does not fit this plan: an id that is unknown or was used before,
    a cut outside the partition, a union that is not a rectangle, a machine that does not exist or
    leaves, or partitions that do not cover every cell exactly once.

    Examples
    --------
    >>> plan = Plan(0, 4, 2, 2, (Partition(0, 0, 0, 4, 2, (0,)),), 1)
    >>> after = apply_changes(plan, [Split(0, True, 3, (1, 2), ((0,), (1,)))])
    >>> [(p.partition_id, p.column0, p.column1, p.parents) for p in after.partitions]
    [(1, 0, 3, (0,)), (2, 3, 4, (0,))]
    >>> after.epoch, after.next_id
    (1, 3)
    """
    if machines is not None:
        if machines < 1:
            raise ValueError(f"a plan needs a machine, not {machines}")
        plan = replace(plan, machines=machines)
    builder = _PlanBuilder(plan)
    for change in changes:
        if isinstance(change, Replan):
            if len(changes) > 1:
                raise ValueError("a replan must stand alone")
            return _replanned(plan, change.partitions)
        builder.apply(change)
    return builder.finished()


class _PlanBuilder:
    """A plan while changes are applied to it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._before = {p.partition_id: p for p in plan.partitions}
        self._now = dict(self._before)
        self._new_ids: set[int] = set()

    def apply(self, change: Move | Split | Merge) -> None:
        """Apply one change."""
        owners = change.machines if isinstance(change, Split) else (change.machines,)
        for machines in owners:
            _check_machines(machines, self._plan.machines)
        if isinstance(change, Move):
            p = self._find(change.partition_id)
            self._now[p.partition_id] = replace(p, machines=change.machines)
        elif isinstance(change, Split):
            self._split(change)
        else:
            self._merge(change)

    def finished(self) -> Plan:
        """Return the plan; parents that a later cut excludes are dropped."""
        partitions = []
        for p in self._now.values():
            if p.partition_id in self._new_ids:
                parents = tuple(n for n in p.parents if overlap_cells(self._before[n], p))
                p = replace(p, parents=parents)
            _check_machines(p.machines, self._plan.machines)
            partitions.append(p)
        return _next_plan(self._plan, partitions, self._new_ids)

    def _split(self, change: Split) -> None:
        p = self._find(change.partition_id)
        low, high = (p.column0, p.column1) if change.vertical else (p.row0, p.row1)
        if not low < change.at < high:
            raise ValueError(f"a cut at {change.at} does not divide {low} to {high}")
        borders = ("column1", "column0") if change.vertical else ("row1", "row0")
        for border, number, machines in zip(borders, change.ids, change.machines, strict=True):
            moved: dict[str, Any] = {border: change.at}
            self._add(replace(p, partition_id=number, machines=machines, **moved), [p])
        del self._now[p.partition_id]

    def _merge(self, change: Merge) -> None:
        ids = change.partition_ids
        if len(ids) < 2 or _repeats(ids):
            raise ValueError(f"a merge needs two or more partitions, not {ids}")
        parts = [self._find(number) for number in ids]
        if len({frozenset(p.machines) for p in parts}) > 1:
            raise ValueError(f"partitions {ids} have different owners")
        union = Partition(change.new_id, *enclosing(parts), change.machines)
        if union.cells != sum(p.cells for p in parts):
            raise ValueError(f"partitions {ids} do not form a rectangle")
        self._add(union, parts)
        for number in ids:
            del self._now[number]

    def _find(self, number: int) -> Partition:
        if number not in self._now:
            raise ValueError(f"no partition {number} in the plan of epoch {self._plan.epoch}")
        return self._now[number]

    def _add(self, p: Partition, sources: Sequence[Partition]) -> None:
        number = p.partition_id
        if number < self._plan.next_id or number in self._new_ids:
            raise ValueError(f"partition id {number} was used before")
        parents: dict[int, None] = {}
        for source in sources:
            new = source.partition_id in self._new_ids
            parents |= dict.fromkeys(source.parents if new else (source.partition_id,))
        self._new_ids.add(number)
        self._now[number] = replace(p, parents=tuple(parents))


def _next_plan(plan: Plan, partitions: Sequence[Partition], ids: Iterable[int]) -> Plan:
    next_id = max([plan.next_id, *(number + 1 for number in ids)])
    return replace(plan, epoch=plan.epoch + 1, partitions=tuple(partitions), next_id=next_id)


def _replanned(plan: Plan, partitions: Sequence[Partition]) -> Plan:
    before = {p.partition_id: p for p in plan.partitions}
    ids = [p.partition_id for p in partitions]
    if _repeats(ids):
        raise ValueError("a partition id occurs twice")
    for p in partitions:
        _check_machines(p.machines, plan.machines)
        old = before.get(p.partition_id)
        if old is not None:
            if old.cells != p.cells or overlap_cells(old, p) != p.cells:
                raise ValueError(f"partition {p.partition_id} changed without a new id")
        elif p.partition_id < plan.next_id:
            raise ValueError(f"partition id {p.partition_id} was used before")
        else:
            _check_parents(p, before)
    after = _next_plan(plan, partitions, ids)
    _check_cover(after)
    return after


def _check_parents(p: Partition, before: dict[int, Partition]) -> None:
    """Check that all parents overlap the partition and together cover it."""
    if _repeats(p.parents) or not all(number in before for number in p.parents):
        raise ValueError(f"partition {p.partition_id} has unknown parents {p.parents}")
    areas = [overlap_cells(before[number], p) for number in p.parents]
    if not all(areas) or sum(areas) != p.cells:
        raise ValueError(f"partition {p.partition_id} was not made from {p.parents}")


def _check_cover(plan: Plan) -> None:
    """Check invariant 1 with prefix sums over the corners: every cell is covered once."""
    column0, row0, column1, row1 = plan.rects().T
    fits = (column0 >= 0) & (column0 < column1) & (column1 <= plan.columns)
    fits &= (row0 >= 0) & (row0 < row1) & (row1 <= plan.rows)
    if not fits.all():
        raise ValueError("a partition is outside the grid or has no cell")
    marks = np.zeros((plan.rows + 1, plan.columns + 1), np.int32)
    for row, column, sign in (
        (row0, column0, 1),
        (row0, column1, -1),
        (row1, column0, -1),
        (row1, column1, 1),
    ):
        np.add.at(marks, (row, column), sign)
    marks.cumsum(0, out=marks).cumsum(1, out=marks)
    if not (marks[:-1, :-1] == 1).all():
        raise ValueError("a cell is in no partition or in two")


def _check_machines(machines: tuple[int, ...], count: int) -> None:
    if not machines or _repeats(machines) or not all(0 <= m < count for m in machines):
        raise ValueError(f"no such machines: {machines} of {count}")


def _repeats(numbers: Sequence[int]) -> bool:
    return len(set(numbers)) != len(numbers)


def overlap_cells(first: Partition, second: Partition) -> int:
    """Count the cells that two rectangles have in common."""
    wide = min(first.column1, second.column1) - max(first.column0, second.column0)
    high = min(first.row1, second.row1) - max(first.row0, second.row0)
    return max(wide, 0) * max(high, 0)


def arrivals(before: Plan, after: Plan) -> dict[int, tuple[int, ...]]:
    """Return the partitions whose queries each machine must load when the plan changes.

    A machine has the queries of all cells it owned before. So it loads a partition only if it did
    not own all its cells: not after a merge of its own partitions, nor for the part of a split
    that it keeps.

    Examples
    --------
    >>> before = Plan(0, 4, 2, 2, (Partition(0, 0, 0, 4, 2, (0,)),), 1)
    >>> after = apply_changes(before, [Split(0, True, 3, (1, 2), ((0,), (1,)))])
    >>> arrivals(before, after)
    {1: (2,)}
    """
    held: dict[int, list[Partition]] = {}
    same = set(before.partitions)
    for p in before.partitions:
        for machine in p.machines:
            held.setdefault(machine, []).append(p)
    found: dict[int, list[int]] = {}
    for p in after.partitions:
        if p in same:
            continue
        for machine in p.machines:
            known = sum(overlap_cells(own, p) for own in held.get(machine, ()))
            if known < p.cells:
                found.setdefault(machine, []).append(p.partition_id)
    return {machine: tuple(found[machine]) for machine in sorted(found)}


def change_to_json(change: Change) -> dict[str, Any]:
    """Return JSON data for the state directory.

    Examples
    --------
    >>> change_to_json(Move(3, (1, 2)))
    {'kind': 'move', 'partition_id': 3, 'machines': (1, 2)}
    """
    if isinstance(change, Replan):
        return {"kind": "replan", "partitions": [p.to_json() for p in change.partitions]}
    return {"kind": type(change).__name__.lower(), **asdict(change)}
