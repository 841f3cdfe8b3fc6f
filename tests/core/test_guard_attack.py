"""Attacks and crowds: reproducible from a seed, at the given rates and places."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from roost.model.space import Rect, Space
from roost.queries.admission import Rules, admit
from roost.sim.attack import (
    Attack,
    Crowd,
    Mover,
    Newcomer,
    Normal,
    Party,
    Requests,
    World,
    rank_weights,
)

DATA = np.random.default_rng(0).random((5_000, 2))
PARTIES = [
    pytest.param(party, id=type(party).__name__)
    for party in (
        Normal(users=20, rate=10, queries=500),
        Attack(users=4, rate=30, queries=900, start=3),
        Crowd(users=40, queries_each=5, start=2, stop=12, rise=4),
        Newcomer(rate=20, queries=1_500, start=3),
        Mover(rate=20, queries=1_000, start=3),
    )
]


def run(party: Party, seed: int = 1, ticks: int = 30) -> tuple[World, Requests, list[Requests]]:
    world = World([party.scaled(1.0)], DATA, seed)
    begun = world.begin()
    return world, begun, [world.next() for _ in range(ticks)]


@pytest.mark.parametrize("party", PARTIES)
def test_the_same_seed_requests_the_same(party: Party) -> None:
    _, _, one = run(party)
    _, _, two = run(party)
    _, _, other = run(party, seed=2)
    assert all(
        np.array_equal(a.boxes, b.boxes, equal_nan=True) for a, b in zip(one, two, strict=True)
    )
    assert not all(
        a.boxes.shape == b.boxes.shape and np.array_equal(a.boxes, b.boxes, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("party", PARTIES)
def test_queries_are_terminated_once_by_their_owner_after_registration(party: Party) -> None:
    _, begun, ticks = run(party)
    owner = dict(zip(begun.queries.tolist(), begun.codes.tolist(), strict=True))
    for requests in ticks:
        ends = ~requests.registers
        rows = zip(requests.queries[ends].tolist(), requests.codes[ends].tolist(), strict=True)
        for query, code in rows:
            assert owner.pop(query) == code
        new = requests.registers
        rows = zip(requests.queries[new].tolist(), requests.codes[new].tolist(), strict=True)
        for query, code in rows:
            assert query not in owner
            owner[query] = code


@pytest.mark.parametrize("party", PARTIES)
def test_generated_requests_are_admitted(party: Party) -> None:
    world, begun, ticks = run(party)
    space = Space(Rect(-10.0, 0.0, 30.0, 20.0))
    rules = Rules(space, pa.string(), pa.timestamp("us", "UTC"))
    block = pa.concat_tables([r.table(world.names, space.bounds) for r in (begun, *ticks)])
    done = admit(block, rules)
    assert done.refused == []
    registered = sum(int(r.registers.sum()) for r in (begun, *ticks))
    assert done.queries.num_rows <= registered


def test_an_attack_moves_its_queries_from_target_to_target() -> None:
    attack = Attack(users=4, rate=20, queries=900, start=3)
    world = World([attack], DATA, 3)
    world.begin()
    live: dict[int, np.ndarray] = {}
    for tick in range(30):
        requests = world.next()
        assert (len(requests) == 0) == (tick < 3)
        for query in requests.queries[~requests.registers].tolist():
            live.pop(query, None)
        new = requests.registers
        for query, box in zip(requests.queries[new].tolist(), requests.boxes[new], strict=True):
            live[query] = box
            target = attack.targets[-1][1]
            assert (np.abs((box[:2] + box[2:]) / 2 - target) < 0.02).all()
        assert len(live) <= 900
    # About 300 queries a tick.
    assert set(np.diff([tick for tick, _ in attack.targets]).tolist()) <= {3, 4}
    places = np.array([place for _, place in attack.targets])
    assert (np.hypot(*np.diff(places, axis=0).T) > 0.1).all()


def test_staggered_resting_and_half_normal_attacks() -> None:
    staggered = World([Attack(users=5, rate=50, queries=900, start=2, stagger=2)], DATA, 0)
    staggered.begin()
    seen = [len(set(staggered.next().codes.tolist())) for _ in range(14)]
    assert seen[:2] == [0, 0] and seen[2] == seen[3] == 1 and seen[4] == 2 and seen[-1] == 5
    resting = World([Attack(rate=60, queries=900, start=0, pause=5)], DATA, 0)
    resting.begin()
    busy = [len(resting.next()) > 0 for _ in range(14)]
    assert busy.count(False) in (10, 11, 12)
    half = Attack(rate=60, queries=9_000, start=0, normal_part=0.5)
    world = World([half], DATA, 0)
    world.begin()
    requests = world.next()
    middles = requests.boxes[requests.registers][:, :2]
    near = (np.abs(middles - half.targets[0][1]) < 0.02).all(axis=1)
    assert 0.4 < near.mean() < 0.6


def test_a_crowd_has_many_users_at_one_place() -> None:
    _, begun, ticks = run(Crowd(users=40, queries_each=5, start=2, stop=12, rise=4))
    assert len(begun) == 0
    came = [r for r in ticks if r.registers.any()]
    assert len(came) == 4
    assert len({code for r in came for code in r.codes.tolist()}) == 40
    boxes = np.concatenate([r.boxes[r.registers] for r in came])
    assert np.ptp(boxes[:, 0]) < 0.03 and len(boxes) == 200
    assert sum(int((~r.registers).sum()) for r in ticks) == 200


def test_a_mover_terminates_as_many_queries_as_they_register() -> None:
    _, begun, ticks = run(Mover(rate=20, queries=1_000, start=3))
    assert len(begun) == 1_000
    assert sum(int(r.registers.sum()) for r in ticks) == 1_000
    ended = np.concatenate([r.queries[~r.registers] for r in ticks])
    assert sorted(ended.tolist()) == list(range(1_000))


@pytest.mark.parametrize("users", [1, 2, 10, 100, 3_000])
def test_a_fifth_of_the_users_sends_four_fifths(users: int) -> None:
    weights = rank_weights(users)
    assert weights.sum() == pytest.approx(1.0) and (np.diff(weights) <= 0).all()
    if users >= 10:
        assert weights[: users // 5].sum() == pytest.approx(0.8, abs=0.01)
