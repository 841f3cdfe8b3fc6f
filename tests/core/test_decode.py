"""Decode rows into points or dead letters: every fault has its reason, and no row is lost."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.model.records import Reason
from roost.model.schemas import TIMESTAMP, PointBlock
from roost.model.space import Coordinates, Outside, Rect, Space
from roost.stages.decode import (
    MALFORMED,
    ROW,
    PointSchema,
    block_schema,
    decode,
    pack_columns,
    pack_rows,
    take_rows,
    unpack_blocks,
)
from roost.stages.json_lines import read_json_lines

CITY = Rect(-74.0, 40.0, -73.0, 41.0)
LONLAT = Space(CITY, 10, 10, Coordinates.LONLAT)
PLANE = Space(CITY, 10, 10, Coordinates.PLANE)
STRICT = Space(CITY, 10, 10, Coordinates.LONLAT, Outside.DEAD)
ATTRIBUTES = pa.schema([("fare", pa.float64()), ("base", pa.string()), ("flag", pa.bool_())])
SCHEMA = PointSchema("lon", "lat", "event_time", "id", pa.string(), TIMESTAMP, ATTRIBUTES)
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
NOON_US = 1_714_564_800_000_000
GOOD = {"id": "p", "lon": -73.5, "lat": 40.5, "event_time": NOON, "fare": 9.5}


def table_of(*rows: dict) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def reasons(table: pa.Table, space: Space = LONLAT, attributes: tuple[str, ...] = ()) -> list[str]:
    return [row.reason.value for row in decode(table, SCHEMA, space, attributes)[1]]


def test_good_rows_become_points() -> None:
    table = table_of(GOOD, {**GOOD, "id": "q", "lon": -73.25, "fare": None})
    block, dead = decode(table, SCHEMA, LONLAT, ("fare",))
    assert dead == []
    assert block.x.tolist() == [-73.5, -73.25]
    assert block.y.tolist() == [40.5, 40.5]
    assert block.time.tolist() == [NOON_US, NOON_US]
    assert block.ids.to_pylist() == ["p", "q"]
    assert list(block.attributes) == ["fare"]
    assert block.attributes["fare"].to_pylist() == [9.5, None]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param({"lon": math.nan}, Reason.NOT_FINITE, id="NaN x"),
        pytest.param({"lat": math.nan}, Reason.NOT_FINITE, id="NaN y"),
        pytest.param({"lon": math.inf}, Reason.NOT_FINITE, id="infinite x"),
        pytest.param({"lat": -math.inf}, Reason.NOT_FINITE, id="infinite y"),
        pytest.param({"lon": None}, Reason.NOT_FINITE, id="no x"),
        pytest.param({"lat": 90.001}, Reason.LATITUDE, id="latitude above 90"),
        pytest.param({"lat": -90.001}, Reason.LATITUDE, id="latitude below -90"),
        pytest.param({"lon": 180.5}, Reason.LONGITUDE, id="longitude above 180"),
        pytest.param({"id": None}, Reason.NULL_ID, id="no id"),
        pytest.param({"event_time": None}, Reason.NULL_TIME, id="no time"),
    ],
)
def test_a_bad_row_gets_its_reason_and_the_others_stay(fault: dict, reason: Reason) -> None:
    table = table_of(GOOD, {**GOOD, **fault}, {**GOOD, "id": "r"})
    block, dead = decode(table, SCHEMA, LONLAT, ())
    assert [row.reason for row in dead] == [reason]
    assert block.ids.to_pylist() == ["p", "r"]
    assert dead[0].detail
    record = json.loads(dead[0].record)
    assert record["fare"] == 9.5, "the record has all fields"


@pytest.mark.parametrize("lat", [90.0, -90.0])
def test_the_poles_are_latitudes(lat: float) -> None:
    assert reasons(table_of({**GOOD, "lat": lat})) == []


@pytest.mark.parametrize("lon", [180.0, -180.0])
def test_the_antimeridian_is_a_longitude(lon: float) -> None:
    assert reasons(table_of({**GOOD, "lon": lon})) == []


def test_a_plane_has_no_latitudes() -> None:
    assert reasons(table_of({**GOOD, "lat": 1e6, "lon": -1e6}), PLANE) == []


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        pytest.param((-74.0, 40.0), [], id="on the corner"),
        pytest.param((-73.0, 41.0), [], id="on the far corner"),
        pytest.param((math.nextafter(-74.0, -99), 40.5), ["out_of_bounds"], id="just west"),
        pytest.param((-73.5, math.nextafter(41.0, 99)), ["out_of_bounds"], id="just north"),
        pytest.param((-73.5, 95.0), ["latitude_out_of_range"], id="beyond the pole"),
    ],
)
def test_points_beyond_the_bounds_are_rejected_if_configured(place, expected: list[str]) -> None:
    table = table_of({**GOOD, "lon": place[0], "lat": place[1]})
    assert reasons(table, STRICT) == expected
    assert reasons(table, LONLAT) == [r for r in expected if r != "out_of_bounds"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({"lon": ["-73.5", "west", "-73.4"]}, ["wrong_type"], id="text for a number"),
        pytest.param({"lon": [True, False, True]}, ["wrong_type"] * 3, id="boolean for a number"),
        pytest.param({"event_time": [1, 2, 3]}, ["wrong_type"] * 3, id="number for a time"),
        pytest.param(
            {"event_time": ["2024-05-01", "yesterday", None]},
            ["wrong_type", "null_time"],
            id="text for a time",
        ),
        pytest.param({"id": [1.5, 2.5, None]}, ["wrong_type"] * 2 + ["null_id"], id="fraction id"),
        pytest.param(
            {"lat": [[40.5], [40.5], None]}, ["wrong_type"] * 2 + ["not_finite"], id="list"
        ),
    ],
)
def test_wrong_types_are_named_row_by_row(values: dict, expected: list[str]) -> None:
    table = table_of(GOOD, GOOD, GOOD)
    for name, column in values.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(column))
    assert reasons(table) == expected


@pytest.mark.parametrize("name", ["lon", "lat", "event_time", "id"])
def test_a_missing_column_is_named(name: str) -> None:
    _, dead = decode(table_of(GOOD, GOOD).drop_columns([name]), SCHEMA, LONLAT, ())
    assert [row.reason for row in dead] == [Reason.MISSING_FIELD] * 2
    assert name in dead[0].detail


def test_a_wrong_attribute_rejects_its_row_only_if_a_stage_reads_it() -> None:
    table = table_of(
        {**GOOD, "fare": "12.5", "flag": "true"},
        {**GOOD, "fare": "much", "flag": "false"},
        {**GOOD, "fare": "3", "flag": "perhaps"},
    )
    assert reasons(table) == []
    block, dead = decode(table, SCHEMA, LONLAT, ("fare",))
    assert block.attributes["fare"].to_pylist() == [12.5, 3.0]
    assert [row.reason for row in dead] == [Reason.WRONG_TYPE]
    block, dead = decode(table, SCHEMA, LONLAT, ("flag",))
    assert block.attributes["flag"].to_pylist() == [True, False]
    assert [row.reason for row in dead] == [Reason.WRONG_TYPE]


def test_a_missing_attribute_is_null() -> None:
    block, dead = decode(table_of(GOOD), SCHEMA, LONLAT, ("base", "flag"))
    assert dead == []
    assert block.attributes["base"].to_pylist() == [None]
    assert block.attributes["flag"].type == pa.bool_()


def test_malformed_json_keeps_its_text() -> None:
    lines = [
        b'{"id": "a", "lon": -73.5, "lat": 40.5, "event_time": "2024-05-01T12:00:00Z"}',
        b'{"id": "b", "lon": -73.5, ',
        b"[1, 2]",
        b"\xff\xfe not text",
        b'{"id": "c", "lon": "east", "lat": 40.5, "event_time": "2024-05-01T12:00:00Z"}',
    ]
    block, dead = decode(read_json_lines(lines), SCHEMA, LONLAT, ())
    assert block.ids.to_pylist() == ["a"]
    assert block.time.tolist() == [NOON_US]
    found = sorted((row.reason.value, row.record) for row in dead)
    assert [reason for reason, _ in found] == ["malformed"] * 3 + ["wrong_type"]
    texts = {record for reason, record in found if reason == "malformed"}
    assert {'{"id": "b", "lon": -73.5, ', "[1, 2]"} <= texts


def test_rows_without_identifiers_use_their_number() -> None:
    numbered = PointSchema("lon", "lat", "event_time", None, pa.int64(), TIMESTAMP, ATTRIBUTES)
    rows = [{**GOOD, ROW: 40}, {**GOOD, "lon": math.nan, ROW: 41}, {**GOOD, ROW: 42}]
    block, dead = decode(table_of(*rows), numbered, LONLAT, ())
    assert block.ids.to_pylist() == [40, 42]
    assert [row.position for row in dead] == [41]
    assert ROW not in json.loads(dead[0].record)


def test_the_first_fault_of_a_row_is_reported() -> None:
    row = {**GOOD, "lat": 91.0, "lon": math.nan, "id": None, MALFORMED: "oops"}
    _, dead = decode(table_of(row), SCHEMA, STRICT, ())
    assert [(item.reason, item.record) for item in dead] == [(Reason.MALFORMED, "oops")]


def test_no_rows_are_no_points() -> None:
    block, dead = decode(table_of(GOOD).slice(0, 0), SCHEMA, LONLAT, ("fare", "base"))
    assert (block.size, dead) == (0, [])


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6),
    st.lists(st.integers(0, 3), max_size=2), st.just("2024-05-01T12:00:00Z"),
    st.floats(-74, -73), st.floats(40, 41),
)  # fmt: skip
fields = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("id", "lon", "lat", "event_time", "fare", "flag"), anything)
)


@given(st.lists(fields, max_size=8), st.sampled_from([LONLAT, PLANE, STRICT]))
@examples(80)
def test_every_row_is_a_point_or_a_dead_letter_once(records: list[dict], space) -> None:
    lines = [json.dumps(record).encode() for record in records]
    table = read_json_lines(lines)
    block, dead = decode(table, SCHEMA, space, ("fare", "flag"))
    assert block.size + len(dead) == len(records)
    assert all(len(column) == block.size for column in block.attributes.values())
    assert np.isfinite(block.x).all() and np.isfinite(block.y).all()
    assert block.ids.null_count == 0
    assert {row.reason for row in dead} <= set(Reason)


def points(size: int) -> PointBlock:
    random = np.random.default_rng(5)
    return PointBlock(
        random.random(size),
        random.random(size),
        random.integers(0, 99, size),
        pa.array([f"p{n}" for n in range(size)]),
        {"fare": pa.array(random.random(size)), "base": pa.array([None] * size, pa.string())},
    )


def columns_of(block: PointBlock) -> list[list]:
    own = [block.x.tolist(), block.y.tolist(), block.time.tolist(), block.ids.to_pylist()]
    return own + [[name, *array.to_pylist()] for name, array in block.attributes.items()]


@pytest.mark.parametrize("borders", [[0, 1], [0, 100], [0, 1, 40, 100], [30, 60]])
def test_unpacked_rows_equal_the_packed_ones(borders: list[int]) -> None:
    block, cells = points(100), np.arange(100, dtype=np.int32)
    schema = block_schema(SCHEMA, ("fare", "base"))
    columns = pack_columns(block, cells)
    assert columns.schema == schema
    packed = [pack_rows(columns, start, stop) for start, stop in itertools.pairwise(borders)]
    rows = np.arange(borders[0], borders[-1])
    found, found_cells = unpack_blocks(packed, schema)
    assert columns_of(found) == columns_of(take_rows(block, rows))
    assert found_cells.tolist() == rows.tolist()


def test_rows_of_a_block() -> None:
    block = points(10)
    some = take_rows(block, np.array([7, 2, 2]))
    whole = columns_of(block)
    assert columns_of(some)[3] == ["p7", "p2", "p2"]
    assert columns_of(some)[0] == [whole[0][k] for k in (7, 2, 2)]
    assert columns_of(some)[4][1:] == [whole[4][1:][k] for k in (7, 2, 2)]


def test_rows_with_bytes_that_are_not_utf8_are_rejected_and_readable() -> None:
    texts = pa.array([b"fine", b"\xff\xfe", None], pa.binary()).view(pa.string())
    table = pa.table(
        {
            "id": pa.array([b"a", b"b", b"\xc3"], pa.binary()).view(pa.string()),
            "x": [1.0, 2.0, 3.0],
            "y": [1.0, 2.0, 3.0],
            "t": [1, 2, 3],
            "name": texts,
            ROW: [0, 1, 2],
        }
    )
    attributes = pa.schema([("name", pa.string())])
    schema = PointSchema("x", "y", "t", "id", pa.string(), pa.int64(), attributes)
    space = Space(Rect(0.0, 0.0, 10.0, 10.0), coordinates=Coordinates.PLANE)
    block, dead = decode(table, schema, space, ("name",))
    assert block.ids.to_pylist() == ["a"]
    assert [(row.position, row.reason.value) for row in dead] == [
        (1, "wrong_type"),
        (2, "wrong_type"),
    ]
    assert all("\ufffd" in row.record for row in dead)


def test_late_points_are_rejected_with_their_reason() -> None:
    table = pa.table({"id": [1, 2, 3], "x": [1.0] * 3, "y": [1.0] * 3, "t": [5, 4, None]})
    schema = PointSchema("x", "y", "t", "id", pa.int64(), pa.int64(), pa.schema([]))
    space = Space(Rect(0.0, 0.0, 10.0, 10.0), coordinates=Coordinates.PLANE)
    block, dead = decode(table, schema, space, (), 5)
    assert block.ids.to_pylist() == [1]
    assert [row.reason.value for row in dead] == ["late", "null_time"]
