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
from roost.model.arrays import Ints, Mask
from roost.model.columns import convert, record_at, times_as_int
from roost.model.records import BOX, CIRCLE, POLYGON, TIME_MAX, TIME_MIN, DeadLetter, Reason
from roost.model.schemas import SHAPE_FIELDS, request_schema
from roost.model.space import CIRCLE_LON_LIMIT, Coordinates, Outside, Space
from roost.predicate import check, parse
from roost.window import RequestedOutput, parse_aggregates

POLYGON_VERTICES_MAX = 10_000


@dataclass(frozen=True)
class Rules:
    """Rules that a request must pass; None stands for attributes that are not known."""

    space: Space
    id_type: pa.DataType  # of queries
    time_type: pa.DataType
    attributes: pa.Schema | None = None  # of points
    polygon_vertices_max: int = POLYGON_VERTICES_MAX
    window: bool = True  # whether queries may request results over a window
    window_attributes: pa.Schema | None = None  # that the window stores
    point_id_type: pa.DataType = field(default_factory=pa.string)
    store_positions: bool = False  # of all registrations in the log, for guard and TrioStat


@dataclass(frozen=True, slots=True)
class Known:
    """An earlier query with the identifier of a request."""

    place: tuple[int, int]  # segment number and slot
    user_id: str
    live_from: int
    live_until: int


@dataclass(frozen=True)
class Admission:
    """Result of admission: new queries, terminated ones and refused requests."""

    queries: pa.Table
    ended: dict[tuple[int, int], int] = field(default_factory=dict)
    refused: list[DeadLetter] = field(default_factory=list)


# Queries that a point may still match, by the index of their identifier in the array, in the order
# of their registration. Unknown identifiers are absent.
Lookup = Callable[[pa.Array], Mapping[int, Sequence[Known]]]

Geometries = dict[int, shapely.Geometry]  # valid polygons by row


def _mask(array: pa.Array) -> Mask:
    return np.asarray(array.to_numpy(zero_copy_only=False), bool)


class _Requests:
    """Columns of a block of requests, and the first fault of each row."""

    def __init__(self, table: pa.Table, rules: Rules) -> None:
        self.raw = table
        self.size = table.num_rows
        self.reasons: dict[int, tuple[Reason, str]] = {}
        self.open = np.ones(self.size, bool)
        self.messages: list[str | None] = [None] * self.size  # that are not requests
        if "malformed" in table.column_names:
            self.messages = table["malformed"].to_pylist()
            unreadable = np.array([text is not None for text in self.messages], bool)
            self.refuse_where(unreadable, Reason.MALFORMED, "not a request record")
        schema = request_schema(rules.id_type, rules.time_type)
        self.columns: dict[str, pa.Array] = {}
        for name, data_type in zip(schema.names, schema.types, strict=True):
            if name not in table.column_names:
                self.columns[name] = pa.nulls(self.size, data_type)
                continue
            self.columns[name], bad = convert(table[name], data_type)
            self.refuse_where(bad, Reason.WRONG_TYPE, f"{name} takes {data_type}")
        self._valid = {name: _mask(array.is_valid()) for name, array in self.columns.items()}
        self.register, self.terminate = (
            _mask(pc.equal(self.columns["op"], op).fill_null(False))
            for op in ("register", "terminate")
        )
        circle = np.logical_or.reduce([self.has(name) for name in SHAPE_FIELDS[4:]])
        self.kinds = np.where(circle, CIRCLE, np.where(self.has("wkt"), POLYGON, BOX))
        self.start = self._times("at", TIME_MIN)
        self.end = self._times("expires_at", TIME_MAX)

    def has(self, name: str) -> Mask:
        return self._valid[name]

    def numbers(self, name: str) -> NDArray[np.float64]:
        values = self.columns[name].to_numpy(zero_copy_only=False)
        return np.asarray(values, np.float64)

    def _times(self, name: str, default: int) -> Ints:
        return np.where(self.has(name), times_as_int(self.columns[name]), default)

    def registers(self, kind: int) -> Mask:
        mask: Mask = self.register & (self.kinds == kind)
        return mask

    def refuse(self, row: int, reason: Reason, detail: str) -> None:
        if self.open[row]:
            self.open[row] = False
            self.reasons[row] = (reason, detail)

    def refuse_where(self, rows: Mask, reason: Reason, detail: str) -> None:
        for row in np.flatnonzero(rows & self.open).tolist():
            self.refuse(row, reason, detail)

    def refused(self, positions: Ints) -> list[DeadLetter]:
        return [
            DeadLetter(
                int(positions[row]), reason, detail, self.messages[row] or record_at(self.raw, row)
            )
            for row, (reason, detail) in sorted(self.reasons.items())
        ]


def _check_fields(requests: _Requests) -> None:
    register = requests.register
    requests.refuse_where(~requests.has("op"), Reason.MISSING_FIELD, "op is missing")
    takes = "op takes register or terminate"
    requests.refuse_where(~(register | requests.terminate), Reason.UNKNOWN_OP, takes)
    for name in ("query_id", "user_id"):
        requests.refuse_where(~requests.has(name), Reason.MISSING_FIELD, f"{name} is missing")
    families = (SHAPE_FIELDS[:4], SHAPE_FIELDS[4:], ("wkt",))
    present = [np.logical_or.reduce([requests.has(name) for name in names]) for names in families]
    shapes = np.sum(present, axis=0)
    one = "takes x0,y0,x1,y1 or cx,cy,radius or wkt"
    requests.refuse_where(register & (shapes == 0), Reason.MISSING_FIELD, f"no shape: {one}")
    requests.refuse_where(register & (shapes > 1), Reason.MALFORMED, f"more than one shape: {one}")
    for given, names in zip(present, families, strict=True):
        for name in names:
            lacking = register & given & ~requests.has(name)
            requests.refuse_where(lacking, Reason.MISSING_FIELD, f"{name} is missing")


def _check_boxes(requests: _Requests) -> None:
    boxes = requests.registers(BOX)
    x0, y0, x1, y1 = (requests.numbers(name) for name in SHAPE_FIELDS[:4])
    finite = np.isfinite(x0) & np.isfinite(y0) & np.isfinite(x1) & np.isfinite(y1)
    requests.refuse_where(boxes & ~finite, Reason.NOT_FINITE, "a box takes finite numbers")
    requests.refuse_where(boxes & (x0 > x1), Reason.INVERTED_BOX, "x0 is greater than x1")
    requests.refuse_where(boxes & (y0 > y1), Reason.INVERTED_BOX, "y0 is greater than y1")


def _check_circles(requests: _Requests, space: Space) -> None:
    circles = requests.registers(CIRCLE)
    cx, cy, radius = (requests.numbers(name) for name in SHAPE_FIELDS[4:])
    finite = np.isfinite(cx) & np.isfinite(cy) & np.isfinite(radius)
    requests.refuse_where(circles & ~finite, Reason.NOT_FINITE, "a circle takes finite numbers")
    requests.refuse_where(
        circles & (radius < 0), Reason.BAD_RADIUS, "radius takes a number from 0 up"
    )
    if space.coordinates is Coordinates.LONLAT:
        takes = "cy is a latitude from -90 to 90"
        requests.refuse_where(circles & (np.abs(cy) > 90), Reason.LATITUDE, takes)
        takes = f"cx is a longitude from -{CIRCLE_LON_LIMIT:g} to {CIRCLE_LON_LIMIT:g}"
        requests.refuse_where(circles & (np.abs(cx) > CIRCLE_LON_LIMIT), Reason.LONGITUDE, takes)


def read_polygon(text: str) -> shapely.Geometry | None:
    """Parse a polygon from WKT or GeoJSON; None if the text is neither."""
    try:
        with np.errstate(invalid="ignore"):  # NaN is refused later, with its own reason
            if text.lstrip().startswith("{"):
                return shapely.from_geojson(text)
            return shapely.from_wkt(text)
    except (shapely.errors.ShapelyError, ValueError, TypeError):
        return None


def _check_polygons(requests: _Requests, vertices_max: int) -> Geometries:
    geometries: Geometries = {}
    for row in np.flatnonzero(requests.registers(POLYGON) & requests.open).tolist():
        geometry = read_polygon(requests.columns["wkt"][row].as_py())
        if geometry is None:
            requests.refuse(row, Reason.MALFORMED, "wkt is neither WKT nor GeoJSON")
        elif geometry.geom_type not in ("Polygon", "MultiPolygon") or geometry.is_empty:
            takes = f"takes a polygon or multipolygon, got {geometry.geom_type}"
            requests.refuse(row, Reason.INVALID_POLYGON, takes)
        elif not np.isfinite(shapely.get_coordinates(geometry)).all():
            requests.refuse(row, Reason.NOT_FINITE, "a polygon takes finite numbers")
        elif shapely.get_num_coordinates(geometry) > vertices_max:
            found = int(shapely.get_num_coordinates(geometry))
            takes = f"{found} vertices, takes at most {vertices_max}"
            requests.refuse(row, Reason.OVERSIZED_POLYGON, takes)
        elif not shapely.is_valid(geometry):
            requests.refuse(row, Reason.INVALID_POLYGON, shapely.is_valid_reason(geometry))
        else:
            geometries[row] = shapely.force_2d(geometry)
    return geometries


def _check_bounds(requests: _Requests, geometries: Geometries, space: Space) -> None:
    """Refuse queries entirely outside the bounds, if the space is configured so."""
    if space.outside is not Outside.DEAD:
        return
    b = space.bounds
    x0, y0, x1, y1, cx, cy, radius = (requests.numbers(name) for name in SHAPE_FIELDS)
    outside = (x1 < b.x0) | (x0 > b.x1) | (y1 < b.y0) | (y0 > b.y1)
    reach = {row: [geometry.bounds] for row, geometry in geometries.items()}
    for row in np.flatnonzero(requests.registers(CIRCLE) & requests.open).tolist():
        reach[row] = circle_images(float(cx[row]), float(cy[row]), float(radius[row]), space)
    for row, images in reach.items():
        outside[row] = all(
            right < b.x0 or left > b.x1 or high < b.y0 or low > b.y1
            for left, low, right, high in images
        )
    selected = requests.register & outside
    requests.refuse_where(selected, Reason.OUT_OF_BOUNDS, "lies outside the bounds")


def _check_predicates(requests: _Requests, attributes: pa.Schema | None) -> None:
    faults: dict[str, str | None] = {}
    selected = requests.register & requests.open & requests.has("predicate")
    for row in np.flatnonzero(selected).tolist():
        text = requests.columns["predicate"][row].as_py()
        if text not in faults:
            faults[text] = _predicate_fault(text, attributes)
        fault = faults[text]
        if fault is not None:
            requests.refuse(row, Reason.BAD_PREDICATE, fault)


def _predicate_fault(text: str, attributes: pa.Schema | None) -> str | None:
    try:
        expression = parse(text)
        if attributes is not None:
            check(expression, attributes)
    except PredicateError as error:
        return str(error)
    return None


def _check_outputs(requests: _Requests, rules: Rules) -> dict[int, str]:
    """Return the aggregates or nearest points that rows request, as canonical text."""
    aggregate = requests.register & requests.has("aggregate")
    nearest = requests.register & requests.has("nearest")
    both = "takes aggregate or nearest, not both"
    requests.refuse_where(aggregate & nearest, Reason.MALFORMED, both)
    if not rules.window:
        takes = "aggregates and nearest points require a run with a window"
        requests.refuse_where(aggregate | nearest, Reason.NO_WINDOW, takes)
    takes = "nearest points require a circle: its centre and the maximum distance"
    requests.refuse_where(nearest & (requests.kinds != CIRCLE), Reason.BAD_NEAREST, takes)
    outputs: dict[int, str] = {}
    for row in np.flatnonzero((aggregate | nearest) & requests.open).tolist():
        try:
            output = _requested_output(
                requests.columns["aggregate"][row].as_py(), requests.columns["nearest"][row].as_py()
            )
            if rules.window_attributes is not None:
                output.check(rules.window_attributes, rules.point_id_type)
            outputs[row] = output.text
        except ConfigError as error:
            reason = Reason.BAD_AGGREGATE if aggregate[row] else Reason.BAD_NEAREST
            requests.refuse(row, reason, str(error))
    return outputs


@lru_cache(maxsize=1 << 12)
def _requested_output(aggregate: str | None, nearest: int | None) -> RequestedOutput:
    return RequestedOutput(None if aggregate is None else parse_aggregates(aggregate), nearest)


def admit(
    table: pa.Table,
    rules: Rules,
    lookup: Lookup = lambda ids: {},
    positions: Ints | None = None,
) -> Admission:
    """Admit or refuse every request of a block, in log order.

    ``lookup`` finds earlier queries; ``positions`` are those of the requests in the log, by default
    from 0 on.
    """
    requests = _Requests(table, rules)
    if positions is None:
        positions = np.arange(requests.size)
    _check_fields(requests)
    _check_boxes(requests)
    _check_circles(requests, rules.space)
    geometries = _check_polygons(requests, rules.polygon_vertices_max)
    _check_bounds(requests, geometries, rules.space)
    _check_predicates(requests, rules.attributes)
    outputs = _check_outputs(requests, rules)
    taken, ended = _settle_ids(requests, lookup)
    rows = np.flatnonzero(taken & requests.open)
    texts = pa.nulls(rows.size, pa.string())
    if outputs:
        texts = pa.array([outputs.get(row) for row in rows.tolist()], pa.string())
    # The position of a registration is a unique name of its query.
    named = _mask(texts.is_valid()) | rules.store_positions
    columns = _shape_columns(requests, rows, geometries) | {
        name: requests.columns[name].take(pa.array(rows))
        for name in ("query_id", "user_id", "predicate")
    }
    columns |= {
        "live_from": requests.start[rows],
        "live_until": requests.end[rows],
        "output": texts,
        "created_position": pa.array(positions[rows], mask=~named),
    }
    schema = query_schema(rules.id_type)
    queries = pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)
    return Admission(queries, ended, requests.refused(positions))


def _settle_ids(requests: _Requests, lookup: Lookup) -> tuple[Mask, dict[tuple[int, int], int]]:
    """Apply the rules that involve other requests, in log order.

    Returns the rows that become queries, and the ends of earlier queries by place. A query that is
    terminated in the same block ends earlier.
    """
    ids, register = requests.columns["query_id"], requests.register
    taken = register & requests.open
    open_rows = np.flatnonzero(taken | (requests.terminate & requests.open))
    known = {int(open_rows[k]): queries for k, queries in lookup(ids.take(open_rows)).items()}
    _, inverse, counts = np.unique(
        hash_ids(ids.take(open_rows)), return_inverse=True, return_counts=True
    )
    alone = register[open_rows] & (counts[inverse] == 1)
    alone &= ~np.isin(open_rows, np.fromiter(known, np.int64, len(known)))
    ended: dict[tuple[int, int], int] = {}
    # Queries of an identifier, each terminated before the next begins; those of this block have
    # segment number -1 and their row.
    by_id: dict[Any, list[Known]] = {}
    for row in open_rows[~alone].tolist():
        query_id = ids[row].as_py()
        user_id = requests.columns["user_id"][row].as_py()
        start, end = int(requests.start[row]), int(requests.end[row])
        same = by_id.setdefault(query_id, list(known.get(row, ())))
        if register[row]:
            if same and same[-1].live_until > start:
                detail = f"query {query_id!r} is already registered"
                requests.refuse(row, Reason.DUPLICATE_QUERY, detail)
            elif start < end:
                same.append(Known((-1, row), user_id, start, end))
        elif not same:
            requests.refuse(row, Reason.UNKNOWN_QUERY, f"no query {query_id!r} to terminate")
        elif same[-1].user_id != user_id:
            detail = f"query {query_id!r} belongs to another user"
            requests.refuse(row, Reason.NOT_OWNER, detail)
        else:
            last = same.pop()
            until = min(last.live_until, start)
            if until > last.live_from:
                same.append(replace(last, live_until=until))
            segment, place = last.place
            if segment >= 0:
                ended[last.place] = until
            else:
                requests.end[place] = until
                taken[place] = until > last.live_from
    return taken, ended


def _shape_columns(requests: _Requests, rows: Ints, geometries: Geometries) -> dict[str, Any]:
    kinds = requests.kinds[rows]
    circle = kinds == CIRCLE
    columns: dict[str, Any] = {name: requests.numbers(name)[rows] for name in SHAPE_FIELDS}
    columns["x0"] = np.where(circle, columns["cx"], columns["x0"])
    columns["y0"] = np.where(circle, columns["cy"], columns["y0"])
    columns |= {"kind": kinds, "wkb": pa.nulls(rows.size, pa.binary())}
    if geometries:
        shapes = np.array([geometries.get(row) for row in rows.tolist()], object)
        columns["wkb"] = shapely.to_wkb(shapes)
        bounds = shapely.bounds(shapes)
        for k, name in enumerate(("x0", "y0", "x1", "y1")):
            columns[name] = np.where(kinds == POLYGON, bounds[:, k], columns[name])
    return columns
