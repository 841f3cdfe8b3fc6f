"""JSON lines and messages into columns, compared with Python's own reader, one at a time."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.model.schemas import TIMESTAMP
from roost.model.space import Coordinates, Rect, Space
from roost.stages.decode import MALFORMED, ROW, PointSchema, decode
from roost.stages.json_lines import read_json_lines, read_json_messages

PLANE = Space(Rect(0.0, 0.0, 8.0, 8.0), 4, 4, Coordinates.PLANE)
FARE = pa.field("fare", pa.float64())
COUNT = pa.field("count", pa.int64())
BASE = pa.field("base", pa.string())
SCHEMA = PointSchema(
    x="x",
    y="y",
    time="time",
    point_id="id",
    id_type=pa.string(),
    time_type=TIMESTAMP,
    attributes=pa.schema([FARE, COUNT, BASE]),
)
ATTRIBUTES = ("fare", "count", "base")
EXACT = {"id", "count", "base"}

# Lines that Arrow's reader misreads, joins with the next line, or crashes on.
HOSTILE = [
    b"null",
    b"true",
    b"12",
    b'"text"',
    b"[]",
    b'[{"id": "a"}]',
    b'{"id": "a"',
    b"}",
    b'{"id": {"id": 1}',
    b'{"id": 1}}',
    b'{"id": "a"} {"id": "b"}',
    b'{"id": "\xc3"}',
    b'{"id": "\\ud800"}',
    b"\xff\xfe{\x00}\x00",
    b"{",
    b"[" * 100_000,
    b'{"id":' * 100_000,
    b'{"id":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"id":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"id": ' + b"9" * 5_000 + b"}",
]
GOOD = b'{"id": "good", "x": 1, "y": 2.5, "time": "2014-04-01T00:00:00Z"}'


@pytest.mark.parametrize("line", HOSTILE)
def test_a_line_that_is_no_object_keeps_its_text(line: bytes) -> None:
    text = line.decode("utf-8", "replace")
    for lines in ([line], [line, GOOD], [GOOD, line, GOOD], [line, line]):
        table = read_json_lines(lines)
        assert table.num_rows == len(lines)
        others = [text for other in lines if other == line]
        assert table[MALFORMED].drop_null().to_pylist() == others
        if GOOD in lines:
            assert table["id"].drop_null().to_pylist() == ["good"] * (len(lines) - len(others))


def test_blank_lines_are_left_out_and_empty_messages_are_not() -> None:
    assert read_json_lines([b"", b" ", GOOD, b"\r"]).num_rows == 1
    table = read_json_messages([None, b"", b" \n", GOOD], EXACT)
    assert table[MALFORMED].to_pylist() == [None, "null", "null", "null"]


@pytest.mark.parametrize("name", [ROW, MALFORMED])
def test_reserved_column_names_are_not_read_from_input(name: str) -> None:
    for extra in ([], [b"[]"]):
        lines = [json.dumps({"id": "a", name: "mine"}).encode(), *extra]
        assert read_json_lines(lines)["id"].to_pylist()[0] == "a"
        assert ROW not in read_json_lines(lines).column_names
        alone = read_json_lines([json.dumps({name: "mine"}).encode(), *extra])
        assert alone.column_names == [MALFORMED]
        assert alone.num_rows == 1 + len(extra)


def test_text_that_looks_like_a_date_stays_text() -> None:
    lines = [b'{"n": 1}', b'{"n": 2, "id": "2014-04-01", "at": "2014-04-01T00:00:00Z"}']
    table = read_json_lines(lines)
    assert table["id"].to_pylist() == [None, "2014-04-01"]
    assert table["at"].to_pylist() == [None, "2014-04-01T00:00:00Z"]


def test_a_column_of_a_file_with_several_types_is_text() -> None:
    table = read_json_lines([b'{"id": "a"}', b'{"id": 5}', b'{"id": 1.5}'])
    assert table["id"].to_pylist() == ["a", "5", "1.5"]


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -3, 1 << 53, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 10**30),
    *(0.0, -0.0, 1.0, 2.5, 1e300, math.nan, math.inf),
    *("", "a", "5", "2.5", "x", "2014-04-01", "2014-04-01T00:00:00.5+02:00", "20140401"),
    *("nan", "true", "\u00fc", "\x00", [], [1], ["a"], {}, {"a": 1}, {"a": [1, "b"]}),
]
GOOD_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "id": st.sampled_from(["a", "b", 1, 2]),
    "x": st.sampled_from([0, 1, 2.5]),
    "y": st.sampled_from([0, 1, 2.5]),
    "time": st.sampled_from(["2014-04-01T00:00:00Z", "2014-04-01 00:00:00", "2014-04-01"]),
}


@st.composite
def messages(draw: st.DrawFn) -> bytes | None:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([None, b"", b"[]", b'{"id": ', b'{"id": "\\ud800"}']))
    record = {name: draw(values) for name, values in GOOD_FIELDS.items()}
    names = st.sampled_from([*GOOD_FIELDS, *ATTRIBUTES])
    record |= draw(st.dictionaries(names, st.sampled_from(VALUES), max_size=2))
    return json.dumps(record, indent=draw(st.sampled_from([None, None, None, 1]))).encode()


def decoded(block: list[bytes | None]) -> tuple[list[Any], int]:
    """Return the points of a block, as text, and the number of its dead letters."""
    table = read_json_messages(block, EXACT)
    assert table.num_rows == len(block)
    points, dead = decode(table, SCHEMA, PLANE, ATTRIBUTES)
    columns = [points.x.tolist(), points.y.tolist(), points.time.tolist(), points.ids.to_pylist()]
    columns += [points.attributes[name].to_pylist() for name in ATTRIBUTES]
    return [repr(row) for row in zip(*columns, strict=True)], len(dead)


@pytest.mark.parametrize("y", [2, 2.5])
@pytest.mark.parametrize("name", [*GOOD_FIELDS, *ATTRIBUTES])
def test_the_result_of_a_message_does_not_depend_on_the_value_of_another(
    name: str, y: float
) -> None:
    good = {"id": "a", "x": 1, "y": y, "time": "2014-04-01T00:00:00Z"}
    for value in VALUES:
        for other in (value, 7, 7.5, "7", None):
            block = [json.dumps({**good, name: v}).encode() for v in (value, other)]
            alone = [decoded([message]) for message in block]
            points, dead = decoded(list(block))
            assert sorted(points) == sorted(alone[0][0] + alone[1][0]), block
            assert dead == alone[0][1] + alone[1][1], block


@given(st.lists(messages(), min_size=1, max_size=8))
def test_the_result_of_a_message_does_not_depend_on_its_block(block: list[bytes | None]) -> None:
    alone = [decoded([message]) for message in block]
    points, dead = decoded(block)
    assert sorted(points) == sorted(point for found, _ in alone for point in found)
    assert dead == sum(count for _, count in alone)
    assert len(points) + dead == len(block)
