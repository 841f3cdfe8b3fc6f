"""Board: a mutable plan with its costs, and the compiled loops that divide rectangles.

Every partition has a slot; a table maps cells to slots. Costs are prefix sums, one table per *view*
(a round of points), so the cost of a rectangle takes four look-ups. The views are considered
together: a machine receives a piece only if it has capacity in all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints

# A half-open rectangle of cells: column0, row0, column1, row1.
Area = tuple[int, int, int, int]

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

    cost: Floats
    """View, row, column: prefix sums of cost."""
    corners: NDArray[np.int32]
    """The Euler histogram's four tables of prefix sums."""
    table: NDArray[np.int32]
    """Row, column: slot of the cell."""
    rect: Ints
    """Slot: ``column0, row0, column1, row1``."""
    owner: Ints
    """Slot: machine, ``FREE`` or ``SHARED``."""
    slot_load: Floats
    """Slot, view: cost."""
    machine_load: Floats
    """Machine, view: cost of its partitions, including their overhead."""
    used: Ints
    """One number: slots in use, including free ones between them."""
    overhead: float
    """Fixed cost of a partition."""


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def sum_costs(points: Floats, unit: Floats, scale: float, sums: Floats) -> None:
    """Compute prefix sums of the cost of each cell."""
    columns = sums.shape[1] - 1
    for row in range(sums.shape[0] - 1):
        line = 0.0
        first = row * columns
        for column in range(columns):
            line += points[first + column] * unit[first + column] * scale
            sums[row + 1, column + 1] = sums[row, column + 1] + line


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def sum_moments(points: Floats, unit: Floats) -> tuple[float, float]:
    """Sum points times their cost, and times its square, in one pass over all cells."""
    total = squares = 0.0
    for cell in range(points.size):
        if points[cell] > 0.0:
            cost = points[cell] * unit[cell]
            total += cost
            squares += cost * unit[cell]
    return total, squares


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def sum_rects(rect: Ints, points: Floats, unit: Floats, columns: int, out: Floats) -> None:
    """Compute the cost of each rectangle, cell by cell."""
    for i in range(rect.shape[0]):
        total = 0.0
        for row in range(rect[i, 1], rect[i, 3]):
            for cell in range(row * columns + rect[i, 0], row * columns + rect[i, 2]):
                total += points[cell] * unit[cell]
        out[i] = total


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def area_cost(cost: Floats, view: int, area: Area) -> float:
    """Return the cost of a rectangle, which rounding never makes negative."""
    column0, row0, column1, row1 = area
    high = cost[view, row1, column1] - cost[view, row1, column0]
    total: float = high - cost[view, row0, column1] + cost[view, row0, column0]
    return max(total, 0.0)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def area_queries(corners: NDArray[np.int32], area: Area) -> int:
    """Count the queries over a rectangle."""
    column0, row0, column1, row1 = area
    ends = np.int64(corners[0, row1, column1]) - corners[1, row1, column0]
    count: int = ends - corners[2, row0, column1] + corners[3, row0, column0]
    return count


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def read_area(rect: Ints, row: int) -> Area:
    """Return a rectangle of an array."""
    return rect[row, 0], rect[row, 1], rect[row, 2], rect[row, 3]


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def write_area(out: Ints, row: int, area: Area) -> None:
    """Write a rectangle; element by element, which compiles much faster than a slice."""
    out[row, 0], out[row, 1], out[row, 2], out[row, 3] = area


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def put(board: Board, slot: int, area: Area) -> None:
    """Set the rectangle and cost of a slot; does not update the table."""
    write_area(board.rect, slot, area)
    for view in range(board.slot_load.shape[1]):
        board.slot_load[slot, view] = area_cost(board.cost, view, area)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def paint(board: Board, slot: int, area: Area) -> None:
    """Write a slot to the table."""
    for row in range(area[1], area[3]):
        for column in range(area[0], area[2]):
            board.table[row, column] = slot


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def assign(board: Board, slot: int, machine: int) -> None:
    """Assign a free slot to a machine."""
    board.owner[slot] = machine
    for view in range(board.slot_load.shape[1]):
        board.machine_load[machine, view] += board.slot_load[slot, view] + board.overhead


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def release(board: Board, slot: int) -> int:
    """Free a slot and return its single owner."""
    machine: int = board.owner[slot]
    board.owner[slot] = FREE
    for view in range(board.slot_load.shape[1]):
        board.machine_load[machine, view] -= board.slot_load[slot, view] + board.overhead
    return machine


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def add(board: Board, area: Area) -> int:
    """Allocate a slot for a rectangle."""
    slot: int = board.used[0]
    board.used[0] += 1
    put(board, slot, area)
    paint(board, slot, area)
    return slot


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def fill(board: Board, rect: Ints, owner: Ints) -> None:
    """Add rectangles to an empty board, in order of slots; assign those with a single owner."""
    for i in range(rect.shape[0]):
        slot = add(board, read_area(rect, i))
        if owner[i] >= 0:
            assign(board, slot, owner[i])


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def halves(area: Area, vertical: bool, at: int) -> tuple[Area, Area]:
    """Return both sides of a cut, the low one first."""
    column0, row0, column1, row1 = area
    if vertical:
        return (column0, row0, at, row1), (at, row0, column1, row1)
    return (column0, row0, column1, at), (column0, at, column1, row1)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def side_cost(cost: Floats, view: int, area: Area, vertical: bool, at: int) -> float:
    """Return the cost of the low side of a cut."""
    return area_cost(cost, view, halves(area, vertical, at)[0])


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def find_cut(cost: Floats, view: int, area: Area, vertical: bool, want: float) -> int:
    """Return the line whose low side costs nearest to ``want``; no side is empty."""
    low = (area[0] if vertical else area[1]) + 1
    high = (area[2] if vertical else area[3]) - 1
    first = low
    while low < high:
        middle = (low + high) >> 1
        if side_cost(cost, view, area, vertical, middle) < want:
            low = middle + 1
        else:
            high = middle
    if low > first:
        below = want - side_cost(cost, view, area, vertical, low - 1)
        if below < abs(side_cost(cost, view, area, vertical, low) - want):
            low -= 1
    return low


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def divide(board: Board, view: int, whole: Area, weights: Floats, keeps: bool, out: Ints) -> None:
    """Cut a rectangle into pieces that cost in proportion to weights, by recursive halving.

    Halving keeps pieces compact, so that few queries span several of them. If ``keeps``, the first
    weight belongs to the present owner, which keeps the side with more queries. A single cell
    cannot be cut: the heaviest of its weights receives it, the others an empty rectangle.
    """
    count = weights.size
    below = np.zeros(count + 1)
    for i in range(count):
        below[i + 1] = below[i] + weights[i]
        write_area(out, i, (0, 0, 0, 0))
    stack = np.empty((count + 1, 6), np.int64)
    write_area(stack, 0, whole)
    stack[0, 4], stack[0, 5] = 0, count
    depth = 1
    while depth > 0:
        depth -= 1
        area = read_area(stack, depth)
        start, stop = stack[depth, 4], stack[depth, 5]
        wide, tall = area[2] - area[0], area[3] - area[1]
        if stop - start == 1 or wide * tall == 1:
            best = start
            for i in range(start, stop):
                if weights[i] > weights[best]:
                    best = i
            write_area(out, best, area)
            continue
        weight = below[stop] - below[start]
        split = start + 1
        while split < stop - 1 and below[split] - below[start] < 0.5 * weight:
            split += 1
        share = (below[split] - below[start]) / weight if weight > 0.0 else 0.5
        total = area_cost(board.cost, view, area)
        queries = area_queries(board.corners, area)
        best_score, best_at, best_vertical, best_first = np.inf, area[0], False, 0
        for vertical in (True, False):
            if (wide if vertical else tall) < 2:
                continue
            length = LENGTH_WEIGHT * (tall if vertical else wide) / (wide + tall)
            for first in range(2):
                want = total * (share if first == 0 else 1.0 - share)
                at = find_cut(board.cost, view, area, vertical, want)
                score = length
                if total > 0.0:
                    missed = side_cost(board.cost, view, area, vertical, at) - want
                    score += abs(missed) / total
                if keeps and start == 0 and queries > 0:
                    kept = area_queries(board.corners, halves(area, vertical, at)[first])
                    score += KEEP_WEIGHT * (1.0 - kept / queries)
                if score < best_score:
                    best_score, best_at, best_vertical, best_first = score, at, vertical, first
        sides = halves(area, best_vertical, best_at)
        for i in range(2):
            write_area(stack, depth, sides[best_first if i == 0 else 1 - best_first])
            stack[depth, 4] = start if i == 0 else split
            stack[depth, 5] = split if i == 0 else stop
            depth += 1


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def divide_evenly(cost: Floats, machines: int, out: Ints) -> int:
    """Divide the whole grid among machines; return the number of parts.

    A part is ``column0, row0, column1, row1, machines``. Several machines share a part if it is a
    single cell, or few cells that no line divides evenly.
    """
    stack = np.empty((machines + 1, 5), np.int64)
    write_area(stack, 0, (0, 0, cost.shape[2] - 1, cost.shape[1] - 1))
    stack[0, 4] = machines
    depth = 1
    parts = 0
    while depth > 0:
        depth -= 1
        area = read_area(stack, depth)
        count = stack[depth, 4]
        wide, tall = area[2] - area[0], area[3] - area[1]
        total = area_cost(cost, 0, area)
        best_score, best_at, best_vertical, best_count = np.inf, area[0], False, count
        best_uneven = 0.0
        for vertical in (True, False):
            first = (area[0] if vertical else area[1]) + 1
            last = area[2] if vertical else area[3]
            if count == 1 or first >= last:
                continue
            if count > SCAN_MACHINES:
                first = find_cut(cost, 0, area, vertical, 0.5 * total)
                last = first + 1
            length = LENGTH_WEIGHT * (tall if vertical else wide) / (wide + tall)
            for at in range(first, last):
                left = side_cost(cost, 0, area, vertical, at)
                share = left / total if total > 0.0 else 0.5
                below = min(max(int(share * count + 0.5), 1), count - 1)
                uneven = max(share / below, (1.0 - share) / (count - below)) * count - 1.0
                off_centre = OFF_CENTRE_WEIGHT * abs(2.0 * below / count - 1.0)
                score = length + off_centre + (uneven if total > 0.0 else 0.0)
                if score < best_score:
                    best_score, best_at, best_vertical, best_count = score, at, vertical, below
                    best_uneven = uneven
        few = count <= SCAN_MACHINES and wide * tall <= SHARED_CELLS * count
        if best_count == count or (few and total > 0.0 and best_uneven > UNEVEN):
            write_area(out, parts, area)
            out[parts, 4] = count
            parts += 1
            continue
        sides = halves(area, best_vertical, best_at)
        for i in range(2):
            write_area(stack, depth, sides[i])
            stack[depth, 4] = best_count if i == 0 else count - best_count
            depth += 1
    return parts
