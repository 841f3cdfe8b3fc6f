"""What an owner of prefixes passes on when the tree has changed: whole groups of its base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from roost.model.arrays import Ints
from roost.synopsis.ageing import Band
from roost.synopsis.coarsening import split_groups
from roost.synopsis.spec import locate, split_group_keys
from roost.synopsis.synopsis import Synopsis
from roost.synopsis.tree import PrefixTree


def count_rows(synopsis: Synopsis) -> dict[str, int]:
    """Return the number of rows by prefix of their groups."""
    groups, small = _prefixes(synopsis)
    found, at = np.unique(np.concatenate([groups, small]), return_inverse=True)
    counts = np.concatenate([synopsis.groups.counts, np.ones(small.size)])
    rows = np.bincount(at, counts, found.size).astype(np.int64)
    return dict(zip(_texts(found, synopsis), rows.tolist(), strict=True))


def divide(bands: Sequence[Band], owner: int, tree: PrefixTree) -> Iterator[tuple[int, Band]]:
    """Yield the bands of an owner by their new owners; groups with several stay with the old."""
    for band in bands:
        rest = band.synopsis
        groups, small = _prefixes(rest)
        prefixes = np.unique(np.concatenate([groups, small]))
        owners = [tree.whole_owner(text) for text in _texts(prefixes, rest)]
        for target in sorted({found for found in owners if found is not None} - {owner}):
            given = prefixes[[found == target for found in owners]]
            groups, small = _prefixes(rest)
            chosen = np.isin(groups, given), np.isin(small, given)
            passed, rest = split_groups(rest, *chosen)
            yield target, replace(band, synopsis=passed)
        if rest.count or rest is band.synopsis:
            yield owner, replace(band, synopsis=rest)


def _prefixes(synopsis: Synopsis) -> tuple[Ints, Ints]:
    """Return the prefixes of groups, and of the rows of small groups."""
    rows, spec = synopsis.rows, synopsis.spec
    return split_group_keys(synopsis.groups.keys)[0], locate(rows.x, rows.y, spec) >> spec.rest_bits


def _texts(prefixes: Ints, synopsis: Synopsis) -> list[str]:
    bits = synopsis.spec.prefix_bits
    return [format(prefix, f"0{bits}b") if bits else "" for prefix in prefixes.tolist()]
