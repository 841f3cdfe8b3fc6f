"""Coarsening: the same rows at a lower resolution, in fewer bytes.

`coarsen` applies the operations of the paper, bottom-up: merge bins of the leaves, drop planes,
shorten the spatial prefixes and places, widen calendar buckets and steps, merge hour-of-day slots.
Group records add up, and marginals keep all bins, so results about whole groups stay exact. Every
operation maps one key or code to one other: coarsening before or after a merge gives the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roost.errors import ConfigError
from roost.model.arrays import Ints
from roost.synopsis.bins import DROPPED, Bins
from roost.synopsis.leaves import Bytes, Leaves, Paths
from roost.synopsis.paths import combine, join_leaves, sort_runs
from roost.synopsis.records import BinRecords, merge_groups, reduce_bounds
from roost.synopsis.spec import SynopsisSpec, join_group_keys, places_of, split_group_keys
from roost.synopsis.synopsis import (
    PlaceBounds,
    SmallRows,
    Synopsis,
    assemble,
    join,
    promote,
    starts_of,
)
from roost.synopsis.totals import coarsen_totals, totals_of


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the leaves and groups of a synopsis distinguish.

    ``halvings`` says how often the bins of each plane are halved, ``DROPPED`` that it is dropped.
    """

    halvings: tuple[int, ...]
    prefix_bits: int
    place_bits: int
    bucket_days: int
    step_s: int
    slots: int
    interval_days: int | None = None  # of the totals; None: there are none

    @classmethod
    def of(cls, spec: SynopsisSpec, bins: Bins) -> Resolution:
        """Return the resolution of a spec and its planes."""
        sizes = (spec.prefix_bits, spec.place_bits, spec.bucket_days, spec.step_s, spec.slots)
        return cls(bins.halvings, *sizes, spec.interval_days)

    def apply(self, spec: SynopsisSpec, bins: Bins) -> tuple[SynopsisSpec, Bins]:
        """Return spec and bins at this resolution; raises `ConfigError` if it is not coarser."""
        for name, fine in self._differences(spec, bins):
            raise ConfigError(f"resolution.{name}", getattr(self, name), fine)
        names = ("prefix_bits", "place_bits", "bucket_days", "step_s", "slots", "interval_days")
        coarse = replace(spec, **{name: getattr(self, name) for name in names})
        return coarse, replace(bins, halvings=tuple(min(h, DROPPED) for h in self.halvings))

    def _differences(self, spec: SynopsisSpec, bins: Bins) -> Iterator[tuple[str, str]]:
        """Yield the parts that are not coarser, with what would be."""
        same_number = len(self.halvings) == len(bins.halvings)
        if not same_number or any(map(int.__lt__, self.halvings, bins.halvings)):
            yield "halvings", f"at least {bins.halvings}"
        for name in ("prefix_bits", "place_bits"):
            if getattr(self, name) > getattr(spec, name):
                yield name, f"at most {getattr(spec, name)}"
        if self.bucket_days % spec.bucket_days:
            yield "bucket_days", f"a multiple of {spec.bucket_days}"
        fine, own = spec.layout.interval_days, self.interval_days or self.bucket_days
        if own % fine or self.bucket_days % own:
            yield "interval_days", f"a multiple of {fine} that divides bucket_days"
        if self.step_s % spec.step_s:
            yield "step_s", f"a multiple of {spec.step_s}"
        if spec.slots % self.slots:
            yield "slots", f"a divisor of {spec.slots}"


def coarsen(synopsis: Synopsis, resolution: Resolution) -> Synopsis:
    """Return the synopsis at a lower resolution, as if it had been built with it."""
    spec, bins = resolution.apply(synopsis.spec, synopsis.bins)
    if resolution == Resolution.of(synopsis.spec, synopsis.bins):
        return synopsis
    keys = _group_keys(synopsis.groups.keys, synopsis.spec, spec)
    groups = merge_groups([synopsis.groups._replace(keys=keys)])
    paths = _coarse_paths(synopsis, spec, bins)
    cells = synopsis.places.cells >> (synopsis.spec.place_bits - spec.place_bits)
    places, owners = np.unique(cells, return_inverse=True)
    bounds = PlaceBounds(places, reduce_bounds(synopsis.places.bounds, owners, places.size))
    totals = coarsen_totals(synopsis.totals, synopsis.groups, synopsis.spec, spec)
    rest = (synopsis.bin_records, synopsis.rows, totals)
    coarse = assemble(spec, bins, groups, paths, bounds, *rest)
    rows, grown = promote([coarse])
    coarse = join([coarse, *grown], rows) if grown else coarse
    return replace(coarse, sets=synopsis.sets)


def _group_keys(keys: Ints, fine: SynopsisSpec, coarse: SynopsisSpec) -> Ints:
    """Return the coarser group of each group key."""
    prefixes, buckets, slots = split_group_keys(keys)
    return join_group_keys(
        prefixes >> (fine.prefix_bits - coarse.prefix_bits),
        buckets // (coarse.bucket_days // fine.bucket_days),
        slots // (fine.slots // coarse.slots),
    )


def _coarse_paths(synopsis: Synopsis, spec: SynopsisSpec, bins: Bins) -> Paths:
    """Return the sorted and combined leaves at a lower resolution."""
    fine, paths = synopsis.spec, synopsis.paths()
    _, buckets, slots = split_group_keys(paths.run_keys >> fine.rest_bits)
    # Days and steps of the slot by which the finer bucket and slot begin later than the coarser.
    days = buckets % (spec.bucket_days // fine.bucket_days) * fine.bucket_days
    later = slots % (fine.slots // spec.slots) * fine.layout.steps_per_slot
    sizes = np.diff(paths.starts)
    day, step = np.divmod(paths.steps.astype(np.int64), fine.layout.steps_per_slot)
    step = (step + np.repeat(later, sizes)) // (spec.step_s // fine.step_s)
    steps = (day + np.repeat(days, sizes)) * spec.layout.steps_per_slot + step
    places = places_of(paths.run_keys, fine) >> (fine.place_bits - spec.place_bits)
    groups = _group_keys(paths.run_keys >> fine.rest_bits, fine, spec)
    run_keys = groups << spec.rest_bits | places & ((1 << spec.rest_bits) - 1)
    codes = _coarse_codes(paths.codes, synopsis.bins, bins)
    coarse = paths._replace(run_keys=run_keys, steps=steps.astype(np.int32), codes=codes)
    return combine(sort_runs(coarse))


def _coarse_codes(codes: Bytes, fine: Bins, coarse: Bins) -> Bytes:
    """Return codes of merged bins; those of a dropped plane are 0."""
    out = codes.copy()
    for f, (before, after) in enumerate(zip(fine.halvings, coarse.halvings, strict=True)):
        if after >= DROPPED:
            out[:, f] = 0
        elif after > before:
            out[:, f] = np.where(codes[:, f] > 0, (codes[:, f] - 1 >> after - before) + 1, 0)
    return out


def split_at(synopsis: Synopsis, time_us: int) -> tuple[Synopsis, Synopsis]:
    """Return the calendar buckets that end by a time, and all others.

    Both parts know the extremes of every bin; sums by bin are divided in proportion. Set
    sketches cannot be divided.
    """
    if synopsis.spec.sets:
        expected = "no set sketches in a synopsis that is divided by time"
        raise ConfigError("synopsis.sets", synopsis.spec.sets[0].names, expected)
    layout = synopsis.spec.layout
    old = (split_group_keys(synopsis.groups.keys)[1] + 1) * layout.bucket_us <= time_us
    old_rows = (synopsis.rows.time // layout.bucket_us + 1) * layout.bucket_us <= time_us
    return split_groups(synopsis, old, old_rows)


def split_groups(
    synopsis: Synopsis, groups: NDArray[np.bool_], small: NDArray[np.bool_]
) -> tuple[Synopsis, Synopsis]:
    """Return some groups, and all others; rows of small groups are chosen by themselves.

    Both parts know the extremes of every bin; sums by bin are divided in proportion.
    """
    records = synopsis.bin_records
    counts = synopsis.groups.marginals[groups].sum(axis=0, dtype=np.int64)
    # Groups of a selected part have no marginals.
    shares = np.minimum(counts / np.maximum(records.counts, 1), 1.0)
    sums, squares = records.sums * shares, records.squares * shares
    first = records._replace(counts=counts, sums=sums, squares=squares)
    rest = (records.counts - counts, records.sums - sums, records.squares - squares)
    second = BinRecords(*rest, records.lows, records.highs)
    rows = synopsis.rows.take(small), synopsis.rows.take(~small)
    return _take(synopsis, groups, first, rows[0]), _take(synopsis, ~groups, second, rows[1])


def _take(
    synopsis: Synopsis, groups: NDArray[np.bool_], bin_records: BinRecords, rows: SmallRows
) -> Synopsis:
    """Return some groups of a synopsis; their leaves are copied in packed form."""
    runs = np.flatnonzero(np.repeat(groups, np.diff(synopsis.run_starts)))
    small = (column[runs] for column in synopsis.leaves[:-1])
    leaves = Leaves._make((*small, synopsis.leaves.words))
    at, places = np.unique(leaves.places, return_inverse=True)
    leaves = leaves._replace(places=places.astype(np.uint32))
    keys, packed = join_leaves([(leaves, synopsis.run_keys[runs])])
    kept = synopsis.groups.take(groups)
    run_starts = starts_of(keys, kept, synopsis.spec)
    bounds = PlaceBounds(synopsis.places.cells[at], synopsis.places.bounds[at])
    return replace(
        synopsis,
        groups=kept.narrowed(),
        run_starts=run_starts,
        leaves=packed,
        places=bounds,
        bin_records=bin_records,
        rows=rows,
        totals=totals_of(synopsis.totals, kept.keys, synopsis.spec),
    )
