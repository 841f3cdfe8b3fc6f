"""Pictures of a synopsis equal brute force over its rows."""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from roost import Box, Circle
from roost.errors import ConfigError, RoostError
from roost.synopsis import Bands, Scope, SynopsisSpec, build
from roost.synopsis.pictures import climate_chart, draw, feature_map
from roost.synopsis.queries import read_query, result_json, run_query
from synopsis_tables import START_US, Rows, make_spec, make_table

TABLE = make_table(9, 3_000)
ROWS = Rows(TABLE)
WHOLE = build(TABLE, make_spec(TABLE))
HALVES = Bands(
    tuple(build(half, WHOLE.spec, WHOLE.bins) for half in (TABLE[:1_100], TABLE[1_100:]))
)
DAY = Scope(hours=(6, 18))  # cuts no leaf
PLACE = Scope(Box(9.5, 49.5, 10.6, 50.5), hours=(5, 21))
DAY_US = 86_400_000_000


def holds(result: object, true: float) -> bool:
    return bool(result.low - 1e-9 <= true <= result.high + 1e-9)


@pytest.mark.parametrize("sketch", [WHOLE, HALVES])
@pytest.mark.parametrize("scope", [DAY, PLACE])
@pytest.mark.parametrize("period", ["month", "bucket"])
@pytest.mark.parametrize("statistic", ["sum", "mean"])
def test_a_chart_has_the_statistics_of_its_periods(
    sketch: Bands, scope: Scope, period: str, statistic: str
) -> None:
    chart = climate_chart(sketch, "temp", scope, "rain", statistic, period)
    time = ROWS.column("event_time")
    if period == "month":
        months = [dt.datetime.fromtimestamp(t / 1e6, dt.UTC).month for t in time.tolist()]
        keys = np.array(months)
    else:
        keys = time // (7 * DAY_US)
    inside, temp, rain = ROWS.inside(scope), ROWS.column("temp"), ROWS.column("rain")
    assert len(chart.periods) == len(np.unique(keys))
    for found, key in zip(chart.periods, np.unique(keys).tolist(), strict=True):
        own = inside & (keys == key)
        assert found.since <= time[own].min() and time[own].max() < found.until
        assert holds(found.mean, np.nanmean(temp[own]))
        assert holds(found.least, np.nanmin(temp[own]))
        assert holds(found.greatest, np.nanmax(temp[own]))
        true = (np.nansum if statistic == "sum" else np.nanmean)(rain[own])
        assert holds(found.bar, true)
        if scope is DAY:
            assert found.bar.value == pytest.approx(true, rel=0.02)
            assert found.mean.value == pytest.approx(np.nanmean(temp[own]), rel=0.005)
    assert chart.periods[0].since == time.min() and chart.periods[-1].until == time.max() + 1


def test_a_chart_has_bars_of_a_feature_of_any_name() -> None:
    names = {"temp": "temp", "rain": "rain [mm]"}
    table = TABLE.select(["lon", "lat", "event_time", *names]).rename_columns(
        ["lon", "lat", "event_time", *names.values()]
    )
    own = build(table, SynopsisSpec.of(table.schema, [*names.values()]))
    chart, expected = climate_chart(own, "temp", bars="rain [mm]"), climate_chart(WHOLE, "temp")
    assert [len(one.periods) for one in (chart, expected)] == [2, 2]
    total = sum(period.bar.value for period in chart.periods)
    assert total == pytest.approx(np.nansum(ROWS.column("rain")), rel=0.02)


def test_a_chart_without_rows_has_no_periods() -> None:
    assert climate_chart(WHOLE, "temp", Scope(until=START_US - 1)).periods == ()
    nowhere = climate_chart(WHOLE, "temp", Scope(Circle(0.0, 60.0, 10.0)))
    assert [period.mean.value for period in nowhere.periods] == [None, None]


@pytest.mark.parametrize("sketch", [WHOLE, HALVES])
@pytest.mark.parametrize(
    "scope", [Scope(), Scope(Circle(10.2, 50.0, 60_000.0), since=START_US + 5 * DAY_US)]
)
def test_a_map_has_the_mean_of_each_cell(sketch: Bands, scope: Scope) -> None:
    found = feature_map(sketch, "wind", scope, bits=16)
    wind, inside = ROWS.column("wind"), ROWS.inside(scope)
    column = np.floor((ROWS.column("lon") + 180.0) / 360.0 * 256)
    row = np.floor((ROWS.column("lat") + 90.0) / 180.0 * 256)
    cells = {(cell.x0, cell.y0): cell for cell in found.cells}
    expected = set(zip(column[inside].tolist(), row[inside].tolist(), strict=True))
    corners = {(c * 360 / 256 - 180, r * 180 / 256 - 90): (c, r) for c, r in expected}
    assert corners.keys() <= cells.keys() and len(expected) > 2
    for corner, (c, r) in corners.items():
        own = inside & (column == c) & (row == r)
        assert holds(cells[corner].mean, wind[own].mean())
        if scope == Scope():
            assert cells[corner].mean.value == pytest.approx(wind[own].mean(), rel=0.05)
        assert (cells[corner].x1, cells[corner].y1) == (
            corner[0] + 360 / 256,
            corner[1] + 180 / 256,
        )
    if scope == Scope():
        assert corners.keys() == cells.keys()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"query": "chart", "feature": "temp", "period": "year"}, "period: got 'year', expected"),
        ({"query": "chart", "feature": "kind"}, "feature: got 'kind', expected a number"),
        ({"query": "chart", "feature": "temp", "bars": "snow"}, "feature: got 'snow', expected"),
        ({"query": "map", "feature": "temp", "bits": 7}, "bits: got 7, expected an even number"),
        ({"query": "map", "feature": "temp", "bits": 30}, "bits: got 30, expected an even number"),
    ],
)
def test_wrong_pictures_name_what_is_wrong(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_query(WHOLE, *read_query(data))
    assert message in str(raised.value)


def test_pictures_are_json_and_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (
        {"query": "chart", "feature": "temp", "bars": "rain", "scope": {"hours": [2, 9]}},
        {"query": "chart", "feature": "temp", "scope": {"until": START_US - 1}},
        {"query": "map", "feature": "temp", "bits": 12},
    ):
        picture = run_query(WHOLE, *read_query(data))
        assert json.loads(json.dumps(result_json(picture)))["feature"] == "temp"
        path = tmp_path / "picture.png"
        draw(picture, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--out: .*ends with \.png"):
        draw(picture, tmp_path / "picture.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RoostError, match=r"roost\[pictures\]"):
        draw(picture, path)
