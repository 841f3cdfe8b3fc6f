"""Detector (algorithm 4) on synthetic features: clusters found, conditions, blocks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from roost.guard.decisions import Block, NoFinding, Release, Suspect
from roost.guard.detector import Finding, detect
from roost.guard.features import Features
from roost.guard.suspicion import ClusterPlace, DetectorSettings, ListedCluster

PAPER = DetectorSettings.paper()
NORMAL, BAD = 60, 8


def made_up(
    seed: int = 0,
    rate: float = 0.9,
    place: tuple[float, float] = (10.0, 10.0),
    involved: bool = True,
    bad: int = BAD,
    contribution: float = 200.0,
    spread: float = 1.0,
    chance: float = 0.0,
) -> Features:
    """Normal users with few queries in hotspots, and ``bad`` ones at the end with many."""
    random = np.random.default_rng(seed)
    users = NORMAL + bad
    raw = np.zeros((users, 14))
    raw[:, 0] = random.integers(20, 400, users)
    raw[NORMAL:, 0] = 220.0
    raw[:, 1] = raw[:, 0]
    raw[:, 5:7] = 1.8 * raw[:, :2]
    raw[:, 2] = 1.0
    raw[:, 4] = 5.0
    raw[:NORMAL, 10] = random.integers(0, 40, NORMAL)
    raw[:NORMAL, 11] = random.integers(1, 20, NORMAL)
    raw[:NORMAL, 12:] = 0.05 + 0.02 * random.random((NORMAL, 1))
    raw[NORMAL:, 10] = 30.0
    raw[NORMAL:, 11] = contribution
    raw[NORMAL:, 12:] = rate
    raw[:, 3] = raw[:, 11]
    raw[:, 7:10] = raw[:, 2:5]
    if not involved:
        raw[NORMAL:, 2] = 0.0
    x, y = place
    square = x * x + y * y + spread * spread
    places = np.outer(raw[:, 11], [1.0, x, y, square])
    names = [f"normal-{k}" for k in range(NORMAL)] + [f"bad-{k}" for k in range(bad)]
    keys = np.arange(1, users + 1).astype(np.uint64)
    return Features(keys, names, raw, places, np.full(users, chance))


def bad_names(bad: int = BAD) -> set[str]:
    return {f"bad-{k}" for k in range(bad)}


def judge(
    features: Features,
    listed: tuple[ListedCluster, ...] = (),
    number: int = 7,
    settings: DetectorSettings = DetectorSettings(),  # noqa: B008
    seed: int = 1,
) -> Finding:
    return detect(features, listed, number, 1_000, np.random.default_rng(seed), settings)


@pytest.mark.parametrize("settings", [PAPER, DetectorSettings()], ids=["paper", "default"])
@pytest.mark.parametrize("seed", range(5))
def test_found_once_is_suspicious_found_twice_is_blocked(
    settings: DetectorSettings, seed: int
) -> None:
    first = judge(made_up(seed), settings=settings, seed=seed)
    (suspect,) = first.decisions
    assert isinstance(suspect, Suspect) and set(suspect.users) == bad_names()
    least, most = settings.removal_rounds
    assert 7 + least <= suspect.until <= 7 + most
    assert first.blocked == ()
    there = made_up(seed + 50, place=(70.0, 20.0))
    second = judge(there, first.listed, 8, settings, seed)
    (block,) = second.decisions
    assert isinstance(block, Block) and set(block.users) == bad_names()
    assert block.position == 1_000
    assert {name for _, name in second.blocked} == bad_names()
    assert second.listed == ()


def test_one_user_alone_is_found() -> None:
    found = judge(made_up(bad=1, contribution=900.0))
    assert isinstance(found.decisions[0], Suspect) and found.decisions[0].users == ("bad-0",)


def hidden(seed: int) -> Features:
    """One attacker between users who send few requests and users who send many.

    Separating the two kinds of users is as good a clustering as separating the attacker; it ends
    with the kind that has slightly more queries in the hotspots.
    """
    features = made_up(seed, bad=1, contribution=400.0)
    half = NORMAL // 2
    jitter = np.random.default_rng(seed).integers(0, 20, NORMAL)
    features.raw[:NORMAL, 0] = np.where(np.arange(NORMAL) < half, 20.0, 380.0) + jitter
    features.raw[NORMAL:, 0] = 200.0
    features.raw[:, 1] = features.raw[:, 0]
    features.raw[:, 5:7] = 1.8 * features.raw[:, :2]
    features.raw[:half, 12:], features.raw[half:NORMAL, 12:] = 0.03, 0.07
    return features


def test_clustering_is_repeated_while_it_finds_no_cluster_that_passes() -> None:
    """One attempt finds the attacker about every second time, five nearly always."""

    def found(settings: DetectorSettings) -> int:
        findings = [judge(hidden(seed), settings=settings, seed=seed) for seed in range(30)]
        suspects = [finding.decisions[0] for finding in findings]
        return sum(isinstance(s, Suspect) and s.users == ("bad-0",) for s in suspects)

    assert 8 <= found(DetectorSettings(tries=1)) <= 21
    assert found(DetectorSettings()) >= 26


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        pytest.param(made_up(rate=0.1), "within beta of normal users", id="beta"),
        pytest.param(made_up(involved=False), "in no hotspot of this round", id="involvement"),
        pytest.param(made_up(contribution=2.0), "not the cause of the hotspots", id="cause"),
        pytest.param(
            made_up(chance=0.18),
            "in the hotspots no more than expected by chance",
            id="chance",
        ),
        pytest.param(made_up().taken(np.arange(1)), "fewer than two users", id="one user"),
        pytest.param(
            Features(
                np.arange(3).astype(np.uint64),
                list("abc"),
                np.zeros((3, 14)),
                np.zeros((3, 4)),
                np.zeros(3),
            ),
            "no hotspot in this round",
            id="quiet",
        ),
    ],
)
def test_a_cluster_must_satisfy_every_condition(features: Features, reason: str) -> None:
    found = judge(features)
    assert found.listed == () and found.blocked == ()
    (decision,) = found.decisions
    assert isinstance(decision, NoFinding) and decision.reason == reason


@pytest.mark.parametrize("seed", range(3))
def test_suspicion_is_monotone_in_beta(seed: int) -> None:
    rates = [0.06, 0.1, 0.15, 0.25, 0.4, 0.7, 1.0]
    found = [isinstance(judge(made_up(seed, rate)).decisions[0], Suspect) for rate in rates]
    assert found == sorted(found) and not found[0] and found[-1]
    betas = [1.5, 3.0, 6.0, 12.0, 24.0]
    kept = [
        isinstance(judge(made_up(seed), settings=DetectorSettings(beta=beta)).decisions[0], Suspect)
        for beta in betas
    ]
    assert kept == sorted(kept, reverse=True) and kept[0] and not kept[-1]


def test_a_second_finding_at_the_same_place_blocks_no_user() -> None:
    listed: tuple[ListedCluster, ...] = ()
    for number in range(7, 20):
        found = judge(made_up(number, place=(10.5, 9.5)), listed, number)
        listed = found.listed
        assert found.blocked == ()
        assert isinstance(found.decisions[-1], Suspect)
    assert all(entry.stays for entry in listed)
    assert listed[0].until >= 19 + 20
    # A cluster that stayed before is blocked once it moves.
    moved = judge(made_up(place=(40.0, 9.5)), listed, 20)
    assert {name for _, name in moved.blocked} == bad_names()


def test_the_paper_blocks_at_the_same_place() -> None:
    first = judge(made_up(), settings=PAPER)
    second = judge(made_up(3), first.listed, 8, PAPER)
    assert {name for _, name in second.blocked} == bad_names()


def test_the_paper_requires_the_same_cluster() -> None:
    first = judge(made_up(bad=8), settings=PAPER)
    again = judge(made_up(bad=9, place=(70.0, 20.0)), first.listed, 8, PAPER)
    assert again.blocked == () and len(again.listed) == 2
    nine = made_up(bad=9, place=(70.0, 20.0))
    nine.raw[-1, 10] = 23.0
    by_user = judge(nine, judge(made_up(bad=8)).listed, 8)
    # Eight of the nine users were listed before.
    assert {name for _, name in by_user.blocked} == bad_names(8)
    assert {name for entry in by_user.listed for _, name in entry.users} == {"bad-8"}


def test_a_very_active_user_is_not_blocked_with_the_cluster() -> None:
    features = made_up()
    features.raw[0, [0, 1, 3, 5, 6, 8, 11]] *= 40.0
    features.raw[0, 10] = 30.0
    first = judge(features)
    assert {name for entry in first.listed for _, name in entry.users} <= bad_names()


def test_more_than_chance_is_found() -> None:
    # Half of their recent queries (200 of about 400) are there, more than three times 0.16.
    assert isinstance(judge(made_up(chance=0.16)).decisions[0], Suspect)
    assert isinstance(judge(made_up(chance=0.9), settings=PAPER).decisions[0], Suspect)


@pytest.mark.parametrize("seed", range(5))
def test_a_group_split_by_kmeans_is_found_completely(seed: int) -> None:
    features = made_up(seed)
    # Half of them missed an early hotspot by chance, and x11 never decays.
    features.raw[NORMAL : NORMAL + BAD // 2, 10] = 4.0
    found = judge(features, seed=seed)
    assert {name for entry in found.listed for _, name in entry.users} == bad_names()
    far = made_up(seed)
    far.raw[NORMAL : NORMAL + BAD // 2, 10] = 4.0
    # At another place they are another group.
    far.places[NORMAL : NORMAL + BAD // 2] = [200.0, 200.0 * 90, 200.0 * 90, 200.0 * 16_201]
    parted = judge(far, seed=seed)
    assert {name for entry in parted.listed for _, name in entry.users} < bad_names()


def listed_in_parts(first: Finding, parts: list[slice]) -> tuple[ListedCluster, ...]:
    (entry,) = first.listed
    return tuple(replace(entry, users=entry.users[part]) for part in parts)


def test_a_group_that_was_listed_in_parts_is_blocked_as_one() -> None:
    parts = listed_in_parts(judge(made_up()), [slice(0, 7), slice(7, 8)])
    there = made_up(place=(70.0, 20.0))
    # One of eight is too small a part of the hotspot to be its cause.
    alone = judge(there, parts[1:], 8)
    assert alone.blocked == ()
    both = judge(there, parts, 8)
    assert {name for _, name in both.blocked} == bad_names() and both.listed == ()
    (block,) = both.decisions
    assert isinstance(block, Block)
    # A user who was listed at the current place, and was not at the first one, has not moved.
    stayed = (parts[0], replace(parts[1], place=ClusterPlace(70.0, 20.0, 1.0)))
    there.raw[-1, 10] = 23.0
    assert {name for _, name in judge(there, stayed, 8).blocked} == bad_names(7)
    # A user who contributes much less than the others may be unrelated.
    less = made_up(place=(70.0, 20.0))
    less.raw[-1, 11] *= 0.4
    assert {name for _, name in judge(less, parts, 8).blocked} == bad_names(7)


def only_chances_of(bad: float, normal: float) -> Features:
    features = made_up()
    features.chances[:NORMAL], features.chances[NORMAL:] = normal, bad
    return features


def test_hotspots_of_other_users_do_not_hide_an_attack() -> None:
    assert isinstance(judge(only_chances_of(bad=0.1, normal=0.9)).decisions[0], Suspect)
    assert isinstance(judge(only_chances_of(bad=0.2, normal=0.0)).decisions[0], NoFinding)


def left_out(rate: float = 0.9, **changes: float) -> Features:
    """Eight users at another place; ``changes`` apply to the last one."""
    features = made_up(place=(70.0, 20.0), rate=rate)
    for name, value in changes.items():
        features.raw[-1, int(name[1:]) - 1] = value
    return features


@pytest.mark.parametrize(
    ("features", "together"),
    [
        pytest.param(left_out(), True, id="the same"),
        # Less than 0.8 of their ALQR, which luck alone may do, and far beyond beta.
        pytest.param(left_out(x13=0.6, x14=0.6), True, id="beyond beta"),
        # Three times normal is 0.18, and 0.8 of theirs is 0.17.
        pytest.param(left_out(rate=0.21, x14=0.174), True, id="within beta and like them"),
        pytest.param(left_out(x13=0.1, x14=0.1), False, id="within beta"),
        pytest.param(left_out(x11=23.0), False, id="not at the first place"),
        pytest.param(left_out(x12=90.0), False, id="adds little"),
    ],
)
def test_unlisted_users_with_the_same_history_are_blocked_with_the_group(
    features: Features, together: bool
) -> None:
    seven = listed_in_parts(judge(made_up()), [slice(0, 7)])
    found = judge(features, seven, 8)
    assert {name for _, name in found.blocked} == bad_names(BAD if together else BAD - 1)


def test_a_user_with_only_the_same_history_is_not_blocked() -> None:
    seven = listed_in_parts(judge(made_up()), [slice(0, 7)])
    elsewhere = left_out()
    elsewhere.places[-1] = [200.0, 200.0 * 10, 200.0 * 10, 200.0 * 201]
    assert {name for _, name in judge(elsewhere, seven, 8).blocked} == bad_names(BAD - 1)


def test_users_not_found_again_in_time_are_released() -> None:
    first = judge(made_up())
    (entry,) = first.listed
    quiet = made_up(rate=0.05)
    assert judge(quiet, first.listed, entry.until).listed == first.listed
    later = judge(quiet, first.listed, entry.until + 1)
    assert later.listed == ()
    release = later.decisions[0]
    assert isinstance(release, Release) and set(release.users) == bad_names()


def test_times_on_the_list_are_random_within_their_limits() -> None:
    features = made_up()
    found = (judge(features, settings=PAPER, seed=seed) for seed in range(60))
    until = {finding.listed[0].until - 7 for finding in found}
    assert min(until) >= 5 and max(until) <= 30 and len(until) > 15


def test_the_same_seed_decides_the_same() -> None:
    one, two = (judge(made_up(4), seed=9) for _ in range(2))
    assert one.decisions == two.decisions and one.listed == two.listed


def test_evidence_is_json_data() -> None:
    first = judge(made_up())
    second = judge(made_up(place=(70.0, 20.0)), first.listed, 8)
    for decision in (*first.decisions, *second.decisions):
        again = json.loads(json.dumps(asdict(decision), allow_nan=False))
        assert again["evidence"]["features"]["x14"] == pytest.approx(0.9)
        assert again["evidence"]["splits"][0]["sizes"]
        assert again["evidence"]["alqr"] > 3 * again["evidence"]["alqr_others"]
    assert second.decisions[0].evidence["earlier"][0]["place"]["x"] == pytest.approx(10.0)
    (entry,) = first.listed
    assert ListedCluster.from_json(json.loads(json.dumps(asdict(entry)))) == entry


def test_quarters_of_a_square_are_one_place() -> None:
    # A quarter spreads by half a side over the root of six.
    spread = 0.5 / 6**0.5
    low, high = ClusterPlace(0.25, 0.25, spread), ClusterPlace(0.75, 0.75, spread)
    assert not low.apart_from(high)
    assert low.apart_from(ClusterPlace(1.25, 1.25, spread))


def test_places_are_apart_beyond_their_spread() -> None:
    here = ClusterPlace(0.0, 0.0, 1.0)
    assert not here.apart_from(ClusterPlace(3.9, 0.0, 1.0))
    assert here.apart_from(ClusterPlace(4.1, 0.0, 1.0))
    assert not here.apart_from(replace(here))
    features = made_up(spread=2.0)
    place = ClusterPlace.of(features, np.arange(NORMAL, NORMAL + BAD))
    assert place is not None and place.spread == pytest.approx(2.0)
    features.places[:] = 0.0
    assert ClusterPlace.of(features, np.arange(3)) is None
