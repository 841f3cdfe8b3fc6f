"""Which partitions' stored points a partition still needs: its own and its ancestors'.

A plan change moves queries, never points. A point stays under the partition that it was written
for, so whoever asks about a partition must also ask those that it was made from, and theirs,
until their points have left the window. A partition without points of its own may still lead to
one that has some: event times need not follow the batches, so that a grandparent's points may
outlive a parent's. A chain is therefore broken only where nothing beyond has points.
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
    """A rectangle of cells ``[column0, column1) x [row0, row1)`` and what it was made from."""

    column0: int
    row0: int
    column1: int
    row1: int
    parents: tuple[int, ...]

    def touches(self, cells: CellRange) -> bool:
        """Whether an inclusive range of cells has a cell of it."""
        column0, row0, column1, row1 = cells
        wide = self.column0 <= column1 and column0 < self.column1
        return wide and self.row0 <= row1 and row0 < self.row1


class Lineage:
    """Every partition that is in the present plan, or has points, or leads to one that has.

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
    def present(self) -> tuple[int, ...]:
        """Partitions of the present plan."""
        return self._present

    @property
    def known(self) -> frozenset[int]:
        """All partitions that are remembered."""
        return frozenset(self._known)

    def add(self, plan: Plan) -> None:
        """Take the plan of the next epoch; the present one again changes nothing.

        A plan that was not made from the one before it names no parents. Its partitions are then
        linked with those of the plan before that they overlap.

        Raises
        ------
        ValueError
            If the plan is older than the present one, or was made from one that was never added.
        """
        if plan.epoch == self._epoch:
            return
        if plan.epoch < self._epoch:
            raise ValueError(f"plan {plan.epoch} comes after plan {self._epoch}")
        new: dict[int, Ancestor] = {}
        for p in plan.partitions:
            if p.partition_id not in self._known:
                # Nothing was stored before the first plan, whatever it was made from.
                parents = () if self._epoch < 0 else p.parents or self._overlapped(p)
                strangers = [number for number in parents if number not in self._known]
                if strangers:
                    raise ValueError(f"partition {p.partition_id} has unknown parents {strangers}")
                new[p.partition_id] = Ancestor(p.column0, p.row0, p.column1, p.row1, parents)
        self._known.update(new)
        self._epoch = plan.epoch
        self._present = tuple(p.partition_id for p in plan.partitions)

    def _overlapped(self, p: Partition) -> tuple[int, ...]:
        return self.present_in((p.column0, p.row0, p.column1 - 1, p.row1 - 1))

    def present_in(self, cells: CellRange) -> tuple[int, ...]:
        """Partitions of the present plan that have a cell of a range."""
        return tuple(number for number in self._present if self._known[number].touches(cells))

    def needed(
        self,
        partition_ids: Iterable[int],
        live_ids: Collection[int],
        cells: CellRange | None = None,
    ) -> set[int]:
        """Name the partitions whose points a question needs.

        Parameters
        ----------
        partition_ids
            Partitions of the present plan that the question's range overlaps.
        live_ids
            Partitions that have points in the window.
        cells
            Inclusive range of cells of the question; ancestors beyond it are left out.

        Returns
        -------
        set of int
            Those of the given partitions and of their ancestors that have points.
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
        """Break the chains beyond which nothing has points.

        Parameters
        ----------
        live_ids
            Partitions that have points in the window, or may get some from a batch under way.
        """
        # Ids only grow, and parents are older than their children.
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
        """Plain data for the state directory."""
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
        """Inverse of :meth:`to_json`."""
        lineage = cls()
        lineage._epoch = data["epoch"]
        lineage._present = tuple(data["present"])
        lineage._known = {
            number: Ancestor(column0, row0, column1, row1, tuple(parents))
            for number, column0, row0, column1, row1, parents in data["partitions"]
        }
        return lineage
