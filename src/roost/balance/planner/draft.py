"""Draft: a candidate plan of the global planner, and the operations that improve it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from roost.balance.planner.board import (
    FREE,
    SHARED,
    UNEVEN,
    divide,
    divide_evenly,
    fill,
    give,
    give_all,
    put,
)
from roost.balance.planner.layout import DraftResult, PlanningInput
from roost.balance.planner.repair import RepairTarget, relieve
from roost.balance.planner.shape import (
    costliest_cell,
    hot_cells,
    isolate,
    merge_own,
    merge_pairs,
    mergeable,
)

# A shared cell is returned to one machine when it costs less than this share of the threshold for
# sharing, so that noise does not share it again in the next round.
UNSHARE = 0.8
# Repair terminates by itself; this is only an upper bound.
PASSES = 16
# Receivers are filled up to the mean, and then by steps of the tolerance above it.
LIFT = 0.4
# Maximum number of machines added to a cell that no machine has capacity for.
SHARERS_MORE = 6


class Draft:
    """A board, and the machines of its shared slots."""

    def __init__(self, given: PlanningInput, rect: NDArray[np.int64]) -> None:
        slots = len(rect) + 8 * given.plan.machines + 1024
        self._given = given
        self._shared: dict[int, tuple[int, ...]] = {}
        self._board = given.board(np.empty_like(given.table), slots)
        fill(self._board, rect)

    @classmethod
    def of_plan(cls, given: PlanningInput) -> Draft:
        """Start from the present plan."""
        draft = cls(given, given.rect)
        give_all(draft._board, given.owner)
        for slot in np.flatnonzero(given.owner == SHARED).tolist():
            draft._give(slot, given.plan.partitions[slot].machines)
        return draft

    @classmethod
    def fresh(cls, given: PlanningInput) -> Draft:
        """Divide the whole grid again, one part per machine.

        Each part goes to the free machine that has most of its queries already.
        """
        plan = given.plan
        parts = np.empty((plan.machines, 5), np.int64)
        cost = given.cost.mean(axis=0, keepdims=True)
        parts = parts[: divide_evenly(cost, plan.machines, parts)]
        draft = cls(given, np.ascontiguousarray(parts[:, :4]))
        held = given.overlaps(draft._board, np.arange(len(parts)))
        held = held[np.argsort(-given.queries(held), kind="stable")]
        wanted = parts[:, 4].tolist()
        owners: list[list[int]] = [[] for _ in wanted]
        free = set(range(plan.machines))
        for part, old in held[:, 4:].tolist():
            for machine in plan.partitions[old].machines:
                if machine in free and len(owners[part]) < wanted[part]:
                    owners[part].append(machine)
                    free.discard(machine)
        left = sorted(free)
        for part, count in enumerate(wanted):
            while len(owners[part]) < count:
                owners[part].append(left.pop())
        owner = [machines[0] if len(machines) == 1 else SHARED for machines in owners]
        give_all(draft._board, np.asarray(owner, np.int64))
        for part, machines in enumerate(owners):
            if len(machines) > 1:
                draft._give(part, sorted(machines))
        return draft

    @property
    def heights(self) -> NDArray[np.float64]:
        """Machine, view: cost of its partitions."""
        return self._board.height

    @property
    def count(self) -> int:
        """Number of partitions."""
        return int(np.count_nonzero(self._board.owner[: self._board.used[0]] != FREE))

    def copy(self) -> Draft:
        """Return an independent copy."""
        other = Draft.__new__(Draft)
        other._given = self._given
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
        """Share cells that cost more than ``share_at`` means; stop sharing cheaper ones."""
        board = self._board
        means = board.height.mean(axis=0)
        for slot, machines in list(self._shared.items()):
            load = board.load[slot]
            if self._divide_shared(slot, machines):
                continue
            if np.all(load < UNSHARE * share_at * means):
                keeper = min(machines, key=lambda m: (float(board.height[m, 0]), m))
                if np.all(board.height[keeper] + load * (1.0 - 1.0 / len(machines)) <= means):
                    self._take_shared(slot)
                    give(board, slot, keeper)
        hottest: dict[tuple[int, int], int] = {}
        for view, mean in enumerate(means.tolist()):
            # Their costs sum to at most the total; halving needs some extra rows.
            cells = np.empty((int(len(board.height) / share_at) + 256, 4), np.int64)
            found = hot_cells(board.cost, view, share_at * mean, cells)
            for column, row in cells[:found, :2].tolist():
                hottest.setdefault((column, row), view)
        for (column, row), view in hottest.items():
            slot = int(board.table[row, column])
            if len(self._shared.get(slot, ())) >= np.max(board.load[slot] / means) / share_at:
                continue
            slot, owners = self._cut_out(column, row)
            if slot >= 0:
                needed = int(np.ceil(np.max(board.load[slot] / means) / share_at))
                share = board.load[slot] / max(needed, len(owners))
                # An overloaded machine may leave; one cell has few queries to load.
                owners = [m for m in owners if np.all(board.height[m] + share <= share_at * means)]
                owners += self._lowest(view, needed - len(owners), owners)
                self._give(slot, owners)

    def share_excess(self, view: int, slack: float) -> None:
        """Let overloaded machines share their costliest cell with more machines.

        For cells that no machine has capacity for: if a machine has few cells, there is no other
        way to divide their cost.
        """
        board = self._board
        means = board.height.mean(axis=0)
        limits = np.maximum(means * slack, board.height.max(axis=0))
        limits[view] = means[view] * slack
        shares: dict[int, list[int]] = {}
        for slot, machines in self._shared.items():
            for machine in machines:
                shares.setdefault(machine, []).append(slot)
        slots, starts = self._by_owner()
        for giver in np.argsort(-board.height[:, view], kind="stable").tolist():
            if board.height[giver, view] <= limits[view]:
                return
            column, row = costliest_cell(board, view, slots[starts[giver] : starts[giver + 1]])
            cells = [board.rect[slot, :2].tolist() for slot in shares.get(giver, ())]
            if column >= 0:
                cells.append([column, row])
            for column, row in cells:
                over = float(board.height[giver, view] - limits[view])
                if over > 0.0:
                    self._share_more(column, row, view, over, limits)

    def _share_more(
        self, column: int, row: int, view: int, over: float, limits: NDArray[np.float64]
    ) -> None:
        """Add machines to a cell until each has ``over`` less, up to a maximum."""
        board = self._board
        present = self._shared.get(int(board.table[row, column]), (-1,))
        sums = board.cost[:, row : row + 2, column : column + 2]
        load = sums[:, 1, 1] - sums[:, 1, 0] - sums[:, 0, 1] + sums[:, 0, 0]
        share = float(load[view]) / len(present)
        most = len(present) + SHARERS_MORE
        count = int(np.ceil(float(load[view]) / (share - over))) if share > over else most
        slot, owners = self._cut_out(column, row)
        if slot < 0:
            return
        for number in range(max(count, len(present) + 1), most + 1):
            others = self._lowest(view, number - len(owners), owners)
            if np.all(board.height[others] + load / number + board.overhead <= limits):
                owners += others
                break
        self._give(slot, owners)

    def relieve(self, view: int, slack: float, *, regardless: bool = False) -> None:
        """Bring all machines of one view within ``slack`` of the mean.

        Other views do not become worse than they are, or than slack allows, unless
        ``regardless``.
        """
        board = self._board
        caps = np.maximum(board.height.mean(axis=0) * slack, board.height.max(axis=0))
        if regardless:
            caps[:] = np.inf
        lift = 0.0
        for _ in range(PASSES):
            heights = board.height[:, view]
            # Every cut adds the overhead of a partition, so the mean grows.
            mean = float(heights.mean())
            order = np.argsort(heights, kind="stable")
            if heights[order[-1]] <= mean * slack:
                return
            level = mean * (1.0 + lift * (slack - 1.0))
            target = RepairTarget(view, level, mean * slack, caps, self._typical_queries())
            slots, starts = self._by_owner()
            edge = int(np.searchsorted(heights[order], level))
            if not relieve(board, target, order, edge, slots, starts):
                # No machine has capacity below the mean: fill up closer to the limit.
                lift += LIFT
                if lift >= 1.0:
                    return

    def merge(self) -> None:
        """Merge partitions of one machine that form a rectangle."""
        merge_own(self._board)

    def tidy(self, goal: int, slack: float, trifle: float) -> None:
        """Reduce the number of partitions to a goal, by moving small ones to neighbours.

        Only partitions with less than ``trifle`` of a machine's queries move, the smallest first.
        """
        caps = self._board.height.mean(axis=0) * slack
        most = trifle * self._typical_queries()
        for _ in range(PASSES):
            excess = self.count - goal
            if excess <= 0:
                return
            pairs = np.empty((4 * self._board.used[0], 3), np.int64)
            pairs = pairs[: mergeable(self._board, caps, most, pairs)]
            pairs = pairs[np.argsort(pairs[:, 2], kind="stable")]
            if merge_pairs(self._board, caps, pairs, excess) <= excess // 100:
                return

    def result(self) -> DraftResult:
        """Return the partitions of the draft."""
        return DraftResult(self._given, self._board, self._shared)

    def _typical_queries(self) -> float:
        """Return the mean number of queries per machine if each were on one machine only."""
        rows, columns = self._board.table.shape
        count = self._given.queries(np.array([[0, 0, columns, rows]]))
        return max(float(count[0]) / len(self._board.height), 1.0)

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

    def _divide_shared(self, slot: int, machines: tuple[int, ...]) -> bool:
        """Divide a shared partition among its owners, if lines divide it evenly.

        No owner has to load a query.
        """
        board = self._board
        pieces = np.empty((len(machines), 4), np.int64)
        divide(board, 0, board.rect[slot], np.ones(len(machines)), False, pieces)
        full = [i for i in range(len(machines)) if pieces[i, 0] < pieces[i, 2]]
        column0, row0, column1, row1 = pieces.T
        sums = board.cost[0]
        costs = (
            sums[row1, column1] - sums[row1, column0] - sums[row0, column1] + sums[row0, column0]
        )
        fair = costs.max() * len(machines) <= (1.0 + UNEVEN) * board.load[slot, 0]
        if len(full) < len(machines) or not fair:
            return False
        self._take_shared(slot)
        first = int(board.used[0])
        fill(board, pieces[1:])
        put(board, slot, *pieces[0].tolist())
        for machine, part in zip(machines, [slot, *range(first, first + len(full))], strict=False):
            give(board, part, machine)
        return True

    def _by_owner(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return slots by owner, and the start of each machine's slots."""
        owner = self._board.owner[: self._board.used[0]]
        slots = np.argsort(owner, kind="stable")
        machines = np.arange(len(self._board.height) + 1)
        return slots, np.searchsorted(owner[slots], machines)

    def _cut_out(self, column: int, row: int) -> tuple[int, list[int]]:
        """Give a cell its own slot without owners; return slot (-1 if full) and old owners."""
        board = self._board
        slot = int(board.table[row, column])
        if slot in self._shared:
            return slot, list(self._take_shared(slot))
        if board.used[0] + 4 > board.owner.size:
            return -1, []
        owner = int(board.owner[slot])
        return int(isolate(board, column, row)), [owner]

    def _lowest(self, view: int, count: int, besides: Sequence[int]) -> list[int]:
        """Return the machines of the lowest cost, excluding some."""
        if count <= 0:
            return []
        heights = self._board.height[:, view]
        tried = min(count + len(besides), len(heights))
        lowest = np.argpartition(heights, tried - 1)[:tried]
        ranked = lowest[np.lexsort((lowest, heights[lowest]))].tolist()
        return [m for m in ranked if m not in besides][:count]
