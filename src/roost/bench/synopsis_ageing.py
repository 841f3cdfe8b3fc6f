"""Bytes and errors of a synopsis over five years, at three budgets (figure 3 of the paper).

The weather of six months is repeated ten times. Each copy is shifted by 182 days, and its values
are perturbed: to every value that is not zero, normal noise of a tenth of the feature's standard
deviation is added. Batches of 100 thousand rows are added in the order of their times, and the
budget is enforced after each of them. Afterwards random queries ask for three months, for all
hours or 14 to 16 (UTC), and are compared with DuckDB over the rows of their copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import duckdb
import numpy as np
import pyarrow as pa

from roost.bench.common import Row
from roost.bench.synopsis_cases import FEATURES, HOUR_US, Draw, Oracle, Question, Weather, batches
from roost.synopsis import Bands, Scope, Synopsis, build
from roost.synopsis.ageing import Band, add, bands_of, fit_budget
from roost.synopsis.budget import Budget

SEED = 5
COPIES = 10
COPY_DAYS = 182
DAY_US = 24 * HOUR_US
BATCH_ROWS = 100_000
SHARES = (0.5, 1.0, 2.0)  # of the budget of six months
QUERIES = 40  # of each copy and kind
AFTERNOON = (14, 16)


def copy_of(weather: Weather, number: int) -> Weather:
    """Return the weather of a later half year."""
    table, rng = weather.table, np.random.default_rng([SEED, number])
    times = np.asarray(table["event_time"].cast(pa.int64())) + number * COPY_DAYS * DAY_US
    columns = {"event_time": pa.array(times, table["event_time"].type)}
    columns |= {name: table[name] for name in ("lon", "lat")}
    for name in FEATURES:
        values = np.asarray(table[name].fill_null(np.nan), np.float64)
        noise = rng.normal(0.0, 0.1 * np.nanstd(values), values.size)
        moved = np.clip(np.round(values + noise, 1), np.nanmin(values), np.nanmax(values))
        moved = np.where((values == 0.0) | (number == 0), values, moved)
        columns[name] = pa.array(moved, table[name].type, mask=np.isnan(values))
    return replace(weather, table=pa.table(columns).select(table.column_names))


def replay(weather: Weather, like: Synopsis, memory: int) -> tuple[list[Row], tuple[Band, ...]]:
    """Add all copies under a budget; returns the bytes after each month, and the bands."""
    bands: tuple[Band, ...] = ()
    rows: list[Row] = []
    total, raw, most = 0, 0, 0
    started = time.perf_counter()
    for number in range(COPIES):
        table = copy_of(weather, number).table
        for batch in batches(table, BATCH_ROWS):
            delta = build(batch, like.spec, like.bins)
            now = int(np.asarray(batch["event_time"].cast(pa.int64())).max())
            bands, excess = fit_budget(add(bands, Band(0, delta)), Budget(memory), now)
            assert excess == 0, excess
            total += batch.num_rows
            raw += batch.nbytes
            most = max(most, bands_of(bands).nbytes)
        days = (number + 1) * COPY_DAYS
        found: Row = {"days": days, "rows": total, "mb": bands_of(bands).nbytes / 1e6}
        found |= {"most_mb": most / 1e6, "ratio": raw / bands_of(bands).nbytes}
        found |= {"bands": describe(bands), "rows_per_s": total / (time.perf_counter() - started)}
        rows.append(found)
    return rows, bands


def describe(bands: Sequence[Band]) -> str:
    """Return the levels of bands with their days and megabytes."""
    parts = []
    for band in bands:
        times = band.synopsis.groups.times
        days = (int(times.max()) - int(times.min())) / DAY_US
        parts.append(f"{band.level}: {days:.0f} d {band.synopsis.nbytes / 1e6:.2f} MB")
    return ", ".join(parts)


def errors_by_age(weather: Weather, bands: Bands) -> list[Row]:
    """Compare results about each copy with its rows, newest first."""
    found = []
    for number in reversed(range(COPIES)):
        copy = copy_of(weather, number)
        with duckdb.connect() as connection:
            oracle = Oracle(copy, connection)
            draw = Draw(copy, SEED + number)
            spread = {name: oracle.value(f"stddev({name})", Scope()) or 1.0 for name in FEATURES}
            age = (COPIES - 1 - number) * COPY_DAYS + COPY_DAYS // 2
            row: Row = {"age_days": age}
            for kind, questions in _questions(draw):
                row |= _errors(kind, questions, bands, oracle, spread)
            found.append(row)
    return found


def _questions(draw: Draw) -> Iterator[tuple[str, list[Question]]]:
    """Draw means of the country and of states, and counts with a condition, over three months."""
    for kind, hours in (("mean", AFTERNOON), ("region", None), ("count", AFTERNOON)):
        questions = []
        for _ in range(QUERIES):
            since = draw.first + int(draw.rng.integers(0, 90)) * DAY_US
            scope = Scope(None, since, since + 90 * DAY_US, hours)
            if kind == "region":
                scope = replace(scope, shape=draw.circle(100.0, 1_000.0))
            if kind == "count":
                scope = replace(scope, predicate=draw.predicate())
            name = "count" if kind == "count" else "mean"
            questions.append(Question(name, draw.features(0 if kind == "count" else 1), scope))
        yield kind, questions


def _errors(
    kind: str, questions: list[Question], bands: Bands, oracle: Oracle, spread: dict[str, float]
) -> Row:
    """Return median error and width of bounds, and the bounds that do not hold.

    Means are relative to the standard deviation of their feature, counts to the true count.
    """
    errors, widths, broken, times = [], [], 0, []
    for question in questions:
        truth = oracle.value(question.sql, question.scope)
        started = time.perf_counter()
        result = question.run(bands)
        times.append(time.perf_counter() - started)
        if truth is None or truth != truth or (kind == "count" and truth == 0.0):
            continue
        assert result.low is not None and result.high is not None
        slack = 1e-12 * abs(truth)
        broken += not result.low - slack <= truth <= result.high + slack
        scale = spread[question.features[0]] if question.features else truth
        widths.append((result.high - result.low) / scale)
        if result.value is not None:
            errors.append(abs(result.value - truth) / scale)
    return {
        f"{kind}_error": median(errors) if errors else None,
        f"{kind}_width": median(widths) if widths else None,
        f"{kind}_broken": broken,
        f"{kind}_ms": 1000.0 * median(times),
    }
