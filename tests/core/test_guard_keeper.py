"""The guard of a state directory: who passes the fold, what is counted, what survives a crash."""

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
from roost.errors import RequestError
from roost.guard.tally import Tally
from roost.guard.users import keys_of, shown
from roost.model import TIME_MIN, Box, Query, Terminate, request_schema
from roost.space import Coordinates, Rect, Space
from roost.state import queries as queries_module
from roost.state.admission import Rules
from roost.state.fold import Fold
from roost.state.guard_book import BLOCK, UNBLOCK, Order
from roost.state.guard_keeper import FOLDS_MAX, GuardKeeper
from roost.state.operations import Desk
from roost.state.queries import QuerySet
from roost.state.querylog import Kind, SqliteQueryLog, encode_block, marked
from roost.state.store import Store

SPACE = Space(Rect(0.0, 0.0, 100.0, 100.0), 10, 10, Coordinates.PLANE)
RULES = Rules(SPACE, pa.string(), pa.int64(), keep_born=True)
SCHEMA = request_schema(pa.string(), pa.int64())
LONG = "x" * 300
USERS = ("ann", "", f"{LONG}1", f"{LONG}2")


class Directory:
    """A state directory with a guard, that can be left in the lurch and opened again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder)
        self.log = SqliteQueryLog(self.folder / "queries.db")
        for file in (self.store, self.log):
            file._db.execute("pragma synchronous = off")
        self.keeper = GuardKeeper.load(self.store) or GuardKeeper.begin(self.store, 7, 1 << 10)
        self.queries = QuerySet(self.store, self.log, RULES, keeper=self.keeper)

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
        data = encode_block(pa.table({"op": pa.array([], pa.string())}))
        with self.log._db as db:
            db.execute("insert into log (entry) values (?)", (data,))

    def fold(self) -> None:
        self.keeper.obey(self.log)
        self.queries.advance(self.log.end())

    def live(self) -> dict[str, tuple[str, int]]:
        """User and place in the log of every live query."""
        found = {}
        for _, segment, ended in self.queries.segments():
            for slot in range(segment.size):
                if ended.get(slot, 1) != TIME_MIN:
                    assert segment.born is not None
                    name = segment.ids[slot].as_py()
                    found[name] = (segment.users[slot].as_py(), int(segment.born[slot]))
        return found

    def letters(self) -> list[tuple[int, str]]:
        refused = self.queries.refused_between(0, self.log.end())
        return [(item.position, str(item.reason)) for item in refused]

    def counts(self) -> dict[str, tuple[float, float]]:
        """x1 and x2 of the open round."""
        users = self.keeper.guard._users
        pairs = users.numbers[: users.used, :2].tolist()
        return {
            name: (new, gone)
            for name, (new, gone) in zip(users.names, pairs, strict=True)
            if new or gone
        }


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roost.state.segments.os.fsync", lambda descriptor: None)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "state")
    yield directory
    directory.close()


def shown_as(directory: Directory, user: str) -> str:
    return shown(user, int(directory.keeper.guard.keys_of(pa.array([user]))[0]))


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
        self.letters: Counter[str] = Counter()
        self.position = 0
        self.unfolded: list[dict[str, Any]] = []
        self.waiting: list[Order] = []
        self._told: set[tuple[str, int]] = set()
        self._fresh: dict[str, str] = {}  # registered in the block that admission has now

    def obey(self) -> None:
        since = self.position - 1
        for order in self.waiting:
            if order.action == BLOCK:
                self.blocked[order.user] = (order.evict, since)
            else:
                self.blocked.pop(order.user, None)
        self.waiting.clear()
        for user in sorted(user for user in self.blocked if self._going(user)):
            mark = (user, self.blocked[user][1])
            if mark not in self._told:
                self.unfolded.append({**evict(user), "by the keeper": True})
                self._told.add(mark)

    def _going(self, user: str) -> bool:
        going, since = self.blocked.get(user, (False, 0))
        return going and self.evicted.get(user) != since

    def fold(self) -> None:
        for request in self.unfolded:
            self._take(request)
            self.position += 1
        self._next_block()
        self.unfolded.clear()

    def _next_block(self) -> None:
        self.counts.update((user, "register") for user in self._fresh.values())
        self._fresh.clear()

    def _take(self, request: dict[str, Any]) -> None:
        user, operation = request["user_id"], request["op"]
        own = "by the keeper" in request
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
                self.letters[reason] += 1
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
orders = st.builds(Order, st.sampled_from([BLOCK, BLOCK, UNBLOCK]), users, st.just("test"))
evictions = st.builds(Order, st.just(BLOCK), users, st.just("test"), st.just(True))
steps = st.lists(
    st.one_of(
        requests, requests, requests, orders, evictions,
        st.sampled_from(["fold", "crash", "empty", "torn fold"]),
    ),
    max_size=40,
)  # fmt: skip


class Died(Exception):
    pass


def tear(directory: Directory) -> None:
    """Fold, but die before the version is recorded, and start again."""

    def die(*_: object) -> None:
        raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory.store, "put_version", die)
        with contextlib.suppress(Died):
            directory.fold()
    directory.crash()


@given(steps=steps)
def test_any_order_and_any_crash_gives_what_the_log_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    directory = Directory(tmp_path_factory.mktemp("state"))
    reference = Reference()
    with closing(directory):
        for step in [*steps, "fold", "crash", "fold"]:
            if step == "fold":
                reference.obey()
                reference.fold()
                directory.fold()
            elif step == "torn fold":
                reference.obey()
                tear(directory)
            elif step == "crash":
                directory.crash()
            elif step == "empty":
                directory.append_nothing()
            elif isinstance(step, Order):
                directory.store.guard.order(step)
                reference.waiting.append(step)
            else:
                directory.append(step)
                reference.unfolded.append(step)
        assert directory.live() == reference.live
        refusal = directory.keeper.guard.gate.refusal
        assert {user for user in USERS if refusal(user)} == set(reference.blocked)
        assert directory.counts() == {
            shown_as(directory, user): (
                reference.counts[user, "register"],
                reference.counts[user, "terminate"],
            )
            for user in USERS
            if reference.counts[user, "register"] or reference.counts[user, "terminate"]
        }
        listed = directory.keeper.guard.listing()["blocked"]
        refused = {item["user"]: item["refused"] for item in listed if item["refused"]}
        assert refused == {shown_as(directory, u): n for u, n in reference.refused.items()}
        letters = Counter(reason for _, reason in directory.letters() if reason != "blocked")
        assert letters == reference.letters


# -- what happens to the blocked


def test_a_blocked_users_requests_reach_no_index_and_make_one_dead_letter(directory) -> None:
    directory.append(register("a", "eve"))
    directory.fold()
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    flood = [register(f"f{k}", "eve") for k in range(500)]
    directory.append(register("b"), *flood, register("c"), terminate("a", "eve"))
    directory.fold()
    assert directory.live() == {"a": ("eve", 0), "b": ("ann", 1), "c": ("ann", 502)}
    (letter,) = directory.queries.refused_between(0, directory.log.end())
    assert (letter.position, str(letter.reason)) == (2, "blocked")
    assert letter.detail == (
        "user 'eve' is blocked since position 0 of the query log, by hand: "
        "501 requests at positions 2 to 503"
    )
    assert json.loads(letter.record)["query_id"] == "f0"


def test_a_flood_of_the_blocked_is_neither_admitted_nor_built(directory, monkeypatch) -> None:
    directory.append(register("a"))
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    directory.fold()
    before, rows = directory.queries.version, []
    real = queries_module.admit

    def noting(block: pa.Table, *more: Any) -> Any:
        rows.append(block.num_rows)
        return real(block, *more)

    monkeypatch.setattr(queries_module, "admit", noting)
    directory.append(*(register(f"f{k}", "eve") for k in range(3_000)))
    directory.fold()
    assert sum(rows) == 0
    assert directory.queries.version.segments == before.segments
    assert directory.counts() == {"ann": (1, 0)}


def test_a_replay_of_what_was_folded_before_the_block_admits_it(directory) -> None:
    directory.append(register("a", "eve"))
    directory.fold()
    before = directory.queries.version
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    directory.append(register("b", "eve"))
    directory.fold()
    assert directory.queries.advance(before.position) == before
    # Folded once more from the log alone, by the guard that knows of the block.
    again = Fold(0, directory.keeper.guard)
    (part,) = again.parts(directory.log.read(0, directory.log.end()))
    assert part.block["query_id"].to_pylist() == ["a"]


def test_who_is_let_in_again_is_let_in(directory) -> None:
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    directory.append(register("a", "eve"))
    directory.fold()
    directory.store.guard.order(Order(UNBLOCK, "eve", "talked to them"))
    directory.append(register("b", "eve"))
    directory.fold()
    assert set(directory.live()) == {"b"}
    assert [row["decision"] for row in directory.store.guard.log()] == ["block", "unblock"]


def test_nobody_can_evict_somebody_who_is_not_blocked(directory) -> None:
    directory.append(register("a"), evict("ann"))
    directory.fold()
    assert set(directory.live()) == {"a"}
    assert directory.letters() == [(1, "unknown_op")]


def test_a_block_without_eviction_leaves_queries_to_whoever_writes_evict(directory) -> None:
    directory.append(register("a", "eve"), register("b"))
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    directory.fold()
    directory.append(register("c", "eve"), evict("eve"), evict("ann"))
    directory.fold()
    assert set(directory.live()) == {"b"}  # eve's request came after the order
    directory.store.guard.order(Order(UNBLOCK, "eve", "by hand"))
    directory.append(register("d", "eve"))
    directory.fold()
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    directory.fold()
    directory.append(evict("eve"))
    directory.fold()
    assert set(directory.live()) == {"b", "d"}


def test_an_eviction_that_was_decided_before_a_crash_happens_after_it(directory) -> None:
    directory.append(register("a", "eve"), register("b"))
    directory.fold()
    guard = directory.keeper.guard
    guard.block("eve", guard.gate.counted - 1, evict=True)
    directory.keeper.save()
    directory.crash()
    directory.fold()
    assert set(directory.live()) == {"b"}
    directory.keeper.save()
    end = directory.log.end()
    directory.crash()
    directory.fold()
    assert directory.log.end() == end


@pytest.mark.parametrize("death", ["save", "append"])
def test_a_death_while_orders_are_obeyed(directory, monkeypatch, death: str) -> None:
    def die(*_: object, **__: object) -> None:
        raise Died

    directory.append(register("a", "eve"), register("b"))
    directory.fold()
    directory.store.guard.order(Order(BLOCK, "eve", "by hand", evict=True))
    with monkeypatch.context() as patch:
        if death == "save":
            patch.setattr(directory.store, "put_guard", die)
        else:
            patch.setattr(directory.log, "append", die)
        with pytest.raises(Died):
            directory.fold()
    directory.crash()
    directory.fold()
    assert set(directory.live()) == {"b"}
    assert [row["decision"] for row in directory.store.guard.log()] == ["block"]


def test_an_order_that_changes_nothing_says_so_in_the_log(directory) -> None:
    directory.store.guard.order(Order(UNBLOCK, "ann", "by hand"))
    directory.fold()
    (row,) = directory.store.guard.log()
    assert row["decision"] == "unblock, which changes nothing"


def test_queries_that_never_live_are_no_way_to_look_busy(directory) -> None:
    directory.keeper.now = 100
    directory.append(
        {**register("over"), "at": 50, "expires_at": 40},
        {**register("past"), "expires_at": 90},
        register("ended"),
        terminate("ended"),
        register("stays"),
        {**register("later"), "expires_at": 101},
    )
    directory.fold()
    assert directory.counts() == {"ann": (2, 1)}


def test_a_flood_in_pieces_costs_no_more_than_its_judgement(directory) -> None:
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    directory.fold()
    before = directory.queries.version.segments
    for number in range(60):
        odd = {f"z{number % 2}": 1.0}
        table = pa.Table.from_pylist([{**register(f"q{number}", "eve"), **odd}])
        directory.log.append(table)
    directory.append(*(row for k in range(300) for row in (register(f"n{k}"), evict("ann"))))
    directory.fold()
    reasons = Counter(reason for _, reason in directory.letters())
    assert reasons == {"blocked": 1, "unknown_op": 300}
    # One segment for all that was registered, although others stood in between.
    assert before == () and len(directory.queries.version.segments) == 1


def test_odd_records_are_refused_and_not_the_run(directory) -> None:
    directory.store.guard.order(Order(BLOCK, "", "by hand"))
    directory.log.append(pa.table({"malformed": ["junk"]}))
    far = pa.array([1 << 61], pa.timestamp("us"))
    for user in ("", "ann"):
        columns = {"op": ["dance"], "query_id": ["a"], "user_id": [user], "when": far}
        directory.log.append(pa.table(columns))
    directory.append({**register("b"), "user_id": None})
    directory.log.append(pa.table({"op": ["tally"], "user_id": ["eve"]}))
    directory.fold()
    reasons = [reason for _, reason in directory.letters()]
    assert reasons == ["malformed", "blocked", "unknown_op", "missing_field", "unknown_op"]


def test_a_restart_has_counted_what_was_folded(directory) -> None:
    directory.append(register("a"), register("b", "bob"))
    directory.fold()
    directory.append(terminate("a"))
    directory.fold()
    straight = directory.keeper.guard.to_bytes()
    directory.crash()
    assert directory.keeper.guard.to_bytes() == straight
    assert directory.counts() == {"ann": (1, 1), "bob": (1, 0)}


def test_a_fold_that_was_not_recorded_is_not_counted(directory, monkeypatch) -> None:
    def die(*_: object) -> None:
        raise Died

    directory.append(register("a"))
    with monkeypatch.context() as patch:
        patch.setattr(directory.store, "put_version", die)
        with pytest.raises(Died):
            directory.fold()
    directory.crash()
    directory.fold()
    assert directory.counts() == {"ann": (1, 0)}


def test_a_tally_is_what_a_counter_says() -> None:
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
    assert len(Tally.from_bytes(Tally.none().to_bytes())) == 0


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


@pytest.mark.parametrize("kind", list(Kind))
def test_counts_that_somebody_made_up_are_not_believed(directory, kind: Kind) -> None:
    directory.log.append(marked(FORGED, kind))
    directory.fold()
    assert directory.counts() == {"eve": (1, 0)}
    assert directory.letters() == [(1, "inverted_box"), (2, "unknown_op")]


def test_a_tally_replaces_counting_and_what_was_refused_is_taken_back(directory) -> None:
    rows = [register("a"), register("b", inverted=True), register("c", "bob"), terminate("x")]
    tally = Tally(pa.array(["ann", "bob", "eve"]), np.array([[2, 1, 0], [1, 0, 0], [0, 0, 9]]))
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    block = pa.Table.from_pylist(rows, SCHEMA)
    for _ in range(2):
        directory.log.append(block, tag="stream:0", tally=tally.table())
        directory.fold()
    assert directory.counts() == {"ann": (1, 0), "bob": (1, 0)}
    assert directory.letters() == [(1, "inverted_box"), (3, "unknown_query"), (6, "blocked")]
    listed = directory.keeper.guard.listing()["blocked"]
    assert [(item["user"], item["refused"]) for item in listed] == [("eve", 9)]
    directory.crash()
    assert directory.counts() == {"ann": (1, 0), "bob": (1, 0)}


def test_where_nothing_is_decided_tallies_do_not_pile_up(directory) -> None:
    for number in range(3 * FOLDS_MAX):
        directory.append(register(f"q{number}"))
        directory.fold()
        kept = directory.store.guard.read()
        assert kept is not None and len(kept[1]) <= FOLDS_MAX
    directory.crash()
    assert directory.counts() == {"ann": (3 * FOLDS_MAX, 0)}


# -- the desk and the command


def test_the_desk_tells_a_blocked_user_at_once(directory) -> None:
    directory.append(register("a", "eve"))
    directory.fold()
    directory.store.guard.order(Order(BLOCK, "eve", "by hand"))
    end = directory.log.end()
    with closing(Desk(directory.folder)) as desk:
        for request in (Query("b", Box(0, 0, 1, 1), "eve"), Terminate("a", "eve")):
            with pytest.raises(RequestError, match="blocked") as refusal:
                desk.submit(request)
            assert refusal.value.reason == "blocked"
        desk.submit(Query("c", Box(0, 0, 1, 1), "ann"))
    assert directory.log.end() == end + 1


def test_the_command_blocks_lists_logs_and_unblocks(directory, capsys) -> None:
    state = str(directory.folder)
    assert main(["guard", "block", "eve", "--evict", "--reason", "spam", "--state", state]) == 0
    assert "next batch" in capsys.readouterr().out
    assert main(["guard", "list", "--json", "--state", state]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["blocked"] == [] and listing["waiting"][0]["user"] == "eve"
    directory.fold()
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
    directory.fold()
    assert directory.keeper.guard.blocked == frozenset()


def test_a_name_cannot_tell_the_terminal_anything(directory, capsys) -> None:
    directory.store.guard.order(Order(BLOCK, "eve\x1b[2J", "by hand"))
    directory.fold()
    assert main(["guard", "list", "--state", str(directory.folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out and "eve\\x1b[2J" in out


def test_the_command_needs_a_guard(tmp_path: Path, capsys) -> None:
    Store(tmp_path).close()
    assert main(["guard", "block", "eve", "--state", str(tmp_path)]) == 1
    assert "guard.enabled" in capsys.readouterr().err
