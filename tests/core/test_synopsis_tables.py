"""The tables of a synopsis have all its rows once, also while a run goes on."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import RunConfig
from roost.errors import ConfigError, StateError
from roost.synopsis import Scope, build, count, record_batches
from roost.synopsis.reader import LEASE_S, SynopsisReader
from roost.synopsis.tables import LISTING, TableQuery, Task, record_schema
from roost.testing import InProcessPipeline
from synopsis_tables import FEATURES, START_US, Rows, make_spec, make_table

TABLE = make_table(4, 3_000)


def config_of(folder: Path, **synopsis: int) -> RunConfig:
    folder.mkdir(exist_ok=True)
    pq.write_table(TABLE, folder / "points.parquet")
    return RunConfig(
        points={"path": str(folder / "points.parquet")},
        engine={"available_now": True, "batch_rows": 200, "machines": 2},
        synopsis={
            **{"features": FEATURES, "bins": 16, "place_bits": 16, "bucket_days": 7},
            **{"learn_rows": 700, **synopsis},
        },
        out={"dir": folder / "out", "sink": "count"},
    )


def run(config: RunConfig, **hooks: object) -> Path:
    with InProcessPipeline(config, **hooks) as pipeline:
        pipeline.run()
    return config.out.state_dir


def read(query: TableQuery, tasks: list[Task] | None = None) -> pa.Table:
    batches = [batch for task in tasks or query.plan() for batch in task.read()]
    return pa.Table.from_batches(batches, query.schema())


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Coarser bands, deltas that are not folded, and two owners."""
    folder = tmp_path_factory.mktemp("run")
    return run(config_of(folder, fold_files=3, memory=1 << 16))


def test_the_schema_is_that_of_the_records() -> None:
    built = build(TABLE, make_spec(TABLE))
    for batch in record_batches(built):
        assert batch.schema == record_schema(built.spec)


def test_records_contain_the_rows_of_every_hour(state: Path) -> None:
    found = read(TableQuery(state))
    rows = Rows(TABLE)
    assert sum(found["rows"].to_pylist()) == TABLE.num_rows
    with closing(duckdb.connect()) as db:
        db.register("found", found)
        columns = {"x": rows.column("lon"), "y": rows.column("lat")}
        db.register("points", pa.table(columns | {"t": TABLE["event_time"]}))
        missing = db.execute(
            "select count(*) from points p where not exists (select * from found f where "
            "x between x0 and x1 and y between y0 and y1 and time_from <= t and t < time_until)"
        ).fetchone()
    assert missing == (0,)


def test_scopes_bound_their_rows(state: Path) -> None:
    rows = Rows(TABLE)
    for scope in (
        Scope(since=START_US + 9 * 86_400_000_000, hours=(22, 3)),
        Scope(hours=(3, 7), until=START_US + 20 * 86_400_000_000),
    ):
        found, inside = read(TableQuery(state, scope=scope)), int(rows.inside(scope).sum())
        sure, most = sum(found["rows_sure"].to_pylist()), sum(found["rows"].to_pylist())
        assert 0 < sure <= inside <= most < TABLE.num_rows
        with closing(SynopsisReader(state)) as reader:
            expected = count(reader.synopsis(), scope)
        assert (sure, most) == (expected.low, expected.high)


def test_a_copy_follows_the_run(tmp_path: Path) -> None:
    """New files are added, and files that are not listed any more removed, after every batch."""
    config, copy, last, kinds = config_of(tmp_path, fold_files=9), dict[str, int](), -1, set[str]()
    saved = 0

    def follow(step: str, number: int) -> None:
        nonlocal last, saved
        if step not in ("publish", "end"):  # before and after a fold is recorded
            return
        folder = config.out.state_dir
        new = read(TableQuery(folder, since_batch=last))
        for row in new.group_by("file").aggregate([("rows", "sum")]).to_pylist():
            copy[row["file"]] = row["rows_sum"]
        listing = read(TableQuery(folder, LISTING))
        listed = set(listing["file"].to_pylist())
        kinds.update(listing["kind"].to_pylist())
        for name in copy.keys() - listed:
            del copy[name]
        assert set(copy) == listed and sum(copy.values()) == 200 * (number + 1)
        saved += new.num_rows < read(TableQuery(folder)).num_rows
        last = number

    run(config, on_step=follow)
    assert kinds == {"rows", "delta", "base"}
    assert saved > 3, "some reads return less than all records"


def test_a_file_belongs_to_the_batch_that_wrote_it(tmp_path: Path) -> None:
    """Without folds, the records after a batch are those of the later batches."""
    state = run(config_of(tmp_path, fold_files=1_000))
    for batch in (3, 9, 13):
        later = read(TableQuery(state, since_batch=batch))
        assert sum(later["rows"].to_pylist()) == TABLE.num_rows - 200 * (batch + 1)
    assert read(TableQuery(state, since_batch=14)).num_rows == 0


def test_a_plan_can_be_read_until_its_lease_expires(tmp_path: Path) -> None:
    config, plans = config_of(tmp_path, fold_files=3), dict[int, list[Task]]()

    def plan(step: str, number: int) -> None:
        if (step, number) == ("end", 5):
            plans[number] = TableQuery(config.out.state_dir).plan()

    run(config, on_step=plan)
    assert sum(read(TableQuery(config.out.state_dir), plans[5])["rows"].to_pylist()) == 1_200
    with closing(SynopsisReader(config.out.state_dir)) as reader:
        held = reader._store.leases.oldest(0.0)
        assert held == 5, "closing the reader of a plan does not release its lease"
        reader._store.leases.oldest(time.time() + 2 * LEASE_S)
    run(config)
    with pytest.raises(StateError, match="its lease expired; load the table again"):
        read(TableQuery(config.out.state_dir), plans[5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "path: got None, expected a state directory"),
        ({"path": "s", "table": "groups"}, "table: got 'groups', expected one of records, "),
        ({"path": "s", "share": "0.1"}, "share: got '0.1', expected table=synthetic, too"),
        (
            {"path": "s", "table": "synthetic", "share": "-1"},
            "share: got -1.0, expected a number from 0 up",
        ),
        ({"path": "s", "table": "synthetic", "seed": "a"}, "seed: got 'a', expected a whole"),
        ({"path": "s", "since_batch": "x"}, "since_batch: got 'x', expected a whole number"),
        ({"path": "s", "hours": "2"}, "option.hours: got ['2'], expected 2 numbers"),
        ({"path": "s", "ring": "2"}, "ring: got '2', expected one of path"),
    ],
)
def test_wrong_options_name_what_is_wrong(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TableQuery.from_options(options)
    assert message in str(raised.value)


def test_synthetic_rows_of_all_files_have_the_statistics_of_the_rows(state: Path) -> None:
    """Also of bands without planes, in which leaves tell no value."""
    options = {"path": str(state), "table": "synthetic"}
    drawn = read(TableQuery.from_options({**options, "share": "1.5"}))
    assert abs(drawn.num_rows - 1.5 * TABLE.num_rows) < 20
    found, true = Rows(drawn), Rows(TABLE)
    for name in ("temp", "rain", "wind", "level"):
        ours, theirs = found.column(name), true.column(name)
        spread = np.nanstd(theirs)
        assert abs(np.nanmean(ours) - np.nanmean(theirs)) < 0.1 * spread, name
        assert np.nanstd(ours) == pytest.approx(spread, rel=0.15), name
        assert abs(np.isnan(ours).mean() - np.isnan(theirs).mean()) < 0.02, name
    assert drawn["kind"].null_count < 0.3 * drawn.num_rows
    scoped = {**options, "share": "0.5", "circle": "10.2,50,60000", "predicate": "temp > 15"}
    part = read(TableQuery.from_options(scoped))
    scope = TableQuery.from_options(scoped).scope
    inside = Rows(part).inside(scope) & (Rows(part).column("temp") > 15.0)
    assert part.num_rows > 50 and inside.all()
    with closing(SynopsisReader(state)) as reader:
        assert part.num_rows <= 0.5 * reader.query("count", scope=scope).result.high + 20
    assert part.equals(read(TableQuery.from_options(scoped))), "the seed repeats them"
    assert not part.equals(read(TableQuery.from_options({**scoped, "seed": "1"})))


def test_options_are_a_scope() -> None:
    given = {"circle": "11,49,5e4", "since": "1704067200000000", "hours": "2,4", "path": "s"}
    scope = TableQuery.from_options(given).scope
    assert (scope.shape.radius, scope.since, scope.hours) == (5e4, START_US, (2, 4))
