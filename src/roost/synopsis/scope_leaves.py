"""The leaves in a scope, unpacked, with the number of rows that are expected to be inside."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit

from roost.errors import ConfigError
from roost.kernel.shapes import BORDER, INSIDE, OUTSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.leaves import Bytes, Leaves, Paths
from roost.synopsis.scan import GroupList, LeafFilter, Parts, find_parts, judge_run, make_scratch
from roost.synopsis.scope import CompiledScope, Scope
from roost.synopsis.spec import DAY_S, SECOND_US, KeyLayout, SynopsisSpec, split_group_keys
from roost.synopsis.synopsis import Synopsis
from roost.synopsis.unresolved import features_of

CHUNK_LEAVES = 1 << 17


class ScopeLeaves(NamedTuple):
    """Leaves of some runs; those outside the scope have no weight."""

    runs: Ints
    paths: Paths
    states: Bytes
    weights: Floats  # expected rows inside


@njit(cache=True, nogil=True)
def judge_leaves(
    leaves: Leaves,
    parts: Parts,
    groups: GroupList,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    states: Bytes,
    shares: Floats,
) -> None:  # pragma: no cover - compiled
    """Fill the state of every leaf of some runs, in order, and its share inside the scope."""
    scratch = make_scratch(leaves, parts.runs, leaf_filter.program.size)
    at = np.int64(0)
    for k in range(parts.runs.size):
        run, inside = parts.runs[k], parts.inside[k]
        if not inside:
            judge_run(leaves, run, groups, parts.owners[k], layout, leaf_filter, scratch)
        for j in range(np.int64(leaves.sizes[run])):
            state = INSIDE if inside else scratch.states[0, j]
            states[at + j] = state if parts.begins[k] <= j < parts.ends[k] else OUTSIDE
            shares[at + j] = scratch.shares[0, j] if states[at + j] == BORDER else 1.0
            if states[at + j] == OUTSIDE:
                shares[at + j] = 0.0
        at += np.int64(leaves.sizes[run])


def check_planes(synopsis: Synopsis, features: Ints, scope: Scope) -> None:
    """Refuse features of which leaves have no bins because the synopsis became coarser."""
    dropped = synopsis.bins.dropped
    for feature in {*features.tolist(), *features_of(synopsis, scope.predicate)}:
        if dropped[feature]:
            expected = "a time range in which the synopsis still has the bins of the feature"
            raise ConfigError("feature", synopsis.spec.features[feature].name, expected)


def whole_runs(synopsis: Synopsis, compiled: CompiledScope) -> Ints:
    """Return the runs of the groups inside a scope."""
    starts = synopsis.run_starts
    ranges = [np.arange(starts[g], starts[g + 1]) for g in compiled.whole]
    return np.concatenate([np.empty(0, np.int64), *ranges])


def leaves_of_runs(synopsis: Synopsis, runs: Ints) -> Iterator[ScopeLeaves]:
    """Yield the leaves of runs that are inside the scope."""
    for part in _chunks(synopsis, runs):
        paths = synopsis.paths(runs[part])
        states = np.full(paths.steps.size, INSIDE, np.uint8)
        yield ScopeLeaves(runs[part], paths, states, paths.counts.astype(np.float64))


def leaves_cut(synopsis: Synopsis, compiled: CompiledScope) -> Iterator[ScopeLeaves]:
    """Yield the leaves of the groups that a scope cuts."""
    leaves, listed, layout = synopsis.leaves, compiled.listed, synopsis.spec.layout
    found = find_parts(leaves, listed, compiled.leaf_filter)
    for part in _chunks(synopsis, found.runs):
        own = Parts(
            *(found.runs[part], found.owners[part], found.begins[part], found.ends[part]),
            found.inside[part],
            found.leaves,
        )
        paths = synopsis.paths(own.runs)
        states, shares = np.empty(paths.steps.size, np.uint8), np.empty(paths.steps.size)
        judge_leaves(leaves, own, listed, layout, compiled.leaf_filter, states, shares)
        yield ScopeLeaves(own.runs, paths, states, shares * paths.counts)


def leaves_in(synopsis: Synopsis, compiled: CompiledScope) -> Iterator[ScopeLeaves]:
    """Yield all leaves of a scope."""
    yield from leaves_of_runs(synopsis, whole_runs(synopsis, compiled))
    yield from leaves_cut(synopsis, compiled)


def _chunks(synopsis: Synopsis, runs: Ints) -> Iterator[slice]:
    ends = np.cumsum(synopsis.leaves.sizes[runs], dtype=np.int64)
    cuts = np.flatnonzero(np.diff((ends - 1) // CHUNK_LEAVES)) + 1
    bounds = [0, *cuts.tolist(), runs.size] if runs.size else [0]
    yield from (slice(a, b) for a, b in pairwise(bounds))


def step_times(paths: Paths, spec: SynopsisSpec) -> Ints:
    """Return the first microsecond of the step of each leaf."""
    layout, sizes = spec.layout, np.diff(paths.starts)
    _, buckets, slots = split_group_keys(np.repeat(paths.run_keys >> spec.rest_bits, sizes))
    day, step = np.divmod(paths.steps.astype(np.int64), layout.steps_per_slot)
    begin = buckets * layout.bucket_us + day * (DAY_S * SECOND_US)
    return np.asarray(begin + slots * layout.slot_us + step * layout.step_us)
