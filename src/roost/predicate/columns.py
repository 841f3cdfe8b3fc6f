"""From Arrow columns to the arrays that conditions are decided on, once per block.

Numbers, times and booleans become one numpy array of their stored values, mostly without a copy.
Text becomes codes into the block's distinct values, held as UTF-8 bytes: their order is the order
of code points, and a value that is not valid UTF-8 can still be compared. Nulls become a mask.
A column may be chunked, sliced or dictionary-encoded; dictionaries may hold nulls and repeats.
Nothing here knows predicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from roost.predicate.ast import WORD
from roost.predicate.axis import NARROW_DIGITS, Array

Mask = npt.NDArray[np.bool_]
Index = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Stored values by row, and which rows have one; no mask where all have."""

    values: Array
    valid: Mask | None


@dataclass(frozen=True, slots=True, eq=False)
class TextColumn:
    """Codes by row into distinct (or nearly distinct) values, and which rows have one."""

    codes: Index
    dictionary: pa.Array
    valid: Mask | None


@dataclass(frozen=True, slots=True, eq=False)
class WordIndex:
    """The case-folded words of a text column's distinct values.

    Parameters
    ----------
    numbers
        Number of each word.
    starts, members
        Sorted word numbers of the value with code ``k``: ``members[starts[k]:starts[k + 1]]``.
    """

    numbers: dict[str, int]
    starts: npt.NDArray[np.int64]
    members: npt.NDArray[np.int64]

    @classmethod
    def build(cls, dictionary: pa.Array) -> WordIndex:
        """Split every value at what is neither letter nor digit."""
        numbers: dict[str, int] = {}
        counts = [0]
        members: list[int] = []
        for value in dictionary.to_pylist():
            words = _split((value or b"").decode("utf-8", "replace"))
            found = sorted({numbers.setdefault(word, len(numbers)) for word in words})
            counts.append(len(found))
            members += found
        return cls(numbers, np.cumsum(counts), np.array(members, dtype=np.int64))


def _split(text: str) -> list[str]:
    if text.isascii():
        return WORD.findall(text.lower())
    # Folding can change what is a letter, so words are found first.
    return [word.casefold() for word in WORD.findall(text)]


class Block:
    """The columns of one block of points, prepared when first asked for.

    Parameters
    ----------
    columns
        By attribute name, all of one length.
    schema
        The types that predicates were compiled for; a column of another type is cast.
    rows
        The rows that will be asked for; where they are few, the others are not prepared.
    """

    def __init__(
        self, columns: Mapping[str, pa.Array | pa.ChunkedArray], schema: pa.Schema, rows: Index
    ) -> None:
        self._columns = columns
        self._schema = schema
        self._rows = rows
        self._kept: dict[object, Any] = {}

    def keep(self, key: object, make: Callable[[], Any]) -> Any:
        """Return what was made under a key in this block, making it the first time."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def numbers(self, name: str) -> Column:
        """Return a column of numbers, times or booleans."""
        return self.keep(("numbers", name), lambda: self._read_numbers(name))  # type: ignore[no-any-return]

    def text(self, name: str) -> TextColumn:
        """Return a column of text."""
        return self.keep(("text", name), lambda: self._read_text(name))  # type: ignore[no-any-return]

    def words(self, name: str) -> WordIndex:
        """Return the words of a column of text."""
        return self.keep(("words", name), lambda: WordIndex.build(self.text(name).dictionary))  # type: ignore[no-any-return]

    def valid(self, name: str) -> Mask | None:
        """Return which rows of a column have a value; none where all have."""
        return self.keep(("valid", name), lambda: _validity(self._columns[name]))  # type: ignore[no-any-return]

    def _read_numbers(self, name: str) -> Column:
        wanted = self._schema.field(name).type
        if pa.types.is_dictionary(wanted):
            wanted = wanted.value_type
        array = _join(self._columns[name], wanted)
        return Column(_stored_values(array), self.valid(name))

    def _read_text(self, name: str) -> TextColumn:
        column = self._columns[name]
        if 2 * len(self._rows) >= len(column):
            codes, dictionary = _encode(column)
            return TextColumn(codes, dictionary, self.valid(name))
        codes = np.zeros(len(column), dtype=np.intp)
        if not pa.types.is_dictionary(column.type):
            # Arrow cannot take rows of every text type, but of binary it can.
            column = column.cast(pa.large_binary())
        codes[self._rows], dictionary = _encode(column.take(pa.array(self._rows)))
        return TextColumn(codes, dictionary, self.valid(name))


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _join(column: pa.Array | pa.ChunkedArray, type_: pa.DataType) -> pa.Array:
    """Return one plain array of a type."""
    parts = [_plain(chunk) for chunk in _chunks(column)]
    parts = [part if part.type == type_ else part.cast(type_) for part in parts]
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays(parts) if parts else pa.array([], type_)


def _validity(column: pa.Array | pa.ChunkedArray) -> Mask | None:
    masks = [_chunk_validity(chunk) for chunk in _chunks(column)]
    mask = np.concatenate(masks) if masks else np.ones(0, dtype=np.bool_)
    return None if mask.all() else mask


def _chunk_validity(array: pa.Array) -> Mask:
    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        array = _plain(array)
    if array.null_count == 0:
        return np.ones(len(array), dtype=np.bool_)
    return np.asarray(array.is_valid())


def _stored_values(array: pa.Array) -> Array:
    type_ = array.type
    if pa.types.is_boolean(type_):
        return _stored_values(array.cast(pa.uint8()))
    if pa.types.is_decimal(type_) and type_.bit_width >= 128:
        return _unscaled(array)
    width = type_.bit_width // 8
    dtype = type_.to_pandas_dtype() if _is_native(type_) else np.dtype(f"i{width}")
    return _read_buffer(array, dtype, 1)


def _is_native(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_))


def _read_buffer(array: pa.Array, dtype: npt.DTypeLike, per_value: int) -> Array:
    """Return an array's values as they lie in memory; what null slots hold is undefined."""
    if len(array) == 0:
        return np.empty(0, dtype=dtype)
    skip = array.offset * np.dtype(dtype).itemsize * per_value
    count = len(array) * per_value
    return np.frombuffer(array.buffers()[1], dtype=dtype, count=count, offset=skip)


def _unscaled(array: pa.Array) -> Array:
    """Return the unscaled integers of wide decimals: int64 where they fit, else Python's."""
    limbs = array.type.bit_width // 64
    parts = _read_buffer(array, np.uint64, limbs).reshape(len(array), limbs)
    if array.type.precision <= NARROW_DIGITS:
        return np.ascontiguousarray(parts[:, 0]).view(np.int64)
    total = np.ascontiguousarray(parts[:, -1]).view(np.int64).astype(object)
    for limb in range(limbs - 2, -1, -1):
        total = total * 2**64 + parts[:, limb].astype(object)
    return np.asarray(total, dtype=object)


def _encode(column: pa.Array | pa.ChunkedArray) -> tuple[Index, pa.Array]:
    """Return the codes and the dictionary of a text column; what null rows hold is undefined."""
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
    return codes, dictionary
