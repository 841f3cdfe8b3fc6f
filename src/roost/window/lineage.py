"""Lineage: the ancestors of a partition whose stored points are still in the window.

A plan change moves queries, never points. A point stays with the partition it was written for, so
a reader of a partition must also read its ancestors until their points have expired. A partition
without points may have an ancestor with points: event times need not follow batch order, so a
grandparent's points may outlive a parent's. A chain is therefore cut only where no further
ancestor has points.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from roost.balance.plan import Partition, Plan

# Inclusive column0, row0, column1, row1.
CellRange = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A rectangle of cells ``[column0, column1) x [row0, row1)`` and its parents."""

    column0: int
    row0: int
    column1: int
    row1: int
    parents: tuple[int, ...]

    def touches(self, cells: CellRange) -> bool:
        """Return whether it overlaps an inclusive range of cells."""
        column0, row0, column1, row1 = cells
        wide = self.column0 <= column1 and column0 < self.column1
        return wide and self.row0 <= row1 and row0 < self.row1


class Lineage:
    """Partitions of the present plan, partitions with points, and the links between them.

    Examples
    --------
    >>> lineage = Lineage()
    >>> lineage.add(Plan(0, 4, 2, 2, (Partition(0, 0, 0, 4, 2, (0,)),), 1))
    >>> halves = (Partition(1, 0, 0, 2, 2, (0,), (0,)), Partition(2, 2, 0, 4, 2, (1,), (0,)))
    >>> lineage.add(Plan(1, 4, 2, 2, halves, 3))
    >>> sorted(lineage.needed([2], {0, 1, 2}))
    [0, 2]
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._present: tuple[int, ...] = ()
        self._known: dict[int, Ancestor] = {}

    @property
    def epoch(self) -> int:
        """Epoch of the present plan; -1 before there is one."""
        return self._epoch

    @property
    def known(self) -> frozenset[int]:
        """All partitions in the lineage."""
        return frozenset(self._known)

    def add(self, plan: Plan) -> None:
        """Add the plan of the next epoch; idempotent for the present one.

        A plan that was not derived from the present one has no parents. Its partitions are then
        linked with the present partitions that they overlap.

        Raises
        ------
        ValueError
            If the plan is older than the present one, or has parents that were never added.
        """
        if plan.epoch == self._epoch:
            return
        if plan.epoch < self._epoch:
            raise ValueError(f"plan {plan.epoch} is older than the present plan {self._epoch}")
        new: dict[int, Ancestor] = {}
        for p in plan.partitions:
            if p.partition_id not in self._known:
                # No points were stored before the first plan, so its parents do not matter.
                parents = () if self._epoch < 0 else p.parents or self._overlapped(p)
                unknown = [number for number in parents if number not in self._known]
                if unknown:
                    raise ValueError(f"partition {p.partition_id} has unknown parents {unknown}")
                new[p.partition_id] = Ancestor(p.column0, p.row0, p.column1, p.row1, parents)
        self._known.update(new)
        self._epoch = plan.epoch
        self._present = tuple(p.partition_id for p in plan.partitions)

    def _overlapped(self, p: Partition) -> tuple[int, ...]:
        return self.present_in((p.column0, p.row0, p.column1 - 1, p.row1 - 1))

    def present_in(self, cells: CellRange) -> tuple[int, ...]:
        """Return the partitions of the present plan that overlap an inclusive range of cells."""
        return tuple(number for number in self._present if self._known[number].touches(cells))

    def needed(
        self,
        partition_ids: Iterable[int],
        live_ids: Collection[int],
        cells: CellRange | None = None,
    ) -> set[int]:
        """Return the partitions whose points a query must read.

        Parameters
        ----------
        partition_ids
            Partitions of the present plan that the query overlaps.
        live_ids
            Partitions that have points in the window.
        cells
            Inclusive range of cells of the query; other ancestors are skipped.

        Returns
        -------
        set of int
            The given partitions and their ancestors, if they have points.
        """
        found: set[int] = set()
        waiting = list(partition_ids)
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            ancestor = self._known[number]
            if cells is None or ancestor.touches(cells):
                found.add(number)
                waiting += ancestor.parents
        return found.intersection(live_ids)

    def expire(self, live_ids: Collection[int]) -> None:
        """Drop ancestors that have no points and lead to none.

        Parameters
        ----------
        live_ids
            Partitions that have points in the window, or may get some from a running batch.
        """
        # Identifiers only grow, so parents sort before their children.
        leads: set[int] = set()
        for number in sorted(self._known):
            if number in live_ids or not leads.isdisjoint(self._known[number].parents):
                leads.add(number)
        keep = leads.union(self._present)
        self._known = {
            number: replace(ancestor, parents=tuple(n for n in ancestor.parents if n in leads))
            for number, ancestor in self._known.items()
            if number in keep
        }

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory."""
        return {
            "epoch": self._epoch,
            "present": list(self._present),
            "partitions": [
                [number, a.column0, a.row0, a.column1, a.row1, list(a.parents)]
                for number, a in self._known.items()
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Lineage:
        """Invert :meth:`to_json`."""
        lineage = cls()
        lineage._epoch = data["epoch"]
        lineage._present = tuple(data["present"])
        lineage._known = {
            number: Ancestor(column0, row0, column1, row1, tuple(parents))
            for number, column0, row0, column1, row1, parents in data["partitions"]
        }
        return lineage
