"""Files of points, read and put in event order.

A Parquet file whose rows are in event order is replayed as it is. Anything else (several files
that overlap in time, rows out of order, CSV, JSON lines) is read once, sorted and kept as Parquet
in the state directory. Lines that cannot be read keep their text and become dead letters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.errors import SourceError
from roost.model.columns import convert, times_as_int
from roost.model.schemas import time_type_of
from roost.stages.decode import MALFORMED, ROW
from roost.stages.json_lines import read_json_lines, with_malformed
from roost.storage.private import private_file, private_folder

SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
STAGED_GROUP_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class PointFile:
    """A Parquet file in event order; ``first`` is the number of its first row in the source."""

    path: str
    rows: int
    first: int


def find_files(path: str, form: str) -> list[Path]:
    """Point files at a path, in name order: a file, or the files of a folder."""
    # Workers may have another working directory than the driver.
    root = Path(path).absolute()
    if root.is_dir():
        found = sorted(
            p for p in root.iterdir() if p.is_file() and not p.name.startswith(("_", "."))
        )
        found = [p for p in found if form != "auto" or p.suffix.lower() in SUFFIXES]
    elif root.exists():
        found = [root]
    else:
        raise SourceError(f"no points at {path}: there is no such file or folder")
    return found


def file_format(path: Path, form: str) -> str:
    """Format of a file, by what was asked for or by its name."""
    if form != "auto":
        return form
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        known = " ".join(SUFFIXES)
        raise SourceError(f"{path}: unknown ending, takes {known} or points.format") from None


def read_csv(path: Path) -> pa.Table:
    """Read CSV with a header; lines with another number of fields are kept as text."""
    bad: list[str] = []

    def keep(row: pa.csv.InvalidRow) -> str:
        bad.append(row.text or "")
        return "skip"

    try:
        table = pa.csv.read_csv(
            path,
            parse_options=pa.csv.ParseOptions(invalid_row_handler=keep),
            convert_options=pa.csv.ConvertOptions(strings_can_be_null=True),
        )
    except pa.ArrowInvalid as error:
        raise SourceError(f"{path} cannot be read as CSV: {error}") from error
    return with_malformed(table, bad)


def read_table(path: Path, form: str) -> pa.Table:
    """Read a whole file."""
    kind = file_format(path, form)
    if kind == "csv":
        return read_csv(path)
    if kind == "jsonl":
        with path.open("rb") as file:
            return read_json_lines(file.read().split(b"\n"))
    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{path} cannot be read as Parquet: {error}") from error


def read_requests(path: Path) -> pa.Table:
    """Read a file of requests, in the order of ``seq`` where it has that."""
    table = read_table(path, "auto")
    names = ["malformed" if name == MALFORMED else name for name in table.column_names]
    table = table.rename_columns(names)
    if "seq" in names:
        order, _ = convert(table["seq"], pa.int64())
        table = table.take(pc.sort_indices(order))
    return table


def event_times(table: pa.Table, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Event times and which rows have one."""
    if name not in table.column_names:
        return np.zeros(table.num_rows, np.int64), np.zeros(table.num_rows, bool)
    column = table[name]
    converted, _ = convert(column, time_type_of(column.type, "points.time"))
    there = np.asarray(pc.is_valid(converted).to_numpy(zero_copy_only=False), bool)
    return times_as_int(converted), there


def stored_times(path: str, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Event times of a Parquet file."""
    file = pq.ParquetFile(path, memory_map=True)
    there = [name] if name in file.schema_arrow.names else []
    if not there:
        rows = file.metadata.num_rows
        return np.zeros(rows, np.int64), np.zeros(rows, bool)
    return event_times(file.read(columns=there), name)


def arrange(
    paths: Sequence[Path], form: str, time: str, first: int, staged: Path
) -> list[PointFile]:
    """Put a set of files in event order, as they are where that is possible.

    Parameters
    ----------
    paths
        New files, in name order; rows are numbered in this order.
    form
        Format, or ``auto``.
    time
        Name of the time column.
    first
        Number of the first row.
    staged
        Where to write the sorted copy, if one is needed.
    """
    direct = _direct(paths, form, time, first)
    if direct is not None:
        return direct
    tables = []
    at = first
    for path in paths:
        table = read_table(path, form)
        table = table.append_column(ROW, pa.array(np.arange(at, at + table.num_rows)))
        at += table.num_rows
        tables.append(table)
    try:
        whole = pa.concat_tables(_alike(tables), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SourceError(f"the files of points have columns that do not fit: {error}") from error
    values, there = event_times(whole, time)
    order = np.lexsort((values, ~there))
    private_folder(staged.parent)
    partial = private_file(staged.with_suffix(".partial"))
    pq.write_table(
        whole.take(pa.array(order)), partial, row_group_size=STAGED_GROUP_ROWS, compression="lz4"
    )
    partial.rename(staged)
    return [PointFile(str(staged), whole.num_rows, 0)]


def _alike(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Make columns that are text in some files text in all: values are judged row by row."""
    text = {f.name for table in tables for f in table.schema if pa.types.is_string(f.type)}
    alike = []
    for table in tables:
        for place, field in enumerate(table.schema):
            if field.name in text and not pa.types.is_nested(field.type):
                column = table[place].cast(pa.string())
                table = table.set_column(place, field.name, column)
        alike.append(table)
    return alike


def _direct(paths: Sequence[Path], form: str, time: str, first: int) -> list[PointFile] | None:
    """Order the files by time, or None where they must be sorted row by row."""
    spans: list[tuple[int, int, PointFile]] = []
    at = first
    for path in paths:
        if file_format(path, form) != "parquet":
            return None
        try:
            rows = pq.read_metadata(path).num_rows
            values, there = stored_times(str(path), time)
        except (pa.ArrowInvalid, OSError) as error:
            raise SourceError(f"{path} cannot be read as Parquet: {error}") from error
        known = values[there]
        if known.size and bool(np.any(np.diff(known) < 0)):
            return None
        file = PointFile(str(path), rows, at)
        at += rows
        low, high = (int(known[0]), int(known[-1])) if known.size else (0, 0)
        spans.append((low, high, file))
    schemas = {pq.read_schema(path).remove_metadata() for path in paths}
    spans.sort(key=lambda span: span[:2])
    overlap = any(b[0] < a[1] for a, b in itertools.pairwise(spans))
    if overlap or len(schemas) > 1:
        return None
    return [file for _, _, file in spans]
