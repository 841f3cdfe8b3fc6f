"""A cluster under attack, and crowds that are none: who is blocked, when, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from roost.guard import Block, Settings, Suspect
from roost.guard.attack import Attack
from roost.sim.guarded import Defence, simulate_guarded
from roost.sim.guarded_cases import attacked, cluster, crowds, other_attacks, paper_attacks, peace
from roost.sim.guarded_outcome import BLOCK_WITHIN, shares

SEEDS = range(20)


def with_seeds(names: Iterable[str], default: Collection[str]) -> list[Any]:
    """Every case with every seed; in the default run some cases, each with a seed of its own."""
    return [
        pytest.param(name, seed, marks=[] if name in default and seed == k else [pytest.mark.full])
        for k, name in enumerate(names)
        for seed in SEEDS
    ]


# The attackers of this run fall into two clusters, 28 and 22, that are blocked one after the other,
# the second three rounds after the second hotspot.
LATE = {("50 users", 15): "blocked in two parts, a round late"}

PAPER = with_seeds(paper_attacks(), ("150/s", "300/s", "600/s", "1200/s", "2 users", "50 users"))
OTHERS = with_seeds(other_attacks(), ("one user", "half normal"))
CROWDS = with_seeds(crowds(), crowds())


@pytest.mark.parametrize(("name", "seed"), PAPER)
def test_the_papers_attacks_are_blocked_and_nobody_else(
    name: str, seed: int, full: bool, request: pytest.FixtureRequest
) -> None:
    if (name, seed) in LATE:
        request.applymarker(pytest.mark.xfail(reason=LATE[name, seed], strict=True))
    # The faster ones are over soon.
    minutes = 30 if full or name in ("150/s", "300/s") else 16
    outcome = simulate_guarded(cluster(seed, minutes), attacked(paper_attacks()[name]))
    assert outcome.false_positives == 0
    assert outcome.false_negatives == 0
    if outcome.missed:
        # Only a weak attack that did not make two hotspots, and no harm either.
        assert name == "150/s"
        assert shares(outcome.trace).mean() > 0.95
    else:
        assert outcome.rounds_to_block is not None
        assert outcome.rounds_to_block <= BLOCK_WITHIN


@pytest.mark.parametrize(("name", "seed"), OTHERS)
def test_attacks_that_try_to_be_missed(name: str, seed: int) -> None:
    outcome = simulate_guarded(cluster(seed), attacked(other_attacks()[name]))
    assert outcome.false_positives == 0
    if name == "one user":
        assert outcome.false_negatives == 0
    elif name == "slow":
        # It may outlast the suspicious list, but then it rests more than it attacks.
        peaceful = simulate_guarded(cluster(seed), peace(), Defence(guard=False))
        kept = shares(outcome.trace).mean() / shares(peaceful.trace).mean()
        assert outcome.missed == 0 or kept > 0.93
    else:
        # Whoever comes last may be too weak alone for a hotspot of his own.
        assert outcome.missed <= 1


@pytest.mark.parametrize(("name", "seed"), CROWDS)
def test_crowds_newcomers_and_movers_are_left_alone(name: str, seed: int, full: bool) -> None:
    outcome = simulate_guarded(cluster(seed, 30 if full else 16), crowds()[name])
    assert outcome.blocked == frozenset()


def test_peace_is_left_alone() -> None:
    outcome = simulate_guarded(cluster(0, 10), peace())
    assert outcome.blocked == frozenset()
    alone = simulate_guarded(cluster(0, 10), peace(), Defence(guard=False))
    assert outcome.trace.rows == alone.trace.rows


@pytest.mark.parametrize("restart_at", [22, 27])
def test_a_restart_in_the_middle_makes_no_difference(restart_at: int) -> None:
    case = attacked(Attack(rate=1200, start=20))
    straight = simulate_guarded(cluster(1, 10), case)
    restarted = simulate_guarded(cluster(1, 10), case, restart_at=restart_at)
    assert straight.blocked and straight.judgements == restarted.judgements
    assert straight.trace.rows == restarted.trace.rows


def test_throughput_with_and_without_a_guard() -> None:
    case = attacked(Attack(rate=1200, start=20))
    peaceful = simulate_guarded(cluster(3), peace(), Defence(guard=False))
    usual = shares(peaceful.trace).mean()
    kept = {
        name: shares(simulate_guarded(cluster(3), case, defence).trace).mean() / usual
        for name, defence in (
            ("none", Defence(guard=False)),
            ("guard", Defence(evict=False)),
            ("quarantine", Defence(quarantine=True, evict=False)),
        )
    }
    assert kept["none"] < 0.93
    assert kept["guard"] >= 0.95
    # Hiding load that is there costs balance; but not as much as having no guard.
    assert kept["none"] < kept["quarantine"]


def test_blocked_users_have_no_queries_left_where_they_are_evicted() -> None:
    case = attacked(Attack(rate=1200, start=20))
    outcome = simulate_guarded(cluster(1, 12), case)
    kept = simulate_guarded(cluster(1, 12), case, Defence(evict=False))
    # Units of work are points times live queries: a tenth of the queries was the attack's.
    assert outcome.trace.rows[-1].units_per_s / outcome.trace.rows[-1].admitted < (
        0.95 * kept.trace.rows[-1].units_per_s / kept.trace.rows[-1].admitted
    )


def test_suspicion_comes_before_the_block() -> None:
    outcome = simulate_guarded(cluster(1, 12), attacked(Attack(rate=1200, start=20)))
    assert outcome.suspected_in is not None and outcome.blocked_in is not None
    assert outcome.suspected_in < outcome.blocked_in
    found = [d for d in outcome.judgements if isinstance(d, Suspect | Block)]
    assert isinstance(found[0], Suspect)


def test_as_published_a_newcomer_is_blocked() -> None:
    paper = Defence(settings=Settings.paper())
    outcome = simulate_guarded(cluster(0, 10), crowds()["newcomer in a town"], paper)
    assert outcome.blocked == {"newcomer-0"}
