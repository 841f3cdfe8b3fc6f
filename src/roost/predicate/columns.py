"""Conversion of Arrow columns to the arrays that conditions read, once per block.

Numbers, times and booleans become one numpy array of stored values, usually without a copy.
Strings become codes into the distinct values of the block, stored as UTF-8 bytes: byte order is
the order of code points, and a value that is not valid UTF-8 can still be compared. Nulls become
a mask. A column may be chunked, sliced or dictionary-encoded; dictionaries may have nulls and
duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from roost.model.arrays import Mask
from roost.predicate.ast import WORD
from roost.predicate.axis import NARROW_DIGITS, Array

Index = npt.NDArray[np.integer[Any]]


class StringColumn(NamedTuple):
    """Codes by row into (nearly) distinct values; the codes of nulls are undefined."""

    codes: Index
    dictionary: pa.Array


class Lists(NamedTuple):
    """Sorted lists in two arrays: list ``k`` is ``members[starts[k]:starts[k + 1]]``."""

    starts: npt.NDArray[np.int64]
    members: Array

    @classmethod
    def of(cls, lists: Sequence[Iterable[Any]], dtype: npt.DTypeLike = np.int64) -> Lists:
        """Sort and join lists."""
        ordered = [sorted(members) for members in lists]
        starts = np.cumsum([0, *map(len, ordered)], dtype=np.int64)
        return cls(starts, np.array([member for part in ordered for member in part], dtype))

    @classmethod
    def numbered(cls, lists: Sequence[Iterable[str]]) -> tuple[list[str], Lists]:
        """Return the distinct strings of lists, and the lists of their numbers."""
        numbers: dict[str, int] = {}
        numbered = [{numbers.setdefault(x, len(numbers)) for x in strings} for strings in lists]
        return list(numbers), cls.of(numbered)

    def contain(self, lists: Index, values: Array) -> Mask:
        """Return for each pair of list and value whether the list contains the value.

        A binary search of all pairs at once; the longest list determines the number of steps.
        """
        starts, members = self
        if len(members) == 0:
            return np.zeros(len(values), dtype=np.bool_)
        at, end = starts[lists], starts[lists + 1]
        for bit in reversed(range(int(np.diff(starts).max()).bit_length())):
            ahead = at + (1 << bit)
            below = members[np.minimum(ahead, len(members)) - 1] < values
            at = np.where((ahead <= end) & below, ahead, at)
        return np.asarray((at < end) & (members[np.minimum(at, len(members) - 1)] == values))


class WordIndex(NamedTuple):
    """The numbers of case-folded words, and those of each distinct value of a string column."""

    numbers: dict[str, int]
    lists: Lists

    @classmethod
    def build(cls, dictionary: pa.Array) -> WordIndex:
        """Split every value at characters that are neither letters nor digits."""
        texts = [(value or b"").decode("utf-8", "replace") for value in dictionary.to_pylist()]
        words, lists = Lists.numbered([_split(text) for text in texts])
        return cls({word: number for number, word in enumerate(words)}, lists)


def _split(text: str) -> list[str]:
    if text.isascii():
        return WORD.findall(text.lower())
    # Case folding can turn a letter into another character, so split first.
    return [word.casefold() for word in WORD.findall(text)]


class RowBlock:
    """The columns of one block of points, converted on first use.

    A column of another type than in the schema is cast. If only a few ``rows`` will be read, other
    strings are not encoded.
    """

    def __init__(
        self,
        columns: Mapping[str, pa.Array | pa.ChunkedArray],
        schema: pa.Schema,
        rows: Index | None = None,
    ) -> None:
        self._columns = columns
        self._schema = schema
        self._rows = rows
        self._cache: dict[object, Any] = {}

    def cached(self, key: object, compute: Callable[[], Any]) -> Any:
        """Return the value of a key, computed once per block."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    def length(self, name: str) -> int:
        """Return the number of rows of a column."""
        return len(self._columns[name])

    def type_of(self, name: str) -> pa.DataType:
        """Return the type of a column in the schema."""
        return self._schema.field(name).type

    def numbers(self, name: str) -> Array:
        """Return the stored values of a column of numbers, times or booleans."""
        return self.cached(("numbers", name), lambda: self._read_numbers(name))  # type: ignore[no-any-return]

    def strings(self, name: str) -> StringColumn:
        """Return a column of strings."""
        return self.cached(("strings", name), lambda: self._read_strings(name))  # type: ignore[no-any-return]

    def words(self, name: str) -> WordIndex:
        """Return the words of a column of strings."""
        return self.cached(("words", name), lambda: WordIndex.build(self.strings(name).dictionary))  # type: ignore[no-any-return]

    def valid(self, name: str) -> Mask | None:
        """Return a mask of the rows that are not null; none if all are."""
        return self.cached(("valid", name), lambda: _validity(self._columns[name]))  # type: ignore[no-any-return]

    def _read_numbers(self, name: str) -> Array:
        type_ = self.type_of(name)
        if pa.types.is_dictionary(type_):
            type_ = type_.value_type
        return _stored_values(_join(self._columns[name], type_))

    def _read_strings(self, name: str) -> StringColumn:
        column = self._columns[name]
        if self._rows is None or 2 * len(self._rows) >= len(column):
            return _encode(column)
        codes = np.zeros(len(column), dtype=np.intp)
        codes[self._rows], dictionary = _encode(_take_strings(column, self._rows))
        return StringColumn(codes, dictionary)

    def take_strings(self, rows: Mapping[str, Index]) -> RowBlock:
        """Return a block of columns of strings, each with some of its rows."""
        columns = {name: _take_strings(self._columns[name], index) for name, index in rows.items()}
        return RowBlock(columns, self._schema)


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def _take_strings(column: pa.Array | pa.ChunkedArray, rows: Index) -> Any:
    if not pa.types.is_dictionary(column.type):
        # Arrow does not implement `take` for every string type, but it does for binary.
        column = column.cast(pa.large_binary())
    return column.take(pa.array(rows))


def _decode(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _join(column: pa.Array | pa.ChunkedArray, type_: pa.DataType) -> pa.Array:
    """Return one array of a type, not dictionary-encoded."""
    parts = [_decode(chunk) for chunk in _chunks(column)]
    parts = [part if part.type == type_ else part.cast(type_) for part in parts]
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays(parts) if parts else pa.array([], type_)


def _validity(column: pa.Array | pa.ChunkedArray) -> Mask | None:
    encoded = pa.types.is_dictionary(column.type)
    if encoded and any(chunk.dictionary.null_count for chunk in _chunks(column)):
        column = _join(column, column.type.value_type)
    return np.asarray(column.is_valid()) if column.null_count else None


def _stored_values(array: pa.Array) -> Array:
    type_ = array.type
    if pa.types.is_boolean(type_):
        return _stored_values(array.cast(pa.uint8()))
    if pa.types.is_decimal(type_) and type_.bit_width >= 128:
        return _unscaled(array)
    native = pa.types.is_integer(type_) or pa.types.is_floating(type_)
    dtype = type_.to_pandas_dtype() if native else np.dtype(f"i{type_.bit_width // 8}")
    return _read_buffer(array, dtype, 1)


def _read_buffer(array: pa.Array, dtype: npt.DTypeLike, per_value: int) -> Array:
    """Return the values of an array as stored; the values of null slots are undefined."""
    if len(array) == 0:
        return np.empty(0, dtype=dtype)
    skip = array.offset * np.dtype(dtype).itemsize * per_value
    count = len(array) * per_value
    return np.frombuffer(array.buffers()[1], dtype=dtype, count=count, offset=skip)


def _unscaled(array: pa.Array) -> Array:
    """Return the unscaled integers of decimals: int64 if all fit, otherwise Python integers."""
    limbs = array.type.bit_width // 64
    parts = _read_buffer(array, np.uint64, limbs).reshape(len(array), limbs)
    if array.type.precision <= NARROW_DIGITS:
        return np.ascontiguousarray(parts[:, 0]).view(np.int64)
    total = np.ascontiguousarray(parts[:, -1]).view(np.int64).astype(object)
    for limb in range(limbs - 2, -1, -1):
        total = total * 2**64 + parts[:, limb].astype(object)
    return np.asarray(total, dtype=object)


def _encode(column: pa.Array | pa.ChunkedArray) -> StringColumn:
    chunks = _chunks(column)
    if len(chunks) != 1 or not pa.types.is_dictionary(chunks[0].type):
        chunks = [_join(column, pa.large_binary()).dictionary_encode()]
    indices, dictionary = chunks[0].indices, chunks[0].dictionary.cast(pa.large_binary())
    codes = np.asarray(indices.fill_null(0) if indices.null_count else indices).astype(np.intp)
    if len(dictionary) == 0:
        dictionary = pa.array([b""], pa.large_binary())
    elif len(dictionary) > len(codes):
        used, codes = np.unique(codes, return_inverse=True)
        dictionary = dictionary.take(pa.array(used))
    return StringColumn(codes, dictionary)
