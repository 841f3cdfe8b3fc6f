"""Set queries: membership, cardinality and frequency of values of the configured columns.

A set sketch describes a whole period. A time range that cuts one bounds the result by the periods
inside the range and by those that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from roost.errors import ConfigError
from roost.synopsis.bounds import BoundKind, SynopsisResult
from roost.synopsis.scope import EVERYTHING, Scope
from roost.synopsis.sets import (
    BLOOM,
    BLOOM_PROBES,
    COUNT_HASHES,
    entries_of,
    is_member,
    item_keys,
    period_us,
    unite,
)
from roost.synopsis.spec import SetSpec
from roost.synopsis.synopsis import Synopsis

HLL_DEVIATIONS, HLL_CONFIDENCE = 2, 0.95
COUNT_CONFIDENCE = 1.0 - math.exp(-COUNT_HASHES)


class _Periods(NamedTuple):
    """Sketches of a set: of the periods inside the scope, and of those that it touches."""

    own: SetSpec
    inside: list[int]
    touched: list[int]


def contains(
    synopsis: Synopsis, values: Mapping[str, Any], scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return 1 if a combination of values, by column, occurred in a time range, else 0.

    0 is guaranteed. 1 is probable: its confidence is that of the Bloom filters, as full as they
    are, not to report a value that never occurred.
    """
    periods = _find(synopsis, values, scope, "members")
    key = _key(synopsis, periods.own, values)
    blooms = {at: synopsis.sets.blob(at, BLOOM) for at in periods.touched}
    found = {at for at, bloom in blooms.items() if is_member(bloom, key)}
    if not found:
        return SynopsisResult(0.0, 0.0, 0.0, len(blooms))
    fills = np.array(
        [np.bitwise_count(bloom).sum() / (8.0 * bloom.size) for bloom in blooms.values()]
    )
    confidence = float(np.prod(1.0 - fills**BLOOM_PROBES))
    low = float(not found.isdisjoint(periods.inside))
    return SynopsisResult(1.0, low, 1.0, len(blooms), BoundKind.PROBABLE, confidence)


def cardinality(
    synopsis: Synopsis, columns: Sequence[str], scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return the number of distinct combinations of values in a time range.

    Rows in which one of the columns is null do not count, as in SQL.
    """
    periods = _find(synopsis, columns, scope, "lg_k")
    least, most = (
        unite((synopsis.sets.hll(at) for at in entries), periods.own.lg_k)
        for entries in (periods.inside, periods.touched)
    )
    low = float(least.get_lower_bound(HLL_DEVIATIONS))
    high = float(most.get_upper_bound(HLL_DEVIATIONS))
    value = (least.get_estimate() + most.get_estimate()) / 2.0
    records = len(periods.touched)
    return SynopsisResult(value, low, high, records, BoundKind.PROBABLE, HLL_CONFIDENCE)


def frequency(
    synopsis: Synopsis, values: Mapping[str, Any], scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return the number of rows with a combination of values, by column, in a time range.

    ``high`` is guaranteed, ``low`` is probable.
    """
    periods = _find(synopsis, values, scope, "counters")
    number = int(np.array([_key(synopsis, periods.own, values)]).view(np.int64)[0])
    least, most, rows = 0.0, 0.0, 0.0
    for at in periods.touched:
        sketch = synopsis.sets.counts(at)
        count = float(sketch.get_estimate(number))
        most += count
        if at in periods.inside:
            least += count
            rows += sketch.total_weight
    # The minimum over the hashes of each period is at most the one of all periods together.
    low = max(least - math.e / periods.own.counters * rows, 0.0)
    value = (least + most) / 2.0
    kind, records = BoundKind.PROBABLE, len(periods.touched)
    return SynopsisResult(value, low, most, records, kind, COUNT_CONFIDENCE)


def _find(synopsis: Synopsis, columns: Iterable[str], scope: Scope, size: str) -> _Periods:
    """Return the sketches of some columns; refuses what they cannot restrict."""
    sets, wanted = synopsis.spec.sets, set(columns)
    owner = next((k for k, own in enumerate(sets) if set(own.names) == wanted), None)
    if owner is None or not getattr(sets[owner], size):
        known = [", ".join(own.names) for own in sets if getattr(own, size)]
        expected = f"the columns of a set with {size}: {'; or '.join(known) or 'there is none'}"
        raise ConfigError("columns", ", ".join(sorted(wanted)), expected)
    for name in ("shape", "hours", "predicate"):
        if getattr(scope, name) is not None:
            expected = "nothing: set sketches are of all rows of a period"
            raise ConfigError(f"scope.{name}", getattr(scope, name), expected)
    since, until = scope.time_range
    length, inside, touched = period_us(sets[owner]), [], []
    for at, period in entries_of(synopsis.sets, owner):
        begin, end = period * length, (period + 1) * length
        if begin < until and end > since:
            touched.append(at)
            if since <= begin and end <= until:
                inside.append(at)
    return _Periods(sets[owner], inside, touched)


def _key(synopsis: Synopsis, own: SetSpec, values: Mapping[str, Any]) -> np.uint64:
    columns = []
    for column in own.columns:
        value = values[column.name]
        try:
            columns.append(pa.array([value], column.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ConfigError(column.name, value, f"a value of type {column.type}") from error
    keys, known = item_keys(columns, own, synopsis.spec, synopsis.bins)
    if not known[0]:
        raise ConfigError("values", dict(values), "values that are neither null nor infinite")
    key: np.uint64 = keys[0]
    return key
