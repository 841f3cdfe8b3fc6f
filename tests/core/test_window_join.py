"""The join within a distance and a time equals brute force, each pair once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_points import EARTH, PLANE, TYPES, Point, random_points, segment_of
from window_stream import WINDOWS, extent_at, live_points, live_segments, random_batches

from properties import examples
from roost.errors import ConfigError
from roost.model.records import TIME_MAX, TIME_MIN
from roost.model.space import Rect, Space
from roost.testing.oracle import haversine
from roost.window import Live, WindowSegment, WindowSpec, near
from roost.window.join import JoinSpec, join_schema, join_segment
from roost.window.near import near_chunks
from roost.window.segment import PointColumns

TURNED = Space(Rect(0.0, -90.0, 360.0, 90.0), 36, 18)
SIDES: dict[str | None, Callable[[Point], bool]] = {
    None: lambda p: True,
    "fare > 0": lambda p: p["fare"] is not None and p["fare"] > 0,
    "base = 'B1'": lambda p: p["base"] == "B1",
    "base in ('B1', 'B2')": lambda p: p["base"] in ("B1", "B2"),
}


def near_pairs(*sets_and_limits: Any) -> tuple[Any, Any, Any]:
    """Concatenate all chunks."""
    chunks = list(
        near_chunks(
            PointColumns(*sets_and_limits[:3]),
            PointColumns(*sets_and_limits[3:6]),
            *sets_and_limits[6:],
        )
    )
    none = np.empty(0, np.int64)
    i, j, distances = zip(*chunks, strict=True) if chunks else ((none,), (none,), (np.empty(0),))
    return np.concatenate(i), np.concatenate(j), np.concatenate(distances)


def distance_of(lonlat: bool, x0: float, y0: float, x1: float, y1: float) -> float:
    return haversine(x0, y0, x1, y1) if lonlat else math.hypot(x1 - x0, y1 - y0)


def is_near(lonlat: bool, x0: float, y0: float, x1: float, y1: float, distance: float) -> bool:
    if lonlat:
        return haversine(x0, y0, x1, y1) <= distance
    return (x1 - x0) ** 2 + (y1 - y0) ** 2 <= distance**2


def check_pairs(a: list[Any], b: list[Any], distance: float, within: int, lonlat: bool) -> int:
    """Compare with all pairs of (x, y, time); return how many are near."""
    columns = [
        [np.array([row[k] for row in rows], np.int64 if k == 2 else np.float64) for k in range(3)]
        for rows in (a, b)
    ]
    for column in (*columns[0], *columns[1]):
        column.flags.writeable = False
    i, j, distances = near_pairs(*columns[0], *columns[1], distance, within, lonlat)
    found = dict(zip(zip(i.tolist(), j.tolist(), strict=True), distances.tolist(), strict=True))
    assert len(found) == i.size
    wanted = {
        (m, n)
        for m, (x0, y0, t0) in enumerate(a)
        for n, (x1, y1, t1) in enumerate(b)
        if abs(t1 - t0) <= within and is_near(lonlat, x0, y0, x1, y1, distance)
    }
    # The two ways to write the haversine round differently: a millimetre, or less than a
    # decimetre near the antipode.
    slack = (0.2 if distance > 1.9e7 else 1e-3) if lonlat else 0.0
    for m, n in wanted ^ set(found):
        assert abs(distance_of(lonlat, *a[m][:2], *b[n][:2]) - distance) < slack
    for (m, n), measured in found.items():
        true = distance_of(lonlat, *a[m][:2], *b[n][:2])
        assert measured == pytest.approx(true, rel=1e-12, abs=slack or 1e-160)
    return len(wanted)


COORDINATE = st.integers(0, 12).map(float) | st.floats(-20, 20) | st.sampled_from([1e9, -1e300])
TIMES = st.integers(-20, 20) | st.sampled_from([TIME_MIN, TIME_MAX])
PLANE_POINTS = st.lists(st.tuples(COORDINATE, COORDINATE, TIMES), max_size=25)
REACHES = st.sampled_from([0.0, 1.0, 5.0, 1e-200, 1e200]) | st.floats(0, 30)
WITHIN = st.integers(0, 40) | st.just(TIME_MAX)


@given(PLANE_POINTS, PLANE_POINTS, REACHES, WITHIN)
@examples(70)
def test_pairs_on_a_plane_are_brute_force(
    a: list[Any], b: list[Any], distance: float, within: int
) -> None:
    if distance > 1e150:
        # Squares beyond the doubles are all alike, in matching too.
        a, b = ([p for p in points if abs(p[0]) < 1e9 > abs(p[1])] for points in (a, b))
        distance = 1e150
    else:
        a, b = ([p for p in points if p[0] > -1e299 < p[1]] for points in (a, b))
    check_pairs(a, b, distance, within, False)


LONGITUDE = (
    st.sampled_from([-180.0, 180.0, 179.5, -179.5, 0.0, 360.0])
    | st.floats(-180, 180)
    | st.floats(0, 360)
)
LATITUDE = st.sampled_from([-90.0, 90.0, 89.5, -89.9, 0.0]) | st.floats(-90, 90)
EARTH_POINTS = st.lists(st.tuples(LONGITUDE, LATITUDE, TIMES), max_size=25)


@given(
    EARTH_POINTS,
    EARTH_POINTS,
    st.sampled_from([0.0, 2.002e7, 1e7, 1e9]) | st.floats(0, 2.1e7) | st.floats(0, 3e5),
    WITHIN,
)
@examples(100)
def test_pairs_on_the_earth_are_brute_force(
    a: list[Any], b: list[Any], distance: float, within: int
) -> None:
    check_pairs(a, b, distance, within, True)


@pytest.mark.parametrize("lonlat", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_many_points_in_clusters(seed: int, lonlat: bool) -> None:
    rng = random.Random(seed)

    def points(count: int) -> list[Any]:
        found = []
        for _ in range(count):
            x, y = rng.choice([(179.9, 10.0), (-179.9, 10.0), (50.0, 89.9), (0.0, 0.0)])
            x, y = x + rng.gauss(0, 0.2), min(y + rng.gauss(0, 0.2), 90.0)
            x = (x + 180.0) % 360.0 - 180.0 if lonlat else x
            found.append((x, y, rng.randrange(1_000)))
        return found

    reach = 5_000.0 if lonlat else 0.05
    assert check_pairs(points(400), points(900), reach, rng.choice([50, 2_000]), lonlat) > 100


def test_pairs_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "CHUNK", 7)
    rng = random.Random(1)
    a = [(rng.randrange(4), rng.randrange(4), rng.randrange(9)) for _ in range(60)]
    b = [(rng.randrange(4), rng.randrange(4), rng.randrange(9)) for _ in range(80)]
    assert check_pairs(a, b, 1.0, 3, False) > 300


def test_distances_whose_squares_underflow() -> None:
    tiny = [(0.0, 0.0, 0), (1e-170, 0.0, 0), (1e-100, 0.0, 0)]
    assert check_pairs(tiny, tiny, 0.0, 0, False) == 5
    assert check_pairs(tiny, tiny, 1e-165, 0, False) == 5


# Sides, distance on a plane and on the earth, and time.
JOINS: list[tuple[str | None, str | None, float, float, int]] = [
    (None, None, 0.0, 0.0, 10**6),
    (None, None, 1.0, 1e6, 8),
    ("fare > 0", "base in ('B1', 'B2')", 3.0, 4e6, 12),
    ("base = 'B1'", None, 4.0, 4e6, 5),
    ("base = 'B1'", "base in ('B1', 'B2')", 100.0, 2.1e7, 0),
]


def run_stream(seed: int, window: WindowSpec, space: Space, batches: int) -> int:
    """Join a stream batch by batch; return the number of pairs."""
    rng = random.Random(seed)
    left, right, plane, earth, within = JOINS[seed % len(JOINS)]
    spec = JoinSpec(left, right, plane if space is PLANE else earth, within)
    stream = random_batches(rng, space, batches, text_ids=rng.random() < 0.5)
    lonlat = space is not PLANE
    joined = 0
    for number, batch in enumerate(stream, 1):
        now = extent_at(window, stream[:number])
        parts = list(live_segments(stream[:number], now))
        found = []
        for own, machine, live in parts:
            if own is not batch:
                continue
            new = own.segments[machine]
            for other, place, other_live in parts:
                tables = join_segment(
                    new,
                    live,
                    other.segments[place],
                    other_live,
                    spec,
                    same_batch=other is batch,
                    same_segment=other is batch and place == machine,
                )
                for table in tables:
                    assert table.schema == join_schema(new.ids.type)
                    found += table.to_pylist()
        points = list(live_points(stream[:number], now))
        wanted = [
            (p["id"], q["id"], p["time"], q["time"])
            for b, p in points
            for c, q in points
            if number - 1 in (b, c)
            and p["id"] != q["id"]
            and SIDES[spec.left](p)
            and SIDES[spec.right](q)
            and abs(p["time"] - q["time"]) <= spec.within
            and is_near(lonlat, p["x"], p["y"], q["x"], q["y"], spec.distance)
        ]
        keys = ("left_id", "right_id", "left_time", "right_time")
        assert sorted(tuple(row[key] for key in keys) for row in found) == sorted(wanted)
        place_of = {p["id"]: (p["x"], p["y"]) for _, p in points}
        for row in found:
            true = distance_of(lonlat, *place_of[row["left_id"]], *place_of[row["right_id"]])
            assert row["distance"] == pytest.approx(true, rel=1e-9, abs=0.2 if lonlat else 1e-12)
        joined += len(found)
    return joined


@pytest.mark.parametrize("space", [PLANE, EARTH], ids=["plane", "earth"])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda spec: f"{spec.kind}-{spec.tumbling}")
def test_a_stream_joined_batch_by_batch_is_brute_force(window: WindowSpec, space: Space) -> None:
    assert all(run_stream(seed, window, space, 8) > 0 for seed in range(1, len(JOINS)))


@pytest.mark.parametrize("seed", [0, 5, 10])
def test_points_in_the_same_place_are_joined(seed: int) -> None:
    assert run_stream(seed, WINDOWS[2], PLANE, 8) > 0


@pytest.mark.sweep([100], 1, 60)
def test_long_streams_joined_batch_by_batch_are_brute_force(seed: int) -> None:
    for space in (PLANE, EARTH):
        run_stream(seed, random.Random(seed).choice(WINDOWS), space, 20)


def joined(one: WindowSegment, two: WindowSegment, spec: JoinSpec) -> list[tuple[Any, Any]]:
    """Return the identifiers of all pairs of two segments of a batch."""
    tables = join_segment(one, Live(), two, Live(), spec, same_batch=True)
    return [(row["left_id"], row["right_id"]) for table in tables for row in table.to_pylist()]


@pytest.mark.parametrize("space", [PLANE, EARTH, TURNED], ids=["plane", "earth", "turned"])
def test_no_zone_with_a_pair_is_skipped(space: Space) -> None:
    rng = random.Random(6)
    reach, lonlat = (0.5, False) if space is PLANE else (30_000.0, True)
    halves = []
    for first in (0, 5_000):
        points = random_points(rng, 2_500, space, first=first)
        if lonlat:
            for number, point in enumerate(points[:1_500]):
                edge = (space.bounds.x0, space.bounds.x1)[number % 2]
                point["x"] = edge + (1 - 2 * (number % 2)) * (point["x"] % 3)
                point["y"] = (point["y"] / 9, 89.7, -90.0, -89.5)[number % 4]
        halves.append(points)
    one, two = (segment_of(points, space) for points in halves)
    spec = JoinSpec(None, None, reach, 5)
    found = set(joined(one, two, spec))
    i, j, _ = near_pairs(one.x, one.y, one.time, two.x, two.y, two.time, reach, 5, lonlat)
    wanted = zip(one.take(i).ids.to_pylist(), two.take(j).ids.to_pylist(), strict=True)
    assert found == set(wanted) and len(found) > 500
    far = JoinSpec(None, None, reach, 5)
    late = [point | {"time": point["time"] + 1_000} for point in halves[1]]
    after = segment_of(late, space)
    assert not list(join_segment(one, Live(), after, Live(), far, same_batch=False))


@pytest.mark.parametrize("space", [EARTH, TURNED], ids=["earth", "turned"])
def test_segments_across_the_antimeridian_or_a_pole_are_near(space: Space) -> None:
    b = space.bounds
    spec = JoinSpec(None, None, 200_000.0, 10**6)
    for here, there in (((b.x0 + 0.2, 10.0), (b.x1 - 0.2, 10.0)), ((20.0, 89.8), (200.0, 89.8))):
        pair = []
        for x, y in (here, there):
            points = random_points(random.Random(2), 20, space)
            for number, point in enumerate(points):
                point |= {"x": x + number / 1e3, "y": y}
            pair.append(segment_of(points, space))
        for one, two in (pair, pair[::-1]):
            assert len(joined(one, two, spec)) == 400


def test_a_point_joins_others_in_its_place_but_not_itself() -> None:
    points = random_points(random.Random(2), 5, PLANE)
    for point in points:
        point |= {"x": 3.0, "y": 3.0, "time": 9, "id": min(point["id"], 3)}
    segment = segment_of(points, PLANE)
    spec = JoinSpec(None, None, 0.0, 0)
    (pairs,) = join_segment(segment, Live(), segment, Live(), spec, same_batch=True)
    both = list(zip(pairs["left_id"].to_pylist(), pairs["right_id"].to_pylist(), strict=True))
    # Two points have the same identifier, but they are different points.
    ids = segment.ids.to_pylist()
    assert sorted(both) == sorted(
        (a, b) for k, a in enumerate(ids) for n, b in enumerate(ids) if k != n
    )
    assert not any(pairs["distance"].to_pylist())


def test_empty_segments_have_no_pairs() -> None:
    empty = segment_of([], PLANE)
    some = segment_of(random_points(random.Random(2), 5, PLANE), PLANE)
    spec = JoinSpec(None, "fare > 0", 1e6, 100)
    for one, two in ((empty, some), (some, empty), (empty, empty)):
        assert not list(join_segment(one, Live(), two, Live(), spec, same_batch=False))
    assert not list(join_segment(some, Live(TIME_MAX), some, Live(), spec, same_batch=True))


def test_invalid_join_settings_are_refused() -> None:
    good = JoinSpec("fare > 0", None, 5, 10)
    assert JoinSpec(**good.to_json()) == good
    good.check(pa.schema(TYPES.items()))
    for key, fields in (
        ("join.left", ("fare >", None, 1.0, 1)),
        ("join.right", (None, "and", 1.0, 1)),
        ("join.distance", (None, None, -1.0, 1)),
        ("join.distance", (None, None, math.inf, 1)),
        ("join.distance", (None, None, math.nan, 1)),
        ("join.distance", (None, None, True, 1)),
        ("join.within", (None, None, 1.0, -1)),
        ("join.within", (None, None, 1.0, 1.5)),
        ("join.within", (None, None, 1.0, TIME_MAX + 1)),
    ):
        with pytest.raises(ConfigError) as refused:
            JoinSpec(*fields)  # type: ignore[arg-type]
        assert refused.value.key == key
    with pytest.raises(ConfigError, match=r"join\.right.*lost"):
        JoinSpec(None, "lost > 3", 1.0, 1).check(pa.schema(TYPES.items()))
