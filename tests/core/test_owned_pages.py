"""A host reads what its machines own of the queries, page rounding aside."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from balance_checks import slots_in
from layouts import random_layout
from roost.balance import Partition, Plan
from roost.kernel import (
    Index,
    build_segment,
    order_by_place,
    pack,
    prefetch,
    preload,
    query_schema,
    release,
    unpack,
)
from roost.model.records import TIME_MAX, TIME_MIN
from roost.model.schemas import PointBlock
from roost.model.space import Coordinates, Rect, Space
from roost.queries.versions import SegmentRef
from roost.runtime.executor import InProcessExecutor
from roost.stages import matching
from roost.stages.routing import SpatialRouting
from roost.storage.cache import WorkerCache
from roost.storage.copies import BLOCK, Copies
from roost.storage.files import Files, map_arrays, write_arrays
from stage_scenario import Scenario

SPACE = Space(Rect(0.0, 0.0, 100.0, 100.0), 10, 10, Coordinates.PLANE)
QUARTER = np.array([[-np.inf, -np.inf, 50.0, 50.0]])
BOXES, POINTS = 200_000, 100_000


@pytest.fixture(scope="module")
def file(disk: Path) -> Path:
    """Write a segment of small boxes."""
    chance = np.random.default_rng(3)
    corners = chance.uniform(0, 99, (BOXES, 2))
    ids = [f"a query whose identifier is long {number}" for number in range(BOXES)]
    known: dict[str, Any] = {
        "query_id": ids,
        "user_id": ["ann"] * BOXES,
        "kind": np.zeros(BOXES, np.int8),
        "live_from": np.full(BOXES, TIME_MIN),
        "live_until": np.full(BOXES, TIME_MAX),
        **{name: corners[:, axis] for axis, name in enumerate(("x0", "y0"))},
        **{name: corners[:, axis] + 0.3 for axis, name in enumerate(("x1", "y1"))},
    }
    schema = query_schema(pa.string())
    columns = [pa.array(known.get(f.name, [None] * BOXES), f.type) for f in schema]
    path = disk / "boxes.seg"
    queries = order_by_place(pa.table(columns, schema=schema), SPACE)
    write_arrays(path, pack(build_segment(queries, SPACE)))
    return path


def in_memory(path: Path) -> float:
    """Return the share of a file's pages that are in memory."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        found = (ctypes.c_ubyte * pages)()
        code = ctypes.CDLL(None).mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), found)
        assert code == 0
    return sum(flag & 1 for flag in found) / pages


def evict(path: Path) -> None:
    """Have the system drop a file's pages from memory."""
    gc.collect()  # a page that is mapped stays
    with path.open("rb") as opened:
        for _ in range(100):
            os.fdatasync(opened.fileno())  # os.fsync does not wait in tests
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if in_memory(path) <= 0.01:
                return
            time.sleep(0.05)  # the system may hold pages for a moment after their last use
    pytest.skip("the file system retains pages in memory")


def matches(index: Index, side: float) -> Counter[tuple[str, int]]:
    chance = np.random.default_rng(5)
    x, y = chance.uniform(0, side, (2, POINTS))
    block = PointBlock(x, y, np.zeros(POINTS, np.int64), pa.array(range(POINTS)), {})
    found: Counter[tuple[str, int]] = Counter()
    for pairs in index.match(block):
        ids = pairs.segment.ids_at(pairs.slots).to_pylist()
        found.update(zip(ids, pairs.rows.tolist(), strict=True))
    return found


def test_matching_a_quarter_of_space_reads_a_quarter_of_the_file(file: Path) -> None:
    expected = matches(Index(SPACE, [(unpack(map_arrays(file)), {})]), 50.0)
    assert expected.total() > POINTS
    evict(file)
    index = Index(SPACE, [(unpack(map_arrays(file, sparse=True)), {})])
    assert in_memory(file) < 0.02
    prefetch(index, index.segments[0], QUARTER)
    deadline = time.monotonic() + 10.0
    while in_memory(file) < 0.15:  # the system reads beside this process
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert matches(index, 50.0) == expected
    assert in_memory(file) < 0.35
    matches(index, 100.0)
    assert in_memory(file) > 0.6


def test_a_host_with_copies_reads_its_quarter_from_them(file: Path, tmp_path: Path) -> None:
    expected = matches(Index(SPACE, [(unpack(map_arrays(file)), {})]), 50.0)
    evict(file)
    copies = Copies(str(tmp_path), 1 << 30)
    index = Index(SPACE, [(unpack(map_arrays(file, sparse=True, copies=copies)), {})])
    prefetch(index, index.segments[0], QUARTER)
    [copy] = copies.used().values()
    size = file.stat().st_size
    # Blocks are larger than pages: each array has two at the border of the quarter, or more.
    assert 512 * copy.st_blocks < 0.25 * size + 60 * BLOCK < 0.9 * size
    before = in_memory(file)
    assert matches(index, 50.0) == expected
    # The search for lists reads the cells from the file itself; nothing else does.
    assert in_memory(file) < before + 0.02 < 0.1, (before, in_memory(file))


def test_preloading_reads_the_lists_that_a_match_needs(file: Path) -> None:
    evict(file)
    index = Index(SPACE, [(unpack(map_arrays(file, sparse=True)), {})])
    size = preload(index, QUARTER)
    loaded = in_memory(file)
    assert 0 < size < file.stat().st_size * loaded
    matches(index, 49.0)
    # Identifiers and the cells between the lists are read by the match.
    assert in_memory(file) < loaded + 0.1


def test_the_queries_of_a_partition_are_found_in_its_part_of_the_file(file: Path) -> None:
    segment = unpack(map_arrays(file))
    expected = np.flatnonzero((segment.boxes[:, 0] < 50.0) & (segment.boxes[:, 1] < 50.0))
    del segment
    evict(file)
    refs = (SegmentRef(file.name, None, BOXES),)
    quarter = Partition(1, 0, 0, 5, 5, (0,))
    slots = slots_in(Files(str(file.parent)), WorkerCache(), refs, quarter, SPACE)[file.name]
    assert np.array_equal(slots, expected)
    assert in_memory(file) < 0.35


def mapped(path: Path) -> float:
    """Return the share of a file that this process has mapped pages of."""
    found = (m.rss for m in psutil.Process().memory_maps() if m.path == str(path))
    return sum(found) / path.stat().st_size


def test_pages_of_cells_that_left_are_given_back(file: Path) -> None:
    gc.collect()
    index = Index(SPACE, [(unpack(map_arrays(file, sparse=True)), {})])
    before = mapped(file)
    expected = matches(index, 100.0)
    assert mapped(file) > before + 0.5
    release(index)
    assert mapped(file) <= before + 0.01
    matches(index, 50.0)
    assert mapped(file) < before + 0.35
    assert matches(index, 100.0) == expected


def test_a_machine_that_loses_cells_gives_its_pages_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is divided for batch 0, replicated for 1, and divided again from 2 on."""
    released: list[int] = []
    build = matching.MatchingTask.build

    def noted(task: matching.MatchingTask, machine: int, cache: WorkerCache) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(matching, "release", lambda index: released.append(task.number))
            return build(task, machine, cache)

    monkeypatch.setattr(matching.MatchingTask, "build", noted)
    rooms = iter([1 << 40] * 3 + [0] * 100)  # of one batch
    executor = InProcessExecutor(names=("0", "1"), room=lambda name: next(rooms))
    settings = {"engine.strategy": "global", "engine.machines": 3}
    scenario = Scenario(tmp_path, settings, executor=lambda: executor)
    scenario.live()
    assert released[:3] == [2, 2, 2]
    scenario.check()


@pytest.mark.parametrize("seed", range(10))
def test_machines_that_lose_cells_are_found(seed: int) -> None:
    chance = random.Random(seed)
    plans = []
    for epoch in range(2):
        layout = random_layout(chance, 10, 10, 4)
        parts = [
            Partition(10 * epoch + n, *s, tuple(chance.sample(range(4), chance.choice([1, 1, 2]))))
            for n, s in enumerate(layout)
        ]
        plans.append(SpatialRouting(Plan(epoch, 10, 10, 4, tuple(parts), 100), SPACE))
    before, after = plans

    def cells(routing: SpatialRouting, machine: int) -> set[tuple[int, int]]:
        return {
            (column, row)
            for p in routing.plan.of_machine(machine)
            for column in range(p.column0, p.column1)
            for row in range(p.row0, p.row1)
        }

    expected = {m for m in range(4) if cells(before, m) - cells(after, m)}
    assert after.departures(before) == expected
    assert after.departures(after) == frozenset()


@pytest.mark.parametrize("strategy", ["uniform", "replicated"])
def test_each_machine_requests_its_part_of_a_segment_once(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[tuple[float, ...], ...]] = []

    def noted(index: Index, segment: Any, bounds: Any) -> None:
        requested.append(tuple(map(tuple, bounds.tolist())))
        prefetch(index, segment, bounds)

    monkeypatch.setattr(matching, "prefetch", noted)
    scenario = Scenario(tmp_path, {"engine.strategy": strategy})
    scenario.live()
    scenario.check()
    # The driver that checks is a second process, with a cache of its own and no batches.
    if strategy == "replicated":
        assert requested == []
    else:
        assert len(requested) == len(set(requested)) == 3  # machines; there is one segment
