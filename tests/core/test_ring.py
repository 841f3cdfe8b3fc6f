"""Consistent hashing: shares, moves, order of joining, and resizing with the balancer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.balance.changes import NoChange
from roost.dataflow.balancing import BucketPlanner, GreedyPolicy, SubqueryLoad
from roost.dataflow.buckets import BucketMap
from roost.dataflow.loads import BucketLoads
from roost.dataflow.moves import MapChange
from roost.elastic.ring import (
    POINTS,
    Ring,
    bucket_hashes,
    proposed,
    resized,
    ring_owners,
)

BUCKETS = 256
HASHES = np.random.default_rng(5).integers(0, 2**64, 20_000, np.uint64)
names = st.lists(st.text("abc", max_size=3), min_size=1, max_size=8, unique=True)


def named(ring: Ring, hashes: np.ndarray = HASHES) -> list[str]:
    return [ring.nodes[k] for k in ring.owner_of(hashes)]


def walked(weights: dict[str, float], value: int) -> str:
    """Find the owner by the definition: the next point, or the first one of the circle."""
    ring = Ring.of(weights)
    points = sorted(zip(ring.points.tolist(), [ring.nodes[k] for k in ring.owners], strict=True))
    return next((name for point, name in points if point >= value), points[0][1])


@given(names, st.randoms(use_true_random=False))
@examples(50)
def test_the_order_of_joining_does_not_matter(nodes: list[str], random: object) -> None:
    weights = {node: 1.0 + len(node) for node in nodes}
    shuffled = dict(sorted(weights.items(), key=lambda item: random.random()))  # type: ignore
    first, second = Ring.of(weights), Ring.of(shuffled)
    assert named(first) == named(second)
    assert [walked(weights, int(value)) for value in HASHES[:20]] == named(first)[:20]


def test_points_that_collide_belong_to_the_first_name() -> None:
    ring = Ring(("a", "b"), np.array([5, 5, 9], np.uint64), np.array([0, 1, 1]))
    assert named(ring, np.array([4, 5, 6, 9, 10], np.uint64)) == ["a", "a", "b", "b", "a"]


@given(names)
@examples(50)
def test_only_the_node_that_joins_gets_buckets(nodes: list[str]) -> None:
    before = named(Ring.of(dict.fromkeys(nodes, 1.0)))
    after = named(Ring.of({**dict.fromkeys(nodes, 1.0), "new": 1.0}))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} <= {"new"}
    share = 1.0 / (len(nodes) + 1)
    assert len(moved) / HASHES.size == pytest.approx(share, rel=0.35)


def test_larger_nodes_get_more() -> None:
    ring = Ring.of({"small": 1.0, "half": 0.5, "large": 4.0})
    assert np.bincount(ring.owners).tolist() == [POINTS // 2, 4 * POINTS, POINTS]
    assert ring.nodes == ("half", "large", "small")
    shares = np.zeros(3)
    for seed in range(30):
        ring = Ring.of({f"{seed} {node}": w for node, w in (("h", 0.5), ("l", 4.0), ("s", 1.0))})
        shares += np.bincount(ring.owner_of(HASHES), minlength=3) / HASHES.size / 30
    assert shares == pytest.approx([0.5 / 5.5, 4 / 5.5, 1 / 5.5], rel=0.05)


def splitmix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def by_hand(*columns: int | str) -> int:
    """Hash a row with whole numbers of Python: FNV-1a of texts, mixed column by column."""
    found, golden = 0, 0x9E3779B97F4A7C15
    for column in columns:
        own = column
        if isinstance(own, str):
            own = 0xCBF29CE484222325
            for byte in column.encode():  # type: ignore[union-attr]
                own = (own ^ byte) * 0x100000001B3 % 2**64
        found = splitmix((found + golden) % 2**64 ^ splitmix((own + golden) % 2**64))
    return found


def test_the_hash_is_the_same_on_every_platform() -> None:
    assert bucket_hashes(9).tolist() == [by_hand(bucket) for bucket in range(9)]
    points = Ring.of({"17": 1.0}).points.tolist()
    assert points == sorted(by_hand("17", number) for number in range(POINTS))


def test_the_first_map_is_uneven_and_complete() -> None:
    counts = np.bincount(ring_owners(10, BUCKETS), minlength=10)
    assert counts.size == 10 and counts.sum() == BUCKETS
    assert 0.05 < counts.std() / counts.mean() < 0.35


def load(owners: list[int], machines: int, target: int, weights: list[float]) -> SubqueryLoad:
    busy = np.array(weights)
    loads = BucketLoads(1, 10.0, busy * 1e6, busy, np.ones(busy.size))
    return SubqueryLoad(
        "sums", BucketMap(0, machines, tuple(owners)), target, (loads,), np.zeros(busy.size)
    )


sizes = st.integers(1, 12)


@given(sizes, sizes, st.integers(0, 1_000))
@examples(100)
def test_a_proposal_moves_only_what_must_move(machines: int, target: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    owners = random.integers(0, machines, BUCKETS)
    found = proposed(load(owners.tolist(), machines, target, [1.0] * BUCKETS))
    moved = found != owners
    assert found.max() < target
    if target >= machines:
        assert (found[moved] >= machines).all()
    else:
        assert (moved == (owners >= target)).all()


@given(sizes, sizes, st.integers(0, 1_000), st.sampled_from([BucketPlanner(), GreedyPolicy()]))
@examples(100)
def test_the_balancer_corrects_the_proposal_in_the_same_change(
    machines: int, target: int, seed: int, balancer: BucketPlanner | GreedyPolicy
) -> None:
    random = np.random.default_rng(seed)
    weights = random.permutation(1.0 / np.arange(20, 20 + BUCKETS)) * machines
    before = load(ring_owners(machines, BUCKETS).tolist(), machines, target, weights.tolist())
    decision = resized(before, balancer)
    if machines == target:
        return
    assert isinstance(decision, MapChange) and decision.machines == target
    owners = before.owners
    assert all(owners[bucket] != machine for bucket, machine in decision.owners.items())
    owners[list(decision.owners)] = list(decision.owners.values())
    assert owners.max() < target
    loads = np.bincount(owners, weights, target)
    ring_loads = np.bincount(proposed(before), weights, target)
    assert loads.max() <= ring_loads.max() + 1e-9
    if isinstance(balancer, BucketPlanner):
        assert loads.max() <= 1.15 * max(loads.mean(), weights.max())


@pytest.mark.parametrize("machine", [2, 3])
def test_buckets_that_cannot_leave_keep_the_size(machine: int) -> None:
    owners = ring_owners(4, BUCKETS).tolist()
    before = load(owners, 4, 2, [1.0] * BUCKETS)
    stuck = owners.index(machine)
    fixed = replace(before, fixed=frozenset([stuck]))
    reason = f"bucket {stuck} cannot leave machine {machine} yet"
    assert resized(fixed, BucketPlanner()) == NoChange(reason)
