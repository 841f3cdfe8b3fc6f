"""Evidence about features that leaves do not tell: planes that were dropped or merged.

Leaves tell how many rows of a group are in the scope by place and time, and the group record what
the values of its rows are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numba import njit

from roost.kernel.cells import Whole
from roost.kernel.shapes import BORDER, INSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.bounds import ValueCounts, join_counts
from roost.synopsis.frame import open_frame
from roost.synopsis.leaves import COUNT, read_field
from roost.synopsis.narrowing import NO_MOMENTS, GroupMoments, RowCounts, moments_of, predicate_rows
from roost.synopsis.records import pair_index
from roost.synopsis.scan import GroupList, LeafFilter, find_parts, judge_run, make_scratch
from roost.synopsis.scope import CompiledScope, Scope, compile_scope, postfix
from roost.synopsis.spec import KeyLayout
from roost.synopsis.synopsis import Synopsis


def is_unresolved(synopsis: Synopsis, predicate: str | None) -> bool:
    """Return whether marginals tell more of a feature of a predicate than leaves do."""
    return any(synopsis.bins.halvings[feature] for feature in features_of(synopsis, predicate))


def features_of(synopsis: Synopsis, predicate: str | None) -> set[int]:
    """Return the features of a predicate."""
    if predicate is None:
        return set()
    steps = postfix(predicate, synopsis.spec.schema)
    names = (step[0].attributes() for step in steps if not isinstance(step, int))
    return {synopsis.spec.index(name) for own in names for name in own}


@njit(cache=True, nogil=True)
def _count_groups(
    addresses: Ints, groups: GroupList, layout: KeyLayout, leaf_filter: LeafFilter, out: Floats
) -> Whole:  # pragma: no cover - compiled
    """Add up rows by group: inside, possible, estimated; returns the number of leaves read."""
    leaves = open_frame(addresses).leaves
    parts = find_parts(leaves, groups, leaf_filter)
    scratch = make_scratch(leaves, parts.runs, leaf_filter.program.size)
    for at in range(parts.runs.size):
        run, g, inside = parts.runs[at], parts.owners[at], parts.inside[at]
        if not inside:
            judge_run(leaves, run, groups, g, layout, leaf_filter, scratch)
        read_field(leaves, run, COUNT, scratch.numbers)
        for k in range(parts.begins[at], parts.ends[at]):
            count = scratch.numbers[k]
            if inside or scratch.states[0, k] == INSIDE:
                for column in range(3):
                    out[column, g] += count
            elif scratch.states[0, k] == BORDER:
                out[1, g] += count
                out[2, g] += count * scratch.shares[0, k]
    return parts.leaves


def _scan_groups(synopsis: Synopsis, compiled: CompiledScope) -> tuple[RowCounts, int]:
    out = np.zeros((3, compiled.listed.slots.size))
    if not out.size:
        return RowCounts(*out), 0
    layout, addresses = synopsis.spec.layout, synopsis.frame.addresses
    read = _count_groups(addresses, compiled.listed, layout, compiled.leaf_filter, out)
    return RowCounts(*out), int(read)


def _positions(synopsis: Synopsis, compiled: CompiledScope) -> Ints:
    first_runs = compiled.listed.first_runs
    return np.asarray(np.searchsorted(synopsis.run_starts, first_runs, side="right") - 1)


def count_listed(
    synopsis: Synopsis, scope: Scope, compiled: CompiledScope
) -> tuple[RowCounts, int]:
    """Return the rows of each listed group in a scope, and the number of leaves read."""
    if scope.predicate is None:
        return _scan_groups(synopsis, compiled)
    at = _positions(synopsis, compiled)
    rows = synopsis.groups.counts[at].astype(np.float64)
    # By place and time: groups wholly inside need no leaves.
    plain = compile_scope(synopsis, replace(scope, predicate=None))
    cut, read = _scan_groups(synopsis, plain)
    read += at.size
    low, high, value = rows.copy(), rows.copy(), rows.copy()
    for column, found in zip((low, high, value), cut, strict=True):
        column[np.searchsorted(at, _positions(synopsis, plain))] = found
    holds = predicate_rows(synopsis, at, scope.predicate)
    value = value * holds.value / np.maximum(rows, 1.0)
    low, high = np.maximum(holds.low - (rows - low), 0.0), np.minimum(holds.high, high)
    dropped = [synopsis.bins.dropped[feature] for feature in features_of(synopsis, scope.predicate)]
    if not all(dropped):
        leaves, further = _scan_groups(synopsis, compiled)
        low, high = np.maximum(low, leaves.low), np.minimum(high, leaves.high)
        read += further
        if not any(dropped):
            value = leaves.value
    return RowCounts(low, high, np.clip(value, low, high)), read


def unresolved_counts(
    synopsis: Synopsis, scope: Scope, compiled: CompiledScope, feature: int, *, exact: bool
) -> tuple[ValueCounts, GroupMoments, int]:
    """Return entries for the listed groups by a dropped feature, and the number of leaves read.

    With ``exact``, one entry bounds the rows of a group, and moments narrow it; two more, at the
    mean minus and plus a standard deviation, only estimate. Otherwise there is one for each bin.
    Moments are those of the first entries.
    """
    found, read = count_listed(synopsis, scope, compiled)
    at = _positions(synopsis, compiled)
    known = synopsis.groups.exact[at]
    missing = RowCounts(*(column[~known] for column in found))
    unknown = _unknown_entries(synopsis, at[~known], feature, missing)
    at, found = at[known], RowCounts(*(column[known] for column in found))
    if not exact:
        return join_counts([_bin_entries(synopsis, at, feature, found), unknown]), NO_MOMENTS, read
    moments, shift = moments_of(synopsis, at, feature), synopsis.bins.shifts[feature]
    expected = found.value * moments.rows / np.maximum(synopsis.groups.counts[at], 1)
    spread = np.sqrt(moments.squares / np.maximum(moments.rows, 1.0))
    points = [
        _points(shift + moments.means + side * spread, expected / 2.0) for side in (-1.0, 1.0)
    ]
    entries = _group_entries(synopsis, at, found, feature, feature)
    return join_counts([entries, *points, unknown]), moments, read


def unresolved_pairs(
    synopsis: Synopsis, scope: Scope, compiled: CompiledScope, a: int, b: int
) -> tuple[ValueCounts, ValueCounts, int]:
    """Return entries for the listed groups by two features, one of them dropped.

    One entry bounds the rows of a group; four more have the means, variances and the covariance of
    its values, and only estimate.
    """
    found, read = count_listed(synopsis, scope, compiled)
    at = _positions(synopsis, compiled)
    known = synopsis.groups.exact[at]
    missing = RowCounts(*(column[~known] for column in found))
    firsts, seconds = (
        [_unknown_entries(synopsis, at[~known], feature, missing)] for feature in (a, b)
    )
    at, found = at[known], RowCounts(*(column[known] for column in found))
    firsts.append(_group_entries(synopsis, at, found, a, b))
    seconds.append(_group_entries(synopsis, at, found, b, a))
    groups = synopsis.groups
    rows = groups.present[at, a, b].astype(np.float64)
    some = np.maximum(rows, 1.0)
    means = groups.sums[at, a, b] / some, groups.sums[at, b, a] / some
    squares = groups.squares[at, a, b], groups.squares[at, b, a]
    spreads = [
        np.sqrt(np.maximum(x / some - m * m, 0.0)) for x, m in zip(squares, means, strict=True)
    ]
    products = groups.squares[at, a, a]
    if a != b:
        features = groups.sums.shape[1]
        products = groups.products[at, pair_index(min(a, b), max(a, b), features)]
    area = spreads[0] * spreads[1]
    covariance = products / some - means[0] * means[1]
    slope = np.clip(np.divide(covariance, area, out=np.zeros(at.size), where=area > 0.0), -1, 1)
    weight = found.value * rows / np.maximum(groups.counts[at], 1) / 4.0
    shifts = synopsis.bins.shifts[[a, b]]
    for x, y in ((-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)):
        weights = weight * (1.0 + x * y * slope)
        firsts.append(_points(shifts[0] + means[0] + x * spreads[0], weights))
        seconds.append(_points(shifts[1] + means[1] + y * spreads[1], weights))
    return join_counts(firsts), join_counts(seconds), read


def _group_entries(
    synopsis: Synopsis, at: Ints, found: RowCounts, feature: int, other: int
) -> ValueCounts:
    """Return one entry for each group, of rows that have both features."""
    groups = synopsis.groups
    present = groups.present[at, feature, other].astype(np.float64)
    nulls = groups.counts[at] - present
    sure = np.maximum(found.low - nulls, 0.0)
    most = np.minimum(found.high, present)
    some = present > 0.0
    lows = np.where(some, groups.lows[at, feature], 0.0)
    highs = np.where(some, groups.highs[at, feature], 0.0)
    return ValueCounts(lows, highs, (lows + highs) / 2.0, sure, most, np.zeros(at.size))


def _unknown_entries(synopsis: Synopsis, at: Ints, feature: int, found: RowCounts) -> ValueCounts:
    """Return one entry for each group of a selected part: any value that the bins have."""
    records = synopsis.bin_records
    counts = records.counts[feature]
    rows = max(float(counts[1:].sum()), 1.0)
    mean = float(synopsis.bins.shifts[feature]) + float(records.sums[feature].sum()) / rows
    low, high = float(records.lows[feature].min()), float(records.highs[feature].max())
    table = (low, high, min(max(mean, low), high)) if low <= high else (0.0, 0.0, 0.0)
    present = rows / max(float(counts.sum()), 1.0)
    lows, highs, means = (np.full(at.size, value) for value in table)
    return ValueCounts(lows, highs, means, np.zeros(at.size), found.high, found.value * present)


def _bin_entries(synopsis: Synopsis, at: Ints, feature: int, found: RowCounts) -> ValueCounts:
    """Return one entry for each bin: at least what cannot be out of the scope is in it."""
    groups, records = synopsis.groups, synopsis.bin_records
    rows = groups.counts[at].astype(np.float64)
    marginals = groups.marginals[at, feature].astype(np.float64)
    sure = np.maximum(marginals - (rows - found.low)[:, None], 0.0).sum(axis=0)
    most = np.minimum(marginals, found.high[:, None]).sum(axis=0)
    expected = (found.value / np.maximum(rows, 1.0)) @ marginals
    means = synopsis.bins.shifts[feature] + records.sums / np.maximum(records.counts, 1)
    some = np.flatnonzero(most[1:]) + 1
    lows, highs = records.lows[feature, some], records.highs[feature, some]
    return ValueCounts(lows, highs, means[feature, some], sure[some], most[some], expected[some])


def _points(values: Floats, expected: Floats) -> ValueCounts:
    none = np.zeros(values.size)
    return ValueCounts(values, values, values, none, none, expected)
