"""Features x1 to x14 against a reference model written from table 5.1 with dictionaries."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest

from roost.guard.features import add_hotspot, close_features, normalise
from roost.guard.loops import REGISTERS, TERMINATES
from roost.guard.sensor import HotspotSummary, LiveQueries, sense_hotspot
from roost.guard.tally import Tally
from roost.guard.users import UserTable, keys_of

SECRET = np.array([1, 2], np.uint64)


class Oracle:
    """Table 5.1, feature by feature."""

    def __init__(self) -> None:
        self.faded: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        self.sequence_new: Counter[str] = Counter()
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.start()

    def start(self) -> None:
        self.new: Counter[str] = Counter()
        self.deleted: Counter[str] = Counter()
        self.hotspots: list[tuple[int, dict[str, list[int]]]] = []

    def close(self) -> dict[str, list[float]]:
        seen = {user for _, summary in self.hotspots for user in summary}
        users = set(self.faded) | set(self.new) | set(self.deleted) | seen
        result = {}
        for user in users:
            mine = [(number, s[user]) for number, s in self.hotspots if user in s]
            current = [
                self.new[user],
                self.deleted[user],
                len(mine),
                sum(sum(ages) for _, ages in mine),
                sum(number for number, _ in mine),
            ]
            history = [
                now + before / 2 for now, before in zip(current, self.faded[user], strict=True)
            ]
            self.faded[user] = history
            self.sequence_new[user] += sum(number for number, ages in mine if ages[0])
            x12 = sum(count / 2**age for _, ages in mine for age, count in enumerate(ages))
            x13 = x12 / history[0] if history[0] else 0.0
            if x13:
                self.rates[user].append(x13)
            rates = self.rates[user]
            x14 = sum(rates) / len(rates) if rates else 0.0
            result[user] = [*current, *history, self.sequence_new[user], x12, x13, x14]
        self.start()
        return result


def brute_summary(
    names: list[str], queries: list[tuple[int, int, tuple[int, ...]]], rects: np.ndarray, now: int
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for code, registered, (x0, y0, x1, y1) in queries:
        if any(x0 < r[2] and x1 >= r[0] and y0 < r[3] and y1 >= r[1] for r in rects):
            ages = found.setdefault(names[code], [0] * 5)
            if now - registered < 5:
                ages[now - registered] += 1
    return found


def drawn_queries(random: np.random.Generator, users: int, now: int) -> LiveQueries:
    count = int(random.integers(0, 400))
    low = random.integers(0, 40, (count, 2))
    bounds = np.hstack([low, low + random.integers(0, 6, (count, 2))]).astype(np.int32)
    return LiveQueries(
        pa.array([f"user-{k}" for k in range(users)]),
        random.integers(0, users, count).astype(np.int32),
        now - random.integers(0, 9, count),
        bounds,
    )


@pytest.mark.parametrize("seed", range(10))
def test_features_are_those_of_the_table(seed: int) -> None:
    random = np.random.default_rng(seed)
    table, oracle = UserTable(SECRET), Oracle()
    names = [f"user-{k}" for k in range(30)]
    hotspot = 0
    for number in range(12):
        sent = random.integers(0, 30, int(random.integers(0, 300)))
        block = pa.array([names[k] for k in sent], pa.string())
        kinds = np.where(random.random(len(sent)) < 0.6, REGISTERS, TERMINATES).astype(np.int8)
        tally, keys = Tally.of(block, keys_of(block, SECRET), kinds)
        table.count(keys, tally.names, tally.counts, number)
        for k, kind in zip(sent.tolist(), kinds.tolist(), strict=True):
            (oracle.new if kind == REGISTERS else oracle.deleted)[names[k]] += 1
        for _ in range(int(random.integers(0, 4))):
            hotspot += 1
            queries = drawn_queries(random, 30, number)
            corners = random.integers(0, 40, (int(random.integers(1, 3)), 2))
            rects = np.hstack([corners, corners + 8])
            add_hotspot(table, sense_hotspot(queries, rects, number), hotspot, number)
            rows = zip(
                queries.codes.tolist(),
                queries.rounds.tolist(),
                map(tuple, queries.bounds.tolist()),
                strict=True,
            )
            oracle.hotspots.append((hotspot, brute_summary(names, list(rows), rects, number)))
        closed = close_features(table)
        right = oracle.close()
        assert set(closed.names) == set(right)
        for name, row in zip(closed.names, closed.raw.tolist(), strict=True):
            assert row == pytest.approx(right[name], rel=1e-12), (number, name)


def test_empty_rounds_fade_features() -> None:
    table = UserTable(SECRET)
    names = pa.array(["ann"])
    table.count(keys_of(names, SECRET), names, np.array([[8, 0, 0]]), 0)
    assert close_features(table).raw[0, 5] == 8.0
    assert close_features(table, 3).raw[0, 5] == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_the_sensor_finds_users_and_places(seed: int) -> None:
    random = np.random.default_rng(seed)
    queries = drawn_queries(random, 12, 20)
    rects = np.array([[5, 5, 20, 20], [15, 15, 30, 30]])
    found = sense_hotspot(queries, rects, 20)
    rows = list(
        zip(
            queries.codes.tolist(),
            queries.rounds.tolist(),
            map(tuple, queries.bounds.tolist()),
            strict=True,
        )
    )
    right = brute_summary(queries.names.to_pylist(), rows, rects, 20)
    assert dict(zip(found.names.to_pylist(), found.by_age.tolist(), strict=True)) == right
    for name, place in zip(found.names.to_pylist(), found.places.tolist(), strict=True):
        x = y = square = 0.0
        for code, registered, (x0, y0, x1, y1) in rows:
            inside = brute_summary(
                queries.names.to_pylist(), [(code, 20, (x0, y0, x1, y1))], rects, 20
            )
            if name in inside and 20 - registered < 5:
                weight = 0.5 ** (20 - registered)
                middle = ((x0 + x1) / 2, (y0 + y1) / 2)
                x += weight * middle[0]
                y += weight * middle[1]
                extent = ((x1 - x0) / 2) ** 2 + ((y1 - y0) / 2) ** 2
                square += weight * (middle[0] ** 2 + middle[1] ** 2 + extent)
        assert place == pytest.approx([x, y, square])


@pytest.mark.parametrize("seed", range(5))
def test_chance_is_the_share_of_old_queries_in_the_hotspot(seed: int) -> None:
    random = np.random.default_rng(seed)
    queries = drawn_queries(random, 12, 20)
    rects = np.array([[5, 5, 20, 20], [15, 15, 30, 30]])
    parts = []
    for code in range(len(queries.names)):
        old = [
            any(x0 < c1 and x1 >= c0 and y0 < r1 and y1 >= r0 for c0, r0, c1, r1 in rects.tolist())
            for owner, number, (x0, y0, x1, y1) in zip(
                queries.codes.tolist(),
                queries.rounds.tolist(),
                queries.bounds.tolist(),
                strict=True,
            )
            if owner == code and 20 - number >= 5
        ]
        if old:
            parts.append(sum(old) / len(old))
    right = sum(parts) / len(parts) if parts else 0.0
    assert sense_hotspot(queries, rects, 20).chance == pytest.approx(right)


def test_the_place_of_a_user_is_their_last_hotspot() -> None:
    table = UserTable(SECRET)

    def hotspot(number: int, place: float, count: int) -> None:
        bounds = np.full((count, 4), place)
        queries = LiveQueries(
            pa.array(["ann"]), np.zeros(count, np.int32), np.zeros(count, np.int64), bounds
        )
        corners = np.array([[place - 1, place - 1, place + 1, place + 1]])
        add_hotspot(table, sense_hotspot(queries, corners, 0), number, 0)

    hotspot(1, 10.0, 24)
    hotspot(2, 50.0, 6)
    # A single query in a hotspot of other users does not change the place.
    hotspot(3, 90.0, 1)
    closed = close_features(table)
    assert closed.places[0].tolist() == [6.0, 300.0, 300.0, 30_000.0]
    assert closed.raw[0, 11] == 31.0
    assert close_features(table).places[0].tolist() == [0.0] * 4


def test_chances_add_up_over_the_hotspots_a_user_has_recent_queries_in() -> None:
    table = UserTable(SECRET)
    names = pa.array(["ann", "bob", "cy"])
    both, one, old = [1, 0, 0, 0, 0], [0, 0, 2, 0, 0], [0] * 5
    add_hotspot(
        table, HotspotSummary(names, np.array([both, one, old]), np.zeros((3, 3)), 0.1), 1, 0
    )
    add_hotspot(
        table, HotspotSummary(names, np.array([both, old, old]), np.zeros((3, 3)), 0.3), 2, 0
    )
    assert close_features(table).chances.tolist() == pytest.approx([0.4, 0.1, 0.0])
    assert close_features(table).chances.tolist() == [0.0] * 3


def hotspot_of(ages: dict[str, list[int]]) -> HotspotSummary:
    """A hotspot with the given numbers of queries by user and age in rounds."""
    by_age = np.array(list(ages.values()))
    return HotspotSummary(pa.array(list(ages)), by_age, np.ones((len(ages), 3)), 0.1)


def test_a_full_table_evicts_no_user_who_is_in_a_hotspot() -> None:
    """A table without evictions is the reference; invented users send many more requests."""
    small, large = UserTable(SECRET, users_max=64), UserTable(SECRET)
    open_round = {
        "new": [2, 0, 0, 0, 0],
        "recent": [0, 0, 3, 0, 0],
        "old": [0, 0, 0, 0, 0],
    }
    earlier = {"earlier": [1, 0, 0, 0, 0], "recent": [0, 1, 0, 0, 0]}
    for table in (small, large):
        add_hotspot(table, hotspot_of(earlier), 1, 0)
        close_features(table)
        add_hotspot(table, hotspot_of(open_round), 2, 1)
        for start in range(0, 800, 40):
            names = pa.array([f"made-up-{k}" for k in range(start, start + 40)])
            counts = np.full((40, 2), 100, np.int64)
            table.count(keys_of(names, SECRET), names, counts, 1)
    assert small.used <= 64 and small.evicted > 700 and large.evicted == 0
    found, reference = (
        dict(zip(closed.names, closed.raw.tolist(), strict=True))
        for closed in (close_features(small), close_features(large))
    )
    for name in (*open_round, *earlier):
        assert found.get(name) == reference[name], name


def test_the_sensor_accepts_coordinates() -> None:
    queries = LiveQueries(
        pa.array(["ann"]),
        np.zeros(2, np.int32),
        np.array([0, 0]),
        np.array([[0.5, 0.5, 1.0, 1.0], [2.0, 2.0, 3.0, 3.0]]),
    )
    # The lower end is the partition's own, the upper end its neighbour's.
    assert sense_hotspot(queries, np.array([[1.0, 1.0, 2.0, 2.0]]), 0).by_age.tolist() == [
        [1, 0, 0, 0, 0]
    ]


def test_normalised_features_lie_between_zero_and_one() -> None:
    random = np.random.default_rng(0)
    raw = random.normal(size=(50, 14))
    raw[:, 3] = 7.0
    scaled = normalise(raw)
    assert (scaled[:, 3] == 0.0).all()
    others = np.delete(scaled, 3, axis=1)
    assert (others.min(axis=0) == 0.0).all() and (others.max(axis=0) == 1.0).all()
    order = np.argsort(raw[:, 0])
    assert (np.diff(scaled[order, 0]) >= 0).all()
    assert normalise(np.empty((0, 14))).shape == (0, 14)
