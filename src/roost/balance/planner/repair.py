"""Compiled changes of a board: moving excess load, merging partitions, isolating single cells.

Machines above a limit shed load to machines below the mean, the highest first. Load that one
machine can receive moves as one piece: preferably by shifting a border between neighbours or as a
whole partition, because neither adds a partition. Other load is divided among several machines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from roost.balance.planner.board import (
    Area,
    Board,
    add,
    area_cost,
    area_queries,
    assign,
    divide,
    find_cut,
    halves,
    paint,
    put,
    read_area,
    release,
    write_area,
)
from roost.model.arrays import Floats, Ints

TRIES = 64
# Maximum number of other machines that a piece is offered to.
OFFERS = 256
# Shares of the mean: capacity that is ignored, and capacity that is used only if necessary.
SLIGHT = 0.01
SMALL = 0.1
# Scores of a single piece, in shares of the load to move: it suffices, it adds a partition, it has
# as many queries as a machine on average.
ENOUGH_BONUS = 0.3
CUT_PENALTY = 0.4
QUERY_PENALTY = 0.5
# Partitions with more cells are divided by lines instead.
LARGE_CELLS = 4096
# A receiver that ends above this share of the giver's load is no relief.
WORTHWHILE = 0.98


class RepairTarget(NamedTuple):
    """Goal of a repair in one view, and limits in the others."""

    focus: int
    """The view (numba reserves the name ``view``)."""
    mean: float
    """Machines shed load down to here, and receive load up to here."""
    limit: float
    """No machine should be above."""
    caps: Floats
    """View: limit of machines that receive load."""
    queries: float
    """Mean number of queries per machine."""


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def neighbour(board: Board, slot: int, vertical: bool, low: bool) -> int:
    """Return the slot with an entire side in common, or -1.

    The side is a vertical or horizontal line, at the ``low`` or the high end.
    """
    area = read_area(board.rect, slot)
    column, row = area[0], area[1]
    if vertical:
        column = area[0] - 1 if low else area[2]
    else:
        row = area[1] - 1 if low else area[3]
    rows, columns = board.table.shape
    if column < 0 or row < 0 or column >= columns or row >= rows:
        return -1
    beside = int(board.table[row, column])
    other = read_area(board.rect, beside)
    axis = 1 if vertical else 0
    same = other[axis] == area[axis] and other[axis + 2] == area[axis + 2]
    return beside if same else -1


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def has_capacity(board: Board, machine: int, area: Area, caps: Floats) -> bool:
    """Return whether a machine can receive a piece within the caps of all views."""
    for view in range(caps.size):
        cost = area_cost(board.cost, view, area)
        if board.machine_load[machine, view] + cost + board.overhead > caps[view]:
            return False
    return True


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def absorb(board: Board, slot: int, other: int) -> None:
    """Merge an adjacent slot into another, whose owner keeps both."""
    owner = release(board, slot)
    release(board, other)
    first, second = read_area(board.rect, slot), read_area(board.rect, other)
    paint(board, slot, second)
    column0, row0 = min(first[0], second[0]), min(first[1], second[1])
    column1, row1 = max(first[2], second[2]), max(first[3], second[3])
    put(board, slot, (column0, row0, column1, row1))
    assign(board, slot, owner)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def score_move(board: Board, target: RepairTarget, load: float, area: Area) -> float:
    """Return the score of moving a piece away from a machine with some load."""
    cost = area_cost(board.cost, target.focus, area)
    if cost <= 0.0:
        return -np.inf
    part = cost / (load - target.mean)
    queries = area_queries(board.corners, area)
    score = min(part, 1.0) - QUERY_PENALTY * queries / target.queries
    if cost >= load - target.limit:
        score += ENOUGH_BONUS
    # A piece that is too large only moves the overload.
    return score - max(part - 1.0, 0.0)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def shed_piece(board: Board, target: RepairTarget, giver: int, slots: Ints, lowest: int) -> bool:
    """Move one piece, a whole partition or a strip of one, to one machine."""
    load = board.machine_load[giver, target.focus]
    best_score = 0.0
    # Slot, line (-1: all of it), direction, side, and the slot that is widened (-1: a new one).
    best_slot, best_at, best_direction, best_side, best_beside = -1, -1, -1, -1, -1
    for slot in slots:
        if board.owner[slot] != giver:
            continue
        area = read_area(board.rect, slot)
        if has_capacity(board, lowest, area, target.caps):
            score = score_move(board, target, load, area)
            if score > best_score:
                best_score, best_slot, best_at = score, slot, -1
        for direction in range(2):
            vertical = direction == 0
            if area[direction + 2] - area[direction] < 2:
                continue
            for side in range(2):
                beside = neighbour(board, slot, vertical, side == 0)
                for shift in range(2):
                    machine = lowest
                    if shift == 1:
                        if beside < 0 or board.owner[beside] < 0:
                            continue
                        machine = board.owner[beside]
                    full = 2.0 * target.mean - board.machine_load[machine, target.focus]
                    want = min(load, full) - target.mean
                    if machine == giver or want <= SLIGHT * target.mean:
                        continue
                    line = want if side == 0 else board.slot_load[slot, target.focus] - want
                    at = find_cut(board.cost, target.focus, area, vertical, line)
                    piece = halves(area, vertical, at)[side]
                    if not has_capacity(board, machine, piece, target.caps):
                        continue
                    score = score_move(board, target, load, piece) - CUT_PENALTY * (1 - shift)
                    if score > best_score:
                        best_score, best_slot, best_at = score, slot, at
                        best_direction, best_side = direction, side
                        best_beside = beside if shift == 1 else -1
    if best_slot < 0:
        return False
    release(board, best_slot)
    if best_at < 0:
        assign(board, best_slot, lowest)
        return True
    sides = halves(read_area(board.rect, best_slot), best_direction == 0, best_at)
    put(board, best_slot, sides[1 - best_side])
    assign(board, best_slot, giver)
    part = add(board, sides[best_side])
    if best_beside < 0:
        assign(board, part, lowest)
    else:
        assign(board, part, board.owner[best_beside])
        absorb(board, best_beside, part)
    return True


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def costliest(board: Board, view: int, machine: int, slots: Ints) -> int:
    """Return the costliest slot of a machine that can be cut, or -1."""
    best = -1
    most = 0.0
    for slot in slots:
        column0, row0, column1, row1 = read_area(board.rect, slot)
        if board.owner[slot] != machine or (column1 - column0) * (row1 - row0) == 1:
            continue
        if board.slot_load[slot, view] > most:
            best = slot
            most = board.slot_load[slot, view]
    return best


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def shed_among(
    board: Board, target: RepairTarget, giver: int, slots: Ints, receivers: Ints
) -> bool:
    """Divide a machine's costliest partition among as many machines as its excess needs."""
    load = board.machine_load[giver, target.focus]
    source = costliest(board, target.focus, giver, slots)
    if source < 0:
        return False
    whole = board.slot_load[source, target.focus]
    need = min(load - target.mean, whole)
    keeps = need < WORTHWHILE * whole
    weights = np.empty(receivers.size + 1)
    chosen = np.empty(receivers.size + 1, np.int64)
    chosen[0] = giver
    count = 1 if keeps else 0
    given = 0.0
    for machine in receivers:
        room = target.mean - board.machine_load[machine, target.focus] - board.overhead
        if room <= SLIGHT * target.mean:
            continue
        if given >= need or (given >= load - target.limit and room < SMALL * target.mean):
            break
        weights[count] = min(room, need - given)
        given += weights[count]
        chosen[count] = machine
        count += 1
    if given <= 0.0 or board.used[0] + count > board.owner.size:
        return False
    if keeps:
        weights[0] = whole - given
    pieces = np.empty((count, 4), np.int64)
    area = read_area(board.rect, source)
    divide(board, target.focus, area, weights[:count], keeps, pieces)
    release(board, source)
    moved = False
    reuse = True
    for i in range(count):
        piece = read_area(pieces, i)
        if piece[0] == piece[2]:
            continue
        machine = chosen[i]
        if machine != giver and not has_capacity(board, machine, piece, target.caps):
            machine = giver
            for j in range(min(receivers.size, OFFERS)):
                if has_capacity(board, receivers[j], piece, target.caps):
                    machine = receivers[j]
                    break
        part = source
        if reuse:
            put(board, source, piece)
            paint(board, source, piece)
            reuse = False
        else:
            part = add(board, piece)
        assign(board, part, machine)
        moved |= machine != giver
    return moved


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def relieve(
    board: Board, target: RepairTarget, order: Ints, edge: int, slots: Ints, starts: Ints
) -> bool:
    """Shed load of every machine above the limit, the highest first; return whether any moved.

    ``order`` has the machines by load, those before ``edge`` are below the mean; ``slots`` has
    slots by owner, those of a machine from ``starts[machine]`` on.
    """
    lowest = 0
    moved = False
    for i in range(order.size - 1, -1, -1):
        giver = order[i]
        own = slots[starts[giver] : starts[giver + 1]]
        for _ in range(TRIES):
            load = board.machine_load[giver, target.focus]
            if load <= target.limit:
                break
            while lowest < edge:
                room = target.mean - board.machine_load[order[lowest], target.focus]
                if room - board.overhead > SLIGHT * target.mean:
                    break
                lowest += 1
            if lowest >= edge or board.used[0] + 2 > board.owner.size:
                return moved
            target.caps[target.focus] = max(target.limit, WORTHWHILE * load)
            # One piece for one machine if it has the capacity; else several; else the least bad.
            room = target.mean - board.machine_load[order[lowest], target.focus]
            one_suffices = room >= load - target.limit
            done = False
            for turn in range(2):
                if done:
                    break
                if one_suffices == (turn == 0):
                    done = shed_piece(board, target, giver, own, order[lowest])
                else:
                    done = shed_among(board, target, giver, own, order[lowest:edge])
            if not done:
                break
            moved = True
    return moved


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def merge_own(board: Board) -> None:
    """Merge neighbours of one machine until no two of them form a rectangle."""
    again = True
    while again:
        again = False
        for slot in range(board.used[0]):
            for side in range(4):
                while board.owner[slot] >= 0:
                    other = neighbour(board, slot, side < 2, side % 2 == 0)
                    if other < 0 or board.owner[other] != board.owner[slot]:
                        break
                    absorb(board, slot, other)
                    again = True


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def mergeable(board: Board, caps: Floats, most: float, pairs: Ints) -> int:
    """List slots that a neighbour's owner could absorb, as ``into, slot, queries``.

    Slots with more than ``most`` queries are omitted. Returns the number of entries.
    """
    count = 0
    for slot in range(board.used[0]):
        if board.owner[slot] < 0:
            continue
        area = read_area(board.rect, slot)
        queries = area_queries(board.corners, area)
        if queries > most:
            continue
        for side in range(4):
            into = neighbour(board, slot, side < 2, side % 2 == 0)
            if into < 0 or board.owner[into] < 0:
                continue
            if has_capacity(board, board.owner[into], area, caps):
                pairs[count, 0], pairs[count, 1], pairs[count, 2] = into, slot, queries
                count += 1
    return count


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def merge_pairs(board: Board, caps: Floats, pairs: Ints, most: int) -> int:
    """Merge at most ``most`` pairs in order, each slot once; return the number of merges."""
    touched = np.zeros(board.used[0], np.bool_)
    merged = 0
    for i in range(pairs.shape[0]):
        into, slot = pairs[i, 0], pairs[i, 1]
        if merged >= most or touched[into] or touched[slot]:
            continue
        if has_capacity(board, board.owner[into], read_area(board.rect, slot), caps):
            touched[into], touched[slot] = True, True
            absorb(board, into, slot)
            merged += 1
    return merged


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def hot_cells(cost: Floats, view: int, above: float, out: Ints) -> int:
    """Find cells that cost more than a limit, by recursive halving; return their number.

    ``out`` must hold as many cells as the limit makes possible, and some rows more.
    """
    # Found cells are at the front, the stack of rectangles to halve follows them.
    write_area(out, 0, (0, 0, cost.shape[2] - 1, cost.shape[1] - 1))
    found, top = 0, 1
    while top > found:
        top -= 1
        area = read_area(out, top)
        if area_cost(cost, view, area) <= above:
            continue
        wide, tall = area[2] - area[0], area[3] - area[1]
        if wide == 1 and tall == 1:
            write_area(out, top, read_area(out, found))
            write_area(out, found, area)
            found += 1
            top += 1
        else:
            vertical = wide >= tall
            at = (area[0] + area[2]) >> 1 if vertical else (area[1] + area[3]) >> 1
            first, second = halves(area, vertical, at)
            write_area(out, top, first)
            write_area(out, top + 1, second)
            top += 2
    return found


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def costliest_cell(board: Board, view: int, slots: Ints) -> tuple[int, int]:
    """Return column and row of the costliest cell of some slots, except large ones; or -1."""
    most = 0.0
    best_column, best_row = -1, -1
    for slot in slots:
        column0, row0, column1, row1 = read_area(board.rect, slot)
        if (column1 - column0) * (row1 - row0) > LARGE_CELLS:
            continue
        for row in range(row0, row1):
            for column in range(column0, column1):
                cost = area_cost(board.cost, view, (column, row, column + 1, row + 1))
                if cost > most:
                    most = cost
                    best_column, best_row = column, row
    return best_column, best_row


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def isolate(board: Board, column: int, row: int) -> int:
    """Cut a cell out of a partition with one owner, which keeps the rest.

    Returns the slot of the cell, which then has no owner.
    """
    slot = int(board.table[row, column])
    column0, row0, column1, row1 = read_area(board.rect, slot)
    owner = release(board, slot)
    if column1 - column0 >= row1 - row0:
        rests = (
            (column0, row0, column, row1),
            (column + 1, row0, column1, row1),
            (column, row0, column + 1, row),
            (column, row + 1, column + 1, row1),
        )
    else:
        rests = (
            (column0, row0, column1, row),
            (column0, row + 1, column1, row1),
            (column0, row, column, row + 1),
            (column + 1, row, column1, row + 1),
        )
    put(board, slot, (column, row, column + 1, row + 1))
    for rest in rests:
        if rest[0] < rest[2] and rest[1] < rest[3]:
            assign(board, add(board, rest), owner)
    return slot
