"""Selections from a segment, compared with brute force over Python records."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_points import EARTH, PLANE, Point, random_points, records, segment_of

from properties import examples
from roost.errors import PredicateError, RequestError
from roost.model.records import Box, Circle, Polygon, Query, request_record
from roost.model.space import Coordinates, Space
from roost.testing.oracle import covers
from roost.window import Live, WindowSegment
from roost.window.evaluate import live_parts, select, time_of
from roost.window.spec import Cut, Extent

PREDICATES: dict[str, Callable[[Point], bool]] = {
    "fare > 10": lambda p: p["fare"] is not None and p["fare"] > 10,
    "base in ('B1', 'Ω') and not ok": lambda p: p["base"] in ("B1", "Ω") and p["ok"] is False,
    "seats is null or seats = 2147483647": lambda p: p["seats"] in (None, 2**31 - 1),
}
HOLED = "POLYGON ((2 2, 14 3, 11 14, 3 12, 2 2), (6 6, 9 6, 8 9, 6 6))"
TWO_PARTS = (
    '{"type": "MultiPolygon", "coordinates": '
    "[[[[0,0],[5,0],[5,5],[0,5],[0,0]]], [[[8,8],[16,8],[12,16],[8,8]]]]}"
)


@pytest.fixture(scope="module", params=[PLANE, EARTH], ids=["plane", "earth"])
def both(request: pytest.FixtureRequest) -> tuple[Space, list[Point], WindowSegment]:
    space: Space = request.param
    points = random_points(random.Random(3), 1_300, space)
    if space is EARTH:
        # Around the antimeridian and the poles, where circles are not what they seem.
        for number, point in enumerate(points[:400]):
            point["x"] = -180.0 + point["x"] % 7 if number % 2 else 180.0 - point["x"] % 7
            point["y"] = (point["y"], 88.0, -90.0)[number % 3]
    return space, points, segment_of(points, space)


def shapes(space: Space) -> st.SearchStrategy[Box | Circle | Polygon]:
    b = space.bounds
    x, y = st.floats(b.x0, b.x1), st.floats(b.y0, b.y1)
    grid = st.integers(-3, 20)
    radius = st.floats(0, 8) if space is PLANE else st.floats(0, 2.1e7)
    boxes = st.tuples(x, x, y, y).map(lambda v: Box(min(v[:2]), min(v[2:]), max(v[:2]), max(v[2:])))
    closed = st.tuples(grid, grid, grid, grid).map(
        lambda v: Box(*map(float, (min(v[:2]), min(v[2:]), max(v[:2]), max(v[2:]))))
    )
    circles = st.builds(Circle, x, y, radius)
    polar = st.builds(Circle, st.sampled_from([-180.0, 179.0, 539.0, 0.0]), y, radius)
    polygons = st.sampled_from([HOLED, TWO_PARTS]).map(Polygon)
    return st.one_of(boxes, closed, circles, polar if space is EARTH else circles, polygons)


def oracle_query(query: Query) -> dict[str, object]:
    record = request_record(query)
    if record.get("wkt") == TWO_PARTS:
        corners = "((0 0, 5 0, 5 5, 0 5, 0 0)), ((8 8, 16 8, 12 16, 8 8))"
        record["wkt"] = f"MULTIPOLYGON ({corners})"
    return record


@given(data=st.data())
@examples(70)
def test_a_selection_is_brute_force(
    both: tuple[Space, list[Point], WindowSegment], data: st.DataObject
) -> None:
    space, points, segment = both
    text = data.draw(st.none() | st.sampled_from(list(PREDICATES)))
    at, until = data.draw(
        st.tuples(st.none() | st.integers(-60, 0), st.none() | st.integers(0, 60))
    )
    query = Query(1, data.draw(shapes(space)), predicate=text, at=at, expires_at=until)
    after = data.draw(st.none() | st.integers(-60, 40))
    rows = select(segment, query, Live(after))
    plain = oracle_query(query)
    lonlat = space.coordinates is Coordinates.LONLAT
    assert records(segment, rows) == [
        p["id"]
        for p in points
        if (after is None or p["time"] > after)
        and (at is None or p["time"] >= at)
        and (until is None or p["time"] < until)
        and covers(plain, p["x"], p["y"], lonlat)
        and (text is None or PREDICATES[text](p))
    ]


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans(), st.data())
@examples(40)
def test_a_cut_keeps_the_newest_points_of_all_segments_together(
    seed: int, machines: int, text_ids: bool, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    points = random_points(rng, rng.randint(1, 40), PLANE, text_ids=text_ids)
    for point in points:
        point["time"] = rng.randrange(3)
    dealt = [points[k::machines] for k in range(machines) if points[k::machines]]
    segments = [segment_of(part, PLANE) for part in dealt]
    keep = data.draw(st.integers(1, len(points) + 2))
    newest = sorted(points, key=lambda p: (p["time"], p["id"]))[-keep:]
    everywhere = Query(1, Box(-1e9, -1e9, 1e9, 1e9))
    parts = live_parts(Extent(4, 6, None, Cut(4, keep)), 4, segments)
    found: list[object] = []
    for segment, live in zip(segments, parts, strict=True):
        found += records(segment, select(segment, everywhere, live))
    assert sorted(found, key=str) == sorted((p["id"] for p in newest), key=str)
    assert live_parts(Extent(4, 6, 9, Cut(4, keep)), 5, segments) == [Live(9)] * len(segments)


def test_a_cut_through_equal_points_keeps_the_exact_number() -> None:
    points = random_points(random.Random(2), 9, PLANE)
    for point in points:
        point |= {"time": 5, "id": 3}
    segments = [segment_of(points[:4], PLANE), segment_of(points[4:], PLANE)]
    everywhere = Query(1, Box(-1e9, -1e9, 1e9, 1e9))
    for keep in range(1, 10):
        parts = live_parts(Extent(0, 0, None, Cut(0, keep)), 0, segments)
        asked = zip(segments, parts, strict=True)
        assert sum(select(segment, everywhere, live).size for segment, live in asked) == keep


def test_only_rows_of_the_given_partitions() -> None:
    points = random_points(random.Random(2), 50, PLANE)
    segment = segment_of(points, PLANE)
    everywhere = Query(1, Circle(8.0, 8.0, 1e6))
    assert select(segment, everywhere, partition_ids={7}).size == 50
    assert select(segment, everywhere, partition_ids={8}).size == 0


def test_circles_outside_the_range_of_longitudes_match_nothing() -> None:
    segment = segment_of(random_points(random.Random(2), 50, EARTH), EARTH)
    assert select(segment, Query(1, Circle(0.0, 0.0, 0.0))).size == 0


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("POLYGON ((0 0", "malformed"),
        ("{", "malformed"),
        ("POINT (1 1)", "invalid_polygon"),
        ("POLYGON EMPTY", "invalid_polygon"),
    ],
)
def test_a_shape_that_is_not_a_polygon_is_refused(shape: str, reason: str) -> None:
    segment = segment_of(random_points(random.Random(2), 5, PLANE), PLANE)
    with pytest.raises(RequestError, match=reason):
        select(segment, Query(1, Polygon(shape)))


def test_an_unsuitable_predicate_is_refused_even_without_rows() -> None:
    segment = segment_of(random_points(random.Random(2), 5, PLANE), PLANE)
    with pytest.raises(PredicateError):
        select(segment, Query(1, Box(900.0, 900.0, 901.0, 901.0), predicate="height > 3"))


def test_times_are_numbers_or_datetimes() -> None:
    assert time_of(17) == 17
    moment = dt.datetime(2020, 1, 1, 12, 0, 0, 5)  # noqa: DTZ001
    aware = moment.replace(tzinfo=dt.timezone(dt.timedelta(hours=2)))
    assert time_of(moment) - time_of(aware) == 7_200_000_000
    assert np.datetime64(moment, "us").astype(int) == time_of(moment)
