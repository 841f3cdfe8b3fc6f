"""Lineage: the ancestors of a partition whose stored points are still in the window.

A plan change moves queries, never points. A point stays with the partition it was written for, so
a reader of a partition must also read its ancestors until their points have expired. A partition
without points may have an ancestor with points: event times need not follow batch order, so a
grandparent's points may outlive a parent's. A chain is therefore cut only where no further
ancestor has points.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roost.balance.plan import Plan

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


@dataclass(frozen=True)
class Lineage:
    """Partitions of the present plan, partitions with points, and the links between them.

    ``known`` has all of them by identifier. ``epoch`` is -1 before the first plan.
    """

    epoch: int = -1
    present: tuple[int, ...] = ()
    known: Mapping[int, Ancestor] = field(default_factory=dict)

    def with_plan(self, plan: Plan) -> Lineage:
        """Add the plan of the next epoch; idempotent for the present one.

        A plan that was not derived from the present one has no parents. Its partitions are then
        linked with the present partitions that they overlap. An older plan, or one with parents
        that were never added, raises :class:`ValueError`.
        """
        if plan.epoch == self.epoch:
            return self
        if plan.epoch < self.epoch:
            raise ValueError(f"plan {plan.epoch} is older than the present plan {self.epoch}")
        new: dict[int, Ancestor] = {}
        for p in plan.partitions:
            if p.partition_id not in self.known:
                cells = (p.column0, p.row0, p.column1 - 1, p.row1 - 1)
                # No points were stored before the first plan, so its parents do not matter.
                parents = () if self.epoch < 0 else p.parents or self.present_in(cells)
                unknown = [number for number in parents if number not in self.known]
                if unknown:
                    raise ValueError(f"partition {p.partition_id} has unknown parents {unknown}")
                new[p.partition_id] = Ancestor(p.column0, p.row0, p.column1, p.row1, parents)
        present = tuple(p.partition_id for p in plan.partitions)
        return Lineage(plan.epoch, present, {**self.known, **new})

    def present_in(self, cells: CellRange) -> tuple[int, ...]:
        """Return the partitions of the present plan that overlap an inclusive range of cells."""
        return tuple(number for number in self.present if self.known[number].touches(cells))

    def needed(
        self,
        partition_ids: Iterable[int],
        live_ids: Collection[int],
        cells: CellRange | None = None,
    ) -> set[int]:
        """Return the partitions whose points a query must read.

        They are ancestors of ``partition_ids``, the present partitions that the query overlaps, and
        have points in the window (``live_ids``). Ancestors outside the inclusive range ``cells``
        are skipped.
        """
        found: set[int] = set()
        waiting = list(partition_ids)
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            ancestor = self.known[number]
            if cells is None or ancestor.touches(cells):
                found.add(number)
                waiting += ancestor.parents
        return found.intersection(live_ids)

    def expire(self, live_ids: Collection[int]) -> Lineage:
        """Drop ancestors that have no points and lead to none.

        ``live_ids`` are the partitions that have points in the window, or may get some from a
        running batch.
        """
        # Identifiers only grow, so parents sort before their children.
        leads: set[int] = set()
        for number in sorted(self.known):
            if number in live_ids or not leads.isdisjoint(self.known[number].parents):
                leads.add(number)
        keep = leads.union(self.present)
        known = {
            number: replace(ancestor, parents=tuple(n for n in ancestor.parents if n in leads))
            for number, ancestor in self.known.items()
            if number in keep
        }
        return replace(self, known=known)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory."""
        return {
            "epoch": self.epoch,
            "present": list(self.present),
            "partitions": [
                [number, a.column0, a.row0, a.column1, a.row1, list(a.parents)]
                for number, a in self.known.items()
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Lineage:
        """Invert :meth:`to_json`."""
        known = {
            number: Ancestor(column0, row0, column1, row1, tuple(parents))
            for number, column0, row0, column1, row1, parents in data["partitions"]
        }
        return cls(data["epoch"], tuple(data["present"]), known)
