"""Set sketches of a run: what they promise holds through folds, kills, budgets and age."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import RunConfig
from roost.cli import main
from roost.errors import ConfigError
from roost.model.settings import load_config
from roost.runtime.executor import InProcessExecutor
from roost.stages.synopsis import HEAD_BYTES
from roost.storage.store import Store
from roost.synopsis import Scope, build, cardinality, count, frequency
from roost.synopsis.catalogue import FileKind, open_part, read_catalogue
from roost.synopsis.reader import SynopsisReader
from roost.synopsis.sets import spans_of
from roost.testing import InProcessPipeline
from synopsis_tables import DAY_US, DAYS, START_US, make_table

ROWS = 2_400
SETS = [
    {"columns": ["user"], "members": 400, "counters": 300, "period_days": 5},
    {"columns": "lon, lat", "members": 2_000, "counters": 0},
    {"columns": ["kind", "temp"], "binned": ["temp"], "counters": 400, "members": 500},
]
ALL = Scope()


def make_rows() -> pa.Table:
    rng = np.random.default_rng(5)
    users = np.array([f"user {k}" for k in range(300)], object)
    names = pa.array(users[rng.zipf(1.4, ROWS) % 300], mask=rng.random(ROWS) < 0.1)
    return make_table(9, ROWS).append_column("user", names).sort_by("event_time")


TABLE = make_rows()
USERS = TABLE["user"].to_pylist()
TIMES = np.asarray(TABLE["event_time"].cast(pa.int64()))


class Killed(Exception):
    pass


def config(folder: Path, sets: Any = SETS, **synopsis: Any) -> RunConfig:
    pq.write_table(TABLE, folder / "points.parquet")
    given = {"features": ("temp", "wind", "kind"), "bins": 16, "learn_rows": 500, "fold_files": 3}
    return RunConfig(
        points={"path": str(folder / "points.parquet")},
        space={"bounds": (-180, -90, 180, 90)},
        engine={"machines": 2, "available_now": True, "batch_rows": 200},
        synopsis={**given, "sets": sets, **synopsis},
        out={"dir": folder / "out", "sink": "count"},
    )


def run(settings: RunConfig, **hooks: Any) -> None:
    with InProcessPipeline(settings, executor=InProcessExecutor(2), **hooks) as pipeline:
        pipeline.run()


def spans() -> Iterator[tuple[Scope, Counter[str]]]:
    """Whole days, and how often each user occurs in them."""
    rng = np.random.default_rng(1)
    for since, until in ((0, DAYS + 1), *np.sort(rng.integers(0, DAYS + 1, (12, 2)), axis=1)):
        if since == until:
            continue
        low, high = START_US + int(since) * DAY_US, START_US + int(until) * DAY_US
        own = [u for u, t in zip(USERS, TIMES, strict=True) if u is not None and low <= t < high]
        yield Scope(since=low, until=high), Counter(own)


def check_promises(reader: SynopsisReader) -> None:
    below = queries = 0
    for scope, counts in spans():
        for user in {*list(counts)[:40], "user 7", "user 250"}:
            found = reader.query("contains", values={"user": user}, scope=scope).result
            assert found.high == 1.0 or not counts[user], "a member is never left out"
            if not counts[user]:
                assert found.low == 0.0 or found.confidence < 1.0
            own = reader.query("frequency", values={"user": user}, scope=scope).result
            assert own.high >= counts[user], "guaranteed"
            below += own.low > counts[user]
            queries += 1
        distinct = reader.query("cardinality", columns=["user"], scope=scope).result
        assert distinct.low - 3 <= len(counts) <= distinct.high + 3
    assert below <= 0.1 * queries
    missing = reader.query("contains", values={"user": "nobody"}).result
    assert missing.value == 0.0 and missing.kind == "guaranteed"


def test_an_open_reader_counts_folded_sketches_once(tmp_path: Path) -> None:
    settings = config(tmp_path)
    user = Counter(own for own in USERS if own is not None).most_common(1)[0][0]
    readers: list[SynopsisReader] = []
    batches = set()

    def read(at: str, batch: int) -> None:
        if at != "cleanup":
            return
        if not readers:
            readers.append(SynopsisReader(settings.out.state_dir))
        found = readers[0].query("frequency", values={"user": user})
        assert found.batch_id is not None
        count = USERS[: 200 * (found.batch_id + 1)].count(user)
        assert count <= found.result.high <= 1.2 * count + 1
        batches.add(found.batch_id)

    run(settings, on_step=read)
    readers[0].close()
    assert len(batches) == ROWS // 200


@pytest.mark.parametrize("step", [None, "run", "after", "commit", "cleanup", "round"])
def test_sets_of_a_run_equal_those_of_its_rows(step: str | None, tmp_path: Path) -> None:
    settings = config(tmp_path, exchange=step == "after")
    left = {2, 6, 9}

    def kill(at: str, batch: int) -> None:
        if at == step and batch in left:
            left.discard(batch)
            raise Killed

    while step and left:
        with pytest.raises(Killed):
            run(settings, on_step=kill)
    run(settings)
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        found = reader.synopsis()
        whole = build(TABLE, reader.spec, found.bins)
        for scope, counts in spans():
            assert count(found, scope).value == count(whole, scope).value
            for columns in (["user"], ["lon", "lat"], ["temp", "kind"]):
                ours, theirs = (cardinality(sketch, columns, scope) for sketch in (found, whole))
                for name in ("value", "low", "high"):
                    assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)
            for user in list(counts)[:10]:
                ours, theirs = (frequency(s, {"user": user}, scope) for s in (found, whole))
                # Sketches that are not merged collide less.
                assert counts[user] <= ours.high <= theirs.high
        check_promises(reader)


def test_sets_count_towards_the_budget(tmp_path: Path) -> None:
    """Periods get longer with age; what they promise still holds."""
    memory = 1 << 17
    sets = [{"columns": "user", "members": 4_000, "counters": 400, "period_days": 1}]
    settings = config(tmp_path, sets, memory=memory, fold_files=2)
    lengths: dict[int, int] = {}

    def check(step: str, number: int) -> None:
        if step != "end":
            return
        with closing(Store(settings.out.state_dir, durable=False)) as store:
            for file in read_catalogue(store).of_kind(FileKind.BASE):
                assert file.nbytes <= memory + HEAD_BYTES
                for k, part in enumerate(file.parts):
                    if part.sets:
                        records = open_part(store.files("synopsis"), (file.name, k)).sets
                        lengths.update({s.period: s.length for s in spans_of(records)})

    run(settings, on_step=check)
    ordered = [lengths[period] for period in sorted(lengths)]
    assert ordered[0] > 4 and ordered[-1] < ordered[0], "the older, the longer"
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        check_promises(reader)


def test_periods_leave_after_the_retention(tmp_path: Path) -> None:
    sets = [{"columns": "user", "period_days": 1}]
    settings = config(tmp_path, sets, study=2, retention=15, fold_files=2, bucket_days=1)
    run(settings)
    with closing(SynopsisReader(settings.out.state_dir)) as reader:
        old = Scope(until=START_US + 10 * DAY_US)
        recent = Scope(since=START_US + 30 * DAY_US)
        assert reader.query("cardinality", columns="user", scope=old).result.high == 0.0
        assert reader.query("cardinality", columns="user", scope=recent).result.low > 10.0


def test_set_queries_before_bins_are_chosen(tmp_path: Path) -> None:
    run(config(tmp_path, learn_rows=1_000_000))
    with closing(SynopsisReader(tmp_path / "out" / "state")) as reader:
        check_promises(reader)


def test_set_queries_on_the_command_line_and_standing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standing = [{"name": "users", "query": "cardinality", "columns": ["user"]}]
    settings = config(tmp_path, queries=standing)
    run(settings)
    state = str(settings.out.state_dir)
    assert main(["synopsis", state, "cardinality", "columns=user", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    files = sorted((settings.out.dir / "synopsis").glob("*.parquet"))
    last = pq.read_table(files[-1]).to_pylist()[0]
    assert (last["value"], last["low"], last["high"]) == tuple(
        found[name] for name in ("value", "low", "high")
    )
    query = json.dumps({"query": "frequency", "values": {"user": "user 1"}})
    assert main(["synopsis", state, query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["high"] >= USERS.count("user 1")
    assert main(["synopsis", state, "contains", 'values={"user": "nobody"}']) == 0
    assert main(["synopsis", state, "cardinality", "columns=user", "--where", "temp > 3"]) == 2


WRONG = [
    ({}, r"synopsis\.sets\.columns: got \(\)"),
    ({"columns": "usr"}, r"synopsis\.sets\.columns: got 'usr', expected one of"),
    ({"columns": [1]}, r"synopsis\.sets\.columns: got \[1\], expected a list of names"),
    ({"columns": "user", "size": 3}, r"synopsis\.sets\.size: got 3, expected one of columns"),
    ({"columns": "user", "lg_k": 3}, r"synopsis\.sets\.lg_k: got 3"),
    ({"columns": "user", "members": "many"}, r"sets\.members: got 'many', expected a whole"),
    ({"columns": "user", "binned": "user"}, r"synopsis\.sets\.binned: got 'user'"),
]


@pytest.mark.parametrize(("own", "message"), WRONG)
def test_wrong_sets_are_refused(own: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config(tmp_path, [own]))


def test_sets_are_a_list_of_tables_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "roost.toml"
    path.write_text('[synopsis]\nfeatures = "temp"\n[[synopsis.sets]]\ncolumns = ["user"]\n')
    assert load_config(path).synopsis.sets == ({"columns": ["user"]},)
