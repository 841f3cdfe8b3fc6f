"""``roost bench reconfigure``: its loads, its checks and its metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roost.bench import flow_balance
from roost.bench.flow_balance import (
    KEYS,
    MACHINES,
    OFF,
    PLANNER,
    BalancedFlow,
    BalanceRound,
    CallerFlow,
    PolicyRun,
    compared,
    hot_key,
    limits,
    periods,
    run_policy,
    settled_from,
)
from roost.bench.flow_moves import run_move
from roost.model.arrays import Ints
from roost.runtime.executor import InProcessExecutor


def test_the_periods_are_those_of_figure_20() -> None:
    load = {period.name: period.weights for period in periods()}
    assert len(load) == 9 and all(abs(w.sum() - 1.0) < 1e-9 for w in load.values())
    assert load["mean 2000"].argmax() == 2000 and load["deviation 25"].argmax() == 5000
    near = load["deviation 25"][4950:5051].sum()
    assert near == pytest.approx(0.957, abs=0.003)  # two deviations
    assert limits(hot_key())["heaviest_bucket"] > 4.5  # 0.3 of 15 shares


def test_rounds_until_the_last_move_are_transient() -> None:
    def run(deviations: list[float], moved: dict[int, int]) -> PolicyRun:
        rounds = [
            BalanceRound(periods()[1].name, np.array([0.5 - d, 0.5 + d]), moved.get(k, 0), 0.0)
            for k, d in enumerate(deviations)
        ]
        return PolicyRun(rounds, {}, 0, 0)

    off, mine = run([0.4] * 5, {}), run([0.4, 0.2, 0.05, 0.1, 0.15], {0: 3, 1: 1})
    assert settled_from(mine.rounds) == 2
    row = compared(periods()[1], PLANNER, mine, off)
    assert row["ratio"] == pytest.approx(0.25) and row["transient_deviation"] == pytest.approx(0.3)
    assert (row["changes"], row["moved_buckets"], row["transient_rounds"]) == (2, 4, 2)
    hot = [*mine.rounds[:2], replace(mine.rounds[2], other_keys=True), *mine.rounds[3:]]
    assert settled_from(hot) == 3


def test_the_planner_balances_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    load = [period for period in periods() if period.name in ("mean 2000", "deviation 25")]
    runs = {policy: run_policy(policy, load, 3, 30_000) for policy in (OFF, PLANNER)}
    for found in runs.values():
        assert (found.lost, found.doubled) == (0, 0)
    for period in load:
        row = compared(period, PLANNER, runs[PLANNER], runs[OFF])
        assert row["ratio"] < 0.4 and row["moved_buckets"] > 0
        assert row["mean_utilisation"] == pytest.approx(flow_balance.UTILISATION)
    assert runs[PLANNER].rounds[0].utilisation.size == MACHINES

    # A result that is missing, and one that appears twice, are found.
    results = BalancedFlow.results

    def wrong(flow: BalancedFlow) -> tuple[Ints, Ints]:
        keys, calls = results(flow)
        return np.append(keys[1:], keys[5]), np.append(calls[1:], calls[5])

    monkeypatch.setattr(BalancedFlow, "results", wrong)
    found = run_policy(OFF, load[:1], 1, 2_000)
    assert (found.lost, found.doubled) == (1, 1) and KEYS > 2_000


def test_a_machine_joins_by_both_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {name: run_move(1, 3, name, 300) for name in ("state", "window", "chosen")}
    for name, found in runs.items():
        assert (found.lost, found.doubled) == (0, 0)
        assert name in ("chosen", found.row["used"])
        assert found.row["windows_moved"] > KEYS and found.cost > found.row["seconds"]
    # The new machine reads all state at once, or the old one completes windows for their size.
    assert (runs["state"].row["seconds"], runs["window"].row["seconds"]) == (1.0, 3.0)
    assert runs["chosen"].row["used"] == "state" and runs["chosen"].row["seconds"] == 1.0

    real = run_move(1, 1, "window", 300, InProcessExecutor())  # times by the clock
    assert real.row["machines"] == "real cores" and real.row["batch_median_s"] > 0

    results = CallerFlow.results

    def wrong(flow: CallerFlow) -> tuple[Ints, Ints]:
        keys, calls = results(flow)
        return np.append(keys[1:], keys[5]), np.append(calls[1:], calls[5])

    monkeypatch.setattr(CallerFlow, "results", wrong)
    found = run_move(1, 1, "state", 50)
    assert (found.lost, found.doubled) == (1, 1)
