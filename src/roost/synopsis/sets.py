"""Set sketches: membership, cardinality and frequency of the values of columns, by period.

A `SetSpec` names the columns. Of the rows of each period there is a Bloom filter, a HyperLogLog and
a count-min sketch, the last two from DataSketches, in its binary format. A combination of values is
reduced to a key of 64 bits, and each sketch is updated once for each distinct key of a batch. Rows
in which a column is null or not finite have no key.

The HyperLogLog of one column of whole numbers or strings is fed the values themselves, so it also
merges with the sketches that other programs build of such a column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasketches import count_min_sketch, hll_sketch, hll_union, tgt_hll_type
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.model.arrays import Ints, as_numpy, frozen
from roost.model.columns import convert, one_array
from roost.synopsis.bins import Bins, feature_values
from roost.synopsis.leaves import Bytes, Words
from roost.synopsis.paths import HASH_FACTOR
from roost.synopsis.spec import DAY_S, SECOND_US, Feature, SetSpec, SynopsisSpec

BLOOM, HLL, COUNTS = range(3)
BLOOM_PROBES = 7
BYTE_BITS = np.bitwise_count(np.arange(256, dtype=np.uint8))
BLOOM_BITS = 9.6  # for each member: 1 % of false positives with seven probes
COUNT_HASHES = 3  # the error is exceeded with probability exp(-3)
Mask = NDArray[np.bool_]


class SetRecords(NamedTuple):
    """Set sketches, sorted by set and period; each has three sequences of bytes, or empty ones."""

    owners: Ints  # position of the set in the spec
    periods: Ints  # number of the first period since 1970
    lengths: Ints  # number of periods
    starts: Ints  # of the bytes: Bloom filter, HyperLogLog, count-min, and the same of the next
    data: Bytes

    def blob(self, at: int, kind: int) -> Bytes:
        """Return the bytes of a sketch."""
        return self.data[self.starts[3 * at + kind] : self.starts[3 * at + kind + 1]]

    def hll(self, at: int) -> Any:
        """Return a HyperLogLog."""
        return hll_sketch.deserialize(self.blob(at, HLL).tobytes())

    def counts(self, at: int) -> Any:
        """Return a count-min sketch."""
        return count_min_sketch.deserialize(self.blob(at, COUNTS).tobytes())


_NONE = np.empty(0, np.int64)
NO_SETS = SetRecords(_NONE, _NONE, _NONE, np.zeros(1, np.int64), np.empty(0, np.uint8))


class SetSketches(NamedTuple):
    """Set sketches, and what maps a combination of values to its key."""

    spec: SynopsisSpec
    bins: Bins
    records: SetRecords


class Span(NamedTuple):
    """Which rows a set sketch is about: those of a set in some periods."""

    owner: int
    period: int
    length: int

    def joined(self, other: Span) -> Span:
        """Return the periods from the first of both to the last."""
        first = min(self.period, other.period)
        return Span(self.owner, first, max(self.end, other.end) - first)

    @property
    def end(self) -> int:
        """The first period after these."""
        return self.period + self.length


def build_sets(table: pa.Table, times: Ints, spec: SynopsisSpec, bins: Bins) -> SetRecords:
    """Sketch the sets of a table; ``times`` are those of its rows in microseconds."""
    entries = []
    for owner, own in enumerate(spec.sets):
        columns = [one_array(table[name]) for name in own.names]
        keys, known = item_keys(columns, own, spec, bins)
        periods = times // period_us(own)
        for period in np.unique(periods[known]).tolist():
            rows = np.flatnonzero(known & (periods == period))
            entries.append((Span(owner, period, 1), _sketch(keys, rows, columns, own)))
    return _joined(entries)


def period_us(own: SetSpec) -> int:
    """Return the length of a period."""
    return own.period_days * DAY_S * SECOND_US


def _sketch(keys: Words, rows: Ints, columns: Sequence[pa.Array], own: SetSpec) -> list[bytes]:
    distinct, first, counts = np.unique(keys[rows], return_index=True, return_counts=True)
    bloom = np.zeros(bloom_bytes(own), np.uint8)
    if bloom.size:
        _add_members(bloom, distinct)
    numbers = distinct.view(np.int64).tolist()
    hll, frequencies = b"", b""
    if own.lg_k:
        items = numbers
        if _plain(own):
            items = columns[0].take(pa.array(rows[first])).to_pylist()
        sketch = hll_sketch(own.lg_k, tgt_hll_type.HLL_8)
        for item in items:
            sketch.update(item)
        hll = _packed(unite([sketch], own.lg_k))
    if own.counters:
        sketch = count_min_sketch(COUNT_HASHES, own.counters)
        for number, count in zip(numbers, counts.tolist(), strict=True):
            sketch.update(number, count)
        frequencies = sketch.serialize()
    return [bloom.tobytes(), hll, frequencies]


def _plain(own: SetSpec) -> bool:
    """Return whether the items of the HyperLogLog are the values."""
    type_ = own.columns[0].type
    plain = pa.types.is_integer(type_) or pa.types.is_string(type_)
    return len(own.columns) == 1 and not own.binned and plain


def unite(sketches: Iterable[Any], lg_k: int) -> Any:
    """Return the union of HyperLogLogs, whose estimate does not depend on their order."""
    union = hll_union(lg_k)
    for sketch in sketches:
        union.update(sketch)
    # The estimate of a sketch depends on the order of its updates until it is merged with another.
    union.update(union.get_result(tgt_hll_type.HLL_8))
    return union


def _packed(union: Any) -> bytes:
    packed: bytes = union.get_result(tgt_hll_type.HLL_4).serialize_compact()
    return packed


def _joined(entries: Sequence[tuple[Span, Sequence[bytes]]]) -> SetRecords:
    blobs = [blob for _, own in entries for blob in own]
    starts = np.concatenate([[0], np.cumsum([len(blob) for blob in blobs], dtype=np.int64)])
    spans = np.array([span for span, _ in entries], np.int64).reshape(-1, 3)
    owners, periods, lengths = np.ascontiguousarray(spans.T)
    data = np.frombuffer(b"".join(blobs), np.uint8)
    return SetRecords(owners, periods, lengths, starts, data)


def merge_sets(parts: Sequence[SetRecords], spec: SynopsisSpec) -> SetRecords:
    """Merge the sketches of equal sets and periods."""
    found: dict[Span, list[tuple[SetRecords, int]]] = {}
    for part in parts:
        for at, span in enumerate(spans_of(part)):
            found.setdefault(span, []).append((part, at))
    return _merged(found, spec)


def _merged(
    found: Mapping[Span, Sequence[tuple[SetRecords, int]]], spec: SynopsisSpec
) -> SetRecords:
    """Merge the sketches that are listed for each span."""
    entries = []
    for span, same in sorted(found.items(), key=lambda item: item[0]):
        blobs = [[part.blob(at, kind) for part, at in same] for kind in range(3)]
        merged = [own[0].tobytes() for own in blobs]
        if len(same) > 1:
            own = spec.sets[span.owner]
            merged[BLOOM] = np.bitwise_or.reduce(blobs[BLOOM]).tobytes()
            if own.lg_k:
                merged[HLL] = _packed(unite((part.hll(at) for part, at in same), own.lg_k))
            if own.counters:
                total, *more = (part.counts(at) for part, at in same)
                for sketch in more:
                    total.merge(sketch)
                merged[COUNTS] = total.serialize()
        entries.append((span, merged))
    return _joined(entries)


def fit_sets(
    records: SetRecords, spec: SynopsisSpec, nbytes: int, now_us: int, oldest_us: int
) -> SetRecords:
    """Return sketches that fit a number of bytes, without the periods that end before a time.

    Sketches of neighbouring periods are merged until the rest fits, or one of each set is left:
    first those that are short for their age, so that periods get longer with age.
    """
    found = {
        span: [(records, at)]
        for at, span in enumerate(spans_of(records))
        if span.end * period_us(spec.sets[span.owner]) > oldest_us
    }
    sizes = {span: sum(records.blob(at, kind).size for kind in range(3))
             for span, ((_, at),) in found.items()}  # fmt: skip
    while sum(sizes.values()) > nbytes:
        pairs = [pair for pair in pairwise(sorted(sizes)) if pair[0].owner == pair[1].owner]
        if not pairs:
            break

        def length_for_age(pair: tuple[Span, Span]) -> float:
            both, unit = pair[0].joined(pair[1]), period_us(spec.sets[pair[0].owner])
            return both.length * unit / max(now_us - both.period * unit, unit)

        first, second = min(pairs, key=length_for_age)
        both = first.joined(second)
        size = max(sizes.pop(first), sizes.pop(second), sizes.get(both, 0))
        sketches = found.pop(first) + found.pop(second)
        # The joined span may be that of a third sketch, which has late rows.
        found[both], sizes[both] = found.get(both, []) + sketches, size
    return _merged(found, spec)


def bloom_bytes(own: SetSpec) -> int:
    """Return the size of a Bloom filter."""
    return math.ceil(own.members * BLOOM_BITS / 8.0)


@njit(cache=True, nogil=True)
def mix(value: np.uint64) -> np.uint64:  # pragma: no cover - compiled
    """Spread the bits of a number (the finaliser of splitmix64)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def _probe(key: np.uint64, turn: Whole, bits: Whole) -> Whole:  # pragma: no cover - compiled
    return np.int64(mix(key + np.uint64(turn) * HASH_FACTOR) % np.uint64(bits))


@njit(cache=True, nogil=True)
def _add_members(bloom: Bytes, keys: Words) -> None:  # pragma: no cover - compiled
    for key in keys:
        for turn in range(BLOOM_PROBES):
            bit = _probe(key, turn, 8 * bloom.size)
            bloom[bit >> 3] |= np.uint8(1 << (bit & 7))


@njit(cache=True, nogil=True)
def is_member(bloom: Bytes, key: np.uint64) -> bool:  # pragma: no cover - compiled
    """Return whether a key may have been added; false positives occur, false negatives do not."""
    for turn in range(BLOOM_PROBES):
        bit = _probe(key, turn, 8 * bloom.size)
        if not bloom[bit >> 3] >> np.uint8(bit & 7) & 1:
            return False
    return True


@njit(cache=True, nogil=True)
def fill_of(bloom: Bytes) -> float:  # pragma: no cover - compiled
    """Return the share of the bits of a Bloom filter that are set."""
    bits = 0
    for byte in bloom:
        bits += BYTE_BITS[byte]
    return bits / (8.0 * bloom.size)


@njit(cache=True, nogil=True)
def _fold(keys: Words, bits: Words) -> None:  # pragma: no cover - compiled
    """Extend the key of each row by one column."""
    for i in range(keys.size):
        keys[i] = mix(keys[i] * HASH_FACTOR + bits[i])


@njit(cache=True, nogil=True)
def _hash_texts(offsets: NDArray[Any], data: Bytes, out: Words) -> None:  # pragma: no cover
    """Fill the FNV-1a hash of each text."""
    for i in range(out.size):
        value = np.uint64(0xCBF29CE484222325)
        for k in range(offsets[i], offsets[i + 1]):
            value = (value ^ np.uint64(data[k])) * np.uint64(0x100000001B3)
        out[i] = value


def item_keys(
    columns: Sequence[pa.Array], own: SetSpec, spec: SynopsisSpec, bins: Bins
) -> tuple[Words, Mask]:
    """Return the key of each row, and which rows have one."""
    keys = np.full(len(columns[0]), len(columns), np.uint64)
    known = np.ones(keys.size, np.bool_)
    for feature, column in zip(own.columns, columns, strict=True):
        if feature.name in own.binned:
            at = spec.index(feature.name)
            values = feature_values(column, spec.features[at], bins.categories[at])
            known &= np.isfinite(values)
            bits = np.searchsorted(bins.edges[at], values, side="right").astype(np.uint64)
        else:
            bits, own_known = _value_bits(convert(column, feature.type)[0], feature)
            known &= own_known
        _fold(keys, frozen(bits))
    return keys, known


def _value_bits(column: pa.Array, feature: Feature) -> tuple[Words, Mask]:
    known = np.ones(len(column), np.bool_)
    if column.null_count:
        known = np.asarray(column.is_valid())
    if pa.types.is_string(feature.type):
        offsets, data = column.buffers()[1:]
        ends = np.frombuffer(offsets, np.int32)[column.offset :][: len(column) + 1]
        bits = np.empty(len(column), np.uint64)
        _hash_texts(frozen(ends), frozen(np.frombuffer(data or b"", np.uint8)), bits)
        return bits, known
    if pa.types.is_floating(feature.type):
        values = as_numpy(column).astype(np.float64) + 0.0  # one zero
        return values.view(np.uint64), np.isfinite(values)
    numbers = column.cast(pa.int64(), safe=False)
    if column.null_count:
        numbers = numbers.fill_null(0)
    return as_numpy(numbers).view(np.uint64), known


def set_times(records: SetRecords, spec: SynopsisSpec) -> tuple[int, int] | None:
    """Return the first and the last microsecond of all periods; None without sketches."""
    units = np.array([period_us(own) for own in spec.sets], np.int64)[records.owners]
    if not units.size:
        return None
    ends = (records.periods + records.lengths) * units
    return int((records.periods * units).min()), int(ends.max()) - 1


def spans_of(records: SetRecords) -> Iterator[Span]:
    """Yield which rows each sketch is about."""
    columns = (records.owners.tolist(), records.periods.tolist(), records.lengths.tolist())
    return map(Span, *columns)
