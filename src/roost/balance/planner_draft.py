"""A plan while the planner works on it, and what it would cost to put it in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Move, Replan
from roost.balance.plan import Partition, Plan
from roost.balance.planner_loops import (
    FREE,
    SHARED,
    Board,
    divide,
    divide_evenly,
    fill,
    give,
    overlaps,
    put,
)
from roost.balance.planner_repair import Aim, relieve
from roost.balance.planner_shape import hot_cells, isolate, merge_own, merge_pairs, mergeable

# A shared cell is given back to one machine when it costs less than this part of what made it
# shared, so that noise does not share it again in the next round.
UNSHARE = 0.8
# Repair ends by itself; this only bounds it.
PASSES = 16


@dataclass(frozen=True, eq=False)
class Ground:
    """What all drafts of one decision start from.

    ``cost`` has a table of sums for each round, the newest first, scaled to cost the same in all;
    ``corners`` are the Euler histogram's sums.
    """

    plan: Plan
    cost: NDArray[np.float64]
    corners: NDArray[np.int32]
    overhead: float
    rect: NDArray[np.int64]
    table: NDArray[np.int32]

    @classmethod
    def of(
        cls, plan: Plan, cost: NDArray[np.float64], corners: NDArray[np.int32], overhead: float
    ) -> Ground:
        """Lay out the present plan."""
        table = np.zeros((plan.rows, plan.columns), np.int32)
        ground = cls(plan, cost, corners, overhead, rects_of(plan), table)
        fill(ground.board(table, len(plan.partitions)), ground.rect)
        return ground

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


def rects_of(plan: Plan) -> NDArray[np.int64]:
    """Rectangles of a plan's partitions, one a row."""
    flat = [(p.column0, p.row0, p.column1, p.row1) for p in plan.partitions]
    return np.asarray(flat, np.int64).reshape(-1, 4)


@dataclass(frozen=True, eq=False)
class Layout:
    """Partitions that a draft comes to.

    ``parents`` are places in the list of the plan's partitions; ``arrivals`` are the queries that
    each machine has to load.
    """

    rect: NDArray[np.int64]
    machines: list[tuple[int, ...]]
    parents: list[list[int]]
    arrivals: NDArray[np.float64]

    def changes(self, plan: Plan) -> tuple[Change, ...]:
        """Express it as changes of the plan that the draft began with."""
        known = {(p.column0, p.row0, p.column1, p.row1): p for p in plan.partitions}
        partitions = []
        moves = []
        next_id = plan.next_id
        for rect, machines, parents in zip(
            self.rect.tolist(), self.machines, self.parents, strict=True
        ):
            column0, row0, column1, row1 = rect
            same = known.get((column0, row0, column1, row1))
            if same is None:
                ids = tuple(plan.partitions[number].partition_id for number in parents)
                partitions.append(Partition(next_id, column0, row0, column1, row1, machines, ids))
                next_id += 1
            elif set(same.machines) == set(machines):
                partitions.append(same)
            else:
                moves.append(Move(same.partition_id, machines))
                partitions.append(replace(same, machines=machines))
        return tuple(moves) if next_id == plan.next_id else (Replan(tuple(partitions)),)


class Draft:
    """A board, and the machines of the slots that are shared."""

    def __init__(self, ground: Ground, rect: NDArray[np.int64]) -> None:
        slots = len(rect) + 8 * ground.plan.machines + 1024
        self._ground = ground
        self._shared: dict[int, tuple[int, ...]] = {}
        self._board = ground.board(np.empty_like(ground.table), slots)
        fill(self._board, rect)

    @classmethod
    def of_plan(cls, ground: Ground) -> Draft:
        """Begin with the plan as it is."""
        draft = cls(ground, ground.rect)
        for slot, p in enumerate(ground.plan.partitions):
            draft._give(slot, p.machines)
        return draft

    @classmethod
    def fresh(cls, ground: Ground) -> Draft:
        """Divide the whole grid anew, a part for each machine.

        Each part goes to the machine that has most of its queries already, as far as they agree.
        """
        plan = ground.plan
        parts = np.empty((plan.machines, 5), np.int64)
        cost = ground.cost.mean(axis=0, keepdims=True)
        parts = parts[: divide_evenly(cost, plan.machines, parts)]
        draft = cls(ground, np.ascontiguousarray(parts[:, :4]))
        held = draft._overlaps()
        queries = count_queries(ground.corners, held)
        wanted = parts[:, 4].tolist()
        owners: list[list[int]] = [[] for _ in wanted]
        free = set(range(plan.machines))
        for i in np.argsort(-queries, kind="stable").tolist():
            part, old = held[i, 4], held[i, 5]
            for machine in plan.partitions[old].machines:
                if machine in free and len(owners[part]) < wanted[part]:
                    owners[part].append(machine)
                    free.discard(machine)
        left = sorted(free)
        for part, count in enumerate(wanted):
            while len(owners[part]) < count:
                owners[part].append(left.pop())
            draft._give(part, tuple(sorted(owners[part])))
        return draft

    @property
    def heights(self) -> NDArray[np.float64]:
        """Machine, round: cost of all it owns."""
        return self._board.height

    @property
    def count(self) -> int:
        """Partitions."""
        return int(np.count_nonzero(self._board.owner[: self._board.used[0]] != FREE))

    def copy(self) -> Draft:
        """Return a draft that can be worked on apart from this one."""
        other = Draft.__new__(Draft)
        other._ground = self._ground
        other._shared = dict(self._shared)
        board = self._board
        other._board = board._replace(
            table=board.table.copy(),
            rect=board.rect.copy(),
            owner=board.owner.copy(),
            load=board.load.copy(),
            height=board.height.copy(),
            used=board.used.copy(),
        )
        return other

    def settle_shares(self, share_at: float) -> None:
        """Share cells that cost more than ``share_at`` means, and stop sharing what need not be."""
        board = self._board
        means = board.height.mean(axis=0)
        for slot, machines in list(self._shared.items()):
            column0, row0, column1, row1 = board.rect[slot].tolist()
            one_cell = (column1 - column0) * (row1 - row0) == 1
            if not one_cell:
                self._divide_shared(slot, machines)
            elif np.all(board.load[slot] < UNSHARE * share_at * means):
                self._take_shared(slot)
                keeper = min(machines, key=lambda m: (float(board.height[m, 0]), m))
                give(board, slot, keeper)
        hottest: dict[tuple[int, int], int] = {}
        for view, mean in enumerate(means.tolist()):
            # Their costs add up to the total at most; halving needs a few rows on top of them.
            cells = np.empty((int(len(board.height) / share_at) + 256, 4), np.int64)
            found = hot_cells(board.cost, view, share_at * mean, cells)
            for column, row in cells[:found, :2].tolist():
                hottest.setdefault((column, row), view)
        for (column, row), view in hottest.items():
            self._share(column, row, view, means)

    def relieve(self, view: int, slack: float, *, regardless: bool = False) -> None:
        """Bring the machines of one round within ``slack`` of the mean.

        Other rounds are not made worse than they are, or than slack allows, unless regardless.
        """
        board = self._board
        means = board.height.mean(axis=0)
        mean, limit = float(means[view]), float(means[view]) * slack
        caps = np.maximum(means * slack, board.height.max(axis=0))
        if regardless:
            caps[:] = np.inf
        aim = Aim(view, mean, limit, caps, self._typical_queries())
        for _ in range(PASSES):
            heights = board.height[:, view]
            order = np.argsort(heights, kind="stable")
            if heights[order[-1]] <= limit:
                return
            owner = board.owner[: board.used[0]]
            slots = np.argsort(owner, kind="stable")
            starts = np.searchsorted(owner[slots], np.arange(len(heights) + 1))
            edge = int(np.searchsorted(heights[order], mean))
            if not relieve(board, aim, order, edge, slots, starts):
                return

    def merge(self) -> None:
        """Glue together what belongs to one machine and forms a rectangle."""
        merge_own(self._board)

    def tidy(self, goal: int, slack: float, trifle: float) -> None:
        """Bring the number of partitions down to a goal, by giving small ones to neighbours.

        Only what has less than ``trifle`` of a machine's queries goes, and the fewest first.
        """
        caps = self._board.height.mean(axis=0) * slack
        most = trifle * self._typical_queries()
        while self.count > goal:
            pairs = np.empty((4 * self._board.used[0], 3), np.int64)
            pairs = pairs[: mergeable(self._board, caps, pairs)]
            pairs = pairs[pairs[:, 2] <= most]
            pairs = pairs[np.argsort(pairs[:, 2], kind="stable")]
            if not merge_pairs(self._board, caps, pairs, self.count - goal):
                return

    def layout(self) -> Layout:
        """Say which partitions the draft comes to, and what each machine has to load for them.

        A partition is loaded whole, even if only a part of it is new to the machine. So where
        most of it is not new, it stays in pieces, and the next change glues them for nothing.
        """
        plan, corners = self._ground.plan, self._ground.corners
        held = self._overlaps()
        slots, old = held[:, 4], held[:, 5]
        owners = [p.machines for p in plan.partitions]
        before = np.asarray([m[0] if len(m) == 1 else SHARED for m in owners], np.int64)[old]
        after = self._board.owner[slots]
        known = before == after
        shared = np.flatnonzero((before < 0) | (after < 0))
        for i in shared.tolist():
            known[i] = set(self._machines(int(slots[i]))) <= set(owners[old[i]])
        queries = count_queries(corners, held)
        sizes = len(self._board.owner)
        there = np.bincount(slots, queries * known, sizes)
        missing = np.bincount(slots, queries * ~known, sizes)
        has_known = np.bincount(slots, known, sizes) > 0
        has_new = np.bincount(slots, ~known, sizes) > 0
        apart = has_known & has_new & (there > missing)
        whole = np.flatnonzero((self._board.owner != FREE) & ~apart)
        pieces = np.flatnonzero(apart[slots])
        arrivals = np.zeros(plan.machines)
        loaded = whole[has_new[whole] & (self._board.owner[whole] >= 0)]
        counts = count_queries(corners, self._board.rect[loaded])
        np.add.at(arrivals, self._board.owner[loaded], counts)
        loaded = pieces[~known[pieces]]
        np.add.at(arrivals, after[loaded], queries[loaded])
        for i in shared.tolist():
            machines = self._machines(int(slots[i]))
            if len(machines) > 1:
                arrivals[list(set(machines) - set(owners[old[i]]))] += queries[i]
        parents: dict[int, list[int]] = {}
        for slot, number in held[~apart[slots], 4:].tolist():
            parents.setdefault(slot, []).append(number)
        return Layout(
            np.concatenate([self._board.rect[whole], held[pieces, :4]]),
            [self._machines(slot) for slot in [*whole.tolist(), *slots[pieces].tolist()]],
            [*(parents[slot] for slot in whole.tolist()), *([n] for n in old[pieces].tolist())],
            arrivals,
        )

    def _typical_queries(self) -> float:
        """Count the queries that a machine would have if each were on one machine only."""
        rows, columns = self._board.table.shape
        count = count_queries(self._board.corners, np.array([[0, 0, columns, rows]]))
        return max(float(count[0]) / len(self._board.height), 1.0)

    def _machines(self, slot: int) -> tuple[int, ...]:
        return self._shared.get(slot) or (int(self._board.owner[slot]),)

    def _overlaps(self) -> NDArray[np.int64]:
        """Where slots overlap partitions of the plan: rectangle, slot and partition."""
        ground = self._ground
        slots = np.flatnonzero(self._board.owner[: self._board.used[0]] != FREE)
        if slots.size == 0:
            slots = np.arange(self._board.used[0])
        rect = self._board.rect[slots]
        found = np.empty((4 * (len(rect) + len(ground.rect)) + 64, 6), np.int64)
        count = overlaps(rect, ground.table, ground.rect, found)
        if count > len(found):
            found = np.empty((count, 6), np.int64)
            overlaps(rect, ground.table, ground.rect, found)
        found = found[:count]
        found[:, 4] = slots[found[:, 4]]
        return found

    def _give(self, slot: int, machines: Sequence[int]) -> None:
        board = self._board
        if len(machines) == 1:
            give(board, slot, machines[0])
            return
        board.owner[slot] = SHARED
        self._shared[slot] = tuple(machines)
        board.height[list(machines)] += board.load[slot] / len(machines) + board.overhead

    def _take_shared(self, slot: int) -> tuple[int, ...]:
        board = self._board
        machines = self._shared.pop(slot)
        board.height[list(machines)] -= board.load[slot] / len(machines) + board.overhead
        board.owner[slot] = FREE
        return machines

    def _divide_shared(self, slot: int, machines: tuple[int, ...]) -> None:
        """Cut a shared partition up among those who share it; none has to load a query."""
        board = self._board
        self._take_shared(slot)
        pieces = np.empty((len(machines), 4), np.int64)
        weights = np.ones(len(machines))
        divide(board, 0, board.rect[slot].copy(), weights, False, pieces)
        full = [i for i in range(len(machines)) if pieces[i, 0] < pieces[i, 2]]
        first = board.used[0]
        fill(board, pieces[full[1:]])
        put(board, slot, *pieces[full[0]].tolist())
        for i, part in zip(full, [slot, *range(first, board.used[0])], strict=True):
            give(board, part, machines[i])

    def _share(self, column: int, row: int, view: int, means: NDArray[np.float64]) -> None:
        """Let a hot cell have as many machines as it costs means, the present ones among them."""
        board = self._board
        slot = int(board.table[row, column])
        if slot in self._shared:
            owners = list(self._take_shared(slot))
        else:
            if board.used[0] + 4 > board.owner.size:
                return
            owners = [int(board.owner[slot])]
            slot = int(isolate(board, column, row))
        needed = int(np.ceil(np.max(board.load[slot] / means)))
        machines = board.height.shape[0]
        if len(owners) < needed:
            tried = min(needed + len(owners), machines)
            heights = board.height[:, view]
            lowest = np.argpartition(heights, tried - 1)[:tried]
            ranked = lowest[np.lexsort((lowest, heights[lowest]))].tolist()
            owners += [m for m in ranked if m not in owners][: needed - len(owners)]
        self._give(slot, tuple(owners))


def count_queries(corners: NDArray[np.int32], rect: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the queries over each rectangle; further columns are ignored."""
    column0, row0, column1, row1 = rect[:, :4].T
    ends = corners[0, row1, column1].astype(np.int64) - corners[1, row1, column0]
    counts: NDArray[np.int64] = ends - corners[2, row0, column1] + corners[3, row0, column0]
    return counts
