"""Which columns of a source are the coordinates, the time and the identifier."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from roost.errors import ConfigError
from roost.model.columns import decoded_type
from roost.model.schemas import TIMESTAMP, id_type_of, time_type_of
from roost.model.settings import RunConfig
from roost.model.space import CIRCLE_LON_LIMIT, Coordinates, Rect, Space
from roost.stages.decode import MALFORMED, ROW, PointSchema
from roost.window import Alias

X_NAMES = ("lon", "x", "longitude", "lng")
Y_NAMES = ("lat", "y", "latitude")
LONLAT_NAMES = ("lon", "longitude", "lng")
WORLD = Rect(-180.0, -90.0, 180.0, 90.0)
# Quantiles of a sample that become the bounds: outliers would widen the cells, and the edge cells
# extend to them.
BOUND_QUANTILES = (0.001, 0.999)


def _find(names: list[str], given: str | None, usual: tuple[str, ...], key: str) -> str:
    if given is not None and given not in names:
        raise ConfigError(key, given, f"a column of the points: {', '.join(names)}")
    found = next((name for name in (given, *usual) if name in names), None)
    if found is None:
        expected = f"the name of a column, since the points have none of {', '.join(usual)}"
        raise ConfigError(key, None, expected)
    return found


def point_schema(schema: pa.Schema, config: RunConfig, *, numbered: bool) -> PointSchema:
    """Find the columns of a source; ``numbered`` sources need no identifiers."""
    own = [field for field in schema if field.name not in (ROW, MALFORMED)]
    names = [field.name for field in own]
    x = _find(names, config.points.x, X_NAMES, "points.x")
    y = _find(names, config.points.y, Y_NAMES, "points.y")
    time = _find(names, config.points.time, (), "points.time")
    point_id = config.points.id or ("id" if "id" in names else None)
    if point_id is None and not numbered:
        raise ConfigError("points.id", None, "the name of a column with identifiers")
    id_type = pa.int64()
    if point_id is not None:
        _find(names, point_id, (), "points.id")
        id_type = id_type_of(schema.field(point_id).type, "points.id")
    return PointSchema(
        x=x,
        y=y,
        time=time,
        point_id=point_id,
        id_type=id_type,
        time_type=time_type_of(schema.field(time).type, "points.time"),
        attributes=pa.schema([field.with_type(decoded_type(field.type)) for field in own]),
    )


def message_schema(config: RunConfig) -> pa.Schema:
    """Return the columns of JSON messages: coordinates, time, identifier, declared attributes."""
    fields: dict[str, pa.DataType] = {
        config.points.x or "lon": pa.float64(),
        config.points.y or "lat": pa.float64(),
        config.points.time: TIMESTAMP,
        config.points.id or "id": pa.string(),
    }
    for name, text in config.points.attributes.items():
        try:
            fields[name] = pa.type_for_alias(text)
        except ValueError:
            expected = "a type such as string, double, int64, bool"
            raise ConfigError(f"points.attributes.{name}", text, expected) from None
    return pa.schema(list(fields.items()))


def space_for(config: RunConfig, points: PointSchema, sample: pa.Table | None) -> Space:
    """Return the space of a run: as configured, else estimated from a sample."""
    coordinates = config.space.coordinates
    if coordinates is None:
        lonlat = points.x in LONLAT_NAMES
        coordinates = Coordinates.LONLAT if lonlat else Coordinates.PLANE
    bounds = config.space.bounds
    if bounds is None:
        bounds = _estimated_bounds(points, sample, coordinates)
    return Space(bounds, *config.space.grid, coordinates, config.space.outside)


def _estimated_bounds(
    points: PointSchema, sample: pa.Table | None, coordinates: Coordinates
) -> Rect:
    if sample is None or sample.num_rows == 0:
        if coordinates is Coordinates.LONLAT:
            return WORLD
        raise ConfigError("space.bounds", None, "x0,y0,x1,y1 where there is no sample of points")
    edges = []
    for name in (points.x, points.y):
        values = sample[name].to_numpy()
        try:
            numbers = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            raise ConfigError("space.bounds", None, f"x0,y0,x1,y1 ({name} is text)") from None
        numbers = numbers[np.isfinite(numbers)]
        if coordinates is Coordinates.LONLAT:
            numbers = numbers[np.abs(numbers) <= CIRCLE_LON_LIMIT]
        low, high = np.quantile(numbers, BOUND_QUANTILES) if numbers.size else (0.0, 1.0)
        if not low < high:
            low, high = low - 0.5, high + 0.5
        edges.append((float(low), float(high)))
    (x0, x1), (y0, y1) = edges
    return Rect(x0, y0, x1, y1)


def time_unit(points: PointSchema) -> int:
    """Return the length of a second in event time; 1 if event times are integers."""
    return 1_000_000 if points.time_type == TIMESTAMP else 1


def window_attributes(config: RunConfig, points: PointSchema) -> pa.Schema:
    """Return the attributes of the window: coordinates, time, identifier and those configured."""
    known = points.attributes
    if config.window.attributes is None:
        return known
    for name in config.window.attributes:
        if name not in known.names:
            expected = f"attributes of the points: {', '.join(known.names)}"
            raise ConfigError("window.attributes", name, expected)
    stored = {points.x, points.y, points.time, points.point_id, *config.window.attributes}
    return pa.schema([field for field in known if field.name in stored])


def aliases_of(points: PointSchema, stored: pa.Schema) -> dict[str, Alias]:
    """Return the attributes that equal a column that every window segment has."""
    moment = points.time_type == TIMESTAMP
    own = [
        (points.x, pa.float64(), Alias.X),
        (points.y, pa.float64(), Alias.Y),
        (points.time, points.time_type, Alias.MOMENT if moment else Alias.NUMBER),
        (points.point_id, points.id_type, Alias.ID),
    ]
    return {
        name: alias
        for name, kind, alias in own
        if name is not None and stored.field(name).type == kind
    }
