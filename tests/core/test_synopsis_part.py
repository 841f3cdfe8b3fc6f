"""Parts of a synopsis, its record batches, and refused queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from roost.errors import ConfigError, PredicateError, RequestError
from roost.model.records import Box, Circle, Polygon
from roost.synopsis import (
    Scope,
    Synopsis,
    build,
    correlation,
    count,
    density,
    mean,
    merge,
    outliers,
    quantiles,
    record_batches,
    select,
)
from synopsis_tables import START_US, Rows, draw_scope, make_spec, make_table

TABLE = make_table(4)
ROWS = Rows(TABLE)
BUILT = build(TABLE, make_spec(TABLE))
scopes = draw_scope(ROWS)


@given(scopes, scopes)
def test_results_of_a_part_are_those_of_both_scopes(drawn: Any, further: Any) -> None:
    part = select(BUILT, drawn[0])
    for scope, found in ((Scope(), drawn[1]), (further[0], drawn[1] & further[1])):
        result = count(part, scope)
        assert result.low <= found.sum() <= result.high
        column = ROWS.column("temp")[found]
        column = column[np.isfinite(column)]
        if column.size:
            average = mean(part, "temp", scope)
            assert average.low <= column.mean() <= average.high
    # Selecting again changes nothing.
    direct, again = count(BUILT, drawn[0]), count(part)
    assert (again.low, again.high) == (direct.low, direct.high)


def test_whole_groups_of_a_part_stay_exact() -> None:
    until = START_US + 14 * 86_400_000_000
    part = select(BUILT, Scope(until=until))
    assert part.groups.exact.any()
    found = ROWS.inside(Scope(until=until))
    result = mean(part, "wind")
    assert result.low <= ROWS.column("wind")[found].mean() <= result.high
    assert part.nbytes < BUILT.nbytes


def test_parts_are_merged_and_saved(tmp_path: Path) -> None:
    middle = START_US + 17 * 86_400_000_000 + 7_200_000_000
    parts = [select(BUILT, Scope(until=middle)), select(BUILT, Scope(since=middle))]
    merged = merge(parts)
    result = count(merged)
    assert result.low <= TABLE.num_rows <= result.high
    assert result.high - result.low < 0.02 * TABLE.num_rows
    merged.save(tmp_path / "parts")
    assert count(Synopsis.open(tmp_path / "parts")) == result


@given(scopes)
def test_record_batches_have_all_leaves_and_rows(drawn: Any) -> None:
    part = select(BUILT, drawn[0])
    table = pa.Table.from_batches(list(record_batches(part)) or [_empty()])
    result = count(part)
    assert sum(table["rows"].to_pylist()) == result.high
    assert sum(table["rows_sure"].to_pylist()) == result.low


def _empty() -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"rows": pa.array([], pa.int64()), "rows_sure": []})


def test_record_batches_contain_their_rows() -> None:
    table = pa.Table.from_batches(list(record_batches(BUILT)))
    low, high = (np.asarray(table[f"temp_{end}"].fill_null(np.nan)) for end in ("low", "high"))
    temp = ROWS.column("temp")
    assert np.nanmin(low) == np.nanmin(temp) and np.nanmax(high) == np.nanmax(temp)
    assert np.isnan(low).sum() <= np.isnan(temp).sum()
    begin, end = (np.asarray(table[name].cast(pa.int64())) for name in ("time_from", "time_until"))
    times = ROWS.column("event_time")
    assert begin.min() <= times.min() and end.max() > times.max()
    x0, x1 = np.asarray(table["x0"]), np.asarray(table["x1"])
    assert (x0 <= x1).all() and x0.min() == ROWS.column("lon").min()
    assert set(table["kind"].to_pylist()) >= {"sun", "rain", "fog", None}


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: mean(BUILT, "tmp"), ConfigError, "feature: got 'tmp'"),
        (lambda: mean(BUILT, "kind"), ConfigError, "feature: got 'kind', expected a number"),
        (lambda: correlation(BUILT, "temp", "wet"), ConfigError, "'wet'"),
        (lambda: count(BUILT, Scope(predicate="tmp > 1")), PredicateError, "tmp"),
        (lambda: count(BUILT, Scope(predicate="temp >")), PredicateError, "position 7"),
        (lambda: count(BUILT, Scope(predicate="temp > wind + 1")), PredicateError, "temp, wind"),
        (lambda: count(BUILT, Scope(predicate="temp > 'a'")), PredicateError, "temp"),
        (lambda: Scope(Box(1.0, 0.0, 0.0, 1.0)), RequestError, "x0=1.0"),
        (lambda: Scope(Circle(0.0, 0.0, -1.0)), RequestError, "radius=-1.0"),
        (lambda: count(BUILT, Scope(Polygon("POINT (1 1)"))), RequestError, "Point"),
        (lambda: Scope(hours=(5, 25)), ConfigError, "hours: got (5, 25)"),
        (lambda: Scope(hours=(5, 5)), ConfigError, "hours"),
        (lambda: Scope(since=5, until=5), ConfigError, "since, until: got (5, 5)"),
        (lambda: quantiles(BUILT, "temp", [1.5]), ConfigError, "ranks: got 1.5"),
        (lambda: density(BUILT, "temp", [1.0], bandwidth=0.0), ConfigError, "bandwidth: got 0.0"),
        (lambda: outliers(BUILT, "temp", 1.0), ConfigError, "share: got 1.0"),
    ],
)
def test_refused_queries_name_the_offending_part(make: Any, error: Any, named: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert named in str(caught.value)
