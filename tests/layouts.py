"""Random divisions of a grid into rectangles, as splits and merges make them."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from roost.balance import Partition, Plan
from roost.balance.changes import Change, Merge, Move, Split

Rectangle = tuple[int, int, int, int]


def cells_of(p: Partition) -> set[tuple[int, int]]:
    """Return the cells of a partition."""
    return {(c, r) for c in range(p.column0, p.column1) for r in range(p.row0, p.row1)}


def overlapping(plan: Plan, column0: int, row0: int, column1: int, row1: int) -> list[Partition]:
    """Return the partitions that an inclusive range of cells overlaps, by brute force."""
    wide = [p for p in plan.partitions if p.column0 <= column1 and column0 < p.column1]
    return [p for p in wide if p.row0 <= row1 and row0 < p.row1]


def random_layout(rng: random.Random, columns: int, rows: int, steps: int) -> list[Rectangle]:
    """Split and merge at random; merges may be of any set that fills a rectangle."""
    found = [(0, 0, columns, rows)]
    for _ in range(steps):
        change = _merged if len(found) > 1 and rng.random() < 0.3 else _split
        found = change(rng, found)
    return found


def _split(rng: random.Random, found: list[Rectangle]) -> list[Rectangle]:
    chosen = rng.choice(found)
    c0, r0, c1, r1 = chosen
    cuts = [((c0, r0, at, r1), (at, r0, c1, r1)) for at in range(c0 + 1, c1)]
    cuts += [((c0, r0, c1, at), (c0, at, c1, r1)) for at in range(r0 + 1, r1)]
    if not cuts:
        return found
    return [r for r in found if r != chosen] + list(rng.choice(cuts))


def _merged(rng: random.Random, found: list[Rectangle]) -> list[Rectangle]:
    first, last = rng.sample(found, 2)
    c0, r0 = min(first[0], last[0]), min(first[1], last[1])
    c1, r1 = max(first[2], last[2]), max(first[3], last[3])
    inside = [r for r in found if c0 <= r[0] and r0 <= r[1] and r[2] <= c1 and r[3] <= r1]
    if sum((r[2] - r[0]) * (r[3] - r[1]) for r in inside) != (c1 - c0) * (r1 - r0):
        return found
    return [r for r in found if r not in inside] + [(c0, r0, c1, r1)]


@st.composite
def layouts(draw: st.DrawFn, side: int = 9, machines: int = 4) -> Plan:
    """Plans of random layouts; every partition has one machine."""
    columns, rows = draw(st.integers(1, side)), draw(st.integers(1, side))
    rng = random.Random(draw(st.integers(0, 2**32)))
    found = random_layout(rng, columns, rows, draw(st.integers(0, 30)))
    partitions = tuple(
        Partition(number, *sides, (rng.randrange(machines),)) for number, sides in enumerate(found)
    )
    plan = Plan(0, columns, rows, machines, partitions, len(partitions))
    plan.check_invariants()
    return plan


def random_change(rng: random.Random, plan: Plan) -> Change | None:
    """Return one change that is valid for a plan, or None."""
    p = rng.choice(plan.partitions)
    machines = tuple(rng.sample(range(plan.machines), rng.choice([1, 1, 1, min(2, plan.machines)])))
    kind = rng.choice(["move", "split", "split", "merge", "merge"])
    if kind == "move":
        return Move(p.partition_id, machines)
    if kind == "split":
        vertical = rng.random() < 0.5
        low, high = (p.column0, p.column1) if vertical else (p.row0, p.row1)
        if high - low < 2:
            return None
        ids = (plan.next_id, plan.next_id + rng.choice([1, 3]))
        parts = (rng.choice([machines, p.machines]), p.machines)
        return Split(p.partition_id, vertical, rng.randrange(low + 1, high), ids, parts)
    group = [q for q in plan.partitions if set(q.machines) == set(p.machines)]
    other = rng.choice(group)
    c0, r0 = min(p.column0, other.column0), min(p.row0, other.row0)
    c1, r1 = max(p.column1, other.column1), max(p.row1, other.row1)
    box = Partition(-1, c0, r0, c1, r1, ())
    inside = [q for q in group if cells_of(q) <= cells_of(box)]
    if len(inside) < 2 or sum(q.cells for q in inside) != box.cells:
        return None
    return Merge(tuple(q.partition_id for q in inside), plan.next_id, machines)
