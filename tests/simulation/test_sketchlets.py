"""Prefix trees under simulated loads: limits, stability, and each rule alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.sim.load_curves import Curve, day, step
from roost.sim.sketchlets import SketchletScenario, SketchletTrace, simulate_sketchlets
from roost.synopsis.scaling import ScaleIn, ScaleOut, ScalingRules
from roost.synopsis.tree import PrefixTree

CELLS = tuple(format(cell, "04b") for cell in range(16))
NO_LIMIT = 1e18


def shared(curve: Curve, weights: np.ndarray) -> dict[str, Curve]:
    """Divide a load among the cells."""
    shares = (weights / weights.sum()).tolist()
    return {
        cell: lambda clock, share=share: share * curve(clock)
        for cell, share in zip(CELLS, shares, strict=True)
    }


def owners(tree: PrefixTree) -> np.ndarray:
    return np.array([tree.owner(cell) for cell in CELLS])


def check_operations(trace: SketchletTrace) -> None:
    """Check that no machine is part of two operations within the time that one takes."""
    s = trace.scenario
    wait = max(s.rules.stabilisation, s.move_batches)
    last = np.full(s.tree.machines, -1_000)
    before = owners(s.tree)
    for number, row in enumerate(trace.rows):
        after = owners(row.tree)
        moved = after != before
        involved = set(before[moved].tolist()) | set(after[moved].tolist())
        assert all(number - last[machine] > wait for machine in involved)
        last[list(involved)] = number
        before = after


def random_scenario(seed: int) -> SketchletScenario:
    """Return a scenario of a steady load that fits the machines, with some room.

    All begin with one machine, as in the paper, or with any tree.
    """
    rng = np.random.default_rng(seed)
    machines = int(rng.integers(2, 6))
    weights = rng.gamma(2.0, size=16).clip(0.3, 4.0)
    # Each cell is at most a fifth of what a machine may have, so a machine is never stuck.
    total = min(1_000.0 * 0.8 * machines * 0.7, 160.0 * weights.sum() / weights.max())
    rows_max = min(0.7 * machines * 3.5e4 / 16.0, 0.2 * 3.5e4) / 10.0  # within 60 batches
    tree = PrefixTree(machines, {"": 0})
    if rng.integers(2):
        for cell in CELLS:
            tree = tree.moved(cell, int(rng.integers(machines)))
    return SketchletScenario(
        tree=tree,
        rates=shared(step(total, total, 0.0), weights),
        rules=ScalingRules(
            memory=1e5,
            observations=int(rng.integers(1, 5)),
            stabilisation=int(rng.integers(1, 5)),
        ),
        batches=260,
        row_bytes=10.0 * int(rng.integers(2)),
        rows_max=rows_max,
        move_batches=int(rng.integers(1, 5)),
        noise=0.01,
        seed=seed,
    )


@examples(20)
@given(st.integers(0, 2**32))
def test_a_steady_load_comes_to_rest_within_the_limits(seed: int) -> None:
    s = random_scenario(seed)
    trace = simulate_sketchlets(s)
    check_operations(trace)
    assert not [row for row in trace.rows[180:] if row.accepted], "no oscillation"
    for machine, status in enumerate(trace.rows[-1].seen.machines):
        assert status.backlog <= s.rules.backlog_upper
        assert status.nbytes <= s.rules.memory_upper * s.rules.memory
        assert trace.rows[-1].seen.load(machine).nbytes == pytest.approx(status.nbytes)
    assert None not in trace.batches_to_stable


@examples(10)
@given(st.integers(0, 2**32))
def test_a_restart_changes_nothing(seed: int) -> None:
    s = replace(random_scenario(seed), batches=60)
    restarted = simulate_sketchlets(replace(s, restarts=frozenset(range(3, 60, 4))))
    assert [row.tree for row in restarted.rows] == [row.tree for row in simulate_sketchlets(s).rows]


def test_scale_out_by_backlog_alone() -> None:
    """Figure 8a: the load doubles; the machine passes prefixes on, and the backlog drains."""
    rules = ScalingRules(memory=NO_LIMIT)
    rates = shared(step(700.0, 1_400.0, 30.0), np.ones(16))
    tree = PrefixTree(4, {"": 0})
    s = SketchletScenario(tree=tree, rates=rates, rules=rules, batches=120)
    trace = simulate_sketchlets(s)
    (first, *others) = trace.decisions(ScaleOut)
    assert isinstance(first, ScaleOut) and first.reason.startswith("backlog")
    assert sum(m.load.rate for m in first.moves) >= 600.0
    assert not others, "one operation removes the whole excess"
    backlogs = [row.seen.machines[0].backlog for row in trace.rows]
    assert max(backlogs) > rules.backlog_upper > backlogs[-1] == 0.0
    (batches,) = trace.batches_to_stable
    assert batches is not None and batches <= 15


def test_scale_out_by_memory_alone() -> None:
    """Figure 8b: bytes grow with the rows; operations follow each other, with pauses between."""
    rules = ScalingRules(memory=1e5, backlog_upper=NO_LIMIT, backlog_lower=0.0)
    rates = shared(step(500.0, 500.0, 0.0), np.arange(1.0, 17.0))
    tree = PrefixTree(4, {"": 0})
    s = SketchletScenario(tree=tree, rates=rates, rules=rules, batches=240, row_bytes=1.0)
    trace = simulate_sketchlets(s)
    outs = trace.decisions(ScaleOut)
    assert len(outs) > 1 and all("memory" in one.reason for one in outs)
    held = [[m.nbytes for m in row.seen.machines] for row in trace.rows]
    # What arrives until a move ends is the only excess.
    slack = 500.0 * (rules.observations + rules.stabilisation + s.move_batches + 2)
    assert np.max(held) <= 0.45e5 + slack
    assert None not in trace.batches_to_stable
    check_operations(trace)


def test_machines_in_use_follow_a_varying_rate() -> None:
    """Figure 9: the peak exceeds one machine; machines leave one subtree at a time."""
    rules = ScalingRules(memory=NO_LIMIT)
    rates = shared(day(200.0, 2_400.0, 400.0), np.ones(16))
    tree = PrefixTree(6, {"": 0})
    s = SketchletScenario(tree=tree, rates=rates, rules=rules, batches=800)
    trace = simulate_sketchlets(s)
    used = [row.machines for row in trace.rows]
    assert used[0] == 1 and max(used) >= 3 and min(used[380:]) == 1 and max(used[400:]) >= 3
    assert trace.decisions(ScaleIn)
    check_operations(trace)
    for row in trace.rows:
        backs = [one for one in row.accepted if isinstance(one, ScaleIn)]
        assert len({one.machine for one in backs}) == len(backs)
    behind = max(m.backlog for row in trace.rows for m in row.seen.machines)
    assert behind < 10.0
    assert None not in trace.batches_to_stable


def test_without_room_the_tree_stays() -> None:
    rules = ScalingRules(memory=NO_LIMIT)
    rates = shared(step(3_000.0, 3_000.0, 0.0), np.ones(16))
    tree = PrefixTree(2, {"": 0, "1": 1})
    s = SketchletScenario(tree=tree, rates=rates, rules=rules, batches=40)
    trace = simulate_sketchlets(s)
    assert not trace.decisions(ScaleOut, ScaleIn)
    reasons = [v.reason for row in trace.rows for v in row.verdicts if v.verdict == "refused"]
    assert reasons and all("cannot add machines" in reason for reason in reasons)
    assert len(reasons) < 2 * 40 / rules.observations + 1, "proposed again after a while only"
