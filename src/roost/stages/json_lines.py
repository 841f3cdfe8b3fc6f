"""Read JSON objects, one per line or message, into columns, whatever the bytes are.

Problem: Arrow's reader is several times faster than Python's, but it misreads some lines (text that
looks like a date), joins others (two halves of an object) and crashes on some (``null``, a hundred
thousand brackets). Idea: Arrow reads the lines that look like objects, with the text columns named
beforehand, and its result counts only if it has one row per line; all else goes through Python's
reader, one line at a time.

A block of messages is one of many, and the result of a message must not depend on the others in its
block: values of several types in one column stay apart. The lines of a file are all known, so
such a column can be text.

The order of lines is not preserved: those that are no objects come last, in a column of their own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.json

from roost.model.columns import MIXED
from roost.stages.decode import MALFORMED, ROW

# Nesting needs two bytes a level. Arrow recurses without a limit: 5,000 levels pass, 100,000 crash
# the process.
_SURELY_SHALLOW_BYTES = 2_000
_LEVELS_MAX = 500


def read_json_lines(lines: Iterable[bytes]) -> pa.Table:
    """Read JSON objects, one per line; other lines stay as text, blank ones are left out.

    A column that holds values of several types is text.

    Examples
    --------
    >>> read_json_lines([b'{"x": 1}', b'oops'])[MALFORMED].to_pylist()
    [None, 'oops']
    """
    return _read(lines, None)


def read_json_messages(messages: Iterable[bytes | None], exact: Collection[str]) -> pa.Table:
    """Read a block of messages, each a JSON object; others stay as text, empty ones too.

    The numbers of ``exact`` columns stay as they are, whole or not. A column with values of several
    types has the type :data:`roost.model.columns.MIXED`.
    """
    return _read((m if m and not m.isspace() else b"null" for m in messages), exact)


def _read(lines: Iterable[bytes], exact: Collection[str] | None) -> pa.Table:
    objects: list[bytes] = []
    others: list[bytes] = []
    for line in lines:
        text = line.strip()
        if text:
            (objects if _looks_like_object(text) else others).append(line)
    table = _read_fast(objects, exact or ())
    rest = _read_slowly(others, exact)
    if table is None or rest.column_names not in ([], [MALFORMED]):
        return _read_slowly(objects + others, exact)
    return _joined(table, rest)


def with_malformed(table: pa.Table, bad: Sequence[str]) -> pa.Table:
    """Append lines that could not be parsed to a table, as rows with only their text."""
    return _joined(table, pa.table({MALFORMED: pa.array(bad, pa.string())}))


def _joined(table: pa.Table, more: pa.Table) -> pa.Table:
    if not more.num_rows:
        return table
    return pa.concat_tables([table, more], promote_options="default")


def _looks_like_object(text: bytes) -> bool:
    if text[:1] != b"{" or text[-1:] != b"}" or b"\n" in text:
        return False
    shallow = len(text) < _SURELY_SHALLOW_BYTES
    return shallow or text.count(b"{") + text.count(b"[") <= _LEVELS_MAX


def _read_fast(lines: Sequence[bytes], exact: Collection[str]) -> pa.Table | None:
    """Read with Arrow; None if its result may be wrong."""
    if not lines:
        return pa.table({})
    data = b"\n".join(lines)
    try:
        data.decode()  # Arrow accepts any bytes as text
        first = json.loads(lines[0])
        texts = {name for name, value in first.items() if isinstance(value, str)}
        table = _read_arrow(data, texts)
        dates = {field.name for field in table.schema if pa.types.is_temporal(field.type)}
        if dates:
            table = _read_arrow(data, texts | dates)
    except (ValueError, RecursionError):
        return None
    own = [name for name in table.column_names if name not in (ROW, MALFORMED)]
    rounded = any(f.name in exact and pa.types.is_floating(f.type) for f in table.schema)
    if rounded or not own or table.num_rows != len(lines):
        return None
    return table.select(own)


def _read_arrow(data: bytes, texts: set[str]) -> pa.Table:
    schema = pa.schema([(name, pa.string()) for name in sorted(texts)])
    return pa.json.read_json(
        pa.BufferReader(data),
        parse_options=pa.json.ParseOptions(explicit_schema=schema, newlines_in_values=False),
    )


def _read_slowly(lines: Sequence[bytes], exact: Collection[str] | None) -> pa.Table:
    records: list[dict[str, Any]] = []
    bad: list[str] = []
    for line in lines:
        try:
            records.append(_read_one(line))
        except (ValueError, RecursionError):
            bad.append(line.decode("utf-8", "replace").rstrip("\r\n"))
    names = dict.fromkeys(name for record in records for name in record)
    columns = {
        name: _column_of([record.get(name) for record in records], name, exact)
        for name in names
        if name not in (ROW, MALFORMED)
    }
    if records and not columns:
        # A table without columns has no rows; records without fields must not be lost.
        return pa.table({MALFORMED: pa.array(["{}"] * len(records) + bad, pa.string())})
    return with_malformed(pa.table(columns), bad)


def _read_one(line: bytes) -> dict[str, Any]:
    record = json.loads(line.decode())
    if not isinstance(record, dict):
        raise ValueError("not an object")
    if b"\\u" in line:
        # Half of a surrogate pair is valid JSON but not text: this raises a ValueError.
        json.dumps(record, ensure_ascii=False).encode()
    return record


def _column_of(values: list[Any], name: str, exact: Collection[str] | None) -> pa.Array:
    """Build a column of the simplest type that holds all values."""
    kinds = {type(value) for value in values if value is not None}
    numbers = kinds <= {int, float} and name not in (exact or ())
    if len(kinds) <= 1 or numbers:
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass
    if exact is not None:
        mixed = [None if value is None else {"json": json.dumps(value)} for value in values]
        return pa.array(mixed, MIXED)
    texts = [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]
    return pa.array(texts, pa.string())
