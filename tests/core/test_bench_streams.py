"""The hooks with which benchmarks time the steps of a batch, on a pipeline without Spark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from roost.bench.cases import Case, CaseSpec, load_pickups, make_case
from roost.bench.latency import Steady, latencies
from roost.bench.streams import BatchTimes, Repeated, pipeline_config
from roost.model.settings import RunConfig
from roost.testing import InProcessPipeline

SPEC = CaseSpec("tiny", "boxes", 200, points=500, write_points=10, warm_points=10)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(SPEC, load_pickups(None), tmp_path / "case", None)


def config(case: Case, out: Path) -> RunConfig:
    settings = {"engine.machines": 2, "engine.batch_rows": 400, "queries.path": case.queries_path}
    return pipeline_config(case.points_path, case.bounds, out, settings)


def test_latency_runs_from_arrival_until_the_files_have_their_names(
    case: Case, tmp_path: Path
) -> None:
    source = Steady(case.points_path, 2_000, 0.6)
    published = []

    class Watched(BatchTimes):
        def on_step(self, step: str, batch_id: int) -> None:
            super().on_step(step, batch_id)
            files = list((tmp_path / "out" / "matches").glob("*.parquet"))
            published.append((step, sum(pq.read_metadata(file).num_rows for file in files)))

    times = Watched()
    with InProcessPipeline(
        config(case, tmp_path / "out"),
        source=source,
        on_step=times.on_step,
        on_batch=times.on_batch,
    ) as pipeline:
        report = pipeline.run()
    by_batch = latencies(source, times)
    assert sum(part.size for part in by_batch) == source.total() == report["points"] == 1_200
    before, after = (
        [rows for step, rows in published if step == name] for name in ("publish", "cleanup")
    )
    assert after[-1] == report["matches"] > 0
    assert before == [0, *after[:-1]], "files have their names between publish and cleanup"
    first = 0
    for part, steps in zip(by_batch, times.steps, strict=True):
        arrived = source.arrivals(first, first + part.size)
        assert part.min() > 0
        assert np.allclose(part, steps["cleanup"] - arrived)
        first += part.size


def test_each_batch_has_the_times_that_benchmarks_read(case: Case, tmp_path: Path) -> None:
    ticks = iter(range(10_000))
    times = BatchTimes(lambda: float(next(ticks)))
    with InProcessPipeline(
        config(case, tmp_path / "out"),
        source=Repeated(case.points_path, 2),
        on_step=times.on_step,
        on_batch=times.on_batch,
    ) as pipeline:
        pipeline.run()
    assert [commit.batch_id for commit in times.commits] == [0, 1, 2]
    assert times.between("apply", "run") == [1.0] * 3, "the steps follow each other"
    assert times.seconds() == times.steps[-1]["end"] == 3 * len(times.steps[0]) - 1
