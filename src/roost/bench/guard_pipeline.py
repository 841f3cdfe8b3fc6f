"""Attacks on the engine's own pipeline, for ``roost bench guard``.

Users and attacks are those of the simulator (``sim/guarded_cases.py``), on the pickups of a city.
Query log, gate, admission, matching, balancer, sensor and detector are the engine's, on an emulated
cluster (``cluster.py``). A batch is a round of the balancer, four batches a round of detection.

A batch takes as long as its slowest machine, computed from counted work: points, candidate pairs
and loaded queries. Measured times on a shared host differ by a third between machines with equal
work, as much as an attack changes them. Terminated queries that are still in the index count too,
until their segment is merged. The time to apply the query log on the driver is measured per
request, and separately for a flood of requests that are all refused.

Throughput is the number of points per second that the cluster can process. The offered load is
what a run without an attack can process in all but the slowest 5 % of its batches; availability is
the share of it that a batch can process. Rounds to the block count from the round in which the
attack moves to its second target: the second hotspot can only come later.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.bench.cases import Pickups, data_dir, load_pickups
from roost.bench.cluster import BatchMetrics, EmulatedCluster, counted_work
from roost.bench.common import Row
from roost.bench.moving import Step, TimedLoad
from roost.bench.streams import admit
from roost.model.arrays import Floats
from roost.model.choices import Strategy
from roost.model.schemas import TIMESTAMP
from roost.model.space import Rect, Space
from roost.queries.admission import Rules
from roost.queries.guard_state import BLOCK, GuardCommand, GuardState, decisions, send
from roost.queries.live import QuerySet
from roost.queries.log import SqliteQueryLog
from roost.sim.attack import Attack, Party, World
from roost.sim.guarded_cases import RATES, attacked, case_seed, normal_users, paper_attacks
from roost.storage.store import Store

MACHINES = 22
TICK_S = 15
ROUND_BATCHES = 4
SAMPLE = 20_000
HISTORY_POINTS = 200_000
OFFERED_QUANTILE = 0.05
FLOOD, FLOODS, FLOOD_USERS, FLOOD_SINGLE = 200_000, 3, 10, 500
HOT_SIDE, HOT_SHARE, HOT_ROUNDS, HOTSPOTS = 0.05, 0.08, 20, 2
GUARDED = {"guard.enabled": True, "guard.round": ROUND_BATCHES * TICK_S, "guard.evict": False}
# Settings of the run, by defence.
DEFENCES: dict[str, dict[str, Any]] = {
    "no guard": {},
    "guard": GUARDED,
    "eviction": {**GUARDED, "guard.evict": True},
    "quarantine": {**GUARDED, "guard.quarantine": True},
}


class AttackSize(NamedTuple):
    """AttackSize of the measured workloads."""

    rounds: int  # number of batches
    points: int  # of a batch
    start: int  # batch in which attacks begin
    scale: float  # fraction of the dissertation's queries and rates
    cases: Mapping[str, Sequence[str]]  # defences by attack


FULL = AttackSize(28, 100_000, 4, 1.0, {f"{RATES[-1]}/s": tuple(DEFENCES)})
QUICK = AttackSize(24, 60_000, 4, 0.1, {f"{RATES[-1]}/s": ("no guard", "guard")})


class GuardLoad(TimedLoad):
    """The points of a city with natural hotspots, and the requests of parties."""

    def __init__(
        self, pickups: Pickups, parties: Sequence[Party], rounds: int, points: int, seed: int
    ) -> None:
        super().__init__(pickups, rounds, points, TICK_S)
        self._seed = seed
        random = np.random.default_rng([seed, 1])
        self._spots = random.random((HOTSPOTS, 2)) * (1 - HOT_SIDE)
        self._begins = random.integers(ROUND_BATCHES, rounds, HOTSPOTS)
        world = World(parties, self._places(), seed, TICK_S)
        bounds = self.space.bounds
        begun = world.begin()
        self._standing = begun.table(world.names, bounds, numbered=True)
        self._live = [len(begun)]
        self.requests: list[pa.Table] = []  # by round
        for _ in range(rounds):
            requests = world.next()
            self.requests.append(requests.table(world.names, bounds, numbered=True))
            self._live.append(self._live[-1] + int(2 * requests.registers.sum() - len(requests)))
        self.malicious = frozenset(np.array(world.names)[world.malicious].tolist())
        found = (t for party in parties if isinstance(party, Attack) for t in party.targets)
        self.targets = [tick for tick, _ in found]

    def _places(self) -> Floats:
        """Return places of pickups in the unit square."""
        b, at = self.space.bounds, self.history()
        x, y = self.pickups.lon[at], self.pickups.lat[at]
        places = np.column_stack([(x - b.x0) / b.width, (y - b.y0) / b.height])
        inside = ((places >= 0.0) & (places <= 1.0)).all(axis=1)
        sample: Floats = places[inside][:SAMPLE]
        return sample

    def standing(self) -> pa.Table:
        """Return requests for the queries that exist before the first round."""
        return self._standing

    def history(self) -> NDArray[np.int64]:
        """Return a sample of all pickups."""
        random = np.random.default_rng([self._seed, 2])
        return random.integers(0, len(self.pickups.lon), HISTORY_POINTS)

    def step(self, number: int) -> Step:
        """Make one round."""
        random = np.random.default_rng([self._seed, 3, number])
        at = random.integers(0, len(self.pickups.lon), self.points)
        x, y = self.pickups.lon[at], self.pickups.lat[at]
        for corner, begin in zip(self._spots, self._begins, strict=True):
            if begin <= number < begin + HOT_ROUNDS:
                hot = random.choice(self.points, int(HOT_SHARE * self.points), replace=False)
                x[hot], y[hot] = self.place(corner + HOT_SIDE * random.random((len(hot), 2)))
        return Step(self.table(number, x, y), self.requests[number], self._live[number + 1])


@dataclass(frozen=True)
class PipelineRun:
    """Result of a load with a defence: metrics of its batches, and decisions of the guard."""

    batches: list[BatchMetrics]
    decisions: list[Row]
    load: GuardLoad

    @property
    def throughput(self) -> Floats:
        """Points per second that each batch can process."""
        return np.array([m.points / m.batch_s for m in self.batches])

    @property
    def mean_throughput(self) -> float:
        """Points per second over the whole run."""
        return sum(m.points for m in self.batches) / sum(m.batch_s for m in self.batches)

    @property
    def blocked(self) -> dict[str, int]:
        """Round of detection in which users were blocked."""
        blocks = [row for row in self.decisions if row["decision"] == "block"]
        return {user: row["round"] for row in blocks for user in row["users"]}

    @property
    def suspected_in(self) -> int | None:
        """Round of detection in which an attacker was first suspected."""
        rounds = [
            row["round"]
            for row in self.decisions
            if row["decision"] in ("suspect", "block") and self.load.malicious & set(row["users"])
        ]
        return min(rounds, default=None)

    @property
    def rounds_to_block(self) -> int | None:
        """Rounds of detection from the second target to the last block; None if one is missing."""
        blocked, malicious, targets = self.blocked, self.load.malicious, self.load.targets
        if not malicious or not malicious <= blocked.keys() or len(targets) < 2:
            return None
        last = max(blocked[user] for user in malicious)
        return max(last - targets[1] // ROUND_BATCHES, 0)


def run_case(
    pickups: Pickups, parties: Sequence[Party], size: AttackSize, defences: Sequence[str], seed: int
) -> dict[str, PipelineRun]:
    """Run the same users with several defences."""
    load = GuardLoad(pickups, parties, size.rounds, size.points, seed)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        base, folder = Path(name) / "base", Path(name) / "run"
        admit(base, load.space, load.standing())
        for defence in defences:
            how = (DEFENCES[defence], counted_work)
            with closing(
                EmulatedCluster(folder, base, Strategy.GLOBAL, MACHINES, load, *how)
            ) as cluster:
                batches = [cluster.run(load.step(number)) for number in range(load.rounds)]
                found[defence] = PipelineRun(batches, decisions(cluster.store), load)
            shutil.rmtree(folder)
    return found


def measure_pipeline(size: AttackSize, seeds: Sequence[int]) -> list[Row]:
    """Measure attacks on the pipeline; the rows have the keys of the simulator's."""
    pickups = load_pickups(data_dir())
    usual = {
        seed: run_case(
            pickups, normal_users(size.scale), size, ("no guard",), case_seed("peace", seed)
        )
        for seed in seeds
    }
    rows = []
    for name, defences in size.cases.items():
        attack = replace(paper_attacks()[name], start=size.start)
        found = []
        for seed in seeds:
            users = attacked(attack, size.scale)
            runs = run_case(pickups, users, size, defences, case_seed(name, seed))
            found.append(_row(name, attack, usual[seed]["no guard"], runs))
        rows.append(_summed(found))
        share = rows[-1]["throughput_with_guard"]
        print(f"{name} on the pipeline: {share:.3f} of the throughput without an attack")
    return rows


def _summed(rows: Sequence[Row]) -> Row:
    """Combine the seeds of a case: means of measurements, the worst of counted errors."""
    merged = dict(rows[0])
    for key, value in rows[0].items():
        values = [row[key] for row in rows if row[key] is not None]
        if isinstance(value, float):
            merged[key] = float(np.mean(values))
        elif key in ("fp", "fn", "rounds_to_suspect", "rounds_to_block"):
            merged[key] = max(values, default=None)
    merged["runs"] = len(rows)
    merged["runs_blocked"] = sum(row["fn"] == 0 for row in rows)
    merged["throughput_with_guard_worst"] = min(row["throughput_with_guard"] for row in rows)
    return merged


def suffix_of(defence: str) -> str:
    """Return the end of the keys of a defence's metrics."""
    return "without_guard" if defence == "no guard" else f"with_{defence.replace(' ', '_')}"


def gains(row: Row) -> Row:
    """Return the ratios of metrics with the guard to those without."""
    return {
        f"{key}_gain": row[f"{key}_with_guard"] / row[f"{key}_without_guard"]
        for key in ("throughput", "availability", "min_availability")
    }


def _row(name: str, attack: Attack, usual: PipelineRun, runs: Mapping[str, PipelineRun]) -> Row:
    offered, mean = np.quantile(usual.throughput, OFFERED_QUANTILE), usual.mean_throughput
    row: Row = {"case": name, "rate": attack.rate, "users": attack.users}
    row |= dict.fromkeys(f"throughput_{suffix_of(defence)}" for defence in DEFENCES)
    for defence, run in runs.items():
        suffix, available = suffix_of(defence), np.minimum(run.throughput / offered, 1.0)
        row[f"throughput_{suffix}"] = run.mean_throughput / mean
        row[f"min_throughput_{suffix}"] = float(run.throughput.min()) / mean
        row[f"availability_{suffix}"] = float(available.mean())
        row[f"min_availability_{suffix}"] = float(available.min())
        row[f"plan_changes_{suffix}"] = run.batches[-1].epoch - run.batches[0].epoch
    guarded = runs["guard"]
    suspected, malicious = guarded.suspected_in, guarded.load.malicious
    start = attack.start // ROUND_BATCHES
    apply_us = [
        1e6 * m.apply_s / max(requests.num_rows, 1)
        for m, requests in zip(guarded.batches, guarded.load.requests, strict=True)
    ]
    return {
        **row,
        **gains(row),
        "rounds_to_suspect": None if suspected is None else suspected - start,
        "rounds_to_block": guarded.rounds_to_block,
        "fp": max(len(run.blocked.keys() - malicious) for run in runs.values()),
        "fn": max(len(malicious - run.blocked.keys()) for d, run in runs.items() if DEFENCES[d]),
        "fold_us_per_request": float(np.median(apply_us)),
        "timeline": {
            "no attack": usual.throughput.tolist(),
            **{defence: run.throughput.tolist() for defence, run in runs.items()},
        },
    }


def measure_flood() -> dict[str, float]:
    """Measure the time to apply requests that are all refused, from the log to the dead letters.

    They come in whole blocks, or one by one in entries of two schemas, as single messages would.
    """
    names = [f"flood-{k}" for k in range(FLOOD_USERS)]
    requests = pa.table(
        {
            "op": pa.array(["register"] * FLOOD),
            "query_id": np.arange(FLOOD),
            "user_id": pa.array([names[k % FLOOD_USERS] for k in range(FLOOD)]),
            **{name: np.zeros(FLOOD) for name in ("x0", "y0", "x1", "y1")},
        }
    )
    single = [requests.slice(k, 1) for k in range(FLOOD_SINGLE)]
    mixed = [block.drop_columns(["y1"]) if k % 2 else block for k, block in enumerate(single)]
    space = Space(Rect(0.0, 0.0, 1.0, 1.0))
    with tempfile.TemporaryDirectory() as name, closing(Store(Path(name))) as store:
        guard = GuardState.begin(store, 0, 1 << 18)
        for user in names:
            send(store, GuardCommand(BLOCK, user, "flood"))
        with closing(SqliteQueryLog(Path(name) / "queries.db")) as log:
            rules = Rules(space, pa.int64(), TIMESTAMP, store_positions=True)
            queries = QuerySet(store, log, rules, guard=guard)
            guard.apply_commands(log)
            blocks = min(_apply_s(queries, log, [requests]) for _ in range(FLOODS))
            pieces = min(_apply_s(queries, log, mixed) for _ in range(FLOODS))
            assert queries.size == 0, "all requests are refused"
    return {
        "us_per_request": 1e6 * blocks / FLOOD,
        "us_per_single_request": 1e6 * pieces / FLOOD_SINGLE,
    }


def _apply_s(queries: QuerySet, log: SqliteQueryLog, blocks: Sequence[pa.Table]) -> float:
    for block in blocks:
        log.append(block)
    started = time.perf_counter()
    queries.advance(log.end())
    return time.perf_counter() - started
