"""Files of points, read and put in event order.

A Parquet file whose rows are in event order is replayed as it is. Anything else (files that overlap
in time, rows out of order, CSV, JSON lines) is read once, sorted and stored as Parquet in the state
directory. Lines that cannot be parsed keep their text and become dead letters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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


class PointFile(NamedTuple):
    """A Parquet file in event order; ``first`` is the number of its first row in the source."""

    path: str
    rows: int
    first: int


def find_files(path: str, form: str) -> list[Path]:
    """Return the point files at a path, in name order: a file, or the files of a folder."""
    # Workers may have another working directory than the driver.
    root = Path(path).absolute()
    if not root.exists():
        raise SourceError(f"no points at {path}: there is no such file or folder")
    if not root.is_dir():
        return [root]
    found = sorted(p for p in root.iterdir() if p.is_file() and not p.name.startswith(("_", ".")))
    return [p for p in found if form != "auto" or p.suffix.lower() in SUFFIXES]


def file_format(path: Path, form: str) -> str:
    """Return the format of a file, as configured or by its suffix."""
    if form != "auto":
        return form
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        known = " ".join(SUFFIXES)
        raise SourceError(f"{path}: unknown suffix, use {known} or set points.format") from None


def read_csv(path: Path) -> pa.Table:
    """Read CSV with a header; lines with another number of fields stay as text."""
    bad: list[str] = []

    def collect(row: pa.csv.InvalidRow) -> str:
        bad.append(row.text or "")
        return "skip"

    try:
        table = pa.csv.read_csv(
            path,
            parse_options=pa.csv.ParseOptions(invalid_row_handler=collect),
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
    """Read a file of requests, in the order of its ``seq`` column if it has one."""
    table = read_table(path, "auto")
    names = ["malformed" if name == MALFORMED else name for name in table.column_names]
    table = table.rename_columns(names)
    if "seq" in names:
        order, _ = convert(table["seq"], pa.int64())
        table = table.take(pc.sort_indices(order))
    return table


def event_times(table: pa.Table, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return event times, and which rows have one."""
    if name not in table.column_names:
        return np.zeros(table.num_rows, np.int64), np.zeros(table.num_rows, bool)
    column = table[name]
    converted, _ = convert(column, time_type_of(column.type, "points.time"))
    there = np.asarray(pc.is_valid(converted).to_numpy(zero_copy_only=False), bool)
    return times_as_int(converted), there


def stored_times(path: str, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the event times of a Parquet file, and which rows have one."""
    return event_times(pq.ParquetFile(path, memory_map=True).read(columns=[name]), name)


def arrange(
    paths: Sequence[Path], form: str, time: str, first: int, staged: Path
) -> list[PointFile]:
    """Put new files in event order, as they are if possible, else sorted into a copy.

    Rows are numbered in the order of ``paths``, beginning with ``first``; ``staged`` is the path of
    the copy.
    """
    in_order = _in_order(paths, form, time, first)
    if in_order is not None:
        return in_order
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
        raise SourceError(f"the point files have columns of different types: {error}") from error
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
    """Convert columns that are text in some files to text in all: values are checked row by row."""
    text = {f.name for table in tables for f in table.schema if pa.types.is_string(f.type)}
    alike = []
    for table in tables:
        for place, field in enumerate(table.schema):
            if field.name in text and not pa.types.is_nested(field.type):
                column = table[place].cast(pa.string())
                table = table.set_column(place, field.name, column)
        alike.append(table)
    return alike


def _in_order(paths: Sequence[Path], form: str, time: str, first: int) -> list[PointFile] | None:
    """Order the files by time; None if they must be sorted row by row."""
    spans: list[tuple[int, int, PointFile]] = []
    for path in paths:
        if file_format(path, form) != "parquet":
            return None
        try:
            values, there = stored_times(str(path), time)
        except (pa.ArrowInvalid, OSError) as error:
            raise SourceError(f"{path} cannot be read as Parquet: {error}") from error
        known = values[there]
        if known.size and bool(np.any(np.diff(known) < 0)):
            return None
        low, high = (int(known[0]), int(known[-1])) if known.size else (0, 0)
        spans.append((low, high, PointFile(str(path), values.size, first)))
        first += values.size
    schemas = {pq.read_schema(path).remove_metadata() for path in paths}
    spans.sort(key=lambda span: span[:2])
    overlap = any(b[0] < a[1] for a, b in itertools.pairwise(spans))
    if overlap or len(schemas) > 1:
        return None
    return [file for _, _, file in spans]
