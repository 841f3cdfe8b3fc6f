"""``roost bench guard``: attacks on the balancer, with and without the guard.

The attacks are those of section 6.4 of the dissertation: 10 users at four rates, and 2 to 50 users
at one rate, for 25 of 30 minutes. The cluster is simulated (``sim/guarded.py``); policies, gate,
sensor and detector are the real ones. Some attacks run on the engine's own pipeline as well
(``guard_pipeline.py``). Crowds, newcomers and movers run too, to find false positives. Every case
has random numbers of its own, from seeds that were not used to choose defaults.

Throughput is admitted over offered points, relative to a run without an attack; and to the
dissertation's control, in which normal users move as many more queries as the attack would. The
same attacks run under ``swarm`` as well. A cluster with
spare capacity catches up on delayed points, so its availability, the share of a round's points that
is admitted without delay, says more than its throughput. The rates therefore run a second time on a
``saturated`` cluster, whose load exceeds its capacity.

The summary is without eviction, as in the dissertation: terminating the attackers' queries leaves a
tenth fewer than the run without an attack has, which would count in favour of the guard. Eviction
is compared with a run in which the same queries are terminated without an attack.

Gate, sensor and features are measured by the clock, from 110 users as in the dissertation to a
million users.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import mean

import numpy as np
import pyarrow as pa

from roost.bench.common import Line, Measured, Plot, Row
from roost.bench.guard_pipeline import (
    FULL,
    QUICK,
    gains,
    measure_flood,
    measure_pipeline,
    suffix_of,
)
from roost.guard import Guard
from roost.guard.features import close_features
from roost.guard.sensor import LiveQueries
from roost.sim.attack import Attack, Party
from roost.sim.guarded import (
    DETECTION_ROUNDS,
    Defence,
    GuardedResult,
    availability,
    shares,
    simulate_guarded,
)
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
    normal_users,
    other_attacks,
    paper_attacks,
)

SEEDS = (300, 301, 302)
QUICK_SEEDS = (300,)
QUICK_CASES = ("150/s", "600/s", "1200/s", "2 users", "50 users")
MINUTES = 30
STRATEGY = "global"
HARDEST = f"{RATES[-1]}/s"
SATURATED = 1.2
RECOVERED = 0.98
# Numbers of users, and of requests in a block.
GATE_USERS = (110, 10_000, 100_000, 1_000_000)
GATE_BLOCK, GATE_BLOCKS = 10_000, 40
SENSOR_QUERIES = 1_000_000
DEFENCES = {
    "no guard": Defence(guard=False),
    "guard": Defence(evict=False),
    "eviction": Defence(),
    "quarantine": Defence(quarantine=True, evict=False),
    "quarantine and eviction": Defence(quarantine=True),
}
HARDEST_ONLY = ("eviction", "quarantine", "quarantine and eviction")
SHOWN = ("no guard", "guard", "quarantine")
TABLE = {
    "case": ("case", ""),
    "no guard": ("throughput_without_guard", ".3f"),
    "guard": ("throughput_with_guard", ".3f"),
    "worst": ("throughput_with_guard_worst", ".3f"),
    "quar.": ("throughput_with_quarantine", ".3f"),
    "avail.": ("availability_without_guard", ".3f"),
    "avail. guard": ("availability_with_guard", ".3f"),
    "block s": ("block_s", ".0f"),
    "fp": ("fp", ""),
    "fn": ("fn", ""),
}

Runs = Mapping[int, GuardedResult]


def run(quick: bool) -> Measured:
    """Measure attacks, the gate, and the pipeline."""
    seeds = QUICK_SEEDS if quick else SEEDS
    attacks = paper_attacks() if not quick else {k: paper_attacks()[k] for k in QUICK_CASES}
    hard = {k: a for k, a in attacks.items() if k.endswith("/s") and (k == HARDEST or not quick)}
    rows, panels = _measure(attacks, seeds, UTILISATION)
    saturated, more_panels = _measure(hard, seeds, SATURATED)
    under_swarm, swarm_panels = _measure(hard, seeds, UTILISATION, "swarm")
    others = _others(seeds)
    gate = measure_gate()
    pipeline = measure_pipeline(QUICK if quick else FULL, seeds)
    timelines = {
        row["case"]: {how: list(enumerate(values)) for how, values in row["timeline"].items()}
        for row in pipeline
    }
    title = "admitted over offered points, by minute; attacks from minute 5 on"
    return Measured(
        rows,
        _summary(rows, saturated, others, gate, pipeline),
        {
            "": Plot(title, panels | more_panels | swarm_panels, columns=2),
            "-pipeline": Plot("capacity of the pipeline, points/s, by batch", timelines),
        },
        table=TABLE,
        table_rows=[
            *rows,
            *({**row, "case": f"{row['case']} sat."} for row in saturated),
            *({**row, "case": f"{row['case']} swarm"} for row in under_swarm),
        ],
        more={
            "setup": {
                "strategy": STRATEGY,
                "minutes": MINUTES,
                "scale": SCALE,
                "utilisation": UTILISATION,
                "saturated": SATURATED,
                "seeds": list(seeds),
            },
            "saturated": saturated,
            "swarm": under_swarm,
            "others": others,
            "gate": gate,
            "sensor": measure_sensor(),
            "flood": measure_flood(),
            "pipeline": pipeline,
        },
    )


def _measure(
    attacks: Mapping[str, Attack],
    seeds: tuple[int, ...],
    utilisation: float,
    strategy: str = STRATEGY,
) -> tuple[list[Row], dict[str, dict[str, Line]]]:
    """Run attacks at a utilisation; returns rows, and a panel for each rate."""

    def runs_of(case: str, parties: list[Party], how: Defence) -> Runs:
        return {seed: _run(seed, case, parties, how, utilisation, strategy) for seed in seeds}

    peace = Defence(guard=False)
    usual, departures = (
        runs_of("peace", parties, peace) for parties in (normal_users(), departed())
    )
    rates = {attack.rate for attack in attacks.values()}
    controls = {rate: runs_of("peace", normal_users(extra=rate), peace) for rate in sorted(rates)}
    rows, panels = [], {}
    for name, attack in attacks.items():
        runs = {
            defence: runs_of(name, attacked(attack), how)
            for defence, how in DEFENCES.items()
            if name == HARDEST or defence not in HARDEST_ONLY
        }
        row = _row(name, attack, usual, departures, runs)
        for defence, by_seed in runs.items():
            share = mean(_relative(by_seed, controls[attack.rate]))
            row[f"throughput_{suffix_of(defence)}_vs_control"] = share
        rows.append({**row, "strategy": strategy})
        share = rows[-1]["throughput_with_guard"]
        print(f"{name}: {share:.3f} of the throughput without an attack")
        if name.endswith("/s"):
            where = " on a saturated cluster" if utilisation > 1.0 else ""
            where += f" under {strategy}" if strategy != STRATEGY else ""
            shown = {"no attack": usual, "control": controls[attack.rate]} | {
                k: runs[k] for k in SHOWN if k in runs
            }
            panels[name + where] = {k: _minutes(v[seeds[0]]) for k, v in shown.items()}
    return rows, panels


def _run(
    seed: int,
    case: str,
    parties: list[Party],
    defence: Defence,
    utilisation: float = UTILISATION,
    strategy: str = STRATEGY,
) -> GuardedResult:
    scenario = cluster(seed, MINUTES, strategy=strategy, utilisation=utilisation)
    users_seed = case_seed(case, seed)
    return simulate_guarded(
        scenario, parties, defence, clock=time.thread_time, users_seed=users_seed
    )


def _row(name: str, attack: Attack, usual: Runs, departures: Runs, runs: Mapping[str, Runs]) -> Row:
    """Combine the seeds of a case: means of measurements, the worst of counted errors."""
    on = runs["guard"]
    detections_s = [s for o in on.values() for s in o.detection_s]
    row: Row = {"case": name, "rate": attack.rate, "users": attack.users}
    row["availability_without_attack"] = _over(usual, METRICS["availability"])
    for defence, by_seed in runs.items():
        suffix, share = suffix_of(defence), _relative(by_seed, usual)
        row |= {f"throughput_{suffix}": mean(share), f"throughput_{suffix}_worst": min(share)}
        row |= {f"{key}_{suffix}": _over(by_seed, metric) for key, metric in METRICS.items()}
    if "eviction" in runs:
        fair = _relative(runs["eviction"], departures)
        row["throughput_with_eviction_of_fewer_queries"] = mean(fair)
    return {
        **row,
        **gains(row),
        "rounds_to_block": _largest(o.rounds_to_block for o in on.values()),
        "fp": max(o.false_positives for by_seed in runs.values() for o in by_seed.values()),
        "fn": max(o.false_negatives for o in on.values()),
        "missed_without_two_hotspots": max(o.missed - o.false_negatives for o in on.values()),
        "detect_s": _mean(_seconds(o, o.suspected_in) for o in on.values()),
        "block_s": _mean(_seconds(o, o.blocked_in) for o in on.values()),
        "recovery_s": _mean(_recovery_s(on[seed], usual[seed]) for seed in usual),
        "detection_ms": 1e3 * mean(detections_s),
        "detection_ms_worst": 1e3 * max(detections_s),
    }


def _moved(outcome: GuardedResult) -> float:
    """Count queries that machines loaded for new plans since the attack began."""
    start = ATTACK_MINUTE * ROUNDS_PER_MINUTE
    return float(outcome.trace.column("moved_queries")[start:].sum())


METRICS: dict[str, Callable[[GuardedResult], float]] = {
    "min_throughput": lambda outcome: float(shares(outcome.trace).min()),
    "availability": lambda outcome: float(availability(outcome.trace).mean()),
    "min_availability": lambda outcome: float(availability(outcome.trace).min()),
    "queries_moved": _moved,
}


def _over(runs: Runs, metric: Callable[[GuardedResult], float]) -> float:
    """Return the mean of a metric over the seeds."""
    return mean(metric(outcome) for outcome in runs.values())


def _relative(runs: Runs, usual: Runs) -> list[float]:
    """Return the throughput of each seed, relative to another run's."""
    return [
        float(shares(runs[seed].trace).mean() / shares(usual[seed].trace).mean()) for seed in usual
    ]


def _seconds(outcome: GuardedResult, number: int | None) -> float | None:
    """Return the seconds from the attack's first hotspot to the end of a round of detection."""
    if number is None or outcome.attacked_in is None:
        return None
    rounds = (number + 1) * DETECTION_ROUNDS - outcome.attacked_in
    return max(rounds, 0) * outcome.trace.scenario.round_s


def _recovery_s(outcome: GuardedResult, usual: GuardedResult) -> float | None:
    """Return the seconds from the lowest availability until it is as without an attack."""
    start = ATTACK_MINUTE * ROUNDS_PER_MINUTE
    under_attack, normal = (availability(o.trace)[start:] for o in (outcome, usual))
    lowest = int(under_attack.argmin())
    back = np.flatnonzero(under_attack[lowest:] >= RECOVERED * normal[lowest:])
    return float(back[0]) * outcome.trace.scenario.round_s if back.size else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _minutes(outcome: GuardedResult) -> Line:
    by_minute = shares(outcome.trace).reshape(-1, ROUNDS_PER_MINUTE).mean(axis=1)
    return list(enumerate(by_minute.tolist()))


def _others(seeds: tuple[int, ...]) -> list[Row]:
    """Run attacks that try to evade detection, and crowds that are no attacks."""
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
                "rounds_to_block": _largest(o.rounds_to_block for o in outcomes),
            }
        )
    return found


def measure_gate() -> list[Row]:
    """Measure the time of requests at the gate, by number of users."""
    random = np.random.default_rng(0)
    registers = random.random(GATE_BLOCK) < 0.5
    rows = []
    crowded = Guard(0, users_max=16)  # compiles what runs when the table of users is full
    crowded.on_requests(pa.array([f"user-{k}" for k in range(99)]), np.ones(99, np.bool_), 0)
    for users in (GATE_USERS[0], *GATE_USERS):  # the first one compiles
        blocks = [
            pa.array([f"user-{k}" for k in random.integers(0, users, GATE_BLOCK)])
            for _ in range(GATE_BLOCKS)
        ]
        guard = Guard(0)
        guard.block("user-0", 0)
        start_s = time.thread_time()  # other work on the machine does not count
        for number, names in enumerate(blocks):
            guard.on_requests(names, registers, number * GATE_BLOCK)
        spent_s = time.thread_time() - start_s
        rows.append(
            {
                "users": users,
                "us_per_request": 1e6 * spent_s / (GATE_BLOCK * GATE_BLOCKS),
                "megabytes": guard.users.nbytes / 1e6,
            }
        )
    return rows[1:]


def measure_sensor() -> list[Row]:
    """Measure the sensor on a hot partition and the features of a round, by number of users."""
    random = np.random.default_rng(0)
    low = random.integers(0, 1_000, (SENSOR_QUERIES, 2))
    rects, rounds = np.array([[200, 200, 300, 300]]), random.integers(0, 6, SENSOR_QUERIES)
    rows = []
    for users in (GATE_USERS[0], *GATE_USERS[:-1]):  # the first one compiles
        names = pa.array([f"user-{k}" for k in range(users)])
        guard = Guard(0)
        guard.on_requests(names, np.ones(users, np.bool_), 0)
        codes = random.integers(0, users, SENSOR_QUERIES).astype(np.int32)
        queries = LiveQueries(names, codes, rounds, np.hstack([low, low + 1]))
        start_s = time.thread_time()
        guard.on_rebalance(rects, queries)
        sensed_s = time.thread_time()
        close_features(guard.users)
        done_s = time.thread_time()
        rows.append(
            {
                "users": users,
                "queries": SENSOR_QUERIES,
                "sensor_us_per_hotspot": 1e6 * (sensed_s - start_s),
                "features_us_per_round": 1e6 * (done_s - sensed_s),
            }
        )
    return rows[1:]


def _summary(
    rows: list[Row], saturated: list[Row], others: list[Row], gate: list[Row], pipeline: list[Row]
) -> Row:
    """Return the worst of all cases; attacks outside the dissertation count for ``fp`` only.

    On the pipeline ``fn`` counts all attackers that are not blocked, harmful or not.
    """
    (hardest,) = [row for row in rows if row["case"] == HARDEST]
    (full,) = [row for row in saturated if row["case"] == HARDEST]
    return {
        "fp": max(row["fp"] for row in [*rows, *saturated, *others]),
        "fn": max(row["fn"] for row in rows),
        "rounds_to_block": _largest(row["rounds_to_block"] for row in rows),
        "us_per_request": max(row["us_per_request"] for row in gate),
        "throughput_with_guard": hardest["throughput_with_guard_worst"],
        "throughput_with_quarantine": hardest["throughput_with_quarantine_worst"],
        "throughput_saturated_with_guard": full["throughput_with_guard_worst"],
        "throughput_saturated_with_quarantine": full["throughput_with_quarantine_worst"],
        "detection_ms": max(row["detection_ms"] for row in rows),
        "pipeline_fp": max(row["fp"] for row in pipeline),
        "pipeline_fn": max(row["fn"] for row in pipeline),
        "pipeline_throughput_with_guard": min(r["throughput_with_guard_worst"] for r in pipeline),
    }
