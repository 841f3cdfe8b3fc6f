"""Compiled repair of a board: moves excess load.

Machines above a limit shed load to machines below the mean, the highest first. Load that one
machine can receive moves as one piece: preferably by shifting a border between neighbours or as a
whole partition, because neither adds a partition. Other load is divided among several machines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.balance.planner.board import (
    Board,
    add,
    area_cost,
    area_queries,
    divide,
    find_cut,
    give,
    halves,
    paint,
    put,
    take,
)

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
    caps: NDArray[np.float64]
    """View: limit of machines that receive load."""
    queries: float
    """Mean number of queries per machine."""


@njit(cache=True, nogil=True)
def neighbour(
    board: Board, slot: int, vertical: bool, low: bool
) -> int:  # pragma: no cover - compiled
    """Return the slot with an entire side in common, or -1.

    The side is a vertical or horizontal line, at the ``low`` or the high end.
    """
    rect = board.rect[slot]
    column, row = rect[0], rect[1]
    if vertical:
        column = rect[0] - 1 if low else rect[2]
    else:
        row = rect[1] - 1 if low else rect[3]
    rows, columns = board.table.shape
    if column < 0 or row < 0 or column >= columns or row >= rows:
        return -1
    slot = board.table[row, column]
    other = board.rect[slot]
    axis = 1 if vertical else 0
    same = other[axis] == rect[axis] and other[axis + 2] == rect[axis + 2]
    return slot if same else -1


@njit(cache=True, nogil=True)
def bears(
    board: Board, machine: int, piece: NDArray[np.int64], caps: NDArray[np.float64]
) -> bool:  # pragma: no cover - compiled
    """Return whether a machine can receive a piece within the caps of all views."""
    for view in range(caps.size):
        cost = area_cost(board.cost, view, piece[0], piece[1], piece[2], piece[3])
        if board.height[machine, view] + cost + board.overhead > caps[view]:
            return False
    return True


@njit(cache=True, nogil=True)
def absorb(board: Board, slot: int, other: int) -> None:  # pragma: no cover - compiled
    """Merge an adjacent slot into another, whose owner keeps both."""
    owner = take(board, slot)
    take(board, other)
    first, second = board.rect[slot], board.rect[other]
    for row in range(second[1], second[3]):
        for column in range(second[0], second[2]):
            board.table[row, column] = slot
    column0, row0 = min(first[0], second[0]), min(first[1], second[1])
    column1, row1 = max(first[2], second[2]), max(first[3], second[3])
    put(board, slot, column0, row0, column1, row1)
    give(board, slot, owner)


@njit(cache=True, nogil=True)
def worth(
    board: Board, target: RepairTarget, height: float, piece: NDArray[np.int64]
) -> float:  # pragma: no cover - compiled
    """Return the score of moving a piece away from a machine."""
    cost = area_cost(board.cost, target.focus, piece[0], piece[1], piece[2], piece[3])
    if cost <= 0.0:
        return -np.inf
    queries = area_queries(board.corners, piece[0], piece[1], piece[2], piece[3])
    part = cost / (height - target.mean)
    score = min(part, 1.0) - QUERY_PENALTY * queries / target.queries
    if cost >= height - target.limit:
        score += ENOUGH_BONUS
    # A piece that is too large only moves the overload.
    return score - max(part - 1.0, 0.0)


@njit(cache=True, nogil=True)
def shed_piece(
    board: Board, target: RepairTarget, giver: int, slots: NDArray[np.int64], lowest: int
) -> bool:  # pragma: no cover - compiled
    """Move one piece, a whole partition or a strip of one, to one machine."""
    height = board.height[giver, target.focus]
    sides = np.empty((2, 4), np.int64)
    best_score = 0.0
    # Slot, line (-1: all of it), direction, side, and the slot that is widened (-1: a new one).
    best = np.full(5, -1)
    for slot in slots:
        if board.owner[slot] != giver:
            continue
        rect = board.rect[slot]
        whole = board.load[slot, target.focus]
        if bears(board, lowest, rect, target.caps):
            score = worth(board, target, height, rect)
            if score > best_score:
                best_score = score
                best[0], best[1] = slot, -1
        for direction in range(2):
            vertical = direction == 0
            if rect[direction + 2] - rect[direction] < 2:
                continue
            for side in range(2):
                beside = neighbour(board, slot, vertical, side == 0)
                for shift in range(2):
                    machine = lowest
                    if shift == 1:
                        if beside < 0 or board.owner[beside] < 0:
                            continue
                        machine = board.owner[beside]
                    want = (
                        min(height, 2.0 * target.mean - board.height[machine, target.focus])
                        - target.mean
                    )
                    if machine == giver or want <= SLIGHT * target.mean:
                        continue
                    line = want if side == 0 else whole - want
                    at = find_cut(board.cost, target.focus, rect, vertical, line)
                    halves(rect, vertical, at, sides)
                    if not bears(board, machine, sides[side], target.caps):
                        continue
                    score = worth(board, target, height, sides[side]) - CUT_PENALTY * (1 - shift)
                    if score > best_score:
                        best_score = score
                        best[0], best[1], best[2], best[3] = slot, at, direction, side
                        best[4] = beside if shift == 1 else -1
    if best[0] < 0:
        return False
    slot = best[0]
    take(board, slot)
    if best[1] < 0:
        give(board, slot, lowest)
        return True
    halves(board.rect[slot], best[2] == 0, best[1], sides)
    piece, rest = sides[best[3]], sides[1 - best[3]]
    put(board, slot, rest[0], rest[1], rest[2], rest[3])
    give(board, slot, giver)
    part = add(board, piece[0], piece[1], piece[2], piece[3])
    if best[4] < 0:
        give(board, part, lowest)
    else:
        give(board, part, board.owner[best[4]])
        absorb(board, best[4], part)
    return True


@njit(cache=True, nogil=True)
def costliest(
    board: Board, view: int, machine: int, slots: NDArray[np.int64]
) -> int:  # pragma: no cover - compiled
    """Return the costliest slot of a machine that can be cut, or -1."""
    best = -1
    most = 0.0
    for slot in slots:
        rect = board.rect[slot]
        if board.owner[slot] != machine or (rect[2] - rect[0]) * (rect[3] - rect[1]) == 1:
            continue
        if board.load[slot, view] > most:
            best = slot
            most = board.load[slot, view]
    return best


@njit(cache=True, nogil=True)
def shed_among(
    board: Board,
    target: RepairTarget,
    giver: int,
    slots: NDArray[np.int64],
    receivers: NDArray[np.int64],
) -> bool:  # pragma: no cover - compiled
    """Divide a machine's costliest partition among as many machines as its excess needs."""
    height = board.height[giver, target.focus]
    source = costliest(board, target.focus, giver, slots)
    if source < 0:
        return False
    whole = board.load[source, target.focus]
    need = min(height - target.mean, whole)
    keeps = need < WORTHWHILE * whole
    weights = np.empty(receivers.size + 1)
    takers = np.empty(receivers.size + 1, np.int64)
    takers[0] = giver
    count = 1 if keeps else 0
    given = 0.0
    for machine in receivers:
        room = target.mean - board.height[machine, target.focus] - board.overhead
        if room <= SLIGHT * target.mean:
            continue
        if given >= need or (given >= height - target.limit and room < SMALL * target.mean):
            break
        weights[count] = min(room, need - given)
        given += weights[count]
        takers[count] = machine
        count += 1
    if given <= 0.0 or board.used[0] + count > board.owner.size:
        return False
    if keeps:
        weights[0] = whole - given
    pieces = np.empty((count, 4), np.int64)
    divide(board, target.focus, board.rect[source], weights[:count], keeps, pieces)
    take(board, source)
    moved = False
    reuse = True
    for i in range(count):
        piece = pieces[i]
        if piece[0] == piece[2]:
            continue
        machine = takers[i]
        if machine != giver and not bears(board, machine, piece, target.caps):
            machine = giver
            for j in range(min(receivers.size, OFFERS)):
                if bears(board, receivers[j], piece, target.caps):
                    machine = receivers[j]
                    break
        part = source
        if reuse:
            put(board, source, piece[0], piece[1], piece[2], piece[3])
            paint(board, source)
            reuse = False
        else:
            part = add(board, piece[0], piece[1], piece[2], piece[3])
        give(board, part, machine)
        moved |= machine != giver
    return moved


@njit(cache=True, nogil=True)
def relieve(
    board: Board,
    target: RepairTarget,
    order: NDArray[np.int64],
    edge: int,
    slots: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> bool:  # pragma: no cover - compiled
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
            height = board.height[giver, target.focus]
            if height <= target.limit:
                break
            while lowest < edge:
                room = target.mean - board.height[order[lowest], target.focus] - board.overhead
                if room > SLIGHT * target.mean:
                    break
                lowest += 1
            if lowest >= edge or board.used[0] + 2 > board.owner.size:
                return moved
            target.caps[target.focus] = max(target.limit, WORTHWHILE * height)
            # One piece for one machine if it has the capacity; else several; else the least bad.
            room = target.mean - board.height[order[lowest], target.focus]
            one_will_do = room >= height - target.limit
            done = False
            for turn in range(2):
                if done:
                    break
                if one_will_do == (turn == 0):
                    done = shed_piece(board, target, giver, own, order[lowest])
                else:
                    done = shed_among(board, target, giver, own, order[lowest:edge])
            if not done:
                break
            moved = True
    return moved
