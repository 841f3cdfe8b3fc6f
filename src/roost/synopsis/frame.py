"""The arrays that queries read, passed to compiled loops as one array of addresses.

A loop that receives forty arrays unpacks forty Python objects, and counts references to each array
wherever it calls a function that is not inlined: together more than a local query needs to read its
leaves. `open_frame` builds the arrays inside the compiled code. They own nothing: the synopsis must
outlive the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints
from roost.synopsis.leaves import Leaves

DIMENSIONS, BOXES = 3, 12
#: Types of the arrays of leaves and groups; all others are float64.
TYPES: tuple[Any, ...] = (
    *(np.uint32, np.uint32, np.uint32, np.uint32, np.uint8, np.uint8, np.uint64),
    *(np.int64, np.int64, np.bool_, np.int64, np.int64),
)


class GroupIndex(NamedTuple):
    """What decides whether the record or the leaves of a group apply to a query."""

    keys: Ints
    times: Ints
    exact: NDArray[np.bool_]
    run_starts: Ints
    intervals: Ints  # keys of the totals


class GroupSums(NamedTuple):
    """The sums and extremes of `GroupRecords`."""

    sums: Floats
    squares: Floats
    products: Floats
    lows: Floats
    highs: Floats


class TotalSums(NamedTuple):
    """The sums of `Totals`."""

    sums: Floats
    squares: Floats
    products: Floats


class PlaneTable(NamedTuple):
    """Extremes and mean of the values by feature and code of the leaves."""

    lows: Floats
    highs: Floats
    means: Floats


class Frame(NamedTuple):
    """Views of the arrays that queries read."""

    leaves: Leaves
    groups: GroupIndex
    boxes: Floats  # of the places, then of the groups
    table: PlaneTable
    sums: GroupSums
    shifts: Floats
    totals: TotalSums


class StoredFrame(NamedTuple):
    """Address and shape of every array of a frame, and the arrays, which must not be freed."""

    addresses: Ints
    arrays: list[NDArray[Any]]

    @property
    def boxes(self) -> Floats:
        """Bounds of the places, then of the groups."""
        return self.arrays[BOXES]

    @classmethod
    def of(cls, frame: Frame) -> StoredFrame:
        """Store a frame."""
        head = [*frame.leaves, *frame.groups]
        floats = [frame.boxes, *frame.table, *frame.sums, frame.shifts, *frame.totals]
        dtypes = [*TYPES, *(np.float64 for _ in floats)]
        pairs = zip([*head, *floats], dtypes, strict=True)
        return cls.at([np.ascontiguousarray(array, dtype) for array, dtype in pairs])

    @classmethod
    def at(cls, arrays: list[NDArray[Any]]) -> StoredFrame:
        """Return the addresses of arrays, in the order in which `open_frame` reads them."""
        rows = [(a.ctypes.data, *a.shape, *(1,) * (DIMENSIONS - a.ndim)) for a in arrays]
        return cls(np.array(rows, np.int64), arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the arrays: the copies have other addresses."""
        return StoredFrame.at, (self.arrays,)


def _generate_pointer(_: Any, address: Any) -> Any:  # pragma: no cover - compiled
    """Return the pointer of an address."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_generate_pointer)


@njit(cache=True, nogil=True)
def _view(row: Ints, dtype: Any) -> Any:  # pragma: no cover - compiled
    return carray(_pointer(row[0]), (row[1],), dtype)


@njit(cache=True, nogil=True)
def _view_2(row: Ints, dtype: Any) -> Any:  # pragma: no cover - compiled
    return carray(_pointer(row[0]), (row[1], row[2]), dtype)


@njit(cache=True, nogil=True)
def _view_3(row: Ints, dtype: Any) -> Any:  # pragma: no cover - compiled
    return carray(_pointer(row[0]), (row[1], row[2], row[3]), dtype)


@njit(cache=True, nogil=True)
def open_frame(rows: Ints) -> Frame:  # pragma: no cover - compiled
    """Return the arrays of a frame."""
    return Frame(
        Leaves(
            _view(rows[0], np.uint32),
            _view(rows[1], np.uint32),
            _view(rows[2], np.uint32),
            _view(rows[3], np.uint32),
            _view_2(rows[4], np.uint8),
            _view_2(rows[5], np.uint8),
            _view(rows[6], np.uint64),
        ),
        GroupIndex(
            _view(rows[7], np.int64),
            _view_2(rows[8], np.int64),
            _view(rows[9], np.bool_),
            _view(rows[10], np.int64),
            _view(rows[11], np.int64),
        ),
        _view_2(rows[12], np.float64),
        PlaneTable(
            _view_2(rows[13], np.float64),
            _view_2(rows[14], np.float64),
            _view_2(rows[15], np.float64),
        ),
        GroupSums(
            _view_3(rows[16], np.float64),
            _view_3(rows[17], np.float64),
            _view_2(rows[18], np.float64),
            _view_2(rows[19], np.float64),
            _view_2(rows[20], np.float64),
        ),
        _view(rows[21], np.float64),
        TotalSums(
            _view_3(rows[22], np.float64),
            _view_3(rows[23], np.float64),
            _view_2(rows[24], np.float64),
        ),
    )
