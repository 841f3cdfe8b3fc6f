"""Relational queries: the part of a synopsis in a scope, itself a synopsis.

Leaves inside the scope are copied, leaves on its border are marked: in results of the part they
count as possible rows. Whole groups keep their records. A group of which leaves are missing loses
its exact sums, and results use its leaves instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import numpy as np
import pyarrow as pa

from roost.kernel.shapes import BORDER, INSIDE
from roost.model.arrays import Floats, Ints
from roost.model.schemas import TIMESTAMP
from roost.synopsis.bands import Bands, Sketch, parts_of
from roost.synopsis.leaves import Bytes, Paths
from roost.synopsis.paths import sort_runs
from roost.synopsis.records import GroupRecords, Totals, merge_groups
from roost.synopsis.scan import find_parts
from roost.synopsis.scope import EVERYTHING, Scope, compile_scope, row_columns
from roost.synopsis.scope_leaves import judge_leaves, step_times, whole_runs
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import (
    PlaceBounds,
    SmallRows,
    Synopsis,
    assemble,
    from_rows,
    join,
)
from roost.synopsis.totals import totals_of

BATCH_LEAVES = 1 << 16
BOUNDS = ("x0", "y0", "x1", "y1")  # columns of a place


@overload
def select(sketch: Synopsis, scope: Scope = EVERYTHING) -> Synopsis: ...
@overload
def select(sketch: Bands, scope: Scope = EVERYTHING) -> Bands: ...
def select(sketch: Sketch, scope: Scope = EVERYTHING) -> Sketch:
    """Return the part of a synopsis, or of several, in a scope; it has no set sketches."""
    parts = tuple(_select(part, scope) for part in parts_of(sketch, scope))
    return Bands(parts) if isinstance(sketch, Bands) else parts[0]


def _select(synopsis: Synopsis, scope: Scope) -> Synopsis:
    compiled = compile_scope(synopsis, scope)
    spec, leaves, listed = synopsis.spec, synopsis.leaves, compiled.listed
    parts = find_parts(leaves, listed, compiled.leaf_filter)
    runs = parts.runs
    paths = synopsis.paths(runs)
    states, shares = np.empty(paths.steps.size, np.uint8), np.empty(paths.steps.size)
    judge_leaves(leaves, parts, listed, spec.layout, compiled.leaf_filter, states, shares)
    kept = _filter(paths, states)
    whole = whole_runs(synopsis, compiled)
    joined = _concatenate(synopsis.paths(whole), kept)
    cut = np.searchsorted(synopsis.run_starts, listed.first_runs, side="right") - 1
    records = _records(synopsis, compiled.whole, cut, kept)
    at = np.unique(leaves.places[np.concatenate([whole, runs])])
    places = PlaceBounds(synopsis.places.cells[at], synopsis.places.bounds[at])
    rows = synopsis.rows.take(compiled.rows == INSIDE)
    totals = totals_of(synopsis.totals, synopsis.groups.keys[compiled.whole], spec)
    rest = (places, synopsis.bin_records, rows, totals)
    part = assemble(spec, synopsis.bins, records, joined, *rest)
    possible = synopsis.rows.take(compiled.rows == BORDER)
    if possible.x.size:
        part = join([part, _marked(possible, synopsis)], rows)
    return part.without_sets() if spec.sets else part


def _records(synopsis: Synopsis, whole: Ints, cut: Ints, kept: Paths) -> GroupRecords:
    """Return the records of whole groups, and those of cut ones without their sums."""
    groups = synopsis.groups
    keys = np.repeat(kept.run_keys >> synopsis.spec.rest_bits, np.diff(kept.starts))
    remaining, at = np.unique(keys, return_inverse=True)
    some = groups.take(cut[np.isin(groups.keys[cut], remaining)])
    _, features, codes = groups.marginals.shape
    partial = GroupRecords.empty(remaining.size, features, codes)._replace(
        keys=some.keys,
        counts=np.bincount(at, kept.counts, remaining.size).astype(np.int64),
        bounds=some.bounds,
        times=some.times,
        exact=np.zeros(remaining.size, np.bool_),
    )
    return merge_groups([groups.take(whole), partial])


def _marked(rows: SmallRows, like: Synopsis) -> Synopsis:
    """Return rows that may be in the scope as marked leaves."""
    found = from_rows(rows, like.spec, like.bins, small=False)
    paths = found.paths()
    marked = paths._replace(unsure=np.ones_like(paths.unsure))
    groups = found.groups._replace(exact=np.zeros_like(found.groups.exact))
    rest = (found.places, found.bin_records, found.rows, Totals.none(len(like.spec.features)))
    return assemble(like.spec, like.bins, groups, marked, *rest)


def _filter(paths: Paths, states: Bytes) -> Paths:
    """Drop the leaves outside, mark those on the border."""
    kept = np.flatnonzero(states)
    runs = np.repeat(np.arange(paths.run_keys.size), np.diff(paths.starts))[kept]
    counts = np.bincount(runs, minlength=paths.run_keys.size)
    present = counts > 0
    starts = np.concatenate([[0], np.cumsum(counts[present])])
    marks = np.maximum(paths.unsure[kept], states[kept] != INSIDE).astype(np.uint8)
    columns = (paths.steps[kept], paths.counts[kept], marks, paths.codes[kept])
    return Paths(paths.run_keys[present], starts, *columns)


def _concatenate(a: Paths, b: Paths) -> Paths:
    """Join paths of different groups, sorted by run."""
    starts = np.concatenate([a.starts, b.starts[1:] + a.starts[-1]])
    columns = (np.concatenate([x, y]) for x, y in zip(a, b, strict=True))
    return sort_runs(Paths._make(columns)._replace(starts=starts))


def record_batches(sketch: Sketch) -> Iterator[pa.RecordBatch]:
    """Yield the leaves, and the rows of small groups, as Arrow record batches.

    Columns: bounds ``x0, y0, x1, y1`` of the place, ``time_from`` and ``time_until`` of the step,
    ``rows``, ``rows_sure``, and for each feature its least, greatest and mean value, null where it
    is null; of a category its value. Of a dropped plane, they are those of all rows of the band.
    """
    for part in parts_of(sketch, EVERYTHING):
        yield from _record_batches(part)


def record_schema(spec: SynopsisSpec) -> pa.Schema:
    """Return the columns of :func:`record_batches`."""
    columns = dict.fromkeys(BOUNDS, pa.float64())
    columns |= dict.fromkeys(("time_from", "time_until"), TIMESTAMP)
    columns |= dict.fromkeys(("rows", "rows_sure"), pa.int64())
    for feature in spec.features:
        if feature.categorical:
            columns[feature.name] = feature.type
        else:
            own = (f"{feature.name}_{suffix}" for suffix in ("low", "high", "mean"))
            columns |= dict.fromkeys(own, pa.float64())
    return pa.schema(columns)


def _record_batches(synopsis: Synopsis) -> Iterator[pa.RecordBatch]:
    sizes = synopsis.leaves.sizes.astype(np.int64)
    runs, ends = np.arange(sizes.size), np.cumsum(sizes)
    part = (ends - 1) // BATCH_LEAVES
    for number in np.unique(part):
        yield _leaf_batch(synopsis, runs[part == number])
    if synopsis.rows.x.size:
        yield _row_batch(synopsis)


def _leaf_batch(synopsis: Synopsis, runs: Ints) -> pa.RecordBatch:
    spec = synopsis.spec
    paths = synopsis.paths(runs)
    begin, sizes = step_times(paths, spec), np.diff(paths.starts)
    bounds = np.repeat(synopsis.places.bounds[synopsis.leaves.places[runs]], sizes, axis=0)
    end, counts = begin + spec.layout.step_us, paths.counts.astype(np.int64)
    columns = _common(bounds, begin, end, counts, paths.unsure)
    table = synopsis.plane_table
    for k, feature in enumerate(spec.features):
        codes = paths.codes[:, k]
        null = (codes == 0) & (not synopsis.bins.dropped[k])
        names = synopsis.bins.categories[k]
        if names is not None:
            texts = pa.array([None, *names, None], feature.type)
            # A plane of merged categories does not tell which one it was.
            merged = synopsis.bins.halvings[k] > 0
            at = np.zeros_like(codes) if merged else codes
            columns[feature.name] = texts.take(pa.array(at))
            continue
        for suffix, values in zip(("low", "high", "mean"), table, strict=True):
            columns[f"{feature.name}_{suffix}"] = pa.array(values[k, codes], mask=null)
    return pa.RecordBatch.from_pydict(columns)


def _row_batch(synopsis: Synopsis) -> pa.RecordBatch:
    rows = synopsis.rows
    bounds = np.stack([rows.x, rows.y, rows.x, rows.y], axis=1)
    ones, marks = np.ones(rows.x.size, np.int64), np.zeros(rows.x.size, np.uint8)
    columns = _common(bounds, rows.time, rows.time + 1, ones, marks)
    for feature, values in zip(synopsis.spec.features, row_columns(synopsis).values(), strict=True):
        if feature.categorical:
            columns[feature.name] = values
        else:
            numbers = values.cast(pa.float64())
            columns |= {f"{feature.name}_{suffix}": numbers for suffix in ("low", "high", "mean")}
    return pa.RecordBatch.from_pydict(columns)


def _common(
    bounds: Floats, begin: Ints, end: Ints, counts: Ints, unsure: Bytes
) -> dict[str, pa.Array]:
    columns = dict(zip(BOUNDS, map(pa.array, bounds.T.copy()), strict=True))
    columns |= {"time_from": pa.array(begin, TIMESTAMP), "time_until": pa.array(end, TIMESTAMP)}
    sure = np.where(unsure > 0, 0, counts)
    return columns | {
        "rows": pa.array(counts, pa.int64()),
        "rows_sure": pa.array(sure, pa.int64()),
    }
