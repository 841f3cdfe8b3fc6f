"""Batches of several streams and sources: each row once, whenever a driver is killed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flow_runs import FlowRun, Killed, TableSlice, key_of, plain
from roost.dataflow.flow import Dataflow
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.schema import resolve
from roost.errors import SourceError, StateError
from roost.runtime.executor import SliceInputs
from roost.runtime.feed import STREAM, Feed
from roost.runtime.records import INTENTS, Commit, last_intent
from roost.stages.flow_routing import stage_of
from roost.stages.sources import RowSource
from roost.storage.store import Fact

STEPS = ("intent", "apply", "run", "after", "commit", "publish", "cleanup", "round")
SCHEMA = {"k": "int64", "v": "int64", "t": "int64"}
ROWS, LIMIT, MICRO = 40, 6, 5  # of each input, of a source in a batch, of a micro-batch
IDLE_S = 2.0


def flow_of() -> Dataflow:
    flow = Dataflow("three inputs")
    a, b, file = (flow.source(name, SCHEMA, time="t") for name in ("a", "b", "file"))
    merged = flow.union(a, b, file)
    merged.aggregate({"n": "count", "v": "sum(v)"}, by="k", size=8, advance=4).sink("sums")
    a.join(file, "left.k = right.k", size=3).sink("joined")
    return flow


def table_of(seed: int) -> pa.Table:
    rows = [{"k": n * seed % 3, "v": n + seed, "t": n} for n in range(ROWS)]
    return pa.Table.from_pylist(rows)


TABLES = {"a": table_of(1), "b": table_of(2), "file": table_of(5)}


class Rows(RowSource):
    """A source of the rows of a table."""

    grows = True

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def total(self) -> int:
        return int(self.table.num_rows)

    def take(self, offset: int, limit: int) -> list[TableSlice]:
        stop = min(offset + limit, self.total())
        return self.again(offset, stop) if stop > offset else []

    def again(self, start: int, stop: int) -> list[TableSlice]:
        return [TableSlice(start, min(stop, self.total()), self.table, 0)]


class Driver(FlowRun):
    """A driver that can be killed and started again; Spark repeats what it has not recorded."""

    def __init__(self, folder: Path, idle: float | None = None) -> None:
        super().__init__(flow_of(), folder, idle=idle)
        self.file = TABLES["file"]
        self.micro = {"a": 0, "b": 0}  # number of the stream's next micro-batch
        self.feed: Feed | None = None
        self.commits: list[Commit] = []

    def run(self, call: Callable[[Feed], Any], kill: str | None = None) -> Any:
        """Call a method of the feed; returns False if the driver is killed."""
        self._kill = kill
        if self.feed is None:
            sources = {stage_of("file"): Rows(self.file)}
            streams = [stage_of("a"), stage_of("b")]
            self.feed = Feed(self._loop(), sources, streams, LIMIT, False, self.commits.append)
        try:
            return call(self.feed)
        except Killed:
            self.feed = None
            self.stop()
            return False

    def stream(self, name: str, kill: str | None = None) -> None:
        """Run the next micro-batch of a stream, or repeat it."""
        number, stage = self.micro[name], stage_of(name)
        rows = TABLES[name].slice(number * MICRO, MICRO)

        def inputs(beside: SliceInputs) -> SliceInputs:
            assert stage not in beside.slices
            slices = [TableSlice(0, rows.num_rows, rows, number * MICRO)]
            return SliceInputs({**beside.slices, stage: slices})

        def call(feed: Feed) -> bool:
            if feed.awaited not in (None, stage):
                return False
            feed.read_stream(stage, number, inputs)
            return True

        self.micro[name] += bool(self.run(call, kill))

    @property
    def streamed(self) -> bool:
        return all(number * MICRO >= ROWS for number in self.micro.values())


def counted(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Counter[str]]:
    return {sink: Counter(key_of(plain(row)) for row in mine) for sink, mine in rows.items()}


@pytest.mark.parametrize("seed", range(6))
def test_each_row_is_read_once_whenever_the_driver_is_killed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    driver = Driver(tmp_path)
    kills = 0
    while not driver.streamed:
        kill = chance.choice(STEPS) if chance.random() < 0.4 else None
        kills += kill is not None
        name = chance.choice(["a", "b", "file"])
        if name == "file":
            driver.run(lambda feed: feed.step(), kill)
        elif driver.micro[name] * MICRO < ROWS:
            driver.stream(name, kill)
    while driver.run(lambda feed: feed.step()):
        pass
    driver.stop()
    assert kills > 3
    flow = driver.flow
    oracle = Interpreter(resolve(flow.name, flow.operators))
    oracle.batch({name: table.to_pylist() for name, table in TABLES.items()}, 0.0)
    assert all(oracle.results.values())
    assert counted(driver.results()) == counted(oracle.results)


def test_a_run_retains_the_offsets_of_inputs_that_it_does_not_read(tmp_path: Path) -> None:
    """The file is a stream for a while, as where history is read before a topic."""
    driver = Driver(tmp_path)
    driver.stream("a")
    other = [stage_of(name) for name in ("a", "b", "file")]
    driver.feed = Feed(driver._loop(), {}, other, LIMIT, False, driver.commits.append)
    driver.stream("b")
    driver.feed = None
    driver.stop()
    driver.stream("a")
    last = last_intent(driver._loop().store)
    assert last is not None and last.offsets[stage_of("file")] == [LIMIT, 2 * LIMIT]
    assert last.offsets[STREAM + stage_of("file")] == [0, 0]
    driver.stop()


def test_an_unfinished_batch_needs_the_inputs_that_it_reads(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.stream("a", kill="run")
    other = [stage_of(name) for name in ("a", "b", "file")]
    with pytest.raises(SourceError, match="batch 0 was begun with rows 0 to 6 of file"):
        Feed(driver._loop(), {}, other, LIMIT, False, driver.commits.append)
    driver.stop()


def test_micro_batches_that_are_skipped_are_detected(tmp_path: Path) -> None:
    """The checkpoint of another state directory, or a state directory restored from a copy."""
    driver = Driver(tmp_path)
    driver.stream("a")
    driver.micro["a"] = 2
    with pytest.raises(StateError, match="micro-batch 2 of a instead of 1"):
        driver.stream("a")
    driver.stop()


def test_an_unfinished_micro_batch_comes_before_all_others_and_repeats_its_rows(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path)
    driver.stream("a", kill="commit")
    planned = last_intent(driver._loop().store)
    assert planned is not None and planned.offsets == {
        stage_of("file"): [0, LIMIT],
        STREAM + stage_of("a"): [0, 1],
        STREAM + stage_of("b"): [0, 0],
    }
    assert driver.run(lambda feed: feed.awaited) == stage_of("a")
    assert driver.run(lambda feed: feed.step()) is False
    driver.stream("b")
    assert driver.micro == {"a": 0, "b": 0}
    driver.stream("a")
    driver.stream("b")
    assert driver.micro == {"a": 1, "b": 1}
    assert [commit.batch_id for commit in driver.commits] == [0, 1]
    assert last_intent(driver._loop().store).offsets[stage_of("file")] == [LIMIT, 2 * LIMIT]  # type: ignore[union-attr]
    driver.stop()


def test_a_micro_batch_that_is_committed_is_not_read_again(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.stream("a")
    driver.micro["a"] = 0  # Spark had not recorded it
    driver.stream("a")
    assert len(driver.commits) == 1 and driver.micro["a"] == 1
    driver.stop()


def test_rows_that_a_source_has_lost_are_detected(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.stream("a", kill="run")
    driver.file = TABLES["file"].slice(0, 2)
    with pytest.raises(SourceError, match="read rows 0 to 6, but the points now have only 2"):
        driver.stream("a")
    driver.stop()


def test_an_idle_stream_holds_no_operator_back(tmp_path: Path) -> None:
    driver = Driver(tmp_path, idle=IDLE_S)
    flow = driver.flow
    oracle = Interpreter(resolve(flow.name, flow.operators), idle=IDLE_S)
    driver.stream("a")
    rows = {"a": TABLES["a"].slice(0, MICRO), "file": TABLES["file"].slice(0, LIMIT)}
    oracle.batch({name: table.to_pylist() for name, table in rows.items()}, 0.0)
    at, driver._clock = LIMIT, IDLE_S / 2
    while driver.run(lambda feed: feed.step()):
        oracle.batch({"file": TABLES["file"].slice(at, LIMIT).to_pylist()}, IDLE_S / 2)
        at += LIMIT
    assert not driver.results()["sums"], "b has brought nothing, and a little"
    driver._clock = IDLE_S
    oracle.batch({}, IDLE_S)
    assert driver.run(lambda feed: feed.step()), "a batch without rows"
    assert not driver.run(lambda feed: feed.step())
    driver.stop()
    assert oracle.results["sums"]
    assert counted(driver.results()) == counted(oracle.results)


def test_a_state_directory_of_one_stream_continues_with_its_next_micro_batch(
    tmp_path: Path,
) -> None:
    """Version 0.1 recorded no offsets of a stream: a batch had the number of its micro-batch."""
    driver = Driver(tmp_path)
    for _ in range(2):
        driver.stream("a")
    store = driver._loop().store
    body = store.get(INTENTS, 1)
    store.record(Fact(INTENTS, 1, {**body, "offsets": {}}))
    driver.stop()
    driver.feed = None
    driver.micro["a"] = 1
    driver.stream("a")
    assert len(driver.commits) == 2
    driver.stream("a")
    assert [commit.batch_id for commit in driver.commits] == [0, 1, 2]
    driver.stop()
