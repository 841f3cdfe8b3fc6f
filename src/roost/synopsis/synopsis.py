"""A synopsis: group records, leaves and the rows of small groups; build, merge, save and open.

A group with so few rows that they take fewer bytes than a record is stored as rows, and becomes a
record when it has grown. Building, merging and the size of the batches do not change results:
records add up, paths are sorted and combined, and a group is stored as rows or as a record by its
number of rows alone.

All state is a set of named arrays, in a file that any process can map.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import ConfigError, SourceError, StateError
from roost.model.arrays import Floats, Ints, Mask, as_arrow, frozen
from roost.model.columns import convert, one_array, times_as_int
from roost.model.schemas import TIMESTAMP
from roost.storage.files import map_arrays, write_arrays
from roost.synopsis.bins import Bins, feature_values, learn_bins
from roost.synopsis.frame import Frame, GroupIndex, GroupSums, PlaneTable, StoredFrame, TotalSums
from roost.synopsis.leaves import Leaves, Paths, pack, unpack
from roost.synopsis.paths import RunRows, combine, join_leaves, rank_keys, sort_rows, take_runs
from roost.synopsis.records import (
    BinRecords,
    Extents,
    GroupRecords,
    Totals,
    digest_rows,
    merge_bins,
    merge_groups,
    reduce_bounds,
    widen_runs,
)
from roost.synopsis.sets import NO_SETS, SetRecords, SetSketches, build_sets, merge_sets
from roost.synopsis.spec import SynopsisSpec, places_of, run_keys
from roost.synopsis.totals import add_units, divide_groups, keys_of, merge_totals

FORMAT = 4


class PlaceBounds(NamedTuple):
    """Places in ascending order, and the bounds of the rows in each."""

    cells: Ints
    bounds: Floats


class SmallRows(NamedTuple):
    """Rows of small groups, at full resolution."""

    x: Floats
    y: Floats
    time: Ints
    values: Floats  # by row, then feature

    @classmethod
    def empty(cls, features: int) -> SmallRows:
        """Return no rows."""
        none = np.empty(0)
        return cls(none, none, np.empty(0, np.int64), np.empty((0, features)))

    def take(self, rows: Any) -> SmallRows:
        """Return some of the rows."""
        return SmallRows(*(column[rows] for column in self))


@dataclass(frozen=True, eq=False)
class Synopsis:
    """A sketch of a table of points; immutable.

    Runs ``run_starts[g]`` to ``run_starts[g + 1]`` of the leaves belong to group ``g``.
    """

    spec: SynopsisSpec
    bins: Bins
    groups: GroupRecords
    run_starts: Ints
    leaves: Leaves
    places: PlaceBounds
    bin_records: BinRecords
    rows: SmallRows
    totals: Totals
    sets: SetRecords = NO_SETS

    @property
    def count(self) -> int:
        """Number of rows described."""
        return int(self.groups.counts.sum(dtype=np.int64)) + self.rows.x.size

    @property
    def leaf_count(self) -> int:
        """Number of leaves, without the rows of small groups."""
        return int(self.leaves.sizes.sum(dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the state, as it is stored."""
        return sum(array.nbytes for array in self.arrays().values())

    @property
    def set_sketches(self) -> tuple[SetSketches, ...]:
        """The set sketches, for set queries."""
        return (SetSketches(self.spec, self.bins, self.sets),) if self.spec.sets else ()

    def without_sets(self) -> Synopsis:
        """Return the synopsis without its set sketches."""
        return replace(self, spec=replace(self.spec, sets=()), sets=NO_SETS)

    @cached_property
    def run_keys(self) -> Ints:
        """Key of each run."""
        groups = np.repeat(self.groups.keys, np.diff(self.run_starts))
        rest = self.places.cells[self.leaves.places] & ((1 << self.spec.rest_bits) - 1)
        return np.asarray(groups << self.spec.rest_bits | rest)

    @cached_property
    def frame(self) -> StoredFrame:
        """The arrays that queries read, for compiled loops."""
        groups = self.groups
        times, totals = groups.times, self.totals
        index = GroupIndex(groups.keys, times, groups.exact, self.run_starts, totals.keys)
        sums = GroupSums(groups.sums, groups.squares, groups.products, groups.lows, groups.highs)
        boxes = np.concatenate([self.places.bounds, groups.bounds])
        by_interval = TotalSums(totals.sums, totals.squares, totals.products)
        rest = (self.plane_table, sums, self.bins.shifts, by_interval)
        return StoredFrame.of(Frame(self.leaves, index, boxes, *rest))

    @cached_property
    def plane_table(self) -> PlaneTable:
        """What is known of the values of each code of the leaves."""
        return _plane_table(self.bin_records, self.bins)

    def paths(self, runs: Ints | None = None) -> Paths:
        """Return the leaves of some runs, or of all."""
        if runs is None:
            runs = np.arange(self.leaves.sizes.size)
        return unpack(self.leaves, runs, self.run_keys[runs])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays."""
        spec = json.dumps(self.spec.to_json())
        head = f'{{"format": {FORMAT}, "spec": {spec}, "bins": {self.bins.text}}}'
        arrays: dict[str, NDArray[Any]] = {}
        arrays["head"] = np.frombuffer(head.encode(), np.uint8)
        arrays["run_starts"] = self.run_starts
        for name, part in self._parts().items():
            arrays |= {f"{name}.{key}": value for key, value in part._asdict().items()}
        return arrays

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PARTS}

    def save(self, path: Path) -> int:
        """Write the synopsis to a new file, which any process can map; returns its bytes."""
        return write_arrays(path, self.arrays())

    @classmethod
    def open(cls, path: Path) -> Synopsis:
        """Map a saved synopsis; arrays are read when they are used."""
        return cls.of(map_arrays(path), str(path))

    @classmethod
    def of(cls, arrays: dict[str, NDArray[Any]], name: str = "arrays") -> Synopsis:
        """Invert :meth:`arrays`, without copying."""
        if "head" not in arrays:
            raise StateError(f"{name} is not a synopsis")
        head = json.loads(arrays["head"].tobytes())
        if head.get("format") != FORMAT:
            raise StateError(f"{name} has synopsis format {head.get('format')}, expected {FORMAT}")
        parts = {
            part: kind(*(frozen(arrays[f"{part}.{key}"]) for key in kind._fields))
            for part, kind in _PARTS.items()
        }
        spec, bins = SynopsisSpec.from_json(head["spec"]), Bins.from_json(head["bins"])
        return cls(spec, bins, run_starts=arrays["run_starts"], **parts)


_PARTS: dict[str, Any] = {
    "groups": GroupRecords,
    "leaves": Leaves,
    "places": PlaceBounds,
    "bin_records": BinRecords,
    "rows": SmallRows,
    "totals": Totals,
    "sets": SetRecords,
}


def build(table: pa.Table, spec: SynopsisSpec, bins: Bins | None = None) -> Synopsis:
    """Build the synopsis of a table.

    Without ``bins``, they are learned from the table; synopses are merged only under equal bins.
    Rows with a null or non-finite position or a null time are refused: decode them first.
    """
    check_columns(table, spec)
    known = learn_bins(table, spec) if bins is None else bins
    rows = read_rows(table, spec, known)
    return _with_sets(from_rows(rows, spec, known), table, rows.time)


def build_owned(
    table: pa.Table, spec: SynopsisSpec, bins: Bins, owners_of: Callable[[Ints], Ints]
) -> Iterator[tuple[int, Synopsis]]:
    """Build a synopsis of the rows of each owner; ``owners_of`` returns the owners of places."""
    rows = read_rows(table, spec, bins)
    runs = _runs_of(rows, spec)
    owners = owners_of(places_of(runs.keys, spec))
    for owner in np.unique(owners).tolist():
        mine = owners == owner
        built = _from_runs(rows, runs, mine, spec, bins)
        if spec.sets:
            at = np.flatnonzero(mine[runs.ranks])
            own = table if at.size == table.num_rows else table.take(as_arrow(at))
            built = _with_sets(built, own, rows.time[at])
        yield owner, built


def _with_sets(built: Synopsis, table: pa.Table, times: Ints) -> Synopsis:
    if not built.spec.sets:
        return built
    return replace(built, sets=build_sets(table, times, built.spec, built.bins))


def check_columns(table: pa.Table, spec: SynopsisSpec) -> None:
    """Refuse a table that lacks a column."""
    of_sets = [name for own in spec.sets for name in own.names]
    for name in (spec.x, spec.y, spec.time, *spec.schema.names, *of_sets):
        if name not in table.column_names:
            expected = f"a column of the table: one of {', '.join(table.column_names)}"
            raise ConfigError("synopsis column", name, expected)


def read_rows(table: pa.Table, spec: SynopsisSpec, bins: Bins) -> SmallRows:
    """Return the columns of a table as arrays."""
    position = [np.asarray(convert(table[name], pa.float64())[0]) for name in (spec.x, spec.y)]
    times = one_array(table[spec.time])
    if not pa.types.is_integer(times.type):
        times = convert(times, TIMESTAMP)[0]
    bad = ~np.isfinite(position[0]) | ~np.isfinite(position[1])
    if times.null_count or bad.any():
        row = int(np.flatnonzero(bad | np.asarray(times.is_null()))[0])
        raise SourceError(f"row {row}: a synopsis requires a finite position and a time")
    values = np.empty((len(spec.features), table.num_rows))  # columns are converted at once
    for k, feature in enumerate(spec.features):
        column = one_array(table[feature.name])
        values[k] = feature_values(column, feature, bins.categories[k])
    return SmallRows(position[0], position[1], np.asarray(times_as_int(times)), values.T)


def rows_max(spec: SynopsisSpec, bins: Bins) -> int:
    """Return up to how many rows a group is stored as rows: they take less than a record."""
    features = len(spec.features)
    pairs = features * features * (4 + 8 + 8) + features * (features - 1) // 2 * 8
    record = pairs + features * (16 + 2 * bins.codes_max) + 64
    return record // (8 * (3 + features))


def from_rows(rows: SmallRows, spec: SynopsisSpec, bins: Bins, *, small: bool = True) -> Synopsis:
    """Build from rows; with ``small``, small groups are stored as rows."""
    runs = _runs_of(rows, spec)
    return _from_runs(rows, runs, np.ones(runs.keys.size, np.bool_), spec, bins, small=small)


def _runs_of(rows: SmallRows, spec: SynopsisSpec) -> RunRows:
    keys, steps = np.empty(rows.x.size, np.int64), np.empty(rows.x.size, np.int64)
    run_keys(frozen(rows.x), frozen(rows.y), frozen(rows.time), spec.layout, keys, steps)
    distinct, ranks = rank_keys(keys)
    sizes = np.bincount(ranks, minlength=distinct.size)
    return RunRows(distinct, sizes, np.arange(keys.size), ranks, steps)


def _groups_of(run_keys: Ints, spec: SynopsisSpec) -> tuple[Ints, Ints, Ints]:
    """Return the keys of the groups of sorted runs, where each begins, and the group of each."""
    keys = run_keys >> spec.rest_bits
    first = np.diff(keys, prepend=-1) != 0
    starts = np.flatnonzero(first)
    return keys[starts], np.append(starts, keys.size), np.cumsum(first) - 1


def _from_runs(
    rows: SmallRows,
    runs: RunRows,
    mine: Mask,
    spec: SynopsisSpec,
    bins: Bins,
    *,
    small: bool = True,
) -> Synopsis:
    """Build from the rows of some runs, whose values are not copied."""
    kept = SmallRows.empty(len(spec.features))
    if small:
        group_of_run = _groups_of(runs.keys, spec)[2]
        sizes = np.bincount(group_of_run, runs.sizes * mine)
        few = (sizes <= rows_max(spec, bins))[group_of_run] & mine
        if few.any():
            kept, mine = rows.take(few[runs.ranks]), mine & ~few
    columns = SmallRows(*map(frozen, (rows.x, rows.y, rows.time, rows.values.T)))
    own = runs if mine.all() else take_runs(runs, mine)
    return _digest(columns, own, spec, bins, kept)


def _digest(
    columns: SmallRows, runs: RunRows, spec: SynopsisSpec, bins: Bins, kept: SmallRows
) -> Synopsis:
    """Build from the rows of runs; values are by feature, then row."""
    features, codes_max, layout = len(spec.features), bins.codes_max, spec.layout
    group_keys, run_starts, group_of_run = _groups_of(runs.keys, spec)
    positions, starts, steps = sort_rows(runs)
    units = divide_groups(runs, group_of_run, group_keys.size, positions, layout)
    keys = keys_of(group_keys[units.groups], units.intervals, spec)
    groups = GroupRecords.empty(group_keys.size, features, codes_max)._replace(keys=group_keys)
    totals = Totals.empty(keys, features)._replace(counts=np.diff(units.starts))
    stats = BinRecords.empty(features, codes_max)
    codes = np.empty((steps.size, features), np.uint8)
    digest_rows(columns.values, units, bins.coding, groups, totals, stats, codes)
    add_units(groups, totals, units.groups)
    extents = Extents.empty(runs.keys.size)
    widen_runs(columns.x, columns.y, columns.time, runs, extents)
    cells, place_of_run = rank_keys(places_of(runs.keys, spec))
    places = PlaceBounds(cells, reduce_bounds(extents.bounds, place_of_run, cells.size))
    groups.bounds[:] = reduce_bounds(extents.bounds, group_of_run, group_keys.size)
    if steps.size:
        groups.times[:, 0] = np.minimum.reduceat(extents.times[:, 0], run_starts[:-1])
        groups.times[:, 1] = np.maximum.reduceat(extents.times[:, 1], run_starts[:-1])
    ones, marks = np.ones(steps.size, np.int32), np.zeros(steps.size, np.uint8)
    paths = Paths(runs.keys, starts, steps, ones, marks, codes)
    leaves = pack(combine(paths), place_of_run.astype(np.uint32))
    totals = merge_totals([totals]) if layout.intervals > 1 else Totals.none(features)
    rest = (leaves, places, stats, kept, totals)
    return Synopsis(spec, bins, groups.narrowed(), run_starts, *rest)


def merge(parts: Sequence[Synopsis]) -> Synopsis:
    """Merge synopses with equal specs and bins; the order does not matter."""
    if not parts:
        raise ConfigError("merge", [], "at least one synopsis")
    first = parts[0]
    for part in parts[1:]:
        if part.spec != first.spec:
            raise ConfigError("merge", part.spec, f"synopses of one spec: {first.spec}")
        different = first.bins.difference(part.bins, first.spec.features)
        if different is not None:
            raise ConfigError("merge", f"other bins of {different}", "synopses with equal bins")
    if len(parts) == 1:
        return first
    rows, grown = promote(parts)
    sets = merge_sets([part.sets for part in parts], first.spec)
    return replace(join([*parts, *grown], rows), sets=sets)


def promote(parts: Sequence[Synopsis]) -> tuple[SmallRows, list[Synopsis]]:
    """Return the rows of groups that stay small, and a synopsis of those that have grown."""
    spec, bins = parts[0].spec, parts[0].bins
    rows = SmallRows(*map(np.concatenate, zip(*(part.rows for part in parts), strict=True)))
    if not rows.x.size:
        return rows, []
    keys, steps = np.empty(rows.x.size, np.int64), np.empty(rows.x.size, np.int64)
    run_keys(frozen(rows.x), frozen(rows.y), frozen(rows.time), spec.layout, keys, steps)
    distinct, group, sizes = np.unique(
        keys >> spec.rest_bits, return_inverse=True, return_counts=True
    )
    recorded = np.unique(np.concatenate([part.groups.keys for part in parts]))
    large = (sizes > rows_max(spec, bins)) | np.isin(distinct, recorded)
    grown = large[group]
    if not grown.any():
        return rows, []
    return rows.take(~grown), [from_rows(rows.take(grown), spec, bins, small=False)]


def join(parts: Sequence[Synopsis], rows: SmallRows) -> Synopsis:
    """Merge records and leaves; ``rows`` are those of the groups that stay small."""
    spec, bins = parts[0].spec, parts[0].bins
    groups = merge_groups([part.groups for part in parts])
    places = merge_places([part.places for part in parts])
    pairs = []
    for part in parts:
        at = np.searchsorted(places.cells, part.places.cells).astype(np.uint32)
        pairs.append((part.leaves._replace(places=at[part.leaves.places]), part.run_keys))
    keys, leaves = join_leaves(pairs)
    stats = merge_bins([part.bin_records for part in parts])
    run_starts = starts_of(keys, groups, spec)
    rest = (leaves, places, stats, rows, merge_totals([part.totals for part in parts]))
    return Synopsis(spec, bins, groups.narrowed(), run_starts, *rest)


def merge_places(parts: Sequence[PlaceBounds]) -> PlaceBounds:
    """Return all places, with bounds that contain those of every part."""
    cells, owners = np.unique(np.concatenate([part.cells for part in parts]), return_inverse=True)
    bounds = np.concatenate([part.bounds for part in parts])
    return PlaceBounds(cells, reduce_bounds(bounds, owners, cells.size))


def starts_of(run_keys: Ints, groups: GroupRecords, spec: SynopsisSpec) -> Ints:
    """Return the first run of each group, and the number of runs."""
    starts = np.searchsorted(run_keys >> spec.rest_bits, groups.keys)
    return np.append(starts, run_keys.size).astype(np.int64)


def assemble(
    spec: SynopsisSpec,
    bins: Bins,
    groups: GroupRecords,
    paths: Paths,
    places: PlaceBounds,
    stats: BinRecords,
    rows: SmallRows,
    totals: Totals,
) -> Synopsis:
    """Build a synopsis from its parts; the groups must be those of the paths."""
    at = np.searchsorted(places.cells, places_of(paths.run_keys, spec)).astype(np.uint32)
    leaves = pack(paths, at)
    run_starts = starts_of(paths.run_keys, groups, spec)
    return Synopsis(spec, bins, groups.narrowed(), run_starts, leaves, places, stats, rows, totals)


def _plane_table(records: BinRecords, bins: Bins) -> PlaneTable:
    features, codes = records.counts.shape
    lows, highs = np.full((features, codes), np.inf), np.full((features, codes), -np.inf)
    counts, sums = np.zeros((features, codes)), np.zeros((features, codes))
    for f in range(features):
        at = bins.planes[f]
        np.minimum.at(lows[f], at, records.lows[f])
        np.maximum.at(highs[f], at, records.highs[f])
        np.add.at(counts[f], at, records.counts[f])
        np.add.at(sums[f], at, records.sums[f])
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.clip(bins.shifts[:, None] + sums / counts, lows, highs)
    return PlaneTable(lows, highs, np.where(lows <= highs, means, 0.0))
