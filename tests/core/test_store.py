"""The store: facts recorded together exist together, and the same after every reopening."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import StateError
from roost.queries.versions import (
    IndexVersion,
    SegmentRef,
    drop_versions,
    segment_files,
    version_at,
    versions_between,
)
from roost.runtime import records
from roost.runtime.records import Commit, Intent
from roost.storage.agreement import agree, agreed
from roost.storage.database import Database
from roost.storage.inputs import add_inputs, point_files, seen_inputs
from roost.storage.store import Fact, Store
from roost.storage.totals import BATCHES, TOTALS, add_batch

Again = Callable[[Store], Store]


@pytest.fixture(params=["same process", "reopened"])
def again(request: pytest.FixtureRequest) -> Iterator[Again]:
    """How a fact is read after it was written."""
    opened: list[Store] = []

    def look(store: Store) -> Store:
        if request.param == "same process":
            return store
        store.close()
        opened.append(Store(store.folder))
        return opened[-1]

    yield look
    for store in opened:
        store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "state")
    yield store
    store.close()


def rows_of(store: Store) -> list[tuple[Any, ...]]:
    """Every row of the facts, read without the store."""
    db = sqlite3.connect(store.folder / "state.db")
    try:
        return db.execute("select tbl, key, value from facts").fetchall()
    finally:
        db.close()


def space(epoch: int) -> dict[str, int]:
    return {"space": epoch}


def test_a_new_store_is_empty(store: Store) -> None:
    assert agreed(store) is None
    assert version_at(store) is None
    assert versions_between(store, 0, 1 << 62) == []
    assert records.last_epoch(store) is None
    assert records.last_intent(store) is None
    assert records.last_commit(store) is None
    assert records.last_round(store) is None
    assert records.commits(store) == store.items(records.ROUNDS) == []
    assert records.reached(store) is None
    assert point_files(store) == []
    assert seen_inputs(store) == set()
    assert segment_files(store).names() == []
    assert store.commands.after(0) == []
    assert store.leases.oldest(0.0) is None


# -- facts


def test_integer_keys_sort_as_numbers_and_text_after_them(store: Store, again: Again) -> None:
    keys = [10, 9, 100, -1, 1 << 40, "10", "a"]
    store.record(*(Fact("t", key, {"key": key}) for key in keys), Fact("u", 5, True))
    store = again(store)
    ordered = [-1, 9, 10, 100, 1 << 40, "10", "a"]
    assert store.items("t") == [(key, {"key": key}) for key in ordered]
    assert [key for key, _ in store.items("t", after=9)] == ordered[2:]
    assert [key for key, _ in store.items("t", after=9, upto=100)] == [10, 100]
    assert [key for key, _ in store.items("t", upto=8)] == [-1]
    assert store.last("t") == (1 << 40, {"key": 1 << 40})
    assert store.last("t", upto=99) == (10, {"key": 10})
    assert store.last("t", upto=-2) is None
    assert store.get("t", 10) == {"key": 10}
    assert store.get("t", "10") == {"key": "10"}
    assert store.get("t", 11) is None
    assert store.items("v") == []


def test_a_fact_replaces_its_row_and_none_deletes_it(store: Store, again: Again) -> None:
    store.record(Fact("t", 1, "old"), Fact("t", 2, "stays"))
    store.record(Fact("t", 1, "new"), Fact("t", 3, "x"), Fact("t", 3, None))
    store.record(Fact("t", 9, None))
    store = again(store)
    assert store.items("t") == [(1, "new"), (2, "stays")]


def test_a_failure_within_a_transaction_leaves_nothing_of_it(store: Store, again: Again) -> None:
    recorded: list[tuple[Fact, ...]] = []
    store._on_record = recorded.append
    store.record(Fact("a", 1, "before"))
    with store._database.writing() as db:
        db.execute(
            "create temp trigger full before insert on facts when new.tbl = 'b'"
            " begin select raise(abort, 'the disk is full'); end"
        )
    with pytest.raises(sqlite3.IntegrityError, match="disk is full"):
        store.record(Fact("a", 1, "after"), Fact("a", 2, "new"), Fact("b", 1, 0))
    with pytest.raises(TypeError):
        store.record(Fact("a", 1, "after"), Fact("a", 2, object()))
    store = again(store)
    assert store.items("a") == [(1, "before")]
    assert recorded == [(Fact("a", 1, "before"),)]


def test_no_facts_are_no_transaction(store: Store) -> None:
    store._on_record = lambda facts: pytest.fail("there was nothing to record")
    store.record()


def test_a_view_shows_one_point_in_time(store: Store) -> None:
    store.record(Fact("t", 1, "old"))
    other = Store(store.folder)
    with store.view() as view:
        assert view.get("t", 1) == "old"
        other.record(Fact("t", 1, "new"), Fact("t", 2, "new"))
        with store.view() as inner:
            assert inner.items("t") == [(1, "old")]
        assert view.last("t") == (1, "old")
        with pytest.raises(AssertionError, match="transaction"):
            store.record(Fact("t", 3, "within a view"))
    assert store.items("t") == [(1, "new"), (2, "new")]
    other.close()


def test_threads_see_only_whole_transactions(store: Store) -> None:
    torn: list[Any] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with store.view() as view:
                values = {value for _, value in view.items("t")}
            if len(values) > 1:
                torn.append(values)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(200):
        store.record(*(Fact("t", key, number) for key in range(5)))
    stop.set()
    for reader in readers:
        reader.join()
    assert torn == []
    assert {value for _, value in store.items("t")} == {199}


keys = st.one_of(st.integers(-3, 3), st.sampled_from(["", "a", "1"]))
values = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.booleans()))
facts = st.builds(Fact, st.sampled_from(["t", "u"]), keys, values)


def test_the_recorded_transactions_rebuild_the_store(tmp_path: Path) -> None:
    sequence: list[tuple[Fact, ...]] = []

    @given(transactions=st.lists(st.lists(facts, max_size=5), max_size=8))
    def check(transactions: list[list[Fact]]) -> None:
        for emptied in (store, rebuilt):
            emptied._database.write("delete from facts")
        sequence.clear()
        for transaction in transactions:
            store.record(*transaction)
        for recorded in sequence:
            rebuilt.record(*recorded)
        model = {(f.table, f.key): f.value for t in transactions for f in t}
        expected = {place: value for place, value in model.items() if value is not None}
        found = {(table, key): v for table in ("t", "u") for key, v in rebuilt.items(table)}
        assert found == expected
        assert rows_of(rebuilt) == rows_of(store)

    one = Store(tmp_path / "one", durable=False, on_record=sequence.append)
    with closing(one) as store, closing(Store(tmp_path / "two", durable=False)) as rebuilt:
        check()


# -- commands and leases


def test_commands_are_numbered_once(store: Store, again: Again) -> None:
    assert [store.commands.append({"n": n}) for n in range(3)] == [1, 2, 3]
    store.commands.trim(3)
    store = again(store)
    assert store.commands.append("later") == 4
    assert store.commands.after(0) == [(4, "later")]
    assert store.commands.append("last") == 5
    assert store.commands.after(4) == [(5, "last")]


def test_the_oldest_lease_counts_until_it_is_released_or_expires(store: Store) -> None:
    leases = store.leases
    new, old = leases.take(9, until=100.0), leases.take(3, until=50.0)
    other = Store(store.folder)
    assert other.leases.oldest(now=50.0) == 3
    leases.release(old)
    assert other.leases.oldest(now=50.0) == 9
    leases.release(old)
    other.leases.take(4, until=60.0)
    assert leases.oldest(now=60.0) == 4
    assert leases.oldest(now=61.0) == 9
    assert leases.oldest(now=60.0) == 9, "an expired lease is deleted"
    leases.release(new)
    assert other.leases.oldest(now=0.0) is None
    other.close()


# -- settings


def test_settings_are_recorded_and_the_same_settings_agree(store: Store, again: Again) -> None:
    meta = {"space": {"bounds": (0.0, 1.0)}, "query_id_type": "string"}
    agree(store, meta)
    store = again(store)
    agree(store, meta)
    assert agreed(store) == {"space": {"bounds": [0.0, 1.0]}, "query_id_type": "string"}


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("query_id_type", {"query_id_type": "int64", "points": ["x"]}),
        ("points", {"query_id_type": "string", "points": ["x", "y"]}),
        ("points", {"query_id_type": "string"}),
        ("extra", {"query_id_type": "string", "points": ["x"], "extra": 1}),
    ],
)
def test_other_settings_are_refused_by_name(store: Store, key: str, changed: dict) -> None:
    agree(store, {"query_id_type": "string", "points": ["x"]})
    with pytest.raises(StateError, match=key) as caught:
        agree(store, changed)
    assert str(store.folder) in str(caught.value)


# -- intents, commits, plans, inputs


def test_an_intent_is_written_once_and_the_first_stands(store: Store, again: Again) -> None:
    first = Intent(7, space(2), 40, {"start": 10, "stop": 20}, {"window": [1]})
    assert records.begin(store, first) == first
    store = again(store)
    assert records.begin(store, Intent(7, space(3), 41, {"start": 10, "stop": 99})) == first
    assert records.intent(store, 7) == first
    assert records.intent(store, 8) is None


def test_a_commit_is_there_or_not(store: Store, again: Again) -> None:
    records.begin(store, Intent(0, space(0), 1))
    records.begin(store, Intent(1, space(0), 2))
    assert records.commit_of(store, 0) is None
    commit = Commit(0, (("matches/_staging/a", "matches/a"),), {"points": 3, "seconds": 0.5})
    store.record(records.commit_fact(commit))
    store = again(store)
    assert records.commit_of(store, 0) == commit
    assert records.commit_of(store, 1) is None
    assert records.last_commit(store) == commit
    assert records.last_intent(store) == Intent(1, space(0), 2)
    assert records.commits(store) == [commit]


def test_commits_are_in_the_order_of_batches(store: Store) -> None:
    for batch_id in (2, 0, 10, 1):
        store.record(records.commit_fact(Commit(batch_id, (), {})))
    assert [commit.batch_id for commit in records.commits(store)] == [0, 1, 2, 10]
    last = records.last_commit(store)
    assert last is not None and last.batch_id == 10


def test_the_newest_event_time_of_all_batches_is_found(store: Store, again: Again) -> None:
    totals: dict[str, Any] = {}
    for time_max in (7, None, 9, 3):
        totals = add_batch(totals, {"time_max": time_max})
    store.record(Fact(TOTALS, BATCHES, totals))
    assert records.reached(again(store)) == 9


def test_plans_are_found_by_epoch(store: Store, again: Again) -> None:
    for epoch in (0, 1):
        store.record(Fact(records.PLANS, epoch, {"epoch": epoch, "machines": epoch + 2}))
    store = again(store)
    assert records.plan_of(store, 0) == {"epoch": 0, "machines": 2}
    assert records.plan_of(store, 1) == {"epoch": 1, "machines": 3}
    assert records.last_epoch(store) == 1
    with pytest.raises(StateError, match="no plan of epoch 5"):
        records.plan_of(store, 5)


def test_files_retain_their_replay_order(store: Store, again: Again) -> None:
    add_inputs(store, [("b.parquet", 10, 0), ("a.parquet", 5, 10)], ["in/b.csv", "in/a.csv"])
    add_inputs(store, [("c.parquet", 1, 15)], ["in/c.csv"])
    store = again(store)
    assert point_files(store) == [
        ("b.parquet", 10, 0), ("a.parquet", 5, 10), ("c.parquet", 1, 15),
    ]  # fmt: skip
    assert seen_inputs(store) == {"in/a.csv", "in/b.csv", "in/c.csv"}


def test_an_input_seen_twice_adds_no_file(store: Store) -> None:
    add_inputs(store, [("a.parquet", 5, 0)], ["in/a.csv"])
    with pytest.raises(StateError, match=r"in/a\.csv"):
        add_inputs(store, [("a2.parquet", 5, 5)], ["in/a.csv"])
    assert point_files(store) == [("a.parquet", 5, 0)]


# -- index versions


def version(position: int, *files: tuple[str, str | None], refused=()) -> IndexVersion:
    refs = tuple(SegmentRef(file, ended, 1) for file, ended in files)
    return IndexVersion(position, position * 10, refs, tuple(refused))


def test_versions_are_found_by_position(store: Store, again: Again) -> None:
    versions = [
        version(2, ("1.seg", None), refused=[(3, "malformed", "not a record", "oops")]),
        version(5, ("1.seg", "1-5.seg"), ("2.seg", None)),
        version(9, ("3.seg", None)),
    ]
    for item in versions:
        store.record(item.fact())
    store = again(store)
    found = [version_at(store, position) for position in range(11)]
    assert found == [
        None, None, *[versions[0]] * 3, *[versions[1]] * 4, *[versions[2]] * 2,
    ]  # fmt: skip
    assert version_at(store) == versions[2]
    assert versions_between(store, 2, 9) == versions[1:]
    assert versions_between(store, 0, 8) == versions[:2]
    assert versions_between(store, 9, 9) == []


def test_cleanup_retains_versions_that_a_batch_may_request(store: Store) -> None:
    files = segment_files(store)
    for name in ("1.seg", "1-5.seg", "2.seg", "3.seg", "4.seg"):
        files.write(name, {"a": np.arange(2)})
    store.record(version(2, ("1.seg", None)).fact())
    store.record(version(5, ("1.seg", "1-5.seg"), ("2.seg", None)).fact())
    store.record(version(9, ("3.seg", None)).fact())

    drop_versions(store, 1)
    assert len(files.names()) == 5, "no version is as old as that"
    drop_versions(store, 7)
    assert version_at(store, 7) == version(5, ("1.seg", "1-5.seg"), ("2.seg", None))
    assert version_at(store, 4) is None
    assert files.names() == ["1-5.seg", "1.seg", "2.seg", "3.seg"], "4.seg belongs to no version"
    drop_versions(store, 9)
    assert files.names() == ["3.seg"]
    drop_versions(store, 1 << 40)
    assert files.names() == ["3.seg"]


@pytest.mark.parametrize(("durable", "level"), [(True, "full"), (False, "normal")])
def test_a_durable_transaction_waits_for_the_disk(
    durable: bool, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str] = []
    monkeypatch.setattr(Database, "synchronous", lambda self, level: levels.append(level))
    Database(tmp_path / "a.db", durable=durable).close()
    with closing(Store(tmp_path / "store")):
        assert levels == [level, "full"]
