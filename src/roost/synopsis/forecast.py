"""Forecast of the mean of a feature: a profile of the day plus a decaying anomaly.

The profile of a step of the day is the mean of the feature in that step on the days before, the
newest with the greatest weight. The anomaly is how far the newest value is from its profile. The
forecast is the profile of the target plus a share of the anomaly. That share, and the interval,
come from the forecasts that the same rule would have made in the weeks before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from roost.errors import ConfigError
from roost.kernel.shapes import INSIDE
from roost.model.arrays import Floats, Ints
from roost.model.records import Instant
from roost.synopsis.bands import Sketch, parts_of
from roost.synopsis.bounds import BoundKind, SynopsisResult
from roost.synopsis.scope import EVERYTHING, CompiledScope, Scope, compile_scope
from roost.synopsis.scope_leaves import check_planes, leaves_in, step_times
from roost.synopsis.spec import DAY_S, SECOND_US
from roost.synopsis.synopsis import Synopsis
from roost.window.evaluate import time_of

PROFILE_DAYS = 14
DAY_WEIGHT = 0.8  # of a day's values against those of the day after
ERROR_DAYS = 28  # of past forecasts
ERRORS_MIN = 20
AHEAD_DAYS_MAX = 366


class _Series(NamedTuple):
    """The mean of a feature by step, NaN where there is none; step 0 begins a day."""

    values: Floats
    records: int


def forecast(
    sketch: Sketch,
    feature: str,
    at: Instant,
    scope: Scope = EVERYTHING,
    confidence: float = 0.95,
) -> SynopsisResult:
    """Return the mean of a feature in a scope, in the step that contains a time.

    Only rows before ``at`` and in the scope are used: with ``until`` the forecast is the one of
    that time. The interval has less than the wanted confidence if too few past forecasts support
    it; with less than 20 of them, which takes two or three days of values, there is no forecast.
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigError("confidence", confidence, "a number between 0 and 1")
    index, step_us = sketch.spec.index(feature, numeric=True), sketch.spec.layout.step_us
    target = time_of(at) // step_us
    newest = min(scope.time_range[1], target * step_us)
    day = DAY_S * SECOND_US // step_us
    ahead = target - newest // step_us
    if ahead > AHEAD_DAYS_MAX * day:
        raise ConfigError("at", at, f"a time up to {AHEAD_DAYS_MAX} days after the scope")
    length = (PROFILE_DAYS + ERROR_DAYS + 1) * day + ahead
    first = (newest // step_us - length) // day * day
    series = _gather(sketch, index, replace(scope, until=newest), first, target - first)
    found = _predict(series.values, target - first, day)
    if found is None:
        return SynopsisResult(None, None, None, series.records)
    value, errors = found
    low, high, reached = _interval(errors, confidence)
    kind = BoundKind.PROBABLE
    return SynopsisResult(value, value + low, value + high, series.records, kind, reached)


def _gather(sketch: Sketch, feature: int, scope: Scope, first: int, steps: int) -> _Series:
    """Return the series of the steps from a first one on."""
    since = max(scope.time_range[0], first * sketch.spec.layout.step_us)
    if since >= scope.time_range[1]:
        return _Series(np.full(steps, np.nan), 0)
    scope = replace(scope, since=since)
    totals, records = np.zeros((2, steps)), 0  # of rows, and of their values
    for part in parts_of(sketch, scope):
        check_planes(part, np.array([feature]), scope)
        records += _add_part(part, feature, compile_scope(part, scope), first, totals)
    with np.errstate(invalid="ignore"):
        return _Series(totals[1] / totals[0], records)


def _add_part(
    synopsis: Synopsis, feature: int, compiled: CompiledScope, first: int, totals: Floats
) -> int:
    """Add what a synopsis knows to the steps; returns the records used."""
    spec, step_us = synopsis.spec, synopsis.spec.layout.step_us
    counts, sums = totals
    records = compiled.rows.size

    def add(at: Ints, values: Floats, weights: Floats) -> None:
        np.add.at(counts, at, weights)
        np.add.at(sums, at, weights * values)

    for part in leaves_in(synopsis, compiled):
        codes = part.paths.codes[:, feature]
        used = (codes > 0) & (part.weights > 0.0)
        at = step_times(part.paths, spec)[used] // step_us - first
        add(at, synopsis.plane_table.means[feature, codes[used]], part.weights[used])
        records += used.size
    values = synopsis.rows.values[:, feature]
    used = np.isfinite(values) & (compiled.rows > 0)
    weights = np.where(compiled.rows[used] == INSIDE, 1.0, 0.5)
    add(synopsis.rows.time[used] // step_us - first, values[used], weights)
    return records


def _predict(values: Floats, target: int, day: int) -> tuple[float, Floats] | None:
    """Return the forecast and the errors of past forecasts."""
    known = np.append(values, np.nan)  # up to the target, which is not known
    anomalies = known - _profile(known, 1, day)
    finite = np.flatnonzero(np.isfinite(anomalies))
    if not finite.size:
        return None
    last = int(finite[-1])
    lead = target - last
    profile = _profile(known, math.ceil(lead / day), day)
    ends = np.arange(max(last - ERROR_DAYS * day, lead), last + 1)
    before, after = anomalies[ends - lead], (known - profile)[ends]
    pairs = np.isfinite(before) & np.isfinite(after)
    before, after = before[pairs], after[pairs]
    if before.size < ERRORS_MIN or not math.isfinite(profile[target]):
        return None
    share = float(before @ after) / max(float(before @ before), 1e-300)
    return float(profile[target] + share * anomalies[last]), after - share * before


def _profile(values: Floats, newest: int, day: int) -> Floats:
    """Return the weighted mean of the same step on earlier days, ``newest`` days ago and before."""
    sums, weights = np.zeros((2, values.size))
    for k in range(PROFILE_DAYS):
        shift = (newest + k) * day
        if shift >= values.size:
            break
        earlier = values[:-shift]
        there = np.isfinite(earlier)
        sums[shift:] += np.where(there, DAY_WEIGHT**k * earlier, 0.0)
        weights[shift:] += np.where(there, DAY_WEIGHT**k, 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / weights)


def _interval(errors: Floats, confidence: float) -> tuple[float, float, float]:
    """Return two errors between which a further one lies, and how probably.

    Among ``n + 1`` exchangeable errors any rank of the newest is as likely as the others.
    """
    ordered = np.sort(errors)
    outside = math.floor((errors.size + 1) * (1.0 - confidence) / 2.0)
    outside = max(outside, 1)
    reached = min(confidence, 1.0 - 2.0 * outside / (errors.size + 1))
    return float(ordered[outside - 1]), float(ordered[-outside]), reached
