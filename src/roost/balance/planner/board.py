"""Board of the planner: rectangles with their costs, and compiled loops that divide them.

A board is a mutable plan. Every partition has a slot; a table maps cells to slots. Costs are prefix
sums, one table per *view* (a round of points), so the cost of a rectangle takes four look-ups. The
views are considered together: a machine receives a piece only if it has capacity in all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

FREE = -1
SHARED = -2

# Penalties of a cut, in shares of the divided cost: for a longer border, for a smaller rest of the
# machine that sheds load, and for a cut away from the middle.
LENGTH_WEIGHT = 0.02
KEEP_WEIGHT = 0.02
OFF_CENTRE_WEIGHT = 0.1
# Up to this many machines a fresh plan tries every line; above, it cuts in the middle.
SCAN_MACHINES = 16
# By how much the worse side of a cut may exceed its share before machines share the part instead,
# if there are at most SHARED_CELLS cells per machine, which then have similar queries anyway.
UNEVEN = 0.06
SHARED_CELLS = 4


class Board(NamedTuple):
    """A mutable plan; all arrays are changed in place."""

    cost: NDArray[np.float64]
    """View, row, column: prefix sums of cost."""
    corners: NDArray[np.int32]
    """The Euler histogram's four tables of prefix sums."""
    table: NDArray[np.int32]
    """Row, column: slot of the cell."""
    rect: NDArray[np.int64]
    """Slot: ``column0, row0, column1, row1``."""
    owner: NDArray[np.int64]
    """Slot: machine, ``FREE`` or ``SHARED``."""
    load: NDArray[np.float64]
    """Slot, view: cost."""
    height: NDArray[np.float64]
    """Machine, view: cost of its partitions, including their overhead."""
    used: NDArray[np.int64]
    """One number: slots in use, including free ones between them."""
    overhead: float
    """Fixed cost of a partition."""


@njit(cache=True, nogil=True)
def sum_costs(
    points: NDArray[np.float64],
    unit: NDArray[np.float64],
    scale: float,
    sums: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Compute prefix sums of the cost of each cell."""
    columns = sums.shape[1] - 1
    for row in range(sums.shape[0] - 1):
        line = 0.0
        first = row * columns
        for column in range(columns):
            line += points[first + column] * unit[first + column] * scale
            sums[row + 1, column + 1] = sums[row, column + 1] + line


@njit(cache=True, nogil=True)
def sum_rects(
    rect: NDArray[np.int64],
    points: NDArray[np.float64],
    unit: NDArray[np.float64],
    columns: int,
    out: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Compute the cost of each rectangle, cell by cell."""
    for i in range(rect.shape[0]):
        total = 0.0
        for row in range(rect[i, 1], rect[i, 3]):
            for cell in range(row * columns + rect[i, 0], row * columns + rect[i, 2]):
                total += points[cell] * unit[cell]
        out[i] = total


@njit(cache=True, nogil=True)
def area_cost(
    cost: NDArray[np.float64], view: int, column0: int, row0: int, column1: int, row1: int
) -> float:  # pragma: no cover - compiled
    """Return the cost of a rectangle, which rounding never makes negative."""
    high = cost[view, row1, column1] - cost[view, row1, column0]
    area: float = high - cost[view, row0, column1] + cost[view, row0, column0]
    return max(area, 0.0)


@njit(cache=True, nogil=True)
def area_queries(
    corners: NDArray[np.int32], column0: int, row0: int, column1: int, row1: int
) -> int:  # pragma: no cover - compiled
    """Count the queries over a rectangle."""
    ends = np.int64(corners[0, row1, column1]) - corners[1, row1, column0]
    count: int = ends - corners[2, row0, column1] + corners[3, row0, column0]
    return count


@njit(cache=True, nogil=True)
def fill_row(
    out: NDArray[np.int64], row: int, column0: int, row0: int, column1: int, row1: int
) -> None:  # pragma: no cover - compiled
    """Write a rectangle; element by element, which compiles much faster than a slice."""
    out[row, 0] = column0
    out[row, 1] = row0
    out[row, 2] = column1
    out[row, 3] = row1


@njit(cache=True, nogil=True)
def put(
    board: Board, slot: int, column0: int, row0: int, column1: int, row1: int
) -> None:  # pragma: no cover - compiled
    """Set the rectangle and cost of a slot; does not update the table."""
    fill_row(board.rect, slot, column0, row0, column1, row1)
    for view in range(board.load.shape[1]):
        board.load[slot, view] = area_cost(board.cost, view, column0, row0, column1, row1)


@njit(cache=True, nogil=True)
def paint(board: Board, slot: int) -> None:  # pragma: no cover - compiled
    """Write a slot's rectangle to the table."""
    rect = board.rect[slot]
    for row in range(rect[1], rect[3]):
        for column in range(rect[0], rect[2]):
            board.table[row, column] = slot


@njit(cache=True, nogil=True)
def give(board: Board, slot: int, machine: int) -> None:  # pragma: no cover - compiled
    """Assign a free slot to a machine."""
    board.owner[slot] = machine
    for view in range(board.load.shape[1]):
        board.height[machine, view] += board.load[slot, view] + board.overhead


@njit(cache=True, nogil=True)
def give_all(board: Board, owner: NDArray[np.int64]) -> None:  # pragma: no cover - compiled
    """Assign the first slots to their single owners; shared slots are skipped."""
    for slot in range(owner.size):
        if owner[slot] >= 0:
            give(board, slot, owner[slot])


@njit(cache=True, nogil=True)
def take(board: Board, slot: int) -> int:  # pragma: no cover - compiled
    """Free a slot and return its single owner."""
    machine: int = board.owner[slot]
    board.owner[slot] = FREE
    for view in range(board.load.shape[1]):
        board.height[machine, view] -= board.load[slot, view] + board.overhead
    return machine


@njit(cache=True, nogil=True)
def add(
    board: Board, column0: int, row0: int, column1: int, row1: int
) -> int:  # pragma: no cover - compiled
    """Allocate a slot for a rectangle and paint it."""
    slot: int = board.used[0]
    board.used[0] += 1
    put(board, slot, column0, row0, column1, row1)
    paint(board, slot)
    return slot


@njit(cache=True, nogil=True)
def fill(board: Board, rect: NDArray[np.int64]) -> None:  # pragma: no cover - compiled
    """Add rectangles to an empty board, in order of slots."""
    for i in range(rect.shape[0]):
        add(board, rect[i, 0], rect[i, 1], rect[i, 2], rect[i, 3])


@njit(cache=True, nogil=True)
def side_cost(
    cost: NDArray[np.float64], view: int, rect: NDArray[np.int64], vertical: bool, at: int
) -> float:  # pragma: no cover - compiled
    """Return the cost of the low side of a cut."""
    if vertical:
        return area_cost(cost, view, rect[0], rect[1], at, rect[3])
    return area_cost(cost, view, rect[0], rect[1], rect[2], at)


@njit(cache=True, nogil=True)
def find_cut(
    cost: NDArray[np.float64], view: int, rect: NDArray[np.int64], vertical: bool, want: float
) -> int:  # pragma: no cover - compiled
    """Return the line whose low side costs nearest to ``want``; no side is empty."""
    low: int = (rect[0] if vertical else rect[1]) + 1
    high = (rect[2] if vertical else rect[3]) - 1
    first = low
    while low < high:
        middle = (low + high) >> 1
        if side_cost(cost, view, rect, vertical, middle) < want:
            low = middle + 1
        else:
            high = middle
    if low > first:
        below = want - side_cost(cost, view, rect, vertical, low - 1)
        if below < abs(side_cost(cost, view, rect, vertical, low) - want):
            low -= 1
    return low


@njit(cache=True, nogil=True)
def halves(
    rect: NDArray[np.int64], vertical: bool, at: int, out: NDArray[np.int64]
) -> None:  # pragma: no cover - compiled
    """Write both sides of a cut, the low one first."""
    fill_row(out, 0, rect[0], rect[1], rect[2], rect[3])
    fill_row(out, 1, rect[0], rect[1], rect[2], rect[3])
    if vertical:
        out[0, 2] = at
        out[1, 0] = at
    else:
        out[0, 3] = at
        out[1, 1] = at


@njit(cache=True, nogil=True)
def divide(
    board: Board,
    view: int,
    rect: NDArray[np.int64],
    weights: NDArray[np.float64],
    keeps: bool,
    out: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled
    """Cut a rectangle into pieces that cost in proportion to weights, by recursive halving.

    Halving keeps pieces compact, so that few queries span several of them. If ``keeps``, the first
    weight belongs to the present owner, which keeps the side with more queries. A single cell
    cannot be cut: the heaviest of its weights receives it, the others an empty rectangle.
    """
    count = weights.size
    below = np.zeros(count + 1)
    for i in range(count):
        below[i + 1] = below[i] + weights[i]
        fill_row(out, i, 0, 0, 0, 0)
    stack = np.empty((count + 1, 6), np.int64)
    fill_row(stack, 0, rect[0], rect[1], rect[2], rect[3])
    stack[0, 4], stack[0, 5] = 0, count
    depth = 1
    sides = np.empty((2, 4), np.int64)
    place = np.empty((1, 4), np.int64)
    here = place[0]
    while depth > 0:
        depth -= 1
        top = stack[depth]
        fill_row(place, 0, top[0], top[1], top[2], top[3])
        start, stop = top[4], top[5]
        wide, tall = here[2] - here[0], here[3] - here[1]
        if stop - start == 1 or wide * tall == 1:
            best = start
            for i in range(start, stop):
                if weights[i] > weights[best]:
                    best = i
            fill_row(out, best, here[0], here[1], here[2], here[3])
            continue
        whole = below[stop] - below[start]
        split = start + 1
        while split < stop - 1 and below[split] - below[start] < 0.5 * whole:
            split += 1
        share = (below[split] - below[start]) / whole if whole > 0.0 else 0.5
        total = area_cost(board.cost, view, here[0], here[1], here[2], here[3])
        queries = area_queries(board.corners, here[0], here[1], here[2], here[3])
        best_score, best_at, best_vertical, best_first = np.inf, here[0], False, 0
        for vertical in (True, False):
            if (wide if vertical else tall) < 2:
                continue
            length = LENGTH_WEIGHT * (tall if vertical else wide) / (wide + tall)
            for first in range(2):
                want = total * (share if first == 0 else 1.0 - share)
                at = find_cut(board.cost, view, here, vertical, want)
                score = length
                if total > 0.0:
                    missed = side_cost(board.cost, view, here, vertical, at) - want
                    score += abs(missed) / total
                if keeps and start == 0 and queries > 0:
                    halves(here, vertical, at, sides)
                    kept = sides[first]
                    left = area_queries(board.corners, kept[0], kept[1], kept[2], kept[3])
                    score += KEEP_WEIGHT * (1.0 - left / queries)
                if score < best_score:
                    best_score, best_at, best_vertical, best_first = score, at, vertical, first
        halves(here, best_vertical, best_at, sides)
        for i in range(2):
            side = sides[best_first if i == 0 else 1 - best_first]
            fill_row(stack, depth, side[0], side[1], side[2], side[3])
            stack[depth, 4] = start if i == 0 else split
            stack[depth, 5] = split if i == 0 else stop
            depth += 1


@njit(cache=True, nogil=True)
def divide_evenly(
    cost: NDArray[np.float64], machines: int, out: NDArray[np.int64]
) -> int:  # pragma: no cover - compiled
    """Divide the whole grid among machines; return the number of parts.

    A part is ``column0, row0, column1, row1, machines``. Several machines share a part if it is a
    single cell, or few cells that no line divides evenly.
    """
    stack = np.empty((machines + 1, 5), np.int64)
    fill_row(stack, 0, 0, 0, cost.shape[2] - 1, cost.shape[1] - 1)
    stack[0, 4] = machines
    depth = 1
    parts = 0
    sides = np.empty((2, 4), np.int64)
    place = np.empty((1, 4), np.int64)
    here = place[0]
    while depth > 0:
        depth -= 1
        top = stack[depth]
        fill_row(place, 0, top[0], top[1], top[2], top[3])
        count = top[4]
        wide, tall = here[2] - here[0], here[3] - here[1]
        if count == 1 or wide * tall == 1:
            fill_row(out, parts, here[0], here[1], here[2], here[3])
            out[parts, 4] = count
            parts += 1
            continue
        total = area_cost(cost, 0, here[0], here[1], here[2], here[3])
        best_score, best_at, best_vertical, best_count = np.inf, here[0], False, count
        best_uneven = 0.0
        for vertical in (True, False):
            first = (here[0] if vertical else here[1]) + 1
            last = here[2] if vertical else here[3]
            if first >= last:
                continue
            if count > SCAN_MACHINES:
                first = find_cut(cost, 0, here, vertical, 0.5 * total)
                last = first + 1
            length = LENGTH_WEIGHT * (tall if vertical else wide) / (wide + tall)
            for at in range(first, last):
                left = side_cost(cost, 0, here, vertical, at)
                share = left / total if total > 0.0 else 0.5
                below = min(max(int(share * count + 0.5), 1), count - 1)
                uneven = max(share / below, (1.0 - share) / (count - below)) * count - 1.0
                off_centre = OFF_CENTRE_WEIGHT * abs(2.0 * below / count - 1.0)
                score = length + off_centre + (uneven if total > 0.0 else 0.0)
                if score < best_score:
                    best_score, best_at, best_vertical, best_count = score, at, vertical, below
                    best_uneven = uneven
        few = count <= SCAN_MACHINES and wide * tall <= SHARED_CELLS * count
        if few and total > 0.0 and best_uneven > UNEVEN:
            fill_row(out, parts, here[0], here[1], here[2], here[3])
            out[parts, 4] = count
            parts += 1
            continue
        halves(here, best_vertical, best_at, sides)
        for i in range(2):
            fill_row(stack, depth, sides[i, 0], sides[i, 1], sides[i, 2], sides[i, 3])
            stack[depth, 4] = best_count if i == 0 else count - best_count
            depth += 1
    return parts


@njit(cache=True, nogil=True)
def overlaps(
    rect: NDArray[np.int64],
    table: NDArray[np.int32],
    old: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:  # pragma: no cover - compiled
    """Count the overlaps of rectangles with those of a table; write as many as ``out`` holds.

    An entry is ``column0, row0, column1, row1, new, old``. Each overlap is found at its first row
    and column; the search steps from border to border.
    """
    found = 0
    for i in range(rect.shape[0]):
        row = rect[i, 1]
        while row < rect[i, 3]:
            following = rect[i, 3]
            column = rect[i, 0]
            while column < rect[i, 2]:
                slot = table[row, column]
                right, above = min(old[slot, 2], rect[i, 2]), min(old[slot, 3], rect[i, 3])
                following = min(following, above)
                if row == max(old[slot, 1], rect[i, 1]):
                    if found < out.shape[0]:
                        fill_row(out, found, column, row, right, above)
                        out[found, 4], out[found, 5] = i, slot
                    found += 1
                column = right
            row = following
    return found
