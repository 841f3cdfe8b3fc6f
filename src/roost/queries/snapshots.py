"""Validation of snapshot queries, by the rules that requests are admitted by."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import replace

import pyarrow as pa

from roost.errors import RequestError
from roost.model.records import Box, Circle, Instant, Polygon, Query, Reason, request_record
from roost.model.schemas import TIMESTAMP
from roost.model.space import Outside
from roost.queries.admission import Rules, admit
from roost.window.snapshot import SnapshotQuery


def check_snapshot(snapshot: SnapshotQuery, rules: Rules) -> None:
    """Validate a snapshot query by the rules of requests.

    Raises :class:`RequestError` with the reason for which a request with this query would be
    refused, and :class:`ConfigError` if an aggregate does not fit the points.
    """
    shape = snapshot.shape
    if snapshot.nearest is not None:
        if not isinstance(shape, Circle):
            raise RequestError(Reason.MISSING_FIELD, "nearest requires a circle")
        number = isinstance(snapshot.nearest, int) and not isinstance(snapshot.nearest, bool)
        if not number or snapshot.nearest < 1:
            raise RequestError(Reason.WRONG_TYPE, "nearest takes a whole number from 1 up")
        if snapshot.aggregate is not None:
            raise RequestError(Reason.MALFORMED, "takes nearest or aggregate, not both")
        if snapshot.since is not None or snapshot.until is not None:
            raise RequestError(
                Reason.MALFORMED, "nearest takes no times: it covers the whole window"
            )
        if math.isinf(shape.radius) and shape.radius > 0:
            shape = Circle(shape.cx, shape.cy, 0.0)
    for instant in (snapshot.since, snapshot.until):
        _check_instant(instant, rules)
    if snapshot.aggregate is not None and rules.attributes is not None:
        snapshot.aggregate.result_schema(rules.attributes, rules.point_id_type)
    if snapshot.predicate is None and (shape is None or _is_valid_box(shape)):
        return
    inside = rules.space.bounds
    whole = Box(inside.x0, inside.y0, inside.x1, inside.y1)
    query = Query("", whole if shape is None else shape, "", snapshot.predicate)
    block = pa.Table.from_pylist([request_record(query)])
    # A shape outside the bounds is valid; its result is empty.
    anywhere = replace(
        rules, id_type=pa.string(), space=replace(rules.space, outside=Outside.EXACT)
    )
    refused = admit(block, anywhere).refused
    if refused:
        raise RequestError(refused[0].reason, refused[0].detail)


def _check_instant(instant: Instant | None, rules: Rules) -> None:
    if instant is None:
        return
    whole = isinstance(instant, int) and not isinstance(instant, bool)
    if rules.time_type == TIMESTAMP and not isinstance(instant, dt.datetime):
        raise RequestError(Reason.WRONG_TYPE, "times of this stream are timestamps")
    if rules.time_type != TIMESTAMP and not whole:
        raise RequestError(Reason.WRONG_TYPE, "times of this stream are whole numbers")


def _is_valid_box(shape: Box | Circle | Polygon) -> bool:
    if not isinstance(shape, Box):
        return False
    finite = all(map(math.isfinite, (shape.x0, shape.y0, shape.x1, shape.y1)))
    return finite and shape.x0 <= shape.x1 and shape.y0 <= shape.y1
