"""Results of standing queries: the merged panes of all live batches.

Each batch evaluates thousands of queries over dozens of panes, so only the rounding of sums and
the merging of sketches loop over queries. For each accumulator that a query requires, the panes'
arrays are merged into one, from which each function reads its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints, Mask, as_arrow, frozen
from roost.window.aggregate import FUNCTIONS, Function, Key, key_of
from roost.window.evaluate import Live
from roost.window.grouped import Contribution, Values
from roost.window.grouped_loops import not_farther_than_kth
from roost.window.output import RequestedOutput
from roost.window.panes import Pane, first_nearest, is_whole
from roost.window.segment import WindowSegment

NARROW_MAX = 1 << 16  # numpy sorts 16-bit numbers in linear time

AGGREGATES = pa.schema(
    [
        ("created_position", pa.int64()),
        ("name", pa.string()),
        ("number", pa.float64()),
        ("text", pa.string()),
    ]
)


NEAREST = pa.schema(
    [
        ("created_position", pa.int64()),
        ("rank", pa.int32()),
        ("point_id", pa.int64()),  # or the type of the points' identifiers
        ("event_time", pa.int64()),
        ("distance", pa.float64()),
        ("x", pa.float64()),
        ("y", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True)
class _Queries:
    """The standing queries in the given order; the index of a query is its *slot*."""

    created: Ints
    text_of: Ints
    texts: dict[str, int]
    order: Ints  # slots in order of created position
    ranked: Ints  # created positions in order

    @classmethod
    def of(cls, queries: Mapping[int, str]) -> _Queries:
        created = np.fromiter(queries, np.int64, len(queries))
        texts = {text: place for place, text in enumerate(dict.fromkeys(queries.values()))}
        text_of = np.fromiter((texts[text] for text in queries.values()), np.int64, len(queries))
        order = np.argsort(created, kind="stable")
        return cls(created, text_of, texts, order, created[order])

    def slots_in(self, pane: Pane) -> Ints:
        """Return the slot of each code of a pane, -1 for other queries."""
        if not self.created.size:
            return np.full(pane.created.size, -1)
        places = np.searchsorted(self.ranked, pane.created)
        places = np.minimum(places, self.ranked.size - 1)
        slots = np.where(self.ranked[places] == pane.created, self.order[places], -1)
        output = np.array([self.texts.get(text, -1) for text in pane.texts])[pane.text_of]
        if np.any((slots >= 0) & (output != self.text_of[slots])):
            raise ValueError("a query's requested output differs from that in a pane")
        return slots


# A pane with the slot of each of its codes.
_Source = tuple[WindowSegment, Pane, Ints]


def standing_results(
    parts: Sequence[tuple[WindowSegment, Pane, Live]],
    queries: Mapping[int, str],
    id_type: pa.DataType | None = None,
) -> tuple[pa.Table, pa.Table]:
    """Compute the aggregates and nearest points of standing queries from the panes of a window.

    ``parts`` has every segment of the window with a pane, and its live rows; ``queries`` has the
    requested outputs by created position. ``id_type`` is the type of the points' identifiers, for a
    window without segments.

    Results are in the order of the queries. Aggregates have a row for each query and function, also
    without points: numbers and booleans in ``number``, texts and ISO times in ``text``. Nearest
    points have a row for each point, by rank from 1; ties are broken by identifier.
    """
    known = _Queries.of(queries)
    sources: list[_Source] = []
    for segment, pane, live in parts:
        slots = known.slots_in(pane)
        codes = np.flatnonzero(slots >= 0)
        if not codes.size:
            continue
        if is_whole(segment, live):
            sources.append((segment, pane, slots))
        elif (rest := pane.alive(segment, live, codes)) is not None:
            sources.append((segment, rest, known.slots_in(rest)))
    ids = parts[0][0].ids.type if parts else (id_type or pa.int64())
    return _aggregates(known, sources), _nearest(known, sources, ids)


@dataclass(frozen=True, slots=True)
class _ResultRows:
    """Function and slot of each row of the result.

    The rows of function ``f`` are ``order[starts[f]:starts[f + 1]]``.
    """

    functions: tuple[Function, ...]
    labels: tuple[str, ...]
    slots: Ints
    functions_of: Ints
    order: Ints
    starts: Ints

    @classmethod
    def of(cls, queries: _Queries) -> _ResultRows:
        numbers: dict[Function, int] = {}
        labels: list[str] = []
        lists: list[list[int]] = []
        for text in queries.texts:
            spec = RequestedOutput.parse(text).aggregate
            lists.append([])
            for label, function in zip(spec.names, spec.functions, strict=True) if spec else ():
                if function not in numbers:
                    numbers[function] = len(numbers)
                    labels.append(label)
                lists[-1].append(numbers[function])
        flat = np.array([number for some in lists for number in some], np.int64)
        lengths = np.array([len(some) for some in lists], np.int64)
        begins = np.cumsum(lengths) - lengths
        sizes = lengths[queries.text_of]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if ends.size else 0
        shift = np.repeat(begins[queries.text_of] - (ends - sizes), sizes)
        functions_of = flat[np.arange(total) + shift]
        order = np.argsort(functions_of, kind="stable")
        starts = np.searchsorted(functions_of[order], np.arange(len(numbers) + 1))
        slots = np.repeat(np.arange(sizes.size), sizes)
        return cls(tuple(numbers), tuple(labels), slots, functions_of, order, starts)

    def rows_of(self, function: int) -> Ints:
        """Return the rows of a function."""
        return self.order[self.starts[function] : self.starts[function + 1]]


def _aggregates(queries: _Queries, sources: list[_Source]) -> pa.Table:
    result = _ResultRows.of(queries)
    total = result.slots.size
    numbers, known = np.zeros(total), np.zeros(total, bool)
    texts: list[str | None] | None = None
    by_key: dict[Key, list[int]] = {}
    for number, (name, column, _) in enumerate(result.functions):
        by_key.setdefault(key_of(name, column), []).append(number)
    for key, functions in by_key.items():
        rows = [result.rows_of(number) for number in functions]
        mine = np.unique(np.concatenate([result.slots[some] for some in rows]))
        place_of = np.full(queries.created.size, -1)
        place_of[mine] = np.arange(mine.size)
        grouped = _merged(key, sources, place_of, mine.size)
        for number, at in zip(functions, rows, strict=True):
            name, _, parameter = result.functions[number]
            if grouped is None:
                empty = FUNCTIONS[name].empty
                numbers[at], known[at] = empty or 0.0, empty is not None
                continue
            values: Values = grouped.results(name, parameter)
            places = place_of[result.slots[at]]
            if values.numbers is not None:
                numbers[at], known[at] = values.numbers[places], values.known[places]
            if values.texts is not None:
                texts = [None] * total if texts is None else texts
                for row, place in zip(at.tolist(), places.tolist(), strict=True):
                    texts[row] = values.texts[place] if values.known[place] else None
    columns = [
        as_arrow(queries.created[result.slots]),
        pa.array(result.labels, pa.string()).take(as_arrow(result.functions_of)),
        _nullable(numbers, known),
        pa.nulls(total, pa.string()) if texts is None else pa.array(texts, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=AGGREGATES)


def _merged(key: Key, sources: list[_Source], place_of: Ints, size: int) -> Any | None:
    """Merge an accumulator of all sources; return None if no source has it."""
    parts = []
    for _, pane, slots_of in sources:
        part = pane.part(key)
        if part is None:
            continue
        codes, grouped = part
        slots = slots_of[codes]
        picks = np.flatnonzero((slots >= 0) & (place_of[slots] >= 0))
        if picks.size:
            parts.append(Contribution(grouped, picks, place_of[slots[picks]]))
    return type(parts[0].grouped).merged(parts, size) if parts else None


def _nullable(numbers: Floats, known: Mask) -> pa.Array:
    bits = np.packbits(known, bitorder="little")
    buffers = [pa.py_buffer(bits), pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.float64(), numbers.size, buffers)


def _nearest(queries: _Queries, sources: list[_Source], id_type: pa.DataType) -> pa.Table:
    schema = NEAREST.set(2, pa.field("point_id", id_type))
    limits = np.array(
        [RequestedOutput.parse(text).nearest or 0 for text in queries.texts], np.int64
    )
    found = []
    for segment, pane, slots_of in sources:
        if pane.near is not None:
            codes, near = pane.near
            slots = slots_of[codes]
            mine = np.flatnonzero(slots >= 0)
            found.append((segment, slots[mine], near.row[mine], near.distance[mine]))
    if not sum(slots.size for _, slots, _, _ in found):
        return schema.empty_table()
    limit_of = limits[queries.text_of]
    owners = np.concatenate([slots for _, slots, _, _ in found])
    kept = _near_enough(owners, np.concatenate([far for _, _, _, far in found]), limit_of)
    columns = _gather(found, kept)
    owners, ids, distances = owners[kept], columns["point_id"], columns["distance"]
    order, ranks = first_nearest(owners, np.asarray(distances), ids, limit_of)
    columns["created_position"] = as_arrow(queries.created[owners])
    chosen = {name: column.take(as_arrow(order)) for name, column in columns.items()}
    chosen["rank"] = as_arrow((ranks + 1).astype(np.int32))
    return pa.Table.from_arrays([chosen[name] for name in schema.names], schema=schema)


_Found = tuple[WindowSegment, Ints, NDArray[np.int32], Floats]


def _near_enough(owners: Ints, distances: Floats, limit_of: Ints) -> Mask:
    """Return whether each point may be among its query's nearest, up to ties in distance."""
    narrow = owners.astype(np.uint16) if limit_of.size <= NARROW_MAX else owners
    order = np.argsort(narrow, kind="stable")
    starts = np.searchsorted(owners[order], np.arange(limit_of.size + 1))
    kept = np.empty(owners.size, bool)
    ordered = frozen(distances[order])
    kept[order] = not_farther_than_kth(ordered, frozen(starts), frozen(limit_of))
    return kept


def _gather(found: Iterable[_Found], kept: Mask) -> dict[str, pa.Array]:
    """Return the columns of the selected points, in the order of their segments."""
    pieces: dict[str, list[pa.Array]] = {}
    begin = 0
    for segment, slots, rows, distances in found:
        mine = np.flatnonzero(kept[begin : begin + slots.size])
        begin += slots.size
        block = segment.take(rows[mine].astype(np.int64), ())
        for name, values in (
            ("point_id", block.ids),
            ("event_time", as_arrow(block.time)),
            ("distance", as_arrow(distances[mine])),
            ("x", as_arrow(block.x)),
            ("y", as_arrow(block.y)),
        ):
            pieces.setdefault(name, []).append(values)
    return {name: pa.concat_arrays(arrays) for name, arrays in pieces.items()}
