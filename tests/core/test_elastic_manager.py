"""The elastic manager on single rounds: what it decides, and what it says about it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.balance.changes import NoChange, Rebalance
from roost.dataflow.balancing import GreedyPolicy, SubqueryLoad
from roost.dataflow.buckets import BucketMap
from roost.dataflow.loads import BucketLoads, HeavyKey
from roost.dataflow.moves import MapChange
from roost.elastic import (
    Balance,
    Cannot,
    ElasticDecision,
    ElasticRules,
    Executors,
    GroupSnapshot,
    Manager,
    Memory,
    Provision,
    Release,
    SparkRule,
    StageLoad,
)
from roost.elastic.forecast import Forecast
from roost.elastic.group import PlanLoad
from roost.elastic.manager import MeasuredLoad
from roost.errors import ConfigError
from roost.model.choices import ElasticPolicyName
from roost.runtime.rounds import arbitrate
from roost.runtime.scaling import ElasticPolicy, GroupRound, size_policy

RULES = ElasticRules(min=1, max=40, forecast=False)
ROUND_S = 10.0
COST_S = 1e-3  # for a row, both stages


def group(load: float, n: int, number: int = 0, **more: Any) -> GroupSnapshot:
    """Return a round in which so many executors would have been busy; all rows are processed."""
    rows = load * ROUND_S / COST_S
    stages = tuple(StageLoad(name, rows, rows, rows * COST_S / 2) for name in ("read", "sums"))
    values = {
        "clock": ROUND_S * number,
        "seconds": ROUND_S,
        "batches": 5,
        "slots": 1,
        "executors": Executors(n, 0, n),
        "settled": True,
        "stages": stages,
        "backlog": 0.0,
    }
    return GroupSnapshot(**{**values, **more})


def routing(shares: list[float], owners: list[int], *, keys: tuple[HeavyKey, ...] = ()) -> Any:
    """Return a bucket map whose buckets are busy for these shares of the round."""
    busy = np.array(shares) * ROUND_S
    loads = BucketLoads(1, ROUND_S, busy * 1e6, busy, np.ones(busy.size), keys=keys)
    machines = max(owners) + 1
    bucket_map = BucketMap(0, machines, tuple(owners))
    return SubqueryLoad("sums", bucket_map, machines, (loads,), np.zeros(busy.size))


def decisions(
    *rounds: GroupSnapshot, rules: ElasticRules = RULES, memory: Memory | None = None
) -> list[ElasticDecision]:
    """Return the decision of each round."""
    manager, memory, found = Manager(rules), memory or Memory(), []
    for number, one in enumerate(rounds):
        clock = one.clock or ROUND_S * (number + 1)
        decision, memory = manager.decide(replace(one, clock=clock), memory)
        found.append(decision)
    return found


def last(*rounds: GroupSnapshot, **more: Any) -> ElasticDecision:
    return decisions(*rounds, **more)[-1]


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("load", "n", "expected"),
    [
        pytest.param(0.8, 10, 2, id="ten executors with 0.8 shrink"),
        pytest.param(0.95, 1, 2, id="one executor with 0.95 grows"),
        pytest.param(7.2, 1, 12, id="one step suffices for twelve times the load"),
        pytest.param(0.91, 1, 2, id="above the upper limit"),
        pytest.param(3.61, 4, 7, id="the paper's third size"),
        pytest.param(15.4, 17, 26, id="the paper's last size"),
        pytest.param(24.0, 4, 40, id="rounding adds no executor"),
    ],
)
def test_the_size_is_the_load_over_the_target(load: float, n: int, expected: int) -> None:
    first, second = decisions(group(load, n), group(load, n))
    assert isinstance(first, NoChange)
    assert isinstance(second, Provision if expected > n else Release)
    assert (second.executors, second.load) == (expected, pytest.approx(load))
    assert f"load of {load:.2f} executors, utilisation {load / n:.2f}" in second.reason


@pytest.mark.parametrize(
    ("load", "n"),
    [(0.6, 1), (0.9, 1), (0.2, 1), (0.5, 1), (0.7, 2), (5.0, 10), (9.0, 10), (0.0, 1)],
)
def test_inside_the_limits_or_at_the_right_size_nothing_changes(load: float, n: int) -> None:
    assert isinstance(last(*[group(load, n)] * 5), NoChange)


@given(st.integers(1, 40), st.lists(st.tuples(st.floats(0, 40), st.floats(0, 40)), max_size=30))
@examples(100)
def test_a_load_that_swings_every_round_changes_nothing(
    n: int, pairs: list[tuple[float, float]]
) -> None:
    """Every second round is inside the limits."""
    inside = 0.7 * n
    loads = [load for pair in pairs for load in (pair[0], inside, pair[1], inside)]
    assert not any(
        isinstance(d, Provision | Release) for d in decisions(*[group(one, n) for one in loads])
    )


@given(st.floats(0.01, 100), st.integers(1, 40), st.integers(1, 20), st.integers(0, 20))
@examples(200)
def test_one_decision_leads_to_a_size_that_stays(load: float, n: int, low: int, more: int) -> None:
    rules = replace(RULES, min=low, max=low + more)
    n = min(max(n, low), low + more)
    memory, sizes = Memory(), [n]
    for number in range(12):
        decision, memory = Manager(rules).decide(group(load, n, number), memory)
        if isinstance(decision, Provision | Release):
            n = decision.executors
            sizes.append(n)
        assert rules.min <= n <= rules.max
    assert len(sizes) <= 2
    if len(sizes) == 2:
        assert n == min(max(int(np.ceil(round(load / 0.6, 9))), rules.min), rules.max)


def test_a_load_that_changed_within_a_round_is_seen_whole_first() -> None:
    """Three executors are right for 1.25, although their utilisation is below the limit."""
    found = decisions(*[group(load, 3) for load in (1.25, 1.25, 0.9, 0.5)])
    assert [type(d) for d in found] == [NoChange, NoChange, NoChange, Release]
    assert isinstance(found[-1], Release) and found[-1].executors == 1


def test_individual_adds_and_removes_one() -> None:
    rules = replace(RULES, policy=ElasticPolicyName.INDIVIDUAL)
    up, down = last(*[group(9.0, 2)] * 2, rules=rules), last(*[group(0.9, 9)] * 2, rules=rules)
    assert isinstance(up, Provision) and up.executors == 3
    assert isinstance(down, Release) and down.executors == 8


def test_after_a_change_two_more_rounds_are_measured() -> None:
    waiting = group(9.0, 4, settled=False, executors=Executors(4, 2, 2, 3.0))
    found = decisions(group(2.0, 2), group(2.0, 2), waiting, group(9.0, 4), group(9.0, 4))
    assert [type(d).__name__ for d in found] == [
        "NoChange",
        "Provision",
        "NoChange",
        "NoChange",
        "Provision",
    ]
    assert found[2].reason == "2 of 4 executors are present"
    assert found[3].reason == "1 of 2 rounds are measured"


# --------------------------------------------------------------------------- load


def test_load_counts_arrivals_not_what_was_processed() -> None:
    stage = StageLoad("read", arrived=7_200.0, rows=1_000.0, busy_s=10.0)
    slow = group(0.0, 1, stages=(stage,), slots=2)
    assert slow.offered({"read": 0.01}, None) == pytest.approx(3.6)
    found = last(slow, slow)
    assert isinstance(found, Provision) and found.executors == 6


def test_a_stage_that_processed_nothing_costs_what_it_did() -> None:
    unread = group(0.0, 1, stages=(StageLoad("read", 14_400.0, 0.0, 0.0),))
    found = last(unread, unread, memory=Memory(costs={"read": 1e-3}))
    assert isinstance(found, Provision) and found.executors == 3


def test_a_source_without_pace_needs_the_duration_of_a_batch() -> None:
    replay = group(1.0, 2, paced=False)  # ten seconds of work in five batches
    found = decisions(*[replay] * 4)
    assert isinstance(found[0], Cannot) and "elastic.batch_seconds" in found[0].reason
    assert [type(d) for d in found[1:]] == [NoChange] * 3, "reported once"
    fast = last(replay, replay, rules=replace(RULES, batch_seconds=0.5))
    assert isinstance(fast, Provision) and fast.executors == 7  # 10 s over 2.5 s, over 0.6
    slow = last(replay, replay, rules=replace(RULES, batch_seconds=10.0))
    assert isinstance(slow, Release) and slow.executors == 1


# --------------------------------------------------------------------------- backlog and balance

EVEN = [0.175] * 8
UNEVEN = [0, 0, 0, 0, 0, 0, 1, 1]
SPREAD = [0, 1, 0, 1, 0, 1, 0, 1]


def growing(load: float, n: int, **more: Any) -> list[GroupSnapshot]:
    """Return rounds whose backlog grows by a fifth of the arrivals."""
    rows = load * ROUND_S / COST_S
    return [group(load, n, k, backlog=0.2 * rows * (k + 1), **more) for k in range(3)]


def test_a_growing_backlog_is_balanced_first() -> None:
    uneven = routing(EVEN, UNEVEN)
    found = decisions(*growing(1.4, 2, routings=(uneven,)))
    assert isinstance(found[1], Balance), found[1]
    assert "from 0.350 to 0.000" in found[1].reason
    (change,) = found[1].changes
    owners = np.array(UNEVEN)
    owners[list(change.owners)] = list(change.owners.values())
    assert sorted(np.bincount(owners)) == [4, 4]


def test_a_growing_backlog_under_an_even_load_needs_executors() -> None:
    even = routing(EVEN, SPREAD)
    found = last(*growing(1.4, 2, routings=(even,))[:2])
    assert isinstance(found, Provision) and found.executors == 3
    assert "the backlog grows" in found.reason
    # Fewer executors than there are would not help either.
    assert isinstance(last(*growing(1.1, 2, routings=(even,))[:2]), NoChange)


def test_rows_of_the_next_batch_are_no_backlog() -> None:
    """Three times the load: more rows wait for the next batch, which is on time."""
    even = routing(EVEN, SPREAD)
    on_time = [replace(one, interval_s=7.0) for one in growing(1.4, 2, routings=(even,))]
    assert [type(d) for d in decisions(*on_time)] == [NoChange] * 3
    late = [replace(one, interval_s=1.0) for one in on_time]
    assert isinstance(last(*late[:2]), Provision)


def test_a_growing_backlog_never_releases() -> None:
    assert isinstance(last(*growing(0.4, 2)), NoChange)
    assert isinstance(last(group(0.4, 2), group(0.4, 2)), Release)
    waits = group(0.4, 2, backlog=1e6)
    found = last(waits, waits, waits)
    assert isinstance(found, NoChange) and "a backlog of 1000000 rows waits" in found.reason


def test_a_load_that_no_balancing_can_spread_is_named() -> None:
    keys = (HeavyKey("alice", 0, 0.7),)
    hot = routing([1.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], keys=keys)
    for rounds in (growing(1.3, 2, routings=(hot,)), [group(1.3, 2, routings=(hot,))] * 3):
        found = last(*rounds)
        assert isinstance(found, NoChange)
        assert "bucket 0 (key alice) of 'sums' has 77% of the load, on one machine" in found.reason


def test_offered_load_is_balanced_not_what_was_processed() -> None:
    """The uneven stage processed a tenth of what arrived, so its utilisation looks low."""
    stages = (StageLoad("sums", 14_000.0, 1_400.0, 1.4),)
    slow = routing([0.0175] * 8, UNEVEN)
    busy = group(1.4, 2, stages=stages, routings=(slow,))
    assert isinstance(last(busy, busy), Balance)
    assert isinstance(last(*[replace(busy, stages=group(1.4, 2).stages)] * 2), NoChange)


def test_an_imbalance_below_the_limit_is_left_alone() -> None:
    shares = [0.7, 0.6]
    assert isinstance(last(*[group(1.3, 2, routings=(routing(shares, [0, 1]),))] * 2), NoChange)


@pytest.mark.parametrize(("bucket", "kept"), [(6, True), (4, False)])
def test_balancing_must_improve_the_deviation(bucket: int, kept: bool) -> None:
    """The bucket that moves has 4 % of the difference, or 20 %."""

    class Moves:
        def decide(self, load: SubqueryLoad) -> MapChange:
            return MapChange("sums", {bucket: 1}, "a change")

    shares = [0.2, 0.2, 0.2, 0.2, 0.05, 0.04, 0.01, 0.4]
    uneven = group(1.3, 2, routings=(routing(shares, [0] * 7 + [1]),))
    manager, memory = Manager(RULES, Moves()), Memory()
    for _ in range(2):
        found, memory = manager.decide(uneven, memory)
    assert isinstance(found, NoChange if kept else Balance)


def test_each_routing_is_balanced_by_itself() -> None:
    first, second = routing(EVEN, UNEVEN), replace(routing(EVEN, UNEVEN), subquery="other")
    found = last(*[group(1.4, 2, routings=(first, second, routing(EVEN, SPREAD)))] * 2)
    assert isinstance(found, Balance)
    assert [change.subquery for change in found.changes] == ["sums", "other"]


def test_a_hot_machine_is_no_reason_to_provision() -> None:
    """The greedy algorithm balances what the planner does, if more slowly."""
    uneven = group(1.4, 2, routings=(routing(EVEN, UNEVEN),))
    manager, memory = Manager(RULES, GreedyPolicy()), Memory()
    found: ElasticDecision = NoChange("")
    for _ in range(2):
        found, memory = manager.decide(uneven, memory)
    assert isinstance(found, Balance)


def plan(number: int, *utilisation: float, changed: bool = True, **more: Any) -> PlanLoad:
    """Return the spatial plan at the end of a round."""
    reason = "a machine sheds load" if changed else "balanced"
    return PlanLoad("read", number, np.array(utilisation), changed, reason, **more)


def test_the_plan_is_balanced_before_executors_are_added() -> None:
    """One machine has nearly all of it, so a backlog grows; the same without it adds some."""
    rounds = growing(1.4, 2, routings=(routing(EVEN, SPREAD),))
    uneven = [replace(one, plan=plan(k, 0.95, 0.45)) for k, one in enumerate(rounds)]
    found = decisions(*uneven)
    assert isinstance(found[1], Balance) and not found[1].changes
    assert "deviation of the plan 0.250, a machine sheds load" in found[1].reason
    assert isinstance(decisions(*rounds)[1], Provision)


def test_balancing_the_plan_must_reduce_the_measured_deviation() -> None:
    """The third change of the plan follows one that reduced the deviation by 2 %."""
    values = [(1.0, 0.4), (1.0, 0.4), (0.9, 0.5), (0.9, 0.5), (0.896, 0.504), (0.896, 0.504)]
    found = decisions(*[group(1.4, 2, plan=plan(k, *two)) for k, two in enumerate(values)])
    kinds = [type(one).__name__ for one in found]
    assert kinds == ["NoChange", "Balance", "NoChange", "Balance", "NoChange", "NoChange"]
    assert "the last change did not reduce it" in found[-1].reason


def test_a_plan_is_measured_again_before_more_is_decided() -> None:
    """Rounds of the plan may be longer; a load that is too large is another matter."""
    same = [replace(one, plan=plan(7, 0.95, 0.45)) for one in growing(1.4, 2)]
    found = decisions(*same, same[-1], same[-1])
    assert [type(one).__name__ for one in found[1:]] == ["Balance", *["NoChange"] * 3]
    assert "is not measured yet" in found[-1].reason
    over = group(3.0, 2, plan=plan(7, 0.95, 0.45))
    assert isinstance(last(over, over, memory=Memory(plan_round=7, plan_deviation=0.25)), Provision)


def test_an_even_plan_is_no_reason_to_wait() -> None:
    even = [
        replace(one, plan=plan(k, 0.7, 0.7, changed=False)) for k, one in enumerate(growing(1.4, 2))
    ]
    assert isinstance(last(*even[:2]), Provision)


def test_a_cell_that_cannot_be_divided_is_named() -> None:
    cell = "cell (column 3, row 4) cannot be divided; its machine has 79% of the load"
    hot = [plan(k, 1.1, 0.3, changed=False, cell=cell) for k in range(3)]
    for rounds in (growing(1.4, 2), [group(1.4, 2)] * 3):
        found = last(*(replace(one, plan=hot[k]) for k, one in enumerate(rounds)))
        assert isinstance(found, NoChange) and cell in found.reason


def test_the_plan_is_judged_by_the_offered_load() -> None:
    """The stage processed half of what arrived."""
    stages = (StageLoad("read", 14_000.0, 7_000.0, 7.0),)
    slow = group(1.4, 2, stages=stages, plan=plan(0, 0.42, 0.28))
    assert "deviation of the plan 0.140" in last(slow, slow).reason
    assert "of the plan" not in last(*[replace(slow, stages=group(1.4, 2).stages)] * 2).reason


# --------------------------------------------------------------------------- limits and faults


def test_an_unreachable_size_is_reported_once() -> None:
    found = decisions(*[group(30.0, 40, k) for k in range(2)], *[group(50.0, 40)] * 8)
    cannot = [d for d in found if isinstance(d, Cannot)]
    assert len(cannot) == 1 and cannot[0].executors == 40
    assert "84 executors, of at most 40" in cannot[0].reason
    # It is reported again when it was reachable in between.
    found = decisions(*[group(load, 40) for load in (50, 50, 24, 24, 50, 50)])
    assert sum(isinstance(d, Cannot) for d in found) == 2
    # It is not reachable just because utilisation is inside the limits for a while.
    found = decisions(*[group(load, 40) for load in (37, 37, 35, 35, 37, 37)])
    assert sum(isinstance(d, Cannot) for d in found) == 1


def test_at_the_maximum_the_load_is_still_balanced() -> None:
    rules = replace(RULES, max=2)
    uneven = group(1.9, 2, routings=(routing(EVEN, UNEVEN),))
    found = decisions(uneven, uneven, uneven, rules=rules)
    assert [type(d) for d in found[1:]] == [Cannot, Balance]


def test_executors_that_do_not_arrive_are_given_up() -> None:
    late = group(9.0, 4, settled=False, executors=Executors(4, 1, 3, 60.0))
    (found,) = decisions(late)
    assert isinstance(found, Cannot) and found.executors == 3
    assert found.reason == "1 of 4 executors did not arrive in 60 s; next request in 120 s"
    soon = replace(late, executors=Executors(4, 1, 3, 59.0))
    assert isinstance(last(soon), NoChange)
    # A cluster that always takes 40 s is given three times as long.
    slow = replace(late, provision_s=40.0, executors=Executors(4, 1, 3, 119.0))
    assert isinstance(last(slow), NoChange)
    assert isinstance(last(replace(slow, executors=Executors(4, 1, 3, 120.0))), Cannot)


def test_below_the_minimum_each_attempt_lasts_longer() -> None:
    """The layout cannot have fewer executors, so the same ones are requested again at once."""
    rules, twice = replace(RULES, min=4), Memory(failures=2)
    for waited, kind in ((239.0, NoChange), (240.0, Cannot)):
        few = group(1.0, 4, settled=False, executors=Executors(4, 1, 3, waited))
        (found,) = decisions(few, rules=rules, memory=twice)
        assert type(found) is kind
        assert not isinstance(found, Cannot) or found.executors == 4


def test_attempts_are_further_and_further_apart() -> None:
    manager, memory, n, clock = Manager(RULES), Memory(), 2, 0.0
    asked: list[float] = []
    for _ in range(1_000):
        clock += ROUND_S
        waited = clock - asked[-1] if asked and n > 2 else 0.0
        have = Executors(n, n - 2, 2, waited)
        decision, memory = manager.decide(
            group(9.0, n, clock=clock, executors=have, settled=n == 2), memory
        )
        if isinstance(decision, Provision):
            asked.append(clock)
        if isinstance(decision, Provision | Cannot):
            n = decision.executors
    gaps = np.diff(asked)
    assert gaps[0] >= 120 and (gaps[1:6] > 1.6 * gaps[:5]).all() and gaps.size > 5
    # An attempt that succeeds begins anew.
    memory = replace(memory, failures=3, failed_at=2)
    _, memory = manager.decide(group(3.0, 5), memory)
    assert memory.failures == 0


def test_other_policies_determine_the_least_size() -> None:
    needs = {"synopsis": 4}
    found = last(*[group(1.2, 2, required=needs)] * 2)
    assert isinstance(found, Provision) and found.executors == 4
    assert "synopsis needs 4 executors" in found.reason
    assert isinstance(last(*[group(0.1, 4, required=needs)] * 4), NoChange)
    larger = last(*[group(6.0, 2, required=needs)] * 2)
    assert isinstance(larger, Provision) and larger.executors == 10
    rising = last(group(1.2, 2, required=needs), group(6.0, 2, required=needs))
    assert isinstance(rising, Provision) and rising.executors == 10, "one decision for both"
    fixed = ElasticRules(min=2, max=2, forecast=False)
    cannot = last(*[group(1.2, 2, required=needs)] * 2, rules=fixed)
    assert isinstance(cannot, Cannot) and cannot.executors == 2


# --------------------------------------------------------------------------- rules, arbiter, Spark


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"lower": 0.6}, "lower"),
        ({"target": 0.9}, "target"),
        ({"min": 5, "max": 4}, "min"),
        ({"min": 0}, "min"),
        ({"max": 0}, "max"),
        ({"spares": -1}, "spares"),
        ({"batch_seconds": 0.0}, "batch_seconds"),
        ({"lower": -0.1}, "lower"),
        ({"policy": "random"}, "policy"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        ElasticRules(**{"max": 4, **given})
    assert error.value.key == f"elastic.{key}" and str(given[key]) in str(error.value)


def test_spares_and_layout_never_exceed_the_maximum() -> None:
    rules = ElasticRules(max=6, spares=3)
    assert [rules.spares_beside(n) for n in range(1, 7)] == [3, 3, 3, 2, 1, 0]


class Fixed:
    """Decides what it was given."""

    def __init__(self, decision: ElasticDecision) -> None:
        self.decision = decision

    def decide(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        return self.decision, memory


def test_the_arbiter_checks_the_limits() -> None:
    rules = ElasticRules(min=2, max=4)
    shown = GroupRound(group(1.0, 3), rules)
    for decision, planned in (
        (Provision(5, 1.0, "more"), 3),
        (Release(1, 1.0, "less"), 3),
        (Rebalance((), "a plan"), 3),
        (Release(2, 1.0, "less"), 2),
        (Cannot(2, "gone"), 2),
        (NoChange("no"), 3),
    ):
        policy = ElasticPolicy(Fixed(decision), {})
        ((_, verdict, reason, _),), after = arbitrate(shown, [policy])
        assert (verdict == "accepted") == (planned != 3 or isinstance(decision, NoChange))
        assert after.planned == planned and decision.reason in reason


def test_all_that_is_remembered_survives_a_restart() -> None:
    measured = (MeasuredLoad(1.0, False, True), MeasuredLoad(2.0, True, False))
    forecast = Forecast().observed(10.0, 1.0, 60.0)
    memory = Memory(measured, {"read": 1e-3}, 7.0, "max", 3, 2, 99.0, forecast, 4, 0.3)
    blank = Memory()
    assert all(getattr(memory, name) != getattr(blank, name) for name in Memory.__slots__)
    assert Memory.from_json(json.loads(json.dumps(memory.to_json()))) == memory


@given(st.lists(st.tuples(st.floats(0, 60), st.booleans()), max_size=12), st.integers(1, 11))
@examples(100)
def test_a_restart_decides_the_same(rounds: list[tuple[float, bool]], at: int) -> None:
    rules = ElasticRules(max=40)
    runs = []
    for restarts in (False, True):
        policy, n, found = ElasticPolicy(size_policy(rules), {}), 3, []
        for number, (load, settled) in enumerate(rounds):
            shown = GroupRound(group(load, n, number, settled=settled), rules)
            ((*_, proposal),), after = arbitrate(shown, [policy])
            found.append(proposal.decision)
            n = after.planned
            if restarts and number == at:
                saved = json.loads(json.dumps(proposal.memory, allow_nan=False))
                policy = ElasticPolicy(size_policy(rules), saved)
        runs.append(found)
    assert runs[0] == runs[1]


def test_sparks_rule_doubles_while_tasks_wait_and_releases_idle_executors() -> None:
    rule, rules = SparkRule(RULES), RULES
    assert isinstance(size_policy(replace(rules, policy="spark")), SparkRule)
    for waited, size in ((0.9, None), (1.0, 2), (2.5, 4), (3.9, 8), (9.0, 27)):
        found, _ = rule.decide(group(0.1, 1, tasks=27, waiting_s=waited), Memory())
        assert (found.executors if isinstance(found, Provision) else None) == size
    memory, sizes = Memory(), []
    for clock, tasks in ((10.0, 9), (20.0, 4), (69.0, 4), (70.0, 4)):
        found, memory = rule.decide(group(0.1, 9, clock=clock, tasks=tasks), memory)
        sizes.append(found.executors if isinstance(found, Release) else None)
    assert sizes == [None, None, None, 4]  # idle for 60 s
