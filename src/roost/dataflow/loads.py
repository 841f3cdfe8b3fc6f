"""Load of the buckets of a subquery: what a machine counts in a batch, and what policies see.

Seconds of a bucket are those of a cost model that is calibrated with the measured processor time
of the machines: so much for a tuple, a stored row, and a pair of tuples that may meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.blocks import BUCKET
from roost.dataflow.buckets import hash_rows
from roost.dataflow.join import SIDES
from roost.model.arrays import as_arrow, as_numpy
from roost.model.columns import one_array
from roost.workload import CostModel

SAMPLE = 4096  # tuples of a batch and machine among which heavy keys are counted
KEYS = 3  # heaviest keys that a machine reports
KEYS_SEEN = 8  # heaviest keys that policies see
TUPLES = "__tuples"  # of a partial result: how many tuples were aggregated before the exchange
EVERY = "(no key)"  # name of the only group of an Aggregate without a key
Floats = NDArray[np.float64]


class KeyCount(NamedTuple):
    """A key, its bucket, and an estimate of its tuples."""

    key: str
    bucket: int
    hash: int  # of 64 bits
    tuples: float


class HeavyKey(NamedTuple):
    """A key with many tuples, its bucket, and its share of all tuples of the subquery."""

    key: str
    bucket: int
    share: float
    hash: int = 0  # of 64 bits


@dataclass(frozen=True)
class MachineLoad:
    """What a machine counted in a batch; arrays are by bucket, of a Product by cell."""

    tuples: Floats
    rows: Floats  # stored
    pairs: Floats  # of a new tuple and another one in the bucket
    state_bytes: Floats
    input_bytes: int
    keys: tuple[KeyCount, ...] = ()
    absent: int = 0  # tuples in place of which it received partial results


def counted(
    inputs: Sequence[pa.Table | None],
    stored: Sequence[Mapping[str, pa.Table]],
    buckets: int,
    cells: NDArray[np.bool_] | None,
    keys: Sequence[Sequence[str]],
    seed: int,
    *,
    mirrored: bool = False,
) -> MachineLoad:
    """Count the load of a machine; ``cells`` are those that it owns of a Product's grid.

    The two sides of a ``mirrored`` join are the same tuples.

    ``stored`` are the tables of the state after the batch, ``keys`` the key columns by input. A
    machine has a tuple of a Product once for all of its cells, which share it.
    """
    tuples, rows, nbytes, pairs = np.zeros((4, buckets))
    sides = []
    for side, mine in enumerate(inputs):
        tables = [table for one in stored for table in _of_side(one, side, len(inputs))]
        size = buckets if cells is None else cells.shape[side]
        fresh, old = _by_bucket([] if mine is None else [mine], size), _by_bucket(tables, size)
        sides.append((fresh, old))
        row_bytes = sum(table.nbytes for table in tables) / max(float(old.sum()), 1.0)
        for total, values in ((tuples, fresh), (rows, old), (nbytes, old * row_bytes)):
            total += values if cells is None else _dealt(values, cells, side)
    if len(sides) == 2:
        (left, left_old), (right, right_old) = sides
        if cells is None:
            pairs = left * right_old + left_old * right
        else:
            grid = np.outer(left, right_old) + np.outer(left_old, right)
            pairs = (grid * cells).reshape(-1)
    if mirrored:
        tuples, rows, nbytes = tuples / 2, rows / 2, nbytes / 2
    sent = sum(table.nbytes for table in inputs if table is not None)
    heavy = heavy_keys(inputs, keys, seed)
    absent = sum(int(weights_of(table).sum()) for table in inputs if table is not None)
    return MachineLoad(tuples, rows, pairs, nbytes, sent, heavy, absent)


def _of_side(stored: Mapping[str, pa.Table], side: int, sides: int) -> list[pa.Table]:
    """Return the tables of one input; an Aggregate has one input, and one table."""
    tables = list(stored.values())
    return tables if sides == 1 else [stored[SIDES[side]]] if tables else []


def _dealt(values: Floats, cells: NDArray[np.bool_], side: int) -> Floats:
    """Divide what a machine has of a row or column of the grid among its cells of it."""
    owned = np.maximum(cells.sum(axis=1 - side), 1)
    return (np.expand_dims(values / owned, 1 - side) * cells).reshape(-1)


def _by_bucket(tables: Iterable[pa.Table], buckets: int) -> Floats:
    found = np.zeros(buckets)
    for table in tables:
        found += np.bincount(as_numpy(one_array(table[BUCKET])), minlength=buckets)
    return found


def weights_of(table: pa.Table) -> NDArray[np.int64]:
    """Return how many more tuples each row stands for than itself."""
    if TUPLES not in table.column_names:
        return np.zeros(table.num_rows, np.int64)
    found: NDArray[np.int64] = as_numpy(one_array(table[TUPLES])) - 1
    return found


def heavy_keys(
    inputs: Sequence[pa.Table | None], keys: Sequence[Sequence[str]], seed: int
) -> tuple[KeyCount, ...]:
    """Estimate the tuples of the heaviest keys from a sample, the same in every attempt.

    Partial results stand for many tuples each; the greatest of them are counted beside the sample.
    """
    found: dict[tuple[str, int, int], float] = {}
    for table, given in zip(inputs, keys, strict=False):
        if table is None or not table.num_rows:
            continue
        names = list(dict.fromkeys(given))  # a Join may compare a column twice
        rows, weights = _sampled(weights_of(table), seed)
        sample = table.select([*names, BUCKET]).take(as_arrow(rows))
        hashes = hash_rows([sample[name] for name in names], rows.size)
        _, firsts, groups = np.unique(hashes, return_index=True, return_inverse=True)
        counts = np.bincount(groups, weights)
        for place in np.argsort(-counts, kind="stable")[:KEYS]:
            row = sample.slice(int(firsts[place]), 1).to_pylist()[0]
            text = ", ".join(str(row[name]) for name in names) or EVERY
            key = text, int(row[BUCKET]), int(hashes[firsts[place]])
            found[key] = found.get(key, 0.0) + float(counts[place])
    best = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:KEYS]
    return tuple(KeyCount(*key, tuples) for key, tuples in best)


def _sampled(more: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], Floats]:
    """Return some rows, and the number of tuples that each stands for."""
    heavy = np.flatnonzero(more)
    heavy = heavy[np.argsort(-more[heavy], kind="stable")[:SAMPLE]]
    count = more.size - heavy.size
    rows = np.arange(count)
    if count > SAMPLE:
        rows = np.random.default_rng(seed).integers(0, count, SAMPLE)
    weights = np.full(rows.size, max(count / SAMPLE, 1.0))
    if not heavy.size:
        return rows, weights
    rows = np.delete(np.arange(more.size), heavy)[rows]
    return np.concatenate([rows, heavy]), np.concatenate([weights, more[heavy] + 1.0])


# --------------------------------------------------------------------------- on the driver


@dataclass(frozen=True)
class BucketLoads:
    """Load of all buckets of a subquery over some batches; arrays are by bucket."""

    batches: int
    seconds: float  # of the clock that they took
    tuples: Floats
    busy_s: Floats  # by the calibrated cost model
    state_bytes: Floats  # after the last batch
    tuple_bytes: float = 0.0  # mean
    keys: tuple[HeavyKey, ...] = ()

    def by_machine(self, owners: Iterable[int], machines: int) -> Floats:
        """Return the busy seconds of each machine."""
        return np.bincount(list(owners), self.busy_s, machines).astype(np.float64)


class KeyMeter:
    """Adds up the heaviest keys of an operator; tuples in place of partial results count."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, int, int], float] = {}
        self._tuples = 0.0

    def add(self, loads: Iterable[MachineLoad]) -> None:
        """Add a batch: the load of each machine."""
        for load in loads:
            self._tuples += float(load.tuples.sum()) + load.absent
            for one in load.keys:
                key = one.key, one.bucket, one.hash
                self._keys[key] = self._keys.get(key, 0.0) + one.tuples

    def heaviest(self) -> tuple[HeavyKey, ...]:
        """Return the heaviest keys, with their shares."""
        found = sorted(self._keys.items(), key=lambda item: (-item[1], item[0]))[:KEYS_SEEN]
        total = max(self._tuples, 1.0)
        return tuple(
            HeavyKey(key, bucket, count / total, code) for (key, bucket, code), count in found
        )


class LoadMeter:
    """Adds up the load of a bucket map since it changed, and calibrates its cost model."""

    def __init__(self, buckets: int, model: Mapping[str, Any] | None = None) -> None:
        self.model = CostModel(4) if model is None else CostModel.from_json(model)
        self.buckets = buckets
        self._clock: float | None = None  # of the last batch
        self._since: float | None = None  # clock from which on batches count
        self.start()

    def start(self) -> None:
        """Begin again after a change of the map; the cost model remains."""
        self._work = np.zeros((3, self.buckets))
        self._state = np.zeros(self.buckets)
        self._bytes = self._batches = 0
        self._since = self._clock

    def add(self, clock: float, loads: Sequence[tuple[MachineLoad, float]]) -> None:
        """Add a batch: the load and the processor seconds of each machine."""
        self._since = clock if self._since is None else self._since
        self._clock = clock
        self._batches += 1
        self._state = sum((load.state_bytes for load, _ in loads), np.zeros(self.buckets))
        features = []
        for load, _ in loads:
            work = np.stack([load.tuples, load.rows, load.pairs])
            self._work += work
            self._bytes += load.input_bytes
            features.append([1.0, *work.sum(axis=1)])
        self.model.observe(features, [seconds for _, seconds in loads])

    def loads(self, keys: tuple[HeavyKey, ...] = ()) -> BucketLoads:
        """Return the load so far, with the heaviest keys."""
        tuples = self._work[0]
        return BucketLoads(
            self._batches,
            0.0 if self._clock is None or self._since is None else self._clock - self._since,
            tuples.copy(),
            self.model.coefficients[1:] @ self._work,
            self._state,
            self._bytes / max(float(tuples.sum()), 1.0),
            keys,
        )
