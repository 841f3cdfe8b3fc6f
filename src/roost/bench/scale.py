"""``roost bench scale``: balance, decision time and messages from 22 to 10,000 machines.

The cluster is simulated (``sim/cluster.py``), the policies are the real ones. The load is
concentrated around towns of very different sizes; after some rounds a hotspot receives two fifths
of all points and stays. Points and queries grow with the machines. The decision time is the
coordinator's, by the clock; for ``swarm`` it includes the search on the machine that sheds load.
Bytes are those that machines and coordinator send each other in a round, with plan changes to every
machine.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from roost.bench.common import Measured, Plot, Row
from roost.sim.cluster import simulate
from roost.sim.scenario import Scenario, Trace
from roost.sim.workloads import CellHotspot, LoadSpec

DEFAULT = "global"
STRATEGIES = ("history", "swarm", DEFAULT)
MACHINES = (22, 100, 1_000, 10_000)
SIDE = 1_000
WARM_MACHINES, WARM_SIDE = (22, 400), 40
ROUNDS = 30
HOTSPOT_ROUND = 10
LAST_ROUNDS = 5
POINTS_PER_MACHINE = 50_000
QUERIES_PER_MACHINE = 100
SEED = 7


def scenario(machines: int, strategy: str, side: int) -> Scenario:
    """Return the scenario of a number of machines."""
    queries = QUERIES_PER_MACHINE * machines
    spot = CellHotspot((0.15, 0.15), HOTSPOT_ROUND, ROUNDS, share=0.4, queries=queries // 5)
    load = LoadSpec(
        points_per_round=POINTS_PER_MACHINE * machines,
        queries=queries,
        towns=200,
        churn=queries // 200,
        hotspots=(spot,),
    )
    return Scenario(
        strategy=strategy,
        machines=machines,
        columns=side,
        rows=side,
        rounds=ROUNDS,
        seed=SEED,
        load=load,
    )


def run(quick: bool) -> Measured:
    """Measure all strategies on clusters of increasing size."""
    # Compile all loops before measuring: with few cells for many machines the planner shares cells
    # and lays out the plan again, and so needs all of them.
    for machines, strategy in product(WARM_MACHINES, STRATEGIES):
        simulate(scenario(machines, strategy, WARM_SIDE))
    rows: list[Row] = []
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for machines in MACHINES[:-1] if quick else MACHINES:
        lines = panels[f"{machines} machines"] = {}
        for strategy in STRATEGIES:
            trace = simulate(scenario(machines, strategy, SIDE), clock=time.perf_counter)
            rows.append(_row(trace))
            lines[strategy] = [(row.round, row.imbalance) for row in trace.rows]
    own = [row for row in rows if row["strategy"] == DEFAULT][-1]
    summary = {key: own[key] for key in ("imbalance", "decision_s", "bytes_per_round")}
    plot = Plot("busiest machine over the mean, by round", panels, columns=2, log=True)
    return Measured(rows, summary, {"": plot})


def _row(trace: Trace) -> Row:
    imbalance, decision_s = trace.column("imbalance"), trace.column("decision_s")
    changed = trace.column("changes") > 0
    return {
        "machines": trace.scenario.machines,
        "strategy": trace.scenario.strategy,
        "grid": f"{trace.scenario.columns}x{trace.scenario.rows}",
        "imbalance": float(imbalance[-LAST_ROUNDS:].mean()),
        "imbalance_before_hotspot": float(
            imbalance[HOTSPOT_ROUND - LAST_ROUNDS : HOTSPOT_ROUND].mean()
        ),
        "imbalance_worst": float(imbalance[HOTSPOT_ROUND:].max()),
        "rounds_to_recover": trace.rounds_to_recover(HOTSPOT_ROUND),
        "decision_s": float(decision_s.max()),
        "decision_s_median": float(np.median(decision_s[changed])) if changed.any() else 0.0,
        "bytes_per_round": float(trace.column("message_bytes").mean()),
        "bytes_quiet_round": float(np.median(trace.column("message_bytes"))),
        "plan_changes": trace.plan_changes,
        "partitions": trace.rows[-1].partitions,
        "moved_queries": int(trace.column("moved_queries").sum()),
        "units_per_s": float(trace.column("units_per_s")[HOTSPOT_ROUND:].mean()),
        "imbalance_by_round": [round(value, 4) for value in imbalance.tolist()],
    }
