"""What a batch adds to each standing query that wants aggregates or nearest points.

Such a query is answered anew at every batch, over all points of its window. Matching everything
again would cost the whole window each time. Instead each machine matches only the points of the
batch, as ever, and what it finds is kept with them as a *pane*: the pairs of query and point, and
for each query the partial results of those pairs. Panes are never changed and never moved. A
query's answer is its panes of all live batches merged (:mod:`roost.window.answers`), so it does
not matter which machine a query or a point was on.

While a batch is wholly in the window its partial results serve as they are. When a limit of time
or a count goes through the batch, its pairs are filtered, and made into results again.

A query is known here by the number ``born`` of its registration: one that is registered anew
under the same name begins anew. A pane is a set of named arrays, stored beside those of its
segment.
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

from roost.errors import ConfigError
from roost.kernel.arrays import as_arrow, as_numpy
from roost.space import Coordinates
from roost.window.aggregate import FUNCTIONS, KEY, OWN_COLUMNS
from roost.window.evaluate import Live, above_line
from roost.window.grouped import Counts, Doubles, Grouped, Groups, Spreads, Totals, Whole
from roost.window.grouped_extremes import Extremes, TextExtremes
from roost.window.grouped_loops import frozen, group_distances, not_farther_than_kth
from roost.window.grouped_sketches import DistinctSketches, RankSketches
from roost.window.segment import Arrays, WindowSegment
from roost.window.wants import Wants

PREFIX = "pane."
ROW_BITS = 32

# Kind of accumulator, and the column that it is of; points are counted without one.
Key = tuple[str, str | None]
POINTS: Key = ("Count", None)

_KINDS: dict[str, type[Any]] = {
    "Count": Counts,
    "Total": Totals,
    "Extremes": Extremes,
    "Spread": Spreads,
    "Distinct": DistinctSketches,
    "Ranks": RankSketches,
}
_STORED: dict[str, type[Any]] = {kind.__name__: kind for kind in (*_KINDS.values(), TextExtremes)}


def key_of(function: str, column: str | None) -> Key:
    """Return the accumulator that a function needs."""
    return FUNCTIONS[function].kept.__name__, column


@dataclass(frozen=True, slots=True)
class Near:
    """The nearest rows of queries that want them, by query."""

    codes: NDArray[np.int32]
    rows: NDArray[np.int32]
    distances: Doubles


@dataclass(frozen=True, eq=False)
class Pane:
    """Pairs and partial results of one segment.

    Parameters
    ----------
    born
        Queries that matched at least one point here, ascending; a query's place is its *code*.
    groups
        Rows of the segment by code.
    texts
        The different things that these queries want.
    text_of
        Place in ``texts`` of what each query wants.
    centres
        Centre of each query's circle.
    """

    born: Whole
    groups: Groups
    texts: tuple[str, ...]
    text_of: NDArray[np.int32]
    centres: Doubles
    _streams: tuple[NDArray[np.uint8], ...]

    @classmethod
    def open(cls, arrays: Mapping[str, NDArray[Any]]) -> Pane | None:
        """Take the arrays of :func:`build_pane` among others; None where there are none."""
        if PREFIX + "born" not in arrays:
            return None
        born, starts, rows, texts, text_of, centres = (
            arrays[PREFIX + name]
            for name in ("born", "starts", "rows", "texts", "text_of", "centres")
        )
        count = sum(name.startswith(PREFIX + "part.") for name in arrays)
        return cls(
            born,
            Groups(starts, rows),
            tuple(json.loads(texts.tobytes())),
            text_of,
            centres,
            tuple(arrays[f"{PREFIX}part.{k}"] for k in range(count)),
        )

    def arrays(self) -> Arrays:
        """Named arrays to be stored."""
        named: Arrays = {
            "born": self.born,
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
            batch = pa.ipc.open_stream(pa.py_buffer(stream)).read_next_batch()
            about = json.loads(batch.schema.metadata[b"part"])
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            codes = as_numpy(columns.pop("code"))
            if about["kind"] == Near.__name__:
                part: Any = Near(codes, as_numpy(columns["row"]), as_numpy(columns["distance"]))
            else:
                part = _STORED[about["kind"]].stored(columns, about["facts"])
            kind, column = about["key"]
            parts[kind, column] = codes, part
        return parts

    def part(self, key: Key) -> tuple[NDArray[np.int32], Grouped] | None:
        """Codes of the queries that need an accumulator, with theirs; None if no query does."""
        if key == POINTS:
            return np.arange(self.born.size, dtype=np.int32), Counts(self.groups.sizes)
        return self._parts.get(key)

    @property
    def near(self) -> Near | None:
        """The nearest rows; None if no query wants any."""
        found = self._parts.get((Near.__name__, None))
        return None if found is None else found[1]

    def alive(self, segment: WindowSegment, live: Live, codes: Whole) -> Pane | None:
        """Make the pane of some queries anew from what is live; None if nothing is.

        Parameters
        ----------
        segment
            The pane's segment.
        live
            What of it is in the window.
        codes
            The queries, ascending.
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
        return _compute(segment, self.born[mine], groups.take(present), *what)


def is_whole(segment: WindowSegment, live: Live) -> bool:
    """Whether all of a segment is certainly live."""
    if live.line is not None:
        return False
    return live.time_after is None or bool(np.all(segment.zone_times[:, 0] > live.time_after))


def build_pane(
    segment: WindowSegment,
    born: Whole,
    rows: Whole,
    wants: Mapping[int, tuple[str, float, float]],
) -> Arrays:
    """Make the pane of a segment.

    Parameters
    ----------
    segment
        The points of a machine and batch.
    born, rows
        Pairs of query and row, in any order, each once.
    wants
        What each query wants, as :attr:`Wants.text` has it, and the centre of its circle, which
        only nearest points need. There may be more queries than pairs have.

    Returns
    -------
    dict
        Arrays to be stored with those of the segment; none where there are no pairs.

    Raises
    ------
    ValueError
        If a query of the pairs is not in ``wants``.
    ConfigError
        If a query wants something of a column that is not there.
    """
    if not born.size:
        return {}
    known = np.sort(np.fromiter(wants, np.int64, len(wants)))
    codes = np.searchsorted(known, born)
    if codes.max() == known.size or not np.array_equal(known[codes], born):
        raise ValueError("pairs of a query of which nobody says what it wants")
    # One sort of plain integers brings pairs in order of query and row.
    pairs = np.sort((codes << ROW_BITS) | rows)
    counts = np.bincount(codes, minlength=known.size)
    present = np.flatnonzero(counts)
    starts = np.concatenate([[0], np.cumsum(counts[present])]).astype(np.int64)
    groups = Groups(starts, (pairs & ((1 << ROW_BITS) - 1)).astype(np.int32))
    mine = known[present]
    wanted = [wants[number] for number in mine.tolist()]
    texts = {text: place for place, text in enumerate(dict.fromkeys(want[0] for want in wanted))}
    text_of = np.fromiter((texts[text] for text, _, _ in wanted), np.int32, len(wanted))
    centres = np.array([(cx, cy) for _, cx, cy in wanted], np.float64)
    return _compute(segment, mine, groups, tuple(texts), text_of, centres).arrays()


def _compute(
    segment: WindowSegment,
    born: Whole,
    groups: Groups,
    texts: tuple[str, ...],
    text_of: NDArray[np.int32],
    centres: Doubles,
) -> Pane:
    """Make the partial results of some pairs."""
    by_column: dict[str | None, dict[Key, list[int]]] = {}
    counts = np.zeros(len(texts), np.int64)  # how many nearest points
    for place, text in enumerate(texts):
        wants = Wants.parse(text)
        counts[place] = wants.nearest or 0
        for function, column, _ in wants.aggregate.functions if wants.aggregate else ():
            key = key_of(function, column)
            by_column.setdefault(column, {}).setdefault(key, []).append(place)
    streams = []
    for column_name, keys in by_column.items():
        if column_name is None:
            continue  # points are counted by the groups themselves
        column = read_column(segment, column_name)
        present = groups.without_nulls(column)
        for key, places in keys.items():
            wanted = np.zeros(len(texts), bool)
            wanted[places] = True
            codes = np.flatnonzero(wanted[text_of])
            if codes.size:
                grouped = _kind(key, column).of(column, present.take(codes))
                streams.append(_pack(key, codes, grouped.columns(), grouped, grouped.facts()))
    if counts.any():
        streams += _nearest_rows(segment, groups, counts[text_of], centres)
    return Pane(born, groups, texts, text_of, centres, tuple(streams))


def _kind(key: Key, column: pa.Array) -> type[Any]:
    text = pt.is_string(column.type) or pt.is_large_string(column.type)
    return TextExtremes if text and key[0] == "Extremes" else _KINDS[key[0]]


def _pack(
    key: Key, codes: NDArray[Any], columns: dict[str, pa.Array], kind: object, facts: dict[str, Any]
) -> NDArray[np.uint8]:
    """Put one part into an Arrow stream."""
    columns = {"code": as_arrow(codes.astype(np.int32)), **columns}
    about = {"key": key, "kind": type(kind).__name__, "facts": facts}
    fields = [(name, column.type) for name, column in columns.items()]
    schema = pa.schema(fields, metadata={"part": json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))
    return np.frombuffer(sink.getvalue(), np.uint8)


def read_column(segment: WindowSegment, name: str) -> pa.Array:
    """Read an attribute, or where there is none of that name, one of the points' own columns.

    Raises
    ------
    ConfigError
        If there is no such column.
    """
    if name in segment.attributes:
        column = segment.attributes[name]
    elif name == "id":
        column = segment.ids
    elif name in OWN_COLUMNS:
        column = as_arrow(np.asarray(getattr(segment, name)))
    else:
        raise ConfigError(KEY, name, f"columns {', '.join([*segment.attributes, *OWN_COLUMNS])}")
    return column.dictionary_decode() if pt.is_dictionary(column.type) else column


def _nearest_rows(
    segment: WindowSegment, groups: Groups, counts: Whole, centres: Doubles
) -> Iterable[NDArray[np.uint8]]:
    """Keep the nearest rows of each query that wants some."""
    codes = np.flatnonzero(counts)
    if not codes.size:
        return
    mine = groups.take(codes)
    lonlat = segment.space.coordinates is Coordinates.LONLAT
    places = (frozen(segment.x), frozen(segment.y))
    distances = group_distances(*places, *mine.frozen, frozen(centres[codes]), lonlat)
    limits = counts[codes]
    kept = not_farther_than_kth(frozen(distances), frozen(mine.starts), frozen(limits))
    owners = np.repeat(np.arange(codes.size), mine.sizes)[kept]
    rows, distances = mine.rows[kept], distances[kept]
    order, _ = first_nearest(owners, distances, segment.ids.take(as_arrow(rows)), limits)
    near = Near(codes[owners[order]].astype(np.int32), rows[order], distances[order])
    columns = {"row": as_arrow(near.rows), "distance": as_arrow(near.distances)}
    yield _pack((Near.__name__, None), near.codes, columns, near, {})


def first_nearest(
    owners: Whole, distances: Doubles, ids: pa.Array, limits: Whole
) -> tuple[Whole, Whole]:
    """Choose the nearest for each owner, by distance and then identifier.

    Parameters
    ----------
    owners, distances, ids
        Whom each point is for, how far it is, and what it is called.
    limits
        How many each owner gets.

    Returns
    -------
    order, ranks
        Places of the chosen by owner and rank, and their ranks from 0 on.
    """
    table = pa.table({"owner": as_arrow(owners), "distance": as_arrow(distances), "id": ids})
    keys = [(name, "ascending") for name in table.column_names]
    order = np.asarray(pc.sort_indices(table, sort_keys=keys), np.int64)
    ranked = owners[order]
    ranks = np.arange(order.size) - np.searchsorted(ranked, ranked)
    chosen = ranks < limits[ranked]
    return order[chosen], ranks[chosen]
