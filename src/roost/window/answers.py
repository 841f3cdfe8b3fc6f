"""Answers of standing queries: panes of all live batches merged.

Every batch asks this of thousands of queries and dozens of panes, so nothing here loops over
queries but the rounding of sums and the merging of sketches. For each accumulator that some query
needs, the panes' arrays are added into one; each function then reads its results from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.kernel.arrays import as_arrow
from roost.window.aggregate import FUNCTIONS, Function
from roost.window.evaluate import Live
from roost.window.grouped import Part, Values, Whole
from roost.window.grouped_loops import frozen, not_farther_than_kth
from roost.window.panes import Key, Pane, first_nearest, is_whole, key_of
from roost.window.segment import WindowSegment
from roost.window.wants import Wants

NARROW_MAX = 1 << 16  # numpy sorts 16-bit numbers in linear time

AGGREGATES = pa.schema(
    [
        ("born", pa.int64()),
        ("name", pa.string()),
        ("number", pa.float64()),
        ("text", pa.string()),
    ]
)


def nearest_schema(id_type: pa.DataType) -> pa.Schema:
    """Columns of the nearest points."""
    return pa.schema(
        [
            ("born", pa.int64()),
            ("rank", pa.int32()),
            ("point_id", id_type),
            ("event_time", pa.int64()),
            ("distance", pa.float64()),
            ("x", pa.float64()),
            ("y", pa.float64()),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The queries, in the order they were given; a query's place is its *slot*."""

    born: Whole
    text_of: Whole
    texts: dict[str, int]
    by_born: Whole  # slots in order of born
    ranked: Whole  # born in order

    @classmethod
    def of(cls, queries: Mapping[int, str]) -> _Asked:
        born = np.fromiter(queries, np.int64, len(queries))
        texts = {text: place for place, text in enumerate(dict.fromkeys(queries.values()))}
        text_of = np.fromiter((texts[text] for text in queries.values()), np.int64, len(queries))
        by_born = np.argsort(born, kind="stable")
        return cls(born, text_of, texts, by_born, born[by_born])

    def slots_in(self, pane: Pane) -> Whole:
        """Slot of each code of a pane, -1 where a query is not asked."""
        if not self.born.size:
            return np.full(pane.born.size, -1)
        places = np.searchsorted(self.ranked, pane.born)
        places = np.minimum(places, self.ranked.size - 1)
        slots = np.where(self.ranked[places] == pane.born, self.by_born[places], -1)
        wanted = np.array([self.texts.get(text, -1) for text in pane.texts])[pane.text_of]
        if np.any((slots >= 0) & (wanted != self.text_of[slots])):
            raise ValueError("a query never changes what it wants; a new one has a new number")
        return slots


@dataclass(frozen=True, slots=True)
class _Source:
    """A pane with the slot of each of its codes."""

    segment: WindowSegment
    pane: Pane
    slots: Whole


def answers(
    parts: Sequence[tuple[WindowSegment, Pane, Live]],
    queries: Mapping[int, str],
    id_type: pa.DataType | None = None,
) -> tuple[pa.Table, pa.Table]:
    """Answer standing queries from the panes of a window.

    Parameters
    ----------
    parts
        Every segment of the window that has a pane, and what of it is live.
    queries
        What each query wants by its number; only these are answered, in this order.
    id_type
        Type of the points' identifiers, for a window without segments; integers unless said.

    Returns
    -------
    aggregates, nearest
        The first has a row for each query and function, also where no point is: numbers and
        booleans in ``number``, texts and ISO times in ``text``. The second has a row for each
        point that is among a query's nearest, by rank from 1; ties go by identifier.

    Raises
    ------
    ValueError
        If a query wanted something else when a pane was made.
    """
    asked = _Asked.of(queries)
    sources = []
    for segment, pane, live in parts:
        slots = asked.slots_in(pane)
        codes = np.flatnonzero(slots >= 0)
        if not codes.size:
            continue
        if is_whole(segment, live):
            sources.append(_Source(segment, pane, slots))
        elif (rest := pane.alive(segment, live, codes)) is not None:
            sources.append(_Source(segment, rest, asked.slots_in(rest)))
    known = parts[0][0].ids.type if parts else (id_type or pa.int64())
    return _aggregates(asked, sources), _nearest(asked, sources, known)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which row of the result is for which function and slot.

    ``order`` has the rows by function: those of function ``f`` are
    ``order[starts[f]:starts[f + 1]]``.
    """

    functions: tuple[Function, ...]
    labels: tuple[str, ...]
    slots: Whole
    functions_of: Whole
    order: Whole
    starts: Whole

    @classmethod
    def of(cls, asked: _Asked) -> _Layout:
        numbers: dict[Function, int] = {}
        labels: list[str] = []
        lists: list[list[int]] = []
        for text in asked.texts:
            spec = Wants.parse(text).aggregate
            lists.append([])
            for label, function in zip(spec.names, spec.functions, strict=True) if spec else ():
                if function not in numbers:
                    numbers[function] = len(numbers)
                    labels.append(label)
                lists[-1].append(numbers[function])
        flat = np.array([number for some in lists for number in some], np.int64)
        lengths = np.array([len(some) for some in lists], np.int64)
        begins = np.cumsum(lengths) - lengths
        sizes = lengths[asked.text_of]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if ends.size else 0
        shift = np.repeat(begins[asked.text_of] - (ends - sizes), sizes)
        functions_of = flat[np.arange(total) + shift]
        order = np.argsort(functions_of, kind="stable")
        starts = np.searchsorted(functions_of[order], np.arange(len(numbers) + 1))
        slots = np.repeat(np.arange(sizes.size), sizes)
        return cls(tuple(numbers), tuple(labels), slots, functions_of, order, starts)

    def rows_of(self, function: int) -> Whole:
        """Rows of the result that are for a function."""
        return self.order[self.starts[function] : self.starts[function + 1]]


def _aggregates(asked: _Asked, sources: list[_Source]) -> pa.Table:
    layout = _Layout.of(asked)
    total = layout.slots.size
    numbers, known = np.zeros(total), np.zeros(total, bool)
    texts: list[str | None] | None = None
    by_key: dict[Key, list[int]] = {}
    for number, (name, column, _) in enumerate(layout.functions):
        by_key.setdefault(key_of(name, column), []).append(number)
    for key, members in by_key.items():
        rows = [layout.rows_of(number) for number in members]
        mine = np.unique(np.concatenate([layout.slots[some] for some in rows]))
        place_of = np.full(asked.born.size, -1)
        place_of[mine] = np.arange(mine.size)
        grouped = _merged(key, sources, place_of, mine.size)
        for number, at in zip(members, rows, strict=True):
            name, _, parameter = layout.functions[number]
            if grouped is None:
                empty = FUNCTIONS[name].empty
                numbers[at], known[at] = empty or 0.0, empty is not None
                continue
            values: Values = grouped.answers(name, parameter)
            places = place_of[layout.slots[at]]
            if values.numbers is not None:
                numbers[at], known[at] = values.numbers[places], values.known[places]
            if values.texts is not None:
                texts = [None] * total if texts is None else texts
                for row, place in zip(at.tolist(), places.tolist(), strict=True):
                    texts[row] = values.texts[place] if values.known[place] else None
    columns = [
        as_arrow(asked.born[layout.slots]),
        pa.array(layout.labels, pa.string()).take(as_arrow(layout.functions_of)),
        _nullable(numbers, known),
        pa.nulls(total, pa.string()) if texts is None else pa.array(texts, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=AGGREGATES)


def _merged(key: Key, sources: list[_Source], place_of: Whole, size: int) -> Any | None:
    """Merge an accumulator of all sources; None where no source has one."""
    parts = []
    for source in sources:
        part = source.pane.part(key)
        if part is None:
            continue
        codes, grouped = part
        slots = source.slots[codes]
        picks = np.flatnonzero((slots >= 0) & (place_of[slots] >= 0))
        if picks.size:
            parts.append(Part(grouped, picks, place_of[slots[picks]]))
    return type(parts[0].grouped).merged(parts, size) if parts else None


def _nullable(numbers: NDArray[np.float64], known: NDArray[np.bool_]) -> pa.Array:
    bits = np.packbits(known, bitorder="little")
    buffers = [pa.py_buffer(bits), pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.float64(), numbers.size, buffers)


def _nearest(asked: _Asked, sources: list[_Source], id_type: pa.DataType) -> pa.Table:
    schema = nearest_schema(id_type)
    limits = np.array([Wants.parse(text).nearest or 0 for text in asked.texts], np.int64)
    found = []
    for source in sources:
        near = source.pane.near
        if near is not None:
            slots = source.slots[near.codes]
            mine = np.flatnonzero(slots >= 0)
            found.append((source.segment, slots[mine], near.rows[mine], near.distances[mine]))
    if not sum(slots.size for _, slots, _, _ in found):
        return schema.empty_table()
    limit_of = limits[asked.text_of]
    owners = np.concatenate([slots for _, slots, _, _ in found])
    kept = _near_enough(owners, np.concatenate([far for _, _, _, far in found]), limit_of)
    columns = _gather(found, kept)
    owners, ids, distances = owners[kept], columns["point_id"], columns["distance"]
    order, ranks = first_nearest(owners, np.asarray(distances), ids, limit_of)
    columns["born"] = as_arrow(asked.born[owners])
    chosen = {name: column.take(as_arrow(order)) for name, column in columns.items()}
    chosen["rank"] = as_arrow((ranks + 1).astype(np.int32))
    return pa.Table.from_arrays([chosen[name] for name in schema.names], schema=schema)


_Found = tuple[WindowSegment, Whole, NDArray[np.int32], NDArray[np.float64]]


def _near_enough(
    owners: Whole, distances: NDArray[np.float64], limit_of: Whole
) -> NDArray[np.bool_]:
    """Whether each point may be among its owner's nearest; settles all but ties, without names."""
    narrow = owners.astype(np.uint16) if limit_of.size <= NARROW_MAX else owners
    order = np.argsort(narrow, kind="stable")
    starts = np.searchsorted(owners[order], np.arange(limit_of.size + 1))
    kept = np.empty(owners.size, bool)
    ordered = frozen(distances[order])
    kept[order] = not_farther_than_kth(ordered, frozen(starts), frozen(limit_of))
    return kept


def _gather(found: Iterable[_Found], kept: NDArray[np.bool_]) -> dict[str, pa.Array]:
    """Columns of the points that are left, in the order of their segments."""
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
