"""Reading reports: rows, rejected rows, and the range and median of event times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from roost.model.space import Coordinates, Rect, Space
from roost.stages.contract import Report
from roost.stages.decode import PointSchema
from roost.stages.reading import TIMES_SAMPLED, ReadingTask, ReadTimes, _median
from roost.storage.cache import WorkerCache
from roost.storage.files import Files

SPACE = Space(Rect(0.0, 0.0, 1.0, 1.0), 8, 8, Coordinates.PLANE)
SCHEMA = PointSchema("x", "y", "time", "id", pa.int64(), pa.int64(), pa.schema([]))


def read(folder: Path, *blocks: NDArray[np.int64], x: float = 0.5) -> Report:
    work = ReadingTask("b-", 0, SCHEMA, SPACE, (), None, None, Files(str(folder))).build(
        0, WorkerCache()
    )
    for times in blocks:
        column = np.full(times.size, x)
        list(
            work.process("source", pa.table({"id": times, "x": column, "y": column, "time": times}))
        )
    return work.report()


def test_the_median_of_small_blocks_is_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    blocks = [rng.integers(-1000, 1000, TIMES_SAMPLED) for _ in range(3)]
    times = np.concatenate(blocks)
    report = read(tmp_path, *blocks)
    middle = int(np.median(times))
    assert report.value.times == ReadTimes(int(times.min()), middle, int(times.max()))
    assert report.counts == {"rows": times.size, "dead": 0}


def test_the_median_of_a_batch_weighs_readers_by_their_points(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    far = np.array([10**12])
    for sizes in ((1, 3, 90), (400, 10, 10), (5000, 300, 1)):
        shares = [rng.integers(1000 * k, 1000 * k + 1000, size) for k, size in enumerate(sizes)]
        reports = [read(tmp_path, share) for share in [*shares, far]]
        times = np.sort(np.concatenate([*shares, far]))
        found = _median(reports)
        assert found is not None
        # Readers report at most 128 times each.
        rank = np.searchsorted(times, found, side="right") / times.size
        assert 0.49 <= rank <= 0.52, (sizes, rank)
    assert _median([read(tmp_path)]) is None


@pytest.mark.parametrize("ordered", [True, False])
def test_the_median_of_a_large_block_is_that_of_a_sample(tmp_path: Path, ordered: bool) -> None:
    """Evenly spaced rows: off by at most one step in an ordered block, by chance in another."""
    size = 200 * TIMES_SAMPLED + 7
    times = np.arange(size)
    if not ordered:
        times = np.random.default_rng(2).permutation(times)
    found = read(tmp_path, times).value.times
    assert (found.oldest, found.newest) == (0, size - 1)
    assert abs(found.median - size / 2) < size * (1 / TIMES_SAMPLED if ordered else 0.1)


def test_a_batch_without_valid_points_has_no_times(tmp_path: Path) -> None:
    report = read(tmp_path, np.arange(3), x=np.nan)
    assert report.value.times == ReadTimes(None, None, None)
    assert len(report.value.dead) == 1
    assert report.counts == {"rows": 3, "dead": 3}
