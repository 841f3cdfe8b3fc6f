"""``roost bench guard``: attacks on the balancer, with and without Guard.

The attacks are those of section 6.4 of the dissertation: 10 users at four rates, and 2 to 50 users
at one, over 30 minutes of which the attack has 25. The cluster is simulated (``sim/guarded.py``);
policies, gate, sensor and detector are the real ones. Some attacks are run on the engine's own
pipeline as well (``guard_pipeline.py``). Crowds, newcomers and movers are run too,
because the worst false positive is one of those. Every case has random numbers of its own.

Throughput is points let in over points that came, as a part of what a run without an attack has.
A cluster with room to spare catches up on what had to wait, so its throughput says little; its
availability, the part of a round's points let in without delay, says more. So the rates are run a
second time on a cluster that is ``saturated``: more comes than it can do, and throughput is what it
can do. Seeds are none of those that defaults were chosen by.

The headline is without eviction, as in the dissertation: ending the attackers' queries leaves a
tenth fewer than the run without an attack has, and would count that as Guard's doing. Eviction is
compared with a run in which the same queries end and nobody attacks.

Time at the gate is measured by the clock on blocks of requests, from 110 users as in the
dissertation up to a flood of a million made-up ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from roost.bench.common import environment, save_panels_plot, write_json
from roost.bench.guard_pipeline import FULL, QUICK, measure_flood, measure_pipeline
from roost.guard import Guard
from roost.sim.guarded import Defence, simulate_guarded
from roost.sim.guarded_cases import (
    ATTACK_MINUTE,
    RATES,
    ROUNDS_PER_MINUTE,
    SCALE,
    UTILISATION,
    attacked,
    case_seed,
    cluster,
    crowds,
    departed,
    other_attacks,
    paper_attacks,
    peace,
)
from roost.sim.guarded_result import GuardedResult, availability, shares
from roost.sim.parties import Attack, Party

SEEDS = (300, 301, 302)
QUICK_SEEDS = (300,)
QUICK_CASES = ("150/s", "600/s", "1200/s", "2 users", "50 users")
MINUTES = 30
STRATEGY = "global"
HARDEST = f"{RATES[-1]}/s"
SATURATED = 1.2
RECOVERED = 0.98
# Different users, and requests in a block.
GATE_USERS = (110, 10_000, 100_000, 1_000_000)
GATE_BLOCK, GATE_BLOCKS = 10_000, 40
DEFENCES = {
    "no guard": Defence(guard=False),
    "guard": Defence(evict=False),
    "eviction": Defence(),
    "quarantine": Defence(quarantine=True, evict=False),
    "quarantine and eviction": Defence(quarantine=True),
}
# Asked for at the highest rate.
HARDEST_ONLY = ("eviction", "quarantine", "quarantine and eviction")

SHOWN = ("no guard", "guard", "quarantine")

Line = list[tuple[float, float]]
Runs = Mapping[int, GuardedResult]
Row = dict[str, Any]


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plot."""
    seeds = QUICK_SEEDS if quick else SEEDS
    attacks = paper_attacks() if not quick else {k: paper_attacks()[k] for k in QUICK_CASES}
    hard = {k: a for k, a in attacks.items() if k.endswith("/s") and (k == HARDEST or not quick)}
    rows, panels = _measure(attacks, seeds, UTILISATION)
    saturated, more_panels = _measure(hard, seeds, SATURATED)
    others = _others(seeds)
    gate = measure_gate()
    pipeline = measure_pipeline(QUICK if quick else FULL, seeds)
    result = {
        "bench": "guard",
        "quick": quick,
        "setup": {
            "strategy": STRATEGY,
            "minutes": MINUTES,
            "scale": SCALE,
            "utilisation": UTILISATION,
            "saturated": SATURATED,
            "seeds": list(seeds),
        },
        "environment": environment(),
        "rows": rows,
        "saturated": saturated,
        "others": others,
        "gate": gate,
        "flood": measure_flood(),
        "pipeline": pipeline,
        "summary": _summary(rows, saturated, others, gate) | _pipeline_summary(pipeline),
    }
    write_json(json_path, result)
    title = "points let in over points that came, by minute; attacks from minute 5 on"
    save_panels_plot(json_path.with_suffix(".png"), title, panels | more_panels, columns=2)
    title = "points a second that the pipeline could take, by batch"
    plot = json_path.with_name(f"{json_path.stem}-pipeline.png")
    save_panels_plot(plot, title, _timelines(pipeline), columns=1)
    Console(stderr=True).print(_table(rows, saturated))
    return result


def _timelines(pipeline: list[Row]) -> dict[str, dict[str, Line]]:
    """Panel for each case on the pipeline."""
    return {
        row["case"]: {how: list(enumerate(values)) for how, values in row["timeline"].items()}
        for row in pipeline
    }


def _measure(
    attacks: Mapping[str, Attack], seeds: tuple[int, ...], utilisation: float
) -> tuple[list[Row], dict[str, dict[str, Line]]]:
    """Run attacks on a cluster with so much to do; returns rows, and a panel for each rate."""
    usual, left = (
        {seed: _run(seed, "peace", parties, Defence(guard=False), utilisation) for seed in seeds}
        for parties in (peace(), departed())
    )
    rows, panels = [], {}
    for name, attack in attacks.items():
        runs = {
            defence: {seed: _run(seed, name, attacked(attack), how, utilisation) for seed in seeds}
            for defence, how in DEFENCES.items()
            if name == HARDEST or defence not in HARDEST_ONLY
        }
        rows.append(_row(name, attack, usual, left, runs))
        print(f"{name}: {rows[-1]['throughput_with_guard']:.3f} of no attack with Guard")
        if name.endswith("/s"):
            busy = " on a saturated cluster" if utilisation > 1.0 else ""
            shown = {"no attack": usual} | {k: runs[k] for k in SHOWN if k in runs}
            panels[name + busy] = {k: _minutes(v[seeds[0]]) for k, v in shown.items()}
    return rows, panels


def _run(
    seed: int, case: str, parties: list[Party], defence: Defence, utilisation: float = UTILISATION
) -> GuardedResult:
    scenario = cluster(seed, MINUTES, strategy=STRATEGY, utilisation=utilisation)
    users_seed = case_seed(case, seed)
    return simulate_guarded(
        scenario, parties, defence, clock=time.thread_time, users_seed=users_seed
    )


def _row(name: str, attack: Attack, usual: Runs, left: Runs, runs: Mapping[str, Runs]) -> Row:
    """Sum up a case: means over the seeds, and the worst for what must never happen."""
    off, on = runs["no guard"], runs["guard"]
    kept = {
        defence: [_throughput(by_seed[seed]) / _throughput(usual[seed]) for seed in usual]
        for defence, by_seed in runs.items()
    }
    detections_s = [s for o in on.values() for s in o.detection_s]
    row: Row = {
        "case": name,
        "rate": attack.rate,
        "users": attack.users,
        "throughput_gain": mean(kept["guard"]) / mean(kept["no guard"]),
        "availability_gain": _available(on) / _available(off),
        "min_availability_gain": _least_available(on) / _least_available(off),
        "rounds_to_block": _largest([o.rounds_to_block for o in on.values()]),
        "fp": max(o.false_positives for o in on.values()),
        "fn": max(o.false_negatives for o in on.values()),
        "missed_without_two_hotspots": max(o.missed - o.false_negatives for o in on.values()),
        "throughput_without_guard": mean(kept["no guard"]),
        "throughput_with_guard": mean(kept["guard"]),
        "throughput_with_guard_worst": min(kept["guard"]),
        "min_throughput_without_guard": mean(float(shares(o.trace).min()) for o in off.values()),
        "min_throughput_with_guard": mean(float(shares(o.trace).min()) for o in on.values()),
        "availability_without_attack": _available(usual),
        "availability_without_guard": _available(off),
        "availability_with_guard": _available(on),
        "min_availability_without_guard": _least_available(off),
        "min_availability_with_guard": _least_available(on),
        "detect_s": _mean([_seconds(o, o.suspected_in) for o in on.values()]),
        "block_s": _mean([_seconds(o, o.blocked_in) for o in on.values()]),
        "recovery_s": _mean([_recovery_s(on[seed], usual[seed]) for seed in usual]),
        "queries_moved_without_guard": _moved(off),
        "queries_moved_with_guard": _moved(on),
        "detection_ms": 1e3 * mean(detections_s),
        "detection_ms_worst": 1e3 * max(detections_s),
    }
    for defence in set(runs) & set(HARDEST_ONLY):
        key = defence.replace(" ", "_")
        row[f"throughput_with_{key}"] = mean(kept[defence])
        row[f"throughput_with_{key}_worst"] = min(kept[defence])
        row[f"availability_with_{key}"] = _available(runs[defence])
        row[f"queries_moved_with_{key}"] = _moved(runs[defence])
        row["fp"] = max(row["fp"], *(o.false_positives for o in runs[defence].values()))
    if "eviction" in runs:
        fair = [_throughput(runs["eviction"][seed]) / _throughput(left[seed]) for seed in left]
        row["throughput_with_eviction_of_fewer_queries"] = mean(fair)
    return row


def _throughput(outcome: GuardedResult) -> float:
    return float(shares(outcome.trace).mean())


def _available(runs: Runs) -> float:
    return mean(float(availability(o.trace).mean()) for o in runs.values())


def _least_available(runs: Runs) -> float:
    return mean(float(availability(o.trace).min()) for o in runs.values())


def _moved(runs: Runs) -> float:
    """Count queries that machines had to load for new plans, from the attack on."""
    start = ATTACK_MINUTE * ROUNDS_PER_MINUTE
    return mean(float(o.trace.column("moved_queries")[start:].sum()) for o in runs.values())


def _seconds(outcome: GuardedResult, number: int | None) -> float | None:
    """Seconds from the attack's first hotspot to the end of a round of detection."""
    if number is None or outcome.attacked_in is None:
        return None
    rounds = (number + 1) * outcome.detection_rounds - outcome.attacked_in
    return max(rounds, 0) * outcome.trace.scenario.round_s


def _recovery_s(outcome: GuardedResult, usual: GuardedResult) -> float | None:
    """Seconds from the lowest availability under attack until it is as without one."""
    start = ATTACK_MINUTE * ROUNDS_PER_MINUTE
    let_in, normal = (availability(o.trace)[start:] for o in (outcome, usual))
    lowest = int(let_in.argmin())
    back = np.flatnonzero(let_in[lowest:] >= RECOVERED * normal[lowest:])
    return float(back[0]) * outcome.trace.scenario.round_s if back.size else None


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _minutes(outcome: GuardedResult) -> Line:
    by_minute = shares(outcome.trace).reshape(-1, ROUNDS_PER_MINUTE).mean(axis=1)
    return [(float(minute), float(value)) for minute, value in enumerate(by_minute)]


def _others(seeds: tuple[int, ...]) -> list[Row]:
    """Run attacks that try to be missed, and crowds that are none."""
    cases = {name: attacked(attack) for name, attack in other_attacks().items()} | crowds()
    found = []
    for name, parties in cases.items():
        outcomes = [_run(seed, name, parties, Defence()) for seed in seeds]
        found.append(
            {
                "case": name,
                "attack": name in other_attacks(),
                "fp": max(o.false_positives for o in outcomes),
                "fn": max(o.false_negatives for o in outcomes),
                "rounds_to_block": _largest([o.rounds_to_block for o in outcomes]),
            }
        )
    return found


def measure_gate() -> list[dict[str, Any]]:
    """Time requests at the gate, by number of different users."""
    random = np.random.default_rng(0)
    registers = random.random(GATE_BLOCK) < 0.5
    rows = []
    crowded = Guard(0, users_max=16)  # what happens at the cap is compiled, too
    crowded.on_requests(pa.array([f"user-{k}" for k in range(99)]), np.ones(99, np.bool_), 0)
    for users in (GATE_USERS[0], *GATE_USERS):  # the first one compiles
        blocks = [
            pa.array([f"user-{k}" for k in random.integers(0, users, GATE_BLOCK)])
            for _ in range(GATE_BLOCKS)
        ]
        guard = Guard(0)
        guard.block("user-0", 0)
        # Of this thread only: other work on the machine is not the gate's.
        start_s = time.thread_time()
        for number, names in enumerate(blocks):
            guard.on_requests(names, registers, number * GATE_BLOCK)
        spent_s = time.thread_time() - start_s
        rows.append(
            {
                "users": users,
                "us_per_request": 1e6 * spent_s / (GATE_BLOCK * GATE_BLOCKS),
                "megabytes": guard.nbytes / 1e6,
            }
        )
    return rows[1:]


def _summary(rows: list[Row], saturated: list[Row], others: list[Row], gate: list[Row]) -> Row:
    """Take the worst of all cases; attacks outside the dissertation count for ``fp`` only."""
    (hardest,) = [row for row in rows if row["case"] == HARDEST]
    (full,) = [row for row in saturated if row["case"] == HARDEST]
    return {
        "fp": max(row["fp"] for row in [*rows, *saturated, *others]),
        "fn": max(row["fn"] for row in rows),
        "rounds_to_block": _largest([row["rounds_to_block"] for row in rows]),
        "us_per_request": max(row["us_per_request"] for row in gate),
        "throughput_with_guard": hardest["throughput_with_guard_worst"],
        "throughput_with_quarantine": hardest["throughput_with_quarantine_worst"],
        "throughput_saturated_with_guard": full["throughput_with_guard_worst"],
        "throughput_saturated_with_quarantine": full["throughput_with_quarantine_worst"],
        "detection_ms": max(row["detection_ms"] for row in rows),
    }


def _pipeline_summary(pipeline: list[Row]) -> Row:
    """Take the worst on the pipeline, where ``fn`` counts all who are left, whatever they did."""
    return {
        "pipeline_fp": max(row["fp"] for row in pipeline),
        "pipeline_fn": max(row["fn"] for row in pipeline),
        "pipeline_throughput_with_guard": min(r["throughput_with_guard_worst"] for r in pipeline),
    }


def _table(rows: list[Row], saturated: list[Row]) -> Table:
    heads = (
        "case",
        "no guard",
        "guard",
        "worst",
        "quar.",
        "avail.",
        "guard",
        "block s",
        "fp",
        "fn",
    )
    table = Table(*heads)
    for row, busy in [(r, "") for r in rows] + [(r, " sat.") for r in saturated]:
        block_s, quarantine = row["block_s"], row.get("throughput_with_quarantine")
        table.add_row(
            row["case"] + busy,
            f"{row['throughput_without_guard']:.3f}",
            f"{row['throughput_with_guard']:.3f}",
            f"{row['throughput_with_guard_worst']:.3f}",
            "" if quarantine is None else f"{quarantine:.3f}",
            f"{row['availability_without_guard']:.3f}",
            f"{row['availability_with_guard']:.3f}",
            "" if block_s is None else f"{block_s:.0f}",
            str(row["fp"]),
            str(row["fn"]),
        )
    return table
