"""The files of a synopsis in a state directory.

Every batch adds one *delta* from each machine that received rows. Background jobs fold committed
deltas into one *base* for each owner. A delta has a part for every owner, a base has one part; each
part is a :class:`~roost.synopsis.synopsis.Synopsis`. Until enough rows are known to choose bins,
batches are stored as *rows* at full resolution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.kernel.shapes import OUTSIDE
from roost.model.arrays import Floats, as_arrow
from roost.model.records import TIME_MAX, TIME_MIN
from roost.model.schemas import TIMESTAMP
from roost.storage.files import Files
from roost.storage.private import private_file
from roost.storage.store import Fact, Store, View
from roost.synopsis.ageing import Band
from roost.synopsis.bins import Bins
from roost.synopsis.handover import count_rows
from roost.synopsis.scope import Scope, judge_boxes
from roost.synopsis.sets import set_times
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import Synopsis, build_owned
from roost.synopsis.tree import PrefixTree

TABLE, FILES = "synopsis", "synopsis files"  # tables of facts
STATE, BINS = "state", "bins"  # keys of the first
SPEC = "synopsis"  # setting on which a state directory agrees
NO_OWNER = -1  # of rows for which no bins exist yet
SAMPLE = "sample"  # array of a delta
SAMPLE_ROWS = 1_250  # of a delta; those of a fold show whether the bins still suit the rows

Bounds = tuple[float, float, float, float]
PartName = tuple[str, int]  # file, and number of the part in it


class FileKind(StrEnum):
    """What a file holds."""

    ROWS = "rows"  # points at full resolution, as Parquet
    DELTA = "delta"  # what one machine received in one batch, by owner
    BASE = "base"  # what an owner's folded deltas had


@dataclass(frozen=True, slots=True)
class SketchPart:
    """What a file holds of one owner."""

    owner: int
    rows: int
    bounds: Bounds
    time_min: int
    time_max: int
    level: int = 0  # of coarsening
    # Rows by prefix of their groups, if the tree may change.
    prefixes: Mapping[str, int] = field(default_factory=dict)
    sets: bool = False  # whether it has set sketches, possibly without rows


@dataclass(frozen=True, slots=True)
class SketchFile:
    """A file that a fact lists."""

    name: str
    kind: FileKind
    nbytes: int
    parts: tuple[SketchPart, ...]
    batch: int | None = None  # newest one that was committed when it was listed

    @property
    def rows(self) -> int:
        """Number of rows described."""
        return sum(part.rows for part in self.parts)

    def added_after(self, batch_id: int) -> bool:
        """Return whether the file was listed after a batch was committed."""
        # A fold is recorded after the newest batch, a delta together with its own.
        first = 0 if self.kind is FileKind.BASE else 1
        return self.batch is not None and self.batch >= batch_id + first

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> SketchFile:
        """Invert :meth:`to_json`."""
        parts = (SketchPart(**part | {"bounds": tuple(part["bounds"])}) for part in data["parts"])
        return cls(name, FileKind(data["kind"]), data["nbytes"], tuple(parts), data["batch"])

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for a fact."""
        parts = [asdict(part) for part in self.parts]
        return {"kind": self.kind, "nbytes": self.nbytes, "parts": parts, "batch": self.batch}

    @property
    def fact(self) -> Fact:
        """The fact that lists the file."""
        return Fact(FILES, self.name, self.to_json())


@dataclass(frozen=True)
class Catalogue:
    """The synopsis of a state directory after a batch: files, and the bins if they are known.

    ``version`` changes with every batch and every fold. ``now`` is the event time that most points
    of a batch have reached.
    """

    batch_id: int | None = None
    version: int = 0
    now: int = TIME_MIN
    bins: Bins | None = None
    files: tuple[SketchFile, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows described."""
        return sum(file.rows for file in self.files)

    def of_kind(self, kind: FileKind) -> list[SketchFile]:
        """Return the files of a kind."""
        return [file for file in self.files if file.kind is kind]

    def needed(self, scopes: Sequence[Scope], spec: SynopsisSpec) -> tuple[PartName, ...]:
        """Return the parts of files that may have rows, or set sketches, of the scopes."""
        names, times, bounds, sets = self._extents
        found: set[int] = set()
        for scope in scopes:
            since, until = scope.time_range
            near = [k for k, (first, last) in enumerate(times) if first < until and last >= since]
            if near and scope.shape is not None:
                states = judge_boxes(scope.shape, bounds, spec).tolist()
                near = [k for k in near if states[k] != OUTSIDE or sets[k]]
            found.update(near)
        return tuple(names[k] for k in sorted(found))

    @cached_property
    def _extents(self) -> tuple[list[PartName], list[tuple[int, int]], Floats, list[bool]]:
        """Names, first and last times, bounds, and which parts have set sketches only."""
        pairs = [
            ((file.name, number), part)
            for file in self.files
            for number, part in enumerate(file.parts)
            if part.rows or part.sets
        ]
        parts = [part for _, part in pairs]
        times = [(part.time_min, part.time_max) for part in parts]
        bounds = np.array([part.bounds for part in parts], np.float64).reshape(-1, 4)
        return [name for name, _ in pairs], times, bounds, [not part.rows for part in parts]

    def changed(self, added: Sequence[SketchFile], removed: Iterable[str]) -> Catalogue:
        """Return the catalogue with other files."""
        gone = set(removed)
        new = (replace(file, batch=self.batch_id) for file in added)
        files = (*(file for file in self.files if file.name not in gone), *new)
        ordered = tuple(sorted(files, key=lambda file: file.name))
        return replace(self, version=self.version + 1, files=ordered)

    def facts(self, before: Catalogue) -> list[Fact]:
        """Return the facts that change another catalogue into this one."""
        state = {"batch": self.batch_id, "version": self.version, "now": self.now}
        facts = [Fact(TABLE, STATE, state)]
        if self.bins is not before.bins:
            facts.append(Fact(TABLE, BINS, self.bins and self.bins.to_json()))
        names = {file.name for file in self.files}
        known = {file.name for file in before.files}
        facts += [Fact(FILES, name, None) for name in sorted(known - names)]
        return facts + [file.fact for file in self.files if file.name not in known]


def read_catalogue(view: View) -> Catalogue:
    """Return what the store lists."""
    state, bins = view.get(TABLE, STATE), view.get(TABLE, BINS)
    if state is None:
        return Catalogue()
    files = tuple(SketchFile.from_json(name, row) for name, row in view.items(FILES))
    known = None if bins is None else Bins.from_json(bins)
    return Catalogue(state["batch"], state["version"], state["now"], known, files)


def sketch_files(store: Store) -> Files:
    """Return where the files are."""
    return store.files("synopsis")


def describe(synopsis: Synopsis, owner: int, level: int = 0) -> SketchPart:
    """Return the extent of a synopsis, from its records and rows."""
    groups, rows = synopsis.groups, synopsis.rows
    bounds = np.concatenate(
        [groups.bounds, np.stack([rows.x, rows.y, rows.x, rows.y], axis=1)], dtype=np.float64
    )
    times = np.concatenate([groups.times.ravel(), rows.time])
    sets = bool(synopsis.spec.sets)
    if not times.size:
        first, last = set_times(synopsis.sets, synopsis.spec) or (TIME_MAX, TIME_MIN)
        return SketchPart(owner, 0, (0.0, 0.0, 0.0, 0.0), first, last, level, sets=sets)
    low, high = bounds[:, :2].min(axis=0).tolist(), bounds[:, 2:].max(axis=0).tolist()
    extent = ((*low, *high), int(times.min()), int(times.max()))
    return SketchPart(owner, synopsis.count, *extent, level, sets=sets)


def write_parts(
    files: Files,
    name: str,
    kind: FileKind,
    parts: Sequence[tuple[int, Band]],
    rows: pa.Table | None = None,
    *,
    count_prefixes: bool = False,
) -> SketchFile:
    """Write bands, each with its owner, to a file; with a sample of ``rows``, if there are any."""
    arrays = {} if rows is None else {SAMPLE: _pack_sample(rows)}
    arrays |= {
        f"{number}:{key}": array
        for number, (_, band) in enumerate(parts)
        for key, array in band.synopsis.arrays().items()
    }
    nbytes = files.write(name, arrays, durable=kind is FileKind.BASE)
    described = [describe(band.synopsis, owner, band.level) for owner, band in parts]
    if count_prefixes:
        counted = (count_rows(band.synopsis) for _, band in parts)
        pairs = zip(described, counted, strict=True)
        described = [replace(part, prefixes=rows) for part, rows in pairs]
    return SketchFile(name, kind, nbytes, tuple(described))


def _pack_sample(rows: pa.Table) -> NDArray[np.uint8]:
    chosen = rows.take(as_arrow(np.arange(0, rows.num_rows, -(-rows.num_rows // SAMPLE_ROWS))))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, chosen.schema) as writer:
        writer.write_table(chosen)
    return np.frombuffer(sink.getvalue(), np.uint8)


def read_sample(files: Files, name: str) -> pa.Table:
    """Return a sample of the rows of a delta."""
    return pa.ipc.open_stream(pa.py_buffer(files.map(name)[SAMPLE])).read_all()


def open_part(files: Files, part: PartName) -> Synopsis:
    """Map one part of a file."""
    name, number = part
    prefix = f"{number}:"
    arrays = {
        key.removeprefix(prefix): array
        for key, array in files.map(name).items()
        if key.startswith(prefix)
    }
    return Synopsis.of(arrays, name)


def write_rows(files: Files, name: str, rows: pa.Table, spec: SynopsisSpec) -> SketchFile:
    """Write rows at full resolution."""
    path = private_file(files.path(name))
    pq.write_table(rows, path, compression="zstd")
    x, y, times = (rows[column].to_numpy() for column in (spec.x, spec.y, spec.time))
    time = times.astype("datetime64[us]").astype(np.int64)
    bounds = (float(x.min()), float(y.min()), float(x.max()), float(y.max()))
    part = SketchPart(NO_OWNER, x.size, bounds, int(time.min()), int(time.max()))
    return SketchFile(name, FileKind.ROWS, path.stat().st_size, (part,))


def read_rows(files: Files, names: Iterable[str], spec: SynopsisSpec) -> pa.Table:
    """Read files of rows."""
    columns = {spec.x: pa.float64(), spec.y: pa.float64(), spec.time: TIMESTAMP}
    columns = {column.name: column.type for column in spec.columns} | columns
    schema = pa.schema(columns)
    tables = (pq.read_table(files.path(name)) for name in names)
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])


def build_parts(
    rows: pa.Table, tree: PrefixTree, spec: SynopsisSpec, bins: Bins
) -> list[tuple[int, Band]]:
    """Build the synopsis of the rows of each owner."""
    built = build_owned(rows, spec, bins, partial(tree.owners_of, place_bits=spec.place_bits))
    return [(owner, Band(0, own)) for owner, own in built]
