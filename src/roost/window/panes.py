"""Panes: what a batch adds to each standing query with aggregates or nearest points.

Such a query has a new result after every batch, over all points of its window. Instead of matching
the whole window again, each machine matches only the points of the batch, and stores with them a
*pane*: the pairs of query and point, and the partial results of each query. Panes are never changed
and never moved. The result of a query is the merge of its panes of all live batches
(:mod:`roost.window.results`), on whichever machine they were written.

While a batch is entirely in the window, its partial results are used unchanged. When a limit of
time or a count falls inside the batch, its pairs are filtered and aggregated again.

A query is identified by its created position in the query log, so a query that is registered again
under the same identifier starts anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints, as_arrow, as_numpy, frozen
from roost.window.aggregate import ACCUMULATORS, Key, key_of, read_column
from roost.window.evaluate import Live, above_line
from roost.window.grouped import (
    Counts,
    DistinctSketches,
    Grouped,
    Groups,
    RankSketches,
    Spreads,
    Stored,
    Totals,
)
from roost.window.grouped_extremes import ExtremeValues, TextExtremes
from roost.window.grouped_loops import group_distances, not_farther_than_kth
from roost.window.output import RequestedOutput
from roost.window.segment import Arrays, WindowSegment, pack_columns, unpack_columns

PREFIX = "pane."
ROW_BITS = 32
POINTS: Key = ("Count", None)
NEAR: Key = ("Near", None)


@dataclass(frozen=True, slots=True)
class Near(Stored):
    """Rows and distances of the nearest points, by query."""

    row: NDArray[np.int32]
    distance: Floats


# Names in stored panes.
_STORED: dict[str, type[Stored]] = {
    "Counts": Counts,
    "Totals": Totals,
    "Extremes": ExtremeValues,
    "TextExtremes": TextExtremes,
    "Spreads": Spreads,
    "DistinctSketches": DistinctSketches,
    "RankSketches": RankSketches,
    "Near": Near,
}
_STORED_NAMES = {kind: name for name, kind in _STORED.items()}


@dataclass(frozen=True, eq=False)
class Pane:
    """Pairs and partial results of one segment.

    ``created`` has the created positions of the queries that match a point here, ascending; the
    index of a query is its *code*. ``groups`` has the rows of the segment by code, ``texts`` the
    distinct outputs that the queries request, ``text_of`` their indices by code, and ``centres``
    the centres of the queries' circles.
    """

    created: Ints
    groups: Groups
    texts: tuple[str, ...]
    text_of: NDArray[np.int32]
    centres: Floats
    _streams: tuple[NDArray[np.uint8], ...]

    @classmethod
    def open(cls, arrays: Mapping[str, NDArray[Any]]) -> Pane | None:
        """Open the arrays of :func:`build_pane`; return None if there are none."""
        if PREFIX + "born" not in arrays:
            return None
        created, starts, rows, texts, text_of, centres = (
            arrays[PREFIX + name]
            for name in ("born", "starts", "rows", "texts", "text_of", "centres")
        )
        count = sum(name.startswith(PREFIX + "part.") for name in arrays)
        return cls(
            created,
            Groups(starts, rows),
            tuple(json.loads(texts.tobytes())),
            text_of,
            centres,
            tuple(arrays[f"{PREFIX}part.{k}"] for k in range(count)),
        )

    def arrays(self) -> Arrays:
        """Return the named arrays to store."""
        named: Arrays = {
            "born": self.created,
            "starts": self.groups.starts,
            "rows": self.groups.rows,
            "texts": np.frombuffer(json.dumps(self.texts).encode(), np.uint8),
            "text_of": self.text_of,
            "centres": self.centres,
            **{f"part.{k}": stream for k, stream in enumerate(self._streams)},
        }
        return {PREFIX + name: array for name, array in named.items()}

    @cached_property
    def _parts(self) -> dict[Key, tuple[NDArray[np.int32], Any]]:
        parts: dict[Key, tuple[NDArray[np.int32], Any]] = {}
        for stream in self._streams:
            batch = unpack_columns(stream)
            about = json.loads(batch.schema.metadata[b"part"])
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            codes = as_numpy(columns.pop("code"))
            kind, column = about["key"]
            parts[kind, column] = codes, _STORED[about["kind"]].stored(columns, about["facts"])
        return parts

    def part(self, key: Key) -> tuple[NDArray[np.int32], Grouped] | None:
        """Return codes and partial results of an accumulator; None if no query requires it."""
        if key == POINTS:
            return np.arange(self.created.size, dtype=np.int32), Counts(self.groups.sizes)
        return self._parts.get(key)

    @property
    def near(self) -> tuple[NDArray[np.int32], Near] | None:
        """Codes and nearest points; None if no query requests them."""
        return self._parts.get(NEAR)

    def alive(self, segment: WindowSegment, live: Live, codes: Ints) -> Pane | None:
        """Rebuild the pane of some queries from the live rows; return None without any.

        ``segment`` is that of the pane; ``codes`` are the queries, ascending.
        """
        kept = np.ones(segment.size, bool)
        if live.time_after is not None:
            kept &= segment.time > live.time_after
        if live.line is not None:
            kept &= above_line(segment, live.line)
        groups = self.groups.take(codes)
        groups = groups.where(kept[groups.rows])
        present = np.flatnonzero(groups.sizes)
        if not present.size:
            return None
        mine = codes[present]
        what = (self.texts, self.text_of[mine], self.centres[mine])
        return _compute(segment, self.created[mine], groups.take(present), *what)


def is_whole(segment: WindowSegment, live: Live) -> bool:
    """Return whether all rows of a segment are certainly live."""
    if live.line is not None:
        return False
    return live.time_after is None or bool(np.all(segment.zone_times[:, 0] > live.time_after))


def build_pane(
    segment: WindowSegment,
    created: Ints,
    rows: Ints,
    outputs: Mapping[int, tuple[str, float, float]],
) -> Arrays:
    """Build the pane of a segment: arrays to store with those of the segment, none without pairs.

    ``created`` and ``rows`` are pairs of query, by created position, and row; in any order, each
    once. ``outputs`` has the requested output (:attr:`RequestedOutput.text`) and the centre of the
    circle of each query, which only nearest points need. It may have queries without pairs.
    """
    if not created.size:
        return {}
    known = np.sort(np.fromiter(outputs, np.int64, len(outputs)))
    codes = np.searchsorted(known, created)
    if codes.max() == known.size or not np.array_equal(known[codes], created):
        raise ValueError("a pair names a query without a requested output")
    # One integer sort orders the pairs by query and row.
    pairs = np.sort((codes << ROW_BITS) | rows)
    counts = np.bincount(codes, minlength=known.size)
    present = np.flatnonzero(counts)
    starts = np.concatenate([[0], np.cumsum(counts[present])]).astype(np.int64)
    groups = Groups(starts, (pairs & ((1 << ROW_BITS) - 1)).astype(np.int32))
    mine = known[present]
    own = [outputs[number] for number in mine.tolist()]
    texts = {text: place for place, text in enumerate(dict.fromkeys(text for text, _, _ in own))}
    text_of = np.fromiter((texts[text] for text, _, _ in own), np.int32, len(own))
    centres = np.array([(cx, cy) for _, cx, cy in own], np.float64)
    return _compute(segment, mine, groups, tuple(texts), text_of, centres).arrays()


def _compute(
    segment: WindowSegment,
    created: Ints,
    groups: Groups,
    texts: tuple[str, ...],
    text_of: NDArray[np.int32],
    centres: Floats,
) -> Pane:
    """Compute the partial results of some pairs."""
    by_column: dict[str | None, dict[Key, list[int]]] = {}
    counts = np.zeros(len(texts), np.int64)  # requested nearest points
    for place, text in enumerate(texts):
        output = RequestedOutput.parse(text)
        counts[place] = output.nearest or 0
        for function, column, _ in output.aggregate.functions if output.aggregate else ():
            key = key_of(function, column)
            by_column.setdefault(column, {}).setdefault(key, []).append(place)
    streams = []
    for column_name, keys in by_column.items():
        if column_name is None:
            continue  # the sizes of the groups count the points
        column = read_column(segment, column_name)
        present = groups.without_nulls(column)
        for key, places in keys.items():
            requested = np.zeros(len(texts), bool)
            requested[places] = True
            codes = np.flatnonzero(requested[text_of])
            if codes.size:
                grouped = _kind(key, column).of(column, present.take(codes))
                streams.append(_pack(key, codes, grouped))
    if counts.any():
        streams += _nearest_rows(segment, groups, counts[text_of], centres)
    return Pane(created, groups, texts, text_of, centres, tuple(streams))


def _kind(key: Key, column: pa.Array) -> type[Grouped]:
    if key[0] != "Extremes":
        return ACCUMULATORS[key[0]]
    text = pt.is_string(column.type) or pt.is_large_string(column.type)
    return TextExtremes if text else ExtremeValues


def _pack(key: Key, codes: NDArray[Any], part: Stored) -> NDArray[np.uint8]:
    """Write one part into an Arrow stream."""
    columns = {"code": as_arrow(codes.astype(np.int32)), **part.columns()}
    about = {"key": key, "kind": _STORED_NAMES[type(part)], "facts": part.facts()}
    return pack_columns(columns, {"part": json.dumps(about)})


def _nearest_rows(
    segment: WindowSegment, groups: Groups, counts: Ints, centres: Floats
) -> Iterable[NDArray[np.uint8]]:
    """Find the nearest rows of each query that requests them."""
    codes = np.flatnonzero(counts)
    if not codes.size:
        return
    mine = groups.take(codes)
    places = (frozen(segment.x), frozen(segment.y))
    distances = group_distances(*places, *mine.frozen, frozen(centres[codes]), segment.lonlat)
    limits = counts[codes]
    kept = not_farther_than_kth(frozen(distances), frozen(mine.starts), frozen(limits))
    owners = np.repeat(np.arange(codes.size), mine.sizes)[kept]
    rows, distances = mine.rows[kept], distances[kept]
    order, _ = first_nearest(owners, distances, segment.ids.take(as_arrow(rows)), limits)
    near = Near(rows[order], distances[order])
    yield _pack(NEAR, codes[owners[order]], near)


def first_nearest(
    owners: Ints, distances: Floats, ids: pa.Array, limits: Ints
) -> tuple[Ints, Ints]:
    """Select the nearest points of each owner, by distance and then identifier.

    ``limits`` has the maximum number of points by owner. Returns the indices of the selected points
    by owner and rank, and their ranks from 0 on.
    """
    table = pa.table({"owner": as_arrow(owners), "distance": as_arrow(distances), "id": ids})
    keys = [(name, "ascending") for name in table.column_names]
    order = np.asarray(pc.sort_indices(table, sort_keys=keys), np.int64)
    ranked = owners[order]
    ranks = np.arange(order.size) - np.searchsorted(ranked, ranked)
    chosen = ranks < limits[ranked]
    return order[chosen], ranks[chosen]
