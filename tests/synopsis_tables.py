"""Tables for the tests of the synopsis, and the oracle: brute force over their rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import shapely
from hypothesis import strategies as st
from numpy.typing import NDArray

from roost.model.records import Box, Circle, Polygon
from roost.model.space import haversine_m
from roost.synopsis import Scope, SynopsisSpec

DAY_US = 86_400_000_000
START_US = 1_704_067_200_000_000  # 2024-01-01
DAYS = 40
FEATURES = ("temp", "rain", "wind", "level", "fixed", "kind", "wet")
NUMBERS = ("temp", "rain", "wind", "level", "fixed")

COMPARED = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


def make_table(seed: int, rows: int = 4_000) -> pa.Table:
    """Rows of fixed stations, two of them beside the antimeridian, and of moving points."""
    rng = np.random.default_rng(seed)
    stations = np.array([[10.0, 50.0], [10.4, 50.1], [11.0, 49.0], [179.9, 0.2], [-179.9, 0.1]])
    at = stations[rng.integers(0, len(stations), rows)]
    moving = rng.random(rows) < 0.2
    at = np.where(moving[:, None], rng.uniform([9.0, 48.0], [12.0, 51.0], (rows, 2)), at)
    hours = np.sort(rng.integers(0, DAYS * 24, rows))
    times = START_US + hours * 3_600_000_000
    times = np.where(moving, times + rng.integers(0, 3_600_000_000, rows), times)
    temp = 15 + 8 * np.sin(hours / 24 * 2 * np.pi) + rng.normal(0, 3, rows)
    rain = np.where(rng.random(rows) < 0.8, 0.0, rng.exponential(3, rows))
    wind = rng.gamma(2.0, 2.0, rows)
    level = (temp * 10).astype(int) + rng.integers(0, 5, rows)
    kinds = np.array(["sun", "rain", "fog", *(f"other{k}" for k in range(30))])
    kind = kinds[np.minimum(rng.geometric(0.3, rows) - 1, len(kinds) - 1)]

    def nulls(values: Any, type_: pa.DataType, share: float) -> pa.Array:
        return pa.array(values, type_, mask=rng.random(rows) < share)

    return pa.table(
        {
            "lon": at[:, 0],
            "lat": at[:, 1],
            "event_time": pa.array(times, pa.timestamp("us", "UTC")),
            "temp": nulls(np.round(temp, 1), pa.float32(), 0.1),
            "rain": nulls(np.round(rain, 1), pa.float32(), 0.3),
            "wind": nulls(wind, pa.float64(), 0.0),
            "level": nulls(level, pa.int32(), 0.05),
            "fixed": nulls(np.full(rows, 7.25), pa.float64(), 0.0),
            "kind": nulls(kind, pa.string(), 0.1),
            "wet": nulls(rain > 0, pa.bool_(), 0.1),
        }
    )


def make_spec(table: pa.Table, **settings: Any) -> SynopsisSpec:
    given = {"bins": 16, "prefix_bits": 4, "place_bits": 16, "bucket_days": 7, "slots": 4}
    return SynopsisSpec.of(table.schema, FEATURES, **given | {"interval_days": 1} | settings)


@dataclass(frozen=True)
class Rows:
    """Columns of a table as numpy, NaN or None for null."""

    table: pa.Table

    def column(self, name: str) -> NDArray[Any]:
        values = self.table[name].combine_chunks()
        if pa.types.is_string(values.type) or pa.types.is_boolean(values.type):
            return np.array(values.to_pylist(), object)
        if pa.types.is_timestamp(values.type):
            return np.asarray(values.cast(pa.int64()))
        return np.asarray(values.cast(pa.float64()).fill_null(math.nan))

    def inside(self, scope: Scope) -> NDArray[np.bool_]:
        """Which rows are in a scope, without its predicate."""
        x, y, time = (self.column(name) for name in ("lon", "lat", "event_time"))
        found = np.ones(x.size, bool)
        shape = scope.shape
        if isinstance(shape, Box):
            found &= (shape.x0 <= x) & (x <= shape.x1) & (shape.y0 <= y) & (y <= shape.y1)
        elif isinstance(shape, Circle):
            found &= haversine_m(shape.cx, shape.cy, x, y) <= shape.radius
        elif isinstance(shape, Polygon):
            found &= shapely.intersects_xy(shapely.from_wkt(shape.text), x, y)
        if scope.since is not None:
            found &= time >= scope.since
        if scope.until is not None:
            found &= time < scope.until
        if scope.hours is not None:
            start, stop = scope.hours
            hour = time % DAY_US // 3_600_000_000
            after, before = hour >= start, hour < stop
            found &= (after & before) if start < stop else (after | before)
        return found


def draw_values(rows: Rows) -> st.SearchStrategy[tuple[str, NDArray[np.bool_]]]:
    """A condition as text, and for which rows it is true."""

    @st.composite
    def condition(draw: st.DrawFn) -> tuple[str, NDArray[np.bool_]]:
        if draw(st.integers(0, 4)) == 0:
            first, second = draw(st.tuples(*(st.sampled_from(NUMBERS),) * 2))
            a, b = rows.column(first), rows.column(second)
            operator, compare = draw(st.sampled_from(list(COMPARED.items())))
            with np.errstate(invalid="ignore"):
                holds = compare(a, b) & np.isfinite(a) & np.isfinite(b)
                if draw(st.booleans()):
                    return f"{first} {operator} {second}", holds
                holds = ~compare(a, b) & np.isfinite(a) & np.isfinite(b)
                return f"not ({first} {operator} {second})", holds
        name = draw(st.sampled_from(FEATURES))
        values = rows.column(name)
        if name == "kind":
            words = draw(st.lists(st.sampled_from(["sun", "fog", "other3", "none"]), min_size=1))
            quoted = ", ".join(f"'{word}'" for word in words)
            return f"kind in ({quoted})", np.isin(values.astype(str), words)
        if name == "wet":
            return "wet", values == True  # noqa: E712 - null is neither
        known = values[np.isfinite(values)]
        constant = float(draw(st.sampled_from(known.tolist() or [0.0])))
        constant += draw(st.sampled_from([0.0, 0.0, 0.05, -1000.0]))
        operator = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "between", "is null"]))
        with np.errstate(invalid="ignore"):
            if operator == "is null":
                return f"{name} is null", np.isnan(values)
            if operator == "between":
                high = constant + draw(st.sampled_from([0.0, 2.5, 10.0]))
                text = f"{name} between {constant!r} and {high!r}"
                return text, (values >= constant) & (values <= high)
            apply = {
                "=": np.equal,
                "!=": lambda a, b: (a != b) & ~np.isnan(a),
                "<": np.less,
                "<=": np.less_equal,
                ">": np.greater,
                ">=": np.greater_equal,
            }[operator]
            return f"{name} {operator} {constant!r}", apply(values, constant)

    return condition()


@st.composite
def draw_scope(draw: st.DrawFn, rows: Rows) -> tuple[Scope, NDArray[np.bool_]]:
    """A scope, and which rows are inside."""
    x, y = draw(st.floats(9.0, 12.0)), draw(st.floats(48.0, 51.0))
    radius = draw(st.sampled_from([1_000.0, 50_000.0, 200_000.0, 1e7]))
    wkt = f"POLYGON (({x} {y}, {x + 2} {y}, {x} {y + 2}, {x} {y}))"
    shapes = [
        None,
        Circle(x, y, radius),
        Circle(10.0, 50.0, radius),
        Circle(180.0, 0.0, radius),
        Box(x, y, x + 1.0, y + 1.0),
        Box(0.0, 0.0, 0.5, 0.5),
        Polygon(wkt),
    ]
    shape = draw(st.sampled_from(shapes))
    since = until = hours = predicate = None
    if draw(st.booleans()):
        since = START_US + draw(st.integers(-10, DAYS * 24)) * 3_600_000_000
        since += draw(st.sampled_from([0, 0, 1_800_000_000]))
    if draw(st.booleans()):
        until = (since or START_US - DAY_US) + draw(st.integers(1, DAYS * 24)) * 3_600_000_000
    if draw(st.booleans()):
        start = draw(st.integers(0, 23))
        hours = (start, draw(st.integers(1, 24).filter(lambda stop: stop != start)))
    scope = Scope(shape, since, until, hours)
    found = rows.inside(scope)
    conditions = draw(st.lists(draw_values(rows), max_size=2))
    if conditions:
        joiner = draw(st.sampled_from(["and", "or"]))
        predicate = f" {joiner} ".join(text for text, _ in conditions)
        merge = np.logical_and if joiner == "and" else np.logical_or
        found &= merge.reduce([holds for _, holds in conditions]).astype(bool)
        scope = Scope(shape, since, until, hours, predicate)
    return scope, found


def quantile(values: NDArray[np.float64], rank: float) -> float:
    return float(np.quantile(values, rank))
