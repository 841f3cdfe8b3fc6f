"""The driver's facts: each there or not at all, the same after every reopening."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roost.errors import StateError
from roost.state.segments import write_arrays
from roost.state.store import Commit, IndexVersion, Intent, SegmentRef, Store


@pytest.fixture(params=["same process", "reopened"])
def again(request: pytest.FixtureRequest):
    """How a fact is looked at after it was written."""
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
def store(tmp_path: Path):
    store = Store(tmp_path / "state")
    yield store
    store.close()


def test_a_new_store_knows_nothing(store: Store) -> None:
    assert store.meta() is None
    assert store.version_at(1 << 62) is None
    assert store.versions_between(0, 1 << 62) == []
    assert store.last_epoch() is None
    assert store.last_intent() is None
    assert store.last_commit() is None
    assert store.commits() == []
    assert store.files() == []
    assert store.seen_files() == set()
    assert store.segment_folder.is_dir()


def test_settings_are_kept_and_the_same_settings_agree(store: Store, again) -> None:
    meta = {"space": {"bounds": [0.0, 1.0]}, "query_id_type": "string"}
    store.agree(meta)
    store = again(store)
    assert store.agree(meta)["query_id_type"] == "string"
    assert store.meta() == {"format": 1, **meta}


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
    store.agree({"query_id_type": "string", "points": ["x"]})
    with pytest.raises(StateError, match=key) as caught:
        store.agree(changed)
    assert str(store.folder) in str(caught.value)


def test_an_intent_is_written_once_and_the_first_stands(store: Store, again) -> None:
    first = Intent(7, 2, 40, {"start": 10, "stop": 20})
    assert store.put_intent(first) == first
    store = again(store)
    assert store.put_intent(Intent(7, 3, 41, {"start": 10, "stop": 99})) == first
    assert store.intent(7) == first
    assert store.intent(8) is None


def test_a_commit_is_there_or_not(store: Store, again) -> None:
    store.put_intent(Intent(0, 0, 1))
    store.put_intent(Intent(1, 0, 2))
    assert store.commit(0) is None
    commit = Commit(0, (("matches/_staging/a", "matches/a"),), {"points": 3, "seconds": 0.5})
    store.put_commit(commit)
    store = again(store)
    assert store.commit(0) == commit
    assert store.commit(1) is None
    assert store.last_commit() == commit
    assert store.last_intent() == Intent(1, 0, 2)
    assert store.commits() == [commit]


def test_commits_come_in_the_order_of_batches(store: Store) -> None:
    for batch_id in (2, 0, 10, 1):
        store.put_intent(Intent(batch_id, 0, 0))
        store.put_commit(Commit(batch_id, (), {}))
    assert [commit.batch_id for commit in store.commits()] == [0, 1, 2, 10]
    last = store.last_commit()
    assert last is not None and last.batch_id == 10


def test_a_plan_epoch_is_written_once(store: Store, again) -> None:
    store.put_plan(0, {"machines": 2})
    store.put_plan(1, {"machines": 3})
    with pytest.raises(Exception, match="UNIQUE"):
        store.put_plan(1, {"machines": 9})
    store = again(store)
    assert store.plan(0) == {"machines": 2}
    assert store.plan(1) == {"machines": 3}
    assert store.last_epoch() == 1
    with pytest.raises(StateError, match="no plan of epoch 5"):
        store.plan(5)


def test_files_keep_their_replay_order(store: Store, again) -> None:
    store.add_files([("b.parquet", 10, 0), ("a.parquet", 5, 10)], ["in/b.csv", "in/a.csv"])
    store.add_files([("c.parquet", 1, 15)], ["in/c.csv"])
    store = again(store)
    assert store.files() == [("b.parquet", 10, 0), ("a.parquet", 5, 10), ("c.parquet", 1, 15)]
    assert store.seen_files() == {"in/a.csv", "in/b.csv", "in/c.csv"}


def test_an_input_seen_twice_adds_no_file(store: Store) -> None:
    store.add_files([("a.parquet", 5, 0)], ["in/a.csv"])
    with pytest.raises(Exception, match="UNIQUE"):
        store.add_files([("a2.parquet", 5, 5)], ["in/a.csv"])
    assert store.files() == [("a.parquet", 5, 0)]


def version(position: int, *files: tuple[str, str | None], refused=()) -> IndexVersion:
    refs = tuple(SegmentRef(file, ended, 1) for file, ended in files)
    return IndexVersion(position, position * 10, refs, tuple(refused))


def test_versions_are_found_by_position(store: Store, again) -> None:
    versions = [
        version(2, ("1.seg", None), refused=[(3, "malformed", "not a record", "oops")]),
        version(5, ("1.seg", "1-5.seg"), ("2.seg", None)),
        version(9, ("3.seg", None)),
    ]
    for item in versions:
        store.put_version(item)
    store = again(store)
    found = [store.version_at(position) for position in range(11)]
    assert found == [
        None, None, *[versions[0]] * 3, *[versions[1]] * 4, *[versions[2]] * 2,
    ]  # fmt: skip
    assert store.versions_between(2, 9) == versions[1:]
    assert store.versions_between(0, 8) == versions[:2]
    assert store.versions_between(9, 9) == []


def test_forgetting_keeps_what_a_batch_may_ask_for(store: Store) -> None:
    for name in ("1.seg", "1-5.seg", "2.seg", "3.seg", "4.seg"):
        write_arrays(store.segment_folder / name, {"a": np.arange(2)})
    store.put_version(version(2, ("1.seg", None)))
    store.put_version(version(5, ("1.seg", "1-5.seg"), ("2.seg", None)))
    store.put_version(version(9, ("3.seg", None)))

    def names() -> list[str]:
        return sorted(path.name for path in store.segment_folder.glob("*.seg"))

    store.drop_versions_before(1)
    assert len(names()) == 5, "nothing is as old as that"
    store.drop_versions_before(7)
    assert store.version_at(7) == version(5, ("1.seg", "1-5.seg"), ("2.seg", None))
    assert store.version_at(4) is None
    assert names() == ["1-5.seg", "1.seg", "2.seg", "3.seg"], "4.seg belongs to no version"
    store.drop_versions_before(9)
    assert names() == ["3.seg"]
    store.drop_versions_before(1 << 40)
    assert names() == ["3.seg"]
