"""Executor groups in a run: operators move between them by measured load, and restarts go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.table import Table

from flow_runs import rows_of
from rankings import expected_rankings
from roost import RunConfig
from roost.bench.dodo_cluster import OTHER, top_topics
from roost.commands.inspect import inspect_state
from roost.commands.terminal import _contents
from roost.elastic.placement import ExecutorGroup, LoadSeries
from roost.errors import ConfigError
from roost.model.choices import PlacementName
from roost.runtime.group_rounds import GROUP_ROUNDS, GroupRounds
from roost.runtime.operator_placement import PLACEMENT, OperatorPlacement
from roost.runtime.report import build_report
from roost.stages.contract import Report
from roost.stages.flow_routing import maps_of
from roost.storage.store import Store
from roost.testing import FakeAllocator, InProcessExecutor, InProcessPipeline
from stage_scenario import Killed

RATE = 40
PATH = f"generate:tweets,rate={RATE},seed=3,topics=30,pace=live"
BOTH = {"name": "default", "operators": ["count", "rank"]}
# Seconds of a row that an operator receives, on one slot: loads of about 0.5 and 0.3.
COSTS = {"flow:count": 0.005, "flow:rank": 0.01}


@dataclass
class PlacedRun:
    """Top-N topics on virtual executors; the clock moves by a second with every batch."""

    folder: Path
    elastic: Mapping[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=lambda: [BOTH, {"name": OTHER}])
    kills: list[tuple[str, int]] = field(default_factory=list)
    away: range = range(0)  # batches in which the cluster cannot provide the other group
    seconds: int = 40
    step_s: float = 1.0  # from batch to batch
    now: float = 1_000.0
    ran: list[dict[str, set[str]]] = field(default_factory=list)  # executors by stage and batch

    def __post_init__(self) -> None:
        self.allocator = FakeAllocator(self.clock)
        self.rows_read = RATE * self.seconds
        self.path = f"{PATH},rows={self.rows_read}"

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def config(self) -> RunConfig:
        elastic = {"max": 1, "round": 3.0, "placement": "algorithm_1", "groups": self.groups}
        return RunConfig(
            # Nothing is aggregated before an exchange, so each operator does its own work.
            dataflow={"balance": "off", "layout": "operator_set"},
            engine={"available_now": True},
            elastic={**elastic, **self.elastic},
            out={"dir": self.folder / "out"},
        )

    def drive(self) -> PlacedRun:
        while True:
            try:
                self._live()
                return self
            except Killed:
                pass

    def _live(self) -> None:
        def on_step(step: str, number: int) -> None:
            if (step, number) in self.kills:
                self.kills.remove((step, number))
                raise Killed
            if step == "intent":
                self.now += self.step_s
                self.ran.append({})
                self._provide(number not in self.away)

        flow = top_topics(self.path, costly=False)
        executor = InProcessExecutor(measure=self._noted)
        executor.allocator = self.allocator
        clocks = {"clock": self.clock, "wall_clock": self.clock}
        with InProcessPipeline(
            self.config(), flow=flow, executor=executor, on_step=on_step, **clocks
        ) as pipeline:
            pipeline.run()

    def _provide(self, provided: bool) -> None:
        group = self.allocator.of(OTHER)
        group.available = 9 * provided
        if not provided:
            group.present.clear()

    def _noted(self, report: Report) -> Report:
        self.ran[-1].setdefault(report.stage, set()).add(report.executor)
        return replace(report, seconds=COSTS.get(report.stage, 0.0) * report.rows_in)

    @property
    def rows(self) -> list[dict[str, Any]]:
        with closing(Store(self.folder / "out" / "state")) as store:
            return [row for _, row in store.items(GROUP_ROUNDS)]

    def moves(self) -> list[tuple[str, str]]:
        return [(m["operator"], m["after"]) for row in self.rows for m in row[PLACEMENT]["moves"]]

    def check(self) -> None:
        """Compare the rankings with those of the interpreter, each once."""
        files = (self.folder / "out" / "top_topics").glob("*.parquet")
        found = [row for file in files for row in rows_of(pq.ParquetFile(file).read())]
        assert Counter(map(repr, found)) == Counter(
            map(repr, expected_rankings(self.path, self.rows_read))
        )


@pytest.fixture(autouse=True, scope="module")
def no_idling() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roost.runtime.pipeline.IDLE_S", 0.0)
        yield


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> PlacedRun:
    return PlacedRun(tmp_path_factory.mktemp("moved")).drive()


def test_algorithm_1_moves_an_operator_by_measured_load(moved: PlacedRun) -> None:
    """From the next batch on its tasks run in the other group; no bucket map changes."""
    run = moved
    run.check()
    assert run.moves() == [("rank", OTHER)]
    decided = next(row for row in run.rows if row[PLACEMENT]["moves"])
    assert decided[PLACEMENT]["loads"]["count"] > decided[PLACEMENT]["loads"]["rank"] > 0.1
    places = [(*ran["flow:count"], *ran["flow:rank"]) for ran in run.ran]
    first = decided["batch_id"] + 1
    assert set(places[:first]) == {("local", "local")}
    assert set(places[first:]) == {("local", "other0")}
    with closing(Store(run.folder / "out" / "state")) as store:
        assert [len(list(store.items(maps_of(name)))) for name in ("count", "rank")] == [1, 1]


@pytest.mark.parametrize("step", ["round", "end"])
def test_a_driver_that_dies_continues_with_the_mapping(
    step: str, moved: PlacedRun, tmp_path: Path
) -> None:
    """It dies before the decision, or after it was recorded."""
    number = next(row["batch_id"] for row in moved.rows if row[PLACEMENT]["moves"])
    run = PlacedRun(tmp_path, kills=[(step, number), (step, number + 2)]).drive()
    run.check()
    assert not run.kills and run.moves() == [("rank", OTHER)]
    assert run.rows[-1][PLACEMENT]["mapping"] == {"count": "default", "rank": OTHER}
    assert run.ran[-1]["flow:rank"] == {"other0"}


def test_a_group_without_executors_is_not_used_until_it_is_back(tmp_path: Path) -> None:
    groups = [{"name": OTHER, "operators": ["rank"]}]
    run = PlacedRun(tmp_path, {"placement": "off"}, groups, away=range(6, 12)).drive()
    run.check()
    places = [next(iter(ran["flow:rank"])) for ran in run.ran]
    assert places[1:6] == ["other0"] * 5 and places[6:12] == ["local"] * 6
    assert set(places[13:]) == {"other1"}


def test_a_group_that_cannot_be_provided_is_reported_and_not_used(tmp_path: Path) -> None:
    run = PlacedRun(tmp_path, away=range(1000), seconds=200, step_s=5.0).drive()
    run.check()
    decisions = [(row["groups"][OTHER]["decision"], row["groups"][OTHER]) for row in run.rows]
    reasons = [row["reason"] for decision, row in decisions if decision == "Cannot"]
    assert reasons and "1 of 1 executors did not arrive" in reasons[0]
    assert run.moves() == []
    shown = list(_contents(inspect_state(run.folder / "out" / "state")))
    tables = [{str(c.header): [*c.cells] for c in t.columns} for t in shown if isinstance(t, Table)]
    decided = next(table for table in tables if {"group", "decision"} <= set(table))
    assert (decided["group"][0], decided["reason"][0]) == (OTHER, reasons[0])
    assert f"placement  {run.rows[-1][PLACEMENT]['reason']}" in shown


def test_groups_are_refused_at_the_start_where_the_number_of_executors_is_fixed(
    tmp_path: Path,
) -> None:
    run = PlacedRun(tmp_path, seconds=1)
    flow = top_topics(run.path, costly=False)
    with (
        pytest.raises(ConfigError, match=r"elastic\.groups.*'other'.*fixed number of executors"),
        InProcessPipeline(run.config(), flow=flow) as pipeline,
    ):
        pipeline.run()
    assert not list((tmp_path / "out").glob("top_topics/*"))


def test_operators_that_are_not_named_get_a_group_by_measured_load(tmp_path: Path) -> None:
    run = PlacedRun(tmp_path, {"placement": "static"}, [{"name": OTHER}]).drive()
    run.check()
    assert run.moves() == [("count", "default"), ("rank", OTHER)]
    assert len([row for row in run.rows if row[PLACEMENT]["moves"]]) == 1


def test_algorithm_2_sizes_both_groups(tmp_path: Path) -> None:
    groups = [{"name": OTHER, "operators": ["rank"], "max": 4}]
    settings = {"placement": "off", "policy": "algorithm_2", "max": 4, "total": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COSTS, "flow:count", 0.03)
        patch.setitem(COSTS, "flow:rank", 0.05)
        run = PlacedRun(tmp_path, settings, groups).drive()
    run.check()
    planned = [(row["planned"], row["groups"][OTHER]["planned"]) for row in run.rows]
    assert max(sum(sizes) for sizes in planned) <= 5
    assert sum(planned[-1]) == 5, "they need more than there may be"
    assert any("of 5 for all groups" in row["reason"] for row in run.rows)
    present = [len(group.present) for group in (run.allocator, run.allocator.of(OTHER))]
    assert tuple(present) == planned[-1]


def test_executors_of_a_group_may_have_more_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of 2.4 slots needs two executors of two, and layouts of four machines."""
    groups = [{"name": OTHER, "operators": ["rank"], "max": 4, "cores": 2}]
    run = PlacedRun(tmp_path, {"placement": "off"}, groups)
    run.allocator.others[OTHER] = FakeAllocator(run.clock, slots=2, group=OTHER)
    monkeypatch.setitem(COSTS, "flow:rank", 0.08)
    machines: list[int] = []
    after_batch = GroupRounds.after_batch

    def noting(self: GroupRounds, *arguments: Any) -> None:
        after_batch(self, *arguments)
        machines.append(self.machines)

    monkeypatch.setattr(GroupRounds, "after_batch", noting)
    run.drive().check()
    sizes = [row["groups"][OTHER] for row in run.rows]
    assert max(size["planned"] for size in sizes) == 2 == len(run.allocator.of(OTHER).present)
    decided = next(size for size in sizes if size["decision"] == "Provision")
    assert 0.9 < decided["load"] <= 1.2
    assert machines[-1] == 4 == max(machines)


def test_no_operator_moves_while_executors_are_replaced(moved: PlacedRun) -> None:
    """The loads are those that led to a move."""
    number = next(k for k, row in enumerate(moved.rows) if row[PLACEMENT]["moves"])
    names = ["default", OTHER]
    groups = [ExecutorGroup(name, 1) for name in names]
    for settled in (True, False):
        placement = OperatorPlacement(PlacementName.ALGORITHM_1, names, {}, {})
        placement.mapping = dict.fromkeys(("count", "rank"), "default")
        placement._roots = {name: name for name in placement.mapping}
        placement._series = LoadSeries.from_json(moved.rows[number][PLACEMENT]["series"])
        row = placement.end_round(placement.snapshot(groups), settled=settled)
        assert bool(row["moves"]) == settled


def test_groups_are_reported(moved: PlacedRun) -> None:
    with closing(Store(moved.folder / "out" / "state")) as store:
        found = build_report(store)["executors"]["groups"]
    assert found["mapping"] == {"count": "default", "rank": OTHER}
    assert found["executors"][OTHER]["observed"] == 1
    (move,) = found["moves"]
    assert (move["operator"], move["before"], move["after"]) == ("rank", "default", OTHER)
    tables = [
        {str(column.header): list(column.cells) for column in table.columns}
        for table in _contents(inspect_state(moved.folder / "out" / "state"))
        if isinstance(table, Table)
    ]
    sizes = next(table for table in tables if "group" in table)
    assert (sizes["group"], sizes["operators"]) == (["default", OTHER], ["count", "rank"])
    moves = next(table for table in tables if "from" in table)
    assert (moves["operator"], moves["from"], moves["to"]) == (["rank"], ["default"], [OTHER])
