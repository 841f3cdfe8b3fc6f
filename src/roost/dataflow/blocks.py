"""Blocks of tuples: a table with the columns of the stream and a few of Roost's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.dataflow.order import integer_bytes
from roost.dataflow.schema import StreamSchema
from roost.model.arrays import as_arrow, as_numpy
from roost.model.columns import one_array
from roost.model.records import Reason

TIME, ORDER, BUCKET = "__time", "__order", "__bucket"
"""Event time as a 64-bit integer, tuple order, and bucket of the key."""

Mine = Callable[[NDArray[np.integer[Any]], NDArray[np.int64]], NDArray[np.bool_]]
"""Which windows or pairs a machine computes, given buckets and event times; see buckets.py."""


class Rejected(NamedTuple):
    """Tuples, or results, that an operator rejects, with why."""

    operator: str
    reason: Reason
    detail: str
    rows: pa.Table


def times_of(table: pa.Table) -> NDArray[np.int64]:
    """Return the event times."""
    return as_numpy(table[TIME].combine_chunks())


def stamped(
    stream: StreamSchema, times: NDArray[np.int64], columns: Sequence[Any], order: pa.Array | None
) -> pa.Table:
    """Build a block from event times and the columns after the time column, which is the first."""
    ticks = as_arrow(np.ascontiguousarray(times, np.int64))
    values = [ticks.cast(stream.time_type), *columns]
    arrays = [
        value if value.type == field.type else value.cast(field.type)
        for value, field in zip(values, stream.columns, strict=True)
    ]
    table = pa.table([*arrays, ticks], names=[*stream.columns.names, TIME])
    return table if order is None else table.append_column(ORDER, order)


def sort_order(table: pa.Table) -> NDArray[np.int64]:
    """Return the rows of a block in tuple order."""
    keys = [(TIME, "ascending"), (ORDER, "ascending")]
    return np.asarray(pc.sort_indices(table.select([TIME, ORDER]), keys)).astype(np.int64)


def full_order(table: pa.Table) -> list[pa.Array]:
    """Return the whole order of tuples, with the event time, as parts of another order."""
    return [integer_bytes(times_of(table)), one_array(table[ORDER])]


class OldState(NamedTuple):
    """State of earlier batches, by table; the new state replaces it if ``merge``."""

    tables: Mapping[str, pa.Table]
    merge: bool


class Ran(NamedTuple):
    """What an operator made of a batch on one machine."""

    output: pa.Table | None
    state: Mapping[str, pa.Table]  # to be stored, by table
    needed_until: int  # watermark from which this state is not needed
    rejected: Sequence[Rejected] = ()


def expand(
    low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all numbers from low to below high of each pair, and the index of their pair."""
    counts = np.maximum(high - low, 0)
    index = np.repeat(np.arange(counts.size), counts)
    firsts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - firsts[index] + low[index], index
