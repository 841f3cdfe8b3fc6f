"""Grids of Products: left by right buckets, and which machine owns each cell.

A tuple goes to every machine that owns a cell of its row or column. Machines therefore own
rectangles, whose sides are in the ratio of the two input rates: then they receive fewest tuples.
"""

from __future__ import annotations

import numpy as np

from roost.dataflow.buckets import BUCKETS, BucketMap


def grid_sides(left: float, right: float, cells: int = BUCKETS) -> tuple[int, int]:
    """Return the sides of a grid, powers of two, whose ratio is closest to that of two rates.

    Examples
    --------
    >>> grid_sides(1, 1), grid_sides(100, 1), grid_sides(1, 5), grid_sides(0, 3)
    ((16, 16), (128, 2), (8, 32), (1, 256))
    """
    ratio = np.log2(max(left, 1e-9) / max(right, 1e-9))
    powers = cells.bit_length() - 1
    rows = int(np.clip(round((powers + ratio) / 2), 0, powers))
    return 1 << rows, 1 << (powers - rows)


def tiled(machines: int, grid: tuple[int, int], left: float = 1.0, right: float = 1.0) -> BucketMap:
    """Divide a grid into rectangles of about equal area, one for each machine."""
    owners = np.zeros(grid, np.int64)
    pieces = [(slice(0, grid[0]), slice(0, grid[1]), 0, machines)]
    while pieces:
        rows, columns, first, count = pieces.pop()
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if count == 1 or height * width == 1:
            owners[rows, columns] = first
            continue
        half = count // 2
        received = max(left, 1e-9) * height / grid[0], max(right, 1e-9) * width / grid[1]
        if width == 1 or (height > 1 and received[0] >= received[1]):
            cut = rows.start + min(max(round(height * half / count), 1), height - 1)
            parts = [(slice(rows.start, cut), columns), (slice(cut, rows.stop), columns)]
        else:
            cut = columns.start + min(max(round(width * half / count), 1), width - 1)
            parts = [(rows, slice(columns.start, cut)), (rows, slice(cut, columns.stop))]
        pieces.append((*parts[0], first, half))
        pieces.append((*parts[1], first + half, count - half))
    return BucketMap(0, machines, tuple(owners.reshape(-1).tolist()), configured=machines)
