"""The scope of a query: shape, time range, hours of the day and predicate.

`compile_scope` evaluates a scope once for each place, group, step of the day and bin. Compiled
loops then only look up states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import shapely
from numba import njit
from numpy.typing import NDArray

from roost.errors import ConfigError, RequestError
from roost.kernel.cells import Whole
from roost.kernel.shapes import BORDER, INSIDE, OUTSIDE, circle_holds_cell, in_circle
from roost.model.arrays import Floats, Ints, frozen
from roost.model.records import TIME_MAX, TIME_MIN, Box, Circle, Instant, Polygon, Reason
from roost.model.space import Space
from roost.predicate import Expression, check, parse
from roost.predicate.ast import LIST_OPERATORS, Comparison, Condition
from roost.predicate.axis import axis_of
from roost.predicate.columns import RowBlock
from roost.predicate.evaluate import compile_expression
from roost.synopsis.comparing import features_compared, judge_ranges
from roost.synopsis.frame import Frame, GroupIndex, open_frame
from roost.synopsis.leaves import Bytes
from roost.synopsis.scan import (
    AND,
    CODE,
    OR,
    PAIR,
    STEPS_END,
    Exact,
    GroupList,
    LeafFilter,
    interval_range,
    step_range,
)
from roost.synopsis.spec import (
    BUCKET_BITS,
    BUCKET_ZERO,
    DAY_S,
    SECOND_US,
    SLOT_BITS,
    KeyLayout,
    SynopsisSpec,
)
from roost.synopsis.synopsis import Synopsis
from roost.synopsis.totals import find_totals
from roost.window.evaluate import polygon_of, shape_bounds, time_of

CACHED = 64
_NO_PREDICATE = (np.empty(0, np.int64), np.empty((0, 0), np.uint8), np.empty((0, 0)))
_NO_STATES, _NO_IMAGES = np.empty(0, np.uint8), np.empty((0, 4))
NO_CIRCLE = (0.0, 0.0, -1.0)
HOURS = 24


@dataclass(frozen=True, slots=True)
class Scope:
    """Which rows a query is about; without restrictions, all of them.

    Event times are in ``[since, until)``. ``hours`` is a range of hours of the day in UTC, such as
    ``(14, 16)``; ``(22, 2)`` passes midnight. ``docs/queries.md`` describes predicates; here their
    attributes are the features.
    """

    shape: Box | Circle | Polygon | None = None
    since: Instant | None = None
    until: Instant | None = None
    hours: tuple[int, int] | None = None
    predicate: str | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        if isinstance(shape, Box) and not (shape.x0 <= shape.x1 and shape.y0 <= shape.y1):
            raise RequestError(Reason.INVERTED_BOX, f"shape {shape}: x0 <= x1 and y0 <= y1")
        if isinstance(shape, Circle) and not shape.radius >= 0.0:
            raise RequestError(Reason.BAD_RADIUS, f"shape {shape}: a radius from 0 up")
        if self.hours is not None:
            start, stop = self.hours
            whole = all(isinstance(hour, Integral) for hour in self.hours)
            if not (whole and 0 <= start < HOURS and 0 < stop <= HOURS and start != stop):
                expected = "whole hours: start from 0 to 23, stop from 1 to 24, not the same"
                raise ConfigError("hours", self.hours, expected)
        since, until = self.time_range
        if since >= until:
            raise ConfigError("since, until", (self.since, self.until), "since before until")

    @property
    def time_range(self) -> tuple[int, int]:
        """First microsecond of the range, and the first after it."""
        since = TIME_MIN if self.since is None else time_of(self.since)
        return since, TIME_MAX if self.until is None else time_of(self.until)

    def and_predicate(self, predicate: str) -> Scope:
        """Return the scope restricted by a further predicate."""
        both = predicate if self.predicate is None else f"({self.predicate}) and ({predicate})"
        return replace(self, predicate=both)


EVERYTHING = Scope()


class Request(NamedTuple):
    """A scope as compiled loops read it, before it is evaluated for the groups and places."""

    states: Bytes  # of the boxes of a frame; if empty, images and circle decide
    images: Floats  # boxes that contain the shape; none if there is no shape
    circle: tuple[float, float, float]  # with a negative radius if the shape is none
    lonlat: bool
    since: int
    until: int
    day: Bytes  # state and share of each step of the day
    day_shares: Floats
    program: Ints  # see `LeafFilter`
    code_states: Bytes
    code_shares: Floats


class CompiledScope(NamedTuple):
    """A scope, evaluated for a synopsis."""

    leaf_filter: LeafFilter
    exact: Exact
    listed: GroupList  # groups whose leaves are read
    rows: Bytes  # state of each row of the small groups

    @property
    def whole(self) -> Ints:
        """Groups whose records apply."""
        return self.exact.groups


def compile_scope(synopsis: Synopsis, scope: Scope, *, totals: bool = False) -> CompiledScope:
    """Evaluate a scope for the places, groups, bins and small rows of a synopsis.

    With ``totals``, they replace the leaves of their intervals; then a group may be listed twice.
    """
    request, addresses = prepare(synopsis, scope), synopsis.frame.addresses
    judged = _judge_frame(addresses, synopsis.spec.layout, request, totals)
    return CompiledScope(*judged, judge_rows(synopsis, scope))


def prepare(synopsis: Synopsis, scope: Scope) -> Request:
    """Return a scope for compiled loops."""
    spec, shape = synopsis.spec, scope.shape
    states, images, circle = _NO_STATES, _NO_IMAGES, NO_CIRCLE
    if isinstance(shape, Polygon):
        states = judge_boxes(shape, synopsis.frame.boxes, spec)
    else:
        images, circle = _bound_shape(shape, spec.space)
    day, day_shares = _judge_day(scope.hours, spec.step_s)
    return Request(
        *(states, images, circle, spec.lonlat, *scope.time_range, day, day_shares),
        *compile_predicate(synopsis, scope.predicate),
    )


@njit(cache=True, nogil=True)
def judge(
    frame: Frame, layout: KeyLayout, request: Request, totals: bool
) -> tuple[LeafFilter, Exact, GroupList]:  # pragma: no cover - compiled
    """Evaluate a scope: the restrictions of leaves, what is exact, and the groups to scan."""
    boxes = request.states
    if boxes.size == 0:
        boxes = _judge_simple(frame.boxes, request.images, request.circle, request.lonlat)
    groups = frame.groups.keys.size
    places = boxes[: boxes.size - groups]
    own = boxes[boxes.size - groups :]
    exact, listed = _judge_groups(frame.groups, own, layout, request, totals)
    leaf_filter = LeafFilter(
        request.since,
        request.until,
        request.day,
        request.day_shares,
        places,
        np.flatnonzero(places),
        request.program,
        request.code_states,
        request.code_shares,
    )
    return leaf_filter, exact, listed


@njit(cache=True, nogil=True)
def _judge_frame(
    addresses: Ints, layout: KeyLayout, request: Request, totals: bool
) -> tuple[LeafFilter, Exact, GroupList]:  # pragma: no cover - compiled
    return judge(open_frame(addresses), layout, request, totals)


@njit(cache=True, nogil=True)
def _judge_groups(
    index: GroupIndex, boxes: Bytes, layout: KeyLayout, request: Request, totals: bool
) -> tuple[Exact, GroupList]:  # pragma: no cover - compiled
    """Return the groups and totals inside, and the groups to scan."""
    keys, times, run_starts = index.keys, index.times, index.run_starts
    since, until, day = request.since, request.until, request.day
    plain = request.program.size == 0
    whole, owners = np.empty(keys.size, np.int64), np.empty(keys.size, np.int64)
    most = 2 * keys.size if totals else keys.size
    listed, starts_us = np.empty(most, np.int64), np.empty(most, np.int64)
    slots, steps = np.empty(most, np.int64), np.empty((2, most), np.int64)
    judged = np.zeros(most, np.bool_)
    inner = np.empty(index.intervals.size if totals else 0, np.int64)
    wholes = lists = inners = owns = 0
    for g in range(keys.size):
        slot = keys[g] & ((1 << SLOT_BITS) - 1)
        state = INSIDE
        if times[g, 1] < since or times[g, 0] >= until:
            state = OUTSIDE
        elif times[g, 0] < since or times[g, 1] >= until:
            state = BORDER
        hours = day[slot * layout.steps_per_slot]
        for k in range(slot * layout.steps_per_slot, (slot + 1) * layout.steps_per_slot):
            if day[k] != hours:
                hours = BORDER
        state = min(state, hours)
        if min(state, boxes[g]) == OUTSIDE:
            continue
        if plain and state == INSIDE and boxes[g] == INSIDE and index.exact[g]:
            whole[wholes] = g
            wholes += 1
            continue
        bucket = (keys[g] >> SLOT_BITS & ((1 << BUCKET_BITS) - 1)) - BUCKET_ZERO
        start_us = bucket * layout.bucket_us
        low: Whole = 0
        high: Whole = STEPS_END
        first: Whole = 0
        last: Whole = 0
        cut = hours == BORDER
        if state == BORDER and not cut:
            low, high, cut = step_range(start_us, slot, layout, since, until)
        if totals and plain and hours == INSIDE and boxes[g] == INSIDE and index.exact[g]:
            first, last = interval_range(start_us, slot, layout, since, until)
        ranges = 1
        if first < last and layout.intervals > 1:
            begin, end = find_totals(index.intervals, keys[g], layout, first, last)
            for k in range(begin, end):
                inner[inners] = k
                inners += 1
            if begin < end:
                owners[owns] = g
                owns += 1
            ranges = 2
        for k in range(ranges):
            span = layout.interval_days * layout.steps_per_slot
            begin = max(low, last * span) if k else low
            end = min(high, first * span) if k < ranges - 1 else high
            if begin >= end or (k and last == layout.intervals):
                continue
            listed[lists], starts_us[lists], slots[lists] = g, start_us, slot
            steps[0, lists], steps[1, lists], judged[lists] = begin, end, cut
            lists += 1
    found = listed[:lists]
    first_runs, last_runs = run_starts[found], run_starts[found + 1]
    cuts = steps[0, :lists], steps[1, :lists], judged[:lists]
    groups = GroupList(first_runs, last_runs, starts_us[:lists], slots[:lists], *cuts)
    return Exact(whole[:wholes], inner[:inners], owners[:owns]), groups


@lru_cache(maxsize=CACHED)
def _judge_day(hours: tuple[int, int] | None, step_s: int) -> tuple[Bytes, Floats]:
    """Return state and share of each step of the day."""
    steps = DAY_S // step_s
    if hours is None:
        return np.full(steps, INSIDE, np.uint8), np.ones(steps)
    begins = np.arange(steps) * step_s
    start, stop = hours[0] * 3600, hours[1] * 3600
    ranges = [(start, stop)] if start < stop else [(start, DAY_S), (0, stop)]
    shares = np.zeros(steps)
    for low, high in ranges:
        shares += np.clip(np.minimum(begins + step_s, high) - np.maximum(begins, low), 0, None)
    shares /= step_s
    states = np.where(shares >= 1.0, INSIDE, np.where(shares > 0.0, BORDER, OUTSIDE))
    return states.astype(np.uint8), shares


@njit(cache=True, nogil=True)
def _judge_simple(
    boxes: Floats, images: Floats, circle: tuple[float, float, float], lonlat: bool
) -> Bytes:  # pragma: no cover - compiled
    """Return the state of each box in a circle, if its radius is not negative, or else in images.

    Without images every box is inside.
    """
    out = np.full(boxes.shape[0], INSIDE, np.uint8)
    if images.shape[0] == 0:
        return out
    x, y, radius = circle
    turns = np.array([[x, y, radius], [x - 360.0, y, radius], [x + 360.0, y, radius]])
    for k in range(boxes.shape[0]):
        x0, y0, x1, y1 = boxes[k, 0], boxes[k, 1], boxes[k, 2], boxes[k, 3]
        touched = within = False
        for j in range(images.shape[0]):
            if x1 < images[j, 0] or x0 > images[j, 2] or y1 < images[j, 1] or y0 > images[j, 3]:
                continue
            touched = True
            across, along = images[j, 0] <= x0 and x1 <= images[j, 2], images[j, 1] <= y0
            within = within or (across and along and y1 <= images[j, 3])
        if not touched:
            out[k] = OUTSIDE
        elif radius >= 0.0 and x0 == x1 and y0 == y1:
            out[k] = INSIDE if in_circle(x0, y0, x, y, radius, lonlat) else OUTSIDE
        else:
            if within and radius >= 0.0:
                within = False
                for turn in turns[: 3 if lonlat else 1]:
                    within = within or circle_holds_cell((x0, y0, x1, y1), turn, lonlat)
            out[k] = INSIDE if within else BORDER
    return out


@lru_cache(maxsize=CACHED)
def _bound_shape(
    shape: Box | Circle | Polygon | None, space: Space
) -> tuple[Floats, tuple[float, float, float]]:
    """Return boxes that contain a shape, and the circle if it is one."""
    if shape is None:
        return _NO_IMAGES, NO_CIRCLE
    images = np.array(shape_bounds(shape, space), np.float64)
    if isinstance(shape, Circle):
        return images, (float(shape.cx), float(shape.cy), float(shape.radius))
    return images, NO_CIRCLE


def judge_boxes(shape: Box | Circle | Polygon | None, boxes: Floats, spec: SynopsisSpec) -> Bytes:
    """Return the state of each box: outside the shape, on its border or inside."""
    # Read-only: numba cannot load a loop from its cache if another cached one calls it with arrays
    # of the same type.
    states: Bytes = _judge_simple(frozen(boxes), *_bound_shape(shape, spec.space), spec.lonlat)
    if isinstance(shape, Polygon):
        polygon = polygon_of(shape.text)
        near = np.flatnonzero(states)
        x0, y0, x1, y1 = boxes[near].T
        points = (x0 == x1) & (y0 == y1)
        cells = np.where(points, shapely.points(x0, y0), shapely.box(x0, y0, x1, y1))
        found = np.where(shapely.covers(polygon, cells), INSIDE, BORDER)
        found[~shapely.intersects(polygon, cells)] = OUTSIDE
        on_edge = points & (found == BORDER)
        found[on_edge] = np.where(shapely.intersects_xy(polygon, x0, y0)[on_edge], INSIDE, OUTSIDE)
        states[near] = found
    return states


def judge_rows(synopsis: Synopsis, scope: Scope) -> Bytes:
    """Return the state of the rows of small groups, by their values."""
    spec, rows = synopsis.spec, synopsis.rows
    if not rows.time.size:
        return np.empty(0, np.uint8)
    since, until = scope.time_range
    inside: NDArray[np.bool_] = (rows.time >= since) & (rows.time < until)
    if not inside.any():
        return np.zeros(inside.size, np.uint8)
    boxes = np.stack([rows.x, rows.y, rows.x, rows.y], axis=1)
    inside &= judge_boxes(scope.shape, boxes, spec) == INSIDE
    if scope.hours is not None:
        start, stop = scope.hours
        hour = rows.time % (DAY_S * SECOND_US) // (3600 * SECOND_US)
        after, before = hour >= start, hour < stop
        inside &= (after & before) if start < stop else (after | before)
    if scope.predicate is None:
        return np.where(inside, INSIDE, OUTSIDE).astype(np.uint8)
    stack: list[Bytes] = []
    for step in postfix(scope.predicate, spec.schema):
        if isinstance(step, int):
            pick = np.minimum if step == AND else np.maximum
            stack[-2:] = [pick(*stack[-2:])]
        else:
            stack.append(_judge_row_values(synopsis, *step))
    return np.where(inside, stack[0], OUTSIDE).astype(np.uint8)


def _judge_row_values(
    synopsis: Synopsis, condition: Condition | Comparison, negated: bool
) -> Bytes:
    """Return the state of the rows of small groups under one condition."""
    spec = synopsis.spec
    if isinstance(condition, Comparison):
        a, b = synopsis.rows.values[:, features_at(spec, condition)].T
        states = judge_ranges(condition.operator, negated, (a, a), (b, b))[0]
        return np.where(np.isfinite(a + b), states, OUTSIDE).astype(np.uint8)
    feature = spec.index(condition.attribute)
    if spec.features[feature].categorical:
        values = synopsis.rows.values[:, feature]
        codes = np.where(np.isfinite(values), values + 1.0, 0.0).astype(np.int64)
        return judge_codes(synopsis, feature, condition, negated)[0][codes].astype(np.uint8)
    holds = _evaluate(condition, negated, spec.schema, row_columns(synopsis))
    return np.where(holds, INSIDE, OUTSIDE).astype(np.uint8)


def _evaluate(
    condition: Condition, negated: bool, schema: pa.Schema, columns: Mapping[str, pa.Array]
) -> NDArray[np.bool_]:
    """Return where a condition, or its negation, is true."""
    compiled = compile_expression(condition, negated, iter(_slots(condition)), schema)
    every = np.arange(len(columns[condition.attribute]))
    return compiled.evaluate(RowBlock(columns, schema, every), every, np.zeros_like(every))


def row_columns(synopsis: Synopsis) -> dict[str, pa.Array]:
    """Return the features of the rows of small groups as Arrow columns."""
    columns = {}
    for k, feature in enumerate(synopsis.spec.features):
        values = synopsis.rows.values[:, k]
        known = np.isfinite(values)
        names = synopsis.bins.categories[k]
        if names is None:
            numbers = pa.array(np.where(known, values, 0.0), mask=~known)
            columns[feature.name] = numbers.cast(feature.type)
        else:
            texts = [*names, None]
            picked = [texts[int(v)] if ok else None for v, ok in zip(values, known, strict=True)]
            columns[feature.name] = pa.array(picked, feature.type)
    return columns


def _slots(condition: Condition) -> list[list[Any]]:
    """Return the constants of a condition in the form of a group of one predicate."""
    if condition.operator in LIST_OPERATORS:
        return [[list(condition.values)]]
    return [[value] for value in condition.values]


@lru_cache(maxsize=CACHED)
def _parse(text: str, schema: pa.Schema) -> Expression:
    expression = parse(text)
    check(expression, schema)
    for condition in expression.conditions():
        if isinstance(condition, Comparison):
            features_compared(condition, schema)
    return expression


def compile_predicate(synopsis: Synopsis, text: str | None) -> tuple[Ints, Bytes, Floats]:
    """Return the program of a predicate, and states and shares by condition and code."""
    if text is None:
        return _NO_PREDICATE
    program: list[int] = []
    tables: list[tuple[Bytes, Floats]] = []
    for step in postfix(text, synopsis.spec.schema):
        if isinstance(step, int):
            program.append(step)
            continue
        condition, negated = step
        if isinstance(condition, Comparison):
            a, b = features_at(synopsis.spec, condition)
            program.append(a + (b + 1) * PAIR)
            tables.append(_judge_pairs(synopsis, condition, negated, a, b))
        else:
            program.append(synopsis.spec.index(condition.attribute))
            tables.append(_judge_bins(synopsis, condition, negated))
    width = max(states.size for states, _ in tables)
    states = np.full((len(tables), width), OUTSIDE, np.uint8)
    shares = np.zeros(states.shape)
    for k, table in enumerate(tables):
        states[k, : table[0].size], shares[k, : table[1].size] = table
    return np.array(program, np.int64), states, shares


def features_at(spec: SynopsisSpec, comparison: Comparison) -> tuple[int, int]:
    """Return the positions of the features that a comparison is of."""
    a, b = features_compared(comparison, spec.schema)
    return spec.index(a), spec.index(b)


def _judge_pairs(
    synopsis: Synopsis, comparison: Comparison, negated: bool, a: int, b: int
) -> tuple[Bytes, Floats]:
    """Return state and share of each two codes of the leaves under a comparison."""
    table, bins, counts = synopsis.plane_table, synopsis.bins, synopsis.bin_records.counts
    first = table.lows[a, :, None], table.highs[a, :, None]
    second = table.lows[b, None, :], table.highs[b, None, :]
    found, likely = judge_ranges(comparison.operator, negated, first, second)
    for feature, null in ((a, np.s_[0, :]), (b, np.s_[:, 0])):
        if not bins.dropped[feature]:
            found[null], likely[null] = OUTSIDE, 0.0
        elif counts[feature, 0]:  # any of the values may be null
            found[null] = np.minimum(found[null], BORDER)
    states, shares = np.zeros((CODE, CODE), np.uint8), np.zeros((CODE, CODE))
    codes = bins.codes_max
    states[:codes, :codes], shares[:codes, :codes] = found, likely
    return states.ravel(), shares.ravel()


def postfix(text: str, schema: pa.Schema) -> Iterator[int | tuple[Condition | Comparison, bool]]:
    """Yield the conditions of a predicate, each with whether it is negated, ``AND`` and ``OR``."""
    return _postfix(_parse(text, schema), False)


def _postfix(expression: Any, negated: bool) -> Iterator[int | tuple[Condition | Comparison, bool]]:
    if isinstance(expression, Condition | Comparison):
        yield expression, negated
    elif expression.operator == "not":
        yield from _postfix(expression.operands[0], not negated)
    else:
        for k, operand in enumerate(expression.operands):
            yield from _postfix(operand, negated)
            if k:
                yield AND if (expression.operator == "and") is not negated else OR


def _judge_bins(synopsis: Synopsis, condition: Condition, negated: bool) -> tuple[Bytes, Floats]:
    """Return state and share of each code of the leaves under a condition or its negation."""
    feature = synopsis.spec.index(condition.attribute)
    codes = synopsis.bins.codes_max
    states, shares = judge_codes(synopsis, feature, condition, negated)
    planes, counts = synopsis.bins.planes[feature], synopsis.bin_records.counts[feature]
    known = counts > 0
    lowest, highest = np.full(codes, INSIDE), np.full(codes, OUTSIDE)
    np.minimum.at(lowest, planes[known], states[known])
    np.maximum.at(highest, planes[known], states[known])
    totals = np.bincount(planes, counts, codes)
    shares = np.bincount(planes, counts * shares, codes) / np.maximum(totals, 1)
    merged = np.where(lowest == highest, lowest, BORDER)
    return np.where(totals > 0, merged, OUTSIDE).astype(np.uint8), np.clip(shares, 0.0, 1.0)


def judge_codes(
    synopsis: Synopsis, feature: int, condition: Condition, negated: bool
) -> tuple[Ints, Floats]:
    """Return state and share of each code of a feature, with all its bins."""
    if condition.operator == "is null":
        states = np.where(np.arange(synopsis.bins.codes_max) == 0, INSIDE, OUTSIDE)
        states = INSIDE - states if negated else states
        return states, states / INSIDE
    if synopsis.spec.features[feature].categorical:
        return _judge_categories(synopsis, feature, condition, negated)
    return _judge_numbers(synopsis, feature, condition, negated)


def _judge_categories(
    synopsis: Synopsis, feature: int, condition: Condition, negated: bool
) -> tuple[Ints, Floats]:
    names = synopsis.bins.categories[feature]
    assert names is not None
    schema = synopsis.spec.schema
    column = pa.array(names, schema.field(feature).type)
    holds = _evaluate(condition, negated, schema, {condition.attribute: column})
    # The last bin has the values without a name.
    other = BORDER
    if condition.operator in ("=", "!=", "in") and set(condition.values) <= set(names):
        other = INSIDE if (condition.operator == "!=") is not negated else OUTSIDE
    states = np.full(synopsis.bins.codes_max, other)
    states[0] = OUTSIDE
    states[1 : holds.size + 1] = np.where(holds, INSIDE, OUTSIDE)
    return states, states / INSIDE


def ranges_of(
    condition: Condition, negated: bool, type_: pa.DataType
) -> tuple[list[tuple[float, float]], bool]:
    """Return the closed ranges of a comparison, and whether values outside of them are meant."""
    axis = axis_of(type_)
    operator, values = condition.operator, condition.values
    if operator == "!=":
        operator, negated = "=", not negated
    if operator == "in":
        ranges = [(point, point) for point in axis.points(values)]
    elif operator == "between":
        ends = axis.interval(">=", values[0]), axis.interval("<=", values[1])
        ranges = [(max(ends[0][0], ends[1][0]), min(ends[0][1], ends[1][1]))]
    else:
        ranges = [axis.interval(operator, values[0])]
    return [(float(low), float(high)) for low, high in ranges if low <= high], negated


def _judge_numbers(
    synopsis: Synopsis, feature: int, condition: Condition, negated: bool
) -> tuple[Ints, Floats]:
    lows, highs = synopsis.bin_records.lows[feature], synopsis.bin_records.highs[feature]
    ranges, negated = ranges_of(condition, negated, synopsis.spec.features[feature].type)
    states, shares = np.full(lows.size, OUTSIDE), np.zeros(lows.size)
    spans = np.maximum(highs - lows, np.finfo(np.float64).tiny)
    for low, high in ranges:
        inside = (lows >= low) & (highs <= high)
        touched = (lows <= high) & (highs >= low)
        states = np.maximum(states, np.where(inside, INSIDE, np.where(touched, BORDER, OUTSIDE)))
        shares += np.clip(np.minimum(highs, high) - np.maximum(lows, low), 0.0, None) / spans
    shares = np.where(states == BORDER, np.clip(shares, 0.0, 1.0), states / INSIDE)
    if negated:
        states, shares = INSIDE - states, 1.0 - shares
    states[0], shares[0] = OUTSIDE, 0.0  # a comparison with null is not true
    return states, shares
