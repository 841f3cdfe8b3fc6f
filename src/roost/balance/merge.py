"""Merging of adjacent partitions of one machine that form a rectangle.

Splits and moves leave a machine with adjacent partitions that need not be separate. Pairs with a
common side are found by their corners; these are nearly all cases. Five partitions around a centre
form a rectangle although no two of them do, so such groups are searched among the rest.

Partitions with several machines are not merged: they relieve hot cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roost.balance.changes import Merge
from roost.balance.plan import Partition, Plan, enclosing

# The minimum number of rectangles that form one although no two of them do.
_PINWHEEL = 5


def adjacent_merges(plan: Plan) -> tuple[Merge, ...]:
    """Return the merges after which no partitions of one machine form a rectangle.

    Each partition is in at most one merge.

    Examples
    --------
    >>> from roost.balance.plan import Partition
    >>> halves = (Partition(0, 0, 0, 2, 3, (1,)), Partition(1, 2, 0, 4, 3, (1,)))
    >>> adjacent_merges(Plan(0, 4, 3, 2, halves, 2))
    (Merge(partition_ids=(0, 1), new_id=2, machines=(1,)),)
    """
    # `parents` lists the partitions that form a rectangle.
    held: dict[int, list[Partition]] = {}
    for p in sorted(plan.partitions, key=lambda p: p.partition_id):
        if len(p.machines) == 1:
            held.setdefault(p.machines[0], []).append(replace(p, parents=(p.partition_id,)))
    merges: list[Merge] = []
    for machine in sorted(held):
        rectangles = _join_pairs(held[machine])
        if len(rectangles) >= _PINWHEEL:
            rectangles = _join_groups(rectangles)
        for rectangle in rectangles:
            if len(rectangle.parents) > 1:
                new_id = plan.next_id + len(merges)
                merges.append(Merge(tuple(sorted(rectangle.parents)), new_id, (machine,)))
    return tuple(merges)


def _union(parts: Sequence[Partition]) -> Partition:
    parents = tuple(number for p in parts for number in p.parents)
    return Partition(parents[0], *enclosing(parts), parts[0].machines, parents)


def _join_pairs(rectangles: list[Partition]) -> list[Partition]:
    """Join rectangles with a common side, found by their first corners."""
    found = {(b.column0, b.row0): b for b in rectangles}
    joined = True
    while joined:
        joined = False
        for corner in sorted(found):
            b = found.get(corner)
            if b is None:
                continue
            right = found.get((b.column1, b.row0))
            below = found.get((b.column0, b.row1))
            if right is not None and right.row1 == b.row1:
                other = right
            elif below is not None and below.column1 == b.column1:
                other = below
            else:
                continue
            del found[other.column0, other.row0]
            found[corner] = _union((b, other))
            joined = True
    return [found[corner] for corner in sorted(found)]


def _join_groups(rectangles: list[Partition]) -> list[Partition]:
    """Join any set that fills a rectangle."""
    while True:
        group = _filled(rectangles)
        if not group:
            return rectangles
        rest = [b for number, b in enumerate(rectangles) if number not in group]
        rectangles = [*rest, _union([rectangles[number] for number in sorted(group)])]


def _filled(rectangles: list[Partition]) -> set[int]:
    """Return the largest set of rectangles that fills a rectangle; empty if there is none."""
    sides = np.array([[b.column0, b.row0, b.column1, b.row1] for b in rectangles], np.int64)
    cells = np.array([b.cells for b in rectangles], np.int64)
    column0, row0, column1, row1 = sides.T
    best: set[int] = set()
    for b in rectangles:
        # inside[i, j]: rectangle j lies between b's first and rectangle i's last corner.
        after = (column0 >= b.column0) & (row0 >= b.row0)
        inside = after & (column1 <= column1[:, None]) & (row1 <= row1[:, None])
        area = (column1 - b.column0) * (row1 - b.row0)
        full = (inside @ cells == area) & (area > b.cells)
        for number in np.flatnonzero(full):
            group = set(np.flatnonzero(inside[number]).tolist())
            if len(group) > max(len(best), 1):
                best = group
    return best
