"""Transactions of real runs: facts that belong together are recorded together, or not at all."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from balance_checks import InProcessCounted
from guard_scenario import worked_by_pairs
from roost import RunConfig
from roost.model.choices import Strategy
from roost.queries.guard_state import BLOCK, GuardCommand, load_guard, send
from roost.queries.versions import version_at
from roost.runtime import records
from roost.storage.store import Fact, Store
from roost.testing import InProcessPipeline
from roost.window.view import batch_of, lease_view, read_view

ROWS, BATCHES = 40, 9
KILLS = [("apply", 1), ("run", 2), ("commit", 3), ("publish", 4), ("round", 5), ("end", 6)]
STRATEGIES = [Strategy.SWARM, Strategy.GLOBAL]


class Killed(Exception):
    pass


class Run:
    """A run with window and guard, restarted whenever it is killed, and its transactions."""

    def __init__(self, folder: Path, strategy: Strategy = Strategy.SWARM) -> None:
        rng = np.random.default_rng(3)
        rows = ROWS * BATCHES
        table = {
            "event_time": np.arange(rows, dtype=np.int64),
            "x": 8 * rng.random(rows) ** 2,
            "y": 8 * rng.random(rows) ** 2,
        }
        pq.write_table(pa.table(table), folder / "points.parquet")
        self.config = RunConfig(
            points={"path": folder / "points.parquet"},
            space={"bounds": (0, 0, 8, 8), "grid": (8, 8), "coordinates": "plane"},
            engine={
                "strategy": strategy,
                "machines": 2,
                "batch_rows": ROWS,
                "available_now": True,
            },
            balance={"round": ROWS - 1.0},
            window={"kind": "count", "length": 3 * ROWS},
            guard={"enabled": True, "round": 2.0 * ROWS, "users_max": 64},
            out={"dir": folder / "out"},
        )
        self.state = self.config.out.state_dir
        self.transactions: list[tuple[Fact, ...]] = []
        self.kills: list[tuple[str, int]] = []

    def request(self, pipeline: InProcessPipeline, number: int) -> None:
        rng = np.random.default_rng(number)
        corner = 4 * rng.random((3, 2))
        names = [f"q{number}-{k}" for k in range(3)]
        block = {
            "op": ["register"] * 3,
            "query_id": names,
            "user_id": ["ann", "bob", f"new-{number}"],
            **{"x0": corner[:, 0], "y0": corner[:, 1]},
            **{"x1": corner[:, 0] + 4, "y1": corner[:, 1] + 4},
        }
        pipeline.log.append(pa.table(block), tag=f"before-{number}")
        if number == 4 and not pipeline.store.commands.after(0):
            send(pipeline.store, GuardCommand(BLOCK, "bob", "test", evict=True))

    def run_once(self) -> None:
        def on_step(step: str, batch_id: int) -> None:
            if (step, batch_id) in self.kills:
                self.kills.remove((step, batch_id))
                raise Killed

        def on_batch(commit: records.Commit) -> None:
            self.request(pipeline, commit.batch_id + 1)

        with InProcessPipeline(
            self.config,
            executor=InProcessCounted(worked_by_pairs),
            on_step=on_step,
            on_batch=on_batch,
            seed=1,
        ) as pipeline:
            pipeline.store._on_record = self.transactions.append
            for number in range(len(records.commits(pipeline.store)) + 1):
                self.request(pipeline, number)
            pipeline.run()

    def to_the_end(self) -> None:
        while True:
            try:
                return self.run_once()
            except Killed:
                continue


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def rows_of(state: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(state / "state.db")) as db:
        return db.execute("select * from facts").fetchall()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_recorded_transactions_of_a_run_rebuild_its_facts(
    tmp_path: Path, strategy: Strategy
) -> None:
    run = Run(tmp_path, strategy)
    run.kills = list(KILLS)
    run.to_the_end()
    assert run.kills == []
    with closing(Store(tmp_path / "rebuilt", durable=False)) as rebuilt:
        for facts in run.transactions:
            rebuilt.record(*facts)
        assert rows_of(rebuilt.folder) == rows_of(run.state)
        tables = Counter(table for table, _, _ in rows_of(run.state))
    assert tables["intents"] == tables["commits"] == BATCHES
    assert tables["rounds"] == BATCHES - 2, "two deaths came between a commit and its round"
    assert {"meta", "versions", "plans", "files", "seen", "windows", "guard"} <= set(tables)
    assert tables["guard_log"], "the guard decided something"


def test_a_commit_and_its_window_are_one_transaction(run: Run) -> None:
    run.to_the_end()
    committed = 0
    for facts in run.transactions:
        tables = Counter(fact.table for fact in facts)
        assert bool(tables["commits"]) == bool(tables["windows"]) == bool(tables["window"])
        committed += tables["commits"]
        if tables["commits"]:
            keys = {f.key for f in facts if f.value and f.table in ("commits", "windows")}
            assert len(keys) == 1, "commit and window row are of the same batch"
    assert committed == BATCHES


def test_a_version_and_what_the_guard_counted_are_one_transaction(run: Run) -> None:
    run.to_the_end()
    begun = next(n for n, facts in enumerate(run.transactions) if facts[0].table == "guard")
    versions = 0
    for facts in run.transactions[begun:]:
        tables = Counter(fact.table for fact in facts if fact.value is not None)
        assert tables["versions"] == tables["guard_tallies"] <= 1
        versions += tables["versions"]
    assert versions >= BATCHES - 1


def test_a_round_and_what_the_guard_decided_are_one_transaction(run: Run) -> None:
    run.to_the_end()
    closed = 0
    for facts in run.transactions:
        tables = Counter(fact.table for fact in facts)
        verdicts = [
            v for f in facts if f.table == "rounds" and f.value for v in f.value["verdicts"]
        ]
        if any(v["reason"].startswith("detection round") for v in verdicts):
            assert tables["guard"] and tables["totals"], "state of the guard, totals of the rounds"
            closed += 1
    assert closed > 2


def full_disk(store: Store, table: str) -> None:
    """Let every transaction fail that writes to a table."""
    with store._database.writing() as db:
        db.execute(
            f"create temp trigger full before insert on facts when new.tbl = '{table}'"
            " begin select raise(abort, 'the disk is full'); end"
        )


@pytest.mark.parametrize(
    ("table", "batch"),
    [("window", 0), ("windows", 3), ("commits", 3), ("versions", 2), ("guard_tallies", 2)],
)
def test_a_transaction_that_fails_leaves_nothing_and_is_repeated(
    run: Run, table: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.kills = [("intent", batch)]
    with pytest.raises(Killed):
        run.run_once()
    open_store = Store.__init__

    def opened(store: Store, *args: Any, **more: Any) -> None:
        open_store(store, *args, **more)
        full_disk(store, table)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "__init__", opened)
        with pytest.raises(sqlite3.IntegrityError, match="disk is full"):
            run.run_once()
    with closing(Store(run.state)) as store:
        done = records.last_commit(store)
        assert (done is None and batch == 0) or (done is not None and done.batch_id == batch - 1)
        if done is not None:
            assert read_view(store).batch_id == batch - 1
        version, loaded = version_at(store), load_guard(store)
        if loaded is not None:
            assert version is not None
            assert loaded[0].gate.counted == version.rows, "each request was counted once"
    run.to_the_end()
    with closing(Store(run.state)) as store:
        assert len(records.commits(store)) == BATCHES
        version, loaded = version_at(store), load_guard(store)
        assert version is not None and loaded is not None
        assert loaded[0].gate.counted == version.rows


def test_a_lease_protects_the_oldest_batch_of_the_window(run: Run) -> None:
    """Readers and the run share nothing but the state directory."""
    taken: list[tuple[int, list[str]]] = []

    def on_batch(commit: records.Commit) -> None:
        if commit.batch_id == 4:
            with closing(Store(run.state, durable=False)) as reader:
                lease, view = lease_view(reader, clock=lambda: 1e10)
                taken.append((lease, [f.file for b in view.batches for f in b.files]))

    executor = InProcessCounted(worked_by_pairs)
    with InProcessPipeline(run.config, executor=executor, seed=1, on_batch=on_batch) as pipeline:
        pipeline.run()
        ((lease, held),) = taken
        files = pipeline.store.files("window")
        assert len({batch_of(name) for name in held}) == 3, "the view had several batches"
        assert set(held) <= set(files.names())
        torn = held[0].replace(".win", "-torn.win.99.partial")  # of a worker that was killed
        files.path(torn).touch()
        listed = {f.file for b in read_view(pipeline.store).batches for f in b.files}
        assert set(held).isdisjoint(listed), "the window has moved on"
        pipeline.store.leases.release(lease)
        for stage in pipeline.stages:
            stage.cleanup()
        assert {*held, torn}.isdisjoint(files.names(partial=True))
