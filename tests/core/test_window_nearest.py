"""Nearest rows equal brute force, with ties, cuts, poles and the antimeridian."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from window_points import EARTH, PLANE, Point, random_places, random_points, segment_of

from properties import examples
from roost.model.space import Rect, Space
from roost.testing.oracle import haversine
from roost.window import Live, WindowSegment
from roost.window.evaluate import live_parts
from roost.window.nearest import _least_arc, nearest
from roost.window.spec import Cut, Extent

TURNED = Space(Rect(0.0, -90.0, 360.0, 90.0), 36, 18)


def distance(space: Space, x: float, y: float, point: Point) -> float:
    if space is PLANE:
        dx, dy = point["x"] - x, point["y"] - y
        return math.sqrt(dx * dx + dy * dy)  # the power function does not round squares correctly
    return haversine(x, y, point["x"], point["y"])


def check(
    space: Space, place: tuple[float, float], found: tuple[Any, Any], wanted: list[Point], k: int
) -> None:
    """Compare distances, and on a plane, where no rounding changes the order, identifiers."""
    distances, ids = found
    ranked = sorted((distance(space, *place, p), p["id"]) for p in wanted)[:k]
    true = {p["id"]: distance(space, *place, p) for p in wanted}
    # Near the antipode an arc of one rounding error is a decimetre.
    slack = 0.0 if space is PLANE else 0.2 if ranked and ranked[-1][0] > 1.9e7 else 1e-5
    assert len(ids) == len(set(ids)) == len(ranked)
    assert distances == sorted(distances)
    for measured, point_id, (right, _) in zip(distances, ids, ranked, strict=True):
        assert abs(measured - right) <= slack
        assert abs(true[point_id] - right) <= slack
    if space is PLANE:
        assert ids == [name for _, name in ranked]


def find(segment: WindowSegment, *rest: Any, **more: Any) -> tuple[list[float], list[Any]]:
    distances, rows = nearest(segment, *rest, **more)
    return distances.tolist(), segment.take(rows).ids.to_pylist()


@pytest.fixture(scope="module", params=[PLANE, EARTH, TURNED], ids=["plane", "earth", "turned"])
def both(request: pytest.FixtureRequest) -> tuple[Space, list[Point], WindowSegment]:
    space: Space = request.param
    points = random_points(random.Random(3), 4_000, space)
    if space is not PLANE:
        for number, point in enumerate(points[:1_000]):
            edge = (space.bounds.x0, space.bounds.x1)[number % 2]
            point["x"] = edge + (1 - 2 * (number % 2)) * (point["x"] % 5)
            point["y"] = (point["y"], 89.9, -90.0, -89.0)[number % 4]
    return space, points, segment_of(points, space, random_places(random.Random(3), space))


@given(
    across=st.floats(-0.05, 1.05) | st.sampled_from([0.0, 0.5, 1.0]),
    up=st.floats(0.0, 1.0) | st.sampled_from([0.5, 1.0]),
    rounded=st.booleans(),
    k=st.integers(1, 30) | st.just(5_000),
    after=st.none() | st.integers(-60, 60),
    predicate=st.none() | st.just("seats > 0"),
)
@example(across=0.033, up=0.023, rounded=False, k=5_000, after=None, predicate=None)
@examples(45)
def test_the_nearest_rows_are_brute_force(
    both: tuple[Space, list[Point], WindowSegment],
    across: float,
    up: float,
    rounded: bool,
    k: int,
    after: int | None,
    predicate: str | None,
) -> None:
    """The place is given as shares of the bounds; rounded, it may be that of a point."""
    space, points, segment = both
    b = space.bounds
    x, y = b.x0 + across * (b.x1 - b.x0), b.y0 + up * (b.y1 - b.y0)
    if rounded:
        x, y = round(x, 1), round(y, 1)
    wanted = [
        p
        for p in points
        if (after is None or p["time"] > after)
        and (predicate is None or (p["seats"] is not None and p["seats"] > 0))
    ]
    found = find(segment, x, y, k, Live(after), predicate)
    check(space, (x, y), found, wanted, k)


@pytest.mark.parametrize("text_ids", [False, True])
def test_ties_are_broken_by_identifier(text_ids: bool) -> None:
    points = random_points(random.Random(4), 3_000, PLANE, text_ids=text_ids)
    for point in points:
        point["x"], point["y"] = float(round(point["x"]) % 3), 5.0
    random.Random(1).shuffle(points)
    segment = segment_of(points, PLANE)
    for k in (1, 7, 1_500):
        check(PLANE, (1.0, 5.0), find(segment, 1.0, 5.0, k), points, k)


def test_nearest_respects_partitions_and_maximum_distance() -> None:
    rng = random.Random(6)
    points = random_points(rng, 2_000, PLANE)
    table, ids = random_places(rng, PLANE)
    segment = segment_of(points, PLANE, (table, ids))
    first, stop = segment.partition_starts[1:3].tolist()
    mine = set(segment.take(np.arange(first, stop)).ids.to_pylist())
    wanted = [p for p in points if p["id"] in mine]
    found = find(segment, 8.0, 8.0, 20, partition_ids=[int(segment.partition_ids[1])])
    check(PLANE, (8.0, 8.0), found, wanted, 20)
    limit = found[0][6]
    near = [p for p in wanted if distance(PLANE, 8.0, 8.0, p) <= limit]
    more = {"partition_ids": [int(segment.partition_ids[1])], "at_most": limit}
    check(PLANE, (8.0, 8.0), find(segment, 8.0, 8.0, 20, **more), near, 20)


def test_a_cut_excludes_rows_before_they_are_counted() -> None:
    points = random_points(random.Random(7), 3_000, PLANE)
    segment = segment_of(points, PLANE)
    (live,) = live_parts(Extent(0, 0, None, Cut(0, 1_234)), 0, [segment])
    newest = sorted(points, key=lambda p: (p["time"], p["id"]))[-1_234:]
    check(PLANE, (3.0, 3.0), find(segment, 3.0, 3.0, 15, live), newest, 15)
    check(PLANE, (3.0, 3.0), find(segment, 3.0, 3.0, 5_000, live), newest, 5_000)


def test_an_empty_segment_or_zero_rows_have_no_nearest_rows() -> None:
    assert find(segment_of([], PLANE), 1.0, 1.0, 3) == ([], [])
    segment = segment_of(random_points(random.Random(7), 30, PLANE), PLANE)
    assert find(segment, 1.0, 1.0, 0) == ([], [])
    assert find(segment, 1.0, 1.0, 3, Live((1 << 63) - 1)) == ([], [])


def test_distances_that_overflow_are_infinite() -> None:
    points = random_points(random.Random(7), 3, PLANE)
    for number, point in enumerate(points):
        point["x"] = (1e308, -1e308, 0.0)[number]
    distances, ids = find(segment_of(points, PLANE), -1e308, 0.0, 3)
    assert distances[1:] == [math.inf, math.inf] or distances[0] == 0.0
    assert ids[0] == points[1]["id"] and len(ids) == 3


@given(st.data())
@examples(100)
def test_no_point_of_a_box_is_nearer_than_its_least_arc(data: st.DataObject) -> None:
    lon = st.floats(-180, 180) | st.sampled_from([-180.0, 180.0, 0.0, 90.0])
    lat = st.floats(-90, 90) | st.sampled_from([-90.0, 90.0, 0.0])
    x0, x1 = sorted([data.draw(lon), data.draw(lon)])
    y0, y1 = sorted([data.draw(lat), data.draw(lat)])
    turn = data.draw(st.sampled_from([0.0, 360.0]))
    px, py = data.draw(lon), data.draw(lat)
    least = _least_arc(px, py, x0 + turn, y0, x1 + turn, y1)
    steps = [k / 12 for k in range(13)]
    arcs = [
        math.sin(haversine(px, py, x0 + u * (x1 - x0), y0 + v * (y1 - y0)) / 2 / 6_371_008.8) ** 2
        for u in steps
        for v in steps
    ]
    assert least <= min(arcs) + 1e-14 + 1e-12 * min(arcs)
    # And it is not far below either: the box is sampled every twelfth of its sides.
    reach = math.radians(math.hypot(x1 - x0, y1 - y0)) / 12
    assert 2 * math.asin(math.sqrt(min(arcs))) - 2 * math.asin(math.sqrt(least)) <= reach + 1e-6
