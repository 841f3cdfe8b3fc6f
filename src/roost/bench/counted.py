"""A cluster of many machines whose work is counted by cell.

Nothing is matched: a point costs a fixed time, and more for each query over its cell. So 240 rounds
of many points take seconds, for any number of points, and the points of a round and the queries
are shared by all variants. The policies, plans and statistics are the real ones, with the drivers
of the simulator; a test compares the result with that of the engine's own tasks
(:mod:`roost.bench.cluster`). All machines are equal, and no message is lost.

A round takes as long as its busiest machine, which includes loading the queries of partitions that
it received. Reading, routing and the network are not included, for any strategy; the bytes that
machines send each other are counted.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Decision, NoChange, Rebalance, apply_changes, arrivals
from roost.balance.planner import imbalance
from roost.balance.strategies import initial_plan, sampled_costs
from roost.bench.cases import SIDE_SHARE, Pickups, boxes_of
from roost.bench.cluster import SECONDS_PER_CHECK, SECONDS_PER_POINT, RoundMetrics, Variant
from roost.bench.moving import (
    HISTORY_POINTS,
    HOTSPOT_SIDE,
    NORMAL_SPREAD,
    LoadHotspot,
    slot_at,
    slots_of,
)
from roost.model.arrays import Floats
from roost.model.choices import Strategy
from roost.model.space import Rect, Space
from roost.sim.policies import Network, SimulatedRound, strategy_driver
from roost.sim.scenario import STATIC, Faults, Scenario
from roost.sim.slots import PlanSlots
from roost.sim.workloads import QueryTable
from roost.workload.cells import CellCounts, query_ranges

# Deviation of the logarithm of the times that policies see, as in the simulator.
NOISE = 0.02
SECONDS_PER_QUERY_LOADED = 1e-7
BYTES_PER_POINT = 32  # identifier, time and two coordinates
BYTES_PER_QUERY = 100  # a box with its postings, which a new machine reads
POINTS, HOT_QUERIES, TIMES = 1, 2, 3


class CellDay:
    """A mean day of the city by cell: how many pickups each round's slot has in each cell."""

    def __init__(self, pickups: Pickups) -> None:
        self.pickups = pickups
        self.space = Space(Rect(*pickups.bounds))
        cells = self.space.grid.locate(pickups.lon, pickups.lat)
        self._slots = [np.unique(cells[at], return_counts=True) for at in slots_of(pickups)]

    def draw(self, slot: int, count: int, random: np.random.Generator) -> CellCounts:
        """Draw points of a slot."""
        cells, weights = self._slots[slot]
        return CellCounts(cells, random.multinomial(count, weights / weights.sum()))


@dataclass(frozen=True, eq=False)
class CountedRound:
    """One round: points by cell, and the requests before it."""

    number: int
    points: CellCounts
    queries: int  # that are live
    registered: NDArray[np.int32]
    terminated: NDArray[np.int64]  # ids, which number the registered queries


class CountedLoad:
    """Rounds of a city's day with hotspots, as :class:`roost.bench.moving.MovingLoad`, by cell."""

    def __init__(
        self,
        day: CellDay,
        queries: int,
        rounds: int,
        points: int,
        hotspots: tuple[LoadHotspot, ...] = (),
        seed: int = 0,
    ) -> None:
        self.rounds, self.points, self.queries = rounds, points, queries
        self.space = day.space
        self._day, self._hotspots, self._seed = day, hotspots, seed
        self.boxes = boxes_of(day.pickups, queries, np.random.default_rng(seed))
        self.ranges = query_ranges(self.space.grid, self.boxes)
        self._places = [_place(hotspot, self.space) for hotspot in hotspots]

    @cached_property
    def usual_cost(self) -> Floats:
        """Cost of each cell in a sample of all hours, from which static plans are made."""
        lon, lat = self._day.pickups.lon, self._day.pickups.lat
        random = np.random.default_rng(self._seed)
        at = random.choice(len(lon), min(HISTORY_POINTS, len(lon)), replace=False)
        return sampled_costs(self.space.grid, lon[at], lat[at], self.boxes)

    @cached_property
    def steps(self) -> list[CountedRound]:
        """All rounds."""
        ids: dict[int, NDArray[np.int64]] = {}
        found, known, live = [], self.queries, self.queries
        for number in range(self.rounds):
            now, before = number / self.rounds, (number - 1) / self.rounds
            registered, terminated = [np.empty((0, 4), np.int32)], [np.empty(0, np.int64)]
            for index, hotspot in enumerate(self._hotspots):
                if hotspot.active(now) and not hotspot.active(before):
                    registered.append(self._hot_ranges(index, hotspot))
                    count = len(registered[-1])
                    ids[index] = np.arange(known, known + count)
                    known, live = known + count, live + count
                elif index in ids and not hotspot.active(now):
                    terminated.append(ids.pop(index))
                    live -= len(terminated[-1])
            points = self._points(number)
            requests = np.concatenate(registered), np.concatenate(terminated)
            found.append(CountedRound(number, points, live, *requests))
        return found

    def _points(self, number: int) -> CellCounts:
        random = np.random.default_rng([self._seed, number, POINTS])
        shares = [hotspot.share_at(number / self.rounds) for hotspot in self._hotspots]
        counts = [int(share * self.points) for share in shares]
        slot = slot_at(number, self.rounds)
        parts = [self._day.draw(slot, self.points - sum(counts), random)]
        for place, count in zip(self._places, counts, strict=True):
            if count:
                parts.append(CellCounts(place.cells, random.multinomial(count, place.share)))
        table = np.zeros(self.space.grid.cells, np.int64)
        for part in parts:
            table[part.cells] += part.counts
        return CellCounts.of(table)

    def _hot_ranges(self, index: int, hotspot: LoadHotspot) -> NDArray[np.int32]:
        """Draw queries of a hotspot around points of it."""
        random = np.random.default_rng([self._seed, index, HOT_QUERIES])
        place, grid = self._places[index], self.space.grid
        count = int(self.queries * hotspot.share)
        cells = random.choice(place.cells, count, p=place.share)
        row, column = np.divmod(cells, grid.columns)
        within = random.random((2, count))
        bounds = self.space.bounds
        x = bounds.x0 + bounds.width * (column + within[0]) / grid.columns
        y = bounds.y0 + bounds.height * (row + within[1]) / grid.rows
        half_x, half_y = bounds.width * SIDE_SHARE / 2, bounds.height * SIDE_SHARE / 2
        return query_ranges(grid, np.column_stack([x - half_x, y - half_y, x + half_x, y + half_y]))


class _Place(NamedTuple):
    """The cells of a hotspot, and the share of its points in each."""

    cells: NDArray[np.int32]
    share: Floats


def _place(hotspot: LoadHotspot, space: Space) -> _Place:
    axes = []
    for low, count in zip(hotspot.corner, (space.columns, space.rows), strict=True):
        edges = np.clip((np.arange(count + 1) / count - low) / HOTSPOT_SIDE, 0.0, 1.0)
        if hotspot.normal:
            scaled = (edges - 0.5) / (NORMAL_SPREAD * math.sqrt(2.0))
            edges = np.array([math.erf(value) for value in scaled.tolist()])
        axes.append(np.diff(edges))
    weights = np.outer(axes[1], axes[0]).reshape(-1)
    cells = np.flatnonzero(weights).astype(np.int32)
    return _Place(cells, weights[cells] / weights.sum())


@dataclass(frozen=True, kw_only=True)
class CountedMetrics(RoundMetrics):
    """A round, with how busy machines and network were."""

    utilisation: float  # busy time of all machines over the time of the round
    network_bytes: float  # that machines sent each other, per second of the round
    reason: str = ""


class CountedCluster:
    """One variant on a number of machines."""

    def __init__(self, load: CountedLoad, variant: Variant, machines: int) -> None:
        grid = load.space.grid
        self._load, self._machines = load, machines
        self._table = QueryTable(grid.columns, grid.rows)
        self._table.register(load.ranges)
        strategy = variant.strategy
        first = strategy
        if strategy is Strategy.SWARM and not variant.rules.sampled_plan:
            first = Strategy.UNIFORM
        self.plan = initial_plan(first, grid, machines, load.usual_cost)
        self._slots = PlanSlots(self.plan)
        scenario = Scenario(strategy=strategy.value, machines=machines, swarm=variant.rules)
        network = Network(Faults(), np.random.default_rng(0))
        self._driver = strategy_driver(self.plan, self._table, network, scenario)
        self._static = strategy.value in STATIC
        self._load_s = np.zeros(machines)
        self._loaded = 0

    def run(self, step: CountedRound) -> CountedMetrics:
        """Run one round."""
        table, driver, plan = self._table, self._driver, self.plan
        if len(step.registered) or len(step.terminated):
            new = table.register(step.registered)
            table.end(step.terminated)
            driver.requests(new, step.terminated)
        assert int(table.live.sum()) == step.queries
        cells, counts = step.points.cells, step.points.counts
        work = counts * (SECONDS_PER_POINT + SECONDS_PER_CHECK * table.over.reshape(-1)[cells])
        busy_s = self._slots.shares(work, cells)
        all_s = busy_s + self._load_s
        batch_s = float(all_s.max())
        loaded, load_s = self._loaded, float(self._load_s.sum())
        started = time.perf_counter()
        decision = NoChange("static") if self._static else self._decide(step, busy_s)
        decision_s = time.perf_counter() - started
        self._load_s, self._loaded = np.zeros(self._machines), 0
        if isinstance(decision, Rebalance):
            self._change(decision)
        # Every machine reads an equal share of the points and sends on what is not its own.
        shuffled = 0.0 if len(plan.partitions) == 1 else 1.0 - 1.0 / self._machines
        sent = shuffled * BYTES_PER_POINT * step.points.points + driver.bytes_sent
        return CountedMetrics(
            round=step.number,
            points=step.points.points,
            queries=step.queries,
            batch_s=batch_s,
            imbalance=imbalance(busy_s),
            epoch=plan.epoch,
            partitions=len(plan.partitions),
            loaded_queries=loaded,
            load_s=load_s,
            decision_s=decision_s,
            bytes_sent=driver.bytes_sent,
            utilisation=float(all_s.mean()) / batch_s,
            network_bytes=(sent + BYTES_PER_QUERY * loaded) / batch_s,
            reason=decision.reason,
        )

    def _decide(self, step: CountedRound, busy_s: Floats) -> Decision:
        """Count the points on their machines, and decide."""
        random = np.random.default_rng([step.number, TIMES])
        seen_s = busy_s * np.exp(NOISE * random.standard_normal(self._machines))
        rate = step.points.points / float(seen_s.max())
        points = self._slots.distribute(step.points, step.number)
        view = SimulatedRound(self.plan, points, self._slots.held, seen_s, rate)
        self._driver.collect(view)
        return self._driver.decide(view)

    def _change(self, decision: Rebalance) -> None:
        """Change the plan; machines load the queries of partitions that are new to them."""
        before, self.plan = self.plan, apply_changes(self.plan, decision.changes)
        self._slots = PlanSlots(self.plan)
        bounds = {p.partition_id: p.bounds for p in self.plan.partitions}
        for machine, ids in arrivals(before, self.plan).items():
            count = int(self._table.counts(np.array([bounds[number] for number in ids])).sum())
            self._loaded += count
            self._load_s[machine] += SECONDS_PER_QUERY_LOADED * count
        self._driver.changed(decision.changes, SECONDS_PER_QUERY_LOADED if self._loaded else 0.0)
