"""A second kind of stage, beside Roost's own: correct on any plan and through any failure."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from balance_checks import counted as counted_times
from roost.balance import Plan
from roost.runtime import records
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import InProcessExecutor
from roost.runtime.jobs import JOBS
from roost.runtime.part import SOURCE, Item, Mark, Parcel, run_part
from roost.stages.contract import (
    Batch,
    MapExecutor,
    Outcome,
    Report,
    Reports,
    Stage,
    Staged,
    Task,
)
from roost.stages.slices import pieces
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, Store
from stage_scenario import (
    AFTER_COMMIT,
    BATCHES,
    BEFORE_COMMIT,
    ROWS,
    STEPS,
    FaultyExecutor,
    Killed,
    Scenario,
    random_points,
)
from toy_stage import COUNTS, KeyCheck, KeyRouting, KeyTotals, PartialCounts, counted

STRATEGIES = ["replicated", "uniform", "swarm", "global"]
WINDOW = {"window.kind": "count", "window.length": 3 * ROWS}
JOIN = {"join.distance": 0.3, "join.within": 50.0}


# --------------------------------------------------------------------------- results


@pytest.mark.parametrize("machines", [1, 3, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_totals_equal_a_count_of_the_source(tmp_path: Path, strategy: str, machines: int) -> None:
    settings = {"engine.strategy": strategy, "engine.machines": machines}
    scenario = Scenario(tmp_path, settings, (machines,))
    scenario.live()
    scenario.check()
    assert scenario.checked == 2 * BATCHES
    assert len(scenario.published("totals")) == machines * BATCHES
    assert scenario.totals.names[0].startswith("job-"), "the job has merged files"


@pytest.mark.parametrize(("machines", "checkers"), [(1, 5), (3, 2), (5, 1)])
@pytest.mark.parametrize("strategy", ["replicated", "uniform"])
def test_blocks_and_marks_pass_through_a_level_unopened(
    tmp_path: Path, strategy: str, machines: int, checkers: int
) -> None:
    opened = []

    class Watched(FaultyExecutor):
        def run_level(
            self,
            chain: Chain,
            tasks: Mapping[str, Task],
            level: int,
            items: Sequence[Sequence[Item]],
        ) -> list[list[Item]]:
            sent = super().run_level(chain, tasks, level, items)
            for target in (item for part in sent for item in part):
                if isinstance(target, Parcel | Mark) and target.stage == KeyCheck.name:
                    source = target.port if isinstance(target, Parcel) else target.source
                    opened.append((level, type(target).__name__, source))
            return sent

    class Checked(Scenario):
        def stages(self) -> list[Stage]:
            return [*super().stages(), KeyCheck(checkers)]

    scenario = Checked(
        tmp_path,
        {"engine.strategy": strategy, "engine.machines": 2},
        (machines,),
        executor=Watched,
    )
    scenario.live()
    scenario.three_levels = True
    scenario.check()
    assert {found for found in opened if found[0] == 0} == {
        (0, "Parcel", COUNTS),
        (0, "Mark", PartialCounts.name),
    }
    for kind in ("Parcel", "Mark"):
        counts = Counter(found for found in opened if found[1] == kind)
        source = COUNTS if kind == "Parcel" else PartialCounts.name
        assert counts[0, kind, source] == counts[1, kind, source] > 0


def test_readers_without_a_row_still_send_their_marks(tmp_path: Path) -> None:
    class Many(FaultyExecutor):
        def __init__(self) -> None:
            super().__init__()
            self.slots = 7

    settings = {"engine.strategy": "uniform"}
    scenario = Scenario(
        tmp_path, settings, points=random_points(3, 2), executor=Many, three_levels=True
    )
    scenario.live()
    scenario.check()


def test_rows_and_bytes_are_measured_for_each_stage(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, {"engine.strategy": "uniform"}, three_levels=True)
    scenario.live()
    with closing(scenario.store()) as store:
        for commit in records.commits(store):
            points = len(scenario.valid_of([commit.batch_id]))
            stages = commit.figures["stages"]
            assert stages["reading"]["rows_out"] == points
            assert stages["matching"]["rows_in"] == points
            partial, totals = stages["partial counts"], stages["key totals"]
            assert partial["rows_in"] == points
            assert points > partial["rows_out"] == totals["rows_in"] >= totals["rows_out"] > 0
            assert stages["key check"]["rows_in"] == partial["rows_out"] + totals["rows_out"]
            assert partial["bytes_out"] > 0 and totals["bytes_out"] > 0
            assert stages["key check"]["bytes_out"] == 0


# --------------------------------------------------------------------------- death of the driver


class Deaths:
    """Kills the driver at each of some moments, once."""

    def __init__(self, moments: Iterable[tuple[Any, int]]) -> None:
        self.left = set(moments)

    def __call__(self, moment: Any, number: int) -> None:
        if (moment, number) in self.left:
            self.left.remove((moment, number))
            raise Killed

    def executor(self) -> FaultyExecutor:
        return FaultyExecutor(lambda number, level: self(level, number))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_correct_when_the_driver_dies_at_every_step_of_every_batch(
    tmp_path: Path, strategy: str
) -> None:
    """A committed batch does not run again, so each batch has one death after its commit."""
    batches = len(AFTER_COMMIT)
    levels = range(1, 4)
    moments = [(m, number) for m in [*BEFORE_COMMIT, *levels] for number in range(batches)]
    moments += [(step, number) for number, step in enumerate(AFTER_COMMIT)]
    deaths = Deaths(moments)
    scenario = Scenario(
        tmp_path,
        {"engine.strategy": strategy, **WINDOW},
        three_levels=True,
        points=random_points(1, batches * ROWS),
        executor=deaths.executor,
        on_step=deaths,
    )
    assert scenario.to_the_end() == len(moments)
    scenario.check()


@pytest.mark.parametrize("moment", [*STEPS, 1])
def test_correct_when_the_driver_dies_in_every_third_batch(tmp_path: Path, moment: Any) -> None:
    """Jobs end, and are recorded, in the batches between."""
    deaths = Deaths((moment, number) for number in range(2, BATCHES, 3))
    settings = {"engine.strategy": "uniform"}
    scenario = Scenario(tmp_path, settings, executor=deaths.executor, on_step=deaths)
    assert scenario.to_the_end() == BATCHES // 3
    scenario.check()
    assert any(name.startswith("job-") for name in scenario.totals.names)


@pytest.mark.parametrize(
    ("strategy", "first"), [("uniform", 0), ("uniform", 1), ("replicated", 2), ("global", 1)]
)
def test_correct_when_the_driver_dies_after_every_third_transaction(
    tmp_path: Path, strategy: str, first: int
) -> None:
    """A transaction is recorded; nothing that follows it has begun."""
    count = 0

    def on_record(facts: tuple[Fact, ...]) -> None:
        nonlocal count
        count += 1
        if count % 3 == first:
            raise Killed

    scenario = Scenario(tmp_path, {"engine.strategy": strategy}, on_record=on_record)
    assert BATCHES < scenario.to_the_end() < 5 * BATCHES
    scenario.check()


# --------------------------------------------------------------------------- repeated tasks


class RepeatingExecutor(InProcessExecutor):
    """Runs every part of one level twice, the second time on its items in another order.

    Parameters
    ----------
    level
        The level that is repeated.
    mixed
        Whether some parts of the next level receive what the first attempt sent, as when Spark
        repeats a stage because some of its output is lost.
    **settings
        As in :class:`InProcessExecutor`.
    """

    def __init__(self, level: int, mixed: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._level, self._mixed = level, mixed

    def run_level(
        self,
        chain: Chain,
        tasks: Mapping[str, Task],
        level: int,
        items: Sequence[Sequence[Item]],
    ) -> list[list[Item]]:
        first = super().run_level(chain, tasks, level, items)
        if level != self._level:
            return first
        second = super().run_level(chain, tasks, level, [self._turned(part) for part in items])
        return [
            old if self._mixed and number % 2 else new
            for number, (old, new) in enumerate(zip(first, second, strict=True))
        ]

    def _turned(self, items: Sequence[Item]) -> list[Item]:
        """Return items in another order; source rows also in other blocks."""
        found = []
        for item in reversed(items):
            if isinstance(item, Parcel) and item.port == SOURCE:
                cut = [piece for part in item.block for piece in pieces(part, 7)]
                item = item._replace(block=cut[::-1])
            found.append(item)
        return found


@pytest.mark.parametrize(
    ("strategy", "level", "mixed"),
    [
        *[("uniform", level, False) for level in range(3)],
        *[(strategy, level, True) for strategy in ("replicated", "uniform") for level in range(2)],
        ("swarm", 0, True),
    ],
)
def test_correct_when_a_level_is_repeated_alone(
    tmp_path: Path, strategy: str, level: int, mixed: bool
) -> None:
    scenario = Scenario(
        tmp_path,
        {"engine.strategy": strategy, **WINDOW},
        three_levels=True,
        executor=lambda: RepeatingExecutor(level, mixed),
    )
    scenario.live()
    scenario.check()


def crowded(rows: int = ROWS * BATCHES) -> pa.Table:
    """Return points that are nearly all in one cell, which no split can relieve."""
    rng = np.random.default_rng(5)
    table = random_points(4, rows)
    inside = rng.random(rows) < 0.9
    x = np.where(inside, 2.2 + 0.5 * rng.random(rows), table["x"].to_numpy())
    y = np.where(inside, 2.2 + 0.5 * rng.random(rows), table["y"].to_numpy())
    return table.set_column(1, "x", pa.array(x)).set_column(2, "y", pa.array(y))


def timed(report: Report) -> Report:
    """Replace measured times, which depend on the machine and the Python, by those of the work."""
    return counted_times(lambda number, one: 1e-3 * one.counts["points"], 0, report)


@pytest.mark.parametrize("level", [0, 1])
def test_correct_when_a_level_is_repeated_and_machines_share_a_cell(
    tmp_path: Path, level: int
) -> None:
    scenario = Scenario(
        tmp_path,
        {"engine.strategy": "global"},
        points=crowded(),
        executor=lambda: RepeatingExecutor(level, mixed=True, measure=timed),
    )
    scenario.live()
    scenario.check()
    with closing(scenario.store()) as store:
        used = {commit.figures["epoch"] for commit in records.commits(store)}
        plans = [records.plan_of(store, epoch) for epoch in used]
    owners = [p.machines for plan in plans for p in Plan.from_json(plan).partitions]
    assert any(len(machines) > 1 for machines in owners), "no machines shared a partition"


# --------------------------------------------------------------------------- lost, doubled


Change = Callable[[list[Item]], list[Item]]


def lose(items: list[Item]) -> list[Item]:
    return items[1:]


def double(items: list[Item]) -> list[Item]:
    return [items[0], *items]


def change_of(
    batch: int, level: int, chosen: Callable[[Item], bool], change: Change
) -> Callable[[], FaultyExecutor]:
    """Return executors that change the chosen items of one level of one batch, in one part."""

    def changed(number: int, now: int, parts: list[list[Item]]) -> list[list[Item]]:
        if (number, now) != (batch, level):
            return parts
        for part in parts:
            found = [item for item in part if chosen(item)]
            if found:
                part[:] = [item for item in part if not chosen(item)] + change(found)
                return parts
        raise AssertionError("the level has no such item")

    return lambda: FaultyExecutor(change=changed)


def check_refused(scenario: Scenario, message: str) -> None:
    """Check that batch 2 fails and leaves nothing, and that a good executor repeats it."""
    with pytest.raises(RuntimeError, match=message):
        scenario.live()
    assert scenario.committed() == [0, 1]
    assert scenario.stored_totals() == scenario.published_totals() == scenario.expected_totals(2)
    for kind in ("matches", "totals"):
        assert not any("-0000000002-" in path.name for path in scenario.published(kind))
    scenario.executor = FaultyExecutor
    scenario.live()
    scenario.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose, r"returned \d+ reports instead of \d+: missing \[\('{}', \d\)\], .* \[\]"),
        (double, r"returned \d+ reports instead of \d+: missing \[\], .* \[\('{}', \d\)\]"),
    ],
    ids=["lost", "doubled"],
)
@pytest.mark.parametrize(
    ("stage", "level"),
    [("reading", 0), ("matching", 1), ("partial counts", 1), ("key totals", 2), ("key check", 2)],
)
def test_a_batch_that_loses_or_doubles_a_report_fails(
    tmp_path: Path, stage: str, level: int, change: Change, message: str
) -> None:
    def chosen(item: Item) -> bool:
        return isinstance(item, Report) and item.stage == stage

    scenario = Scenario(
        tmp_path,
        {"engine.strategy": "uniform"},
        three_levels=True,
        executor=change_of(2, level, chosen, change),
    )
    check_refused(scenario, message.format(stage))


def replace_first(items: list[Item]) -> list[Item]:
    """Lose the first item and double the second."""
    return [items[1], *items[1:]]


@pytest.mark.parametrize(
    ("change", "senders"),
    [(lose, [1]), (double, [0, 0, 1]), (replace_first, [1, 1])],
    ids=["lost", "doubled", "one lost, another doubled"],
)
@pytest.mark.parametrize(("reader", "level"), [(KeyTotals.name, 0), (KeyCheck.name, 1)])
def test_a_batch_that_loses_or_doubles_a_mark_fails(
    tmp_path: Path, reader: str, level: int, change: Change, senders: list[int]
) -> None:
    def chosen(item: Item) -> bool:
        if not isinstance(item, Mark) or item.machine != 0:
            return False
        return (item.stage, item.source) == (reader, PartialCounts.name)

    scenario = Scenario(
        tmp_path,
        {"engine.strategy": "uniform"},
        three_levels=True,
        executor=change_of(2, level, chosen, change),
    )
    message = f"{reader} received marks of partial counts from machines {senders} instead of [0, 1]"
    check_refused(scenario, re.escape(message))


@pytest.mark.parametrize("change", [lose, double])
def test_marks_show_that_a_block_is_lost_or_doubled(tmp_path: Path, change: Change) -> None:
    def chosen(item: Item) -> bool:
        return isinstance(item, Parcel) and item.stage == KeyTotals.name

    executor = change_of(2, 0, chosen, change)
    scenario = Scenario(tmp_path, {"engine.strategy": "uniform"}, executor=executor)
    check_refused(scenario, r"machine \d counted \d+ rows instead of \d+")


# --------------------------------------------------------------------------- output files


class Publishing(Stage):
    """Publishes one file of totals, for the machine given or for none."""

    name = "publishing"

    def __init__(self, output: Files, machine: int | None) -> None:
        self._output, self._machine = output, machine

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        name = self._output.name(batch.prefix, "more", ".parquet")
        pq.write_table(counted({7: 1}), self._output.path(name))
        return Outcome({"totals": [Staged(name, self._machine)]})


@pytest.mark.parametrize("machine", [2, None, 3])
def test_stages_that_publish_the_same_file_are_refused(tmp_path: Path, machine: int | None) -> None:
    """The totals have machines 0 to 2; a file without a machine gets the next number."""

    class Both(Scenario):
        def stages(self) -> list[Stage]:
            stages = super().stages()
            return [*stages, Publishing(self.totals.output, machine)]

    scenario = Both(tmp_path, {"engine.strategy": "uniform"})
    if machine == 2:
        message = (
            r"stages 'key totals' and 'publishing' both publish totals/batch-0+-00002\.parquet"
        )
        with pytest.raises(RuntimeError, match=message):
            scenario.live()
        assert scenario.committed() == [] and scenario.published("totals") == []
    else:
        scenario.live()
        assert len(scenario.published("totals")) == 4 * BATCHES


# --------------------------------------------------------------------------- driver state


CIRCLE = {"cx": 4.0, "cy": 4.0, "radius": 3.0}
STANDING = [
    {"query_id": 100, "x0": 0.0, "y0": 0.0, "x1": 6.0, "y1": 6.0, "aggregate": "count, avg(x)"},
    {"query_id": 101, **CIRCLE, "nearest": 3},
]
KINDS: dict[str, dict[str, Any]] = {
    "count window": WINDOW,
    "time window": {"window.kind": "time", "window.length": 2.5 * ROWS, "window.lateness": 5.0},
    "join": {**WINDOW, **JOIN},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_equal_the_store_after_every_batch(tmp_path: Path, kind: str, strategy: str) -> None:
    """The pipeline compares them after each commit and at the end of each batch."""
    deaths = Deaths([("after", 1), ("round", 3)])
    scenario = Scenario(
        tmp_path,
        {"engine.strategy": strategy, **KINDS[kind]},
        more_queries=STANDING,
        executor=deaths.executor,
        on_step=deaths,
    )
    assert scenario.to_the_end() == 2
    assert scenario.checked == 2 * BATCHES - 1, "one death came before the end of its batch"
    assert scenario.published("aggregates") and scenario.published("nearest")
    assert bool(scenario.published("pairs")) == (kind == "join")
    states = {stage.name: stage.state() for stage in scenario.pipeline.stages}
    assert states["window"] and states[KeyTotals.name] == scenario.totals.state()
    assert (states.get("statistics") is not None) == (strategy == "swarm")
    for stage in map(type, scenario.pipeline.stages):
        stateful = stage.open is not Stage.open or stage.committed is not Stage.committed
        assert stateful == (stage.state is not Stage.state), stage.name


def test_a_state_that_differs_from_the_store_is_found(tmp_path: Path) -> None:
    class Incomplete(KeyTotals):
        def committed(self, batch: Batch, outcome: Outcome) -> None:
            self.names = outcome.result[1]

    class Faulty(Scenario):
        def stages(self) -> list[Stage]:
            partial, totals = super().stages()
            assert isinstance(totals, KeyTotals)
            return [partial, Incomplete(totals.folder, totals.output)]

    with pytest.raises(AssertionError, match="the state of key totals differs from the store"):
        Faulty(tmp_path).live()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_recorded_facts_alone_rebuild_the_store(tmp_path: Path, strategy: str) -> None:
    deaths = Deaths([("after", 1), ("publish", 2), ("round", 3), (1, 4)])
    scenario = Scenario(
        tmp_path / "run",
        {"engine.strategy": strategy, **WINDOW},
        executor=deaths.executor,
        on_step=deaths,
    )
    assert scenario.to_the_end() == 4
    with closing(Store(tmp_path / "rebuilt", durable=False)) as rebuilt:
        for facts in scenario.transactions:
            rebuilt.record(*facts)
        assert rebuilt.get(KeyTotals.table, "rows") == scenario.expected_totals().total()
        for stage in scenario.stages():
            with rebuilt.view() as view:
                stage.open(view)
        assert scenario.totals.state()[0] == scenario.expected_totals().total()
    assert facts_of(tmp_path / "rebuilt") == facts_of(scenario.config().out.state_dir)


def facts_of(state: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(state / "state.db")) as db:
        return db.execute("select * from facts order by tbl, key").fetchall()


def test_a_batch_is_one_transaction(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, {"engine.strategy": "swarm", **WINDOW})
    scenario.live()
    for number in range(BATCHES):
        (facts,) = [
            facts
            for facts in scenario.transactions
            if any((fact.table, fact.key) == (records.COMMITS, number) for fact in facts)
        ]
        tables = Counter(fact.table for fact in facts)
        assert tables[KeyTotals.table] == 2
        assert tables["windows"] and tables["statistics"] and tables["totals"]
    others = [facts for facts in scenario.transactions if facts[0].table != records.COMMITS]
    of_jobs = [f for f in others if any(fact.table == KeyTotals.table for fact in f)]
    assert of_jobs and all((f[-1].table, f[-1].value) == (JOBS, None) for f in of_jobs)


# --------------------------------------------------------------------------- intents


def test_a_repeated_batch_uses_the_routing_of_its_intent(tmp_path: Path) -> None:
    deaths = Deaths([("apply", 1), ("run", 3), ("commit", 4)])
    settings = {"engine.strategy": "uniform"}
    scenario = Scenario(tmp_path, settings, (2,), executor=deaths.executor, on_step=deaths)
    counts = [2, 5, 1, 4]
    for machines in counts:
        scenario.machines = tuple(counts[: counts.index(machines) + 1])
        if machines == counts[-1]:
            scenario.live()
        else:
            with pytest.raises(Killed):
                scenario.live()
    scenario.check()
    files = Counter(path.name.split("-")[1] for path in scenario.published("totals"))
    with closing(scenario.store()) as store:
        epochs = [records.intent(store, number).epochs["key"] for number in range(BATCHES)]  # type: ignore[union-attr]
    assert epochs == [0, 0, 1, 1, 2, 3]
    assert [files[f"{n:010d}"] for n in range(BATCHES)] == [counts[epoch] for epoch in epochs]


def test_a_repeated_batch_repeats_the_choices_of_its_intent(tmp_path: Path) -> None:
    calls = 0

    class Choosing(Stage):
        name = "choosing"

        def intend(self) -> Any:
            nonlocal calls
            calls += 1
            return {"calls": calls}

        def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
            return Outcome(facts=[Fact("chosen", batch.number, batch.choices[self.name])])

    class Chosen(Scenario):
        def stages(self) -> list[Stage]:
            return [*super().stages(), Choosing()]

    deaths = Deaths([("apply", 1), ("commit", 1)])
    scenario = Chosen(tmp_path, points=random_points(1, 3 * ROWS), on_step=deaths)
    scenario.to_the_end()
    scenario.check()
    with closing(scenario.store()) as store:
        assert store.items("chosen") == [(0, {"calls": 1}), (1, {"calls": 2}), (2, {"calls": 5})]


# --------------------------------------------------------------------------- jobs


class WaitingExecutor(FaultyExecutor):
    """Runs a job at once, but reports it after so many more batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._batches = batches
        self._pending: list[tuple[int, Future[list[Any]], list[Any]]] = []

    def submit(
        self, call: Callable[[Any, WorkerCache], Any], items: Sequence[Any]
    ) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        self._pending.append((self.number + self._batches, future, self.map(call, items)))
        return future

    def run(self, *values: Any) -> dict[str, list[Report]]:
        reports = super().run(*values)
        for due, future, results in self._pending:
            if due == self.number:
                future.set_result(results)
        return reports


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_batches_go_on_while_a_job_is_pending(tmp_path: Path, batches: int) -> None:
    scenario = Scenario(tmp_path, executor=lambda: WaitingExecutor(batches))
    scenario.live()
    merged, *rest = scenario.totals.names
    assert merged.startswith("job-") and len(rest) >= 3 * batches
    scenario.check()


def test_the_files_of_a_job_that_was_abandoned_are_deleted(tmp_path: Path) -> None:
    deaths = Deaths([("end", 2), ("intent", 4)])
    scenario = Scenario(tmp_path, executor=lambda: WaitingExecutor(99), on_step=deaths)
    left = []
    for number in (1, 2):
        with pytest.raises(Killed):
            scenario.live()
        (name,) = scenario.totals.files.names("job-")
        left.append(name)
        assert name.startswith(f"job-{number:010d}-")
        with closing(scenario.store()) as store:
            assert store.items(JOBS) == [(number, {"stage": KeyTotals.name})]
            assert name not in store.get(KeyTotals.table, "files")
    scenario.executor = FaultyExecutor
    scenario.live()
    assert set(left).isdisjoint(scenario.totals.files.names())
    assert scenario.totals.names[0].startswith("job-0000000003-"), "a number is used once"
    scenario.check()


def test_a_job_that_fails_is_abandoned_and_tried_again(tmp_path: Path) -> None:
    failed = []

    class Failing(FaultyExecutor):
        def submit(
            self, call: Callable[[Any, WorkerCache], Any], items: Sequence[Any]
        ) -> Future[list[Any]]:
            future = super().submit(call, items)
            if len(failed) < 2:
                failed.extend(future.result())
                future = Future()
                future.set_exception(OSError("the disk is full"))
            return future

    scenario = Scenario(tmp_path, executor=Failing)
    with pytest.warns(UserWarning, match="job . of key totals failed: the disk is full") as seen:
        scenario.live()
    assert [str(warning.message).split()[2] for warning in seen] == ["1", "2"]
    assert set(failed).isdisjoint(scenario.totals.files.names())
    assert scenario.totals.names[0].startswith("job-0000000003-")
    scenario.check()


# --------------------------------------------------------------------------- chains and parts


class Placed(Stage):
    """A stage with a place in a chain and no work."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[str] = (),
        routing: str | None = None,
        marks: Sequence[str] = (),
    ) -> None:
        self.name, self.outputs = name, (name,)
        self.inputs, self.routing, self.marks = tuple(inputs), routing, tuple(marks)


ROUTINGS = {"key": KeyRouting(0, 2)}
READERS: dict[str, Sequence[int]] = defaultdict(lambda: (0, 1))


def levels(*stages: Stage) -> list[int]:
    return [node.level for node in Chain.of(stages, ROUTINGS, READERS).nodes]


def test_a_routed_stage_runs_after_those_whose_marks_it_reads() -> None:
    read = Placed("read")
    routed = Placed("routed", ["read"], "key")
    local = Placed("local", ["routed"])
    reader = Placed("reader", ["read"], "key", ["local"])
    assert levels(read, routed, local, reader) == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (["routed"], "local reads marks of its own level 1"),
        (["later"], "local reads marks of a stage that does not precede it"),
        (["read", "none"], "local reads marks of a stage that does not precede it"),
    ],
)
def test_marks_that_cannot_arrive_are_refused(marks: list[str], message: str) -> None:
    read, routed = Placed("read"), Placed("routed", ["read"], "key")
    with pytest.raises(ValueError, match=message):
        levels(read, routed, Placed("local", ["routed"], None, marks), Placed("later", ["local"]))


def test_a_stage_runs_within_another_one_of_its_level() -> None:
    read, root = Placed("read"), Placed("root", ["read"], "key")
    inner, later = Placed("inner", ["read"], "key"), Placed("inner", ["root"], "key")
    inner.within = later.within = "root"
    both = Placed("both", ["root", "inner"])
    chain = Chain.of([read, root, inner, both], ROUTINGS, READERS)
    assert [node.root for node in chain.nodes] == ["read", "root", "root", "root"]
    assert chain.parts[1] == [("root", 0), ("root", 1)]
    with pytest.raises(ValueError, match="inner is not on the level of root"):
        levels(read, root, later)


def routed(name: str, *inputs: str) -> Placed:
    return Placed(name, inputs, "key")


def test_a_level_has_one_executor_group() -> None:
    """Stages of one level that are in different groups get levels one after the other."""
    stages = [
        Placed("read"),
        routed("one", "read"),
        routed("other", "read"),
        routed("both", "one", "other"),
    ]
    assert levels(*stages) == [0, 1, 1, 2]
    for groups, expected in (
        ({"other": "b"}, [0, 1, 2, 3]),
        ({"one": "b"}, [0, 1, 2, 3]),
        ({"one": "b", "other": "b"}, [0, 1, 1, 2]),
        ({"one": "b", "other": "b", "both": "b"}, [0, 1, 1, 2]),
        ({"other": "b", "both": "b"}, [0, 1, 2, 3]),
    ):
        chain = Chain.of(stages, ROUTINGS, READERS, Placement(groups))
        assert [node.level for node in chain.nodes] == expected, groups
        for node in chain.nodes:
            assert chain.group(node.level) == node.group == groups.get(node.name, "default")


def test_a_root_follows_the_stage_within_it_to_a_later_level() -> None:
    """``inner`` runs in the tasks of ``root``, and its input comes a level later here."""
    first, second = routed("first", "read"), routed("second", "read")
    root, inner = routed("root", "first"), routed("inner", "second")
    inner.within = "root"
    stages = [Placed("read"), first, second, root, inner]
    assert levels(*stages) == [0, 1, 1, 2, 2]
    chain = Chain.of(stages, ROUTINGS, READERS, Placement({"second": "b"}))
    assert [node.level for node in chain.nodes] == [0, 1, 2, 3, 3]


class Ticking:
    """A task and its work, which spends one second in each call and emits what it receives."""

    def __init__(self, now: list[float], port: str, eager: bool) -> None:
        self._now, self._port, self._eager = now, port, eager

    def build(self, machine: int, cache: WorkerCache) -> Ticking:
        return self._spent(self)

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> Any:
        return self._spent(marks)

    def process(self, port: str, block: Any) -> Iterable[tuple[str, Any]]:
        return self._emitted(block)

    def finish(self, marks: Any) -> Iterable[tuple[str, Any]]:
        return self._emitted(counted({}))

    def report(self) -> Report:
        return self._spent(Report(mark=0))

    def _emitted(self, block: Any) -> Iterable[tuple[str, Any]]:
        return [self._spent((self._port, block))] if self._eager else self._later(block)

    def _later(self, block: Any) -> Iterator[tuple[str, Any]]:
        yield self._spent((self._port, block))

    def _spent(self, value: Any) -> Any:
        self._now[0] += 1.0
        return value


@pytest.mark.parametrize("eager", [False, True])
def test_seconds_are_those_of_the_stage_alone(eager: bool) -> None:
    """Whether it computes when it is called, or when its outputs are requested."""
    stages = [Placed("read"), Placed("local", ["read"])]
    chain, now = Chain.of(stages, {}, {stages[0].name: (0,)}), [0.0]
    tasks: dict[str, Any] = {stage.name: Ticking(now, stage.name, eager) for stage in stages}
    block = counted({1: 1, 2: 5})
    items = [Parcel("read", 0, SOURCE, block)] * 2
    sent = run_part(chain, tasks, 0, 0, items, WorkerCache(), clock=lambda: now[0])
    reports = {item.stage: item for _, item in sent if isinstance(item, Report)}
    # Each is built, merges and reports; "read" emits two blocks and one in finish, "local" these
    # three and its own.
    assert {name: report.seconds for name, report in reports.items()} == {"read": 6.0, "local": 7.0}
    rows = [(report.rows_in, report.rows_out) for report in reports.values()]
    assert rows == [(4, 4), (4, 4)]


def test_nothing_is_sent_where_no_stage_reads_marks() -> None:
    def sent(marks: Sequence[str]) -> list[Item]:
        stages = [Placed("read"), Placed("routed", ["read"], "key", marks)]
        chain = Chain.of(stages, ROUTINGS, READERS)
        tasks: dict[str, Any] = {stage.name: Ticking([0.0], stage.name, True) for stage in stages}
        return [item for _, item in run_part(chain, tasks, 0, 1, [], WorkerCache())]

    assert not [item for item in sent([]) if isinstance(item, Mark)]
    marks = [item for item in sent(["read"]) if isinstance(item, Mark)]
    assert [(mark.stage, mark.machine, mark.source) for mark in marks] == [
        ("routed", 0, "read"),
        ("routed", 1, "read"),
    ]


@pytest.mark.parametrize("machines", [1, 3, 7])
def test_the_machine_of_a_row_does_not_depend_on_other_rows(machines: int) -> None:
    routing = KeyRouting(0, machines)
    keys = {key**3: 1 for key in range(-40, 40)}
    whole = {
        key: machine
        for machine, block in routing.split(COUNTS, counted(keys), WorkerCache())
        for key in block["key"].to_pylist()
    }
    assert whole.keys() == keys.keys()
    for key in keys:
        ((machine, _),) = routing.split(COUNTS, counted({key: 1}), WorkerCache())
        assert machine == whole[key]
