"""Aggregates in one pass and merged equal brute force; sketches are within their bounds."""

from __future__ import annotations

import datetime as dt
import math
import pickle
import random
import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_points import PLANE, TYPES, Point, random_points, segment_of

from properties import examples
from roost.errors import ConfigError
from roost.model.schemas import PointBlock
from roost.window import State, WindowSegment, build
from roost.window.aggregate import AggregateSpec, finish, merge, partial

EVERYTHING = AggregateSpec(
    (
        ("count", None, None),
        *((name, "fare", None) for name in ("count", "sum", "avg", "min", "max", "stddev")),
        *((name, "seats", None) for name in ("sum", "avg", "min", "max", "stddev", "distinct")),
        *((name, "base", None) for name in ("count", "min", "max", "distinct")),
        *((name, "ok", None) for name in ("min", "max", "distinct")),
        *((name, "seen", None) for name in ("min", "max", "distinct")),
        *((name, "time", None) for name in ("min", "max", "sum")),
        ("distinct", "id", None),
        ("distinct", "fare", None),
        ("quantile", "x", 0.0),
        ("quantile", "x", 0.5),
        ("quantile", "seats", 0.9),
    )
)


def brute_force(points: list[Point], spec: AggregateSpec) -> dict[str, Any]:
    results = {}
    for label, (name, column, parameter) in zip(spec.names, spec.functions, strict=True):
        if column is None:
            results[label] = len(points)
            continue
        values = [p[column] for p in points if p[column] is not None]
        results[label] = _one(name, values, parameter)
        if column == "seen" and name != "distinct" and values:
            moment = dt.timedelta(microseconds=results[label])
            results[label] = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + moment
    return results


def _one(name: str, values: list[Any], parameter: float | None) -> Any:
    if name in ("count", "distinct"):
        return len(values) if name == "count" else len(set(values))
    if not values:
        return None
    if name == "stddev":
        return statistics.stdev(map(Fraction, values)) if len(values) > 1 else None
    if name == "quantile":
        assert parameter is not None
        return float(sorted(values)[max(math.ceil(parameter * len(values)), 1) - 1])
    if name in ("min", "max"):
        return min(values) if name == "min" else max(values)
    total = sum(map(Fraction, values))
    if name == "avg":
        return float(total / len(values))
    return int(total) if isinstance(values[0], int) else float(total)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for label, value in wanted.items():
        if label.startswith("stddev") and value is not None:
            assert found[label] == pytest.approx(float(value), rel=1e-9)
        else:
            assert found[label] == value, label
            assert type(found[label]) is type(value), label


def copied(state: State) -> State:
    """Return the state as another process receives it."""
    found: State = pickle.loads(pickle.dumps(state))
    return found


def all_rows(segment: WindowSegment) -> Any:
    return np.arange(segment.size)


@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 5))
@examples(60)
def test_merged_parts_equal_one_pass_and_brute_force(seed: int, size: int, parts: int) -> None:
    rng = random.Random(seed)
    points = random_points(rng, size, PLANE)
    wanted = brute_force(points, EVERYTHING)
    whole = segment_of(points, PLANE)
    assert_equal(finish(partial(whole, all_rows(whole), EVERYTHING)), wanted)
    dealt: list[list[Point]] = [[] for _ in range(parts)]
    for point in points:
        rng.choice(dealt).append(point)
    segments = [segment_of(part, PLANE) for part in dealt]
    states = [partial(segment, all_rows(segment), EVERYTHING) for segment in segments]
    states.append(State(EVERYTHING, {}))
    states = [copied(state) for state in states]
    rng.shuffle(states)
    while len(states) > 1:  # in any order, and in any grouping
        chosen = states[: rng.randint(2, len(states))]
        states = [*states[len(chosen) :], copied(merge(chosen))]
    assert_equal(finish(states[0]), wanted)


def test_only_selected_rows_are_aggregated() -> None:
    points = random_points(random.Random(5), 500, PLANE)
    segment = segment_of(points, PLANE)
    rows = segment.rows_in((0.0, 0.0, 7.0, 7.0))
    inside = [p for p in points if 0 <= p["x"] <= 7 and 0 <= p["y"] <= 7]
    functions = [f for f in EVERYTHING.functions if f[0] not in ("distinct", "quantile")]
    spec = AggregateSpec(tuple(functions))
    assert 50 < rows.size < 450
    assert_equal(finish(partial(segment, rows, spec)), brute_force(inside, spec))


def test_aggregates_without_values() -> None:
    found = finish(State(EVERYTHING, {}))
    assert {found[label] for label in found if label.startswith(("count", "distinct"))} == {0}
    others = [found[label] for label in found if not label.startswith(("count", "distinct"))]
    assert set(others) == {None}
    with pytest.raises(ValueError, match="merge needs"):
        merge([])
    other = AggregateSpec((("count", None, None),))
    with pytest.raises(ValueError, match="merge needs"):
        merge([State(EVERYTHING, {}), State(other, {})])


def numbers_segment(column: pa.Array) -> WindowSegment:
    size = len(column)
    rng = np.random.default_rng(0)
    block = PointBlock(
        rng.random(size), rng.random(size), np.arange(size), pa.array(range(size)), {"v": column}
    )
    cells = np.zeros(size, np.int32)
    return WindowSegment.open(build(block, cells, cells, np.array([0]), PLANE))


def of_column(column: pa.Array, *functions: str, more: pa.Array | None = None) -> dict[str, Any]:
    """Aggregate a column, and merge it with the aggregates of another one."""
    segments = [numbers_segment(some) for some in (column, more) if some is not None]
    spec = AggregateSpec(tuple((name, "v", None) for name in functions))
    states = [copied(partial(segment, all_rows(segment), spec)) for segment in segments]
    return {label.split("(")[0]: value for label, value in finish(merge(states)).items()}


def test_nan_is_the_greatest_number_and_makes_sums_nan() -> None:
    found = of_column(pa.array([1.0, math.nan, -2.0]), "sum", "avg", "min", "max", "stddev")
    assert found["min"] == -2.0
    assert all(math.isnan(found[name]) for name in ("sum", "avg", "max", "stddev"))
    found = of_column(pa.array([math.nan]), "min", "max", more=pa.array([4.0, 5.0]))
    assert found["min"] == 4.0 and math.isnan(found["max"])
    assert math.isnan(of_column(pa.array([math.nan]), "min")["min"])
    assert of_column(pa.array([math.inf, 1.0]), "sum", "avg") == {"sum": math.inf, "avg": math.inf}
    found = of_column(pa.array([math.inf]), "sum", more=pa.array([-math.inf]))
    assert math.isnan(found["sum"])


def test_other_types_of_columns() -> None:
    wide = pa.array([2**64 - 1, 2**64 - 2, None], pa.uint64())
    found = of_column(wide, "sum", "min", "max", "distinct")
    assert found == {"sum": 2**65 - 3, "min": 2**64 - 2, "max": 2**64 - 1, "distinct": 2}
    found = of_column(pa.array([1.5, None, 2.5], pa.float32()), "sum", "min", "distinct")
    assert found == {"sum": 4.0, "min": 1.5, "distinct": 2}
    texts = pa.array(["b", "a", None, "b"]).dictionary_encode()
    found = of_column(texts, "count", "min", "max", "distinct")
    assert found == {"count": 3, "min": "a", "max": "b", "distinct": 2}
    days = pa.array([dt.date(2020, 1, 2), dt.date(2019, 1, 1)], pa.date32())
    found = of_column(days, "min", "max", "distinct")
    assert found == {"min": dt.date(2019, 1, 1), "max": dt.date(2020, 1, 2), "distinct": 2}
    fine = pa.array([1_000_000_001, 2_000_000_000], pa.timestamp("ns"))
    assert of_column(fine, "min")["min"] == dt.datetime(1970, 1, 1, 0, 0, 1)  # noqa: DTZ001
    money = pa.array(["1.10", "2.20"]).cast(pa.decimal128(9, 2))
    found = of_column(money, "sum", "max", "distinct")
    assert found["sum"] == pytest.approx(3.3)
    assert str(found["max"]) == "2.20" and found["distinct"] == 2


FINITE = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30)


@given(FINITE, FINITE)
def test_sums_of_doubles_are_exact(values: list[float], more: list[float]) -> None:
    total = sum(map(Fraction, values + more), Fraction(0))
    found = of_column(pa.array(values), "sum", "avg", more=pa.array(more))
    assert found["avg"] == float(total / len(values + more))
    try:
        rounded = float(total)
    except OverflowError:
        rounded = math.inf if total > 0 else -math.inf
    assert found["sum"] == rounded


WHOLE = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20)


@given(WHOLE, WHOLE)
def test_sums_of_integers_are_exact(values: list[int], more: list[int]) -> None:
    for kind, change in (
        (pa.int64(), lambda value: value),
        (pa.uint64(), lambda value: value + 2**63),
        (pa.int8(), lambda value: value % 100),
    ):
        one, other = ([change(value) for value in some] for some in (values, more))
        found = of_column(pa.array(one, kind), "sum", more=pa.array(other, kind))
        assert found == {"sum": sum(one) + sum(other)}


@pytest.mark.parametrize("parts", [1, 7])
def test_sketches_are_within_their_error_bounds(parts: int) -> None:
    rng = np.random.default_rng(9)
    values = rng.normal(size=60_000)
    names = rng.integers(0, 20_000, values.size)
    ranks = (0.01, 0.25, 0.5, 0.75, 0.99)
    spec = AggregateSpec((("distinct", "v", None), *(("quantile", "w", q) for q in ranks)))
    states = []
    for v, w in zip(np.array_split(names, parts), np.array_split(values, parts), strict=True):
        size = v.size
        xy = np.zeros(size)
        attributes = {"v": pa.array(v), "w": pa.array(w)}
        block = PointBlock(xy, xy, np.arange(size), pa.array(range(size)), attributes)
        cells = np.zeros(size, np.int32)
        segment = WindowSegment.open(build(block, cells, cells, np.array([0]), PLANE))
        states.append(partial(segment, all_rows(segment), spec))
    found = finish(merge(states))
    # Four standard errors of the one, and twice the 99 % bound of the other.
    assert found["distinct(v)"] == pytest.approx(np.unique(names).size, rel=4 * 1.04 / 64)
    for rank in ranks:
        true = np.mean(values <= found[f"quantile(w, {rank})"])
        assert abs(true - rank) < 2 * 0.007
    assert len(pickle.dumps(merge(states))) < 40_000


@pytest.mark.parametrize(
    "functions",
    [
        (),
        (("median", "v", None),),
        (("sum", None, None),),
        (("quantile", "v", None),),
        (("quantile", "v", 1.5),),
        (("sum", "v", 2.0),),
        (("sum", "v", None), ("sum", "v", None)),
    ],
)
def test_invalid_aggregates_are_refused(functions: Any) -> None:
    with pytest.raises(ConfigError, match="aggregate"):
        AggregateSpec(functions)


def test_results_have_types_that_fit_the_columns() -> None:
    schema = pa.schema(TYPES.items())
    types = EVERYTHING.result_schema(schema, pa.string())
    assert tuple(types.names) == EVERYTHING.names
    assert types.field("sum(fare)").type == pa.float64()
    assert types.field("sum(seats)").type == pa.int64()
    assert types.field("avg(seats)").type == pa.float64()
    assert types.field("max(seen)").type == TYPES["seen"]
    assert types.field("distinct(id)").type == pa.int64()
    points = random_points(random.Random(5), 40, PLANE)
    segment = segment_of(points, PLANE)
    found = finish(partial(segment, all_rows(segment), EVERYTHING))
    types = EVERYTHING.result_schema(segment.schema, pa.int64())
    assert pa.Table.from_pylist([found], types).to_pylist() == [found]


@pytest.mark.parametrize(
    ("name", "column"), [("sum", "base"), ("avg", "ok"), ("quantile", "seen"), ("min", "lost")]
)
def test_columns_of_unsuitable_types_are_refused(name: str, column: str) -> None:
    spec = AggregateSpec(((name, column, 0.5 if name == "quantile" else None),))
    with pytest.raises(ConfigError, match=column):
        spec.result_schema(pa.schema(TYPES.items()), pa.int64())


def test_nested_columns_can_only_be_counted() -> None:
    schema = pa.schema([("tags", pa.list_(pa.string()))])
    spec = AggregateSpec((("count", "tags", None),))
    assert spec.result_schema(schema, pa.int64()).types == [pa.int64()]
    assert of_column(pa.array([["a"], None]), "count") == {"count": 1}
    with pytest.raises(ConfigError, match="tags"):
        AggregateSpec((("min", "tags", None),)).result_schema(schema, pa.int64())


def test_reading_an_unknown_column_is_refused() -> None:
    segment = segment_of(random_points(random.Random(5), 4, PLANE), PLANE)
    with pytest.raises(ConfigError, match="lost"):
        partial(segment, all_rows(segment), AggregateSpec((("count", "lost", None),)))


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_times_beyond_python_are_clamped(unit: str) -> None:
    """A source may use an extreme value that means "never"."""
    never = pa.array([2**62, -(2**62), 0], pa.int64()).cast(pa.timestamp(unit, "Asia/Tokyo"))
    found = of_column(never, "min", "max")
    assert (found["min"].year, found["max"].year) == (1, 9999)
    days = pa.array([2**30, 0, -(2**30)], pa.int32()).cast(pa.date32())
    milliseconds = pa.array([2**62, 0, -(2**62)], pa.int64()).view(pa.date64())
    for column in (days, milliseconds):
        found = of_column(column, "min", "max")
        assert (found["min"].year, found["max"].year) == (1, 9999)
