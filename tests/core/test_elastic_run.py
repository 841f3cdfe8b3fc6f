"""The elastic manager in a run: measured load, decisions, layouts that follow, and restarts."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.table import Table

from roost import RunConfig
from roost.cli import build_parser, run_config
from roost.commands.inspect import inspect_state
from roost.commands.terminal import _contents
from roost.engine import console
from roost.errors import ConfigError
from roost.model.elastic import ElasticRules
from roost.model.settings import ElasticSettings, with_settings
from roost.runtime import records
from roost.runtime.group_rounds import GROUP_ROUNDS, GroupRounds
from roost.runtime.group_size import GroupSize
from roost.runtime.report import build_report
from roost.stages.contract import Report
from roost.stages.matching import MatchingTask
from roost.stages.routing import PLANS
from roost.stages.sources import FileSource, parse_generator
from roost.storage.cache import WorkerCache
from roost.storage.store import Store
from roost.testing import FakeAllocator, InProcessExecutor, InProcessPipeline, brute_force
from stage_scenario import STEPS, Killed

COST_S = 0.02  # of a row, on one slot
SIDE = 8.0
SIZES = ("Provision", "Release")
LOW, HIGH = 20, 100  # rows per second: loads of 0.4 and 2 executors
QUERIES = [
    {"query_id": k, "x0": k % 6, "y0": k // 6, "x1": k % 6 + 2.5, "y1": k // 6 + 1.5}
    for k in range(24)
]


def timed(report: Report) -> Report:
    return replace(report, seconds=COST_S * report.rows_in * (report.stage == "matching"))


@dataclass
class ElasticRun:
    """A paced stream on virtual executors; the clock moves by a second with every batch."""

    folder: Path
    seconds: Sequence[int] = (10, 30, 24)  # of low, high and low rate
    arrival_s: float = 2.0
    elastic: dict[str, Any] = field(default_factory=dict)
    strategy: str = "global"
    balance_s: float = 2.0
    moved_at: float = float("inf")  # from when on all points are in a part of the space
    part: float = 0.5  # of its width
    kills: list[tuple[str, int]] = field(default_factory=list)
    now: float = 1_000.0
    allocator: FakeAllocator = field(init=False)
    new_cluster: bool = True  # executors end with their driver
    died: dict[int, int] = field(default_factory=dict)  # executors by batch

    def __post_init__(self) -> None:
        rates = [LOW] * self.seconds[0] + [HIGH] * self.seconds[1] + [LOW] * self.seconds[2]
        times = np.repeat(np.arange(len(rates)), rates)
        rng = np.random.default_rng(3)
        xy = rng.uniform(0, SIDE, (times.size, 2))
        xy[times >= self.moved_at] *= self.part
        self.points = pa.table(
            {"id": np.arange(times.size), "x": xy[:, 0], "y": xy[:, 1], "event_time": times}
        )
        self.folder.mkdir(exist_ok=True)
        pq.write_table(self.points, self.folder / "points.parquet")
        self._make_allocator()

    def _make_allocator(self) -> None:
        self.allocator = FakeAllocator(self.clock, 1, self.arrival_s, 0.5)

    @property
    def state(self) -> Path:
        return self.folder / "out" / "state"

    def clock(self) -> float:
        self.now += 0.001  # so that a driver that waits for rows finds some
        return self.now

    def config(self) -> RunConfig:
        return RunConfig(
            points={"path": str(self.folder / "points.parquet"), "speed": 1.0},
            space={"bounds": (0, 0, SIDE, SIDE), "grid": (8, 8), "coordinates": "plane"},
            engine={"strategy": self.strategy, "available_now": True},
            queries={"id_type": "int"},
            balance={"round": self.balance_s},
            elastic={"max": 6, "round": 3.0, **self.elastic},
            out={"dir": self.folder / "out"},
        )

    def drive(self) -> None:
        while True:
            try:
                self._live()
                return
            except Killed:
                if self.new_cluster:
                    self._make_allocator()

    def _live(self) -> None:
        def on_step(step: str, number: int) -> None:
            if (step, number) in self.kills:
                self.kills.remove((step, number))
                raise Killed
            if step == "intent":
                self.now += 1.0
            for name in [*self.allocator.present][: self.died.pop(number, 0)]:
                del self.allocator.present[name]

        executor = InProcessExecutor(measure=timed)
        executor.allocator = self.allocator
        pipeline = InProcessPipeline(
            self.config(),
            executor=executor,
            clock=self.clock,
            wall_clock=self.clock,
            on_step=on_step,
        )
        requests = [{"op": "register", "user_id": "ann", **query} for query in QUERIES]
        with pipeline:
            pipeline.log.append(pa.Table.from_pylist(requests), tag="before")
            pipeline.run()

    def rows(self) -> list[dict[str, Any]]:
        with closing(Store(self.state)) as store:
            return [row for _, row in store.items(GROUP_ROUNDS)]

    def machines(self) -> list[int]:
        """Return the machines of each batch, which its intent determines."""
        with closing(Store(self.state)) as store:
            epochs = [commit.figures["epoch"] for commit in records.commits(store)]
            return [store.get(PLANS, epoch)["machines"] for epoch in epochs]

    def check(self) -> None:
        """Check that matches equal brute force, each once."""
        found = []
        for path in (self.folder / "out" / "matches").glob("*.parquet"):
            table = pq.ParquetFile(path).read()
            columns = table["query_id"].to_pylist(), table["point_id"].to_pylist()
            found += list(zip(*columns, strict=True))
        rows = [{**row, "time": row["event_time"]} for row in self.points.to_pylist()]
        assert sorted(found) == brute_force(rows, QUERIES, lonlat=False)


@pytest.fixture(autouse=True, scope="module")
def no_idling() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roost.runtime.pipeline.IDLE_S", 0.0)
        yield


@pytest.mark.parametrize("strategy", ["global", "swarm", "replicated"])
def test_executors_follow_the_load(strategy: str, tmp_path: Path) -> None:
    run = ElasticRun(tmp_path, strategy=strategy)
    run.drive()
    run.check()
    decided = [row for row in run.rows() if row["decision"] in SIZES]
    assert [row["decision"] for row in decided] == ["Provision", "Release"]
    up, down = decided
    assert up["planned"] == 4 and up["load"] == pytest.approx(2.0, rel=0.1)
    assert "above 0.9 for 2 rounds" in up["reason"]
    assert down["planned"] == 1 and down["load"] == pytest.approx(0.4, rel=0.15)
    sizes = run.machines()
    assert sizes[0] == 1 and max(sizes) == 4 and sizes[-1] == 1
    assert len(run.allocator.present) == 1
    # Executors arrive before the layout counts them, and leave after it.
    requests = [total for call, total in run.allocator.calls if call == "request"]
    assert requests[:2] == [1, 4] and requests[-1] == 1
    (left,) = (names for call, names in run.allocator.calls if call == "decommission")
    assert sorted(left) == ["1", "2", "3"]


@dataclass
class CappedRun(ElasticRun):
    def config(self) -> RunConfig:
        return with_settings(super().config(), {"engine.batch_rows": 60})


def test_the_load_is_that_of_rows_that_arrived(tmp_path: Path) -> None:
    """A batch reads 60 of the 100 rows that arrive meanwhile: 1.2 of 2 executors."""
    run = CappedRun(tmp_path)
    run.drive()
    run.check()
    up = next(row for row in run.rows() if row["decision"] in SIZES)
    assert up["decision"] == "Provision" and up["planned"] == 4
    assert up["load"] == pytest.approx(2.0, rel=0.1) and up["backlog"] > 0


@pytest.mark.parametrize("strategy", ["global", "swarm"])
def test_a_plan_that_gets_uneven_is_balanced(strategy: str, tmp_path: Path) -> None:
    """Utilisation is 0.67 throughout, but one machine is busy all the time for a while."""
    run = ElasticRun(
        tmp_path, (0, 48, 0), elastic={"min": 3}, strategy=strategy, balance_s=6.0, moved_at=14.0
    )
    run.drive()
    run.check()
    rows = run.rows()
    first = next(row for row in rows if row["decision"] == "Balance")
    assert first["batch_id"] > 14
    assert {row["planned"] for row in rows} == {3} and set(run.machines()) == {3}
    before, after = (
        re.search(r"deviation of the plan (\S+),", r["reason"]) for r in (first, rows[-1])
    )
    assert before is not None and float(before[1]) > 0.2
    assert after is None or float(after[1]) < 0.7 * float(before[1])


def test_a_cell_that_cannot_be_divided_is_named(tmp_path: Path) -> None:
    """One cell has all points: no strategy of one owner for each partition can divide it."""
    run = ElasticRun(
        tmp_path, (0, 48, 0), elastic={"min": 3}, strategy="swarm", moved_at=14.0, part=1 / 8
    )
    run.drive()
    run.check()
    reasons = [row["reason"] for row in run.rows()]
    assert "cell (column 0, row 0) cannot be divided" in reasons[-1], reasons
    assert {row["planned"] for row in run.rows()} == {3}


def test_layouts_change_between_arrival_and_departure(tmp_path: Path) -> None:
    """In no batch are there more machines than executors that are present and warm."""
    run, seen = ElasticRun(tmp_path, arrival_s=4.0), []
    live = GroupRounds.after_batch

    def after_batch(self: GroupRounds, *arguments: Any) -> None:
        seen.append((run.machines()[-1], sum(run.allocator.executors().values())))
        live(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupRounds, "after_batch", after_batch)
        run.drive()
    assert max(size for size, _ in seen) == 4
    assert all(size <= max(warm, 1) for size, warm in seen), seen


def test_a_new_executor_maps_the_queries_as_its_first_task_does(tmp_path: Path) -> None:
    tasks: list[MatchingTask] = []

    def noting(self: InProcessExecutor, inputs: Any, chain: Any, given: Any, where: Any) -> Any:
        tasks.append(given["matching"])
        return live(self, inputs, chain, given, where)

    live = InProcessExecutor.run
    run, cache = ElasticRun(tmp_path, seconds=(3, 0, 0)), WorkerCache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessExecutor, "run", noting)
        run.drive()
    (prepare,) = pickle.loads(pickle.dumps(run.allocator.preparations()))
    prepare(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roost.stages.matching.open_index", lambda *given, **named: 1 / 0)
        assert sum(segment.size for segment in tasks[-1].index(cache).segments) == len(QUERIES)


def test_executors_and_hours_are_reported(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path, elastic={"spares": 1})
    run.drive()
    with closing(Store(run.state)) as store:
        found = build_report(store)["executors"]
    assert found["planned"] == 1 and found["observed"] == 2  # with a spare
    assert found["decisions"]["Provision"] == found["decisions"]["Release"] == 1
    assert [change["decision"] for change in found["changes"]] == ["Provision", "Release"]
    steps = found["over_time"]
    assert max(count for _, count in steps) == 5
    whole = sum(run.seconds) / 3600
    assert 2 * whole < found["hours"] < 5 * whole
    errors = run.rows()[-1]["elastic"]["forecast"]["errors"]
    mine, constant = (sum(column) for column in zip(*errors, strict=True))
    assert constant > 0.0 and found["forecast_error"] == pytest.approx(mine / constant)
    assert inspect_state(run.state).executors == found
    printed = list(_contents(inspect_state(run.state)))
    columns = [table.columns for table in printed if isinstance(table, Table)]
    (present,) = (c[1].cells for c in columns if c[0].header == "since (UTC)")
    assert list(present) == ["2", "5", "2"]
    lines = [line for line in printed if isinstance(line, str)]
    assert f"last round {found['reason']}" in lines
    assert any(
        re.fullmatch(r"executors  .* observed, [0-9.]+ executor hours", one) for one in lines
    )


def test_the_console_shows_what_executors_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ElasticRun(tmp_path)

    def on_step(step: str, number: int) -> None:
        run.now += step == "intent"

    def pipeline(config: RunConfig, **more: Any) -> InProcessPipeline:
        executor = InProcessExecutor(measure=timed)
        executor.allocator = run.allocator
        clocks = {"clock": run.clock, "wall_clock": run.clock}
        return InProcessPipeline(config, executor=executor, on_step=on_step, **clocks, **more)

    monkeypatch.setattr(console, "Pipeline", pipeline)
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 0.0)
    assert console.run_with_progress(run.config()) == 0
    lines = capsys.readouterr().out.splitlines()
    decisions = [line for line in lines if line.startswith("executors: ")]
    rows = [row for row in run.rows() if row["decision"] in SIZES]
    expected = [f"executors: {r['decision']} {r['planned']}, {r['reason']}" for r in rows]
    assert decisions == expected and len(rows) == 2
    counts = [line[line.index("dead") + 6 :] for line in lines if line.startswith("batch ")]
    assert {*counts} == {
        "",
        *(f"{n} of {m} executors" for n, m in ((1, 1), (1, 4), (4, 4), (4, 1))),
    }
    assert "executor hours, 1 Provision, 1 Release" in "\n".join(lines)


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Return the batches with decisions about the size, of a run without faults."""
    run = ElasticRun(tmp_path_factory.mktemp("whole"))
    run.drive()
    return [row["batch_id"] for row in run.rows() if row["decision"] in SIZES]


SURVIVING = [(step, False) for step in ("commit", "round", "end")]  # executors of an old driver


@pytest.mark.parametrize(("step", "new_cluster"), [*((s, True) for s in STEPS), *SURVIVING])
def test_a_driver_that_dies_neither_loses_nor_keeps_an_executor(
    step: str, new_cluster: bool, decided: list[int], tmp_path: Path
) -> None:
    """The driver dies around both decisions: recorded and not carried out, and in between."""
    assert len(decided) == 2
    kills = [(step, batch + k) for batch in decided for k in (0, 1, 3)]
    run = ElasticRun(tmp_path, kills=list(kills), new_cluster=new_cluster)
    run.drive()
    assert len(run.kills) < len(kills)
    run.check()
    # What was recorded is carried out, and not decided again.
    found = [row["decision"] for row in run.rows() if row["decision"] in SIZES]
    assert found == ["Provision", "Release"]
    assert max(row["observed"] for row in run.rows()) == 4
    assert len(run.allocator.present) == 1 == run.rows()[-1]["planned"]
    assert run.machines()[-1] == 1


@pytest.mark.sweep(range(3), 2, 100)
def test_random_faults(seed: int, tmp_path: Path) -> None:
    """Drivers and executors die, executors arrive late or not at all; limits always hold."""
    chance = random.Random(seed)
    run = ElasticRun(tmp_path, arrival_s=chance.choice([0.0, 3.0, 20.0, 1e9]))
    run.strategy = chance.choice(["global", "swarm", "replicated"])
    run.elastic = {"spares": chance.choice([0, 2]), "min": 1}
    run.new_cluster = chance.random() < 0.5
    kills = {(chance.choice(STEPS), chance.randrange(50)) for _ in range(5)}
    run.kills = sorted(kills, key=lambda kill: kill[1])
    run.died = {chance.randrange(15, 35): 1, chance.randrange(35, 55): 2}
    run.drive()
    run.check()
    for row in run.rows():
        assert 1 <= row["planned"] <= 6 and row["verdict"] == "accepted"
    totals = [total for call, total in run.allocator.calls if call == "request"]
    assert all(1 <= total <= 6 for total in totals)


def test_a_layout_counts_warm_executors_and_they_leave_after_it() -> None:
    now = 0.0
    allocator = FakeAllocator(lambda: now, arrival_s=2.0, warm_s=3.0)
    size = GroupSize(allocator, ElasticRules(max=3), {}, now)

    def followed(clock: float, *, moved: bool = True) -> tuple[int, int]:
        nonlocal now
        now = clock
        size.follow(now, moved=moved)
        return size.layout, len(allocator.present)

    assert followed(5.0) == (1, 1)
    size.planned = 3
    assert followed(10.0) == (1, 1)  # requested
    assert [followed(clock) for clock in (13.0, 14.9)] == [(1, 3)] * 2, "not warm yet"
    assert followed(15.1) == (3, 3) and size.settled
    # A driver that starts while they arrive continues with the layout before.
    again = GroupSize(
        FakeAllocator(lambda: now, arrival_s=2.0), size.rules, {"planned": 3, "layout": 1}, now
    )
    assert (again.layout, again.planned, again.settled) == (1, 3, False)
    size.planned = 1
    # The next batch has a smaller layout, and some layouts may take longer.
    assert followed(20.0) == (1, 3) == followed(21.0, moved=False)
    assert followed(22.0) == (1, 1)


@pytest.mark.parametrize(
    ("by_started_hour", "clock", "stay"),
    [
        (False, 3_000.0, ["0"]),
        (True, 3_000.0, ["2"]),  # 600, 1,200 and 1,800 s of their hours are left
        (True, 3_700.0, ["0"]),  # which has begun another one
        (True, 4_300.0, ["1"]),
    ],
)
def test_executors_near_the_end_of_a_paid_hour_leave_first(
    by_started_hour: bool, clock: float, stay: list[str]
) -> None:
    now = 0.0
    allocator = FakeAllocator(lambda: now)
    rules = ElasticRules(max=3, by_started_hour=by_started_hour)
    size = GroupSize(allocator, rules, {}, now)
    for planned in (1, 2, 3):
        now, size.planned = 600.0 * (planned - 1), planned
        size.follow(now, moved=True)
        size.follow(now, moved=True)  # it has arrived
    now, size.planned = clock, 1
    for _ in range(2):
        size.follow(now, moved=True)
    assert list(allocator.present) == stay


def test_executors_that_do_not_arrive_are_given_up(tmp_path: Path) -> None:
    """The run continues as before, and asks again later."""
    run = ElasticRun(tmp_path, seconds=(10, 230, 0), arrival_s=1e9)
    for _ in range(1):
        run.allocator.present["0"] = 0.0
    run.drive()
    run.check()
    decisions = [row["decision"] for row in run.rows() if row["decision"] != "NoChange"]
    assert decisions[:2] == ["Provision", "Cannot"] and decisions.count("Provision") >= 2
    (reason, *_) = [row["reason"] for row in run.rows() if row["decision"] == "Cannot"]
    assert "3 of 4 executors did not arrive" in reason
    assert set(run.machines()) == {1}


def test_a_source_without_a_pace_needs_batch_seconds(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path, seconds=(10, 10, 10))
    settings = run.config()
    config = RunConfig(
        points={"path": settings.points.path},
        space={"bounds": (0, 0, SIDE, SIDE), "coordinates": "plane"},
        engine={"available_now": True, "strategy": "replicated", "batch_rows": 20},
        elastic={"max": 3, "round": 5.0},
        out={"dir": tmp_path / "out"},
    )
    executor = InProcessExecutor(measure=timed)
    executor.allocator = run.allocator

    def on_step(step: str, number: int) -> None:
        run.now += step == "intent"

    with InProcessPipeline(config, executor=executor, wall_clock=run.clock, on_step=on_step) as p:
        p.run()
    rows = run.rows()
    assert rows[0]["decision"] == "Cannot" and "set elastic.batch_seconds" in rows[0]["reason"]
    assert {row["decision"] for row in rows[1:]} == {"NoChange"}


def test_a_fixed_cluster_stays_fixed(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path, seconds=(2, 1, 1))
    clocks = {"clock": run.clock, "wall_clock": run.clock}
    with (
        pytest.warns(UserWarning, match="fixed number of executors: elastic.max has no effect"),
        InProcessPipeline(run.config(), executor=InProcessExecutor(3), **clocks) as pipeline,
    ):
        report = pipeline.run()
    assert report["executors"] is None and set(run.machines()) == {3}


@pytest.mark.parametrize(("least", "most"), [(1, 6), (3, 6)])
def test_with_nothing_to_do_plans_and_results_are_those_of_a_fixed_run(
    least: int, most: int, tmp_path: Path
) -> None:
    """The load fits into one executor; the plan of several machines changes when points move."""
    given: Any = {"seconds": (40, 0, 0), "moved_at": 14.0}
    run = ElasticRun(tmp_path / "elastic", elastic={"min": least, "max": most}, **given)
    run.drive()
    fixed = FixedRun(tmp_path / "fixed", machines=least, **given)
    fixed.drive()
    plans = []
    for one in (run, fixed):
        one.check()
        with closing(Store(one.state)) as store:
            plans.append([plan for _, plan in store.items(PLANS)])
    assert plans[0] == plans[1]
    assert (len(plans[0]) > 1) == (least > 1)


@dataclass
class FixedRun(ElasticRun):
    machines: int = 1

    def config(self) -> RunConfig:
        config = replace(super().config(), elastic=ElasticSettings())
        return with_settings(config, {"engine.machines": self.machines})


# --------------------------------------------------------------------------- settings, sources


REFUSED = {
    "elastic.lower": ({"max": 3, "lower": 0.6}, "below elastic.target"),
    "elastic.target": ({"max": 3, "target": 0.9}, "below elastic.upper"),
    "elastic.min": ({"max": 3, "min": 4}, "at most elastic.max, which is 3"),
    "elastic.max": ({"max": 0}, "from 1 up"),
    "elastic.policy": ({"max": 3, "policy": "best"}, "load_aware or individual or spark"),
    "elastic.spares": ({"spares": 1}, "elastic.max, too"),
    "elastic.placement": ({"placement": "static"}, "got 'static', expected elastic.max, too"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_contradict_each_other_are_refused(key: str) -> None:
    settings, text = REFUSED[key]
    with pytest.raises(ConfigError, match=text) as error:
        RunConfig(elastic=settings)
    assert str(error.value).startswith(key)


@pytest.mark.parametrize(
    ("key", "section"),
    [("engine.machines", "engine"), ("dataflow.machines", "dataflow")],
)
def test_machines_follow_executors(key: str, section: str) -> None:
    with pytest.raises(ConfigError, match=r"where elastic\.max is set") as error:
        RunConfig(elastic={"max": 3}, **{section: {"machines": 4}})
    assert str(error.value).startswith(key)
    with pytest.raises(ConfigError, match=r"global, swarm or replicated"):
        RunConfig(elastic={"max": 3}, engine={"strategy": "uniform"})


def test_the_flag_sets_both_limits(capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = run_config(build_parser().parse_args(["run", "--elastic", "2:5"]))
    assert (config.elastic.min, config.elastic.max) == (2, 5)
    for text in ("3", "a:b", "1:2:3"):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["run", "--elastic", text])
        assert f"got '{text}', expected MIN:MAX" in capsys.readouterr().err


def test_sources_know_what_has_arrived(tmp_path: Path) -> None:
    now = 0.0
    for number in range(3):
        times = np.arange(number * 10, number * 10 + 10)
        pq.write_table(pa.table({"x": times, "event_time": times}), tmp_path / f"{number}.parquet")
    with closing(Store(tmp_path / "state")) as store:
        source = FileSource(str(tmp_path), "auto", "event_time", store, 2.0, lambda: now)
        assert source.due(0) == 1
        for now, due in ((2.0, 5), (4.9, 10), (6.0, 13), (100.0, 30)):  # noqa: B007
            assert source.due(3) == due
        unpaced = FileSource(str(tmp_path), "auto", "event_time", store, None, lambda: now)
        assert unpaced.due(0) is None
    now = 0.0
    live = parse_generator("generate:rows=50,rate=10,pace=live", lambda: now)
    assert live.due(0) == 0
    now = 2.05
    assert live.due(0) == 20
    now = 90.0
    assert live.due(0) == 50
    assert parse_generator("generate:rows=50", lambda: now).due(0) is None
