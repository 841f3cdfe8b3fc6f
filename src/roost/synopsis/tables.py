"""The synopsis of a state directory as tables, read file by file in other processes.

A plan takes a lease on the files of the newest batch and divides their parts into tasks, which any
process can read. The plan does not learn when the last task ends, so the lease is not released:
it expires.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from roost.errors import ConfigError, StateError
from roost.model.schemas import TIMESTAMP
from roost.storage.files import Files
from roost.synopsis.bins import learn_bins
from roost.synopsis.catalogue import Catalogue, FileKind, PartName, open_part, read_rows
from roost.synopsis.evidence import count_rows
from roost.synopsis.part import BOUNDS, record_batches, record_schema, select
from roost.synopsis.queries import read_scope
from roost.synopsis.reader import SynopsisReader
from roost.synopsis.scope import EVERYTHING, Scope
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import Synopsis, build
from roost.synopsis.synthesis import synthesize

FILE = "file"  # column with the name of a file
RECORDS, SYNTHETIC, LISTING = "records", "synthetic", "files"  # tables
LISTS = ("box", "circle", "hours")  # options with several numbers
SCOPE = (*LISTS, "polygon", "since", "until", "predicate")
OPTIONS = ("path", "table", *SCOPE, "since_batch", "share", "seed")
LISTED = pa.schema(
    {
        FILE: pa.string(),
        "kind": pa.string(),
        "batch": pa.int64(),
        "part": pa.int64(),
        "owner": pa.int64(),
        "level": pa.int64(),
        "rows": pa.int64(),
        **dict.fromkeys(BOUNDS, pa.float64()),
        "time_min": TIMESTAMP,
        "time_max": TIMESTAMP,
    }
)


@dataclass(frozen=True)
class Listing:
    """The task that returns the list of files."""

    parts: pa.RecordBatch

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield one row for each part of a file."""
        yield self.parts


@dataclass(frozen=True)
class Records:
    """A task that reads the records of some parts of files of one kind."""

    query: TableQuery
    files: Files
    spec: SynopsisSpec
    kind: FileKind
    parts: tuple[PartName, ...]

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the records in the scope, see :func:`roost.synopsis.record_batches`."""
        for part in self.parts:
            for batch in self._batches(self._open(part), part):
                named = self.query.since_batch is not None
                yield _named(batch, part[0]) if named else batch

    def _batches(self, synopsis: Synopsis, part: PartName) -> Iterable[pa.RecordBatch]:
        scope = self.query.scope
        return record_batches(synopsis if scope == EVERYTHING else select(synopsis, scope))

    def _open(self, part: PartName) -> Synopsis:
        if not self.files.path(part[0]).exists():
            raise StateError(f"{part[0]} was deleted: its lease expired; load the table again")
        if self.kind is not FileKind.ROWS:
            return open_part(self.files, part)
        rows = read_rows(self.files, [part[0]], self.spec)
        return build(rows, self.spec, learn_bins(rows, self.spec))


class SyntheticRows(Records):
    """A task that draws synthetic rows from some parts of files of one kind."""

    def _batches(self, synopsis: Synopsis, part: PartName) -> Iterable[pa.RecordBatch]:
        """Draw rows; their number is the share rounded up or down, so that sums are right."""
        seed = zlib.crc32(f"{self.query.seed} {part}".encode())
        wanted = self.query.share * count_rows(synopsis, self.query.scope)[2]
        rows = int(wanted + np.random.default_rng(seed).random())
        drawn = synthesize(synopsis, scope=self.query.scope, rows=rows, seed=seed)
        yield from drawn.to_batches()


Task = Records | Listing


@dataclass(frozen=True)
class TableQuery:
    """A table of a state directory, restricted by a scope and to the newest files.

    ``since_batch`` selects the files that were added after the batch was committed: what later
    batches wrote, and what folds have written since. A fold replaces files, so its base also has
    older rows; the column ``file`` shows which records replace which. ``share`` is the number of
    synthetic rows over that of the original ones, and ``seed`` repeats them.
    """

    folder: Path
    table: str = RECORDS
    scope: Scope = EVERYTHING
    since_batch: int | None = None
    share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            raise ConfigError("table", self.table, f"one of {', '.join(TABLES)}")
        if not 0.0 <= self.share < float("inf"):
            raise ConfigError("share", self.share, "a number from 0 up")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> TableQuery:
        """Return the query of options as text; raises `ConfigError` for a wrong one."""
        for name in options.keys() - set(OPTIONS):
            raise ConfigError(name, options[name], f"one of {', '.join(OPTIONS)}")
        if "path" not in options:
            raise ConfigError("path", None, "a state directory")
        scope: dict[str, Any] = {name: options[name] for name in SCOPE if name in options}
        scope |= {name: scope[name].split(",") for name in LISTS if name in scope}
        for name in ("since", "until"):
            if name in scope and (number := _whole(scope[name])) is not None:
                scope[name] = number
        table = options.get("table", RECORDS)
        given: dict[str, Any] = {}
        for name in ("since_batch", "seed", "share"):
            if name not in options:
                continue
            if name != "since_batch" and table != SYNTHETIC:
                raise ConfigError(name, options[name], f"table={SYNTHETIC}, too")
            given[name] = _number(options[name]) if name == "share" else _whole(options[name])
            if given[name] is None:
                expected = "a number" if name == "share" else "a whole number"
                raise ConfigError(name, options[name], expected)
        return cls(Path(options["path"]), table, read_scope(scope, "option"), **given)

    def schema(self) -> pa.Schema:
        """Return the columns."""
        with closing(SynopsisReader(self.folder)) as reader:
            return TABLES[self.table][0](reader.spec, self.since_batch is not None)

    def plan(self, clock: Callable[[], float] = time.time) -> list[Task]:
        """Take a lease on the newest files and return the tasks that read them."""
        with closing(SynopsisReader(self.folder, clock)) as reader:
            catalogue, parts = reader.pin(self.scope)
            if self.since_batch is not None:
                new = {file.name for file in catalogue.files if file.added_after(self.since_batch)}
                parts = tuple(part for part in parts if part[0] in new)
            return TABLES[self.table][1](self, reader, catalogue, parts)


def _record_schema(spec: SynopsisSpec, named: bool) -> pa.Schema:
    return _with_file(record_schema(spec), named)


def _row_schema(spec: SynopsisSpec, named: bool) -> pa.Schema:
    """Return the columns of :func:`roost.synopsis.synthesize`, and the file if ``named``."""
    columns = {spec.time: TIMESTAMP, spec.x: pa.float64(), spec.y: pa.float64()}
    columns |= {feature.name: feature.type for feature in spec.features}
    return _with_file(pa.schema(columns), named)


def _with_file(schema: pa.Schema, named: bool) -> pa.Schema:
    return schema.append(pa.field(FILE, pa.string())) if named else schema


def _plan_records(
    query: TableQuery, reader: SynopsisReader, catalogue: Catalogue, parts: tuple[PartName, ...]
) -> list[Task]:
    """Return a task for each part of a base, and one for all small files of an owner."""
    known = {file.name: file for file in catalogue.files}
    grouped: dict[tuple[Any, ...], list[PartName]] = {}
    for part in parts:
        kind, owner = known[part[0]].kind, known[part[0]].parts[part[1]].owner
        key = (kind, *part) if kind is FileKind.BASE else (kind, owner)
        grouped.setdefault(key, []).append(part)
    task = SyntheticRows if query.table == SYNTHETIC else Records
    return [
        task(query, reader.files, reader.spec, key[0], tuple(own)) for key, own in grouped.items()
    ]


def _plan_listing(
    query: TableQuery, reader: SynopsisReader, catalogue: Catalogue, parts: tuple[PartName, ...]
) -> list[Task]:
    known = {file.name: file for file in catalogue.files}
    rows = []
    for name, number in parts:
        file, part = known[name], known[name].parts[number]
        own = (name, file.kind.value, file.batch, number, part.owner, part.level, part.rows)
        times = (part.time_min, part.time_max)
        rows.append(dict(zip(LISTED.names, (*own, *part.bounds, *times), strict=True)))
    return [Listing(pa.RecordBatch.from_pylist(rows, schema=LISTED))]


Schema = Callable[[SynopsisSpec, bool], pa.Schema]
Plan = Callable[[TableQuery, SynopsisReader, Catalogue, tuple[PartName, ...]], list[Task]]
TABLES: dict[str, tuple[Schema, Plan]] = {
    RECORDS: (_record_schema, _plan_records),
    SYNTHETIC: (_row_schema, _plan_records),
    LISTING: (lambda spec, named: LISTED, _plan_listing),
}


def _named(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    return batch.append_column(FILE, pa.repeat(name, batch.num_rows))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
