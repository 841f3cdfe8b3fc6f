"""Questions about the window as it is now: which stored points they need, and their answers.

A question needs the partitions of the present plan that its shape overlaps, and those that they
were made from, as far as these have points in the window. Of each segment file with such a
partition a task reads the zones that the shape touches. Answers of the parts are merged.

Everything here is done without Spark; :mod:`roost.engine.snapshot` does it in tasks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import StateError
from roost.model.columns import one_array
from roost.model.records import Box, Circle, Instant, Polygon, Query
from roost.model.schemas import TIMESTAMP
from roost.model.space import Space
from roost.window import (
    AggregateSpec,
    Live,
    State,
    WindowSegment,
    finish,
    merge,
    nearest,
    partial,
    select,
)
from roost.window.evaluate import shape_bounds
from roost.window.nearest import ZONES_AT_FIRST, ranked
from roost.window.segment import ZONE_ROWS, Bounds
from roost.window.view import WindowFile, WindowFiles, WindowView
from roost.workload.cells import query_ranges

EVERYWHERE = Box(-math.inf, -math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Question:
    """What somebody wants to know of the window.

    Parameters
    ----------
    shape
        Where to look; None looks everywhere.
    predicate
        Condition on the attributes, see ``docs/queries.md``.
    since, until
        Only points whose event time is in ``[since, until)``.
    aggregate
        Aggregates of the points, instead of the points.
    nearest
        Only so many points, nearest to the centre of the shape, which then is a circle; an
        infinite radius takes them from wherever they are.
    """

    shape: Box | Circle | Polygon | None = None
    predicate: str | None = None
    since: Instant | None = None
    until: Instant | None = None
    aggregate: AggregateSpec | None = None
    nearest: int | None = None

    @property
    def query(self) -> Query:
        """The same as a query, which tells what it selects."""
        shape = EVERYWHERE if self.shape is None else self.shape
        return Query("", shape, "", self.predicate, self.since, self.until)


@dataclass(frozen=True)
class Columns:
    """Names and types of the points' columns.

    Parameters
    ----------
    x, y, time, point_id
        Names in the source.
    id_type, time_type
        Types of identifiers and event times.
    attributes
        All attributes that the window keeps, those that are other names of the four included.
    """

    x: str
    y: str
    time: str
    point_id: str
    id_type: pa.DataType
    time_type: pa.DataType
    attributes: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        """Columns of points in an answer."""
        own = [
            (self.point_id, self.id_type),
            (self.time, self.time_type),
            (self.x, pa.float64()),
            (self.y, pa.float64()),
        ]
        return pa.schema([*own, *(self.attributes.field(name) for name in self.others)])

    @property
    def at_batch(self) -> str:
        """Name of the column with the batch of which an answer is true."""
        return free_name("at_batch", self.schema.names)

    @property
    def distance(self) -> str:
        """Name of the column with the distances of the nearest points."""
        return free_name("distance", self.schema.names)

    @property
    def others(self) -> list[str]:
        """Attributes beside the four."""
        own = (self.x, self.y, self.time, self.point_id)
        return [name for name in self.attributes.names if name not in own]


def free_name(name: str, taken: Collection[str]) -> str:
    """Lengthen a name until no column has it.

    Examples
    --------
    >>> free_name("distance", ["x", "distance"])
    'distance_'
    """
    while name in taken:
        name += "_"
    return name


@dataclass(frozen=True, slots=True)
class Part:
    """What a question needs of one segment file.

    Parameters
    ----------
    file
        The file.
    likely
        About how many of its points are near the shape.
    live
        What of it is live.
    partitions
        Which of its partitions, None for all.
    """

    file: str
    likely: int
    live: Live
    partitions: tuple[int, ...] | None


def needed_parts(
    view: WindowView, files: WindowFiles, space: Space, question: Question
) -> list[Part]:
    """Tell what a question needs of the window.

    Parameters
    ----------
    view
        The window.
    files
        Its files.
    space
        Where points are.
    question
        What is asked.
    """
    boxes = _boxes(question, space)
    wanted = None if boxes is None else _partitions(view, boxes, space)
    extent = view.extent
    parts = []
    for batch in view.live():
        needed = [(number, f) for number, f in enumerate(batch.files) if _touches(f, boxes, wanted)]
        if not needed:
            continue
        lives = view.lives(batch, files)
        for number, file in needed:
            if extent.time_after is None or file.time_max > extent.time_after:
                own = _own(file, wanted)
                likely = _likely(file, boxes, question.nearest)
                parts.append(Part(file.file, likely, lives[number], own))
    return parts


def _boxes(question: Question, space: Space) -> list[Bounds] | None:
    """Boxes around what a question asks for, None where it may ask for anything."""
    shape = question.shape
    if shape is None or (isinstance(shape, Circle) and math.isinf(shape.radius)):
        return None
    return shape_bounds(shape, space)


def _partitions(view: WindowView, boxes: list[Bounds], space: Space) -> set[int]:
    live = view.live_partitions()
    found: set[int] = set()
    corners = np.array(boxes, np.float64).reshape(-1, 4)
    for column0, row0, column1, row1 in query_ranges(space.grid, corners).tolist():
        cells = (column0, row0, column1, row1)
        found |= view.lineage.needed(view.lineage.present_in(cells), live, cells)
    return found


def _touches(file: WindowFile, boxes: list[Bounds] | None, wanted: set[int] | None) -> bool:
    if boxes is None or wanted is None:
        return True
    if wanted.isdisjoint(file.partitions):
        return False
    x0, y0, x1, y1 = file.bounds
    return any(
        left <= x1 and right >= x0 and low <= y1 and high >= y0 for left, low, right, high in boxes
    )


def _likely(file: WindowFile, boxes: list[Bounds] | None, k: int | None) -> int:
    """Guess how many points of a file are looked at, as if they were spread evenly."""
    if k is not None:
        # The nearest zones first, until they have enough.
        return min(file.points, k + ZONES_AT_FIRST * ZONE_ROWS)
    if boxes is None:
        return file.points
    x0, y0, x1, y1 = file.bounds
    share = 0.0
    for left, low, right, high in boxes:
        wide = (min(right, x1) - max(left, x0)) / (x1 - x0) if x1 > x0 else 1.0
        tall = (min(high, y1) - max(low, y0)) / (y1 - y0) if y1 > y0 else 1.0
        share += max(wide, 0.0) * max(tall, 0.0)
    return 1 + int(file.points * min(share, 1.0))


def _own(file: WindowFile, wanted: set[int] | None) -> tuple[int, ...] | None:
    if wanted is None:
        return None
    own = tuple(number for number in file.partitions if number in wanted)
    return None if len(own) == len(file.partitions) else own


def answer_parts(
    question: Question, columns: Columns, parts: Sequence[Part], files: WindowFiles
) -> State | pa.Table:
    """Answer a question from some parts, for :func:`merge_answers`."""
    if question.aggregate is not None:
        states = [State(question.aggregate, {})]
        for part in parts:
            segment = files.segment(part.file)
            rows = select(segment, question.query, part.live, part.partitions)
            if rows.size:
                states.append(partial(segment, rows, question.aggregate))
        return merge(states)
    if question.nearest is not None:
        return _near(question, columns, parts, files)
    return pa.Table.from_batches(_rows(question, columns, parts, files), columns.schema)


def points_schema(question: Question, columns: Columns) -> pa.Schema:
    """Columns of the points that a question is answered with."""
    schema = columns.schema
    return schema.append(pa.field(columns.distance, pa.float64())) if question.nearest else schema


def _taken(segment: WindowSegment, rows: NDArray[np.int64], columns: Columns) -> list[pa.Array]:
    block = segment.take(rows, columns.others)
    time = pa.array(block.time).cast(columns.time_type)
    return [block.ids, time, pa.array(block.x), pa.array(block.y), *block.attributes.values()]


def _rows(
    question: Question, columns: Columns, parts: Iterable[Part], files: WindowFiles
) -> Iterable[pa.RecordBatch]:
    for part in parts:
        segment = files.segment(part.file)
        rows = select(segment, question.query, part.live, part.partitions)
        if rows.size:
            yield pa.RecordBatch.from_arrays(_taken(segment, rows, columns), schema=columns.schema)


def _near(
    question: Question, columns: Columns, parts: Iterable[Part], files: WindowFiles
) -> pa.Table:
    circle, k = question.shape, question.nearest
    assert isinstance(circle, Circle) and k is not None
    schema = points_schema(question, columns)
    best: pa.Table = schema.empty_table()
    limit = circle.radius
    for part in parts:
        segment = files.segment(part.file)
        distances, rows = nearest(
            segment,
            circle.cx,
            circle.cy,
            k,
            part.live,
            question.predicate,
            part.partitions,
            limit,
        )
        if rows.size:
            arrays = [*_taken(segment, rows, columns), pa.array(distances)]
            best = _nearest_of([best, pa.table(arrays, schema=schema)], k, columns)
            if best.num_rows == k:
                limit = min(limit, best[columns.distance][k - 1].as_py())
    return best


def _nearest_of(tables: Sequence[pa.Table], k: int, columns: Columns) -> pa.Table:
    joined = pa.concat_tables(tables).combine_chunks()
    if not joined.num_rows:
        return joined
    distances = np.asarray(joined[columns.distance].to_numpy())
    return joined.take(pa.array(ranked(distances, one_array(joined[columns.point_id]))[:k]))


def merge_answers(
    question: Question, columns: Columns, answers: Sequence[State | pa.Table], batch_id: int
) -> pa.Table:
    """Make one answer of those of the parts; ``at_batch`` says of which batch it is true."""
    if question.aggregate is not None:
        states = [answer for answer in answers if isinstance(answer, State)]
        results = finish(merge([State(question.aggregate, {}), *states]))
        schema = _aggregate_schema(question.aggregate, columns)
        arrays = [_one(name, value, schema.field(name).type) for name, value in results.items()]
        table = pa.table(arrays, schema=schema)
    else:
        tables = [answer for answer in answers if isinstance(answer, pa.Table)]
        table = pa.concat_tables([points_schema(question, columns).empty_table(), *tables])
        if question.nearest is not None:
            table = _nearest_of([table], question.nearest, columns)
    return with_batch(table, columns, batch_id)


def _one(name: str, value: Any, kind: pa.DataType) -> pa.Array:
    try:
        whole = pa.types.is_timestamp(kind) and isinstance(value, int)
        return pa.array([value], pa.int64()).cast(kind) if whole else pa.array([value], kind)
    except (OverflowError, pa.ArrowInvalid) as error:
        raise StateError(f"{name} is {value}, more than {kind} holds") from error


def with_batch(table: pa.Table, columns: Columns, batch_id: int) -> pa.Table:
    """Add the batch of which an answer is true."""
    at = pa.array(np.full(table.num_rows, batch_id, np.int64))
    return table.add_column(0, columns.at_batch, at)


def _aggregate_schema(spec: AggregateSpec, columns: Columns) -> pa.Schema:
    schema = spec.result_schema(columns.attributes, columns.id_type)
    if columns.time_type != TIMESTAMP or "time" in columns.attributes.names:
        return schema
    for place, (name, column, _) in enumerate(spec.functions):
        if column == "time" and name in ("min", "max"):
            schema = schema.set(place, pa.field(schema.names[place], TIMESTAMP))
    return schema
