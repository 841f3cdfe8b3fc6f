"""Bytes and errors of a synopsis over five years, at three budgets (figure 3 of the paper).

The weather of six months is repeated ten times. Each copy is shifted by whole days, and its values
are perturbed: to every value that is not zero, normal noise of a tenth of the feature's standard
deviation is added. Batches of 100 thousand rows are added in the order of their times, and the
budget is enforced after each of them. Afterwards random queries cover 90 days, for all hours or
14 to 16 (UTC), and are compared with DuckDB over the rows of their copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import duckdb
import numpy as np
import pyarrow as pa

from roost.bench.common import Plot, Row
from roost.bench.synopsis_cases import (
    FEATURES,
    HOUR_US,
    Draw,
    Oracle,
    RandomQuery,
    Weather,
    batches,
)
from roost.synopsis import Bands, Scope, Synopsis, build
from roost.synopsis.ageing import Band, add, bands_of, fit_budget
from roost.synopsis.budget import Budget

SEED = 5
COPIES, COPIES_QUICK = 10, 3
DAY_US = 24 * HOUR_US
BATCH_ROWS = 100_000
SHARES, SHARES_QUICK = (0.5, 1.0, 2.0), (1.0,)  # of the budget of six months
QUERIES, QUERIES_QUICK = 40, 10  # of each copy and kind
AFTERNOON = (14, 16)
PAPER_RATIO = 1285  # rows over sketch at the end of the stream of figure 3
DAYS = 90


@dataclass(frozen=True)
class WeatherCopies:
    """Copies of the weather, one after the other."""

    weather: Weather
    copies: int

    @property
    def copy_days(self) -> int:
        """Whole days that a copy takes."""
        times = self.weather.table["event_time"].cast(pa.int64())
        return int((times[-1].as_py() - times[0].as_py()) // DAY_US + 1)

    def copy(self, number: int) -> Weather:
        """Return one copy."""
        table, rng = self.weather.table, np.random.default_rng([SEED, number])
        later = number * self.copy_days * DAY_US
        times = np.asarray(table["event_time"].cast(pa.int64())) + later
        columns = {"event_time": pa.array(times, table["event_time"].type)}
        columns |= {name: table[name] for name in ("lon", "lat")}
        for name in FEATURES:
            values = np.asarray(table[name].fill_null(np.nan), np.float64)
            noise = rng.normal(0.0, 0.1 * np.nanstd(values), values.size)
            moved = np.clip(np.round(values + noise, 1), np.nanmin(values), np.nanmax(values))
            moved = np.where((values == 0.0) | (number == 0), values, moved)
            columns[name] = pa.array(moved, table[name].type, mask=np.isnan(values))
        return replace(self.weather, table=pa.table(columns).select(table.column_names))


def measure_ageing(
    weather: Weather, synopsis: Synopsis, memory: int, quick: bool
) -> tuple[Row, Row, dict[str, Plot]]:
    """Replay the stream at each budget; returns keys of the summary, tables and plots."""
    synopsis = synopsis.without_sets()  # they are not part of the bands
    stream = WeatherCopies(weather, COPIES_QUICK if quick else COPIES)
    sizes: list[Row] = []
    bands = {}
    for share in SHARES_QUICK if quick else SHARES:
        rows, kept = replay(stream, synopsis, int(share * memory))
        sizes += [{"budget": share, **row} for row in rows]
        bands[share] = bands_of(kept)
    errors = errors_by_age(stream, bands, QUERIES_QUICK if quick else QUERIES)
    own = [row["mb"] for row in sizes if row["budget"] == 1.0]
    summary = {
        "bytes_growth": own[-1] / own[0],
        "over_budget": max(row["most_mb"] / (row["budget"] * memory / 1e6) for row in sizes),
        "bounds_broken_by_age": sum(row[f"{kind}_broken"] for row in errors for kind in KINDS),
    }
    tables = {"figure_3": sizes, "figure_3_paper": PAPER_RATIO, "errors_by_age": errors}
    return summary, tables, _plots(sizes, errors)


KINDS = {
    "mean": "country, 14 to 16, error of the mean (stddev)",
    "region": "100 to 1,000 km, error of the mean (stddev)",
    "count": "country, 14 to 16, error of a count",
}


def _plots(sizes: list[Row], errors: list[Row]) -> dict[str, Plot]:
    shares = sorted({row["budget"] for row in sizes})

    def lines(rows: list[Row], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
        return {
            f"budget {share}": [(row[x], row[y]) for row in rows if row["budget"] == share]
            for share in shares
        }

    panels = {title: lines(errors, "age_days", f"{kind}_error") for kind, title in KINDS.items()}
    return {
        "-growth": Plot("MB by days of the stream", {"": lines(sizes, "days", "mb")}),
        "-age": Plot("median error by age of the rows in days", panels, columns=3),
    }


def replay(
    stream: WeatherCopies, like: Synopsis, memory: int
) -> tuple[list[Row], tuple[Band, ...]]:
    """Add all copies under a budget; returns the bytes after each copy, and the bands."""
    bands: tuple[Band, ...] = ()
    rows: list[Row] = []
    total, raw, most = 0, 0, 0
    seconds = 0.0
    for number in range(stream.copies):
        for batch in batches(stream.copy(number).table, BATCH_ROWS):
            now = int(np.asarray(batch["event_time"].cast(pa.int64())).max())
            started = time.perf_counter()
            delta = build(batch, like.spec, like.bins)
            bands, excess = fit_budget(add(bands, Band(0, delta)), Budget(memory), now)
            seconds += time.perf_counter() - started
            assert excess == 0, excess
            total, raw = total + batch.num_rows, raw + batch.nbytes
            most = max(most, bands_of(bands).nbytes)
        nbytes = bands_of(bands).nbytes
        found: Row = {"days": (number + 1) * stream.copy_days, "rows": total, "mb": nbytes / 1e6}
        found |= {"most_mb": most / 1e6, "bytes_ratio": raw / nbytes, "bands": describe(bands)}
        rows.append({**found, "rows_per_s": total / seconds})
    return rows, bands


def describe(bands: Sequence[Band]) -> str:
    """Return the levels of bands with their days and megabytes."""
    parts = []
    for band in bands:
        times = band.synopsis.groups.times
        days = (int(times.max()) - int(times.min())) / DAY_US
        parts.append(f"{band.level}: {days:.0f} d {band.synopsis.nbytes / 1e6:.2f} MB")
    return ", ".join(parts)


def errors_by_age(stream: WeatherCopies, bands: Mapping[float, Bands], queries: int) -> list[Row]:
    """Compare results about each copy with its rows, newest first."""
    found = []
    for number in reversed(range(stream.copies)):
        copy = stream.copy(number)
        with duckdb.connect() as connection:
            oracle = Oracle(copy, connection)
            draw = Draw(copy, SEED + number)
            spread = {name: oracle.value(f"stddev({name})", Scope()) or 1.0 for name in FEATURES}
            cases = [
                (kind, query, oracle.value(query.sql, query.scope))
                for kind, drawn in _random_queries(draw, queries)
                for query in drawn
            ]
        age = (stream.copies - 1 - number) * stream.copy_days + stream.copy_days // 2
        for share, own in bands.items():
            row: Row = {"budget": share, "age_days": age}
            for kind in KINDS:
                pairs = [(query, truth) for name, query, truth in cases if name == kind]
                row |= _errors(kind, pairs, own, spread)
            found.append(row)
    return found


def _random_queries(draw: Draw, queries: int) -> Iterator[tuple[str, list[RandomQuery]]]:
    """Draw means of the country and of regions, and counts with a condition, over 90 days."""
    days = min(DAYS, (draw.last - draw.first) // DAY_US // 2)  # within one copy
    for kind, hours in (("mean", AFTERNOON), ("region", None), ("count", AFTERNOON)):
        drawn = []
        for _ in range(queries):
            since = draw.first + int(draw.rng.integers(0, days)) * DAY_US
            scope = Scope(None, since, since + days * DAY_US, hours)
            if kind == "region":
                scope = replace(scope, shape=draw.circle(100.0, 1_000.0))
            if kind == "count":
                scope = replace(scope, predicate=draw.predicate(recorded=True))
            name = "count" if kind == "count" else "mean"
            drawn.append(RandomQuery(name, draw.features(0 if kind == "count" else 1), scope))
        yield kind, drawn


def _errors(
    kind: str,
    cases: Sequence[tuple[RandomQuery, float | None]],
    bands: Bands,
    spread: Mapping[str, float],
) -> Row:
    """Return median error and width of bounds, and the bounds that do not hold.

    Means are relative to the standard deviation of their feature, counts to the true count.
    """
    errors, widths, broken, times = [], [], 0, []
    for query, truth in cases:
        started = time.perf_counter()
        result = query.run(bands)
        times.append(time.perf_counter() - started)
        if truth is None or truth != truth or (kind == "count" and truth == 0.0):
            continue
        assert result.low is not None and result.high is not None
        slack = 1e-12 * abs(truth)
        broken += not result.low - slack <= truth <= result.high + slack
        scale = spread[query.features[0]] if query.features else truth
        widths.append((result.high - result.low) / scale)
        if result.value is not None:
            errors.append(abs(result.value - truth) / scale)
    return {
        f"{kind}_error": median(errors) if errors else None,
        f"{kind}_width": median(widths) if widths else None,
        f"{kind}_broken": broken,
        f"{kind}_ms": 1000.0 * median(times),
    }
