"""Admission of requests: every rule that a request must pass, over whole blocks.

The query log stores all requests in order. Admission applies a block of the log to the set of live
queries and is a pure function of the two, so every process and every replay refuses the same
requests for the same reasons. Rules about one request run on columns. Rules that involve other
requests (duplicates, owners, terminations) run row by row, but only for identifiers that occur more
than once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import shapely
from numpy.typing import NDArray

from roost.errors import ConfigError, PredicateError
from roost.kernel.ids import hash_ids
from roost.kernel.segment import circle_images, query_schema
from roost.model.columns import convert, record_at, times_as_int
from roost.model.records import BOX, CIRCLE, POLYGON, TIME_MAX, TIME_MIN, Reason
from roost.model.schemas import SHAPE_FIELDS, request_schema
from roost.model.space import CIRCLE_LON_LIMIT, Coordinates, Outside, Space
from roost.predicate import check, parse
from roost.window import RequestedOutput, parse_aggregates

POLYGON_VERTICES_MAX = 10_000


@dataclass(frozen=True)
class Rules:
    """Rules that a request must pass.

    Parameters
    ----------
    space
        Bounds and coordinates.
    id_type, time_type
        Types of query identifiers and of event times in this stream.
    attributes
        Attributes of the points; None if the schema of the stream is not known.
    polygon_vertices_max
        Polygons with more vertices are refused.
    keep_born
        Whether to store the log position of each registration, for the guard.
    window
        Whether queries may request aggregates or nearest points of a window.
    window_attributes
        Attributes that the window stores; None if not known.
    point_id_type
        Type of the points' identifiers.
    """

    space: Space
    id_type: pa.DataType
    time_type: pa.DataType
    attributes: pa.Schema | None = None
    polygon_vertices_max: int = POLYGON_VERTICES_MAX
    window: bool = True
    window_attributes: pa.Schema | None = None
    point_id_type: pa.DataType = field(default_factory=pa.string)
    keep_born: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """An earlier query with the identifier of a request."""

    place: tuple[int, int]  # segment number and slot
    user_id: str
    live_from: int
    live_until: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused request: the fields of its dead-letter record."""

    position: int
    reason: Reason
    detail: str
    record: str


@dataclass(frozen=True)
class Admission:
    """Result of admission: new queries, terminated ones and refused requests."""

    queries: pa.Table
    ended: dict[tuple[int, int], int] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)

    def placed(self, positions: NDArray[np.int64]) -> Admission:
        """Return the same result for requests at these positions instead of 0, 1, and so on."""
        place = self.queries.schema.get_field_index("created_position")
        born = pa.array(positions).take(self.queries["created_position"].combine_chunks())
        queries = self.queries.set_column(place, self.queries.schema.field(place), born)
        refused = [replace(r, position=int(positions[r.position])) for r in self.refused]
        return Admission(queries, self.ended, refused)


# Queries that a point may still match, by the index of their identifier in the array, in the order
# of their registration. Unknown identifiers are absent.
Lookup = Callable[[pa.Array], Mapping[int, Sequence[Known]]]


class _Block:
    """Columns of a block, and the first fault of each row."""

    def __init__(self, table: pa.Table, rules: Rules) -> None:
        self.raw = table
        self.size = table.num_rows
        self.reasons: dict[int, tuple[Reason, str]] = {}
        self.open = np.ones(self.size, bool)
        if "malformed" in table.column_names:
            texts = table["malformed"].to_pylist()
            for row, text in enumerate(texts):
                if text is not None:
                    self.refuse(row, Reason.MALFORMED, "not a request record")
        schema = request_schema(rules.id_type, rules.time_type)
        columns: dict[str, pa.Array] = {}
        for name, data_type in zip(schema.names, schema.types, strict=True):
            if name not in table.column_names:
                columns[name] = pa.nulls(self.size, data_type)
                continue
            columns[name], bad = convert(table[name], data_type)
            self.refuse_where(bad, Reason.WRONG_TYPE, f"{name} takes {data_type}")
        self.columns = columns
        self._valid = {name: self._mask(pc.is_valid(array)) for name, array in columns.items()}

    @staticmethod
    def _mask(array: pa.Array) -> NDArray[np.bool_]:
        return np.asarray(array.to_numpy(zero_copy_only=False), bool)

    def has(self, name: str) -> NDArray[np.bool_]:
        return self._valid[name]

    def numbers(self, name: str) -> NDArray[np.float64]:
        values = self.columns[name].to_numpy(zero_copy_only=False)
        return np.asarray(values, np.float64)

    def is_text(self, name: str, text: str) -> NDArray[np.bool_]:
        return self._mask(pc.equal(self.columns[name], text).fill_null(False))

    def refuse(self, row: int, reason: Reason, detail: str) -> None:
        if self.open[row]:
            self.open[row] = False
            self.reasons[row] = (reason, detail)

    def refuse_where(self, rows: NDArray[np.bool_], reason: Reason, detail: str) -> None:
        for row in np.flatnonzero(rows & self.open).tolist():
            self.refuse(row, reason, detail)

    def _message(self, row: int) -> str | None:
        """Return the text of a message that is not a request."""
        if "malformed" not in self.raw.column_names:
            return None
        text: str | None = self.raw["malformed"][row].as_py()
        return text

    def refused(self, first_position: int) -> list[Refused]:
        result = []
        for row, (reason, detail) in sorted(self.reasons.items()):
            text = self._message(row) or record_at(self.raw, row)
            result.append(Refused(first_position + row, reason, detail, text))
        return result


def _check_fields(block: _Block) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    register = block.is_text("op", "register")
    terminate = block.is_text("op", "terminate")
    block.refuse_where(~block.has("op"), Reason.MISSING_FIELD, "op is missing")
    takes = "op takes register or terminate"
    block.refuse_where(~(register | terminate), Reason.UNKNOWN_OP, takes)
    for name in ("query_id", "user_id"):
        block.refuse_where(~block.has(name), Reason.MISSING_FIELD, f"{name} is missing")
    return register, terminate


def _kinds(block: _Block, register: NDArray[np.bool_]) -> NDArray[np.int8]:
    any_box = np.logical_or.reduce([block.has(name) for name in SHAPE_FIELDS[:4]])
    any_circle = np.logical_or.reduce([block.has(name) for name in SHAPE_FIELDS[4:]])
    any_polygon = block.has("wkt")
    shapes = any_box.astype(np.int8) + any_circle + any_polygon
    one = "takes x0,y0,x1,y1 or cx,cy,radius or wkt"
    block.refuse_where(register & (shapes == 0), Reason.MISSING_FIELD, f"no shape: {one}")
    block.refuse_where(register & (shapes > 1), Reason.MALFORMED, f"more than one shape: {one}")
    for present, names in ((any_box, SHAPE_FIELDS[:4]), (any_circle, SHAPE_FIELDS[4:])):
        for name in names:
            lacking = register & present & ~block.has(name)
            block.refuse_where(lacking, Reason.MISSING_FIELD, f"{name} is missing")
    kinds = np.where(any_circle, CIRCLE, np.where(any_polygon, POLYGON, BOX))
    return kinds.astype(np.int8)


def _check_boxes(block: _Block, mine: NDArray[np.bool_]) -> None:
    x0, y0, x1, y1 = (block.numbers(name) for name in SHAPE_FIELDS[:4])
    finite = np.isfinite(x0) & np.isfinite(y0) & np.isfinite(x1) & np.isfinite(y1)
    block.refuse_where(mine & ~finite, Reason.NOT_FINITE, "a box takes finite numbers")
    block.refuse_where(mine & (x0 > x1), Reason.INVERTED_BOX, "x0 is greater than x1")
    block.refuse_where(mine & (y0 > y1), Reason.INVERTED_BOX, "y0 is greater than y1")


def _check_circles(block: _Block, mine: NDArray[np.bool_], space: Space) -> None:
    cx, cy, radius = (block.numbers(name) for name in SHAPE_FIELDS[4:])
    finite = np.isfinite(cx) & np.isfinite(cy) & np.isfinite(radius)
    block.refuse_where(mine & ~finite, Reason.NOT_FINITE, "a circle takes finite numbers")
    block.refuse_where(mine & (radius < 0), Reason.BAD_RADIUS, "radius takes a number from 0 up")
    if space.coordinates is Coordinates.LONLAT:
        takes = "cy is a latitude from -90 to 90"
        block.refuse_where(mine & (np.abs(cy) > 90), Reason.LATITUDE, takes)
        takes = f"cx is a longitude from -{CIRCLE_LON_LIMIT:g} to {CIRCLE_LON_LIMIT:g}"
        block.refuse_where(mine & (np.abs(cx) > CIRCLE_LON_LIMIT), Reason.LONGITUDE, takes)


def read_polygon(text: str) -> shapely.Geometry | None:
    """Parse a polygon from WKT or GeoJSON; None if the text is neither."""
    try:
        with np.errstate(invalid="ignore"):  # NaN is refused later, with its own reason
            if text.lstrip().startswith("{"):
                return shapely.from_geojson(text)
            return shapely.from_wkt(text)
    except (shapely.errors.ShapelyError, ValueError, TypeError):
        return None


def _check_polygons(
    block: _Block, mine: NDArray[np.bool_], vertices_max: int
) -> dict[int, shapely.Geometry]:
    geometries: dict[int, shapely.Geometry] = {}
    for row in np.flatnonzero(mine & block.open).tolist():
        text = block.columns["wkt"][row].as_py()
        geometry = read_polygon(text)
        if geometry is None:
            block.refuse(row, Reason.MALFORMED, "wkt is neither WKT nor GeoJSON")
        elif geometry.geom_type not in ("Polygon", "MultiPolygon") or geometry.is_empty:
            takes = f"takes a polygon or multipolygon, got {geometry.geom_type}"
            block.refuse(row, Reason.INVALID_POLYGON, takes)
        elif not np.isfinite(shapely.get_coordinates(geometry)).all():
            block.refuse(row, Reason.NOT_FINITE, "a polygon takes finite numbers")
        elif shapely.get_num_coordinates(geometry) > vertices_max:
            found = int(shapely.get_num_coordinates(geometry))
            takes = f"{found} vertices, takes at most {vertices_max}"
            block.refuse(row, Reason.OVERSIZED_POLYGON, takes)
        elif not shapely.is_valid(geometry):
            block.refuse(row, Reason.INVALID_POLYGON, shapely.is_valid_reason(geometry))
        else:
            geometries[row] = shapely.force_2d(geometry)
    return geometries


def _check_bounds(
    block: _Block,
    register: NDArray[np.bool_],
    kinds: NDArray[np.int8],
    geometries: dict[int, shapely.Geometry],
    space: Space,
) -> None:
    """Refuse queries entirely outside the bounds, if the space is configured so."""
    if space.outside is not Outside.DEAD:
        return
    b = space.bounds
    x0, y0, x1, y1, cx, cy, radius = (block.numbers(name) for name in SHAPE_FIELDS)
    outside = (x1 < b.x0) | (x0 > b.x1) | (y1 < b.y0) | (y0 > b.y1)
    reach = {row: [geometry.bounds] for row, geometry in geometries.items()}
    for row in np.flatnonzero(register & block.open & (kinds == CIRCLE)).tolist():
        reach[row] = circle_images(float(cx[row]), float(cy[row]), float(radius[row]), space)
    for row, images in reach.items():
        outside[row] = all(
            right < b.x0 or left > b.x1 or high < b.y0 or low > b.y1
            for left, low, right, high in images
        )
    block.refuse_where(register & outside, Reason.OUT_OF_BOUNDS, "lies outside the bounds")


def _check_predicates(block: _Block, register: NDArray[np.bool_], rules: Rules) -> None:
    verdicts: dict[str, str | None] = {}
    for row in np.flatnonzero(register & block.open & block.has("predicate")).tolist():
        text = block.columns["predicate"][row].as_py()
        if text not in verdicts:
            verdicts[text] = _predicate_fault(text, rules.attributes)
        fault = verdicts[text]
        if fault is not None:
            block.refuse(row, Reason.BAD_PREDICATE, fault)


def _predicate_fault(text: str, attributes: pa.Schema | None) -> str | None:
    try:
        expression = parse(text)
        if attributes is not None:
            check(expression, attributes)
    except PredicateError as error:
        return str(error)
    return None


def _check_wants(
    block: _Block, register: NDArray[np.bool_], kinds: NDArray[np.int8], rules: Rules
) -> dict[int, str]:
    """Return the aggregates or nearest points that rows request, as canonical text."""
    aggregate, nearest = register & block.has("aggregate"), register & block.has("nearest")
    both = "takes aggregate or nearest, not both"
    block.refuse_where(aggregate & nearest, Reason.MALFORMED, both)
    if not rules.window:
        takes = "aggregates and nearest points take a run with a window"
        block.refuse_where(aggregate | nearest, Reason.NO_WINDOW, takes)
    takes = "nearest points take a circle: the place, and how far they may be"
    block.refuse_where(nearest & (kinds != CIRCLE), Reason.BAD_NEAREST, takes)
    texts: dict[int, str] = {}
    for row in np.flatnonzero((aggregate | nearest) & block.open).tolist():
        reason = Reason.BAD_AGGREGATE if aggregate[row] else Reason.BAD_NEAREST
        try:
            wants = _wants(
                block.columns["aggregate"][row].as_py(), block.columns["nearest"][row].as_py()
            )
            if rules.window_attributes is not None:
                wants.check(rules.window_attributes, rules.point_id_type)
            texts[row] = wants.text
        except ConfigError as error:
            block.refuse(row, reason, str(error))
    return texts


@lru_cache(maxsize=1 << 12)
def _wants(aggregate: str | None, nearest: int | None) -> RequestedOutput:
    return RequestedOutput(None if aggregate is None else parse_aggregates(aggregate), nearest)


def _times(block: _Block, name: str, default: int) -> NDArray[np.int64]:
    values = times_as_int(block.columns[name])
    return np.where(block.has(name), values, default)


def admit(
    table: pa.Table,
    first_position: int,
    rules: Rules,
    lookup: Lookup,
) -> Admission:
    """Admit or refuse every request of a block.

    Parameters
    ----------
    table
        Requests in log order.
    first_position
        Position of the first request in the log, for dead-letter records.
    rules
        Rules that a request must pass.
    lookup
        Returns the earlier queries of some identifiers.
    """
    block = _Block(table, rules)
    register, terminate = _check_fields(block)
    kinds = _kinds(block, register)
    _check_boxes(block, register & (kinds == BOX))
    _check_circles(block, register & (kinds == CIRCLE), rules.space)
    polygons = register & (kinds == POLYGON)
    geometries = _check_polygons(block, polygons, rules.polygon_vertices_max)
    _check_bounds(block, register, kinds, geometries, rules.space)
    _check_predicates(block, register, rules)
    wants = _check_wants(block, register, kinds, rules)

    live_from = _times(block, "at", TIME_MIN)
    live_until = _times(block, "expires_at", TIME_MAX)
    ended_at = _times(block, "at", TIME_MIN)
    taken, ended = _settle_ids(
        block,
        register & block.open,
        terminate & block.open,
        live_from,
        live_until,
        ended_at,
        lookup,
    )
    queries = _query_table(block, taken, kinds, geometries, live_from, live_until, rules)
    if wants or rules.keep_born:
        rows = np.flatnonzero(taken & block.open)
        queries = _with_wants(queries, rows, wants, first_position, rules.keep_born)
    return Admission(queries, ended, block.refused(first_position))


def _settle_ids(
    block: _Block,
    register: NDArray[np.bool_],
    terminate: NDArray[np.bool_],
    live_from: NDArray[np.int64],
    live_until: NDArray[np.int64],
    ended_at: NDArray[np.int64],
    lookup: Lookup,
) -> tuple[NDArray[np.bool_], dict[tuple[int, int], int]]:
    """Apply the rules that involve other requests, in log order."""
    ids = block.columns["query_id"]
    open_rows = np.flatnonzero(register | terminate)
    known = {int(open_rows[k]): lives for k, lives in lookup(ids.take(open_rows)).items()}
    _, inverse, counts = np.unique(
        hash_ids(ids.take(open_rows)), return_inverse=True, return_counts=True
    )
    plain = register[open_rows] & (counts[inverse] == 1)
    plain &= ~np.isin(open_rows, np.fromiter(known, np.int64, len(known)))
    taken = register.copy()
    ended: dict[tuple[int, int], int] = {}
    # Queries of an identifier, each terminated before the next begins; those of this block have
    # segment number -1 and their row.
    lives: dict[Any, list[Known]] = {}
    for row in open_rows[~plain].tolist():
        query_id = ids[row].as_py()
        user_id = block.columns["user_id"][row].as_py()
        mine = lives.setdefault(query_id, list(known.get(row, ())))
        if register[row]:
            if mine and mine[-1].live_until > live_from[row]:
                detail = f"query {query_id!r} is already registered"
                block.refuse(row, Reason.DUPLICATE_QUERY, detail)
            elif live_from[row] < live_until[row]:
                mine.append(Known((-1, row), user_id, int(live_from[row]), int(live_until[row])))
        elif not mine:
            block.refuse(row, Reason.UNKNOWN_QUERY, f"no query {query_id!r} to terminate")
        elif mine[-1].user_id != user_id:
            detail = f"query {query_id!r} belongs to someone else"
            block.refuse(row, Reason.NOT_OWNER, detail)
        else:
            last = mine.pop()
            until = min(last.live_until, int(ended_at[row]))
            if until > last.live_from:
                mine.append(replace(last, live_until=until))
            segment, place = last.place
            if segment >= 0:
                ended[last.place] = until
            else:
                live_until[place] = until
                taken[place] = until > last.live_from
    return taken, ended


def _query_table(
    block: _Block,
    taken: NDArray[np.bool_],
    kinds: NDArray[np.int8],
    geometries: dict[int, shapely.Geometry],
    live_from: NDArray[np.int64],
    live_until: NDArray[np.int64],
    rules: Rules,
) -> pa.Table:
    rows = np.flatnonzero(taken & block.open)
    circle = kinds[rows] == CIRCLE
    corners = {name: block.numbers(name)[rows] for name in SHAPE_FIELDS}
    corners["x0"] = np.where(circle, corners["cx"], corners["x0"])
    corners["y0"] = np.where(circle, corners["cy"], corners["y0"])
    wkb: list[bytes | None] | pa.Array = pa.nulls(rows.size, pa.binary())
    if geometries:
        wkb = [None] * rows.size
        for place, row in enumerate(rows.tolist()):
            geometry = geometries.get(row)
            if geometry is not None:
                wkb[place] = shapely.to_wkb(geometry)
                low_x, low_y, high_x, high_y = geometry.bounds
                corners["x0"][place], corners["y0"][place] = low_x, low_y
                corners["x1"][place], corners["y1"][place] = high_x, high_y
    take = pa.array(rows)
    columns: dict[str, Any] = {
        "query_id": block.columns["query_id"].take(take),
        "user_id": block.columns["user_id"].take(take),
        "kind": kinds[rows],
        **{name: corners[name] for name in ("x0", "y0", "x1", "y1", "radius")},
        "wkb": pa.array(wkb, pa.binary()),
        "predicate": block.columns["predicate"].take(take),
        "live_from": live_from[rows],
        "live_until": live_until[rows],
        "output": pa.nulls(rows.size, pa.string()),
        "created_position": pa.nulls(rows.size, pa.int64()),
    }
    schema = query_schema(rules.id_type)
    return pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)


def _with_wants(
    queries: pa.Table,
    rows: NDArray[np.int64],
    wants: dict[int, str],
    first_position: int,
    keep_born: bool,
) -> pa.Table:
    """Add the requested results; the log position of a registration is a unique name."""
    texts = [wants.get(row) for row in rows.tolist()]
    unnamed = np.array([text is None and not keep_born for text in texts], bool)
    born = pa.array(rows + first_position, mask=unnamed)
    for name, column in (("output", pa.array(texts, pa.string())), ("created_position", born)):
        place = queries.schema.get_field_index(name)
        queries = queries.set_column(place, queries.schema.field(place), column)
    return queries
