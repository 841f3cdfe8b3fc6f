"""Attacks on the engine's own pipeline, for ``roost bench guard``.

Users and attacks are those of the simulator (``sim/guarded_cases.py``), on the pickups of a city;
query log, gate, fold, matching, balancer, sensor and detector are the engine's, machine after
machine in one process (``cluster.py``). A batch is a round of the balancer, and four of them a
round of detection.

A batch takes as long as its slowest machine, by what the machine did: points, candidate pairs,
and queries loaded. Measured by the clock of a shared host, machines that do the same differ by a
third from batch to batch. Either way it matters as much as an attack does how many ended queries
are still in the index: they go when their segment is merged. The driver's fold is measured by the
clock and by itself: as time a request, and once more in a flood of requests that are all refused.

Throughput is how many points a second the cluster could take. What it is offered is what a run
without an attack can take in all but the slowest twentieth of its batches, and availability is how
much of that a batch can take. Rounds to the block count from the one in which the attack turns to
its second target: the second hotspot can only come later.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.bench.cases import Pickups, data_dir, load_pickups
from roost.bench.cluster import (
    BatchFigures,
    EmulatedCluster,
    GuardOptions,
    WorkRates,
    register,
)
from roost.bench.moving import Step
from roost.model.choices import Strategy
from roost.model.schemas import TIMESTAMP
from roost.model.space import Rect, Space
from roost.queries.admission import Rules
from roost.queries.guard_state import BLOCK, GuardCommand, GuardState, send
from roost.queries.live import QuerySet
from roost.queries.log import SqliteQueryLog
from roost.sim.attack import World
from roost.sim.guarded_cases import RATES, attacked, case_seed, paper_attacks, peace
from roost.sim.parties import Attack, Party
from roost.storage.store import Store

MACHINES = 22
TICK_S = 15
ROUND_BATCHES = 4
SAMPLE = 20_000
HISTORY_QUERIES = 200_000
OFFERED_QUANTILE = 0.05
FLOOD, FLOODS, FLOOD_USERS, FLOOD_SINGLE = 200_000, 3, 10, 500
HOT_SIDE, HOT_SHARE, HOT_ROUNDS, HOTSPOTS = 0.05, 0.08, 20, 2
DEFENCES: dict[str, GuardOptions | None] = {
    "no guard": None,
    "guard": GuardOptions(round_batches=ROUND_BATCHES),
    "eviction": GuardOptions(round_batches=ROUND_BATCHES, evict=True),
    "quarantine": GuardOptions(round_batches=ROUND_BATCHES, quarantine=True),
}


@dataclass(frozen=True)
class Size:
    """How much is run.

    Parameters
    ----------
    rounds, points
        Batches, and points in each.
    start
        Batch with which attacks begin.
    scale
        Part of the dissertation's queries and rates.
    cases
        Defences by attack.
    """

    rounds: int
    points: int
    start: int
    scale: float
    cases: Mapping[str, Sequence[str]]


MAIN = ("no guard", "guard")
FULL = Size(28, 100_000, 4, 1.0, {f"{RATES[-1]}/s": tuple(DEFENCES)})
QUICK = Size(24, 60_000, 4, 0.1, {f"{RATES[-1]}/s": MAIN})

Floats = NDArray[np.float64]


class GuardLoad:
    """A city's points, and users before them.

    Parameters
    ----------
    pickups
        The city.
    parties
        Who requests.
    rounds, points
        How many rounds, and points in each.
    seed
        Where all chance comes from.
    """

    def __init__(
        self, pickups: Pickups, parties: Sequence[Party], rounds: int, points: int, seed: int
    ) -> None:
        self.space = Space(Rect(*pickups.bounds))
        self.rounds, self.points = rounds, points
        self._pickups, self._seed = pickups, seed
        random = np.random.default_rng([seed, 1])
        self._spots = random.random((HOTSPOTS, 2)) * (1 - HOT_SIDE)
        self._begins = random.integers(ROUND_BATCHES, rounds, HOTSPOTS)
        self.world = World(parties, self._sample(), seed, TICK_S)
        bounds = self.space.bounds
        begun = self.world.begin()
        self._standing = begun.table(self.world.names, bounds, numbered=True)
        self.live = [len(begun)]
        self._requests = []
        for _ in range(rounds):
            requests = self.world.next()
            self._requests.append(requests.table(self.world.names, bounds, numbered=True))
            self.live.append(self.live[-1] + int(2 * requests.registers.sum() - len(requests)))
        found = (t for party in parties if isinstance(party, Attack) for t in party.targets)
        self.targets = [tick for tick, _ in found]

    @property
    def batch_us(self) -> int:
        """Event time of a round."""
        return TICK_S * 1_000_000

    @property
    def sent(self) -> list[int]:
        """Requests of each round."""
        return [block.num_rows for block in self._requests]

    @property
    def malicious(self) -> frozenset[str]:
        """Names of attackers."""
        return frozenset(np.array(self.world.names)[self.world.malicious].tolist())

    def _sample(self) -> Floats:
        """Places of pickups in the unit square."""
        x, y = self._drawn()
        b = self.space.bounds
        places = np.column_stack([(x - b.x0) / b.width, (y - b.y0) / b.height])
        inside = ((places >= 0.0) & (places <= 1.0)).all(axis=1)
        sample: Floats = places[inside][:SAMPLE]
        return sample

    def standing(self) -> pa.Table:
        """Return requests for the queries that are there before the first round."""
        return self._standing

    def history(self) -> tuple[Floats, Floats, Floats]:
        """Sample that a plan may learn from."""
        corners = [self._standing[name].to_numpy() for name in ("x0", "y0", "x1", "y1")]
        return *self._drawn(), np.column_stack(corners)[:HISTORY_QUERIES]

    def _drawn(self) -> tuple[Floats, Floats]:
        random = np.random.default_rng([self._seed, 2])
        at = random.integers(0, len(self._pickups.lon), HISTORY_QUERIES)
        return self._pickups.lon[at], self._pickups.lat[at]

    def step(self, number: int) -> Step:
        """Make one round."""
        random = np.random.default_rng([self._seed, 3, number])
        at = random.integers(0, len(self._pickups.lon), self.points)
        x, y = self._pickups.lon[at].copy(), self._pickups.lat[at].copy()
        bounds = self.space.bounds
        for place, begin in zip(self._spots, self._begins, strict=True):
            if begin <= number < begin + HOT_ROUNDS:
                hot = random.choice(self.points, int(HOT_SHARE * self.points), replace=False)
                parts = place + HOT_SIDE * random.random((len(hot), 2))
                x[hot] = bounds.x0 + bounds.width * parts[:, 0]
                y[hot] = bounds.y0 + bounds.height * parts[:, 1]
        first = number * self.points
        stamps = number * self.batch_us + np.arange(self.points) * (self.batch_us // self.points)
        table = pa.table(
            {
                "id": first + np.arange(self.points),
                "event_time": pa.array(stamps).cast(TIMESTAMP),
                "lon": x,
                "lat": y,
            }
        )
        return Step(table, self._requests[number], self.live[number + 1], 0.0)


@dataclass(frozen=True)
class PipelineRun:
    """What a run on the pipeline came to."""

    figures: list[BatchFigures]
    log: list[dict[str, Any]]
    malicious: frozenset[str]
    targets: list[int]
    requests: list[int]

    @property
    def seconds(self) -> Floats:
        """Time of each batch."""
        return np.array([f.batch_s for f in self.figures])

    @property
    def throughput(self) -> Floats:
        """Points a second that each batch could take."""
        return np.array([f.points for f in self.figures]) / self.seconds

    @property
    def mean_throughput(self) -> float:
        """Points a second over the whole run."""
        return float(sum(f.points for f in self.figures) / self.seconds.sum())

    @property
    def blocked(self) -> dict[str, int]:
        """Round of detection in which users were blocked."""
        blocks = [row for row in self.log if row["decision"] == "block"]
        return {user: row["round"] for row in blocks for user in row["users"]}

    @property
    def suspected_in(self) -> int | None:
        """Round of detection in which an attacker was first suspected."""
        rounds = [
            row["round"]
            for row in self.log
            if row["decision"] in ("suspect", "block") and self.malicious & set(row["users"])
        ]
        return min(rounds, default=None)

    @property
    def rounds_to_block(self) -> int | None:
        """Rounds of detection from the second target to the last block; None if one is left."""
        blocked = self.blocked
        if not self.malicious or not self.malicious <= blocked.keys() or len(self.targets) < 2:
            return None
        last = max(blocked[user] for user in self.malicious)
        return max(last - self.targets[1] // ROUND_BATCHES, 0)


def run_load(
    folder: Path, base: Path, load: GuardLoad, options: GuardOptions | None
) -> PipelineRun:
    """Run a load from its first round to its last."""
    with closing(
        EmulatedCluster(folder, base, Strategy.GLOBAL, MACHINES, load, options, WorkRates())
    ) as cluster:
        figures = [cluster.run(load.step(number)) for number in range(load.rounds)]
        log = cluster.decisions()
    return PipelineRun(figures, log, load.malicious, load.targets, load.sent)


def run_case(
    pickups: Pickups, parties: Sequence[Party], size: Size, defences: Sequence[str], seed: int
) -> dict[str, PipelineRun]:
    """Run users with some defences; what they ask for is the same."""
    load = GuardLoad(pickups, parties, size.rounds, size.points, seed)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        register(base, load)
        for defence in defences:
            folder = Path(name) / "run"
            found[defence] = run_load(folder, base, load, DEFENCES[defence])
            shutil.rmtree(folder)
    return found


def measure_pipeline(size: Size, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Measure attacks on the pipeline; the rows look as the simulator's."""
    pickups = load_pickups(data_dir())
    peaceful = {
        seed: run_case(pickups, peace(size.scale), size, MAIN[:1], case_seed("peace", seed))
        for seed in seeds
    }
    rows = []
    for name, defences in size.cases.items():
        attack = replace(paper_attacks()[name], start=size.start)
        found = []
        for seed in seeds:
            users = attacked(attack, size.scale)
            runs = run_case(pickups, users, size, defences, case_seed(name, seed))
            found.append(_row(name, attack, peaceful[seed]["no guard"], runs))
        rows.append(_summed(found))
        kept = rows[-1]["throughput_with_guard"]
        print(f"{name} on the pipeline: {kept:.3f} of no attack with Guard")
    return rows


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the seeds of a case: means, the worst where something must never happen."""
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


def _row(
    name: str, attack: Attack, usual: PipelineRun, runs: Mapping[str, PipelineRun]
) -> dict[str, Any]:
    """Sum up a case."""
    offered = float(np.quantile(usual.throughput, OFFERED_QUANTILE))
    share = {how: run.mean_throughput / usual.mean_throughput for how, run in runs.items()}
    available = {how: np.minimum(run.throughput / offered, 1.0) for how, run in runs.items()}
    off, on = available["no guard"], available["guard"]
    guarded = runs["guard"]
    start = attack.start // ROUND_BATCHES
    suspected = guarded.suspected_in
    fold_us = [
        1e6 * f.fold_s / max(requests, 1)
        for f, requests in zip(guarded.figures, guarded.requests, strict=True)
    ]
    return {
        "case": name,
        "rate": attack.rate,
        "users": attack.users,
        "throughput_gain": share["guard"] / share["no guard"],
        "throughput_without_guard": share["no guard"],
        "throughput_with_guard": share["guard"],
        "throughput_with_eviction": share.get("eviction"),
        "throughput_with_quarantine": share.get("quarantine"),
        "min_throughput_without_guard": _least(runs["no guard"], usual),
        "min_throughput_with_guard": _least(guarded, usual),
        "availability_gain": float(on.mean() / off.mean()),
        "availability_without_guard": float(off.mean()),
        "availability_with_guard": float(on.mean()),
        "min_availability_gain": float(on.min() / off.min()),
        "rounds_to_suspect": None if suspected is None else suspected - start,
        "rounds_to_block": guarded.rounds_to_block,
        "fp": max(len(run.blocked.keys() - run.malicious) for run in runs.values()),
        "fn": max(
            len(run.malicious - run.blocked.keys())
            for how, run in runs.items()
            if how != "no guard"
        ),
        "fold_us_per_request": float(np.median(fold_us)),
        "plan_changes_without_guard": _changes(runs["no guard"]),
        "plan_changes_with_guard": _changes(guarded),
        "timeline": {
            "no attack": usual.throughput.tolist(),
            **{how: run.throughput.tolist() for how, run in runs.items()},
        },
    }


def measure_flood() -> dict[str, float]:
    """Time the fold of requests that are all refused, from the log to the dead letters.

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
        keeper = GuardState.begin(store, 0, 1 << 18)
        for user in names:
            send(store, GuardCommand(BLOCK, user, "flood"))
        with closing(SqliteQueryLog(Path(name) / "queries.db")) as log:
            rules = Rules(space, pa.int64(), TIMESTAMP, keep_born=True)
            queries = QuerySet(store, log, rules, guard=keeper)
            keeper.apply_commands(log)
            blocks = min(_folded(queries, log, [requests]) for _ in range(FLOODS))
            pieces = min(_folded(queries, log, mixed) for _ in range(FLOODS))
            assert queries.size == 0, "everything was refused"
    return {
        "us_per_request": 1e6 * blocks / FLOOD,
        "us_per_single_request": 1e6 * pieces / FLOOD_SINGLE,
    }


def _folded(queries: QuerySet, log: SqliteQueryLog, blocks: Sequence[pa.Table]) -> float:
    """Seconds that the fold of some entries takes."""
    for block in blocks:
        log.append(block)
    started = time.perf_counter()
    queries.advance(log.end())
    return time.perf_counter() - started


def _least(run: PipelineRun, usual: PipelineRun) -> float:
    """Throughput of the slowest batch, as a part of the usual mean."""
    return float(run.throughput.min() / usual.mean_throughput)


def _changes(run: PipelineRun) -> int:
    return run.figures[-1].epoch - run.figures[0].epoch
