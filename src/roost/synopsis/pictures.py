"""Pictures of a synopsis: the climate chart of a place, and the map of a feature.

Each is a query that returns data for a dashboard, and :func:`draw` writes the data as PNG, which
requires matplotlib.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from roost.errors import ConfigError, RoostError
from roost.model.arrays import Floats, Ints
from roost.model.records import Box
from roost.model.space import Rect
from roost.predicate.ast import quote_name
from roost.synopsis.bands import Sketch, parts_of
from roost.synopsis.bounds import EPSILON, Interval, SynopsisResult
from roost.synopsis.density import quantiles
from roost.synopsis.part import select
from roost.synopsis.scope import EVERYTHING, Scope
from roost.synopsis.spec import DAY_S, SECOND_US, WORLD, SynopsisSpec, locate
from roost.synopsis.statistics import count, mean
from roost.synopsis.synopsis import Synopsis

MONTH, BUCKET = "month", "bucket"
SUM, MEAN = "sum", "mean"
PERIODS_MAX = 1_000
CELLS_MAX = 20_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Period:
    """One period of a chart; times are microseconds since 1970."""

    since: int
    until: int
    mean: SynopsisResult
    least: SynopsisResult
    greatest: SynopsisResult
    bar: SynopsisResult | None


@dataclass(frozen=True)
class ClimateChart:
    """Mean and extremes of a feature by period, and sums or means of another."""

    feature: str
    bars: str | None
    bar_statistic: str
    periods: tuple[Period, ...]


@dataclass(frozen=True)
class Cell:
    """The mean of a feature in one cell."""

    x0: float
    y0: float
    x1: float
    y1: float
    mean: SynopsisResult


@dataclass(frozen=True)
class FeatureMap:
    """The mean of a feature by cell; cells without rows are left out."""

    feature: str
    bits: int
    cells: tuple[Cell, ...]


def climate_chart(
    synopsis: Sketch,
    feature: str,
    scope: Scope = EVERYTHING,
    bars: str | None = None,
    bar_statistic: str = SUM,
    period: str = MONTH,
) -> ClimateChart:
    """Return mean, least and greatest value of a feature by period, and bars of another feature.

    Periods are calendar months in UTC, or the calendar buckets (``period="bucket"``), within the
    times of the synopsis and of the scope. The sum of a feature is over all rows of the place: of
    several stations, ``bar_statistic="mean"`` may be what is meant.
    """
    for key, value, accepted in (
        ("period", period, (MONTH, BUCKET)),
        ("bar_statistic", bar_statistic, (SUM, MEAN)),
    ):
        if value not in accepted:
            raise ConfigError(key, value, f"one of {', '.join(accepted)}")
    synopsis.spec.index(feature, numeric=True)
    statistic = total if bar_statistic == SUM else mean
    periods = []
    for since, until in _periods(synopsis, scope, period):
        own = replace(scope, since=since, until=until)
        least, greatest = quantiles(synopsis, feature, [0.0, 1.0], own)
        bar = None if bars is None else statistic(synopsis, bars, own)
        periods.append(Period(since, until, mean(synopsis, feature, own), least, greatest, bar))
    return ClimateChart(feature, bars, bar_statistic, tuple(periods))


def total(synopsis: Sketch, feature: str, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the sum of a feature: its mean times the number of its values."""
    average = mean(synopsis, feature, scope)
    rows = count(synopsis, scope.and_predicate(f"{quote_name(feature)} is not null"))
    records = average.records + rows.records
    if average.low is None or average.high is None:
        return SynopsisResult(None, None, None, records)
    bounds = Interval(average.low, average.high).times(Interval(rows.low or 0.0, rows.high or 0.0))
    margin = 4.0 * EPSILON * max(abs(bounds.low), abs(bounds.high))
    value = None if average.value is None or rows.value is None else average.value * rows.value
    return SynopsisResult(value, bounds.low - margin, bounds.high + margin, records)


def _span(synopsis: Sketch, scope: Scope) -> tuple[int, int]:
    """Return the range of the times in a synopsis and a scope; empty if there are none."""
    since, until = scope.time_range
    times = [
        array
        for part in parts_of(synopsis, scope)
        for array in (part.groups.times.ravel(), part.rows.time)
    ]
    known = np.concatenate(times)
    if not known.size:
        return 0, 0
    return max(since, int(known.min())), min(until, int(known.max()) + 1)


def _periods(synopsis: Sketch, scope: Scope, period: str) -> Iterator[tuple[int, int]]:
    """Yield the parts of the periods in the range of times."""
    since, until = _span(synopsis, scope)
    if since >= until:
        return
    starts = _months(since, until) if period == MONTH else _buckets(since, until, synopsis.spec)
    if len(starts) > PERIODS_MAX:
        raise ConfigError("scope", f"{len(starts)} periods", f"a range of {PERIODS_MAX} at most")
    for start, stop in pairwise(starts):
        yield max(start, since), min(stop, until)


def _months(since: int, until: int) -> list[int]:
    first = EPOCH + dt.timedelta(microseconds=since)
    month = first.year * 12 + first.month - 1
    starts: list[int] = []
    while not starts or starts[-1] < until:
        at = dt.datetime(month // 12, month % 12 + 1, 1, tzinfo=dt.UTC)
        starts.append((at - EPOCH) // dt.timedelta(microseconds=1))
        month += 1
    return starts


def _buckets(since: int, until: int, spec: SynopsisSpec) -> list[int]:
    size = spec.bucket_days * DAY_S * SECOND_US
    return list(range(since // size * size, until + size, size))


def feature_map(
    synopsis: Sketch, feature: str, scope: Scope = EVERYTHING, bits: int = 16
) -> FeatureMap:
    """Return the mean of a feature in each cell, a spatial prefix of ``bits`` bits.

    Only rows in the scope count, also in cells on the border of its shape.
    """
    part = synopsis if scope == EVERYTHING else select(synopsis, scope)
    part.spec.index(feature, numeric=True)
    most = max(own.spec.place_bits for own in parts_of(part, EVERYTHING))
    if not (2 <= bits <= most and bits % 2 == 0):
        raise ConfigError("bits", bits, f"an even number from 2 to {most}")
    cells = np.unique(np.concatenate([_cells(own, bits) for own in parts_of(part, EVERYTHING)]))
    if cells.size > CELLS_MAX:
        raise ConfigError("bits", bits, f"fewer: {cells.size:,} cells, at most {CELLS_MAX:,}")
    found = []
    for x0, y0, x1, y1 in cell_boxes(cells, bits, part.spec).tolist():
        # A cell contains its lower borders only.
        inside = Box(x0, y0, float(np.nextafter(x1, x0)), float(np.nextafter(y1, y0)))
        result = mean(part, feature, Scope(inside))
        if result.value is not None:
            found.append(Cell(x0, y0, x1, y1, result))
    return FeatureMap(feature, bits, tuple(found))


def _cells(synopsis: Synopsis, bits: int) -> Ints:
    """Return the cells that may have rows."""
    spec, rows = synopsis.spec, synopsis.rows
    small = locate(rows.x, rows.y, spec)
    places = np.unique(np.concatenate([synopsis.places.cells, small]))
    if spec.place_bits >= bits:
        return np.asarray(np.unique(places >> (spec.place_bits - bits)))
    more = bits - spec.place_bits
    return np.asarray((places[:, None] << more | np.arange(1 << more)).ravel())


def cell_boxes(cells: Ints, bits: int, spec: SynopsisSpec) -> Floats:
    """Return the bounds of spatial prefixes, which interleave the bits of column and row."""
    columns, rows = np.zeros_like(cells), np.zeros_like(cells)
    for k in range(bits // 2):
        columns |= (cells >> (2 * k + 1) & 1) << k
        rows |= (cells >> (2 * k) & 1) << k
    bounds: Rect = WORLD if spec.lonlat else spec.space.bounds
    side = 1 << (bits // 2)
    width, height = bounds.width / side, bounds.height / side
    corners = [bounds.x0 + columns * width, bounds.y0 + rows * height]
    corners += [bounds.x0 + (columns + 1) * width, bounds.y0 + (rows + 1) * height]
    return np.stack(corners, axis=1).astype(np.float64)


Picture = ClimateChart | FeatureMap


def draw(picture: Picture, path: Path) -> None:
    """Draw a picture as PNG; raises `RoostError` without matplotlib."""
    if path.suffix != ".png":
        raise ConfigError("--out", str(path), "a name that ends with .png")
    if find_spec("matplotlib") is None:
        raise RoostError("pictures require matplotlib: pip install 'roost[pictures]'")
    from matplotlib.figure import Figure

    # A bare Figure draws with Agg and needs no display; pyplot would look for one.
    figure = Figure(figsize=(8, 4.5) if isinstance(picture, ClimateChart) else (7, 6))
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    if isinstance(picture, ClimateChart):
        _draw_chart(axes, picture)
    else:
        _draw_map(figure, axes, picture)
    axes.set_title(picture.feature)
    figure.savefig(path, dpi=120)


def _draw_chart(axes: Any, chart: ClimateChart) -> None:
    times = [EPOCH + dt.timedelta(microseconds=(p.since + p.until) // 2) for p in chart.periods]
    if chart.bars is not None:
        widths = [(p.until - p.since) / SECOND_US / DAY_S * 0.8 for p in chart.periods]
        right = axes.twinx()
        heights = [p.bar.value if p.bar is not None else None for p in chart.periods]
        right.bar(times, _gaps(heights), widths, color="C0", alpha=0.35)
        right.set_ylabel(f"{chart.bar_statistic} of {chart.bars}")
        # The line is in front of the bars.
        axes.set_zorder(right.get_zorder() + 1)
        axes.patch.set_visible(False)
    lows = _gaps([p.least.value for p in chart.periods])
    highs = _gaps([p.greatest.value for p in chart.periods])
    axes.fill_between(times, lows, highs, color="C3", alpha=0.15, label="least to greatest")
    axes.plot(times, _gaps([p.mean.value for p in chart.periods]), "o-", color="C3", label="mean")
    axes.set_ylabel(chart.feature)
    axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _gaps(values: list[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _draw_map(figure: Any, axes: Any, found: FeatureMap) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    boxes = [Rectangle((c.x0, c.y0), c.x1 - c.x0, c.y1 - c.y0) for c in found.cells]
    drawn = PatchCollection(boxes, cmap="viridis", edgecolor="none")
    drawn.set_array(_gaps([cell.mean.value for cell in found.cells]))
    axes.add_collection(drawn)
    axes.autoscale_view()
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)
    figure.colorbar(drawn, ax=axes, label=f"mean of {found.feature}")
