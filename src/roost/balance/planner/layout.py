"""Input of a planning decision, and the result of a draft: partitions, parents, loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Move, Replan
from roost.balance.plan import Partition, Plan
from roost.balance.planner.board import FREE, SHARED, Board, fill, overlaps


@dataclass(frozen=True, eq=False)
class PlanningInput:
    """Common input of all drafts of one decision.

    ``cost`` has a table of prefix sums per round, the newest first, scaled to equal totals;
    ``corners`` are the Euler histogram's sums; ``rect``, ``owner`` and ``table`` are the present
    plan, as on a :class:`Board`.
    """

    plan: Plan
    cost: NDArray[np.float64]
    corners: NDArray[np.int32]
    overhead: float
    rect: NDArray[np.int64]
    owner: NDArray[np.int64]
    table: NDArray[np.int32]

    @classmethod
    def of(
        cls, plan: Plan, cost: NDArray[np.float64], corners: NDArray[np.int32], overhead: float
    ) -> PlanningInput:
        """Build the input from the present plan."""
        table = np.zeros((plan.rows, plan.columns), np.int32)
        owners = [p.machines[0] if len(p.machines) == 1 else SHARED for p in plan.partitions]
        owner = np.asarray(owners, np.int64)
        given = cls(plan, cost, corners, overhead, rects_of(plan), owner, table)
        fill(given.board(table, len(plan.partitions)), given.rect)
        return given

    def board(self, table: NDArray[np.int32], slots: int) -> Board:
        """Return an empty board on a table of cells."""
        views = self.cost.shape[0]
        return Board(
            self.cost,
            self.corners,
            table,
            np.zeros((slots, 4), np.int64),
            np.full(slots, FREE, np.int64),
            np.zeros((slots, views)),
            np.zeros((self.plan.machines, views)),
            np.zeros(1, np.int64),
            self.overhead,
        )

    def overlaps(self, board: Board, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the overlaps of slots with the plan: rectangle, slot and partition."""
        rect = board.rect[slots]
        found = np.empty((4 * (len(rect) + len(self.rect)) + 64, 6), np.int64)
        count = overlaps(rect, self.table, self.rect, found)
        if count > len(found):
            found = np.empty((count, 6), np.int64)
            overlaps(rect, self.table, self.rect, found)
        found = found[:count]
        found[:, 4] = slots[found[:, 4]]
        return found

    def queries(self, rect: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the queries over each rectangle; further columns are ignored."""
        column0, row0, column1, row1 = rect[:, :4].T
        ends = self.corners[0, row1, column1].astype(np.int64) - self.corners[1, row1, column0]
        starts = self.corners[2, row0, column1].astype(np.int64) - self.corners[3, row0, column0]
        counts: NDArray[np.int64] = ends - starts
        return counts


def rects_of(plan: Plan) -> NDArray[np.int64]:
    """Return the rectangles of a plan's partitions, one per row."""
    rows = map(attrgetter("column0", "row0", "column1", "row1"), plan.partitions)
    return np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, 4)


class DraftResult:
    """Partitions of a board, as changes of the present plan.

    A machine loads the queries of a partition as a whole, even if only a part of it is new. So if
    most of a partition is not new, it stays in pieces, which the next change merges at no cost.
    """

    arrivals: NDArray[np.float64]
    """Queries that each machine has to load."""

    def __init__(
        self, given: PlanningInput, board: Board, shared: Mapping[int, tuple[int, ...]]
    ) -> None:
        self._given = given
        self._board = board
        self._shared = shared
        alive = np.flatnonzero(board.owner != FREE)
        held = given.overlaps(board, alive)
        slots, old = held[:, 4], held[:, 5]
        before, after = given.owner[old], board.owner[slots]
        known = before == after
        in_common = np.flatnonzero((before < 0) | (after < 0)).tolist()
        for i in in_common:
            known[i] = set(self._machines(int(slots[i]))) <= self._before(int(old[i]))
        queries = given.queries(held)
        there = np.bincount(slots, queries * known, board.owner.size)
        missing = np.bincount(slots, queries * ~known, board.owner.size)
        has_known = np.bincount(slots, known, board.owner.size) > 0
        has_new = np.bincount(slots, ~known, board.owner.size) > 0
        apart = has_known & has_new & (there > missing)
        self._held = held

        self._whole = alive[~apart[alive]]
        self._pieces = np.flatnonzero(apart[slots])
        self.arrivals = np.zeros(given.plan.machines)
        loaded = self._whole[has_new[self._whole] & (board.owner[self._whole] >= 0)]
        np.add.at(self.arrivals, board.owner[loaded], given.queries(board.rect[loaded]))
        loaded = self._pieces[~known[self._pieces]]
        np.add.at(self.arrivals, after[loaded], queries[loaded])
        for i in in_common:
            machines = self._machines(int(slots[i]))
            if len(machines) > 1:
                self.arrivals[list(set(machines) - self._before(int(old[i])))] += queries[i]

    def changes(self) -> tuple[Change, ...]:
        """Return the changes from the present plan."""
        plan, held = self._given.plan, self._held
        # Overlaps are sorted by slot; a whole slot has a range of them, a piece exactly one.
        begins = np.searchsorted(held[:, 4], self._whole)
        begins = np.concatenate([begins, self._pieces])
        ends = np.searchsorted(held[:, 4], self._whole, side="right")
        ends = np.concatenate([ends, self._pieces + 1])
        slots = held[begins, 4]
        rect = np.concatenate([self._board.rect[self._whole], held[self._pieces, :4]])
        old = held[begins, 5]
        same = (ends - begins == 1) & np.all(rect == self._given.rect[old], axis=1)
        stays = (self._board.owner[slots] == self._given.owner[old]) & (self._given.owner[old] >= 0)
        partitions = [plan.partitions[number] for number in old.tolist()]
        moves = []
        next_id = plan.next_id
        for i in np.flatnonzero(~(same & stays)).tolist():
            machines = self._machines(int(slots[i]))
            if not same[i]:
                numbers = held[begins[i] : ends[i], 5].tolist()
                parents = tuple(plan.partitions[number].partition_id for number in numbers)
                column0, row0, column1, row1 = rect[i].tolist()
                corners = (column0, row0, column1, row1)
                partitions[i] = Partition(next_id, *corners, machines, parents)
                next_id += 1
            elif set(partitions[i].machines) != set(machines):
                partitions[i] = replace(partitions[i], machines=machines)
                moves.append(Move(partitions[i].partition_id, machines))
        return tuple(moves) if next_id == plan.next_id else (Replan(tuple(partitions)),)

    def _machines(self, slot: int) -> tuple[int, ...]:
        return self._shared.get(slot) or (int(self._board.owner[slot]),)

    def _before(self, old: int) -> set[int]:
        return set(self._given.plan.partitions[old].machines)
