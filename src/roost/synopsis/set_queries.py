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
from roost.synopsis.bands import Sketch
from roost.synopsis.bounds import BoundKind, SynopsisResult
from roost.synopsis.scope import EVERYTHING, Scope
from roost.synopsis.sets import (
    BLOOM,
    BLOOM_PROBES,
    COUNT_HASHES,
    SetRecords,
    SetSketches,
    fill_of,
    is_member,
    item_keys,
    period_us,
    spans_of,
    unite,
)
from roost.synopsis.spec import SetSpec

HLL_DEVIATIONS, HLL_CONFIDENCE = 2, 0.95
COUNT_CONFIDENCE = 1.0 - math.exp(-COUNT_HASHES)


class _Found(NamedTuple):
    """A sketch that a time range touches."""

    sketches: SetSketches
    at: int
    inside: bool  # the range has the whole periods

    @property
    def records(self) -> SetRecords:
        """Where the sketch is."""
        return self.sketches.records


def contains(
    synopsis: Sketch, values: Mapping[str, Any], scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return 1 if a combination of values, by column, occurred in a time range, else 0.

    0 is guaranteed. 1 is probable: its confidence is that of the Bloom filters, as full as they
    are, not to report a value that never occurred.
    """
    own, touched = _find(synopsis, values, scope, "members")
    keys = _keys(own, values, touched)
    blooms = [found.records.blob(found.at, BLOOM) for found in touched]
    members = [is_member(bloom, key) for bloom, key in zip(blooms, keys, strict=True)]
    if not any(members):
        return SynopsisResult(0.0, 0.0, 0.0, len(blooms))
    confidence = math.prod(1.0 - fill_of(bloom) ** BLOOM_PROBES for bloom in blooms)
    low = float(any(found.inside for found, holds in zip(touched, members, strict=True) if holds))
    return SynopsisResult(1.0, low, 1.0, len(blooms), BoundKind.PROBABLE, confidence)


def cardinality(
    synopsis: Sketch, columns: Sequence[str] | str, scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return the number of distinct combinations of values in a time range.

    ``columns`` may also be a text with commas. Rows in which one of the columns is null do not
    count, as in SQL.
    """
    if isinstance(columns, str):
        columns = [name.strip() for name in columns.split(",")]
    own, touched = _find(synopsis, columns, scope, "lg_k")
    least, most = (
        unite((found.records.hll(found.at) for found in entries), own.lg_k)
        for entries in ([found for found in touched if found.inside], touched)
    )
    low = float(least.get_lower_bound(HLL_DEVIATIONS))
    high = float(most.get_upper_bound(HLL_DEVIATIONS))
    value = (least.get_estimate() + most.get_estimate()) / 2.0
    return SynopsisResult(value, low, high, len(touched), BoundKind.PROBABLE, HLL_CONFIDENCE)


def frequency(
    synopsis: Sketch, values: Mapping[str, Any], scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return the number of rows with a combination of values, by column, in a time range.

    ``high`` is guaranteed, ``low`` is probable.
    """
    own, touched = _find(synopsis, values, scope, "counters")
    least, most, rows = 0.0, 0.0, 0.0
    for found, key in zip(touched, _keys(own, values, touched), strict=True):
        sketch = found.records.counts(found.at)
        count = float(sketch.get_estimate(int(key.view(np.int64))))
        most += count
        if found.inside:
            least += count
            rows += sketch.total_weight
    # The minimum over the hashes of each period is at most the one of all periods together.
    low = max(least - math.e / own.counters * rows, 0.0)
    value = (least + most) / 2.0
    kind = BoundKind.PROBABLE
    return SynopsisResult(value, low, most, len(touched), kind, COUNT_CONFIDENCE)


def _find(
    sketch: Sketch, columns: Iterable[str], scope: Scope, size: str
) -> tuple[SetSpec, list[_Found]]:
    """Return the sketches of some columns; refuses what they cannot restrict."""
    sketches, wanted = sketch.set_sketches, set(columns)
    sets = sketches[0].spec.sets if sketches else ()
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
    unit, touched = period_us(sets[owner]), []
    for own in sketches:
        for at, span in enumerate(spans_of(own.records)):
            begin, end = span.period * unit, span.end * unit
            if span.owner == owner and begin < until and end > since:
                touched.append(_Found(own, at, since <= begin and end <= until))
    return sets[owner], touched


def _keys(own: SetSpec, values: Mapping[str, Any], touched: Sequence[_Found]) -> list[np.uint64]:
    """Return the key of a combination of values in each sketch; it depends on the bins."""
    columns = []
    for column in own.columns:
        value = values[column.name]
        try:
            columns.append(pa.array([value], column.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ConfigError(column.name, value, f"a value of type {column.type}") from error
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError("values", dict(values), "values that are neither null nor infinite")
    keys: dict[int, np.uint64] = {}
    for sketches in (found.sketches for found in touched):
        if id(sketches.bins) not in keys:
            keys[id(sketches.bins)] = item_keys(columns, own, sketches.spec, sketches.bins)[0][0]
    return [keys[id(found.sketches.bins)] for found in touched]
