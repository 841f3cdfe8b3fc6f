"""Tuples in files that are not rewritten, of which a key's oldest ones are used up."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from roost.dataflow.blocks import BUCKET, ORDER, TIME, OldState, times_of
from roost.dataflow.cuts import CUT, StoredTuples
from roost.model.arrays import as_numpy
from roost.model.columns import one_array

KEYS = 3


def tuples(chance: random.Random, now: int, count: int) -> pa.Table:
    """Return tuples of which many are equal in their order."""
    keys = [chance.randrange(KEYS) for _ in range(count)]
    return pa.table(
        {
            TIME: pa.array([now + chance.randrange(2) for _ in keys], pa.int64()),
            BUCKET: pa.array(keys, pa.int32()),
            ORDER: pa.array([bytes([chance.randrange(2)]) for _ in keys], pa.binary()),
            "k": pa.array(keys, pa.int64()),
        }
    )


def listed(table: pa.Table) -> list[tuple[int, int, bytes]]:
    """Return key, time and order of each row, by key."""
    rows = table.select(["k", TIME, ORDER]).to_pylist()
    return sorted(((row["k"], row[TIME], row[ORDER]) for row in rows), key=lambda row: row[0])


@pytest.mark.sweep(range(30), 10, 2000)
def test_each_tuple_is_used_once(seed: int) -> None:
    """Any files may be merged, from any batch on, and tuples that equal a cut are counted."""
    chance = random.Random(seed)
    files: list[pa.Table] = []
    expected: list[tuple[int, int, bytes]] = []
    covered: Counter[str] = Counter()
    for step in range(40):
        now = 2 * (step // 4)
        fresh = tuples(chance, now, chance.randrange(9))
        first = chance.randint(0, len(files))
        old = [OldState({"rows": t}, number >= first) for number, t in enumerate(files)]
        stored = StoredTuples.of([fresh], old, ["k"])
        expected = sorted([*expected, *listed(fresh)])
        assert stored is not None
        live = stored.live
        assert listed(live) == expected
        keys = as_numpy(one_array(live["k"]))
        ready = times_of(live) < 2 * ((step + 1) // 4)  # no tuple to come is older
        used = []
        for key in range(KEYS):
            mine = np.flatnonzero((keys == key) & ready)
            used.append(mine[: chance.randint(0, mine.size) if chance.random() < 0.5 else 0])
        rows = np.concatenate(used).astype(np.int64)
        for row in listed(live.take(pa.array(rows))):
            expected.remove(row)
        written = stored.without(rows)
        files = [*files[:first], written]
        covered["cuts"] += int((as_numpy(one_array(written[CUT])) > 0).sum())
        covered["merges of some files"] += 0 < first < len(files)
    assert all(covered[name] for name in ("cuts", "merges of some files")), covered


def test_nothing_remains_of_used_tuples_when_all_files_are_merged() -> None:
    chance = random.Random(1)
    first = StoredTuples.of([tuples(chance, 0, 20)], [], ["k"])
    assert first is not None
    kept = first.without(np.arange(5))
    assert kept.num_rows == 15 and not as_numpy(one_array(kept[CUT])).any()
    later = StoredTuples.of([], [OldState({"rows": kept}, False)], ["k"])
    assert later is not None
    cuts = later.without(np.arange(15))
    assert 0 < cuts.num_rows == np.count_nonzero(as_numpy(one_array(cuts[CUT]))) <= KEYS
    both = [OldState({"rows": kept}, True), OldState({"rows": cuts}, True)]
    last = StoredTuples.of([], both, ["k"])
    assert last is not None and not last.live.num_rows
    assert not last.without(np.empty(0, np.int64)).num_rows
