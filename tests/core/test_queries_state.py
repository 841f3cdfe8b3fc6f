"""The live queries at a log position: the same for every cut of the log, crash and reader."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.commands.queries import QueryService
from roost.errors import RequestError, StateError
from roost.kernel import Index
from roost.model.records import Box, Circle, Query, Terminate
from roost.model.schemas import TIMESTAMP, PointBlock, request_schema
from roost.model.space import Coordinates, Rect, Space
from roost.queries import live
from roost.queries.admission import Rules
from roost.queries.live import TIER, QuerySet, open_index
from roost.queries.log import SqliteQueryLog
from roost.queries.versions import (
    IndexVersion,
    drop_versions,
    segment_files,
    version_at,
    versions_between,
)
from roost.storage.agreement import agree
from roost.storage.cache import WorkerCache
from roost.storage.store import Fact, Store, View

SPACE = Space(Rect(0.0, 0.0, 100.0, 100.0), 10, 10, Coordinates.PLANE)
SCHEMA = request_schema(pa.string(), pa.int64())
RULES = Rules(SPACE, pa.string(), pa.int64())
FOREVER = 1 << 60


class Directory:
    """A state directory that can crash and be opened again."""

    def __init__(self, folder: Path, rules: Rules = RULES) -> None:
        self.folder, self.rules = folder, rules
        self.cache = WorkerCache()
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder)
        self.log = SqliteQueryLog(self.folder / "queries.db")
        self.queries = QuerySet(self.store, self.log, self.rules)

    def close(self) -> None:
        self.store.close()
        self.log.close()

    def crash(self) -> None:
        self.close()
        self.open()

    def append(self, *requests: dict[str, Any]) -> int:
        return self.log.append(pa.Table.from_pylist(list(requests), SCHEMA))

    def replay(self) -> None:
        self.queries.advance(self.log.end())

    def index(self, position: int | None = None) -> Index:
        version = self.queries.advance(self.log.end() if position is None else position)
        return open_index(segment_files(self.store), version.segments, SPACE, self.cache)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "state")
    yield directory
    directory.close()


def register(query_id: str, x: float = 0.0, user: str = "ann", **times: int) -> dict[str, Any]:
    """A box of its own at ``x``, so that matches identify their registration."""
    box = {"x0": x, "y0": 0.0, "x1": x + 0.5, "y1": 1.0}
    return {"op": "register", "query_id": query_id, "user_id": user, **box, **times}


def terminate(query_id: str, user: str = "ann", **times: int) -> dict[str, Any]:
    return {"op": "terminate", "query_id": query_id, "user_id": user, **times}


def table_of(requests: list[dict[str, Any]]) -> pa.Table:
    """A table with the columns that these requests have, and no others."""
    names = dict.fromkeys(name for request in requests for name in request)
    return pa.table({name: [request.get(name) for request in requests] for name in names})


def matches(index: Index, xs: list[float], times: list[int]) -> Counter[tuple[str, float, int]]:
    """(query, x, time) of every match of one point for each x and time."""
    x = np.repeat(np.array(xs, float), len(times)) + 0.25
    time = np.tile(np.array(times, np.int64), len(xs))
    block = PointBlock(x, np.full(x.size, 0.5), time, pa.array(range(x.size)), {})
    found: Counter[tuple[str, float, int]] = Counter()
    for pairs in index.match(block):
        for slot, row in zip(pairs.slots.tolist(), pairs.rows.tolist(), strict=True):
            found[pairs.segment.ids[slot].as_py(), x[row] - 0.25, int(time[row])] += 1
    return found


def live_times(directory: Directory, query_id: str = "q", x: float = 0.0) -> list[int]:
    found = matches(directory.index(), [x], list(range(-1, 13)))
    return [time for name, _, time in sorted(found) if name == query_id]


def refusals(directory: Directory) -> list[tuple[int, str]]:
    refused = directory.queries.refused_between(0, directory.log.end())
    return [(item.position, str(item.reason)) for item in refused]


def reversed_segments(test: Callable[..., None]) -> Callable[..., None]:
    """Have slots in the opposite order of registration, as the order of place may have it."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live, "ORDERED", 1)
            patch.setattr(live, "order_by_place", lambda table, space: table[::-1])
            test(*arguments, **named)

    return run


# -- when a query is live


def test_a_query_is_live_from_at_until_before_its_end(directory: Directory) -> None:
    directory.append(register("q", at=3, expires_at=8))
    assert live_times(directory) == [3, 4, 5, 6, 7]


def test_without_times_a_query_is_live_for_every_event_time(directory: Directory) -> None:
    directory.append(register("q"))
    assert live_times(directory) == list(range(-1, 13))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        pytest.param(6, [3, 4, 5], id="before the expiry"),
        pytest.param(9, [3, 4, 5, 6, 7], id="after the expiry"),
        pytest.param(2, [], id="before it began"),
        pytest.param(None, [], id="from the next batch on"),
    ],
)
@pytest.mark.parametrize("apart", [False, True], ids=["one block", "two versions"])
def test_a_termination_ends_a_query_at_its_own_time(directory, end, expected, apart: bool) -> None:
    directory.append(register("q", at=3, expires_at=8))
    if apart:
        directory.replay()
    directory.append(terminate("q", **({} if end is None else {"at": end})))
    assert live_times(directory) == expected
    assert refusals(directory) == []


def test_the_earliest_of_several_terminations_applies(directory: Directory) -> None:
    directory.append(register("q", at=3), terminate("q", at=9))
    directory.replay()
    directory.append(terminate("q", at=5))
    directory.append(terminate("q", at=7))
    assert live_times(directory) == [3, 4]
    assert refusals(directory) == []


def test_a_termination_leaves_the_segments_open(directory: Directory) -> None:
    directory.append(*(register(f"q{i}") for i in range(20)))
    before = directory.index()
    directory.append(terminate("q7", at=5))
    after = directory.index()
    assert [id(segment) for segment in before.segments] == [id(s) for s in after.segments]
    directory.append(*(register(f"r{i}") for i in range(20)))  # merged with the first segment
    assert not {id(s) for s in after.segments} & {id(s) for s in directory.index().segments}


@pytest.mark.parametrize("apart", [False, True], ids=["one block", "several versions"])
def test_an_identifier_can_be_reused_after_its_query_has_ended(directory, apart: bool) -> None:
    steps = [
        register("q", 0.0, at=2),
        terminate("q", at=6),
        register("q", 10.0, "bob", at=5),  # too early
        register("q", 20.0, "bob", at=6),
        terminate("q", "ann", at=8),  # no longer hers
        terminate("q", "bob", at=8),
    ]
    for step in steps:
        directory.append(step)
        if apart:
            directory.replay()
    assert live_times(directory, x=0.0) == [2, 3, 4, 5]
    assert live_times(directory, x=10.0) == []
    assert live_times(directory, x=20.0) == [6, 7]
    assert refusals(directory) == [(2, "duplicate_query"), (4, "not_owner")]


@pytest.mark.parametrize("apart", [False, True], ids=["one block", "several versions"])
def test_the_first_registration_is_retained(directory: Directory, apart: bool) -> None:
    for step in (register("q", 0.0), register("q", 10.0), register("q", 20.0, "bob")):
        directory.append(step)
        if apart:
            directory.replay()
    found = matches(directory.index(), [0.0, 10.0, 20.0], [5])
    assert found == {("q", 0.0, 5): 1}
    assert refusals(directory) == [(1, "duplicate_query"), (2, "duplicate_query")]


@pytest.mark.parametrize("apart", [False, True], ids=["one block", "several versions"])
def test_only_the_owner_can_terminate_an_existing_query(directory, apart: bool) -> None:
    steps = [
        terminate("q"),
        register("q"),
        terminate("q", "bob"),
        terminate("q"),
        terminate("q"),
        terminate("Q"),
    ]
    for step in steps:
        directory.append(step)
        if apart:
            directory.replay()
    directory.replay()
    assert refusals(directory) == [
        (0, "unknown_query"),
        (2, "not_owner"),
        (4, "unknown_query"),
        (5, "unknown_query"),
    ]


@pytest.mark.parametrize("apart", [False, True], ids=["one block", "several versions"])
@reversed_segments
def test_an_earlier_lifetime_remains_when_the_last_one_is_terminated(directory, apart) -> None:
    steps = [
        register("q", 0.0, at=2), terminate("q", at=6),
        register("q", 10.0, at=6), terminate("q"),
        register("q", 20.0, at=4),  # the first lifetime lasts until 6
        register("q", 30.0, at=7),
    ]  # fmt: skip
    for step in steps:
        directory.append(step)
        if apart:
            directory.replay()
    found = matches(directory.index(), [0.0, 10.0, 20.0, 30.0], list(range(10)))
    assert found == {("q", 0.0, t): 1 for t in range(2, 6)} | {("q", 30.0, t): 1 for t in (7, 8, 9)}
    assert refusals(directory) == [(4, "duplicate_query")]


# -- the log against an interpreter


@dataclass
class Lifetime:
    start: int
    stop: int
    user: str
    x: float


@dataclass
class Reference:
    """The log, one request at a time."""

    lives: dict[str, list[Lifetime]] = field(default_factory=dict)
    refused: list[tuple[int, str]] = field(default_factory=list)
    position: int = 0

    def take(self, request: dict[str, Any]) -> None:
        reason = self._judge(request)
        if reason is not None:
            self.refused.append((self.position, reason))
        self.position += 1

    def _judge(self, request: dict[str, Any]) -> str | None:
        if request["op"] == "register" and request["x0"] > request["x1"]:
            return "inverted_box"
        mine = self.lives.setdefault(request["query_id"], [])
        at = request.get("at")
        start = -FOREVER if at is None else at
        if request["op"] == "register":
            if mine and mine[-1].stop > start:
                return "duplicate_query"
            expires = request.get("expires_at")
            stop = FOREVER if expires is None else expires
            if start < stop:
                mine.append(Lifetime(start, stop, request["user_id"], request["x0"]))
            return None
        if not mine:
            return "unknown_query"
        if mine[-1].user != request["user_id"]:
            return "not_owner"
        mine[-1].stop = min(mine[-1].stop, start)
        if mine[-1].stop <= mine[-1].start:
            mine.pop()
        return None

    def matches(self, xs: list[float], times: list[int]) -> Counter[tuple[str, float, int]]:
        found: Counter[tuple[str, float, int]] = Counter()
        for query_id, lives in self.lives.items():
            for life in lives:
                for time in times:
                    if life.x in xs and life.start <= time < life.stop:
                        found[query_id, life.x, time] += 1
        return found


moments = st.none() | st.integers(0, 6)
names, users = st.sampled_from("abc"), st.sampled_from(["ann", "bob"])
bad_boxes = st.integers(0, 9).map(lambda n: n == 0)
registrations = st.builds(
    lambda name, user, at, end, bad: {
        "op": "register", "query_id": name, "user_id": user, "bad": bad, "at": at,
        "expires_at": end,
    },
    names, users, moments, moments, bad_boxes,
)  # fmt: skip
terminations = st.builds(
    lambda name, user, at: {"op": "terminate", "query_id": name, "user_id": user, "at": at},
    names, users, moments,
)  # fmt: skip
events = st.sampled_from(
    ["go on", "go on", "entry", "replay", "crash", "replay and crash", "torn replay"]
)
TIMES = list(range(-1, 8))


def placed(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every registration a box of its own; a bad one is inverted."""
    result = []
    for number, request in enumerate(requests):
        request = dict(request)
        if request["op"] == "register":
            x = float(number)
            width = -0.5 if request.pop("bad") else 0.5
            request |= {"x0": x, "y0": 0.0, "x1": x + width, "y1": 1.0}
        result.append(request)
    return result


def tear(directory: Directory) -> None:
    """Replay the log, but die before the version is recorded: its files belong to no version."""

    class Torn(Exception):
        pass

    def die(*facts: Fact) -> None:
        raise Torn

    directory.store.record = die  # type: ignore[method-assign]
    with pytest.raises(Torn):
        directory.queries.advance(directory.log.end())
    directory.crash()


@given(
    st.lists(st.tuples(registrations | terminations, events), min_size=1, max_size=14),
    st.booleans(),
)
@examples(60)
@reversed_segments
def test_any_batches_and_any_crash_give_the_result_of_the_log(
    tmp_path_factory, steps, own_schemas
) -> None:
    requests = placed([request for request, _ in steps])
    xs = [float(number) for number in range(len(requests))]
    directory = Directory(tmp_path_factory.mktemp("state"))
    reference = Reference()
    waiting: list[dict[str, Any]] = []

    def flush() -> None:
        if waiting and own_schemas:
            directory.log.append(table_of(waiting))
        elif waiting:
            directory.append(*waiting)
        waiting.clear()

    for request, (_, event) in zip(requests, steps, strict=True):
        waiting.append(request)
        reference.take(request)
        if event == "go on":
            continue
        flush()
        if "torn" in event and directory.queries.version.position < directory.log.end():
            tear(directory)
        elif "replay" in event:
            directory.replay()
            assert matches(directory.index(), xs, TIMES) == reference.matches(xs, TIMES)
        if "crash" in event:
            directory.crash()
    flush()
    assert matches(directory.index(), xs, TIMES) == reference.matches(xs, TIMES)
    assert refusals(directory) == reference.refused
    directory.close()


@given(st.lists(registrations | terminations, min_size=1, max_size=12), st.integers(0, 2**12 - 1))
@examples(30)
def test_every_recorded_version_can_be_opened_again(tmp_path_factory, raw, replays: int) -> None:
    requests = placed(raw)
    xs = [float(number) for number in range(len(requests))]
    directory = Directory(tmp_path_factory.mktemp("state"))
    reference = Reference()
    seen: dict[int, Counter] = {}
    for number, request in enumerate(requests):
        directory.append(request)
        reference.take(request)
        if replays >> number & 1:
            directory.replay()
            seen[number + 1] = reference.matches(xs, TIMES)
    directory.replay()
    directory.crash()
    for position, expected in seen.items():
        assert matches(directory.index(position), xs, TIMES) == expected
    directory.close()


def test_a_position_without_a_version_is_not_replaced_by_another(directory) -> None:
    """A batch that failed after its intent requires the version of its own position."""
    for number in range(3):
        directory.append(register(f"q{number}", 10.0 * number))
    directory.queries.advance(1)
    directory.crash()
    directory.replay()
    assert set(matches(directory.index(1), [0.0, 10.0], [5])) == {("q0", 0.0, 5)}
    with pytest.raises(AssertionError, match="log position 2 has no version"):
        directory.queries.advance(2)


# -- segments


def sizes(directory: Directory) -> list[int]:
    return [ref.size for ref in directory.queries.version.segments]


def test_one_more_query_does_not_rebuild_a_large_segment(directory: Directory) -> None:
    directory.append(*(register(f"q{n}", float(n % 90)) for n in range(1000)))
    directory.replay()
    (base,) = directory.queries.version.segments
    before = (Path(segment_files(directory.store).folder) / base.file).stat()
    for number in range(5):
        directory.append(register(f"more{number}"))
        directory.replay()
    assert directory.queries.version.segments[0] == base
    after = (Path(segment_files(directory.store).folder) / base.file).stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert sum(sizes(directory)) == 1005


def test_segment_sizes_decrease_so_that_there_are_few(directory: Directory) -> None:
    for number in range(120):
        directory.append(register(f"q{number}", float(number % 90)))
        directory.replay()
    found = sizes(directory)
    assert sum(found) == 120
    assert all(small * TIER <= large for large, small in itertools.pairwise(found))
    assert len(found) <= 1 + np.log(120) / np.log(TIER)
    expected = Counter((f"q{n}", float(n % 90), 0) for n in range(120))
    assert matches(directory.index(), [float(n) for n in range(90)], [0]) == expected


def test_a_merged_segment_omits_terminated_queries(directory: Directory) -> None:
    directory.append(register("a", 0.0), register("b", 10.0), register("c", 20.0, at=2))
    directory.replay()
    directory.append(terminate("a"), terminate("b", at=5), terminate("c", at=1))
    directory.replay()
    (ref,) = directory.queries.version.segments
    assert ref.ended is not None
    directory.append(register("d", 30.0))
    directory.replay()
    assert sizes(directory) == [2], "b until 5, and d"
    found = matches(directory.index(), [0.0, 10.0, 20.0, 30.0], [0, 4, 5])
    assert found == dict.fromkeys(
        [("b", 10.0, 0), ("b", 10.0, 4), ("d", 30.0, 0), ("d", 30.0, 4), ("d", 30.0, 5)], 1
    )


def test_every_shape_and_condition_survives_merging(tmp_path: Path) -> None:
    rules = Rules(SPACE, pa.int64(), TIMESTAMP, pa.schema([("fare", pa.float64())]))
    directory = Directory(tmp_path / "state", rules)
    circle = {"op": "register", "query_id": 1, "user_id": "ann", "cx": 5, "cy": 5, "radius": 2}
    polygon = {
        "op": "register", "query_id": 2, "user_id": "bob", "predicate": "fare > 5",
        "wkt": "POLYGON ((20 20, 30 20, 30 30, 20 20))",
    }  # fmt: skip
    box = {"op": "register", "query_id": 3, "user_id": "ann", "x0": 0, "y0": 0, "x1": 1, "y1": 1}
    directory.log.append(table_of([circle, polygon]))
    directory.replay()
    ((_, segment, _),) = directory.queries.segments
    before = segment.queries().to_pylist()
    assert len(before) == 2
    directory.log.append(table_of([box]))
    directory.replay()
    ((_, segment, _),) = directory.queries.segments
    assert segment.queries().to_pylist()[:2] == before
    assert directory.queries.predicates(directory.queries.version.segments[0].file) == ("fare > 5",)
    directory.close()


def test_identifiers_that_share_a_hash_are_distinguished(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roost.kernel import segment as segment_module
    from roost.queries import admission as admission_module

    def one_key(ids: pa.Array) -> np.ndarray:
        return np.zeros(len(ids), np.uint64)

    monkeypatch.setattr(segment_module, "hash_ids", one_key)
    monkeypatch.setattr(admission_module, "hash_ids", one_key)
    directory.append(register("a", 0.0), register("b", 10.0))
    directory.replay()
    directory.append(terminate("c"), terminate("a"), register("b", 20.0), register("a", 30.0))
    found = matches(directory.index(), [0.0, 10.0, 20.0, 30.0], [5])
    assert found == {("b", 10.0, 5): 1, ("a", 30.0, 5): 1}
    assert refusals(directory) == [(2, "unknown_query"), (4, "duplicate_query")]


def test_bounds_returns_at_most_the_requested_number(directory: Directory) -> None:
    directory.append(*(register(f"q{n}", float(n % 90)) for n in range(199)))
    directory.replay()
    assert 50 <= directory.queries.bounds(100).shape[0] <= 100
    assert directory.queries.bounds(1000).shape == (199, 4)


def test_an_unchanged_log_records_no_version(directory: Directory) -> None:
    directory.append(register("q"))
    directory.replay()
    version = directory.queries.version
    directory.replay()
    assert directory.queries.version is version
    assert len(versions_between(directory.store, 0, 99)) == 1


# -- readers


@pytest.fixture
def service(tmp_path: Path) -> Iterator[QueryService]:
    with closing(QueryService(tmp_path / "state", create=True)) as service:
        yield service


def test_a_query_service_needs_a_state_directory_unless_it_may_create_one(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not a state directory"):
        QueryService(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_query_service_validates_at_once_by_the_rules_of_a_batch(service: QueryService) -> None:
    assert service.submit(Query("q", Box(0, 0, 1, 1), "ann")) == 1
    refused = [
        (Query("q", Circle(0, 0, 1), "bob"), "duplicate_query"),
        (Query("r", Box(1, 0, 0, 1)), "inverted_box"),
        (Terminate("q", "bob"), "not_owner"),
        (Terminate("z", "ann"), "unknown_query"),
    ]
    for request, reason in refused:
        with pytest.raises(RequestError) as caught:
            service.submit(request)
        assert caught.value.reason == reason
    assert service.log.end() == 1, "what is refused is not logged"
    assert service.submit(Terminate("q", "ann")) == 2
    assert service.submit(Query("q", Circle(0, 0, 1), "bob")) == 3


def test_a_reader_changes_nothing_in_the_state(service: QueryService) -> None:
    service.submit(Query("q", Box(0, 0, 1, 1)))
    assert [segment.ids.to_pylist() for _, segment, _ in service.queries().segments] == [["q"]]
    assert version_at(service.store, FOREVER) is None
    assert list(Path(segment_files(service.store).folder).iterdir()) == []


def test_a_reader_sees_applied_and_later_requests(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "state", Rules(SPACE, pa.string(), TIMESTAMP))
    moment = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)
    service = QueryService(tmp_path / "state")
    service.submit(Query("a", Box(0, 0, 1, 1), at=moment))
    directory.replay()
    files = sorted(path.name for path in Path(segment_files(directory.store).folder).iterdir())
    service.submit(Query("b", Box(0, 0, 1, 1)))
    service.submit(Terminate("a"))
    with pytest.raises(RequestError, match="unknown_query"):
        service.submit(Terminate("a"))
    assert list(service.queries().lookup(pa.array(["a", "b"]))) == [1], "only b is live"
    assert (
        sorted(path.name for path in Path(segment_files(directory.store).folder).iterdir()) == files
    )
    directory.replay()
    assert refusals(directory) == []
    directory.close()
    service.close()


def test_a_reader_opens_the_version_that_replaced_the_one_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run applies the log, and deletes what no batch needs, while a reader opens the files."""
    directory = Directory(tmp_path / "state", Rules(SPACE, pa.string(), TIMESTAMP))
    service = QueryService(tmp_path / "state")
    service.submit(Query("a", Box(0, 0, 1, 1)))
    directory.replay()
    found = version_at(service.store)
    service.submit(Query("b", Box(0, 0, 1, 1)))

    def late(view: View, position: int | None = None) -> IndexVersion | None:
        monkeypatch.undo()
        directory.replay()
        drop_versions(directory.store, directory.log.end())
        return found

    monkeypatch.setattr("roost.queries.live.version_at", late)
    assert list(service.queries().lookup(pa.array(["a", "b"]))) == [0, 1]

    file = segment_files(directory.store).path(service.queries().version.segments[0].file)
    file.unlink()
    with pytest.raises(StateError, match="cannot be mapped"):
        service.queries()
    directory.close()
    service.close()


def test_a_query_service_uses_the_settings_of_the_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    agree(
        store,
        {
            "space": SPACE.to_json(),
            "query_id_type": "int64",
            "points": ["x", "y", "t", None],
            "types": ["int64", "int64"],
            "attributes": [["fare", "double"], ["base", "string"]],
            "polygon_vertices_max": 5,
        },
    )
    store.close()
    service = QueryService(tmp_path / "state")
    for request, reason in (
        (Query("text", Box(0, 0, 1, 1)), "wrong_type"),
        (Query(1, Box(0, 0, 1, 1), predicate="tip > 1"), "bad_predicate"),
        (Query(1, Box(0, 0, 1, 1), at=dt.datetime(2024, 5, 1, tzinfo=dt.UTC)), "wrong_type"),
    ):
        with pytest.raises(RequestError) as caught:
            service.submit(request)
        assert caught.value.reason == reason
    assert service.submit(Query(1, Box(0, 0, 1, 1), predicate="fare > 1", at=5)) == 1
    service.close()
