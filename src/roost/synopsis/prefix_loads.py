"""The load of prefixes: rows by prefix, as machines count them, and bytes of stored groups."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from roost.model.arrays import Floats, Ints
from roost.synopsis.catalogue import Catalogue, FileKind, SketchFile, SketchPart
from roost.synopsis.prefix_choice import PrefixLoad
from roost.synopsis.scaling import Transfer
from roost.synopsis.tree import PrefixTree, span

DEPTH = 4  # bits of counted prefixes beyond the longest prefix of the tree
SHORTEST = 24  # bits of counted prefixes, if places have as many

CellRows = tuple[Ints, Ints]  # first place, and number of rows


def cell_bits(tree: PrefixTree, place_bits: int) -> int:
    """Return the length of the prefixes for which rows are counted."""
    return min(max(SHORTEST, max(map(len, tree.owners)) + DEPTH), place_bits)


def count_cells(places: Ints, place_bits: int, bits: int) -> CellRows:
    """Count rows by prefixes of some length."""
    cells, counts = np.unique(places >> place_bits - bits, return_counts=True)
    return cells << place_bits - bits, counts


def divide_rows(
    tree: PrefixTree, places: Ints, rows: Floats, place_bits: int, parts: int
) -> dict[str, float]:
    """Return the rows of prefixes with one owner each; the heaviest ones are halved."""
    order = np.argsort(places, kind="stable")
    firsts, sums = places[order].tolist(), [0.0, *np.cumsum(rows[order]).tolist()]
    inner = {prefix[:end] for prefix in tree.owners for end in range(len(prefix))}
    bits = cell_bits(tree, place_bits)
    heap: list[tuple[float, str]] = []
    found: dict[str, float] = {}

    def add(prefix: str) -> None:
        first, last = (bisect_left(firsts, place) for place in span(prefix, place_bits))
        weight = sums[last] - sums[first]
        if weight > 0.0 and prefix in inner:
            halve(prefix)
        elif weight > 0.0:
            heapq.heappush(heap, (-weight, prefix))

    def halve(prefix: str) -> None:
        for bit in "01":
            add(prefix + bit)

    add("")
    while heap:
        weight, prefix = heapq.heappop(heap)
        if len(prefix) < bits and len(heap) + len(found) < parts:
            halve(prefix)
        else:
            found[prefix] = -weight
    return found


def passed_on(part: SketchPart, tree: PrefixTree) -> dict[str, int]:
    """Return the owners of prefixes in a base that other machines own by now."""
    owners = {prefix: tree.whole_owner(prefix) for prefix in part.prefixes}
    return {p: owner for p, owner in owners.items() if owner not in (None, part.owner)}


def stored_bytes(catalogue: Catalogue, tree: PrefixTree) -> Iterator[tuple[str, float]]:
    """Yield the bytes of the prefixes that move as a whole."""
    for part, row_bytes in _bases(catalogue.files):
        for prefix, rows in part.prefixes.items():
            if tree.whole_owner(prefix) is not None:
                yield prefix, rows * row_bytes


def transfers(catalogue: Catalogue, tree: PrefixTree) -> tuple[Transfer, ...]:
    """Return the moves in progress between machines of the tree, which the next fold ends."""
    return tuple(
        Transfer(part.owner, target, part.prefixes[prefix] * row_bytes)
        for part, row_bytes in _bases(catalogue.files)
        if part.owner < tree.machines
        for prefix, target in passed_on(part, tree).items()
    )


def add_loads(
    rates: dict[str, float], stored: Iterator[tuple[str, float]]
) -> dict[str, PrefixLoad]:
    """Return the load of all prefixes with rows or bytes."""
    loads = {prefix: PrefixLoad(rate, 0.0) for prefix, rate in rates.items()}
    for prefix, nbytes in stored:
        loads[prefix] = loads.get(prefix, PrefixLoad()).plus(PrefixLoad(0.0, nbytes))
    return loads


def _bases(files: Sequence[SketchFile]) -> Iterator[tuple[SketchPart, float]]:
    for file in files:
        if file.kind is FileKind.BASE:
            for part in file.parts:
                yield part, file.nbytes / max(file.rows, 1)
