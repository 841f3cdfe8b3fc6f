"""Matching and a dataflow in one run: a batch leaves the results of both, or of neither."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import Box, Circle, Dataflow, Query, RunConfig
from roost.dataflow.operators import SourceKind
from roost.dataflow.schema import StreamSchema, resolve
from roost.errors import DataflowError
from roost.model.choices import LayoutName
from roost.model.settings import with_settings
from roost.testing import InProcessPipeline
from stage_scenario import ROWS, STEPS, Killed, Scenario, random_points

WINDOW = 40  # of event time, which is the number of the point


def flow() -> Dataflow:
    """Return a dataflow that passes matches on, counts them, and pairs those of a point."""
    made = Dataflow("matches again")
    found, points = made.matches(), made.points()
    found.sink("seen")
    found.aggregate({"n": "count"}, by="query_id", size=WINDOW, name="counts").sink("windows")
    condition = "left.id = right.id and left.query_id < right.query_id"
    found.join(found, condition, size=1, name="met").sink("both")
    zones = points.aggregate({"n": "count"}, by="zone", window="forever", advance=WINDOW)
    zones.sink("zones")
    return made


class MatchedFlow(Scenario):
    """A run of matching and a dataflow, instead of the toy stages."""

    layout = LayoutName.AUTO

    def live(self) -> None:
        """Run from where the state is, to the end or the driver's death."""
        config = with_settings(
            self.config(), {"dataflow.machines": 3, "dataflow.layout": self.layout}
        )
        pipeline = InProcessPipeline(
            config, executor=self.executor(), on_step=self.on_step, flow=flow(), seed=1
        )
        with pipeline:
            pipeline.log.append(self.requests(), tag="before")
            pipeline.run()

    def rows(self, kind: str, *names: str) -> Counter[tuple[Any, ...]]:
        """Return the published rows of a kind of result."""
        tables = [pq.ParquetFile(path).read() for path in self.published(kind)]
        rows = [row for table in tables for row in table.to_pylist()]
        return Counter(tuple(row[name] for name in names) for row in rows)

    def check_both_or_neither(self) -> None:
        matches = self.rows("matches", "batch_id", "query_id", "point_id")
        assert matches == self.rows("seen", "batch_id", "query_id", "id")

    def check_flow(self) -> None:
        """Compare the dataflow with the matches by brute force."""
        matches = self.expected_matches()
        assert self.published_matches() == matches and len(matches) > 100
        self.check_both_or_neither()
        newest = max(point for _, point in matches)
        windows = Counter((query, point // WINDOW * WINDOW) for query, point in matches)
        closed = {(*one, n) for one, n in windows.items() if one[1] + WINDOW <= newest}
        assert self.rows("windows", "query_id", "event_time", "n") == Counter(closed) and closed
        queries: dict[int, list[int]] = defaultdict(list)
        for query, point in matches:
            queries[point].append(query)
        pairs = [
            (*pair, point)
            for point, mine in queries.items()
            for pair in itertools.combinations(sorted(mine), 2)
        ]
        found = self.rows("both", "left_query_id", "right_query_id", "left_id")
        assert found == Counter(pairs) and len(pairs) > 20


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_that_dies_at_any_step_leaves_both_or_neither(step: str, tmp_path: Path) -> None:
    """Another driver repeats the batch, unless it is committed, and dies in the next one."""
    run = MatchedFlow(tmp_path, points=random_points(1, 3 * ROWS))
    deaths = itertools.count(1)
    run.layout = list(LayoutName)[STEPS.index(step) % len(LayoutName)]

    def on_step(now: str, number: int) -> None:
        if now == step and number in (0, 1):
            next(deaths)
            raise Killed

    run.on_step = on_step
    for _ in range(2):
        with pytest.raises(Killed):
            run.live()
        run.check_both_or_neither()
    assert next(deaths) == 3
    run.resume()
    run.check_flow()


def test_a_batch_that_publishes_only_its_matches_is_noticed(tmp_path: Path) -> None:
    """Inject the fault that the tests above are to find."""
    run = MatchedFlow(tmp_path, points=random_points(1, ROWS))
    run.resume()
    run.published("seen")[0].unlink()
    with pytest.raises(AssertionError):
        run.check_both_or_neither()


def test_standing_queries_have_no_matches(tmp_path: Path) -> None:
    """They have results of the window instead, also if others match in the same batch."""
    flow = Dataflow("matches")
    flow.matches().sink("seen")
    config = RunConfig(
        points={"path": "generate:rows=500,seed=3"},
        window={"kind": "count", "length": 100},
        engine={"batch_rows": 200},
        out={"dir": tmp_path},
    )
    everywhere = Box(-180, -90, 180, 90)
    with InProcessPipeline(config, flow=flow) as pipeline:
        pipeline.request(
            Query("plain", everywhere),
            Query("number", everywhere, aggregate="count"),
            Query("near", Circle(0, 0, 10_000), nearest=2),
        )
        report = pipeline.run()
    seen = pq.read_table(tmp_path / "seen")["query_id"].to_pylist()
    assert Counter(seen) == {"plain": 500} and report["matches"] == 500
    assert report["dataflow"]["sources"] == {"matches": 500}


@pytest.mark.parametrize("name", ["points", "matches"])
def test_records_beside_points_need_a_name_of_their_own(name: str, tmp_path: Path) -> None:
    """They shared names with the points of the run: of files, and of sources that have ended."""
    run = MatchedFlow(tmp_path)
    made = Dataflow("records")
    made.source(name, {"zone": "string"}, path="records.parquet").sink("copied")
    with (
        InProcessPipeline(run.config(), flow=made) as pipeline,
        pytest.raises(DataflowError, match=f"'{name}': a run with points has a source of this"),
    ):
        pipeline.run()
    assert not (tmp_path / "out").exists()


def test_points_of_the_run_are_not_records_of_the_same_name() -> None:
    made = Dataflow("records")
    made.source("points", {"zone": "string"}, path="records.parquet").sink("copied")
    made.points().sink("seen")
    own = {SourceKind.POINTS: StreamSchema(pa.schema({"t": pa.int64()}), "t")}
    with pytest.raises(DataflowError, match="duplicate name"):
        resolve(made.name, made.operators, own)
