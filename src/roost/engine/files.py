"""Files of points, read and put in event order.

A Parquet file whose rows are in event order is replayed as it is. Anything else (several files
that overlap in time, rows out of order, CSV, JSON lines) is read once, sorted and kept as Parquet
in the state directory. Lines that cannot be read keep their text and become dead letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.engine.decode import MALFORMED, ROW
from roost.errors import SourceError
from roost.model import time_type_of
from roost.state.columns import convert, times_as_int

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
    root = Path(path)
    if root.is_dir():
        found = sorted(p for p in root.iterdir() if p.is_file() and not p.name.startswith(("_", ".")))
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
    return _with_malformed(table, bad)


def read_json_lines(lines: Iterable[bytes]) -> pa.Table:
    """Read JSON objects, one a line; other lines are kept as text.

    Examples
    --------
    >>> read_json_lines([b'{"x": 1}', b'oops'])[MALFORMED].to_pylist()
    [None, 'oops']
    """
    lines = [line for line in lines if line.strip()]
    try:
        table = pa.json.read_json(
            pa.BufferReader(b"\n".join(lines)),
            # Times stay text: Arrow would guess at some of them only.
            parse_options=pa.json.ParseOptions(newlines_in_values=False),
        )
        if table.num_rows == len(lines):
            return table
    except pa.ArrowInvalid:
        pass
    return _read_json_slowly(lines)


def _read_json_slowly(lines: Sequence[bytes]) -> pa.Table:
    records: list[dict[str, Any]] = []
    bad: list[str] = []
    for line in lines:
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            records.append(record)
        except ValueError:
            bad.append(line.decode("utf-8", "replace").rstrip("\r\n"))
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: _column_of([record.get(name) for record in records]) for name in names}
    return _with_malformed(pa.table(columns), bad)


def _column_of(values: list[Any]) -> pa.Array:
    """Column of mixed values: numbers if all are, else text that is judged row by row."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        texts = [
            None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values
        ]
        return pa.array(texts, pa.string())


def _with_malformed(table: pa.Table, bad: list[str]) -> pa.Table:
    if not bad:
        return table
    extra = pa.table({MALFORMED: pa.array(bad, pa.string())})
    joined = pa.concat_tables([table, extra], promote_options="default")
    return joined.select([*table.column_names, MALFORMED])


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


def event_times(table: pa.Table, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Event times and which rows have one."""
    if name not in table.column_names:
        return np.zeros(table.num_rows, np.int64), np.zeros(table.num_rows, bool)
    column = table[name]
    converted, _ = convert(column, time_type_of(column.type, f"points.{name}"))
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
        whole = pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SourceError(f"the files of points have columns that do not fit: {error}") from error
    values, there = event_times(whole, time)
    order = np.lexsort((values, ~there))
    staged.parent.mkdir(parents=True, exist_ok=True)
    partial = staged.with_suffix(".partial")
    pq.write_table(
        whole.take(pa.array(order)), partial, row_group_size=STAGED_GROUP_ROWS, compression="lz4"
    )
    partial.rename(staged)
    return [PointFile(str(staged), whole.num_rows, 0)]


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
    overlap = any(b[0] < a[1] for a, b in zip(spans, spans[1:], strict=False))
    if overlap or len(schemas) > 1:
        return None
    return [file for _, _, file in spans]
