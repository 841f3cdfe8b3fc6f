"""Compiled changes of the shape of a board: merging partitions, and isolating single cells."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.balance.planner.board import (
    Board,
    add,
    area_cost,
    area_queries,
    fill_row,
    give,
    put,
    take,
)
from roost.balance.planner.repair import absorb, bears, neighbour

# Partitions with more cells are divided by lines instead.
LARGE_CELLS = 4096


@njit(cache=True, nogil=True)
def merge_own(board: Board) -> None:  # pragma: no cover - compiled
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


@njit(cache=True, nogil=True)
def mergeable(
    board: Board, caps: NDArray[np.float64], most: float, pairs: NDArray[np.int64]
) -> int:  # pragma: no cover - compiled
    """List slots that a neighbour's owner could absorb, as ``keeper, slot, queries``.

    Slots with more than ``most`` queries are omitted. Returns the number of entries.
    """
    count = 0
    for slot in range(board.used[0]):
        if board.owner[slot] < 0:
            continue
        rect = board.rect[slot]
        queries = area_queries(board.corners, rect[0], rect[1], rect[2], rect[3])
        if queries > most:
            continue
        for side in range(4):
            keeper = neighbour(board, slot, side < 2, side % 2 == 0)
            if keeper < 0 or board.owner[keeper] < 0:
                continue
            if bears(board, board.owner[keeper], rect, caps):
                pairs[count, 0] = keeper
                pairs[count, 1] = slot
                pairs[count, 2] = queries
                count += 1
    return count


@njit(cache=True, nogil=True)
def merge_pairs(
    board: Board, caps: NDArray[np.float64], pairs: NDArray[np.int64], most: int
) -> int:  # pragma: no cover - compiled
    """Merge at most ``most`` pairs in order, each slot once; return the number of merges."""
    touched = np.zeros(board.used[0], np.bool_)
    merged = 0
    for i in range(pairs.shape[0]):
        keeper, slot = pairs[i, 0], pairs[i, 1]
        if merged >= most or touched[keeper] or touched[slot]:
            continue
        if bears(board, board.owner[keeper], board.rect[slot], caps):
            touched[keeper], touched[slot] = True, True
            absorb(board, keeper, slot)
            merged += 1
    return merged


@njit(cache=True, nogil=True)
def hot_cells(
    cost: NDArray[np.float64], view: int, above: float, out: NDArray[np.int64]
) -> int:  # pragma: no cover - compiled
    """Find cells that cost more than a limit, by recursive halving; return their number.

    ``out`` must hold as many cells as the limit makes possible, and some rows more.
    """
    # Found cells are at the front, the stack of rectangles to halve follows them.
    fill_row(out, 0, 0, 0, cost.shape[2] - 1, cost.shape[1] - 1)
    found, top = 0, 1
    while top > found:
        top -= 1
        column0, row0, column1, row1 = out[top, 0], out[top, 1], out[top, 2], out[top, 3]
        if area_cost(cost, view, column0, row0, column1, row1) <= above:
            continue
        wide, tall = column1 - column0, row1 - row0
        if wide == 1 and tall == 1:
            for i in range(4):
                out[top, i] = out[found, i]
            fill_row(out, found, column0, row0, column1, row1)
            found += 1
            top += 1
        elif wide >= tall:
            at = (column0 + column1) >> 1
            fill_row(out, top, column0, row0, at, row1)
            fill_row(out, top + 1, at, row0, column1, row1)
            top += 2
        else:
            at = (row0 + row1) >> 1
            fill_row(out, top, column0, row0, column1, at)
            fill_row(out, top + 1, column0, at, column1, row1)
            top += 2
    return found


@njit(cache=True, nogil=True)
def costliest_cell(
    board: Board, view: int, slots: NDArray[np.int64]
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Return column and row of the costliest cell of some slots, except large ones; or -1."""
    most = 0.0
    best_column, best_row = -1, -1
    for slot in slots:
        rect = board.rect[slot]
        if (rect[2] - rect[0]) * (rect[3] - rect[1]) > LARGE_CELLS:
            continue
        for row in range(rect[1], rect[3]):
            for column in range(rect[0], rect[2]):
                cost = area_cost(board.cost, view, column, row, column + 1, row + 1)
                if cost > most:
                    most = cost
                    best_column, best_row = column, row
    return best_column, best_row


@njit(cache=True, nogil=True)
def isolate(board: Board, column: int, row: int) -> int:  # pragma: no cover - compiled
    """Cut a cell out of a partition with one owner, which keeps the rest.

    Returns the slot of the cell, which then has no owner.
    """
    slot: int = board.table[row, column]
    rect = board.rect[slot]
    column0, row0, column1, row1 = rect[0], rect[1], rect[2], rect[3]
    owner = take(board, slot)
    rests = np.empty((4, 4), np.int64)
    if column1 - column0 >= row1 - row0:
        fill_row(rests, 0, column0, row0, column, row1)
        fill_row(rests, 1, column + 1, row0, column1, row1)
        fill_row(rests, 2, column, row0, column + 1, row)
        fill_row(rests, 3, column, row + 1, column + 1, row1)
    else:
        fill_row(rests, 0, column0, row0, column1, row)
        fill_row(rests, 1, column0, row + 1, column1, row1)
        fill_row(rests, 2, column0, row, column, row + 1)
        fill_row(rests, 3, column + 1, row, column1, row + 1)
    put(board, slot, column, row, column + 1, row + 1)
    for i in range(4):
        if rests[i, 0] < rests[i, 2] and rests[i, 1] < rests[i, 3]:
            part = add(board, rests[i, 0], rests[i, 1], rests[i, 2], rests[i, 3])
            give(board, part, owner)
    return slot
