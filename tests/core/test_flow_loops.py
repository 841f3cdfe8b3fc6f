"""The fast paths of dataflow operators equal their definitions."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from roost.dataflow import aggregate
from roost.dataflow.aggregate import AggregateWork
from roost.dataflow.blocks import BUCKET, TIME, OldState
from roost.dataflow.flow import Dataflow
from roost.dataflow.groups import distinct, place, places_with, slide
from roost.dataflow.join import _rectangles
from roost.dataflow.schema import Node, resolve
from roost.dataflow.state import read_state, write_state
from roost.model.records import TIME_MAX, TIME_MIN
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.window.grouped import Groups, Totals

FUNCTIONS = {
    "n": "count",
    "known": "count(v)",
    "sum": "sum(v)",
    "mean": "avg(v)",
    "whole": "sum(w)",
}


def node_of(size: int, advance: int) -> Node:
    flow = Dataflow("loops")
    schema = {"k": "int64", "v": "double", "w": "int64", "t": "int64"}
    stream = flow.source("rows", schema, time="t")
    stream.aggregate(FUNCTIONS, by="k", size=size, advance=advance, name="a").sink("out")
    return resolve(flow.name, flow.operators, {}).by_name["a"]


def rows_of(rng: np.random.Generator, count: int, values: Any) -> pa.Table:
    keys = rng.integers(0, 12, count)
    return pa.table(
        {
            "k": keys,
            "v": pa.array(values, mask=rng.random(count) < 0.1),
            "w": rng.integers(-(2**40), 2**40, count),
            TIME: rng.integers(-500, 500, count),
            BUCKET: (keys % 4).astype(np.int32),
        }
    )


@pytest.mark.sweep(range(10), 5, 500)
def test_sliding_by_running_sums_equals_merging_panes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    advance = int(rng.integers(1, 40))
    node = node_of(advance * int(rng.integers(1, 30)) + int(rng.integers(0, advance)), advance)
    scale = float(rng.choice([1e-300, 1.0, 1e15, 1e300]))
    tables = [
        rows_of(rng, count, rng.normal(size=count) * scale)
        for count in rng.integers(1, 200, int(rng.integers(1, 5)))
    ]
    if rng.random() < 0.2:
        tables.append(rows_of(rng, 3, np.array([1.0, np.inf, np.nan])))
    old = []
    for table in tables[1:]:
        partials = AggregateWork(node, False)._aggregate(table)
        old.append(OldState({"panes": partials.table()}, bool(rng.random() < 0.5)))
    before, after = sorted(int(t) for t in rng.integers(-600, 600, 2))
    before = TIME_MIN if rng.random() < 0.3 else before
    after = TIME_MAX if rng.random() < 0.3 else after
    found = []
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(aggregate, "SUBTRACTED", frozenset())
        ran = AggregateWork(node, False).run([tables[0]], old, before, after)
        output = [] if ran.output is None else ran.output.to_pylist()
        found.append(Counter(repr(sorted(row.items())) for row in output))
    assert found[0] == found[1]


def test_windows_that_slide_are_those_that_have_panes() -> None:
    chance = random.Random(5)
    covered = 0
    for _ in range(200):
        size, advance = chance.randint(1, 9), chance.randint(1, 4)
        rows = [(chance.randint(0, 3), chance.randint(-20, 20)) for _ in range(15)]
        codes, panes = np.array([c for c, _ in rows]), np.array([p for _, p in rows])
        first, last = sorted(chance.randint(-25, 25) for _ in range(2))
        order, (windows, low, high) = slide(codes, panes, size, advance, first, last)
        got = {}
        for window, a, b in zip(windows.tolist(), low, high, strict=True):
            (code,) = set(codes[order[a:b]].tolist())
            assert (code, window) not in got
            got[code, window] = sorted(panes[order[a:b]].tolist())
        expected: dict[tuple[int, int], list[int]] = {}
        for code, pane in rows:
            for window in range(first, last + 1):
                if window * advance <= pane < window * advance + size:
                    expected.setdefault((code, window), []).append(pane)
        assert got == {key: sorted(found) for key, found in expected.items()}
        covered += len(got)
    assert covered > 1000


@pytest.mark.parametrize("scale", [5e-324, 1e-308, 1e-300, 1e-5, 1.0, 1e16, 1e300])
def test_sums_and_averages_are_rounded_once(scale: float) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=3000) * scale
    values[:100] = np.repeat(rng.normal(size=50) * scale, 2) * np.tile([1.0, -1.0], 50)
    starts = np.unique([0, *range(0, 100, 2), *rng.integers(100, 3000, 1200), 3000])
    totals = Totals.of(pa.array(values), Groups(starts, np.arange(3000, dtype=np.int32)))
    for function in ("sum", "avg"):
        numbers = totals.results(function, None).numbers
        assert numbers is not None
        for k, (a, b) in enumerate(pairwise(starts)):
            exact = sum((Fraction(float(value)) for value in values[a:b]), Fraction(0))
            exact = exact / int(b - a) if function == "avg" else exact
            assert numbers[k] == _rounded(exact), (function, k)


def _rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def test_ties_are_rounded_to_even() -> None:
    groups = Groups(np.array([0, 2, 4, 6, 8]), np.arange(8, dtype=np.int32))
    whole = [2**53, 1, 2**53, 3, -(2**53), -1, -(2**62), -(2**62)]
    numbers = Totals.of(pa.array(whole), groups).results("sum", None).numbers
    assert numbers is not None
    assert numbers.tolist() == [2.0**53, 2.0**53 + 4, -(2.0**53), -(2.0**63)]


def test_a_machine_reads_its_buckets_in_few_ranges(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    files, cache = Files(str(tmp_path)), WorkerCache()
    mine = np.arange(0, 64, 2)
    buckets = rng.choice(mine, 500).astype(np.int32)
    table = pa.table({BUCKET: buckets, "row": np.arange(500)})
    assert write_state(files, "a.state", {"rows": table}, 64, 0) is not None
    for owned in (mine, np.arange(64), mine[::3], np.array([7, 9]), np.array([0, 1, 2, 62, 63])):
        tables = read_state(files, "a.state", {"rows": owned}, cache)
        found = tables.get("rows", table.slice(0, 0))
        assert sorted(found["row"].to_pylist()) == np.flatnonzero(np.isin(buckets, owned)).tolist()
        assert owned is not mine or found["row"].num_chunks == 1


def test_rectangles_cover_each_cell_once() -> None:
    chance = random.Random(2)
    for _ in range(50):
        cells = [(a, b) for a in range(6) for b in range(5) if chance.random() < 0.6]
        covered = Counter(
            (a, b) for lefts, rights in _rectangles(cells) for a in lefts for b in rights
        )
        assert covered == Counter(cells)
    assert len(_rectangles([(a, b) for a in range(6) for b in range(0, 5, 2)])) == 1


def test_rows_are_placed_by_code_in_their_order() -> None:
    starts, rows = place(np.array([2, 0, 2, 0]), 4)
    assert (starts.tolist(), rows.tolist()) == ([0, 2, 2, 4, 4], [1, 3, 0, 2])


@pytest.mark.parametrize("top", [1, 30, 1_000, 10**6, 10**15])
def test_sets_of_codes_are_those_of_numpy(top: int) -> None:
    """Whether codes are dense or sparse."""
    rng = np.random.default_rng(top)
    for size, other in [(0, 0), (0, 5), (200, 0), (200, 40), (5_000, 100)]:
        codes, others = rng.integers(0, top, size), rng.integers(0, top, other)
        assert (
            places_with(codes, others).tolist() == np.flatnonzero(np.isin(codes, others)).tolist()
        )
        numbers, below = distinct(codes, top)
        assert numbers.tolist() == np.unique(codes).tolist()
        assert below(others).tolist() == [int((numbers < one).sum()) for one in others.tolist()]
        assert below(np.array([0, top])).tolist() == [0, numbers.size]
