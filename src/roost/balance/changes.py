"""Decisions of a balancing policy, as values: move, split, merge or replace partitions.

A policy never modifies a plan. It returns a :class:`Rebalance` or a :class:`NoChange`, each with a
reason for the log, and :func:`apply_changes` computes the next plan or raises ``ValueError``:
changes are exchanged between machines, so a response may arrive after the plan has changed.

Partition ids are never reused. The parents of a new partition are partitions of the *previous*
plan, even if several changes led to it through intermediate partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roost.balance.plan import Partition, Plan


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
    first_id: int
    second_id: int
    first_machines: tuple[int, ...]
    second_machines: tuple[int, ...]


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
    """Changes to apply, in order, and the reason."""

    changes: tuple[Change, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class NoChange:
    """Keep the plan, and the reason."""

    reason: str


Decision = Rebalance | NoChange


def apply_changes(plan: Plan, changes: Sequence[Change]) -> Plan:
    """Compute the plan of the next epoch.

    Raises
    ------
    ValueError
        If a change does not fit this plan: an id that is unknown or was used before, a cut outside
        the partition, a union that is not a rectangle, a machine that does not exist, or
        partitions that do not cover every cell exactly once.

    Examples
    --------
    >>> plan = Plan(0, 4, 2, 2, (Partition(0, 0, 0, 4, 2, (0,)),), 1)
    >>> after = apply_changes(plan, [Split(0, True, 3, 1, 2, (0,), (1,))])
    >>> [(p.partition_id, p.column0, p.column1, p.parents) for p in after.partitions]
    [(1, 0, 3, (0,)), (2, 3, 4, (0,))]
    >>> after.epoch, after.next_id
    (1, 3)
    """
    if any(isinstance(change, Replan) for change in changes):
        (only, *others) = changes
        if others or not isinstance(only, Replan):
            raise ValueError("a replan must stand alone")
        return _replanned(plan, only)
    builder = _PlanBuilder(plan)
    for change in changes:
        builder.apply(change)
    return builder.finished()


class _PlanBuilder:
    """A plan while changes are applied to it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._now = {p.partition_id: p for p in plan.partitions}
        self._before = dict(self._now)
        self._next_id = plan.next_id
        self._given: set[int] = set()

    def apply(self, change: Change) -> None:
        """Apply one change."""
        if isinstance(change, Move):
            _check_machines(change.machines, self._plan.machines)
            p = self._known(change.partition_id)
            self._now[p.partition_id] = replace(p, machines=change.machines)
        elif isinstance(change, Split):
            self._split(change)
        elif isinstance(change, Merge):
            self._merge(change)

    def finished(self) -> Plan:
        """Return the plan; parents that a later cut excludes are dropped."""
        partitions = tuple(
            p if p.partition_id in self._before else self._narrowed(p) for p in self._now.values()
        )
        plan = self._plan
        return replace(plan, epoch=plan.epoch + 1, partitions=partitions, next_id=self._next_id)

    def _split(self, change: Split) -> None:
        _check_machines(change.first_machines, self._plan.machines)
        _check_machines(change.second_machines, self._plan.machines)
        p = self._known(change.partition_id)
        low, high = (p.column0, p.column1) if change.vertical else (p.row0, p.row1)
        if not low < change.at < high:
            raise ValueError(f"a cut at {change.at} does not divide {low} to {high}")
        names = ("column1", "column0") if change.vertical else ("row1", "row0")
        parents = self._as_parents([p])
        sides = zip(
            names,
            (change.first_id, change.second_id),
            (change.first_machines, change.second_machines),
            strict=True,
        )
        del self._now[p.partition_id]
        for name, number, machines in sides:
            border: dict[str, Any] = {name: change.at}
            part = replace(p, machines=machines, parents=parents, **border)
            self._add(replace(part, partition_id=number))

    def _merge(self, change: Merge) -> None:
        _check_machines(change.machines, self._plan.machines)
        if len(change.partition_ids) < 2 or _repeats(change.partition_ids):
            raise ValueError(f"a merge needs two or more partitions, not {change.partition_ids}")
        parts = [self._known(number) for number in change.partition_ids]
        if len({frozenset(p.machines) for p in parts}) > 1:
            raise ValueError(f"partitions {change.partition_ids} have different owners")
        union = Partition(
            change.new_id,
            min(p.column0 for p in parts),
            min(p.row0 for p in parts),
            max(p.column1 for p in parts),
            max(p.row1 for p in parts),
            change.machines,
            self._as_parents(parts),
        )
        if union.cells != sum(p.cells for p in parts):
            raise ValueError(f"partitions {change.partition_ids} do not form a rectangle")
        for number in change.partition_ids:
            del self._now[number]
        self._add(union)

    def _known(self, number: int) -> Partition:
        if number not in self._now:
            raise ValueError(f"no partition {number} in the plan of epoch {self._plan.epoch}")
        return self._now[number]

    def _add(self, p: Partition) -> None:
        number = p.partition_id
        if number < self._plan.next_id or number in self._given:
            raise ValueError(f"partition id {number} was used before")
        self._given.add(number)
        self._next_id = max(self._next_id, number + 1)
        self._now[number] = p

    def _as_parents(self, parts: Iterable[Partition]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for p in parts:
            old = p.partition_id in self._before
            found.update(dict.fromkeys((p.partition_id,) if old else p.parents))
        return tuple(found)

    def _narrowed(self, p: Partition) -> Partition:
        kept = tuple(n for n in p.parents if overlap_cells(self._before[n], p))
        return replace(p, parents=kept)


def _replanned(plan: Plan, replan: Replan) -> Plan:
    before = {p.partition_id: p for p in plan.partitions}
    ids = [p.partition_id for p in replan.partitions]
    if _repeats(ids):
        raise ValueError("a partition id occurs twice")
    for p in replan.partitions:
        _check_machines(p.machines, plan.machines)
        old = before.get(p.partition_id)
        if old is not None:
            if old.cells != p.cells or overlap_cells(old, p) != p.cells:
                raise ValueError(f"partition {p.partition_id} changed without a new id")
        elif p.partition_id < plan.next_id:
            raise ValueError(f"partition id {p.partition_id} was used before")
        else:
            _check_parents(p, before)
    _check_cover(plan, replan.partitions)
    return replace(
        plan,
        epoch=plan.epoch + 1,
        partitions=replan.partitions,
        next_id=max(plan.next_id, *(number + 1 for number in ids)),
    )


def _check_parents(p: Partition, before: dict[int, Partition]) -> None:
    """Check that all parents overlap the partition and together cover it."""
    if _repeats(p.parents) or not all(number in before for number in p.parents):
        raise ValueError(f"partition {p.partition_id} has unknown parents {p.parents}")
    areas = [overlap_cells(before[number], p) for number in p.parents]
    if not all(areas) or sum(areas) != p.cells:
        raise ValueError(f"partition {p.partition_id} was not made from {p.parents}")


def _check_cover(plan: Plan, partitions: Sequence[Partition]) -> None:
    """Check invariant 1 with prefix sums over the corners: every cell is covered once."""
    fields = ("column0", "row0", "column1", "row1")
    flat = [[getattr(p, name) for name in fields] for p in partitions]
    column0, row0, column1, row1 = np.asarray(flat, np.int64).reshape(-1, 4).T
    fits = bool(np.all((column0 >= 0) & (column0 < column1) & (column1 <= plan.columns)))
    fits = fits and bool(np.all((row0 >= 0) & (row0 < row1) & (row1 <= plan.rows)))
    if not fits:
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
    if not bool(np.all(marks[:-1, :-1] == 1)):
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
    >>> after = apply_changes(before, [Split(0, True, 3, 1, 2, (0,), (1,))])
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
    {'kind': 'move', 'partition_id': 3, 'machines': [1, 2]}
    """
    if isinstance(change, Move):
        return {
            "kind": "move",
            "partition_id": change.partition_id,
            "machines": list(change.machines),
        }
    if isinstance(change, Split):
        return {
            "kind": "split",
            "partition_id": change.partition_id,
            "vertical": change.vertical,
            "at": change.at,
            "ids": [change.first_id, change.second_id],
            "machines": [list(change.first_machines), list(change.second_machines)],
        }
    if isinstance(change, Merge):
        return {
            "kind": "merge",
            "partition_ids": list(change.partition_ids),
            "new_id": change.new_id,
            "machines": list(change.machines),
        }
    return {"kind": "replan", "partitions": [p.to_json() for p in change.partitions]}
