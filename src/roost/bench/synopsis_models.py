"""Probable results of ``roost bench synopsis``: forecasts, regressions and set queries.

A forecast is repeated by a scope that ends when it would have been made: rows after that do not
matter. It is compared with the better of two naive ones: the last value, and the value a day before
the target. The bounds of all probable results are compared with the rows: binomial tests decide
whether they hold as often as they claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.stats import binomtest

from roost.bench.common import Row
from roost.bench.synopsis_cases import HOUR_US, Draw, Oracle, Weather
from roost.model.arrays import Floats
from roost.model.records import Box
from roost.synopsis import BoundKind, Scope, SynopsisResult
from roost.synopsis.reader import SynopsisReader

LEAD_HOURS = 6
FORECASTS, FORECASTS_QUICK = 4_000, 400
WARM_UP_HOURS = 72  # a forecast requires two or three days
TARGET = "temp_c"
PROMISES, PROMISES_QUICK = 150, 40  # of each kind
PERIOD_US = 30 * 24 * HOUR_US  # of the set sketches
LEVEL = 0.01  # of the binomial tests
Held = tuple[float, bool]  # what a bound claims, and whether it held


def hourly(weather: Weather, name: str) -> tuple[Floats, int]:
    """Return a feature by site and hour, NaN where there is none, and the first hour."""
    position = np.stack([np.asarray(weather.table[column]) for column in ("lon", "lat")], axis=1)
    site = np.unique(position, axis=0, return_inverse=True)[1]
    hour = np.asarray(weather.table["event_time"].cast(pa.int64())) // HOUR_US
    first = int(hour.min())
    values = np.full((len(weather.sites), int(hour.max()) - first + 1), np.nan)
    values[site, hour - first] = np.asarray(
        weather.table[name].cast(pa.float64()).fill_null(np.nan)
    )
    return values, first


def measure_forecasts(reader: SynopsisReader, weather: Weather, seed: int, quick: bool) -> Row:
    """Forecast the temperature of random sites at random hours; returns errors and coverage.

    Cases in which a naive forecast has no value are left out.
    """
    values, first = hourly(weather, TARGET)
    rng = np.random.default_rng(seed)
    errors: list[tuple[float, float, float]] = []
    held = []
    for _ in range(FORECASTS_QUICK if quick else FORECASTS):
        site = int(rng.integers(len(values)))
        now = int(rng.integers(WARM_UP_HOURS, values.shape[1] - LEAD_HOURS))
        known = values[site, [now + LEAD_HOURS, now, now + LEAD_HOURS - 24]]
        x, y = weather.sites[site].tolist()
        scope = Scope(Box(x, y, x, y), until=(first + now + 1) * HOUR_US)
        at = (first + now + LEAD_HOURS) * HOUR_US
        result = reader.query("forecast", feature=TARGET, at=at, scope=scope).result
        if result.value is None or result.low is None or result.high is None:
            continue
        if np.isfinite(known).all():
            truth, last, day_before = known.tolist()
            errors.append((truth - result.value, truth - last, truth - day_before))
            held.append(result.low <= truth <= result.high)
    own, last, day_before = _rmse(np.array(errors).T)
    return {
        "forecast_ratio_vs_naive": own / min(last, day_before),
        "forecast_coverage": float(np.mean(held)),
        "forecast_rmse": own,
        "forecasts": len(held),
    }


def _rmse(errors: NDArray[np.float64]) -> Sequence[float]:
    rmse: Sequence[float] = np.sqrt((errors * errors).mean(axis=1)).tolist()
    return rmse


def measure_promises(
    reader: SynopsisReader, weather: Weather, oracle: Oracle, seed: int, quick: bool
) -> tuple[Row, Row, dict[str, Any]]:
    """Compare the bounds of probable results with the rows.

    Returns the kinds that hold less often than they claim, and a row for each.
    """
    random = Draw(weather, seed)
    held: dict[str, list[Held]] = {}

    def add(kind: str, result: SynopsisResult, truth: float) -> None:
        if result.low is None or result.high is None or truth != truth:
            return
        confidence = result.confidence if result.kind is BoundKind.PROBABLE else 1.0
        slack = 1e-9 * abs(truth)  # the rows are summed in another order
        holds = result.low - slack <= truth <= result.high + slack
        held.setdefault(kind, []).append((confidence, holds))

    for _ in range(PROMISES_QUICK if quick else PROMISES):
        for kind, result, truth in _set_results(reader, random, oracle):
            add(kind, result, truth)
        for kind, result, truth in _regressions(reader, random, oracle):
            add(kind, result, truth)
    rows = [_tested(kind, found) for kind, found in held.items()]
    return {"promises_broken": sum(row["broken"] for row in rows)}, {"promises": rows}, {}


def _set_results(
    reader: SynopsisReader, random: Draw, oracle: Oracle
) -> list[tuple[str, SynopsisResult, float]]:
    """Query the sites of some whole periods; half of the places asked for are not among them."""
    periods = np.arange(random.first // PERIOD_US, random.last // PERIOD_US + 1)
    since, until = np.sort(random.rng.choice(periods, 2)).tolist()
    scope = Scope(since=since * PERIOD_US, until=(until + 1) * PERIOD_US)
    lon, lat = random.rng.choice(oracle.sites).tolist()
    if random.rng.random() < 0.5:
        lon += float(random.rng.uniform(0.01, 1.0))
    found = oracle.value(f"count(*) filter (lon = {lon!r} and lat = {lat!r})", scope) or 0.0
    distinct = oracle.value("count(distinct site)", scope) or 0.0
    values = {"values": {"lon": lon, "lat": lat}, "scope": scope}
    member = reader.query("contains", **values).result
    counted = reader.query("cardinality", columns=("lon", "lat"), scope=scope).result
    often = reader.query("frequency", **values).result
    # A filter is wrong only if it reports what did not occur.
    wrong = SynopsisResult(*(member.value,) * 3, member.records, member.kind, member.confidence)
    return [
        ("contains", wrong, float(found > 0.0)),
        ("cardinality", counted, distinct),
        ("frequency", often, found),
    ]


def _regressions(
    reader: SynopsisReader, random: Draw, oracle: Oracle
) -> list[tuple[str, SynopsisResult, float]]:
    """Fit a feature to another one, or to two; predict a random row of the scope."""
    scope = random.any().scope
    target, *names = random.features(int(random.rng.integers(2, 4)))
    columns = [f"{name}::double" for name in (*names, target)]
    known = " and ".join(f"{name} is not null" for name in (*names, target))
    sql = f"select {', '.join(columns)} from weather where {oracle.condition(scope)} and {known}"
    values = np.array([*oracle.connection.execute(sql).fetchnumpy().values()], np.float64)
    model = reader.query("regress", target=target, features=names, scope=scope).result
    spread = values.std(axis=1) if values.size else np.zeros(1)
    if values.shape[1] < 10 or not spread.all() or model.deviation is None:
        return []
    products = np.cov(values)
    slopes = np.linalg.solve(products[:-1, :-1], products[:-1, -1])
    row = values[:, random.rng.integers(values.shape[1])].tolist()
    predicted = model.predict(dict(zip(names, row, strict=False)))
    return [
        *(("coefficient", model.coefficients[name], float(slopes[k]))
          for k, name in enumerate(names)),
        ("prediction", predicted, row[-1]),
    ]  # fmt: skip


def _tested(kind: str, held: Sequence[Held]) -> Row:
    """Test whether bounds hold at least as often as they claim."""
    claims, holds = (np.array(column, np.float64) for column in zip(*held, strict=True))
    number, kept = len(held), int(holds.sum())
    p = 1.0 if kept == number else binomtest(kept, number, claims.mean(), "less").pvalue
    found = {"kind": kind, "results": number, "claimed": float(claims.mean())}
    return {**found, "held": kept / number, "p": float(p), "broken": int(p < LEVEL)}
