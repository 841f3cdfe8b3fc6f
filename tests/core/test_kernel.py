"""The matching kernel equals brute force, for every shape, on and off the borders."""

from __future__ import annotations

import itertools
import math
import sys
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.kernel import Index, build_segment, pack, query_schema, unpack
from roost.kernel.boxes import SEARCH_MIN
from roost.kernel.cells import IndexGrid, locate, morton, quantise, sort_points, squeeze
from roost.kernel.index import Times
from roost.model.records import BOX, CIRCLE, POLYGON, TIME_MAX, TIME_MIN
from roost.model.schemas import PointBlock
from roost.model.space import EARTH_RADIUS_M, Coordinates, Rect, Space
from roost.storage.files import map_arrays, write_arrays

sys.path.insert(0, str(Path(__file__).parents[1]))
from roost.testing.oracle import brute_force

PLANE = Space(Rect(0.0, 0.0, 100.0, 60.0), 10, 10, Coordinates.PLANE)
WORLD = Space(Rect(-180.0, -90.0, 180.0, 90.0), 10, 10, Coordinates.LONLAT)
CITY = Space(Rect(-74.05, 40.6, -73.7, 40.9), 10, 10, Coordinates.LONLAT)
# Cells of every level lie across the equator, unlike those of the whole world.
OCEANS = Space(Rect(-171.0, -57.0, 176.0, 83.0), 10, 10, Coordinates.LONLAT)


def segment_of(queries: list[dict], space: Space):
    rows = []
    for query in queries:
        row = {name: None for name in query_schema(pa.int64()).names}
        row |= {"query_id": query["query_id"], "user_id": "u", "predicate": query.get("predicate")}
        row["live_from"] = query.get("live_from", TIME_MIN)
        row["live_until"] = query.get("live_until", TIME_MAX)
        if query.get("wkt"):
            geometry = shapely.from_wkt(query["wkt"])
            row |= dict(zip(("x0", "y0", "x1", "y1"), geometry.bounds, strict=True))
            row |= {"kind": POLYGON, "wkb": shapely.to_wkb(geometry)}
        elif query.get("radius") is not None:
            row |= {"kind": CIRCLE, "x0": query["cx"], "y0": query["cy"], "radius": query["radius"]}
        else:
            row |= {"kind": BOX} | {name: query[name] for name in ("x0", "y0", "x1", "y1")}
        rows.append(row)
    return build_segment(pa.Table.from_pylist(rows, query_schema(pa.int64())), space)


def block_of(points: list[dict]) -> PointBlock:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([point[name] for point in points], dtype)

    return PointBlock(
        column("x", np.float64),
        column("y", np.float64),
        column("time", np.int64),
        pa.array([point["id"] for point in points], pa.int64()),
        {"fare": pa.array([point.get("fare") for point in points], pa.float64())},
    )


def matched(index: Index, block: PointBlock) -> list[tuple[int, int]]:
    return sorted(
        (pairs.segment.ids[slot].as_py(), block.ids[row].as_py())
        for pairs in index.match(block)
        for slot, row in zip(pairs.slots.tolist(), pairs.rows.tolist(), strict=True)
    )


def as_points(xy: list[tuple[float, float]]) -> list[dict]:
    return [{"id": i, "x": x, "y": y, "time": i} for i, (x, y) in enumerate(xy)]


def compare(queries: list[dict], points: list[dict], space: Space) -> None:
    index = Index(space, [(segment_of(queries, space), {})])
    expected = brute_force(points, queries, lonlat=space.coordinates is Coordinates.LONLAT)
    assert matched(index, block_of(points)) == expected


# Numbers that fall on cell borders, just beside them, on each other, and far outside.
special = st.sampled_from([0.0, 100.0, 60.0, 50.0, 25.0, 100.0 / 4096, 1e9, -1e9, 30.0])
near = st.builds(lambda v, d: math.nextafter(v, d), special, st.sampled_from([-1e300, 1e300]))
coordinate = st.one_of(
    special, near, st.floats(-20, 120), st.integers(-5, 105).map(float), st.floats(49.9, 50.1)
)


@st.composite
def boxes_and_points(draw):
    corners = draw(st.lists(st.tuples(*[coordinate] * 4), min_size=1, max_size=12))
    queries = [
        {
            "query_id": i,
            "x0": min(a, c),
            "y0": min(b, d),
            "x1": max(a, c),
            "y1": max(b, d),
        }
        for i, (a, b, c, d) in enumerate(corners)
    ]
    xs = [query[name] for query in queries for name in ("x0", "x1")]
    ys = [query[name] for query in queries for name in ("y0", "y1")]
    on_border = st.tuples(st.sampled_from(xs), st.sampled_from(ys))
    xy = draw(st.lists(st.one_of(on_border, st.tuples(coordinate, coordinate)), max_size=25))
    return queries, as_points(xy)


@given(boxes_and_points())
@examples(300)
def test_boxes_equal_brute_force(case):
    compare(*case, PLANE)


@pytest.mark.parametrize("seed", range(24))
def test_long_lists_equal_brute_force(seed):
    """Lists long enough to be searched by x; rounded corners make ties with borders and points."""
    rng = np.random.default_rng(seed)
    side = [0.004, 0.02, 0.05, 0.5, 3.0][seed % 5]
    low = rng.uniform(49.0, 49.0 + 2 * side, (1500, 2))
    boxes = np.hstack([low, low + side * rng.uniform(0.2, 1.0, (1500, 2))])
    if seed % 2:
        boxes = np.round(boxes, 3)
    corners = boxes[rng.integers(0, 1500, 200)][:, [0, 3]]
    beside = np.nextafter(corners, rng.choice([-1e9, 1e9], corners.shape))
    anywhere = rng.uniform(48.5, 49.5 + 3 * side, (200, 2))
    xy = np.vstack([corners, beside, anywhere])
    names = ("x0", "y0", "x1", "y1")
    queries = [
        {"query_id": i, **dict(zip(names, row, strict=True))}
        for i, row in enumerate(boxes.tolist())
    ]
    segment = segment_of(queries, PLANE)
    assert segment.box_postings is not None
    if side <= 0.02:
        assert np.diff(segment.box_postings.starts).max() >= SEARCH_MIN
    found = matched(Index(PLANE, [(segment, {})]), block_of(as_points(xy.tolist())))
    x, y = xy[:, None, 0], xy[:, None, 1]
    inside = (boxes[:, 0] <= x) & (x <= boxes[:, 2]) & (boxes[:, 1] <= y) & (y <= boxes[:, 3])
    point, query = np.nonzero(inside)
    assert found == sorted(zip(query.tolist(), point.tolist(), strict=True))


@st.composite
def circles_and_points(draw, space):
    b = space.bounds
    x = st.floats(b.x0, b.x1) | st.sampled_from([b.x0, b.x1, (b.x0 + b.x1) / 2])
    y = st.floats(b.y0, b.y1) | st.sampled_from([b.y0, b.y1, (b.y0 + b.y1) / 2])
    scale = 2.5e7 if space is WORLD else (3e4 if space is CITY else 150.0)
    radius = st.one_of(st.just(0.0), st.floats(0, scale), st.floats(0, scale / 50))
    circles = draw(st.lists(st.tuples(x, y, radius), min_size=1, max_size=8))
    queries = [
        {"query_id": i, "cx": cx, "cy": cy, "radius": r} for i, (cx, cy, r) in enumerate(circles)
    ]
    centre = st.sampled_from([(cx, cy) for cx, cy, _ in circles])
    xy = draw(st.lists(st.one_of(st.tuples(x, y), centre), max_size=25))
    return queries, as_points(xy)


@pytest.mark.parametrize("space", [PLANE, WORLD, CITY], ids=["plane", "world", "city"])
@examples(150)
@given(data=st.data())
def test_circles_equal_brute_force(space, data):
    compare(*data.draw(circles_and_points(space)), space)


def test_circle_across_the_antimeridian_and_over_the_pole():
    queries = [
        {"query_id": 1, "cx": 179.9, "cy": 0.0, "radius": 50_000.0},
        {"query_id": 2, "cx": 10.0, "cy": 89.9, "radius": 30_000.0},
        {"query_id": 3, "cx": 0.0, "cy": 0.0, "radius": 2.1e7},
    ]
    points = as_points([(-179.9, 0.0), (179.9, 0.1), (-170.0, 89.95), (190.0, 89.99), (0.0, -90.0)])
    compare(queries, points[:3] + points[4:], WORLD)


def ring_around(cx: float, cy: float, distance_m: float, count: int) -> np.ndarray:
    """Return points at a distance from a centre, in all directions."""
    bearing = np.linspace(0.0, 2 * np.pi, count, endpoint=False)
    phi, arc = math.radians(cy), distance_m / EARTH_RADIUS_M
    sine = math.sin(phi) * math.cos(arc) + math.cos(phi) * math.sin(arc) * np.cos(bearing)
    across = np.sin(bearing) * math.sin(arc) * math.cos(phi)
    along = math.cos(arc) - math.sin(phi) * sine
    lon = (cx + np.degrees(np.arctan2(across, along)) + 180.0) % 360.0 - 180.0
    return np.stack([lon, np.degrees(np.arcsin(np.clip(sine, -1.0, 1.0)))], 1)


@pytest.mark.parametrize("space", [WORLD, OCEANS], ids=["world", "oceans"])
@given(st.floats(-180.0, 180.0), st.floats(-85.0, 85.0), st.floats(1e6, 6e6))
@examples(150)
def test_large_circles_end_at_their_radius_in_every_direction(space, cx, cy, radius):
    """A degree of longitude is longer at a cell's side towards the equator than at the other."""
    query = {"query_id": 0, "cx": cx, "cy": cy, "radius": radius}
    rings = [ring_around(cx, cy, part * radius, 180) for part in (0.97, 1.0001, 1.01, 1.05)]
    compare([query], as_points(np.vstack(rings).tolist()), space)


@pytest.mark.parametrize(
    ("lat0", "lat1"),
    [
        (57.31178807779581, -57.31178807758042),
        (57.31178807768785, -57.31178807768838),
        (0.0, 0.0),
    ],
)
def test_a_circle_around_the_earth_contains_the_antipode_of_its_centre(lat0, lat1):
    """Rounding may lift the haversine of antipodes above one, where it has no arcsine."""
    query = {"query_id": 0, "cx": 0.0, "cy": lat0, "radius": 20_015_200.0}
    index = Index(WORLD, [(segment_of([query], WORLD), {})])
    assert matched(index, block_of(as_points([(180.0, lat1)]))) == [(0, 0)]


@st.composite
def slivers_and_points(draw):
    """A triangle with a side that almost meets the origin, and points next to that side.

    Doubles lie so close to each other there that the differences from the corners are rounded.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    angle, reach = rng.uniform(0.0, 2 * np.pi), rng.uniform(1.0, 50.0, 2)
    direction = np.array([math.cos(angle), math.sin(angle)])
    near = rng.uniform(-1.0, 1.0, 2) * 10.0 ** rng.uniform(-18, -1)
    a, b = near - reach[0] * direction, near + reach[1] * direction
    c = near + 30.0 * np.array([-direction[1], direction[0]])
    along = np.outer(rng.normal(size=40) * 10.0 ** rng.uniform(-18, 0, 40), direction)
    text = shapely.to_wkt(shapely.Polygon([a, b, c]), rounding_precision=-1)
    return text, (near + along).tolist()


def in_triangle_exactly(corners, x, y):
    """Return whether a closed triangle with counter-clockwise corners contains a point."""
    exact = [(Fraction(a), Fraction(b)) for a, b in corners]
    x, y = Fraction(x), Fraction(y)
    return all(
        (bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0
        for (ax, ay), (bx, by) in itertools.pairwise([*exact, exact[0]])
    )


@given(slivers_and_points())
@examples(100)
def test_points_next_to_an_edge_are_on_their_exact_side(case):
    text, xy = case
    # Text may round a corner.
    corners = shapely.get_coordinates(shapely.from_wkt(text))[:3].tolist()
    index = Index(PLANE, [(segment_of([{"query_id": 0, "wkt": text}], PLANE), {})])
    expected = [(0, i) for i, (x, y) in enumerate(xy) if in_triangle_exactly(corners, x, y)]
    assert matched(index, block_of(as_points(xy))) == expected


@st.composite
def polygons_and_points(draw):
    """Stars with many corners, with a hole, some axis-parallel, points on corners and edges."""
    queries = []
    corners = []
    for i in range(draw(st.integers(1, 4))):
        seed = draw(st.integers(0, 10_000))
        rng = np.random.default_rng(seed)
        count = draw(st.integers(3, 60))
        cx, cy = rng.uniform(-5, 105), rng.uniform(-5, 65)
        angle = np.sort(rng.uniform(0, 2 * np.pi, count))
        reach = rng.uniform(2.0, draw(st.sampled_from([3.0, 20.0, 80.0])), count)
        ring = np.stack([cx + reach * np.cos(angle), cy + reach * np.sin(angle)], 1)
        if draw(st.booleans()):
            ring = np.round(ring)  # many ties with points on whole numbers
        polygon = shapely.make_valid(shapely.Polygon(ring))
        if draw(st.booleans()):
            polygon = polygon.difference(shapely.Point(cx, cy).buffer(1.0))
        parts = [part for part in shapely.get_parts(polygon) if part.geom_type == "Polygon"]
        polygon = shapely.union_all(parts)
        if polygon.is_empty or polygon.geom_type not in ("Polygon", "MultiPolygon"):
            continue
        # Through text, as users send them.
        text = shapely.to_wkt(polygon, rounding_precision=-1)
        queries.append({"query_id": i, "wkt": text})
        corners += shapely.get_coordinates(shapely.from_wkt(text)).tolist()
    anywhere = st.tuples(coordinate, coordinate)
    if corners:
        corner = st.sampled_from([tuple(c) for c in corners])
        middle = st.builds(lambda a, b: ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2), corner, corner)
        beside = st.builds(lambda a, d: (a[0], d), corner, coordinate)
        anywhere = st.one_of(anywhere, corner, middle, beside)
    return queries, as_points(draw(st.lists(anywhere, max_size=40)))


@given(polygons_and_points())
@examples(200)
def test_polygons_equal_brute_force(case):
    compare(*case, PLANE)


def test_many_random_points_against_every_shape():
    rng = np.random.default_rng(5)
    queries: list[dict] = []
    for i in range(60):
        cx, cy = rng.uniform(-74.05, -73.7), rng.uniform(40.6, 40.9)
        if i % 3 == 0:
            w, h = rng.uniform(0, 0.05, 2)
            queries.append({"query_id": i, "x0": cx, "y0": cy, "x1": cx + w, "y1": cy + h})
        elif i % 3 == 1:
            queries.append({"query_id": i, "cx": cx, "cy": cy, "radius": rng.uniform(0, 4000)})
        else:
            angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
            reach = rng.uniform(0.005, 0.03, 40)
            ring = np.stack([cx + reach * np.cos(angle), cy + reach * np.sin(angle)], 1)
            queries.append({"query_id": i, "wkt": shapely.Polygon(ring).wkt})
    xy = np.stack([rng.uniform(-74.1, -73.6, 1500), rng.uniform(40.55, 40.95, 1500)], 1)
    compare(queries, as_points([tuple(row) for row in xy.tolist()]), CITY)


def test_lifetimes_terminations_and_predicates_are_exact():
    box = {"x0": 0.0, "y0": 0.0, "x1": 10.0, "y1": 10.0}
    queries = [
        {"query_id": 0, **box, "live_from": 3},
        {"query_id": 1, **box, "live_until": 3},
        {"query_id": 2, **box, "live_from": 2, "live_until": 4, "predicate": "fare > 2"},
        {"query_id": 3, **box},
    ]
    points = [
        {"id": i, "x": 5.0, "y": 5.0, "time": i, "fare": None if i == 2 else float(i)}
        for i in range(6)
    ]
    index = Index(PLANE, [(segment_of(queries, PLANE), {3: 4, 0: 5})])
    queries[3]["live_until"] = 4
    queries[0]["live_until"] = 5

    def fare_above_two(_: str, point) -> bool:
        return point["fare"] is not None and point["fare"] > 2

    expected = brute_force(points, queries, lonlat=False, predicate=fare_above_two)
    assert (2, 3) in expected and (2, 2) not in expected
    assert matched(index, block_of(points)) == expected


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("ended_share", [0.0, 0.02, 1.0])
def test_terminations_of_any_share_are_exact(timed: bool, ended_share: float):
    rng = np.random.default_rng(round(100 * ended_share) + timed)
    queries = []
    for i in range(900):  # several blocks of slots, the last one not full
        x, y = rng.uniform(0, 60, 2)
        query = {"query_id": i, "x0": x, "y0": y, "x1": x + 20, "y1": y + 20}
        if timed and i % 3 == 0:
            query |= {"live_from": int(rng.integers(6)), "live_until": int(rng.integers(12))}
        queries.append(query)
    slots = rng.permutation(900)[: round(900 * ended_share)].tolist()
    ended = {slot: int(rng.integers(12)) for slot in slots}
    index = Index(PLANE, [(segment_of(queries, PLANE), ended)])
    for slot, until in ended.items():
        queries[slot]["live_until"] = min(queries[slot].get("live_until", until), until)
    places = rng.uniform(0, 60, (60, 2)).tolist()
    points = [{"id": i, "x": x, "y": y, "time": i % 12} for i, (x, y) in enumerate(places)]
    expected = brute_force(points, queries, lonlat=False)
    assert expected
    assert matched(index, block_of(points)) == expected


def test_a_termination_costs_little_of_a_large_segment(tmp_path):
    size = 50_000
    low = np.random.default_rng(1).uniform(0, 50, (size, 2))
    columns = {
        "query_id": [f"query {i}" for i in range(size)],
        "user_id": ["u"] * size,
        "kind": np.zeros(size, np.int8),
        **dict(zip(("x0", "y0", "x1", "y1"), np.hstack([low, low + 1]).T, strict=True)),
        "live_from": np.full(size, TIME_MIN),
        "live_until": np.full(size, TIME_MAX),
    }
    schema = query_schema(pa.string())
    rows = [columns.get(field.name, pa.nulls(size, field.type)) for field in schema]
    write_arrays(tmp_path / "s.seg", pack(build_segment(pa.table(rows, schema=schema), PLANE)))
    copied = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        opened = unpack(map_arrays(tmp_path / "s.seg"))
        Times.of(opened, {7: 3})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert opened.ids_at(np.array([7])).to_pylist() == ["query 7"]
    assert peak < 2 * size  # one lazy byte a query; an array of times would take eight
    assert pa.total_allocated_bytes() - copied < size  # identifiers stay in the file


def test_more_pairs_than_the_buffer_holds():
    size = 700
    queries = [
        {"query_id": i, "x0": 1.0, "y0": 1.0, "x1": 2.0 + i * 1e-6, "y1": 2.0} for i in range(size)
    ]
    points = as_points([(1.5, 1.5)] * 700)
    index = Index(PLANE, [(segment_of(queries, PLANE), {})])
    chunks = [pairs.slots.size for pairs in index.match(block_of(points))]
    assert sum(chunks) == size * 700
    assert len(chunks) > 1


def test_segments_round_trip_through_a_file(tmp_path):
    queries = [
        {"query_id": 7, "x0": 0.0, "y0": 0.0, "x1": 9.0, "y1": 9.0, "predicate": "fare = 1"},
        {"query_id": 8, "cx": 5.0, "cy": 5.0, "radius": 3.0, "live_from": 2},
        {"query_id": 9, "wkt": "POLYGON ((0 0, 8 0, 8 8, 0 8, 0 0), (2 2, 3 2, 3 3, 2 2))"},
    ]
    segment = segment_of(queries, PLANE)
    write_arrays(tmp_path / "s.seg", pack(segment))
    again = unpack(map_arrays(tmp_path / "s.seg"))
    assert again.queries().equals(segment.queries())
    places, slots = again.find(pa.array([9, 7, 1]))
    assert (places.tolist(), slots.tolist()) == ([0, 1], [2, 0])
    points = [{"id": i, "x": i, "y": i, "time": i, "fare": 1.0} for i in range(10)]
    one, two = (Index(PLANE, [(s, {})]) for s in (segment, again))
    assert matched(one, block_of(points)) == matched(two, block_of(points)) != []


@given(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12),
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12),
)
def test_cells_and_positions_are_monotone(a, b):
    edges = IndexGrid.over(PLANE.bounds).edges_x
    low, high = min(a, b), max(a, b)
    assert locate(low, edges) <= locate(high, edges)
    for level in (0, 3, 12):
        cell = locate(low, edges) >> level
        if locate(high, edges) >> level == cell:
            assert quantise(low, edges, cell, level) <= quantise(high, edges, cell, level)


@given(st.integers(0, 4095), st.integers(0, 4095))
def test_morton_codes_round_trip(column, row):
    code = morton(column, row)
    assert (squeeze(code), squeeze(code >> 1)) == (column, row)


def test_points_are_sorted_stably_by_cell():
    rng = np.random.default_rng(2)
    x, y = rng.uniform(-10, 110, 5000), rng.uniform(-10, 70, 5000)
    points = sort_points(x, y, IndexGrid.over(PLANE.bounds))
    assert np.all(np.diff(points.codes.astype(np.int64)) >= 0)
    same = np.diff(points.codes.astype(np.int64)) == 0
    assert np.all(np.diff(points.order)[same] > 0)
    assert np.array_equal(np.sort(points.order), np.arange(5000))
    assert np.array_equal(points.x, x[points.order])
