"""Which requests become queries: every fault has its reason, and only the faulty row suffers."""

from __future__ import annotations

import datetime as dt
import json
import math
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.model.records import BOX, CIRCLE, POLYGON, TIME_MAX, TIME_MIN, Reason
from roost.model.schemas import TIMESTAMP, request_schema
from roost.model.space import Coordinates, Outside, Rect, Space
from roost.queries.admission import Admission, Rules, admit, read_polygon
from roost.stages.json_lines import read_json_lines
from roost.stages.point_files import read_requests

BOUNDS = Rect(-10.0, -10.0, 10.0, 10.0)
PLANE = Space(BOUNDS, 10, 10, Coordinates.PLANE)
LONLAT = Space(BOUNDS, 10, 10, Coordinates.LONLAT)
ATTRIBUTES = pa.schema([("fare", pa.float64()), ("base", pa.string())])
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
NOON_US = 1_714_564_800_000_000

BOX_REQUEST = {
    "op": "register", "query_id": "q", "user_id": "ann", "x0": 0.0, "y0": 0.0, "x1": 1.0, "y1": 1.0,
}  # fmt: skip
CIRCLE_REQUEST = {
    "op": "register", "query_id": "q", "user_id": "ann", "cx": 0.0, "cy": 0.0, "radius": 1.0,
}  # fmt: skip
SQUARE = "POLYGON ((0 0, 4 0, 4 4, 0 4, 0 0), (1 1, 2 1, 2 2, 1 2, 1 1))"
POLYGON_REQUEST = {"op": "register", "query_id": "q", "user_id": "ann", "wkt": SQUARE}


def rules(space: Space = PLANE, **changes) -> Rules:
    given = {"id_type": pa.string(), "time_type": TIMESTAMP, "attributes": ATTRIBUTES, **changes}
    return Rules(space, **given)


def judge(*requests: dict, first: int = 0, by: Rules | None = None) -> Admission:
    names = dict.fromkeys(name for request in requests for name in request)
    columns = {name: [request.get(name) for request in requests] for name in names}
    return admit(pa.table(columns), by or rules(), positions=first + np.arange(len(requests)))


def reasons(admission: Admission) -> list[str]:
    return [refused.reason.value for refused in admission.refused]


# -- admitted requests


def test_a_box_is_admitted_with_its_fields() -> None:
    (query,) = judge({**BOX_REQUEST, "predicate": "fare > 50"}).queries.to_pylist()
    expected = {
        "query_id": "q", "user_id": "ann", "kind": BOX, "x0": 0.0, "y0": 0.0, "x1": 1.0, "y1": 1.0,
        "wkb": None, "predicate": "fare > 50", "live_from": TIME_MIN, "live_until": TIME_MAX,
    }  # fmt: skip
    assert expected.items() <= query.items()


def test_a_circle_is_admitted_with_its_centre_and_radius() -> None:
    (query,) = judge({**CIRCLE_REQUEST, "cx": 3.0, "cy": -2.0}).queries.to_pylist()
    assert (query["kind"], query["x0"], query["y0"], query["radius"]) == (CIRCLE, 3.0, -2.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(SQUARE, id="WKT"),
        pytest.param(shapely.to_geojson(shapely.from_wkt(SQUARE)), id="GeoJSON"),
        pytest.param("  " + shapely.to_geojson(shapely.from_wkt(SQUARE)), id="after blanks"),
        pytest.param(shapely.to_wkt(shapely.force_3d(shapely.from_wkt(SQUARE), 7)), id="heights"),
    ],
)
def test_a_polygon_is_admitted_with_its_holes(text: str) -> None:
    (query,) = judge({**POLYGON_REQUEST, "wkt": text}).queries.to_pylist()
    assert query["kind"] == POLYGON
    assert [query[name] for name in ("x0", "y0", "x1", "y1")] == [0.0, 0.0, 4.0, 4.0]
    polygon = shapely.from_wkb(query["wkb"])
    assert polygon.equals(shapely.from_wkt(SQUARE))
    assert not polygon.has_z


def test_a_multipolygon_is_admitted() -> None:
    text = "MULTIPOLYGON (((0 0, 1 0, 1 1, 0 0)), ((5 5, 6 5, 6 6, 5 5)))"
    (query,) = judge({**POLYGON_REQUEST, "wkt": text}).queries.to_pylist()
    assert [query[name] for name in ("x0", "y0", "x1", "y1")] == [0.0, 0.0, 6.0, 6.0]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({**BOX_REQUEST, "x1": 0.0, "y1": 0.0}, id="a box that is a point"),
        pytest.param({**CIRCLE_REQUEST, "radius": 0.0}, id="a circle that is a point"),
        pytest.param({**BOX_REQUEST, "x1": 1e9, "x0": -1e9}, id="a box beyond the bounds"),
    ],
)
def test_shapes_at_the_limit_are_admitted(request_: dict) -> None:
    assert reasons(judge(request_)) == []


def test_times_are_stored_as_the_lifetime() -> None:
    later = NOON + dt.timedelta(seconds=1)
    (query,) = judge({**BOX_REQUEST, "at": NOON, "expires_at": later}).queries.to_pylist()
    assert (query["live_from"], query["live_until"]) == (NOON_US, NOON_US + 1_000_000)


def test_times_of_a_stream_with_whole_numbers() -> None:
    by = rules(time_type=pa.int64())
    (query,) = judge({**BOX_REQUEST, "at": 5, "expires_at": "9"}, by=by).queries.to_pylist()
    assert (query["live_from"], query["live_until"]) == (5, 9)


def test_identifiers_have_the_type_of_the_stream() -> None:
    by = rules(id_type=pa.int64())
    admission = judge({**BOX_REQUEST, "query_id": "7"}, {**BOX_REQUEST, "query_id": "x"}, by=by)
    assert admission.queries["query_id"].to_pylist() == [7]
    assert reasons(admission) == ["wrong_type"]


def test_attributes_of_an_unknown_schema_are_not_checked() -> None:
    by = rules(attributes=None)
    assert reasons(judge({**BOX_REQUEST, "predicate": "anything > 5"}, by=by)) == []
    assert reasons(judge({**BOX_REQUEST, "predicate": "anything >"}, by=by)) == ["bad_predicate"]


# -- what is refused, and why

nan, inf = math.nan, math.inf
FAULTS = [
    pytest.param({**BOX_REQUEST, "op": None}, Reason.MISSING_FIELD, id="no op"),
    pytest.param({**BOX_REQUEST, "op": "update"}, Reason.UNKNOWN_OP, id="unknown op"),
    pytest.param({**BOX_REQUEST, "query_id": None}, Reason.MISSING_FIELD, id="no query id"),
    pytest.param({**BOX_REQUEST, "user_id": None}, Reason.MISSING_FIELD, id="no user"),
    pytest.param({**BOX_REQUEST, "x0": nan}, Reason.NOT_FINITE, id="NaN in a box"),
    pytest.param({**BOX_REQUEST, "y1": inf}, Reason.NOT_FINITE, id="infinity in a box"),
    pytest.param({**CIRCLE_REQUEST, "cx": -inf}, Reason.NOT_FINITE, id="infinity in a circle"),
    pytest.param({**CIRCLE_REQUEST, "radius": nan}, Reason.NOT_FINITE, id="NaN radius"),
    pytest.param({**BOX_REQUEST, "x0": 2.0}, Reason.INVERTED_BOX, id="box inverted in x"),
    pytest.param({**BOX_REQUEST, "y0": 2.0}, Reason.INVERTED_BOX, id="box inverted in y"),
    pytest.param({**CIRCLE_REQUEST, "radius": -1.0}, Reason.BAD_RADIUS, id="negative radius"),
    pytest.param({**BOX_REQUEST, "x1": None}, Reason.MISSING_FIELD, id="half a box"),
    pytest.param({**CIRCLE_REQUEST, "radius": None}, Reason.MISSING_FIELD, id="no radius"),
    pytest.param(
        {"op": "register", "query_id": "q", "user_id": "ann"}, Reason.MISSING_FIELD, id="no shape"
    ),
    pytest.param({**BOX_REQUEST, "wkt": SQUARE}, Reason.MALFORMED, id="two shapes"),
    pytest.param({**BOX_REQUEST, "x0": "west"}, Reason.WRONG_TYPE, id="text for a number"),
    pytest.param({**BOX_REQUEST, "at": "yesterday"}, Reason.WRONG_TYPE, id="no time"),
    pytest.param({**BOX_REQUEST, "expires_at": 5}, Reason.WRONG_TYPE, id="a time without a unit"),
    pytest.param({**BOX_REQUEST, "predicate": 5.5}, Reason.WRONG_TYPE, id="number for a predicate"),
    pytest.param(
        {**BOX_REQUEST, "predicate": "fare >"}, Reason.BAD_PREDICATE, id="half a predicate"
    ),
    pytest.param(
        {**BOX_REQUEST, "predicate": "tip > 5"}, Reason.BAD_PREDICATE, id="no such attribute"
    ),
    pytest.param({**BOX_REQUEST, "predicate": "base > 5"}, Reason.BAD_PREDICATE, id="wrong kind"),
    pytest.param(
        {**BOX_REQUEST, "predicate": "__import__('os').system('x')"},
        Reason.BAD_PREDICATE,
        id="code",
    ),
    pytest.param({**POLYGON_REQUEST, "wkt": "POLYGON (("}, Reason.MALFORMED, id="half a polygon"),
    pytest.param({**POLYGON_REQUEST, "wkt": '{"type": "Poly'}, Reason.MALFORMED, id="half GeoJSON"),
    pytest.param({**POLYGON_REQUEST, "wkt": ""}, Reason.MALFORMED, id="empty text"),
    pytest.param({**POLYGON_REQUEST, "wkt": "POINT (1 1)"}, Reason.INVALID_POLYGON, id="a point"),
    pytest.param({**POLYGON_REQUEST, "wkt": "POLYGON EMPTY"}, Reason.INVALID_POLYGON, id="empty"),
    pytest.param(
        {**POLYGON_REQUEST, "wkt": "POLYGON ((0 0, 2 2, 2 0, 0 2, 0 0))"},
        Reason.INVALID_POLYGON,
        id="self-crossing",
    ),
    pytest.param(
        {**POLYGON_REQUEST, "wkt": "POLYGON ((0 0, 4 0, 4 4, 0 0), (8 8, 9 8, 9 9, 8 8))"},
        Reason.INVALID_POLYGON,
        id="a hole outside",
    ),
    pytest.param(
        {**POLYGON_REQUEST, "wkt": "POLYGON ((0 0, nan 1, 1 1, 0 0))"},
        Reason.NOT_FINITE,
        id="NaN edge",
    ),
    pytest.param(
        {"op": "terminate", "query_id": "z", "user_id": "ann"},
        Reason.UNKNOWN_QUERY,
        id="no such query",
    ),
]


@pytest.mark.parametrize(("request_", "reason"), FAULTS)
def test_an_invalid_request_is_refused_and_its_neighbours_are_admitted(
    request_, reason: Reason
) -> None:
    before, after = {**BOX_REQUEST, "query_id": "a"}, {**CIRCLE_REQUEST, "query_id": "b"}
    blocks = [pa.Table.from_pylist([request]) for request in (before, request_, after)]
    try:
        table = pa.concat_tables(blocks, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # a column of text, where one value is text
        lines = [json.dumps(request).encode() for request in (before, request_, after)]
        table = read_json_lines(lines)
    admission = admit(table, rules(), positions=np.arange(100, 103))
    (refused,) = admission.refused
    assert (refused.position, refused.reason) == (101, reason)
    assert refused.detail
    assert sorted(admission.queries["query_id"].to_pylist()) == ["a", "b"]
    record = json.loads(refused.record)
    assert record.get("op") == request_["op"], (
        "the dead-letter record has the request as it was sent"
    )


@pytest.mark.parametrize("cy", [90.5, -91.0])
def test_a_circle_beyond_the_poles_is_refused_on_lonlat_only(cy: float) -> None:
    request = {**CIRCLE_REQUEST, "cy": cy}
    assert reasons(judge(request, by=rules(LONLAT))) == ["latitude_out_of_range"]
    assert reasons(judge(request, by=rules(PLANE))) == []


def test_a_circle_beyond_the_longitude_limit_is_refused() -> None:
    request = {**CIRCLE_REQUEST, "cx": 721.0}
    assert reasons(judge(request, by=rules(LONLAT))) == ["longitude_out_of_range"]
    assert reasons(judge(request, by=rules(PLANE))) == []
    assert reasons(judge({**CIRCLE_REQUEST, "cx": 190.0}, by=rules(LONLAT))) == []


@pytest.mark.parametrize(("vertices", "expected"), [(10, []), (11, ["oversized_polygon"])])
def test_oversized_polygons_are_refused_at_the_configured_limit(vertices, expected) -> None:
    turns = np.linspace(0, 2 * np.pi, vertices)[:-1]
    ring = [(math.cos(turn), math.sin(turn)) for turn in turns]
    text = shapely.to_wkt(shapely.Polygon(ring))
    assert shapely.get_num_coordinates(shapely.from_wkt(text)) == vertices
    request = {**POLYGON_REQUEST, "wkt": text}
    assert reasons(judge(request, by=rules(polygon_vertices_max=10))) == expected
    assert reasons(judge(request)) == []


INSIDE_OR_NOT = [
    pytest.param({**BOX_REQUEST, "x0": 10.0, "x1": 12.0}, True, id="a box that touches"),
    pytest.param({**BOX_REQUEST, "x0": 10.1, "x1": 12.0}, False, id="a box beyond"),
    pytest.param({**BOX_REQUEST, "x0": -99.0, "x1": 99.0}, True, id="a box around"),
    pytest.param({**BOX_REQUEST, "y0": -12.0, "y1": -10.1}, False, id="a box below"),
    pytest.param({**CIRCLE_REQUEST, "cx": 9.0}, True, id="a circle inside"),
    pytest.param({**CIRCLE_REQUEST, "cx": 12.0, "radius": 1.5}, False, id="a circle beyond"),
    pytest.param(
        {**CIRCLE_REQUEST, "cx": 12.0, "radius": 2.5}, True, id="a circle that reaches in"
    ),
    pytest.param(
        {**POLYGON_REQUEST, "wkt": "POLYGON ((11 0, 12 0, 12 1, 11 0))"},
        False,
        id="a polygon beyond",
    ),
    pytest.param(
        {**POLYGON_REQUEST, "wkt": "POLYGON ((9 0, 12 0, 12 1, 9 0))"}, True, id="a polygon across"
    ),
]


@pytest.mark.parametrize(("request_", "inside"), INSIDE_OR_NOT)
def test_queries_outside_the_bounds_are_refused_only_if_configured(
    request_: dict, inside: bool
) -> None:
    dead = Space(BOUNDS, 10, 10, Coordinates.PLANE, Outside.DEAD)
    assert reasons(judge(request_, by=rules(dead))) == ([] if inside else ["out_of_bounds"])
    assert reasons(judge(request_)) == []


def test_a_lonlat_circle_that_overlaps_the_bounds_is_admitted() -> None:
    dead = Space(BOUNDS, 10, 10, Coordinates.LONLAT, Outside.DEAD)
    near = {**CIRCLE_REQUEST, "cx": 12.0, "radius": 250_000.0}
    far = {**CIRCLE_REQUEST, "cx": 12.0, "radius": 200_000.0}
    assert reasons(judge(near, by=rules(dead))) == []
    assert reasons(judge(far, by=rules(dead))) == ["out_of_bounds"]


def test_the_text_of_a_malformed_message_is_recorded() -> None:
    table = pa.table({"malformed": ["{oops", None], "op": [None, "terminate"]})
    admission = admit(table, rules(), positions=np.array([7, 8]))
    assert reasons(admission) == ["malformed", "missing_field"]
    assert [refused.position for refused in admission.refused] == [7, 8]
    assert admission.refused[0].record == "{oops"


def test_the_text_of_malformed_lines_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(BOX_REQUEST) + "\n{oops\n")
    admission = admit(read_requests(path), rules())
    assert admission.queries.num_rows == 1
    assert reasons(admission) == ["malformed"]
    assert admission.refused[0].record == "{oops"


def test_an_empty_block_gives_an_empty_result() -> None:
    admission = admit(request_schema(pa.string(), TIMESTAMP).empty_table(), rules())
    assert (admission.queries.num_rows, admission.ended, admission.refused) == (0, {}, [])


# -- whatever comes

junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["register", "terminate", "ann", "q", SQUARE, "fare > 5", "2024-05-01"]),
    st.floats(-20, 20), st.lists(st.integers(), max_size=2),
)  # fmt: skip
NAMES = request_schema(pa.string(), TIMESTAMP).names
plausible = st.sampled_from([BOX_REQUEST, CIRCLE_REQUEST, POLYGON_REQUEST])
junk_requests = st.builds(
    lambda base, changes: {**base, **changes},
    plausible,
    st.dictionaries(st.sampled_from(NAMES), junk, max_size=3),
)


@given(st.lists(junk_requests, min_size=1, max_size=8), st.booleans(), st.booleans())
@examples(100)
def test_every_request_is_admitted_or_refused_once(requests, lonlat: bool, dead: bool) -> None:
    coordinates = Coordinates.LONLAT if lonlat else Coordinates.PLANE
    space = Space(BOUNDS, 10, 10, coordinates, Outside.DEAD if dead else Outside.EXACT)
    table = read_json_lines([json.dumps(request).encode() for request in requests])
    admission = admit(table, rules(space))
    positions = [refused.position for refused in admission.refused]
    assert len(set(positions)) == len(positions)
    ended = sum(refused.reason is Reason.UNKNOWN_QUERY for refused in admission.refused)
    registered = admission.queries.num_rows
    # A register that is terminated in the same block leaves no query and no dead-letter record.
    assert registered + len(positions) <= len(requests)
    if not any(request.get("op") == "terminate" for request in requests):
        assert registered + len(positions) == len(requests)
        assert ended == 0


@given(st.text(max_size=40) | st.sampled_from([SQUARE, SQUARE[:20], '{"type": 5}', "{}", "[]"]))
@examples(150)
def test_any_text_is_accepted_or_rejected_as_polygon(text: str) -> None:
    geometry = read_polygon(text)
    assert geometry is None or isinstance(geometry, shapely.Geometry)


@pytest.mark.no_cover  # tracing would be measured, too
def test_fifty_thousand_requests_are_admitted_quickly() -> None:
    size = 50_000
    random = np.random.default_rng(2)
    low = random.uniform(-9, 9, (size, 2))
    table = pa.table(
        {
            "op": ["register"] * size,
            "query_id": [f"q{n}" for n in range(size)],
            "user_id": ["ann"] * size,
            "x0": low[:, 0], "y0": low[:, 1], "x1": low[:, 0] + 0.1, "y1": low[:, 1] + 0.1,
            "predicate": ["fare > 50", None] * (size // 2),
        }
    )  # fmt: skip
    admit(table.slice(0, 10), rules())
    started = time.process_time()
    admission = admit(table, rules())
    assert time.process_time() - started < 2.0
    assert admission.queries.num_rows == size
    assert admission.queries["query_id"].to_pylist() == table["query_id"].to_pylist()


# -- outputs over a window


def test_requested_outputs_are_stored_with_the_log_position() -> None:
    admission = judge(
        BOX_REQUEST,
        {**BOX_REQUEST, "query_id": "a", "aggregate": "COUNT , avg(fare)"},
        {**CIRCLE_REQUEST, "query_id": "n", "nearest": 3},
        {**CIRCLE_REQUEST, "query_id": "bad", "nearest": 0},
        {**BOX_REQUEST, "query_id": "b", "aggregate": "min(base)"},
        first=40,
    )
    assert reasons(admission) == ["bad_nearest"]
    expected = [None, "aggregate count, avg(fare)", "nearest 3", "aggregate min(base)"]
    assert admission.queries["output"].to_pylist() == expected
    assert admission.queries["created_position"].to_pylist() == [None, 41, 42, 44]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({**BOX_REQUEST, "aggregate": "median(fare)"}, Reason.BAD_AGGREGATE),
        ({**BOX_REQUEST, "aggregate": "sum(colour)"}, Reason.BAD_AGGREGATE),
        ({**BOX_REQUEST, "aggregate": "sum(base)"}, Reason.BAD_AGGREGATE),
        ({**BOX_REQUEST, "aggregate": ""}, Reason.BAD_AGGREGATE),
        ({**BOX_REQUEST, "aggregate": 7}, Reason.BAD_AGGREGATE),
        ({**BOX_REQUEST, "nearest": 3}, Reason.BAD_NEAREST),
        ({**POLYGON_REQUEST, "nearest": 3}, Reason.BAD_NEAREST),
        ({**CIRCLE_REQUEST, "nearest": 10**6}, Reason.BAD_NEAREST),
        ({**CIRCLE_REQUEST, "nearest": "few"}, Reason.WRONG_TYPE),
        ({**CIRCLE_REQUEST, "nearest": 3, "aggregate": "count"}, Reason.MALFORMED),
    ],
)
def test_invalid_outputs_are_refused(request_: dict, reason: Reason) -> None:
    by = rules(window_attributes=ATTRIBUTES)
    assert reasons(judge(request_, by=by)) == [reason.value]


@pytest.mark.parametrize(
    "request_", [{**BOX_REQUEST, "aggregate": "count"}, {**CIRCLE_REQUEST, "nearest": 1}]
)
def test_outputs_are_refused_without_a_window(request_: dict) -> None:
    assert reasons(judge(request_, by=rules(window=False))) == ["no_window"]
    assert reasons(judge(request_)) == []
