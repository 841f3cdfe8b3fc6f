"""``roost bench elastic``: elastic policies on simulated executors.

Provisioning (figure 21 of StreamCloud): the load rises from one executor to 27 and falls again, and
rises twelvefold at once, under the load-aware policy, one executor at a time, and Spark's rule.

A season: pickups in New York by hour, 13 weeks, scaled so that the busiest hour needs 40 executors.
Executor hours are compared with clusters that are sized by the hour from what is known afterwards:
for the peak of all, for each day's peak, and for each hour. All are sized for the same utilisation.

Consistent hashing: the share of buckets that move when a tenth node joins nine.

Queues result from the load and the executors that are there (``sim/executors.py``), with costs of
operators as measured on Spark.

Real executors (:mod:`roost.bench.elastic_cluster`), not with ``--quick``: what elasticity costs,
and how long an executor takes to arrive and to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.balance.changes import NoChange
from roost.bench.cases import POINTS_FILE, data_dir
from roost.bench.common import Line, Measured, Plot, Row
from roost.bench.elastic_cluster import run_cluster
from roost.dataflow.buckets import BUCKETS
from roost.elastic import (
    ElasticDecision,
    ElasticRules,
    GroupSnapshot,
    Memory,
    Provision,
    Release,
    Ring,
)
from roost.elastic.group import HOUR_S
from roost.elastic.ring import bucket_hashes
from roost.errors import SourceError
from roost.model.arrays import Floats, Ints, as_numpy
from roost.model.choices import ElasticPolicyName
from roost.model.columns import one_array
from roost.sim.executor_scenario import ExecutorRow, ExecutorScenario, ExecutorTrace
from roost.sim.executors import simulate_executors
from roost.sim.load_curves import hourly, ramp, step

TARGETS = {
    "steps_to_target": 1,
    "steps_per_doubling": 2,
    "executor_hours_saved": 0.30,
    "hours_over_clairvoyant": 1.25,
    "late_batches": 0,
    "ring_moved": 0.12,
}
CLUSTER_TARGETS = {
    "elastic_overhead": 0.02,
    "first_task_s": 6.0,
    "first_task_spare_s": 1.0,
    "lost": 0,
    "doubled": 0,
}
# Figure 21: the speed at which the paper's cluster grew from 11 instances to 17, and its sizes.
COMPARED = (
    ElasticPolicyName.LOAD_AWARE,
    ElasticPolicyName.INDIVIDUAL,
    ElasticPolicyName.SPARK,
)
SIZE = 27
PAPER_SIZES = [1, 2, 4, 7, 11, 17, 26]
RAMP_PER_S = 0.009
PLATEAU_S = 300.0
STEP = (1.2, 14.4)
STEP_S = (100.0, 500.0)
# The season.
PEAK = 40
WEEKS, WEEKS_QUICK = 13, 2
HOURS_OF_DAY = 24
PROVISION_S, SLOW_S = 6.0, 600.0  # the second as for a virtual machine
BATCH_S, ROUND_S = 10.0, 60.0
# Consistent hashing.
NODES, RINGS = 9, 100


def run(quick: bool) -> Measured:
    """Measure all parts; those that need a cluster only in full."""
    hours = pickups_by_hour(WEEKS_QUICK if quick else WEEKS)
    ramps, ramp_lines = provisioning()
    steps, step_lines = twelvefold()
    season, season_lines = season_rows(hours)
    ring, modulo = ring_moved()
    found, real = ([], {}) if quick else run_cluster()
    rows = [*ramps, *steps, *season, ring, modulo, *found]
    own, mine = ramps[0], season[0]
    summary: Row = {
        "steps_to_target": steps[0]["steps"],
        "steps_per_doubling": own["steps_per_doubling"],
        "ramp_sizes": own["sizes_up"],
        "executor_hours_saved": mine["saved"],
        "hours_over_clairvoyant": mine["over_clairvoyant"],
        "late_batches": mine["late_batches"],
        "ring_moved": ring["moved"],
        **real,
        "not_measured": [name for name in CLUSTER_TARGETS if name not in real],
    }
    plots = {
        "": Plot("Executors, by seconds", {"ramp": ramp_lines, "step": step_lines}, columns=2),
        "-season": Plot("Executors, by hour of the busiest week", {"": season_lines}),
    }
    table = {
        "part": ("part", ""),
        "case": ("case", ""),
        "steps": ("steps", ""),
        "executor hours": ("executor_hours", ",.1f"),
        "utilisation": ("utilisation", ".2f"),
        "saved": ("saved", ".3f"),
        "late": ("late_batches", ""),
        "p95 delay, s": ("p95_delay_s", ".1f"),
        "moved": ("moved", ".3f"),
        "overhead": ("overhead", ".3f"),
        "first task, s": ("first_task_s", ".1f"),
    }
    return Measured(rows, summary, plots, table, more={"targets": {**TARGETS, **CLUSTER_TARGETS}})


# --------------------------------------------------------------------------- provisioning


def provisioning() -> tuple[list[Row], dict[str, Line]]:
    """Run the ramp under each policy."""
    top = 0.9 * SIZE
    rise_s = (top - 0.5) / RAMP_PER_S
    points = [(0.0, 0.5), (rise_s, top), (rise_s + PLATEAU_S, top), (2 * rise_s + PLATEAU_S, 0.5)]
    seconds = points[-1][0] + PLATEAU_S
    scenario = ExecutorScenario(ramp(points), ElasticRules(max=SIZE), seconds)
    rows: list[Row] = []
    lines: dict[str, Line] = {"load": points}
    for policy, trace in by_policy(scenario):
        sizes = trace.sizes
        up = sizes[: sizes.index(max(sizes)) + 1]
        rows.append(
            {
                "part": "ramp",
                "case": policy,
                "sizes_up": up,
                "paper_sizes": PAPER_SIZES if policy == "load_aware" else None,
                "sizes_down": sizes[len(up) :],
                "steps_per_doubling": steps_per_doubling(up),
                **metrics(trace),
            }
        )
        lines[policy] = planned(trace)
    return rows, lines


def twelvefold() -> tuple[list[Row], dict[str, Line]]:
    """Multiply the load by twelve under each policy."""
    before, after = STEP
    at, seconds = STEP_S
    rules = ElasticRules(max=SIZE)
    goal = int(np.ceil(round(after / rules.target, 9)))
    start = int(np.ceil(round(before / rules.target, 9)))
    scenario = ExecutorScenario(step(before, after, at), rules, seconds, executors=start)
    rows: list[Row] = []
    lines: dict[str, Line] = {"load": [(0, before), (at, before), (at, after), (seconds, after)]}
    for policy, trace in by_policy(scenario):
        later = [row for row in trace.rows if row.clock > at]
        changes = [row for row in later if isinstance(row.decision, Provision | Release)]
        reached = [k for k, row in enumerate(changes, start=1) if row.planned >= goal]
        rows.append(
            {
                "part": "step",
                "case": policy,
                "sizes": trace.sizes,
                "target": goal,
                **metrics(trace),
                "steps": reached[0] if reached else None,  # None: not reached
                "seconds_to_target": changes[reached[0] - 1].clock - at if reached else None,
            }
        )
        lines[policy] = planned(trace)
    return rows, lines


def by_policy(scenario: ExecutorScenario) -> list[tuple[str, ExecutorTrace]]:
    """Run a scenario under each policy; with Spark's, a batch has as many tasks as ever slots."""
    found = []
    for policy in COMPARED:
        tasks = scenario.rules.max if policy is ElasticPolicyName.SPARK else None
        rules = replace(scenario.rules, policy=policy)
        found.append((str(policy), simulate_executors(replace(scenario, rules=rules, tasks=tasks))))
    return found


def steps_per_doubling(sizes: Sequence[int]) -> int:
    """Return the most steps that lead from any size to at least twice as many executors."""
    most = 0
    for k, size in enumerate(sizes):
        more = [place for place, later in enumerate(sizes) if place > k and later >= 2 * size]
        most = max(most, more[0] - k if more else 0)
    return most


def metrics(trace: ExecutorTrace) -> Row:
    """Return the metrics that all traces have."""
    s = trace.scenario
    work_s = sum(row.load * row.group.seconds for row in trace.rows)
    present_s = sum(row.group.executors.observed * row.group.seconds for row in trace.rows)
    return {
        "steps": len(trace.sizes) - 1,
        "executor_hours": trace.executor_hours,
        "started_hours": trace.started_hours,
        "utilisation": work_s / present_s,
        "late_batches": trace.late_batches,
        "p95_delay_s": float(np.percentile(trace.delays, 95)),
        "delay_max_s": float(trace.delays.max()),
        "batch_s": s.batch_s,
        "round_s": s.round_s,
        "provision_s": s.provision_s,
    }


def planned(trace: ExecutorTrace) -> Line:
    """Return the planned executors over time, as steps."""
    found = [(0.0, float(trace.scenario.executors))]
    for row in trace.rows:
        found += [(row.clock, found[-1][1]), (row.clock, float(row.planned))]
    return found


# --------------------------------------------------------------------------- a season


def pickups_by_hour(weeks: int) -> Floats:
    """Count the pickups of each hour from the first one on, in whole weeks."""
    folder = data_dir()
    if folder is None or not (folder / POINTS_FILE).is_file():
        raise SourceError(f"roost bench elastic reads {POINTS_FILE}: set ROOST_DATA to its folder")
    column = one_array(pq.read_table(folder / POINTS_FILE, columns=["event_time"])["event_time"])
    hours = as_numpy(column.cast(pa.int64())) // 3_600_000_000
    hours -= hours[0]  # local midnight
    counts = np.bincount(hours).astype(np.float64)
    return counts[: weeks * 7 * HOURS_OF_DAY]


@dataclass(frozen=True)
class Schedule:
    """A policy that follows a given size for each hour, and knows it in advance."""

    sizes: Ints
    lead_s: float

    def decide(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        """Give the layout the larger of the present size and that of the end of the lead."""
        clocks = np.array([group.clock, group.clock + self.lead_s])
        places = np.minimum((clocks // HOUR_S).astype(np.int64), self.sizes.size - 1)
        size, n = int(self.sizes[places].max()), group.executors.planned
        if size == n:
            return NoChange("as planned"), memory
        kind: Callable[[int, float, str], ElasticDecision] = Provision if size > n else Release
        return kind(size, 0.0, "as planned"), memory


def season_rows(counts: Floats) -> tuple[list[Row], dict[str, Line]]:
    """Compare the manager, its settings, and clusters that know the load, over the season."""
    rules = ElasticRules(max=PEAK)
    loads = counts * (PEAK * rules.target / counts.max())
    ideal = np.maximum(np.ceil(np.round(loads / rules.target, 9)), rules.min).astype(np.int64)
    days = np.repeat(ideal.reshape(-1, HOURS_OF_DAY).max(axis=1), HOURS_OF_DAY)
    scenario = ExecutorScenario(
        hourly(loads),
        rules,
        counts.size * HOUR_S,
        executors=int(ideal[0]),
        batch_s=BATCH_S,
        round_s=ROUND_S,
        provision_s=PROVISION_S,
    )
    slow = replace(scenario, provision_s=SLOW_S)
    steps = replace(scenario, load=hourly(loads, steps=True))
    unforeseen = replace(rules, forecast=False)
    single = replace(rules, policy=ElasticPolicyName.INDIVIDUAL)
    cases: dict[str, ExecutorScenario] = {
        "default": scenario,
        "without forecast": replace(scenario, rules=unforeseen),
        "slow provisioning": slow,
        "slow provisioning, without forecast": replace(slow, rules=unforeseen),
        "load in hourly steps": steps,
        "load in hourly steps, without forecast": replace(steps, rules=unforeseen),
        "individual": replace(scenario, rules=single),
        "billed by the started hour": replace(scenario, rules=replace(rules, by_started_hour=True)),
    }
    known = {
        "clairvoyant": ideal,
        "each day's peak": days,
        "overall peak": np.full(ideal.size, ideal.max()),
    }
    traces = {name: simulate_executors(case) for name, case in cases.items()}
    for name, sizes in known.items():
        schedule = Schedule(sizes, ROUND_S + 2 * PROVISION_S)
        start = replace(scenario, executors=int(sizes[0]))
        traces[name] = simulate_executors(start, schedule)
    rows: list[Row] = []
    for name, trace in traces.items():
        # Known sizes are provisioned without delay, which favours them in the comparison.
        hours = float(known[name].sum()) if name in known else trace.executor_hours
        rows.append(
            {
                "part": "season",
                "case": name,
                **metrics(trace),
                "executor_hours": hours,
                "saved": 1.0 - hours / float(days.sum()),
                "saved_of_overall_peak": 1.0 - hours / float(ideal.max() * ideal.size),
                "over_clairvoyant": hours / float(ideal.sum()),
                "rounds_by_forecast": np.mean([by_forecast(row) for row in trace.rows]).item(),
            }
        )
    return rows, week_lines(loads, traces["default"], ideal, days)


def by_forecast(row: ExecutorRow) -> bool:
    """Return whether the forecast was larger than the load, and used."""
    return row.decision.reason.startswith("forecast")


def week_lines(loads: Floats, trace: ExecutorTrace, ideal: Ints, days: Ints) -> dict[str, Line]:
    """Return the week with the busiest hour."""
    week = 7 * HOURS_OF_DAY
    first = int(loads.argmax()) // week * week
    hours = range(first, min(first + week, loads.size))
    mine = [(clock / HOUR_S - first, size) for clock, size in planned(trace)]
    return {
        "load": [(k - first + 0.5, float(loads[k])) for k in hours],
        "elastic": [(hour, size) for hour, size in mine if 0.0 <= hour <= week],
        "clairvoyant": [(k - first + side, float(ideal[k])) for k in hours for side in (0, 1)],
        "each day's peak": [(k - first + side, float(days[k])) for k in hours for side in (0, 1)],
    }


# --------------------------------------------------------------------------- consistent hashing


def ring_moved() -> tuple[Row, Row]:
    """Return the mean share of buckets that move when a node joins, on a ring and by modulo."""
    hashes = bucket_hashes(BUCKETS)
    moved, deviations = [], []
    for seed in range(RINGS):
        names = [f"{seed} {node}" for node in range(NODES + 1)]
        before, after = (owner_names(names[:count], hashes) for count in (NODES, NODES + 1))
        moved.append(float((before != after).mean()))
        counts = np.unique(before, return_counts=True)[1]
        deviations.append(float(counts.std() / counts.mean()))
    modulo = [hashes % np.uint64(count) for count in (NODES, NODES + 1)]
    part: Row = {"part": "hashing", "nodes": NODES, "buckets": BUCKETS}
    return (
        {
            **part,
            "case": "ring",
            "moved": float(np.mean(moved)),
            "moved_worst": max(moved),
            "deviation": float(np.mean(deviations)),
        },
        {**part, "case": "modulo", "moved": float((modulo[0] != modulo[1]).mean())},
    )


def owner_names(names: Sequence[str], hashes: Any) -> Any:
    """Return the name of the owner of each hash."""
    ring = Ring.of(dict.fromkeys(names, 1.0))
    return np.array(ring.nodes)[ring.owner_of(hashes)]
