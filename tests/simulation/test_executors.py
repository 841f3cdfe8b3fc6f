"""Elastic policies against a simulated cluster whose queues result from load and executors."""

from __future__ import annotations

import doctest
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loads import spike

from properties import examples
from roost.dataflow.buckets import BUCKETS
from roost.dataflow.loads import HeavyKey
from roost.elastic import Balance, Cannot, ElasticRules, Provision, Release, group
from roost.elastic.ring import ring_owners
from roost.model.arrays import Floats
from roost.model.choices import ElasticPolicyName
from roost.runtime.prefix_rounds import NEEDS, Scaling, weights
from roost.sim import executors
from roost.sim.executor_scenario import ExecutorFaults, ExecutorScenario, ExecutorTrace
from roost.sim.executors import KEYED_SHARE, simulate_executors
from roost.sim.load_curves import Curve, day, hourly, ramp, step, swing
from roost.synopsis.prefix_choice import PrefixLoad
from roost.synopsis.scaling import MachineStatus, ScalingRules, SketchletSnapshot
from roost.synopsis.tree import PrefixTree

SEEDS = st.integers(0, 1 << 30)
EVEN = np.full(BUCKETS, 1.0 / BUCKETS)
# A thousand in full; fewer otherwise than other properties have, because each is a simulation.
FEW = examples(100 if settings().max_examples >= 1_000 else 40)


def scenario(load: Curve, seconds: float = 400.0, high: int = 40, **more: Any) -> ExecutorScenario:
    names = ("min", "spares", "policy", "forecast")
    rules = {name: more.pop(name) for name in names if name in more}
    return ExecutorScenario(load, ElasticRules(max=high, **rules), seconds, **more)


def run(load: Curve, seconds: float = 400.0, high: int = 40, **more: Any) -> ExecutorTrace:
    return simulate_executors(scenario(load, seconds, high, **more))


def target(load: float, low: int = 1, high: int = 40) -> int:
    return min(max(int(np.ceil(round(load / 0.6, 9))), low), high)


def directions(sizes: list[int]) -> int:
    """Count changes of direction."""
    signs = np.sign(np.diff(sizes))
    return int((signs[1:] != signs[:-1]).sum())


def zipf(exponent: float, seed: int) -> Floats:
    weights = np.arange(1, BUCKETS + 1) ** -exponent
    np.random.default_rng(seed).shuffle(weights)
    return np.asarray(weights / weights.sum())


def one_hot(share: float) -> Floats:
    weights = np.full(BUCKETS, (1.0 - share) / (BUCKETS - 1))
    weights[7] = share
    return weights


# --------------------------------------------------------------------------- the simulator


def test_doctests() -> None:
    assert doctest.testmod(executors).failed == doctest.testmod(group).failed == 0


def test_a_batch_takes_its_share_of_the_busiest_slot() -> None:
    trace = run(step(1.5, 1.5, 0.0), executors=2)
    share = np.bincount(ring_owners(2, BUCKETS), EVEN).max()
    expected = 0.1 + 3.0 * ((1.0 - KEYED_SHARE) / 2 + KEYED_SHARE * share)
    before = trace.rows[1].clock  # the balancer acts after it
    assert trace.delays[: int(before / 2.0)] == pytest.approx(expected)


@given(st.lists(st.floats(0.1, 3.0), min_size=30, max_size=60), st.integers(1, 3))
@FEW
def test_queues_follow_lindleys_recursion(loads: list[float], n: int) -> None:
    """While every batch is one interval, its delay is that of a queue with one server."""

    def curve(clock: Floats) -> Floats:
        return np.array(loads)[(clock // 2.0).astype(int)]

    fixed = ExecutorScenario(curve, ElasticRules(min=n, max=n), 2.0 * len(loads), executors=n)
    trace = simulate_executors(fixed)
    share = np.bincount(ring_owners(n, BUCKETS), EVEN).max()
    unit = (1.0 - KEYED_SHARE) / n + KEYED_SHARE * share
    free = 0.0
    for number, load in enumerate(loads[:4]):
        start = max(2.0 * (number + 1), free)
        if start >= 2.0 * (number + 2):
            break
        free = start + 0.1 + 2.0 * load * unit
        assert trace.delays[number] == pytest.approx(free - 2.0 * (number + 1))
    # All work is done, none before it has arrived.
    assert (trace.delays > 0.0).all()
    work = 2.0 * sum(loads) * unit
    assert trace.executor_s >= n * work


def test_executor_hours_are_those_of_present_executors() -> None:
    trace = run(step(1.2, 6.0, 100.0), 300.0, executors=2)
    (up,) = [row for row in trace.rows if isinstance(row.decision, Provision)]
    end = 300.0 + trace.delays[-1]
    expected = 2 * end + 8 * (end - up.clock - 3.0)
    assert trace.executor_s == pytest.approx(expected, rel=1e-9)


def test_a_seed_determines_the_trace() -> None:
    chaos = ExecutorFaults(failing=0.2, late=0.3, deaths=(50.0, 90.0))
    given = scenario(day(1.0, 9.0, 400.0), noise=0.1, faults=chaos, seed=3)
    first, again = simulate_executors(given), simulate_executors(given)
    assert first.rows == again.rows and (first.delays == again.delays).all()
    assert simulate_executors(replace(given, seed=4)).rows != first.rows


def test_load_curves() -> None:
    clock = np.array([0.0, 1_800.0, 5_400.0, 9_000.0])
    assert step(1, 2, 1_800.0)(clock).tolist() == [1, 2, 2, 2]
    assert spike(1, 5, 1_000.0, 1_000.0)(clock).tolist() == [1, 5, 1, 1]
    assert swing(1, 2, 7_200.0)(clock).tolist() == [1, 1, 2, 1]
    assert ramp([(0, 0), (3_600, 2)])(clock).tolist() == [0, 1, 2, 2]
    assert day(2.0, 6.0, 3_600.0)(clock) == pytest.approx([2.0, 6.0, 6.0, 6.0])
    loads = np.array([3.0, 5.0, 1.0])
    assert hourly(loads)(clock).tolist() == [3, 3, 5, 1]
    assert hourly(loads)(np.array([3_600.0, 7_200.0])).tolist() == [4, 3]
    assert hourly(loads, steps=True)(clock).tolist() == [3, 3, 5, 1]


# --------------------------------------------------------------------------- steady loads and steps


@given(st.floats(0.05, 20.0), st.integers(1, 40))
@FEW
def test_a_steady_load_changes_the_size_at_most_once(load: float, n: int) -> None:
    trace = run(step(load, load, 0.0), executors=n)
    assert len(trace.sizes) <= 2
    limits = load / trace.sizes[-1]
    assert limits <= 0.9 and (limits >= 0.5 or trace.sizes[-1] == target(load))


@given(st.floats(0.05, 20.0), st.integers(1, 40), st.floats(0.0, 0.1), SEEDS)
@FEW
def test_noise_does_not_make_the_size_oscillate(
    load: float, n: int, noise: float, seed: int
) -> None:
    trace = run(step(load, load, 0.0), 600.0, executors=n, noise=noise, seed=seed)
    assert len(trace.sizes) <= 3, "at most one more, if the load is about a multiple of the target"


@given(st.floats(0.1, 20.0), st.floats(0.1, 20.0), st.floats(100.0, 130.0), SEEDS)
@FEW
def test_one_decision_suffices_for_a_step(
    before: float, after: float, at: float, seed: int
) -> None:
    n = target(before)
    trace = run(step(before, after, at), 900.0, executors=n, seed=seed)
    outside = after > 0.9 * n or (after < 0.5 * n and target(after) < n)
    assert trace.sizes == ([n, target(after)] if outside else [n])
    (made,) = trace.decisions(Provision, Release) or [None]
    if made is not None:
        assert made.load == pytest.approx(after, rel=1e-6)


@given(st.floats(0.3, 0.55), st.floats(1.5, 23.0), st.floats(300.0, 3_000.0))
@FEW
def test_a_ramp_takes_at_most_two_steps_for_each_doubling(
    low: float, high: float, length_s: float
) -> None:
    up = run(ramp([(50.0, low), (50.0 + length_s, high)]), length_s + 150.0)
    sizes = up.sizes
    assert sizes == sorted(sizes)
    assert all(later >= 2 * first for first, later in zip(sizes, sizes[2:], strict=False))
    down = run(ramp([(50.0, high), (50.0 + length_s, low)]), length_s + 150.0, executors=sizes[-1])
    assert down.sizes == sorted(down.sizes, reverse=True)


@given(st.integers(1, 10), st.floats(0.51, 0.89), st.floats(0.0, 30.0), st.integers(3, 20))
@FEW
def test_a_swing_of_one_round_changes_nothing(
    n: int, usual: float, high: float, number: int
) -> None:
    usual *= n
    quiet = run(step(usual, usual, 0.0), executors=n)
    first = quiet.rows[number].clock
    begin = first + 2.0 - first % 2.0  # the first whole interval of the round
    trace = run(spike(usual, high, begin, 6.0), executors=n)
    assert trace.sizes == [n]


@given(st.floats(0.05, 6.0), st.floats(1.0, 20.0), st.floats(0.0, 0.03), SEEDS)
@FEW
def test_a_day_with_one_peak_changes_the_direction_at_most_once(
    low: float, more: float, noise: float, seed: int
) -> None:
    curve = day(low, low + more, 2_400.0)
    trace = run(curve, 2_400.0, executors=max(int(low / 0.7), 1), noise=noise, seed=seed)
    assert directions(trace.sizes) <= 1


# --------------------------------------------------------------------------- skew


@given(st.integers(2, 12), st.floats(0.55, 0.85), st.floats(0.0, 0.9), SEEDS)
@FEW
def test_a_skewed_load_adds_no_executor(n: int, usual: float, exponent: float, seed: int) -> None:
    skewed = ((0.0, EVEN), (100.0, zipf(exponent, seed)))
    load = usual * n
    trace = run(step(load, load, 0.0), 600.0, executors=n, weights=skewed, seed=seed)
    assert trace.sizes == [n] and not trace.decisions(Provision)


@given(st.integers(2, 8), st.floats(0.6, 0.85), st.floats(1.1, 5.0))
@FEW
def test_a_key_that_cannot_be_spread_adds_no_executor_and_is_named(
    n: int, usual: float, over: float
) -> None:
    """One bucket alone keeps a slot busy for longer than an interval."""
    load = usual * n
    share = min(over / (KEYED_SHARE * load), 0.95)
    keys = (HeavyKey("alice", 7, share),)
    skewed = ((0.0, EVEN), (60.0, one_hot(share)))
    trace = run(step(load, load, 0.0), 500.0, executors=n, weights=skewed, keys=keys)
    assert trace.sizes == [n]
    if share * n > 1.0:
        named = [row for row in trace.rows if "bucket 7 (key alice)" in row.decision.reason]
        assert named or not trace.decisions(Balance)


def test_balance_comes_before_provision() -> None:
    """A hot machine delays all batches; balancing ends that without an executor."""
    hot = np.where(ring_owners(4, BUCKETS) == 2, 40.0, 1.0)
    skewed = ((0.0, EVEN), (50.0, hot / hot.sum()))
    trace = run(step(3.4, 3.4, 0.0), 600.0, executors=4, weights=skewed)
    assert trace.sizes == [4] and 1 <= len(trace.decisions(Balance)) <= 2
    assert trace.late_batches < 30 and trace.delays[-100:].max() < 2.0


# --------------------------------------------------------------------------- faults and limits


@st.composite
def chaos(draw: st.DrawFn) -> ExecutorScenario:
    """Draw a load of any shape, with faults of executors, other policies, spares and restarts."""
    low, high = sorted([draw(st.floats(0.05, 30.0)), draw(st.floats(0.05, 30.0))])
    curve = draw(
        st.sampled_from(
            [
                step(low, high, 100.0),
                step(high, low, 130.0),
                ramp([(50.0, low), (200.0, high), (350.0, low)]),
                day(low, high, 500.0),
                spike(low, high, 90.0, 60.0),
                swing(low, high, draw(st.floats(10.0, 200.0))),
            ]
        )
    )
    least = draw(st.integers(1, 5))
    most = least + draw(st.integers(0, 25))
    faults = ExecutorFaults(
        failing=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        late=draw(st.sampled_from([0.0, 0.3])),
        late_factor=draw(st.sampled_from([3.0, 30.0])),
        deaths=tuple(draw(st.lists(st.floats(10.0, 480.0), max_size=4))),
        available=draw(st.none() | st.integers(least, most + 2)),
        driver_lost=tuple(draw(st.lists(st.integers(0, 40), max_size=3))),
    )
    needed, since = draw(st.integers(0, 12)), draw(st.floats(50.0, 300.0))
    until = since + draw(st.floats(20.0, 200.0))
    rules = ElasticRules(
        min=least,
        max=most,
        spares=draw(st.integers(0, 3)),
        forecast=draw(st.booleans()),
        policy=draw(st.sampled_from(["load_aware", "individual"])),
        arrival_s=20.0,
    )
    return ExecutorScenario(
        curve,
        rules,
        500.0,
        executors=draw(st.integers(least, most)),
        weights=((0.0, EVEN), (150.0, zipf(draw(st.floats(0.0, 1.2)), 1))),
        required=lambda clock, _: {"synopsis": needed} if since <= clock < until else {},
        slots=draw(st.integers(1, 3)),
        noise=draw(st.sampled_from([0.0, 0.05, 0.5])),
        faults=faults,
        seed=draw(SEEDS),
    )


def check_limits(trace: ExecutorTrace) -> None:
    rules = trace.scenario.rules
    for row in trace.rows:
        assert row.verdict == "accepted"
        assert rules.min <= row.planned <= rules.max
        assert row.present + row.requested <= rules.max
        assert row.present + row.requested == row.planned + rules.spares_beside(row.planned)


def check_order(trace: ExecutorTrace) -> None:
    """No decision before the last change was in force for two rounds; no release in a backlog."""
    since, backlog, planned = 0, 0.0, trace.scenario.executors
    for row in trace.rows:
        have = row.group.executors
        assert have.planned == planned
        since = since + 1 if row.group.settled and have.observed >= planned else 0
        if isinstance(row.decision, Provision | Release | Balance):
            assert since >= 2, row
            since = 0
        if isinstance(row.decision, Release):
            next_batch = row.group.arrived * 2.0 / row.group.seconds
            gained = max(row.group.backlog - max(backlog, next_batch), 0.0)
            assert gained <= 0.05 * row.group.arrived
            assert row.group.backlog <= row.group.rows
        planned, backlog = row.planned, row.group.backlog


def check_load(trace: ExecutorTrace) -> None:
    """The size is the load over the target, or limited, or what another policy needs."""
    s = trace.scenario
    for row in trace.rows:
        if not isinstance(row.decision, Provision | Release):
            continue
        n, load = row.group.executors.planned, row.decision.load
        needed = min(max(row.group.required.values(), default=0), s.rules.max)
        wanted = target(load, s.rules.min, s.rules.max)
        if 0.5 * n <= load <= 0.9 * n and "the backlog grows" not in row.decision.reason:
            wanted = 0  # only another policy needs executors
        if s.rules.policy is ElasticPolicyName.LOAD_AWARE:
            assert row.decision.executors == max(wanted, needed)
        if not s.rules.forecast:
            assert row.decision.load == pytest.approx(row.load)
        if isinstance(row.decision, Release):
            assert row.decision.executors >= max(row.group.required.values(), default=0)


@given(chaos())
@examples(100)
def test_limits_hold_and_every_decision_has_its_reason(given: ExecutorScenario) -> None:
    trace = simulate_executors(given)
    check_limits(trace)
    check_order(trace)
    check_load(trace)
    again = simulate_executors(replace(given, faults=replace(given.faults, driver_lost=())))
    assert [row.decision for row in again.rows] == [row.decision for row in trace.rows]


@given(st.floats(5.0, 30.0), st.integers(3, 10), SEEDS)
@FEW
def test_an_unreachable_target_is_reported_once(load: float, high: int, seed: int) -> None:
    load = max(load, 0.95 * high)
    trace = run(step(0.5, load, 60.0), 900.0, high, noise=0.02, seed=seed)
    assert trace.sizes == [1, high]
    (cannot,) = trace.decisions(Cannot)
    assert f"of at most {high}" in cannot.reason


@given(st.integers(1, 6), st.integers(4, 20), SEEDS)
@FEW
def test_a_cluster_that_is_too_small_is_asked_less_and_less_often(
    n: int, more: int, seed: int
) -> None:
    faults = ExecutorFaults(available=n)
    trace = run(step(0.6 * n, 0.6 * (n + more), 60.0), 3_000.0, executors=n, faults=faults)
    attempts = [row.clock for row in trace.rows if isinstance(row.decision, Provision)]
    assert 1 <= len(attempts) <= 6
    gaps = np.diff(attempts)
    assert (gaps >= 120.0).all() and (gaps[1:] > 1.3 * gaps[:-1]).all()
    assert max(row.present for row in trace.rows) == n
    after = [row.planned for row in trace.rows if isinstance(row.decision, Cannot)]
    assert set(after) <= {n}


def test_an_executor_that_dies_is_replaced_without_a_decision() -> None:
    trace = run(step(3.0, 3.0, 0.0), executors=5, faults=ExecutorFaults(deaths=(101.0, 201.0)))
    assert trace.sizes == [5] and trace.unplanned == 0
    assert {row.present for row in trace.rows} >= {5}
    assert trace.executor_s < 5 * 400.0


def test_an_executor_that_comes_too_late_is_released_or_used() -> None:
    faults = ExecutorFaults(late=1.0, late_factor=40.0)
    trace = run(step(0.6, 1.0, 50.0), 300.0, faults=faults)
    check_limits(trace)
    assert len(trace.decisions(Cannot)) == 1 and trace.sizes == [1, 2, 1, 2]
    assert trace.unplanned == 1, "it arrived after 120 s, and was not requested any more"


@given(st.floats(0.2, 3.0), st.integers(2, 12), st.floats(60.0, 150.0))
@FEW
def test_an_executor_for_memory_stays_while_it_is_needed(
    load: float, needed: int, since: float
) -> None:
    until = since + 200.0
    trace = run(
        step(load, load, 0.0),
        500.0,
        executors=target(load),
        required=lambda clock, _: {"synopsis": needed} if since <= clock < until else {},
    )
    larger = max(target(load), needed)
    assert all(row.planned == larger for row in trace.rows if since + 40 <= row.clock < until)
    back = larger > target(load) and load < 0.5 * larger
    assert (
        trace.sizes[:3] == [target(load), larger, target(load)][: 3 if back else len(trace.sizes)]
    )
    assert len(trace.sizes) == 1 + (larger > target(load)) + back


@dataclass
class Memory:
    """A synopsis whose machines hold more and more, and then less; its policy is the real one.

    Bytes follow the prefix tree at once. ``seen`` has the observations: the clock, the executors of
    the layout, the bytes, and whether a machine asked for others and was refused.
    """

    bytes_at: Curve
    slots: int
    machines_max: int
    rules: ScalingRules = field(default_factory=lambda: ScalingRules(memory=1.0))
    tree: PrefixTree = field(default_factory=lambda: PrefixTree(1, {"": 0}))
    scaling: Scaling | None = None
    seen: list[tuple[float, int, float, bool]] = field(default_factory=list)

    def __call__(self, clock: float, executors: int) -> dict[str, int]:
        total = float(self.bytes_at(np.array([clock]))[0])
        loads = {format(k, "06b"): PrefixLoad(1.0, total / 64) for k in range(64)}
        machines = executors * self.slots
        if self.scaling is None or self.tree.machines != machines:
            saved = {} if self.scaling is None else {NEEDS: self.scaling.memory[NEEDS]}
            self.tree = self.tree.resized(machines, weights(loads))
            self.scaling = Scaling(self.rules, machines, saved)
        refused = False
        for _ in range(5):  # batches of a round
            held = Counter[int]()
            for prefix, load in loads.items():
                held[self.tree.owner(prefix)] += load.nbytes
            status = [MachineStatus(0.0, held[m], 1e6) for m in range(machines)]
            seen = SketchletSnapshot(self.tree, status, loads, machines_max=self.machines_max)
            verdicts, decided = self.scaling.observe(seen)
            self.tree = decided.tree
            refused |= any("cannot add machines" in one.reason for one in verdicts)
        self.seen.append((clock, executors, total, refused))
        needed = self.scaling.needs.machines
        return {"synopsis": -(-needed // self.slots)} if needed else {}


@given(st.floats(0.05, 3.0), st.floats(0.1, 6.0), st.integers(1, 2), st.integers(3, 16), SEEDS)
@example(load=3.0, most=2.0, slots=1, high=3, seed=0)
@examples(100 if settings().max_examples >= 1_000 else 15)  # each has 450 batches of a synopsis
def test_a_synopsis_gets_executors_and_retains_them(
    load: float, most: float, slots: int, high: int, seed: int
) -> None:
    """Its proposals lead to executors, which stay until it needs less memory."""
    curve = ramp([(50.0, 0.05), (300.0, most), (500.0, most), (520.0, 0.05)])
    memory = Memory(curve, slots, high * slots)
    trace = run(
        step(load, load, 0.0), 900.0, high, executors=target(load, 1, high), slots=slots,
        required=memory, seed=seed, forecast=False,
    )  # fmt: skip
    check_limits(trace)
    check_load(trace)
    upper = memory.rules.memory_upper
    held = {clock: total for clock, _, total, _ in memory.seen}
    for row in trace.rows:
        if isinstance(row.decision, Release):
            room = row.planned * slots * upper
            assert held[row.clock] <= room, "executors with memory in use were released"
    (_, full, total, refused) = next(one for one in memory.seen if one[0] >= 480.0)
    enough = -(-total // (upper * slots))
    if enough <= 0.7 * high:  # prefixes cannot be divided evenly
        assert full >= max(enough, target(load, 1, high)) and not refused
    elif enough > high:
        assert full == high and any(one[3] for one in memory.seen)
        (cannot,) = trace.decisions(Cannot)
        assert f"of at most {high}" in cannot.reason
        # A load that is too large by itself was reported before.
        assert ("synopsis needs" in cannot.reason) == (load <= 0.9 * high)
    # When it has taken its prefixes back, the load alone decides again.
    last = trace.rows[-1]
    assert last.planned == trace.scenario.executors or load >= 0.5 * last.planned


def test_executors_near_the_end_of_their_hour_leave_first() -> None:
    """With started hours, releases waste less of what is paid."""
    curve = ramp([(0.0, 1.0), (3_000.0, 12.0), (6_000.0, 6.0), (9_000.0, 12.0), (14_000.0, 1.0)])
    given = scenario(curve, 15_000.0, executors=2)
    newest, ending = (
        simulate_executors(replace(given, rules=replace(given.rules, by_started_hour=by_hour)))
        for by_hour in (False, True)
    )
    assert [row.planned for row in newest.rows] == [row.planned for row in ending.rows]
    assert newest.executor_s == pytest.approx(ending.executor_s)
    assert ending.executor_hours <= ending.started_hours < newest.started_hours


def test_started_hours_are_those_that_executors_began() -> None:
    trace = run(step(1.2, 6.0, 100.0), 3_700.0, executors=2)
    assert trace.sizes == [2, 10]
    assert trace.started_hours == 2 * 2 + 8 * 1
    assert run(step(1.2, 1.2, 0.0), 3_500.0, executors=2).started_hours == 2


def test_a_spare_shortens_the_wait() -> None:
    slow = {"executors": 2, "provision_s": 40.0}
    cold = run(step(1.2, 1.9, 100.0), 300.0, **slow)
    warm = run(step(1.2, 1.9, 100.0), 300.0, spares=2, **slow)
    assert cold.sizes == warm.sizes == [2, 4]
    assert warm.delays[50:].max() < cold.delays[50:].max()
    assert warm.executor_hours > cold.executor_hours
    assert max(row.present for row in warm.rows) == 6


def test_policies_without_a_pace_cannot_size() -> None:
    trace = run(step(3.0, 3.0, 0.0), executors=2, paced=False)
    assert trace.sizes == [2] and len(trace.decisions(Cannot)) == 1


def test_sparks_rule_ignores_utilisation() -> None:
    """It never releases while there are as many tasks as slots."""
    curve = ramp([(100.0, 1.0), (300.0, 14.0), (600.0, 1.0)])
    trace = run(curve, 900.0, high=27, executors=1, policy="spark", tasks=27)
    assert trace.sizes[-1] > 14 and directions(trace.sizes) == 0
    mine = run(curve, 900.0, high=27, executors=2)
    assert mine.executor_hours < 0.7 * trace.executor_hours and mine.sizes[-1] <= 4


def test_individual_provisioning_lags_behind_a_ramp() -> None:
    curve = ramp([(0.0, 0.5), (200.0, 20.0)])
    mine, single = run(curve, 300.0), run(curve, 300.0, policy="individual")
    assert len(single.sizes) > 2 * len(mine.sizes) or single.sizes[-1] < mine.sizes[-1]
    assert single.late_batches > mine.late_batches
