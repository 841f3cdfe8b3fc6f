"""The synopsis of a state directory as tables, read file by file in other processes.

A plan takes a lease on the files of the newest batch and divides their parts into tasks, which any
process can read. The plan does not learn when the last task ends, so the lease is not released:
it expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from roost.errors import ConfigError, StateError
from roost.model.schemas import TIMESTAMP
from roost.storage.files import Files
from roost.synopsis.bins import learn_bins
from roost.synopsis.catalogue import Catalogue, FileKind, PartName, open_part, read_rows
from roost.synopsis.part import record_batches, select
from roost.synopsis.queries import read_scope
from roost.synopsis.reader import SynopsisReader
from roost.synopsis.scope import EVERYTHING, Scope
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import Synopsis, build

RECORDS, LISTING = "records", "files"  # tables
FILE = "file"  # column with the name of a file
LISTS = ("box", "circle", "hours")  # options with several numbers
SCOPE = (*LISTS, "polygon", "since", "until", "predicate")
OPTIONS = ("path", "table", *SCOPE, "since_batch")
BOUNDS = ("x0", "y0", "x1", "y1")
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

    files: Files
    spec: SynopsisSpec
    kind: FileKind
    parts: tuple[PartName, ...]
    scope: Scope
    named: bool  # add the name of the file

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the records in the scope, see :func:`roost.synopsis.record_batches`."""
        for part in self.parts:
            synopsis = self._open(part)
            if self.scope != EVERYTHING:
                synopsis = select(synopsis, self.scope)
            for batch in record_batches(synopsis):
                yield _named(batch, part[0]) if self.named else batch

    def _open(self, part: PartName) -> Synopsis:
        if not self.files.path(part[0]).exists():
            raise StateError(f"{part[0]} was deleted: its lease expired; load the table again")
        if self.kind is not FileKind.ROWS:
            return open_part(self.files, part)
        rows = read_rows(self.files, [part[0]], self.spec)
        return build(rows, self.spec, learn_bins(rows, self.spec))


Task = Records | Listing


@dataclass(frozen=True)
class TableQuery:
    """A table of a state directory, restricted by a scope and to the newest files.

    ``since_batch`` selects the files that were added after the batch was committed: what later
    batches wrote, and what folds have written since. A fold replaces files, so its base also has
    older rows; the column ``file`` tells which records replace which.
    """

    folder: Path
    table: str = RECORDS
    scope: Scope = EVERYTHING
    since_batch: int | None = None

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            raise ConfigError("table", self.table, f"one of {', '.join(TABLES)}")

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
        since_batch = None
        if "since_batch" in options:
            since_batch = _whole(options["since_batch"])
            if since_batch is None:
                raise ConfigError("since_batch", options["since_batch"], "a whole number")
        folder, table = Path(options["path"]), options.get("table", RECORDS)
        return cls(folder, table, read_scope(scope, "option"), since_batch)

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


def record_schema(spec: SynopsisSpec, named: bool = False) -> pa.Schema:
    """Return the columns of :func:`roost.synopsis.record_batches`, and the file if ``named``."""
    columns = dict.fromkeys(BOUNDS, pa.float64())
    columns |= dict.fromkeys(("time_from", "time_until"), TIMESTAMP)
    columns |= dict.fromkeys(("rows", "rows_sure"), pa.int64())
    for feature in spec.features:
        if feature.categorical:
            columns[feature.name] = feature.type
        else:
            own = (f"{feature.name}_{suffix}" for suffix in ("low", "high", "mean"))
            columns |= dict.fromkeys(own, pa.float64())
    return pa.schema(columns | ({FILE: pa.string()} if named else {}))


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
    rest = (query.scope, query.since_batch is not None)
    return [
        Records(reader.files, reader.spec, key[0], tuple(own), *rest)
        for key, own in grouped.items()
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
    RECORDS: (record_schema, _plan_records),
    LISTING: (lambda spec, named: LISTED, _plan_listing),
}


def _named(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    return batch.append_column(FILE, pa.repeat(name, batch.num_rows))


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
