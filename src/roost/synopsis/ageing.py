"""A stream in temporal bands: recent rows in the finest, older ones in coarser levels.

`steps` is the order of coarsening, bottom-up: merge bins, drop planes, shorten places and prefixes,
widen calendar buckets; hours of the day are merged last. `fit_budget` adds synopses to the bands
and applies the plans of :mod:`roost.synopsis.budget` until the budget holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.model.arrays import Ints
from roost.model.records import TIME_MIN
from roost.synopsis.bands import Bands, mergeable
from roost.synopsis.bins import DROPPED
from roost.synopsis.budget import BandMove, BandPlan, BucketSize, Budget, plan
from roost.synopsis.coarsening import Resolution, coarsen, split_at
from roost.synopsis.drift import rebin
from roost.synopsis.leaves import run_words
from roost.synopsis.sets import fit_sets, merge_sets
from roost.synopsis.spec import SECOND_US, split_group_keys
from roost.synopsis.synopsis import SmallRows, Synopsis, from_rows, merge
from roost.synopsis.totals import owners_of

BUCKET_DAYS_MAX = 10_000
SETS_SHARE = 0.25  # of the budget, up to which set sketches have their own periods
BINS_OF_LEVEL_MAX = 4  # bands of a level without planes that have different bins


@dataclass(frozen=True, eq=False)
class Band:
    """The rows of one level: 0 is the finest."""

    level: int
    synopsis: Synopsis


def _merge_bins(times: int) -> Callable[[Resolution], Resolution]:
    return lambda r: replace(r, halvings=tuple(min(h + times, DROPPED) for h in r.halvings))


def _drop_planes(r: Resolution) -> Resolution:
    """Drop planes, and totals, which take more bytes than leaves without planes."""
    return replace(_merge_bins(DROPPED)(r), interval_days=None)


def _shorten(place_bits: int, share: int = 1) -> Callable[[Resolution], Resolution]:
    """Shorten places by some bits, and prefixes to a share of theirs."""

    def shorter(r: Resolution) -> Resolution:
        prefix = r.prefix_bits // share
        place = max(r.place_bits - place_bits, 2, prefix + prefix % 2)
        return replace(r, place_bits=min(place, r.place_bits), prefix_bits=prefix)

    return shorter


def _widen(times: int) -> Callable[[Resolution], Resolution]:
    def wider(r: Resolution) -> Resolution:
        widest = max(BUCKET_DAYS_MAX // r.bucket_days, 1)
        return replace(r, bucket_days=r.bucket_days * min(times, widest))

    return wider


def _merge_slots(r: Resolution) -> Resolution:
    return replace(r, slots=1)


_STEPS: tuple[Callable[[Resolution], Resolution], ...] = (
    *(_merge_bins(2), _merge_bins(2), _drop_planes),
    *(_shorten(8), _shorten(4, 2)),
    *(_widen(4), _widen(4), _widen(4), _widen(4)),
    lambda r: _widen(4)(_shorten(32, 64)(r)),
    _merge_slots,
)
LAST_LEVEL = len(_STEPS)


def next_resolution(resolution: Resolution, level: int) -> Resolution:
    """Return the resolution of the level after one."""
    return _STEPS[level](resolution)


def bands_of(bands: Sequence[Band]) -> Bands:
    """Return what queries accept."""
    return Bands(tuple(band.synopsis for band in bands))


def measure_buckets(band: Band) -> list[BucketSize]:
    """Return the size of each calendar bucket of a band."""
    synopsis = band.synopsis
    groups, rows, layout = synopsis.groups, synopsis.rows, synopsis.spec.layout
    group_buckets = split_group_keys(groups.keys)[1]
    row_buckets = rows.time // layout.bucket_us
    found = np.unique(np.concatenate([group_buckets, row_buckets]))
    of_group, of_row = np.searchsorted(found, group_buckets), np.searchsorted(found, row_buckets)
    of_run = np.repeat(of_group, np.diff(synopsis.run_starts))
    run_bytes = 8 * run_words(synopsis.leaves) + _row_bytes(synopsis.leaves[:-1])
    group_bytes = _row_bytes((*groups, synopsis.run_starts))

    def total(owners: Ints, amounts: NDArray[Any] | None = None) -> Ints:
        return np.bincount(owners, amounts, found.size).astype(np.int64)

    nbytes = total(of_run, run_bytes) + total(of_group) * group_bytes
    nbytes += total(of_row) * _row_bytes(rows)
    of_total = split_group_keys(owners_of(synopsis.totals.keys, synopsis.spec))[1]
    nbytes += total(np.searchsorted(found, of_total)) * _row_bytes(synopsis.totals)
    last = np.full(found.size, np.iinfo(np.int64).min)
    np.maximum.at(last, of_group, groups.times[:, 1])
    np.maximum.at(last, of_row, rows.time)
    counts = total(of_group, groups.counts) + total(of_row)
    starts = found * layout.bucket_us
    columns = (starts, starts + layout.bucket_us, last, nbytes, counts)
    table = zip(*(column.tolist() for column in columns), strict=True)
    return [BucketSize(band.level, *row) for row in table]


def _row_bytes(columns: Sequence[NDArray[Any]]) -> int:
    return sum(column[:1].nbytes for column in columns)


def plan_bands(
    bands: Sequence[Band], budget: Budget, now_us: int, pending: int = 0, *, young: bool = True
) -> BandPlan:
    """Measure bands and decide which buckets become coarser."""
    buckets = [bucket for band in bands for bucket in measure_buckets(band)]
    nbytes = sum(band.synopsis.nbytes for band in bands)
    other = pending + nbytes - sum(bucket.nbytes for bucket in buckets)
    return plan(buckets, other, budget, now_us, LAST_LEVEL, young=young)


def apply_plan(bands: Sequence[Band], decided: BandPlan) -> tuple[Band, ...]:
    """Return the bands after the moves of a plan."""
    found = list(bands)
    if decided.expire_us is not None:
        kept = [replace(b, synopsis=split_at(b.synopsis, decided.expire_us)[1]) for b in found]
        found = [band for band in kept if band.synopsis.count]
    for move in decided.moves:
        found = _apply(found, move)
    return tuple(found)


def _apply(bands: Sequence[Band], move: BandMove) -> list[Band]:
    found = [band for band in bands if band.level != move.level]
    for band in bands:
        if band.level == move.level:
            old, rest = split_at(band.synopsis, move.until_us)
            if rest.count:
                found.append(Band(band.level, rest))
            if old.count:
                resolution = next_resolution(Resolution.of(old.spec, old.bins), move.level)
                found = add(found, Band(move.level + 1, coarsen(old, resolution)))
    return sorted(found, key=lambda band: band.level)


def add(bands: Sequence[Band], added: Band) -> list[Band]:
    """Return the bands with the rows of a further one.

    It is merged with a band of its resolution and bins. Without planes, a level has only a few
    bands with different bins: rows of further ones go to the bins of the oldest.
    """
    level = [band for band in bands if band.level == added.level]
    alike = [band for band in level if mergeable(band.synopsis, added.synopsis)]
    same = [band for band in alike if _alike(band, added)]
    if not same and len(alike) >= BINS_OF_LEVEL_MAX and all(added.synopsis.bins.dropped):
        same = [min(alike, key=_oldest)]
        added = Band(added.level, rebin(added.synopsis, same[0].synopsis.bins))
    merged = merge([*(band.synopsis for band in same), added.synopsis])
    return [*(band for band in bands if band not in same), Band(added.level, merged)]


def add_all(bands: Sequence[Band], added: Sequence[Band]) -> list[Band]:
    """Return the bands with the rows of further ones; those that are alike are merged at once."""
    classes: list[list[Band]] = []
    for band in added:
        found = next((own for own in classes if _alike(own[0], band)), None)
        if found is None:
            classes.append(found := [])
        found.append(band)
    out = list(bands)
    for own in classes:
        out = add(out, Band(own[0].level, merge([band.synopsis for band in own])))
    return out


def _alike(a: Band, b: Band) -> bool:
    """Return whether bands have one level, one resolution and the same bins."""
    same = a.level == b.level and mergeable(a.synopsis, b.synopsis)
    return same and a.synopsis.bins.same_values(b.synopsis.bins)


def gather_sets(parts: Sequence[Synopsis], budget: Budget, now_us: int) -> tuple[Synopsis, ...]:
    """Return the set sketches of parts as a synopsis without rows, or nothing if there are none.

    They take up to ``SETS_SHARE`` of the budget, if each set can be brought to one period.
    """
    owners = [part for part in parts if part.spec.sets]
    if not owners:
        return ()
    newest = owners[-1]
    spec, features = newest.spec, len(newest.spec.features)
    merged = merge_sets([part.sets for part in owners], spec)
    oldest = TIME_MIN
    if budget.retention_s is not None:
        oldest = now_us - round(budget.retention_s * SECOND_US)
    fitted = fit_sets(merged, spec, int(SETS_SHARE * budget.memory), now_us, oldest)
    return (replace(from_rows(SmallRows.empty(features), spec, newest.bins), sets=fitted),)


def _oldest(band: Band) -> int:
    return int(band.synopsis.groups.times.min(initial=np.iinfo(np.int64).max))


def fit_budget(
    bands: Sequence[Band], budget: Budget, now_us: int, pending: int = 0, *, young: bool = True
) -> tuple[tuple[Band, ...], int]:
    """Coarsen bands until they fit the budget; returns them, and the bytes that are too many.

    That is more than zero only if everything that may be coarsened is as coarse as possible.
    """
    found = tuple(bands)
    while True:
        decided = plan_bands(found, budget, now_us, pending, young=young)
        if not decided.moves and decided.expire_us is None:
            return found, decided.excess
        found = apply_plan(found, decided)
