"""``roost bench guard``: attacks on the balancer, with and without Guard.

The attacks are those of section 6.4 of the dissertation: 10 users at four rates, and 2 to 50 users
at one, over 30 minutes of which the attack has 25. The cluster is simulated (``sim/guarded.py``);
policies, gate, sensor and detector are the real ones. Crowds, newcomers and movers are run too,
because the worst false positive is one of those.

Throughput is points let in over points that came, as a part of what a run without an attack has.
The headline is without eviction, as in the dissertation: ending the attackers' queries leaves a
tenth fewer than the run without an attack has, and would count that as Guard's doing. Figures
with eviction are in the rows. They can exceed one either way: a cluster at peace is left alone
while it is nearly balanced. Availability is the part of a round's points let in without delay.

Cases that differ only in the number of users share their random numbers: the same requests come
from more users. Their figures are equal where the block comes in the same round.

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

from roost.bench.common import environment, save_panels_plot, write_json
from roost.guard import Guard
from roost.guard.attack import Attack
from roost.sim.guarded import Defence, simulate_guarded
from roost.sim.guarded_cases import (
    ATTACK_MINUTE,
    RATES,
    ROUNDS_PER_MINUTE,
    SCALE,
    attacked,
    cluster,
    crowds,
    other_attacks,
    paper_attacks,
    peace,
)
from roost.sim.guarded_outcome import Outcome, availability, shares
from roost.sim.workloads import Floats

SEEDS = tuple(range(3))
QUICK_SEEDS = (0,)
QUICK_CASES = ("150/s", "600/s", "1200/s", "2 users", "50 users")
MINUTES = 30
STRATEGY = "global"
HARDEST = f"{RATES[-1]}/s"
RECOVERED = 0.98
# Different users, and requests in a block.
GATE_USERS = (110, 10_000, 100_000, 1_000_000)
GATE_BLOCK, GATE_BLOCKS = 10_000, 40
DEFENCES = {
    "no guard": Defence(guard=False),
    "guard": Defence(evict=False),
    "guard and eviction": Defence(),
    "guard and quarantine": Defence(quarantine=True, evict=False),
}

Line = list[tuple[float, float]]


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plot."""
    seeds = QUICK_SEEDS if quick else SEEDS
    attacks = paper_attacks() if not quick else {k: paper_attacks()[k] for k in QUICK_CASES}
    usual = {seed: _run(seed, None, Defence(guard=False)) for seed in seeds}
    rows, panels = [], {}
    for name, attack in attacks.items():
        runs = {
            defence: {seed: _run(seed, attack, how) for seed in seeds}
            for defence, how in DEFENCES.items()
        }
        rows.append(_row(name, attack, usual, runs))
        print(f"{name}: {rows[-1]['throughput_with_guard']:.3f} of no attack with Guard")
        if name.endswith("/s"):
            panels[f"{name}: points let in over points that came, by minute"] = {
                "no attack": _minutes(usual[seeds[0]]),
                **{defence: _minutes(by_seed[seeds[0]]) for defence, by_seed in runs.items()},
            }
    others = _others(seeds)
    pipeline = measure_pipeline(quick)
    gate = measure_gate()
    result = {
        "bench": "guard",
        "quick": quick,
        "setup": {
            "strategy": STRATEGY,
            "minutes": MINUTES,
            "scale": SCALE,
            "seeds": list(seeds),
        },
        "environment": environment(),
        "rows": rows,
        "others": others,
        "gate": gate,
        "pipeline": pipeline,
        "summary": _summary(rows, others, gate),
    }
    write_json(json_path, result)
    save_panels_plot(json_path.with_suffix(".png"), "attacks from minute 5 on", panels, columns=2)
    return result


def measure_pipeline(quick: bool) -> list[dict[str, Any]]:
    """Measure the same attacks on the engine's pipeline; the rows look as the simulator's.

    The simulator alone is measured so far: no rows.
    """
    return []


def _run(seed: int, attack: Attack | None, defence: Defence) -> Outcome:
    parties = peace() if attack is None else attacked(attack)
    scenario = cluster(seed, MINUTES, strategy=STRATEGY)
    return simulate_guarded(scenario, parties, defence, clock=time.thread_time)


def _row(
    name: str,
    attack: Attack,
    usual: Mapping[int, Outcome],
    runs: Mapping[str, Mapping[int, Outcome]],
) -> dict[str, Any]:
    """Sum up a case: means over the seeds, and the worst for what must never happen."""
    off, on = runs["no guard"], runs["guard"]
    from_peace = {
        defence: [_throughput(by_seed[seed]) / _throughput(usual[seed]) for seed in usual]
        for defence, by_seed in runs.items()
    }
    spoilt, kept = ([availability(o.trace) for o in r.values()] for r in (off, on))
    blocks = [o.rounds_to_block for o in on.values()]
    detections_s = [s for o in on.values() for s in o.detection_s]
    return {
        "case": name,
        "rate": attack.rate,
        "users": attack.users,
        "throughput_gain": mean(from_peace["guard"]) / mean(from_peace["no guard"]),
        "throughput_without_guard": mean(from_peace["no guard"]),
        "throughput_with_guard": mean(from_peace["guard"]),
        "throughput_with_guard_worst": min(from_peace["guard"]),
        "throughput_with_eviction": mean(from_peace["guard and eviction"]),
        "throughput_with_quarantine": mean(from_peace["guard and quarantine"]),
        "throughput_with_quarantine_worst": min(from_peace["guard and quarantine"]),
        "throughput_min_without_guard": min(float(shares(o.trace).min()) for o in off.values()),
        "throughput_min_with_guard": min(float(shares(o.trace).min()) for o in on.values()),
        "availability_gain": _mean_of(kept, "mean") / _mean_of(spoilt, "mean"),
        "availability_without_guard": _mean_of(spoilt, "mean"),
        "availability_with_guard": _mean_of(kept, "mean"),
        "min_availability_gain": _mean_of(kept, "min") / _mean_of(spoilt, "min"),
        "rounds_to_suspect": _largest([_since_attack(o.suspected_in) for o in on.values()]),
        "rounds_to_block": _largest(blocks),
        "rounds_from_attack_to_block": _largest([_since_attack(o.blocked_in) for o in on.values()]),
        "rounds_to_recover": _largest([_recovery(o) for o in on.values()]),
        "fp": max(o.false_positives for o in on.values()),
        "fn": max(o.false_negatives for o in on.values()),
        "missed_without_two_hotspots": max(o.missed - o.false_negatives for o in on.values()),
        "detection_ms": 1e3 * mean(detections_s),
        "detection_ms_worst": 1e3 * max(detections_s),
    }


def _throughput(outcome: Outcome) -> float:
    return float(shares(outcome.trace).mean())


def _mean_of(runs: list[Floats], what: str) -> float:
    """Mean over the runs of a run's mean or least."""
    return mean(float(getattr(values, what)()) for values in runs)


def _since_attack(number: int | None) -> int | None:
    return None if number is None else number - ATTACK_MINUTE


def _recovery(outcome: Outcome) -> int | None:
    """Count rounds of detection from the lowest availability under attack until it is back."""
    let_in = availability(outcome.trace)[ATTACK_MINUTE * ROUNDS_PER_MINUTE :]
    lowest = int(let_in.argmin())
    back = np.flatnonzero(let_in[lowest:] >= RECOVERED)
    return int(np.ceil(back[0] / ROUNDS_PER_MINUTE)) if back.size else None


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _minutes(outcome: Outcome) -> Line:
    by_minute = shares(outcome.trace).reshape(-1, ROUNDS_PER_MINUTE).mean(axis=1)
    return [(float(minute), float(value)) for minute, value in enumerate(by_minute)]


def _others(seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Run attacks that try to be missed, and crowds that are none."""
    cases = {name: attacked(attack) for name, attack in other_attacks().items()} | crowds()
    found = []
    for name, parties in cases.items():
        outcomes = [simulate_guarded(cluster(seed, MINUTES), parties) for seed in seeds]
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


def _summary(
    rows: list[dict[str, Any]], others: list[dict[str, Any]], gate: list[dict[str, Any]]
) -> dict[str, Any]:
    """Take the worst of all cases; attacks outside the dissertation count for ``fp`` only."""
    (hardest,) = [row for row in rows if row["case"] == HARDEST]
    return {
        "fp": max(row["fp"] for row in [*rows, *others]),
        "fn": max(row["fn"] for row in rows),
        "rounds_to_block": _largest([row["rounds_to_block"] for row in rows]),
        "us_per_request": max(row["us_per_request"] for row in gate),
        "throughput_with_guard": hardest["throughput_with_guard"],
        "throughput_with_guard_worst": hardest["throughput_with_guard_worst"],
        "throughput_with_quarantine": hardest["throughput_with_quarantine"],
        "detection_ms": max(row["detection_ms"] for row in rows),
    }
