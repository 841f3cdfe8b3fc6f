"""A state directory that version 0.1 wrote is migrated when opened, and its run continues.

``tests/data/state-0.1`` is such a directory: SQL dumps of its databases and the files that they
name. Version 0.1 ran the pipeline below with a count window, SWARM and the guard. It committed
batches 0 to 3 and was killed in batch 4, after its log replay and before its commit. Then an
operator sent a command, a request was appended, and a reader pinned the window. ``expected.json``
has what version 0.1 itself read from this state, and what it wrote when it continued to the end.
"""

from __future__ import annotations

import base64
import json
import math
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from balance_checks import InProcessCounted
from guard_scenario import worked_by_pairs
from roost import RunConfig
from roost.balance.rules import SwarmRules
from roost.errors import StateError
from roost.queries.guard_state import GuardCommand, decisions, load_guard, pending
from roost.runtime import records
from roost.runtime.records import Intent
from roost.storage import migrate
from roost.storage.agreement import agreed
from roost.storage.inputs import point_files, seen_inputs
from roost.storage.lock import RunLock
from roost.storage.store import Store
from roost.testing import InProcessPipeline
from roost.window.view import read_view

DATA = Path(__file__).parents[1] / "data" / "state-0.1"
EXPECTED = json.loads((DATA / "expected.json").read_text())
BATCHES, ROWS = 8, 12
SAME = ("versions", "plans", "rounds", "windows", "guard_log")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of the old run, with its points and its state."""
    rng = random.Random(11)

    def coordinate() -> float:
        return round(rng.uniform(0, 3) if rng.random() < 0.7 else rng.uniform(0, 8), 3)

    rows = BATCHES * ROWS
    points = {
        "point_id": pa.array(range(rows), pa.int64()),
        "event_time": pa.array(range(0, 10 * rows, 10), pa.int64()),
        "x": [coordinate() for _ in range(rows)],
        "y": [coordinate() for _ in range(rows)],
        "fare": [rng.randrange(50) for _ in range(rows)],
    }
    pq.write_table(pa.table(points), tmp_path / "points.parquet")
    state = tmp_path / "out" / "state"
    state.mkdir(parents=True)
    for name in ("segments", "window"):
        shutil.copytree(DATA / name, state / name)
    for name in ("state", "queries"):
        with closing(sqlite3.connect(state / f"{name}.db")) as db:
            db.executescript((DATA / f"{name}.sql").read_text().replace("@FOLDER@", str(tmp_path)))
    return tmp_path


@pytest.fixture
def state(folder: Path) -> Path:
    return folder / "out" / "state"


def old_rows(state: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of the old tables; call it before the migration."""
    with closing(sqlite3.connect(state / "state.db")) as db:
        names = [name for (name,) in db.execute("select name from sqlite_master")]
        return {
            name: db.execute(f"select * from {name} order by 1").fetchall()
            for name in names
            if not name.startswith("sqlite_")
        }


def test_every_fact_is_as_before(folder: Path, state: Path) -> None:
    old = old_rows(state)
    with closing(Store(state)) as store:
        for table in SAME:
            bodies = [json.loads(row[-1]) for row in old[table]]
            assert store.items(table) == [
                (row[0], body) for row, body in zip(old[table], bodies, strict=True)
            ]
            assert bodies, f"the state has no {table}"
        meta = dict(old["meta"])
        recorded = {
            key: value for key, value in json.loads(meta["meta"]).items() if key != "format"
        }
        assert agreed(store) == recorded
        assert store.get("window", "state") == json.loads(meta["window"])
        intents = [json.loads(intent) for _, intent, _ in old["batches"]]
        assert [records.intent(store, body["batch_id"]) for body in intents] == [
            Intent(b["batch_id"], {"space": b["epoch"]}, b["position"], b["offsets"])
            for b in intents
        ]
        commits = [json.loads(done) for _, _, done in old["batches"] if done is not None]
        assert [c.figures for c in records.commits(store)] == [c["figures"] for c in commits]
        assert [c.files for c in records.commits(store)] == [
            tuple(map(tuple, c["files"])) for c in commits
        ]
        last = records.last_intent(store)
        assert last is not None and last.batch_id == 4
        assert records.commit_of(store, 4) is None
        assert records.reached(store) == 470
        points = str(folder / "points.parquet")
        assert point_files(store) == [(points, BATCHES * ROWS, 0)]
        assert seen_inputs(store) == {points}
        assert [batch.batch_id for batch in read_view(store).batches] == [1, 2, 3]
        assert store.leases.oldest(0.0) == 1
        assert store.leases.oldest(5e9) is None


def test_the_guard_is_as_before(state: Path) -> None:
    old = old_rows(state)
    with closing(Store(state)) as store:
        loaded = load_guard(store)
        assert loaded is not None
        guard, applied = loaded
        assert (guard.listing(), guard.gate.counted, guard.round, applied) == (
            EXPECTED["blocked"], EXPECTED["counted"], EXPECTED["round"], 1,
        )  # fmt: skip
        ((_, body, _),) = old["guard_state"]
        name = store.get("guard", "state")["file"]
        assert store.files("guard").map(name)["bytes"].tobytes() == body
        tallies = [(counted, tally) for _, counted, tally in old["guard_tallies"]]
        assert len(tallies) == 2
        assert tallies == [
            (row["counted"], base64.b64decode(row["bytes"]))
            for _, row in store.items("guard_tallies")
        ]
        assert len(decisions(store)) == 2
        assert pending(store, applied) == [
            (2, GuardCommand("block", "mal", "by an operator", True))
        ]
        assert store.commands.after(0) == store.commands.after(1), "applied commands are deleted"
        assert store.commands.append("next") == 3


def test_totals_are_the_sums_of_the_commits_and_rounds(state: Path) -> None:
    with closing(Store(state)) as store:
        totals = store.get("totals", "batches")
        figures = [commit.figures for commit in records.commits(store)]
        rounds = [row for _, row in store.items(records.ROUNDS)]
        assert totals["batches"] == len(figures) == 4
        assert totals["time_max"] == 470
        for name in ("points", "matches", "checks", "dead_points", "dead_requests", "seconds"):
            assert totals[name] == pytest.approx(sum(one[name] for one in figures)), name
        assert totals["points"] == 4 * ROWS
        for machine in ("0", "1"):
            rows = [row for one in figures for row in one["machines"]]
            mine = [row for row in rows if str(row["machine"]) == machine]
            for name, total in totals["machines"][machine].items():
                assert total == pytest.approx(sum(row[name] for row in mine)), name
        assert store.get("totals", "rounds") == {
            "rounds": 4,
            "plan_changes": 0,
            "decision_seconds": pytest.approx(sum(row["seconds"] for row in rounds)),
            "bytes_sent": sum(row["bytes_sent"] for row in rounds),
            "model_error": None,
            "last_reason": rounds[-1]["reason"],
        }


def facts_of(state: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(state / "state.db")) as db:
        return db.execute("select * from facts where tbl <> 'guard'").fetchall()


def test_a_state_is_migrated_once(state: Path) -> None:
    Store(state).close()
    first = facts_of(state)
    with closing(sqlite3.connect(state / "state.db")) as db:
        tables = {name for (name,) in db.execute("select name from sqlite_master")}
    assert {"facts", "commands", "leases"} <= tables
    assert tables.isdisjoint({"batches", "meta", "guard_state", "pins", *SAME})
    Store(state).close()
    assert facts_of(state) == first


def test_a_failed_migration_leaves_the_old_state(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_rows(state)

    def fail(*_: object) -> Iterator[migrate.Row]:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setitem(migrate._CONVERSIONS, "guard_state", fail)
        with pytest.raises(OSError, match="disk is full"):
            Store(state)
    assert old_rows(state) == old
    Store(state).close()
    assert facts_of(state)


def test_a_run_of_an_older_version_is_not_disturbed(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_WAIT_S", 0.05)
    old, lock = old_rows(state), RunLock(state)
    with pytest.raises(StateError, match="run of an older version is using the state"):
        Store(state)
    assert old_rows(state) == old
    Store(state, locked=True).close()
    lock.release()
    assert facts_of(state)


def test_processes_that_migrate_at_once_wait_for_each_other(state: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from roost.storage.store import Store;"
        "store = Store(Path(sys.argv[1])); print(len(store.items('commits'))); store.close()"
    )
    command = [sys.executable, "-c", program, str(state)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in started] == ["4\n"] * 3


def test_a_state_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "state.db")) as db:
        db.execute(f"pragma user_version = {migrate.FORMAT + 1}")
    with pytest.raises(StateError, match="newer version"):
        Store(tmp_path)


def rows_of(out: Path, kind: str) -> list[dict[str, Any]]:
    paths = sorted((out / kind).glob("*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_the_run_continues_with_the_same_results(folder: Path) -> None:
    config = RunConfig(
        points={"path": folder / "points.parquet"},
        space={"bounds": (0, 0, 8, 8), "grid": (8, 8), "coordinates": "plane"},
        engine={"strategy": "swarm", "machines": 2, "batch_rows": ROWS, "available_now": True},
        balance={"round": 100.0},
        window={"kind": "count", "length": 30},
        guard={"enabled": True, "round": 240.0, "users_max": 64},
        out={"dir": folder / "out"},
    )
    executor = InProcessCounted(worked_by_pairs)
    # SWARM as in version 0.1: without rules that came later.
    rules = SwarmRules(pairs=1, measured=False, urgent=math.inf)
    with InProcessPipeline(config, executor=executor, seed=1, swarm=rules) as pipeline:
        report = pipeline.run()
        loaded = load_guard(pipeline.store)
        assert loaded is not None
        end = {
            "matches": sorted(
                [row["query_id"], row["point_id"]] for row in rows_of(config.out.dir, "matches")
            ),
            "aggregates": [
                list(map(str, row.values()))
                for row in sorted(
                    rows_of(config.out.dir, "aggregates"),
                    key=lambda row: json.dumps(row, sort_keys=True, default=str),
                )
            ],
            "dead": sorted(
                [row["origin"], row["reason"]] for row in rows_of(config.out.dir, "dead")
            ),
            "blocked": loaded[0].listing(),
            "guard_log": decisions(pipeline.store),
            "points": report["points"],
            "rounds": report["balance"]["rounds"],
            "plan_changes": report["balance"]["plan_changes"],
        }
    assert end == EXPECTED["end"]
