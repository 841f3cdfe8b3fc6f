"""Fewer partitions: what one machine holds and what forms a rectangle becomes one.

Splits and moves leave a machine with neighbours that it gains nothing by keeping apart. Pairs
with a whole side in common are found by their corners; that is nearly always all. Five
partitions around a centre form a rectangle although no two of them do, so that is looked for as
well, among what the pairs have left.

Partitions with several machines are left alone: they were made on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from roost.balance.changes import Merge
from roost.balance.plan import Plan

# The fewest rectangles that form one although no two of them do.
_PINWHEEL = 5


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangle and the partitions that it is made of."""

    column0: int
    row0: int
    column1: int
    row1: int
    ids: tuple[int, ...]

    @property
    def cells(self) -> int:
        return (self.column1 - self.column0) * (self.row1 - self.row0)


def adjacent_merges(plan: Plan) -> tuple[Merge, ...]:
    """Merge until no partitions of one machine form a rectangle any more.

    Each partition is in one merge at most, however many neighbours are joined.

    Examples
    --------
    >>> from roost.balance.plan import Partition
    >>> halves = (Partition(0, 0, 0, 2, 3, (1,)), Partition(1, 2, 0, 4, 3, (1,)))
    >>> adjacent_merges(Plan(0, 4, 3, 2, halves, 2))
    (Merge(partition_ids=(0, 1), new_id=2, machines=(1,)),)
    """
    held: dict[int, list[_Block]] = {}
    for p in sorted(plan.partitions, key=lambda p: p.partition_id):
        if len(p.machines) == 1:
            block = _Block(p.column0, p.row0, p.column1, p.row1, (p.partition_id,))
            held.setdefault(p.machines[0], []).append(block)
    merges: list[Merge] = []
    for machine in sorted(held):
        blocks = _join_pairs(held[machine])
        if len(blocks) >= _PINWHEEL:
            blocks = _join_groups(blocks)
        for block in blocks:
            if len(block.ids) > 1:
                new_id = plan.next_id + len(merges)
                merges.append(Merge(tuple(sorted(block.ids)), new_id, (machine,)))
    return tuple(merges)


def _union(blocks: Iterable[_Block]) -> _Block:
    parts = list(blocks)
    return _Block(
        min(b.column0 for b in parts),
        min(b.row0 for b in parts),
        max(b.column1 for b in parts),
        max(b.row1 for b in parts),
        tuple(number for b in parts for number in b.ids),
    )


def _join_pairs(blocks: list[_Block]) -> list[_Block]:
    """Join blocks with a whole side in common, each found by the corner it begins at."""
    found = {(b.column0, b.row0): b for b in blocks}
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


def _join_groups(blocks: list[_Block]) -> list[_Block]:
    """Join any set that fills a rectangle: from one block's first corner to another's last."""
    while True:
        group = _filled(blocks)
        if not group:
            return blocks
        rest = [b for number, b in enumerate(blocks) if number not in group]
        blocks = [*rest, _union(blocks[number] for number in sorted(group))]


def _filled(blocks: list[_Block]) -> set[int]:
    """Find the largest set of blocks that fills a rectangle; empty if there is none."""
    sides = np.array([[b.column0, b.row0, b.column1, b.row1] for b in blocks], np.int64)
    cells = np.array([b.cells for b in blocks], np.int64)
    column0, row0, column1, row1 = sides.T
    best: set[int] = set()
    for b in blocks:
        # inside[i, j]: block j lies between b's first corner and block i's last.
        after = (column0 >= b.column0) & (row0 >= b.row0)
        inside = after & (column1 <= column1[:, None]) & (row1 <= row1[:, None])
        area = (column1 - b.column0) * (row1 - b.row0)
        full = (inside @ cells == area) & (area > b.cells)
        for number in np.flatnonzero(full):
            group = set(np.flatnonzero(inside[number]).tolist())
            if len(group) > max(len(best), 1):
                best = group
    return best
