"""The guard of a state directory: which requests pass, what is counted, what survives a crash."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.cli import main
from roost.commands import terminal
from roost.commands.queries import QueryService
from roost.errors import RequestError
from roost.guard.tally import Tally
from roost.guard.users import keys_of, shown
from roost.model.columns import stream_bytes
from roost.model.records import TIME_MIN, Box, Query, Terminate
from roost.model.schemas import request_schema
from roost.model.space import Coordinates, Rect, Space
from roost.queries import guard_state
from roost.queries import live as queries_module
from roost.queries.admission import Rules
from roost.queries.guard_state import (
    BLOCK,
    REPLAYS_MAX,
    UNBLOCK,
    GuardCommand,
    GuardReader,
    GuardState,
    decisions,
    send,
)
from roost.queries.live import QuerySet
from roost.queries.log import EntryKind, SqliteQueryLog, marked
from roost.queries.replay import Replay
from roost.storage.store import Fact, Store

SPACE = Space(Rect(0.0, 0.0, 100.0, 100.0), 10, 10, Coordinates.PLANE)
RULES = Rules(SPACE, pa.string(), pa.int64(), store_positions=True)
SCHEMA = request_schema(pa.string(), pa.int64())
LONG = "x" * 300
USERS = ("ann", "", f"{LONG}1", f"{LONG}2")


class Directory:
    """A state directory with a guard, that can crash and be opened again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder)
        self.log = SqliteQueryLog(self.folder / "queries.db")
        self.state = GuardState.load(self.store) or GuardState.begin(self.store, 7, 1 << 10)
        self.queries = QuerySet(self.store, self.log, RULES, guard=self.state)

    def close(self) -> None:
        self.store.close()
        self.log.close()

    def crash(self) -> None:
        self.close()
        self.open()

    def append(self, *requests: dict[str, Any]) -> None:
        self.log.append(pa.Table.from_pylist(list(requests), SCHEMA))

    def append_nothing(self) -> None:
        """An entry without requests, as others may write into a topic."""
        data = stream_bytes(pa.table({"op": pa.array([], pa.string())}))
        self.log.entries.append([(data, 0)])

    def replay(self) -> None:
        self.state.apply_commands(self.log)
        self.queries.advance(self.log.end())

    def live(self) -> dict[str, tuple[str, int]]:
        """User and place in the log of every live query."""
        found = {}
        for _, segment, ended in self.queries.segments:
            for slot in range(segment.size):
                if ended.get(slot, 1) != TIME_MIN:
                    assert segment.created_position is not None
                    name = segment.ids[slot].as_py()
                    found[name] = (segment.users[slot].as_py(), int(segment.created_position[slot]))
        return found

    def rejections(self) -> list[tuple[int, str]]:
        refused = self.queries.refused_between(0, self.log.end())
        return [(item.position, str(item.reason)) for item in refused]

    def counts(self) -> dict[str, tuple[float, float]]:
        """x1 and x2 of the open round."""
        users = self.state.guard.users
        pairs = users.numbers[: users.used, :2].tolist()
        return {
            name: (new, gone)
            for name, (new, gone) in zip(users.names, pairs, strict=True)
            if new or gone
        }


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "state")
    yield directory
    directory.close()


def shown_as(directory: Directory, user: str) -> str:
    return shown(user, int(directory.state.guard.keys_of(pa.array([user]))[0]))


def register(name: str, user: str = "ann", *, inverted: bool = False) -> dict[str, Any]:
    box = {"x0": 1.0, "y0": 1.0, "x1": 0.0 if inverted else 2.0, "y1": 2.0}
    return {"op": "register", "query_id": name, "user_id": user, **box}


def terminate(name: str, user: str = "ann") -> dict[str, Any]:
    return {"op": "terminate", "query_id": name, "user_id": user}


def evict(user: str) -> dict[str, Any]:
    return {"op": "evict", "user_id": user}


# -- against an interpreter


class Reference:
    """The same, one request at a time and without a file."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[str, int]] = {}
        self.blocked: dict[str, tuple[bool, int]] = {}  # whether to evict, and since when
        self.evicted: dict[str, int] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.position = 0
        self.waiting_requests: list[dict[str, Any]] = []
        self.waiting: list[GuardCommand] = []
        self.snapshots: list[str] = []  # users of snapshot queries that no batch has counted
        self._appended: set[tuple[str, int]] = set()
        self._fresh: dict[str, str] = {}  # registered in the block that admission has now

    def apply_commands(self) -> None:
        since = self.position - 1
        for command in self.waiting:
            if command.action == BLOCK:
                self.blocked[command.user] = (command.evict, since)
            else:
                self.blocked.pop(command.user, None)
        self.waiting.clear()
        self.counts.update((user, "register") for user in self.snapshots)
        self.snapshots.clear()
        for user in sorted(user for user in self.blocked if self._going(user)):
            mark = (user, self.blocked[user][1])
            if mark not in self._appended:
                self.waiting_requests.append({**evict(user), "by the guard": True})
                self._appended.add(mark)

    def blocked_next(self, user: str) -> bool:
        """Whether a user is blocked once the waiting commands are applied."""
        own = [command.action == BLOCK for command in self.waiting if command.user == user]
        return own[-1] if own else user in self.blocked

    def _going(self, user: str) -> bool:
        going, since = self.blocked.get(user, (False, 0))
        return going and self.evicted.get(user) != since

    def replay(self) -> None:
        for request in self.waiting_requests:
            self._take(request)
            self.position += 1
        self._next_block()
        self.waiting_requests.clear()

    def _next_block(self) -> None:
        self.counts.update((user, "register") for user in self._fresh.values())
        self._fresh.clear()

    def _take(self, request: dict[str, Any]) -> None:
        user, operation = request["user_id"], request["op"]
        own = "by the guard" in request
        if own and self._going(user):
            self._next_block()
            self.live = {k: v for k, v in self.live.items() if v[0] != user}
            self.evicted[user] = self.blocked[user][1]
        elif user in self.blocked and not own:
            self.refused[user] += 1
        else:
            if own:  # it has other columns
                self._next_block()
            reason = self._fault(request)
            if reason is not None:
                self.rejections[reason] += 1
            elif operation == "terminate":
                # What is over before it begins is not counted.
                self._fresh.pop(request["query_id"], None)
                self.counts[user, operation] += 1
            else:
                self._fresh[request["query_id"]] = user
            if own:
                self._next_block()

    def _fault(self, request: dict[str, Any]) -> str | None:
        if request["op"] not in ("register", "terminate"):
            return "unknown_op"
        name, user = request["query_id"], request["user_id"]
        if user is None:
            return "missing_field"
        if request["op"] == "register":
            if request["x0"] > request["x1"]:
                return "inverted_box"
            if name in self.live:
                return "duplicate_query"
            self.live[name] = (user, self.position)
            return None
        if name not in self.live:
            return "unknown_query"
        if self.live[name][0] != user:
            return "not_owner"
        del self.live[name]
        return None


users = st.sampled_from(USERS)
requests = st.one_of(
    st.builds(register, st.sampled_from("abcd"), users),
    st.builds(lambda name, user: register(name, user, inverted=True), st.just("z"), users),
    st.builds(terminate, st.sampled_from("abcd"), users),
    st.builds(evict, users),
    st.builds(lambda user: {**register("t", user), "op": "tally"}, users),
    st.builds(lambda name: {**register(name), "user_id": None}, st.sampled_from("abcd")),
)
commands = st.builds(GuardCommand, st.sampled_from([BLOCK, BLOCK, UNBLOCK]), users, st.just("test"))
evictions = st.builds(GuardCommand, st.just(BLOCK), users, st.just("test"), st.just(True))
snapshots = st.tuples(st.just("snapshot"), users)
steps = st.lists(
    st.one_of(
        requests, requests, requests, commands, evictions, snapshots,
        st.sampled_from(["replay", "crash", "empty", "torn replay"]),
    ),
    max_size=40,
)  # fmt: skip


class Killed(Exception):
    pass


def tear(directory: Directory) -> None:
    """Replay the log, but die before the version is recorded, and start again."""

    record = directory.store.record

    def die(*facts: Fact) -> None:
        if any(fact.table == "versions" for fact in facts):
            raise Killed
        record(*facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory.store, "record", die)
        with contextlib.suppress(Killed):
            directory.replay()
    directory.crash()


@given(steps=steps)
def test_any_order_and_any_crash_give_the_result_of_the_log(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    directory = Directory(tmp_path_factory.mktemp("state"))
    reference = Reference()
    other = Store(directory.folder, durable=False)  # of a process that runs snapshot queries
    reader = GuardReader(other)
    with closing(directory), closing(other):
        for step in [*steps, "replay", "crash", "replay"]:
            if step == "replay":
                reference.apply_commands()
                reference.replay()
                directory.replay()
            elif step == "torn replay":
                reference.apply_commands()
                tear(directory)
            elif step == "crash":
                directory.crash()
            elif step == "empty":
                directory.append_nothing()
            elif isinstance(step, tuple):
                _, user = step
                try:
                    reader.reject_blocked([user])
                    reader.count_snapshot(user)
                    reference.snapshots.append(user)
                    assert not reference.blocked_next(user)
                except RequestError as refusal:
                    assert refusal.reason == "blocked" and reference.blocked_next(user)
            elif isinstance(step, GuardCommand):
                send(directory.store, step)
                reference.waiting.append(step)
            else:
                directory.append(step)
                reference.waiting_requests.append(step)
        assert directory.live() == reference.live
        refusal = directory.state.guard.gate.refusal
        assert {user for user in USERS if refusal(user)} == set(reference.blocked)
        assert directory.counts() == {
            shown_as(directory, user): (
                reference.counts[user, "register"],
                reference.counts[user, "terminate"],
            )
            for user in USERS
            if reference.counts[user, "register"] or reference.counts[user, "terminate"]
        }
        listed = directory.state.guard.listing()["blocked"]
        refused = {item["user"]: item["refused"] for item in listed if item["refused"]}
        assert refused == {shown_as(directory, u): n for u, n in reference.refused.items()}
        rejections = Counter(reason for _, reason in directory.rejections() if reason != "blocked")
        assert rejections == reference.rejections


# -- blocked users


def test_a_blocked_users_requests_reach_no_index_and_write_one_dead_letter_record(
    directory,
) -> None:
    directory.append(register("a", "eve"))
    directory.replay()
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    flood = [register(f"f{k}", "eve") for k in range(500)]
    directory.append(register("b"), *flood, register("c"), terminate("a", "eve"))
    directory.replay()
    assert directory.live() == {"a": ("eve", 0), "b": ("ann", 1), "c": ("ann", 502)}
    (refused,) = directory.queries.refused_between(0, directory.log.end())
    assert (refused.position, str(refused.reason)) == (2, "blocked")
    assert refused.detail == (
        "user 'eve' is blocked since position 0 of the query log, by hand: "
        "501 requests at positions 2 to 503"
    )
    assert json.loads(refused.record)["query_id"] == "f0"


def test_a_flood_of_blocked_requests_is_neither_admitted_nor_indexed(
    directory, monkeypatch
) -> None:
    directory.append(register("a"))
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    directory.replay()
    before, rows = directory.queries.version, []
    real = queries_module.admit

    def noting(block: pa.Table, *more: Any) -> Any:
        rows.append(block.num_rows)
        return real(block, *more)

    monkeypatch.setattr(queries_module, "admit", noting)
    directory.append(*(register(f"f{k}", "eve") for k in range(3_000)))
    directory.replay()
    assert sum(rows) == 0
    assert directory.queries.version.segments == before.segments
    assert directory.counts() == {"ann": (1, 0)}


def test_a_replay_admits_requests_from_before_the_block(directory) -> None:
    directory.append(register("a", "eve"))
    directory.replay()
    before = directory.queries.version
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    directory.append(register("b", "eve"))
    directory.replay()
    assert directory.queries.advance(before.position) == before
    # Replayed from the log alone, by the guard that has the block.
    again = Replay(0, directory.state.guard)
    (part,) = again.parts(directory.log.read(0, directory.log.end()))
    assert part.block["query_id"].to_pylist() == ["a"]


def test_an_unblocked_user_is_admitted_again(directory) -> None:
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    directory.append(register("a", "eve"))
    directory.replay()
    send(directory.store, GuardCommand(UNBLOCK, "eve", "talked to them"))
    directory.append(register("b", "eve"))
    directory.replay()
    assert set(directory.live()) == {"b"}
    assert [row["decision"] for row in decisions(directory.store)] == ["block", "unblock"]


def test_only_blocked_users_can_be_evicted(directory) -> None:
    directory.append(register("a"), evict("ann"))
    directory.replay()
    assert set(directory.live()) == {"a"}
    assert directory.rejections() == [(1, "unknown_op")]


def test_an_evict_request_without_a_decision_of_the_guard_is_ignored(directory) -> None:
    directory.append(register("a", "eve"), register("b"))
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    directory.replay()
    directory.append(register("c", "eve"), evict("eve"), evict("ann"))
    directory.replay()
    assert set(directory.live()) == {"b"}  # eve's request came after the command
    send(directory.store, GuardCommand(UNBLOCK, "eve", "by hand"))
    directory.append(register("d", "eve"))
    directory.replay()
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    directory.replay()
    directory.append(evict("eve"))
    directory.replay()
    assert set(directory.live()) == {"b", "d"}


def test_an_eviction_that_was_decided_before_a_crash_happens_after_it(directory) -> None:
    directory.append(register("a", "eve"), register("b"))
    directory.replay()
    guard = directory.state.guard
    guard.block("eve", guard.gate.counted - 1, evict=True)
    directory.state.save()
    directory.crash()
    directory.replay()
    assert set(directory.live()) == {"b"}
    directory.state.save()
    end = directory.log.end()
    directory.crash()
    directory.replay()
    assert directory.log.end() == end


@pytest.mark.parametrize("death", ["save", "append"])
def test_a_crash_while_commands_are_applied(directory, monkeypatch, death: str) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    directory.append(register("a", "eve"), register("b"))
    directory.replay()
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand", evict=True))
    with monkeypatch.context() as patch:
        if death == "save":
            patch.setattr(directory.store, "record", die)
        else:
            patch.setattr(directory.log, "append", die)
        with pytest.raises(Killed):
            directory.replay()
    directory.crash()
    directory.replay()
    assert set(directory.live()) == {"b"}
    assert [row["decision"] for row in decisions(directory.store)] == ["block"]


def test_a_command_without_effect_is_logged_as_such(directory) -> None:
    send(directory.store, GuardCommand(UNBLOCK, "ann", "by hand"))
    directory.replay()
    (row,) = decisions(directory.store)
    assert row["decision"] == "unblock, which changes nothing"


def test_queries_that_are_never_live_do_not_count(directory) -> None:
    directory.state.now = 100
    directory.append(
        {**register("over"), "at": 50, "expires_at": 40},
        {**register("past"), "expires_at": 90},
        register("ended"),
        terminate("ended"),
        register("stays"),
        {**register("later"), "expires_at": 101},
    )
    directory.replay()
    assert directory.counts() == {"ann": (2, 1)}


def test_a_flood_of_small_entries_costs_only_its_check(directory) -> None:
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    directory.replay()
    before = directory.queries.version.segments
    for number in range(60):
        odd = {f"z{number % 2}": 1.0}
        table = pa.Table.from_pylist([{**register(f"q{number}", "eve"), **odd}])
        directory.log.append(table)
    directory.append(*(row for k in range(300) for row in (register(f"n{k}"), evict("ann"))))
    directory.replay()
    reasons = Counter(reason for _, reason in directory.rejections())
    assert reasons == {"blocked": 1, "unknown_op": 300}
    # One segment for all that was registered, although others stood in between.
    assert before == () and len(directory.queries.version.segments) == 1


def test_malformed_records_are_refused_and_the_run_continues(directory) -> None:
    send(directory.store, GuardCommand(BLOCK, "", "by hand"))
    directory.log.append(pa.table({"malformed": ["junk"]}))
    far = pa.array([1 << 61], pa.timestamp("us"))
    for user in ("", "ann"):
        columns = {"op": ["dance"], "query_id": ["a"], "user_id": [user], "when": far}
        directory.log.append(pa.table(columns))
    directory.append({**register("b"), "user_id": None})
    directory.log.append(pa.table({"op": ["tally"], "user_id": ["eve"]}))
    directory.replay()
    reasons = [reason for _, reason in directory.rejections()]
    assert reasons == ["malformed", "blocked", "unknown_op", "missing_field", "unknown_op"]


def test_a_restart_retains_the_counts(directory) -> None:
    directory.append(register("a"), register("b", "bob"))
    directory.replay()
    directory.append(terminate("a"))
    directory.replay()
    straight = directory.state.guard.to_bytes()
    directory.crash()
    assert directory.state.guard.to_bytes() == straight
    assert directory.counts() == {"ann": (1, 1), "bob": (1, 0)}


def test_a_replay_that_was_not_recorded_is_not_counted(directory, monkeypatch) -> None:
    def die(*_: object) -> None:
        raise Killed

    directory.append(register("a"))
    with monkeypatch.context() as patch:
        patch.setattr(directory.store, "record", die)
        with pytest.raises(Killed):
            directory.replay()
    directory.crash()
    directory.replay()
    assert directory.counts() == {"ann": (1, 0)}


def test_a_tally_equals_a_counter() -> None:
    random = np.random.default_rng(4)
    names = pa.array([f"user-{k}" for k in random.integers(0, 50, 2_000)])
    kinds = random.integers(0, 4, 2_000).astype(np.int8)
    secret = np.array([3, 4], np.uint64)
    tally, keys = Tally.of(names, keys_of(names, secret), kinds)
    right: dict[str, list[int]] = {}
    for name, kind in zip(names.to_pylist(), kinds.tolist(), strict=True):
        if kind:
            right.setdefault(name, [0, 0, 0])[kind - 1] += 1
    assert dict(zip(tally.names.to_pylist(), tally.counts.tolist(), strict=True)) == right
    assert tally.names.to_pylist() == list(right)
    assert keys.tolist() == keys_of(tally.names, secret).tolist()
    again = Tally.from_bytes(tally.to_bytes())
    assert again.table().equals(tally.table())
    assert len(Tally.from_bytes(Tally.summed([]).to_bytes())) == 0


FORGED = pa.table(
    {
        "op": ["register", "register", "tally"],
        "query_id": ["a", "b", None],
        "user_id": ["eve", "victim", "eve"],
        **{name: [0.0, 0.0, None] for name in ("x0", "y0", "y1")},
        "x1": [0.0, -1.0, None],
        "counted": [True, True, None],
        "registers": [None, None, 1_000_000],
        "terminates": [None, None, 0],
        "refused": [None, None, 0],
    }
)


@pytest.mark.parametrize("kind", list(EntryKind))
def test_forged_counts_are_ignored(directory, kind: EntryKind) -> None:
    directory.log.append(marked(FORGED, kind))
    directory.replay()
    assert directory.counts() == {"eve": (1, 0)}
    assert directory.rejections() == [(1, "inverted_box"), (2, "unknown_op")]


def test_a_tally_replaces_counting_and_refused_requests_are_subtracted(directory) -> None:
    rows = [register("a"), register("b", inverted=True), register("c", "bob"), terminate("x")]
    tally = Tally(pa.array(["ann", "bob", "eve"]), np.array([[2, 1, 0], [1, 0, 0], [0, 0, 9]]))
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    block = pa.Table.from_pylist(rows, SCHEMA)
    for _ in range(2):
        directory.log.append(block, tag="stream:0", tally=tally.table())
        directory.replay()
    assert directory.counts() == {"ann": (1, 0), "bob": (1, 0)}
    assert directory.rejections() == [(1, "inverted_box"), (3, "unknown_query"), (6, "blocked")]
    *_, blocked = directory.queries.refused_between(0, directory.log.end())
    assert blocked.detail.endswith("9 requests at positions 6 to 6")
    listed = directory.state.guard.listing()["blocked"]
    assert [(item["user"], item["refused"]) for item in listed] == [("eve", 9)]
    directory.crash()
    assert directory.counts() == {"ann": (1, 0), "bob": (1, 0)}


def test_the_number_of_tallies_is_bounded(directory) -> None:
    for number in range(3 * REPLAYS_MAX):
        directory.append(register(f"q{number}"))
        directory.replay()
        assert len(directory.store.items("guard_tallies")) <= REPLAYS_MAX
    directory.crash()
    assert directory.counts() == {"ann": (3 * REPLAYS_MAX, 0)}


# -- snapshot queries


def test_snapshot_queries_are_counted_with_the_next_batch_and_survive_a_crash(directory) -> None:
    directory.append(register("a"))
    directory.replay()
    with closing(Store(directory.folder, durable=False)) as other:
        reader = GuardReader(other)
        for user in ("ann", "eve", "ann"):
            reader.reject_blocked([user])
            reader.count_snapshot(user)
    assert directory.counts() == {"ann": (1, 0)}
    before = directory.store.get("guard", "state")
    directory.replay()
    after = directory.store.get("guard", "state")
    assert directory.counts() == {"ann": (3, 0), "eve": (1, 0)}
    assert after["file"] == before["file"], "the full state is not written for them"
    assert decisions(directory.store) == []
    directory.crash()
    directory.replay()
    assert directory.counts() == {"ann": (3, 0), "eve": (1, 0)}
    assert directory.state.guard.gate.counted == 1, "they have no log position"


def test_commands_of_snapshot_queries_do_not_accumulate(directory) -> None:
    reader = GuardReader(directory.store)
    for _ in range(3 * REPLAYS_MAX):
        for _ in range(3):
            reader.reject_blocked(["ann"])
            reader.count_snapshot("ann")
        directory.replay()
        assert len(directory.store.commands.after(0)) <= 3
        assert len(directory.store.items("guard_tallies")) <= REPLAYS_MAX
    directory.crash()
    assert directory.counts() == {"ann": (9 * REPLAYS_MAX, 0)}


def test_the_guard_is_read_again_only_after_a_decision(directory, monkeypatch) -> None:
    loads = []
    real = guard_state.load_guard
    monkeypatch.setattr(guard_state, "load_guard", lambda store: loads.append(1) or real(store))
    reader = GuardReader(directory.store)
    for _ in range(5):
        reader.reject_blocked(["ann", "eve"])
        reader.count_snapshot("ann")
        directory.replay()
    assert len(loads) == 1
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    with pytest.raises(RequestError, match="'eve' is blocked"):
        reader.reject_blocked(["eve"])
    assert len(loads) == 1, "a command is applied to the guard that is known"
    directory.replay()
    with pytest.raises(RequestError, match="'eve' is blocked"):
        reader.reject_blocked(["ann", "eve"])
    assert len(loads) == 2


def test_without_a_guard_snapshot_queries_leave_no_trace(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        reader = GuardReader(store)
        reader.reject_blocked(["ann"])
        reader.count_snapshot("ann")
        assert store.commands.after(0) == []


def test_a_user_that_is_no_text_is_refused_with_the_reason(directory) -> None:
    with pytest.raises(RequestError, match="UTF-8") as refusal:
        GuardReader(directory.store).reject_blocked(["ev\udcff"])
    assert refusal.value.reason == "wrong_type"


def test_the_command_line_refuses_snapshots_of_blocked_users(
    directory, capsys, monkeypatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(terminal, "run_snapshot", started)
    state = str(directory.folder)
    reader = GuardReader(directory.store)
    reader.reject_blocked(["ann"])
    reader.count_snapshot("ann")
    assert main(["guard", "block", "eve", "--reason", "spam", "--state", state]) == 0
    capsys.readouterr()
    assert main(["snapshot", state, "--user", "eve"]) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert "blocked: user 'eve' is blocked since position -1 of the query log, by an" in err
    for user in (["--user", "ann"], []):
        with pytest.raises(AssertionError, match="Spark was started"):
            main(["snapshot", state, *user])
    assert main(["guard", "list", "--json", "--state", state]) == 0
    waiting = json.loads(capsys.readouterr().out)["waiting"]
    assert [item["user"] for item in waiting] == ["eve"], "snapshot queries are no commands"


# -- the query service and the command


def test_the_query_service_refuses_a_blocked_user_at_once(directory) -> None:
    directory.append(register("a", "eve"))
    directory.replay()
    send(directory.store, GuardCommand(BLOCK, "eve", "by hand"))
    end = directory.log.end()
    with closing(QueryService(directory.folder)) as service:
        for request in (Query("b", Box(0, 0, 1, 1), "eve"), Terminate("a", "eve")):
            with pytest.raises(RequestError, match="blocked") as refusal:
                service.submit(request)
            assert refusal.value.reason == "blocked"
        service.submit(Query("c", Box(0, 0, 1, 1), "ann"))
    assert directory.log.end() == end + 1


def test_the_command_blocks_lists_logs_and_unblocks(directory, capsys) -> None:
    state = str(directory.folder)
    assert main(["guard", "block", "eve", "--evict", "--reason", "spam", "--state", state]) == 0
    assert "next batch" in capsys.readouterr().out
    assert main(["guard", "list", "--json", "--state", state]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["blocked"] == [] and listing["waiting"][0]["user"] == "eve"
    directory.replay()
    assert main(["guard", "list", "--state", state]) == 0
    assert "by an operator: spam" in " ".join(capsys.readouterr().out.split())
    assert main(["guard", "log", "--json", "--state", state]) == 0
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (row["decision"], row["users"], row["evidence"]["evict"]) == ("block", ["eve"], True)
    assert main(["guard", "log", "--state", state]) == 0
    assert "eve" in capsys.readouterr().out
    assert main(["guard", "log", "--limit", "-1", "--state", state]) == 2
    assert main(["guard", "block", "ev\udcff", "--state", state]) == 2
    capsys.readouterr()
    assert main(["guard", "unblock", "ann", "--state", state]) == 1
    assert "not blocked" in capsys.readouterr().err
    assert main(["guard", "unblock", "eve", "--state", state]) == 0
    directory.replay()
    assert directory.state.guard.blocked == frozenset()


def test_control_characters_in_a_name_are_escaped(directory, capsys) -> None:
    send(directory.store, GuardCommand(BLOCK, "eve\x1b[2J", "by hand"))
    directory.replay()
    assert main(["guard", "list", "--state", str(directory.folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out and "eve\\x1b[2J" in out


def test_the_command_needs_a_guard(tmp_path: Path, capsys) -> None:
    Store(tmp_path).close()
    assert main(["guard", "block", "eve", "--state", str(tmp_path)]) == 1
    assert "guard.enabled" in capsys.readouterr().err
