"""The batch protocol: visibility of files, checks of a replay, retention, and rounds."""

from __future__ import annotations

import contextlib
import doctest
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from roost.errors import SourceError
from roost.runtime import loop, pipeline, records
from roost.stages.slices import Slice
from roost.stages.sources import RowSource
from roost.storage.store import Fact, Store
from roost.storage.totals import TOTALS
from roost.testing import pipeline as testing_pipeline
from stage_scenario import BATCHES, ROWS, STEPS, Killed, Scenario, random_points

KINDS = ("matches", "dead", "totals")


def visible(scenario: Scenario, number: int) -> set[str]:
    """Return the kinds of output of which a reader sees a file of a batch."""
    name = f"batch-{number:010d}-"
    return {
        kind
        for kind in KINDS
        if any(path.name.startswith(name) for path in scenario.published(kind))
    }


@pytest.mark.parametrize("strategy", ["replicated", "uniform"])
def test_no_file_is_visible_before_the_commit(tmp_path: Path, strategy: str) -> None:
    seen: dict[str, list[set[str]]] = {step: [] for step in STEPS}
    at_commit = []

    def on_step(step: str, number: int) -> None:
        seen[step].append(visible(scenario, number))

    def on_record(facts: tuple[Fact, ...]) -> None:
        at_commit.extend(visible(scenario, f.key) for f in facts if f.table == records.COMMITS)  # type: ignore[arg-type]

    scenario = Scenario(
        tmp_path, {"engine.strategy": strategy}, on_step=on_step, on_record=on_record
    )
    scenario.live()
    for step in STEPS[: STEPS.index("publish") + 1]:
        assert seen[step] == [set()] * BATCHES, step
    assert at_commit == [set()] * BATCHES, "when the transaction ended"
    for step in STEPS[STEPS.index("publish") + 1 :]:
        assert all({"matches", "totals"} <= kinds for kinds in seen[step]), step
    assert any("dead" in kinds for kinds in seen["end"])


def test_renames_that_a_failed_host_lost_are_repeated(tmp_path: Path) -> None:
    """Not only those of the last batch: a filesystem may write them to the disk seconds later."""

    def on_step(step: str, number: int) -> None:
        if (step, number) == ("intent", 2):
            raise Killed

    scenario = Scenario(tmp_path, on_step=on_step)
    with pytest.raises(Killed):
        scenario.live()
    with closing(Store(tmp_path / "out" / "state")) as store:
        for commit in records.commits(store):
            for staged, final in commit.files:
                (scenario.out / final).rename(scenario.out / staged)
    assert visible(scenario, 0) == visible(scenario, 1) == set()
    scenario.resume()
    scenario.check()


@pytest.mark.parametrize("step", ["after", "deliver", "commit"])
def test_a_batch_killed_before_its_commit_leaves_nothing_visible(tmp_path: Path, step: str) -> None:
    def on_step(now: str, number: int) -> None:
        if (now, number) == (step, 1):
            raise Killed

    scenario = Scenario(tmp_path, on_step=on_step)
    with pytest.raises(Killed):
        scenario.live()
    assert visible(scenario, 1) == set() and visible(scenario, 0) >= {"matches", "totals"}
    assert scenario.committed() == [0]
    assert scenario.stored_totals() == scenario.published_totals() == scenario.expected_totals(1)
    staged = [path.name for kind in KINDS for path in (scenario.out / kind / "_staging").iterdir()]
    assert staged and all("-0000000001-" in name for name in staged)
    scenario.resume()
    scenario.check()


def test_a_batch_killed_after_its_commit_is_published_by_the_next_driver(
    tmp_path: Path,
) -> None:
    def on_step(now: str, number: int) -> None:
        if (now, number) == ("publish", BATCHES - 1):
            raise Killed

    scenario = Scenario(tmp_path, on_step=on_step)
    with pytest.raises(Killed):
        scenario.live()
    assert scenario.committed() == list(range(BATCHES))
    assert visible(scenario, BATCHES - 1) == set()
    scenario.resume()
    scenario.check()


def test_the_example_of_the_in_process_pipeline_runs() -> None:
    results = doctest.testmod(testing_pipeline)
    assert (results.failed, results.attempted) == (0, 7)


# --------------------------------------------------------------------------- missing rows


@dataclass
class Shrunk:
    """A source that has lost the end of what it had when a batch was begun."""

    source: RowSource
    rows: int

    def again(self, start: int, stop: int) -> Sequence[Slice]:
        return self.source.again(start, min(stop, self.rows))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def kill_in_batch_1(tmp_path: Path) -> Scenario:
    def on_step(step: str, number: int) -> None:
        if (step, number) == ("run", 1):
            raise Killed

    scenario = Scenario(tmp_path, on_step=on_step)
    with pytest.raises(Killed):
        scenario.live()
    scenario.on_step = lambda step, number: None
    return scenario


def check_untouched(scenario: Scenario) -> None:
    assert scenario.committed() == [0]
    assert visible(scenario, 1) == set()
    assert scenario.stored_totals() == scenario.expected_totals(1)


@pytest.mark.parametrize("missing", [1, ROWS - 1, ROWS])
def test_a_replay_detects_rows_that_the_source_no_longer_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    scenario = kill_in_batch_1(tmp_path)
    opened = pipeline.open_source
    with monkeypatch.context() as patch:
        patch.setattr(
            pipeline, "open_source", lambda *values: Shrunk(opened(*values), 2 * ROWS - missing)
        )
        with pytest.raises(SourceError, match=f"batch 1 read rows {ROWS} to {2 * ROWS}"):
            scenario.live()
    check_untouched(scenario)
    scenario.resume()
    scenario.check()


@pytest.mark.parametrize("rows", [0, 10, ROWS, 2 * ROWS - 1])
def test_a_replay_detects_that_a_file_has_become_shorter(tmp_path: Path, rows: int) -> None:
    scenario = kill_in_batch_1(tmp_path)
    path = tmp_path / "points.parquet"
    whole = pq.ParquetFile(path).read()
    pq.write_table(whole.slice(0, rows), path, row_group_size=16)
    with pytest.raises(SourceError, match=r"points\.parquet has only"):
        scenario.live()
    check_untouched(scenario)
    pq.write_table(whole, path, row_group_size=16)
    scenario.resume()
    scenario.check()


# --------------------------------------------------------------------------- retention


@pytest.mark.parametrize("strategy", ["uniform", "swarm"])
def test_old_rows_are_deleted_within_the_slack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Each driver is killed where it would delete; each plan has another number of machines."""
    every, history, batches = 4, 3, 26
    monkeypatch.setattr(loop, "CLEANUP_BATCHES", every)
    tables = (records.COMMITS, records.INTENTS, records.ROUNDS, records.PLANS)
    kills = [0, every, 2 * every, 2 * every + 1, 3 * every, 4 * every]
    most: dict[str, int] = dict.fromkeys(tables, 0)

    def on_step(step: str, number: int) -> None:
        for table in tables:
            count = len(store.items(table))
            most[table] = max(most[table], count)
            if step == "round" and number % every == 0:  # the step after the deletion
                assert count <= history, table
        if kills and (step, number) == ("cleanup", kills[0]):
            kills.pop(0)
            raise Killed

    points = random_points(1, ROWS * batches)
    scenario = Scenario(tmp_path, points=points, on_step=on_step)
    with closing(scenario.store()) as store:
        for machines in (2, 3, 2, 3, 2, 3, 2):
            scenario.settings = {
                "engine.strategy": strategy,
                "engine.machines": machines,
                "out.history": history,
            }
            with contextlib.suppress(Killed):
                scenario.live()
        left = {table: [key for key, _ in store.items(table)] for table in tables}
        assert store.get(TOTALS, "batches")["batches"] == batches
    assert max(most.values()) <= history + every
    for table in (records.COMMITS, records.INTENTS):
        assert left[table] == list(range(batches - 1 - history, batches))
    assert left[records.PLANS][0] > 0, "no plan was deleted"
    assert scenario.published_matches() == scenario.expected_matches()
    assert scenario.published_totals() == scenario.expected_totals()


def test_the_plan_of_the_last_batch_stays_while_drivers_only_restart(tmp_path: Path) -> None:
    """Each driver makes a plan for other machines and is killed before it begins a batch."""
    restarts = [2, 3, 2, 3, 2, 3]

    def on_step(step: str, number: int) -> None:
        if restarts and (step, number) == ("intent", 1):
            raise Killed

    scenario = Scenario(tmp_path, on_step=on_step)
    while True:
        machines = restarts.pop(0) if restarts else 2
        scenario.settings = {
            "engine.strategy": "uniform",
            "engine.machines": machines,
            "out.history": 2,
        }
        try:
            scenario.live()
        except Killed:
            continue
        break
    assert scenario.published_matches() == scenario.expected_matches()


# --------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("strategy", ["swarm", "global"])
@pytest.mark.parametrize("machines", [2, 5])
def test_a_round_does_not_see_reports_of_an_old_epoch(
    tmp_path: Path, strategy: str, machines: int
) -> None:
    """Batch 2 was begun under the plan of three machines and is repeated under it."""

    def on_step(step: str, number: int) -> None:
        if (step, number) == ("run", 2):
            raise Killed

    settings = {"engine.strategy": strategy, "engine.machines": 3}
    scenario = Scenario(tmp_path, settings, on_step=on_step)
    with pytest.raises(Killed):
        scenario.live()
    scenario.settings = {**settings, "engine.machines": machines}
    with closing(scenario.store()) as store:
        before = records.last_epoch(store)
    assert before is not None
    scenario.resume()
    scenario.check()
    with closing(scenario.store()) as store:
        epochs = {commit.batch_id: commit.figures["epoch"] for commit in records.commits(store)}
        plans = dict(store.items(records.PLANS))
        rounds = {row["batch_id"]: row for _, row in store.items(records.ROUNDS)}
    assert epochs[2] == before and all(epochs[number] > before for number in range(3, BATCHES))
    assert plans[before]["machines"] == 3
    assert {plan["machines"] for epoch, plan in plans.items() if epoch > before} == {machines}
    assert set(rounds) == set(range(BATCHES)) - {2}, "every batch but the repeated one ends a round"
    for number, row in rounds.items():
        assert row["epoch"] == epochs[number]
        assert row["next_epoch"] in (None, epochs.get(number + 1, row["next_epoch"]))
