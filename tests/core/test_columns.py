"""Conversion of columns: one bad value rejects one row."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.model.columns import convert, parse_time, record_json, times_as_int
from roost.model.schemas import TIMESTAMP

UTC = dt.UTC
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=UTC)
BAD = object()  # the row must be marked


def check(values: list, source: pa.DataType | None, to: pa.DataType, expected: list) -> None:
    converted, bad = convert(pa.array(values, source), to)
    assert converted.type == to
    assert bad.tolist() == [item is BAD for item in expected]
    assert converted.to_pylist() == [None if item is BAD else item for item in expected]


@pytest.mark.parametrize(
    ("source", "values", "expected"),
    [
        pytest.param(None, [1, None, -3], [1.0, None, -3.0], id="whole numbers"),
        pytest.param(pa.float32(), [0.5, None], [0.5, None], id="single precision"),
        pytest.param(
            None, ["1.5", " 2 ", "x", "", None, "1e3"], [1.5, 2.0, BAD, BAD, None, 1e3], id="text"
        ),
        pytest.param(None, [True, False], [BAD, BAD], id="booleans are no numbers"),
        pytest.param(None, [[1.0], None], [BAD, None], id="lists"),
        pytest.param(None, [{"a": 1}], [BAD], id="records"),
        pytest.param(None, [NOON], [BAD], id="times"),
        pytest.param(None, [decimal.Decimal("1.25")], [1.25], id="decimals"),
        pytest.param(None, [2**53 + 1, 1], [float(2**53), 1.0], id="beyond exact doubles"),
        pytest.param(pa.null(), [None, None], [None, None], id="only nulls"),
        pytest.param(
            pa.dictionary(pa.int8(), pa.string()), ["1", "x"], [1.0, BAD], id="dictionary"
        ),
    ],
)
def test_to_numbers(source, values: list, expected: list) -> None:
    check(values, source, pa.float64(), expected)


@pytest.mark.parametrize(
    ("source", "values", "expected"),
    [
        pytest.param(pa.int32(), [1, None], [1, None], id="narrower"),
        pytest.param(pa.uint64(), [2**63 - 1, 2**63], [2**63 - 1, BAD], id="beyond 64 bits"),
        pytest.param(
            None, ["7", "-8", "7.0", "x", "99999999999999999999"], [7, -8, BAD, BAD, BAD], id="text"
        ),
        pytest.param(None, [3.0, 3.5, math.nan, math.inf], [3, BAD, BAD, BAD], id="fractions"),
        pytest.param(None, [True], [BAD], id="booleans"),
        pytest.param(None, [NOON], [BAD], id="times"),
    ],
)
def test_to_whole_numbers(source, values: list, expected: list) -> None:
    check(values, source, pa.int64(), expected)


@pytest.mark.parametrize(
    ("source", "values", "expected"),
    [
        pytest.param(pa.large_string(), ["a", None], ["a", None], id="large text"),
        pytest.param(None, [5, None], ["5", None], id="whole numbers"),
        pytest.param(None, [1.5], [BAD], id="fractions"),
        pytest.param(None, [b"\xff\xfe"], [BAD], id="bytes"),
        pytest.param(None, [["a"]], [BAD], id="lists"),
        pytest.param(
            pa.dictionary(pa.int8(), pa.string()), ["a", None], ["a", None], id="dictionary"
        ),
    ],
)
def test_to_text(source, values: list, expected: list) -> None:
    check(values, source, pa.string(), expected)


@pytest.mark.parametrize(
    ("source", "values", "expected"),
    [
        pytest.param(pa.timestamp("ns"), [NOON], [NOON], id="nanoseconds without a zone are UTC"),
        pytest.param(pa.timestamp("s", "Asia/Tokyo"), [NOON], [NOON], id="another zone"),
        pytest.param(
            None, [dt.date(2024, 5, 1)], [dt.datetime(2024, 5, 1, tzinfo=UTC)], id="dates"
        ),
        pytest.param(
            None,
            ["2024-05-01T12:00:00Z", "2024-05-01 14:00:00+02:00", "2024-05-01T12:00", "noon", ""],
            [NOON, NOON, NOON, BAD, BAD],
            id="text",
        ),
        pytest.param(None, [1714564800], [BAD], id="numbers have no unit"),
        pytest.param(None, ["2024-13-01", "0000-01-01"], [BAD, BAD], id="no such day"),
    ],
)
def test_to_times(source, values: list, expected: list) -> None:
    check(values, source, TIMESTAMP, expected)


@pytest.mark.parametrize(
    ("values", "to", "expected"),
    [
        pytest.param([1, 3_000_000_000, None], pa.int32(), [1, BAD, None], id="int32"),
        pytest.param([-1, 255, 256], pa.uint8(), [BAD, 255, BAD], id="uint8"),
        pytest.param(["true", "x", None], pa.bool_(), [True, BAD, None], id="booleans as text"),
        pytest.param(
            ["2024-05-01", "x"], pa.date32(), [dt.date(2024, 5, 1), BAD], id="dates as text"
        ),
    ],
)
def test_a_value_that_a_declared_type_cannot_hold_rejects_its_row(values, to, expected) -> None:
    check(values, None, to, expected)


@given(st.lists(st.none() | st.integers() | st.floats() | st.text(max_size=4), max_size=12))
@examples(100)
def test_a_row_is_marked_or_converted(values: list) -> None:
    texts = [None if value is None else str(value) for value in values]
    for to in (pa.float64(), pa.int64(), TIMESTAMP, pa.string()):
        converted, bad = convert(pa.array(texts, pa.string()), to)
        assert len(converted) == len(bad) == len(texts)
        for text, item, marked in zip(texts, converted.to_pylist(), bad.tolist(), strict=True):
            assert (item is None) == (text is None or marked)
            assert not (text is None and marked)


def test_a_column_of_the_right_type_is_not_copied() -> None:
    column = pa.chunked_array([pa.array([1.0, 2.0])])
    converted, bad = convert(column, pa.float64())
    assert converted.buffers()[1].address == column.chunk(0).buffers()[1].address
    assert not bad.any()


def test_chunks_are_joined_and_no_chunks_are_no_rows() -> None:
    converted, bad = convert(pa.chunked_array([[1], [2, 3]]), pa.float64())
    assert converted.to_pylist() == [1.0, 2.0, 3.0]
    assert bad.size == 3
    converted, bad = convert(pa.chunked_array([], pa.int64()), pa.int64())
    assert len(converted) == bad.size == 0


def test_times_as_numbers_are_microseconds_or_the_streams_own() -> None:
    times = pa.array([NOON, None], TIMESTAMP)
    assert times_as_int(times)[0] == int(NOON.timestamp()) * 1_000_000
    assert times_as_int(pa.array([5, -7])).tolist() == [5, -7]
    assert times_as_int(times).dtype == np.int64


def test_a_time_without_a_zone_is_utc() -> None:
    assert parse_time("2024-05-01T12:00:00") == NOON
    assert parse_time(dt.datetime(2024, 5, 1, 12)) == NOON  # noqa: DTZ001
    with pytest.raises(TypeError):
        parse_time(5)


def test_every_record_has_a_json_form() -> None:
    record = {
        "a": math.nan,
        "b": [math.inf, 1.0],
        "c": {"d": b"\x00\xff"},
        "t": NOON,
        "none": None,
        "s": "é\n",
    }
    assert json.loads(record_json(record)) == {
        "a": "nan",
        "b": ["inf", 1.0],
        "c": {"d": "00ff"},
        "t": "2024-05-01 12:00:00+00:00",
        "s": "é\n",
    }
