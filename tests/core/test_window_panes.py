"""Standing aggregates and nearest points: merged panes equal brute force."""

from __future__ import annotations

import datetime as dt
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from window_points import EARTH, PLANE, TYPES, Point, random_points, segment_of
from window_stream import WINDOWS, Batch, extent_at, live_points, live_segments, random_batches

from roost.errors import ConfigError
from roost.model.records import Box, Circle, Query, request_record
from roost.model.schemas import PointBlock
from roost.model.space import Coordinates, Space
from roost.storage.files import map_arrays, write_arrays
from roost.testing.oracle import covers
from roost.window import (
    Live,
    Pane,
    RequestedOutput,
    WindowSegment,
    WindowSpec,
    build,
    build_pane,
    standing_results,
)
from roost.window.aggregate import finish, partial
from roost.window.evaluate import select
from roost.window.nearest import nearest
from roost.window.panes import is_whole

TEXTS = [
    "aggregate count",
    "aggregate count, sum(fare), avg(fare), min(fare), max(fare), stddev(fare), count(fare)",
    "aggregate avg(seats), sum(seats), stddev(seats), min(seats), max(time), sum(time), max(seats)",
    "aggregate min(base), max(base), min(ok), max(ok), min(seen), max(seen), count(base)",
    "aggregate distinct(base), distinct(id), quantile(seats, 0.5), quantile(x, 0.9), min(id)",
    "nearest 1",
    "nearest 7",
    "nearest 1000",
]


@dataclass
class Standing:
    """A registration: created position, shape and requested output, live for some batches."""

    created: int
    query: Query
    text: str
    first: int
    last: int

    @property
    def centre(self) -> tuple[float, float]:
        shape = self.query.shape
        return (shape.cx, shape.cy) if isinstance(shape, Circle) else (0.0, 0.0)

    def matches(self, batch_id: int, point: Point, lonlat: bool) -> bool:
        plain = request_record(self.query)
        there = self.first <= batch_id <= self.last
        return there and covers(plain, point["x"], point["y"], lonlat)


def random_standing(rng: random.Random, space: Space, count: int, batches: int) -> list[Standing]:
    """Registrations, some with the same identifier, some that match no point."""
    found = []
    for created in rng.sample(range(1_000), count):
        text = rng.choice(TEXTS)
        b = space.bounds
        x, y = rng.uniform(b.x0, b.x1), rng.uniform(b.y0, b.y1)
        radius = rng.uniform(0, 9) if space is PLANE else rng.uniform(1e5, 1.2e7)
        shape: Box | Circle = Circle(x, y, radius)
        if not text.startswith("nearest") and rng.random() < 0.5:
            shape = rng.choice([Box(x - 5, y - 5, x + 5, y + 5), Box(*[1e6] * 2, *[2e6] * 2)])
        first = rng.randrange(batches)
        last = rng.choice([first, batches])
        name = f"q{rng.randrange(count // 2)}"
        found.append(Standing(created, Query(name, shape), text, first, last))
    return found


def add_panes(batch: Batch, standing: list[Standing], rng: random.Random, folder: Path) -> None:
    """Match a batch's points and store the panes of its machines, in memory or as mapped files."""
    batch_id = batch.facts.batch_id
    mine = [one for one in standing if one.first <= batch_id <= one.last]
    outputs = {one.created: (one.text, *one.centre) for one in mine}
    for machine, segment in enumerate(batch.segments):
        rows = [select(segment, one.query) for one in mine]
        created = np.repeat([one.created for one in mine], [found.size for found in rows])
        pairs = np.concatenate([*rows, np.empty(0, np.int64)])
        order = np.array(rng.sample(range(pairs.size), pairs.size), np.int64)
        arrays = build_pane(segment, created[order].astype(np.int64), pairs[order], outputs)
        if rng.random() < 0.5:
            path = folder / f"{batch_id}-{machine}.seg"
            write_arrays(path, arrays, durable=False)
            arrays = map_arrays(path)
        batch.panes.append(Pane.open(arrays))


def as_result(value: Any) -> tuple[float | None, str | None]:
    if isinstance(value, str):
        return None, value
    if isinstance(value, dt.datetime | dt.date):
        return None, value.isoformat()
    return None if value is None else float(value), None


def check_aggregates(found: pa.Table, wanted: list[tuple[int, str, Any]]) -> None:
    rows = found.to_pylist()
    assert [(row["created_position"], row["name"]) for row in rows] == [
        (b, name) for b, name, _ in wanted
    ]
    for row, (_, name, value) in zip(rows, wanted, strict=True):
        number, text = as_result(value)
        assert row["text"] == text, name
        if name.startswith("stddev") and number is not None:
            assert row["number"] == pytest.approx(number, rel=1e-9, abs=1e-4), name
        else:
            assert row["number"] == number, name


def expected(
    everything: WindowSegment,
    row_of: dict[Any, int],
    queries: list[Standing],
    live: list[tuple[int, Point]],
) -> tuple[list[tuple[int, str, Any]], list[dict[str, Any]]]:
    """Results from one segment of all points of the stream."""
    lonlat = everything.space.coordinates is Coordinates.LONLAT
    aggregates, near = [], []
    for one in queries:
        mine = [row_of[p["id"]] for batch_id, p in live if one.matches(batch_id, p, lonlat)]
        rows = np.array(sorted(mine), np.int64)
        outputs = RequestedOutput.parse(one.text)
        if outputs.aggregate is not None:
            state = partial(everything, rows, outputs.aggregate)
            aggregates += [(one.created, name, value) for name, value in finish(state).items()]
        else:
            assert outputs.nearest is not None
            only = everything.take(rows)
            alone = WindowSegment.open(
                build(
                    only, np.zeros(rows.size, np.int32), np.zeros(rows.size, np.int32),
                    np.array([0]), everything.space,
                )
            )  # fmt: skip
            distances, places = nearest(alone, *one.centre, outputs.nearest)
            chosen = alone.take(places)
            for rank, place in enumerate(range(places.size), 1):
                near.append(
                    {
                        "created_position": one.created,
                        "rank": rank,
                        "point_id": chosen.ids[place].as_py(),
                        "event_time": int(chosen.time[place]),
                        "distance": float(distances[place]),
                        "x": float(chosen.x[place]),
                        "y": float(chosen.y[place]),
                    }
                )
    return aggregates, near


def run_stream(seed: int, spec: WindowSpec, space: Space, folder: Path, batches: int) -> None:
    rng = random.Random(seed)
    text_ids = rng.random() < 0.5
    stream = random_batches(rng, space, batches, text_ids=text_ids)
    standing = random_standing(rng, space, 14, batches)
    points = [point for batch in stream for point in batch.points]
    everything = segment_of(points, space)
    row_of = {name: row for row, name in enumerate(everything.ids.to_pylist())}
    for number, batch in enumerate(stream, 1):
        add_panes(batch, standing, rng, folder)
        if rng.random() < 0.5 and number < batches:
            continue
        now = extent_at(spec, stream[:number])
        parts = [
            (b.segments[machine], b.panes[machine], live)
            for b, machine, live in live_segments(stream[:number], now)
            if b.panes[machine] is not None
        ]
        requested = rng.sample(standing, rng.randint(0, len(standing)))
        requested = [one for one in requested if one.first < number]
        rng.shuffle(parts)
        id_type = pa.string() if text_ids else pa.int64()
        found = standing_results(parts, {one.created: one.text for one in requested}, id_type)
        live = list(live_points(stream[:number], now))
        aggregates, near = expected(everything, row_of, requested, live)
        check_aggregates(found[0], aggregates)
        assert found[1].to_pylist() == near
        if parts:
            assert found[1].schema.field("point_id").type == id_type


@pytest.mark.parametrize("space", [PLANE, EARTH], ids=["plane", "earth"])
@pytest.mark.parametrize("spec", WINDOWS, ids=lambda spec: f"{spec.kind}-{spec.tumbling}")
@pytest.mark.parametrize("seed", range(3))
def test_results_equal_brute_force_over_the_window(
    seed: int, spec: WindowSpec, space: Space, tmp_path: Path
) -> None:
    run_stream(seed, spec, space, tmp_path, 9)


@pytest.mark.sweep([100], 1, 80)
def test_results_equal_brute_force_over_long_streams(seed: int, tmp_path: Path) -> None:
    for space in (PLANE, EARTH):
        spec = random.Random(seed).choice(WINDOWS)
        run_stream(seed, spec, space, tmp_path, 25)


EVERYWHERE = Query("all", Circle(8.0, 8.0, 1e6))


def pane_of(
    segment: WindowSegment, text: str, created: int = 1, centre: tuple[float, float] = (8.0, 8.0)
) -> Pane:
    rows = select(segment, EVERYWHERE)
    arrays = build_pane(segment, np.full(rows.size, created), rows, {created: (text, *centre)})
    pane = Pane.open(arrays)
    assert pane is not None
    return pane


def values_of(table: pa.Table) -> dict[str, Any]:
    rows = table.to_pylist()
    return {row["name"]: row["number"] if row["text"] is None else row["text"] for row in rows}


def numbers_segment(column: pa.Array) -> WindowSegment:
    size = len(column)
    xy = np.linspace(0.0, 16.0, size)
    block = PointBlock(xy, xy, np.arange(size), pa.array(range(size)), {"v": column})
    cells = np.zeros(size, np.int32)
    return WindowSegment.open(build(block, cells, cells, np.array([0]), PLANE))


def of_columns(text: str, *columns: pa.Array) -> dict[str, Any]:
    segments = [numbers_segment(column) for column in columns]
    parts = [(segment, pane_of(segment, text), Live()) for segment in segments]
    return values_of(standing_results(parts, {1: text})[0])


def test_aggregates_without_values() -> None:
    text = "aggregate count, count(fare), sum(fare), min(base), distinct(id), quantile(x, 0.5)"
    table, near = standing_results([], {4: text, 2: "nearest 3"}, pa.string())
    assert values_of(table) == {
        "count": 0, "count(fare)": 0, "sum(fare)": None, "min(base)": None, "distinct(id)": 0,
        "quantile(x, 0.5)": None,
    }  # fmt: skip
    assert table.column("created_position").unique().to_pylist() == [4]
    assert near.num_rows == 0 and near.schema.field("point_id").type == pa.string()
    table, near = standing_results([], {})
    assert table.num_rows == near.num_rows == 0


def test_a_column_of_nulls_has_no_values() -> None:
    text = "aggregate count, count(v), sum(v), avg(v), min(v), max(v), stddev(v), distinct(v)"
    for kind in (pa.float64(), pa.int64()):
        found = of_columns(text, pa.nulls(5, kind), pa.nulls(3, kind))
        assert found.pop("count") == 8
        assert found.pop("count(v)") == found.pop("distinct(v)") == 0
        assert set(found.values()) == {None}
    found = of_columns("aggregate min(v), max(v)", pa.nulls(3, pa.string()))
    assert set(found.values()) == {None}
    found = of_columns("aggregate min(v)", pa.nulls(3, pa.string()), pa.array(["b", None]))
    assert found == {"min(v)": "b"}


def test_nan_is_the_greatest_number_and_makes_sums_nan() -> None:
    text = "aggregate sum(v), avg(v), min(v), max(v), stddev(v)"
    found = of_columns(text, pa.array([1.0, math.nan]), pa.array([-2.0]), pa.array([math.nan]))
    assert found["min(v)"] == -2.0
    assert all(math.isnan(found[f"{name}(v)"]) for name in ("sum", "avg", "max", "stddev"))
    found = of_columns(text, pa.array([math.nan]), pa.array([4.0]))
    assert found["min(v)"] == 4.0 and math.isnan(found["max(v)"])
    found = of_columns(text, pa.array([math.inf, 1.0]), pa.array([2.0]))
    assert found["sum(v)"] == found["avg(v)"] == found["max(v)"] == math.inf
    found = of_columns("aggregate sum(v)", pa.array([math.inf]), pa.array([-math.inf]))
    assert math.isnan(found["sum(v)"])


def test_sums_are_exact_for_any_values() -> None:
    rng = random.Random(1)
    values = [rng.uniform(-1, 1) * 10.0 ** rng.randrange(-320, 300) for _ in range(200)]
    values += [-value for value in values] + [0.1, 5e-324, 1e308, 1e308, -1e308]
    rng.shuffle(values)
    cuts = sorted(rng.sample(range(len(values)), 5))
    pieces = [values[a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    text = "aggregate sum(v), avg(v)"
    found = of_columns(text, *[pa.array(piece, pa.float64()) for piece in pieces])
    assert found == {"sum(v)": math.fsum(values), "avg(v)": math.fsum(values) / len(values)}
    found = of_columns(text, pa.array([1e308] * 3), pa.array([1e308, 1e308]))
    assert found == {"sum(v)": math.inf, "avg(v)": 1e308}
    found = of_columns(text, pa.array([2**62] * 5), pa.array([2**63 - 1, -(2**63)]))
    assert found == {"sum(v)": float(5 * 2**62 - 1), "avg(v)": (5 * 2**62 - 1) / 7}
    wide = pa.array([2**64 - 1] * 3, pa.uint64())
    assert of_columns(text, wide, wide) == {"sum(v)": 6.0 * 2**64, "avg(v)": float(2**64)}
    narrow = pa.array([-128, 127, -128], pa.int8())
    assert of_columns(text, narrow, narrow) == {"sum(v)": -258, "avg(v)": -43.0}


@pytest.mark.parametrize("parts", [1, 7, 60])
def test_spreads_do_not_depend_on_the_parts(parts: int) -> None:
    values = np.random.default_rng(4).normal(1e6, 1.0, 3_000)
    pieces = [pa.array(piece) for piece in np.array_split(values, parts)]
    found = of_columns("aggregate stddev(v)", *pieces)
    assert found["stddev(v)"] == pytest.approx(values.std(ddof=1), rel=1e-9)


@pytest.mark.parametrize("parts", [1, 7])
def test_sketches_are_within_their_error_bounds(parts: int) -> None:
    rng = np.random.default_rng(9)
    values = rng.integers(0, 20_000, 60_000)
    text = "aggregate distinct(v), quantile(v, 0.25), quantile(v, 0.99)"
    found = of_columns(text, *[pa.array(piece) for piece in np.array_split(values, parts)])
    assert found["distinct(v)"] == pytest.approx(np.unique(values).size, rel=4 * 1.04 / 64)
    for rank in (0.25, 0.99):
        assert abs(np.mean(values <= found[f"quantile(v, {rank})"]) - rank) < 2 * 0.007


def test_other_types_of_columns() -> None:
    text = "aggregate count(v), min(v), max(v), distinct(v)"
    days = pa.array([dt.date(2020, 1, 2), None, dt.date(2019, 1, 1)], pa.date32())
    for column in (days, days.cast(pa.date64())):
        found = of_columns(text, column, column)
        assert list(found.values()) == [4, "2019-01-01", "2020-01-02", 2]
    fine = pa.array([1_000_000_001, 2_000_000_000], pa.timestamp("ns"))
    assert of_columns(text, fine)["min(v)"] == "1970-01-01T00:00:01"
    slow = pa.array([1, 5], pa.timestamp("s", "UTC"))
    assert of_columns(text, slow, slow)["max(v)"] == "1970-01-01T00:00:05+00:00"
    money = pa.array(["1.10", "2.20"]).cast(pa.decimal128(9, 2))
    found = of_columns("aggregate sum(v), max(v), distinct(v)", money)
    assert found == {"sum(v)": pytest.approx(3.3), "max(v)": 2.2, "distinct(v)": 2}
    texts = pa.array(["b", "a", None, "Ω"]).dictionary_encode()
    assert list(of_columns(text, texts, texts).values()) == [6, "a", "Ω", 3]
    large = pa.array(["b", "a"], pa.large_string())
    assert of_columns("aggregate min(v)", large, large) == {"min(v)": "a"}
    half = pa.array([1.5, None], pa.float32())
    assert of_columns("aggregate sum(v), max(v)", half) == {"sum(v)": 1.5, "max(v)": 1.5}


def test_ties_of_nearest_points_are_broken_by_identifier() -> None:
    points = random_points(random.Random(4), 600, PLANE)
    for point in points:
        point |= {"x": float(point["id"] % 2), "y": 0.0}
    dealt = [points[k::5] for k in range(5)]
    parts = []
    for part in dealt:
        segment = segment_of(part, PLANE)
        parts.append((segment, pane_of(segment, "nearest 9", centre=(0.0, 0.0)), Live()))
    near = standing_results(parts, {1: "nearest 9"})[1]
    assert near.column("point_id").to_pylist() == [2 * n for n in range(9)]
    assert near.column("rank").to_pylist() == list(range(1, 10))
    # A pane stores no more points than a query requests.
    assert all(pane.near is not None and pane.near[1].row.size == 9 for _, pane, _ in parts)


def test_only_a_batch_that_may_be_cut_is_computed_again() -> None:
    segment = segment_of(random_points(random.Random(3), 40, PLANE), PLANE)
    least = int(segment.time.min())
    assert is_whole(segment, Live()) and is_whole(segment, Live(least - 1))
    assert not is_whole(segment, Live(least))
    pane = pane_of(segment, "aggregate count")
    assert pane.alive(segment, Live(int(segment.time.max())), np.array([0])) is None


def test_there_is_no_pane_without_pairs() -> None:
    segment = segment_of(random_points(random.Random(3), 4, PLANE), PLANE)
    nothing = np.empty(0, np.int64)
    assert build_pane(segment, nothing, nothing, {1: ("aggregate count", 0.0, 0.0)}) == {}
    assert Pane.open({"x": segment.x}) is None


def test_inconsistent_input_is_refused() -> None:
    segment = segment_of(random_points(random.Random(3), 4, PLANE), PLANE)
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="without a requested output"):
        build_pane(segment, one, one, {1: ("aggregate count", 0.0, 0.0)})
    with pytest.raises(ValueError, match="without a requested output"):
        build_pane(segment, one + 5, one, {1: ("aggregate count", 0.0, 0.0)})
    with pytest.raises(ConfigError, match="lost"):
        build_pane(segment, one, one, {0: ("aggregate sum(lost)", 0.0, 0.0)})
    pane = pane_of(segment, "aggregate count")
    with pytest.raises(ValueError, match="requested output differs"):
        standing_results([(segment, pane, Live())], {1: "aggregate count, sum(fare)"})


def test_attributes_take_precedence_over_own_columns() -> None:
    points = random_points(random.Random(3), 4, PLANE)
    block = PointBlock(
        np.array([p["x"] for p in points]),
        np.array([p["y"] for p in points]),
        np.arange(4),
        pa.array(range(4)),
        {"x": pa.array([1, 2, 3, 4], TYPES["seats"])},
    )
    cells = np.zeros(4, np.int32)
    segment = WindowSegment.open(build(block, cells, cells, np.array([0]), PLANE))
    text = "aggregate sum(x), max(time)"
    found = values_of(standing_results([(segment, pane_of(segment, text), Live())], {1: text})[0])
    assert found == {"sum(x)": 10.0, "max(time)": 3.0}
