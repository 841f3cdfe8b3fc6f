"""Compiled parts of the planner: moving what is too much.

Machines above a limit give to machines below the mean, the highest first. What one machine can
take is moved as one piece: best a border that shifts between neighbours or a whole partition, for
neither adds a partition. What needs several machines is divided among them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.balance.planner_loops import (
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
# A piece that its machine cannot take is offered to so many others.
OFFERS = 256
# Shares of the mean: room not worth a piece of its own, and room that is used only if it must be.
SLIGHT = 0.01
SMALL = 0.1
# What counts for and against a single piece, in shares of what should move: that it is enough,
# that it adds a partition, and that it carries as many queries as a machine has on average.
ENOUGH_BONUS = 0.3
CUT_PENALTY = 0.4
QUERY_PENALTY = 0.5
# A receiver that ends this close to where the giver was is no relief.
WORTHWHILE = 0.98


class Aim(NamedTuple):
    """What a repair wants to reach in one view, and what it must not spoil in the others."""

    focus: int
    """The view; the obvious name is one that numba keeps for itself."""
    mean: float
    """Machines give down to here, and receive up to here."""
    limit: float
    """No machine should be above."""
    caps: NDArray[np.float64]
    """View: what a machine that receives something must stay below."""
    queries: float
    """Queries that a machine has on average."""


@njit(cache=True, nogil=True)
def neighbour(
    board: Board, slot: int, vertical: bool, low: bool
) -> int:  # pragma: no cover - compiled
    """Slot that has the whole of one side in common, or -1.

    ``vertical`` names the cuts that run along that side.
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
    """Whether a machine can take a piece and stay below the caps in all views."""
    for view in range(caps.size):
        cost = area_cost(board.cost, view, piece[0], piece[1], piece[2], piece[3])
        if board.height[machine, view] + cost + board.overhead > caps[view]:
            return False
    return True


@njit(cache=True, nogil=True)
def absorb(board: Board, slot: int, other: int) -> None:  # pragma: no cover - compiled
    """Let a slot swallow one beside it; the owner of the first keeps both."""
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
    board: Board, aim: Aim, height: float, piece: NDArray[np.int64]
) -> float:  # pragma: no cover - compiled
    """How good it is to take a piece from a machine of some height."""
    cost = area_cost(board.cost, aim.focus, piece[0], piece[1], piece[2], piece[3])
    if cost <= 0.0:
        return -np.inf
    queries = area_queries(board.corners, piece[0], piece[1], piece[2], piece[3])
    part = cost / (height - aim.mean)
    score = min(part, 1.0) - QUERY_PENALTY * queries / aim.queries
    if cost >= height - aim.limit:
        score += ENOUGH_BONUS
    # A piece that is too large only changes places with what it relieves.
    return score - max(part - 1.0, 0.0)


@njit(cache=True, nogil=True)
def shed_piece(
    board: Board, aim: Aim, giver: int, slots: NDArray[np.int64], lowest: int
) -> bool:  # pragma: no cover - compiled
    """Move one piece, a whole partition or a strip of one, to one machine."""
    height = board.height[giver, aim.focus]
    sides = np.empty((2, 4), np.int64)
    best_score = 0.0
    # Slot, line (-1: all of it), direction, side, and the slot that is widened (-1: a new one).
    best = np.full(5, -1)
    for slot in slots:
        if board.owner[slot] != giver:
            continue
        rect = board.rect[slot]
        whole = board.load[slot, aim.focus]
        if bears(board, lowest, rect, aim.caps):
            score = worth(board, aim, height, rect)
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
                    want = min(height, 2.0 * aim.mean - board.height[machine, aim.focus]) - aim.mean
                    if machine == giver or want <= SLIGHT * aim.mean:
                        continue
                    line = want if side == 0 else whole - want
                    at = find_cut(board.cost, aim.focus, rect, vertical, line)
                    halves(rect, vertical, at, sides)
                    if not bears(board, machine, sides[side], aim.caps):
                        continue
                    score = worth(board, aim, height, sides[side]) - CUT_PENALTY * (1 - shift)
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
    """Slot of a machine that costs most and can be cut, or -1."""
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
    board: Board, aim: Aim, giver: int, slots: NDArray[np.int64], receivers: NDArray[np.int64]
) -> bool:  # pragma: no cover - compiled
    """Divide a machine's costliest partition among as many as are needed to take the excess."""
    height = board.height[giver, aim.focus]
    source = costliest(board, aim.focus, giver, slots)
    if source < 0:
        return False
    whole = board.load[source, aim.focus]
    need = min(height - aim.mean, whole)
    keeps = need < WORTHWHILE * whole
    weights = np.empty(receivers.size + 1)
    takers = np.empty(receivers.size + 1, np.int64)
    takers[0] = giver
    count = 1 if keeps else 0
    given = 0.0
    for machine in receivers:
        room = aim.mean - board.height[machine, aim.focus] - board.overhead
        if room <= SLIGHT * aim.mean:
            continue
        if given >= need or (given >= height - aim.limit and room < SMALL * aim.mean):
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
    divide(board, aim.focus, board.rect[source], weights[:count], keeps, pieces)
    take(board, source)
    moved = False
    reuse = True
    for i in range(count):
        piece = pieces[i]
        if piece[0] == piece[2]:
            continue
        machine = takers[i]
        if machine != giver and not bears(board, machine, piece, aim.caps):
            machine = giver
            for j in range(min(receivers.size, OFFERS)):
                if bears(board, receivers[j], piece, aim.caps):
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
    aim: Aim,
    order: NDArray[np.int64],
    edge: int,
    slots: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> bool:  # pragma: no cover - compiled
    """Let every machine above the limit give, the highest first; whether anything moved.

    ``order`` has the machines by height, those before ``edge`` are below the mean; ``slots`` has
    slots by owner, those of a machine from ``starts[machine]`` on.
    """
    lowest = 0
    moved = False
    for i in range(order.size - 1, -1, -1):
        giver = order[i]
        own = slots[starts[giver] : starts[giver + 1]]
        for _ in range(TRIES):
            height = board.height[giver, aim.focus]
            if height <= aim.limit:
                break
            while lowest < edge:
                room = aim.mean - board.height[order[lowest], aim.focus] - board.overhead
                if room > SLIGHT * aim.mean:
                    break
                lowest += 1
            if lowest >= edge or board.used[0] + 2 > board.owner.size:
                return moved
            aim.caps[aim.focus] = max(aim.limit, WORTHWHILE * height)
            # One piece for one machine, if it has the room; else several; else what is least bad.
            room = aim.mean - board.height[order[lowest], aim.focus]
            one_will_do = room >= height - aim.limit
            done = False
            for turn in range(2):
                if done:
                    break
                if one_will_do == (turn == 0):
                    done = shed_piece(board, aim, giver, own, order[lowest])
                else:
                    done = shed_among(board, aim, giver, own, order[lowest:edge])
            if not done:
                break
            moved = True
    return moved
