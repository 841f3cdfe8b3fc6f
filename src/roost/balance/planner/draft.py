"""Draft: a candidate plan of the global planner; its input, its operations and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Move, Replan
from roost.balance.global_index import find_overlaps
from roost.balance.plan import Partition, Plan
from roost.balance.planner.board import (
    FREE,
    SHARED,
    UNEVEN,
    Board,
    add,
    assign,
    divide,
    divide_evenly,
    fill,
    put,
    read_area,
)
from roost.balance.planner.repair import (
    RepairTarget,
    costliest_cell,
    hot_cells,
    isolate,
    merge_own,
    merge_pairs,
    mergeable,
    relieve,
)
from roost.model.arrays import Floats, Ints

# A shared cell is returned to one machine when it costs less than this share of the threshold for
# sharing, so that noise does not share it again in the next round.
UNSHARE = 0.8
# Repair terminates by itself; this is only an upper bound.
PASSES = 16
# Receivers are filled up to the mean, and then by steps of the tolerance above it.
LIFT = 0.4
# Maximum number of machines added to a cell that no machine has capacity for.
SHARERS_MORE = 6


@dataclass(frozen=True, eq=False)
class PlanningInput:
    """Common input of all drafts of one decision.

    ``cost`` has a table of prefix sums per round, the newest first, scaled to equal totals;
    ``corners`` are the Euler histogram's sums; ``rect``, ``owner`` and ``table`` are the present
    plan, as on a :class:`Board`.
    """

    plan: Plan
    cost: Floats
    corners: NDArray[np.int32]
    overhead: float
    rect: Ints
    owner: Ints
    table: NDArray[np.int32]

    @classmethod
    def of(
        cls, plan: Plan, cost: Floats, corners: NDArray[np.int32], overhead: float
    ) -> PlanningInput:
        """Build the input from the present plan."""
        table = np.zeros((plan.rows, plan.columns), np.int32)
        owners = [p.machines[0] if len(p.machines) == 1 else SHARED for p in plan.partitions]
        owner = np.asarray(owners, np.int64)
        given = cls(plan, cost, corners, overhead, plan.rects(), owner, table)
        fill(given.board(table, len(plan.partitions)), given.rect, owner)
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

    def overlaps(self, rect: Ints) -> Ints:
        """Return the overlaps of rectangles with the plan, in order of rows and columns.

        An overlap is ``column0, row0, column1, row1, index in rect, index in the plan``.
        """
        new, old = find_overlaps(self.table, self.rect, rect)
        found = np.empty((new.size, 6), np.int64)
        found[:, :2] = np.maximum(rect[new, :2], self.rect[old, :2])
        found[:, 2:4] = np.minimum(rect[new, 2:], self.rect[old, 2:])
        found[:, 4], found[:, 5] = new, old
        return found[np.lexsort((found[:, 0], found[:, 1], new))]

    def queries(self, rect: Ints) -> Ints:
        """Count the queries over each rectangle; further columns are ignored."""
        column0, row0, column1, row1 = rect[:, :4].T
        ends = self.corners[0, row1, column1].astype(np.int64) - self.corners[1, row1, column0]
        starts = self.corners[2, row0, column1].astype(np.int64) - self.corners[3, row0, column0]
        counts: Ints = ends - starts
        return counts


class DraftResult:
    """Partitions of a board, as changes of the present plan.

    A machine loads the queries of a partition as a whole, even if only a part of it is new. So if
    most of a partition is not new, it stays in pieces, which the next change merges at no cost.
    """

    arrivals: Floats
    """Queries that each machine has to load."""

    def __init__(
        self, given: PlanningInput, board: Board, shared: Mapping[int, tuple[int, ...]]
    ) -> None:
        self._given = given
        self._board = board
        self._shared = shared
        alive = np.flatnonzero(board.owner != FREE)
        held = given.overlaps(board.rect[alive])
        held[:, 4] = alive[held[:, 4]]
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


class Draft:
    """A board, and the machines of its shared slots."""

    def __init__(
        self, given: PlanningInput, rect: Ints, owner: Ints, shared: dict[int, tuple[int, ...]]
    ) -> None:
        self._given = given
        self._shared: dict[int, tuple[int, ...]] = {}
        slots = len(rect) + 8 * given.plan.machines + 1024
        self._board = given.board(np.empty_like(given.table), slots)
        fill(self._board, rect, owner)
        for slot, machines in shared.items():
            self._assign(slot, machines)

    @classmethod
    def of_plan(cls, given: PlanningInput) -> Draft:
        """Start from the present plan."""
        slots = np.flatnonzero(given.owner == SHARED).tolist()
        shared = {slot: given.plan.partitions[slot].machines for slot in slots}
        return cls(given, given.rect, given.owner, shared)

    @classmethod
    def fresh(cls, given: PlanningInput) -> Draft:
        """Divide the whole grid again, one part per machine.

        Each part goes to the free machine that has most of its queries already.
        """
        plan = given.plan
        parts = np.empty((plan.machines, 5), np.int64)
        cost = given.cost.mean(axis=0, keepdims=True)
        parts = parts[: divide_evenly(cost, plan.machines, parts)]
        rect, counts = np.ascontiguousarray(parts[:, :4]), parts[:, 4].tolist()
        held = given.overlaps(rect)
        held = held[np.argsort(-given.queries(held), kind="stable")]
        owners: list[list[int]] = [[] for _ in counts]
        free = set(range(plan.machines))
        for part, old in held[:, 4:].tolist():
            for machine in plan.partitions[old].machines:
                if machine in free and len(owners[part]) < counts[part]:
                    owners[part].append(machine)
                    free.discard(machine)
        left = sorted(free)
        for machines, count in zip(owners, counts, strict=True):
            while len(machines) < count:
                machines.append(left.pop())
        owner = [machines[0] if len(machines) == 1 else SHARED for machines in owners]
        shared = {
            part: tuple(sorted(machines))
            for part, machines in enumerate(owners)
            if len(machines) > 1
        }
        return cls(given, rect, np.asarray(owner, np.int64), shared)

    @property
    def loads(self) -> Floats:
        """Machine, view: cost of its partitions."""
        return self._board.machine_load

    @property
    def count(self) -> int:
        """Number of partitions."""
        return int(np.count_nonzero(self._board.owner[: self._board.used[0]] != FREE))

    def copy(self) -> Draft:
        """Return an independent copy."""
        other = Draft.__new__(Draft)
        other._given = self._given
        other._shared = dict(self._shared)
        arrays = ("table", "rect", "owner", "slot_load", "machine_load", "used")
        copies = {name: getattr(self._board, name).copy() for name in arrays}
        other._board = self._board._replace(**copies)
        return other

    def settle_shares(self, share_at: float) -> None:
        """Share cells that cost more than ``share_at`` means; stop sharing cheaper ones."""
        board, loads = self._board, self.loads
        means = loads.mean(axis=0)
        for slot, machines in list(self._shared.items()):
            load = board.slot_load[slot]
            if self._divide_shared(slot, machines):
                continue
            if np.all(load < UNSHARE * share_at * means):
                machine = min(machines, key=lambda m: (float(loads[m, 0]), m))
                if np.all(loads[machine] + load * (1.0 - 1.0 / len(machines)) <= means):
                    self._release_shared(slot)
                    assign(board, slot, machine)
        hottest: dict[tuple[int, int], int] = {}
        for view, mean in enumerate(means.tolist()):
            # Their costs sum to at most the total; halving needs some extra rows.
            cells = np.empty((int(len(loads) / share_at) + 256, 4), np.int64)
            found = hot_cells(board.cost, view, share_at * mean, cells)
            for column, row in cells[:found, :2].tolist():
                hottest.setdefault((column, row), view)
        for (column, row), view in hottest.items():
            slot = int(board.table[row, column])
            if len(self._shared.get(slot, ())) >= np.max(board.slot_load[slot] / means) / share_at:
                continue
            slot, owners = self._cut_out(column, row)
            if slot >= 0:
                needed = int(np.ceil(np.max(board.slot_load[slot] / means) / share_at))
                share = board.slot_load[slot] / max(needed, len(owners))
                # An overloaded machine may leave; one cell has few queries to load.
                owners = [m for m in owners if np.all(loads[m] + share <= share_at * means)]
                owners += self._lowest(view, needed - len(owners), owners)
                self._assign(slot, owners)

    def share_excess(self, view: int, slack: float) -> None:
        """Let overloaded machines share their costliest cell with more machines.

        For cells that no machine has capacity for: if a machine has few cells, there is no other
        way to divide their cost.
        """
        board = self._board
        means = board.machine_load.mean(axis=0)
        limits = np.maximum(means * slack, board.machine_load.max(axis=0))
        limits[view] = means[view] * slack
        shares: dict[int, list[int]] = {}
        for slot, machines in self._shared.items():
            for machine in machines:
                shares.setdefault(machine, []).append(slot)
        slots, starts = self._by_owner()
        for giver in np.argsort(-board.machine_load[:, view], kind="stable").tolist():
            if board.machine_load[giver, view] <= limits[view]:
                return
            column, row = costliest_cell(board, view, slots[starts[giver] : starts[giver + 1]])
            cells = [board.rect[slot, :2].tolist() for slot in shares.get(giver, ())]
            if column >= 0:
                cells.append([column, row])
            for column, row in cells:
                over = float(board.machine_load[giver, view] - limits[view])
                if over > 0.0:
                    self._share_more(column, row, view, over, limits)

    def _share_more(self, column: int, row: int, view: int, over: float, limits: Floats) -> None:
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
            if np.all(board.machine_load[others] + load / number + board.overhead <= limits):
                owners += others
                break
        self._assign(slot, owners)

    def relieve(self, view: int, slack: float, *, regardless: bool = False) -> None:
        """Bring all machines of one view within ``slack`` of the mean.

        Other views do not become worse than they are, or than slack allows, unless
        ``regardless``.
        """
        board = self._board
        caps = np.maximum(board.machine_load.mean(axis=0) * slack, board.machine_load.max(axis=0))
        if regardless:
            caps[:] = np.inf
        lift = 0.0
        for _ in range(PASSES):
            loads = board.machine_load[:, view]
            # Every cut adds the overhead of a partition, so the mean grows.
            mean = float(loads.mean())
            order = np.argsort(loads, kind="stable")
            if loads[order[-1]] <= mean * slack:
                return
            level = mean * (1.0 + lift * (slack - 1.0))
            target = RepairTarget(view, level, mean * slack, caps, self._typical_queries())
            slots, starts = self._by_owner()
            edge = int(np.searchsorted(loads[order], level))
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
        caps = self._board.machine_load.mean(axis=0) * slack
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
        return max(float(count[0]) / len(self._board.machine_load), 1.0)

    def _assign(self, slot: int, machines: Sequence[int]) -> None:
        board = self._board
        if len(machines) == 1:
            assign(board, slot, machines[0])
            return
        board.owner[slot] = SHARED
        self._shared[slot] = tuple(machines)
        board.machine_load[list(machines)] += board.slot_load[slot] / len(machines) + board.overhead

    def _release_shared(self, slot: int) -> tuple[int, ...]:
        board = self._board
        machines = self._shared.pop(slot)
        board.machine_load[list(machines)] -= board.slot_load[slot] / len(machines) + board.overhead
        board.owner[slot] = FREE
        return machines

    def _divide_shared(self, slot: int, machines: tuple[int, ...]) -> bool:
        """Divide a shared partition among its owners, if lines divide it evenly.

        No owner has to load a query.
        """
        board = self._board
        pieces = np.empty((len(machines), 4), np.int64)
        area = read_area(board.rect, slot)
        divide(board, 0, area, np.ones(len(machines)), False, pieces)
        column0, row0, column1, row1 = pieces.T
        sums = board.cost[0]
        costs = (
            sums[row1, column1] - sums[row1, column0] - sums[row0, column1] + sums[row0, column0]
        )
        fair = costs.max() * len(machines) <= (1.0 + UNEVEN) * board.slot_load[slot, 0]
        if np.any(column0 == column1) or not fair:
            return False
        self._release_shared(slot)
        put(board, slot, read_area(pieces, 0))
        assign(board, slot, machines[0])
        for i in range(1, len(machines)):
            assign(board, add(board, read_area(pieces, i)), machines[i])
        return True

    def _by_owner(self) -> tuple[Ints, Ints]:
        """Return slots by owner, and the start of each machine's slots."""
        owner = self._board.owner[: self._board.used[0]]
        slots = np.argsort(owner, kind="stable")
        machines = np.arange(len(self._board.machine_load) + 1)
        return slots, np.searchsorted(owner[slots], machines)

    def _cut_out(self, column: int, row: int) -> tuple[int, list[int]]:
        """Give a cell its own slot without owners; return slot (-1 if full) and old owners."""
        board = self._board
        slot = int(board.table[row, column])
        if slot in self._shared:
            return slot, list(self._release_shared(slot))
        if board.used[0] + 4 > board.owner.size:
            return -1, []
        owner = int(board.owner[slot])
        return int(isolate(board, column, row)), [owner]

    def _lowest(self, view: int, count: int, besides: Sequence[int]) -> list[int]:
        """Return the machines of the lowest cost, excluding some."""
        if count <= 0:
            return []
        loads = self._board.machine_load[:, view]
        tried = min(count + len(besides), len(loads))
        lowest = np.argpartition(loads, tried - 1)[:tried]
        ranked = lowest[np.lexsort((lowest, loads[lowest]))].tolist()
        return [m for m in ranked if m not in besides][:count]
