"""A driver that changes plans at random, and random scenarios from a seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from roost.balance.changes import (
    Change,
    Decision,
    Merge,
    Move,
    NoChange,
    Rebalance,
    Replan,
    Split,
    apply_changes,
)
from roost.balance.plan import Partition, Plan
from roost.sim.policies import Network, SimulatedRound, StatisticsDriver
from roost.sim.scenario import (
    CoordinatorCrash,
    Faults,
    MachineCrash,
    Moment,
    Scenario,
    Straggler,
    TrueCosts,
)
from roost.sim.workloads import CellHotspot, LoadSpec, QueryTable

# Points are few in small runs, so each costs more: otherwise partitions would be all the work.
SMALL_COSTS = TrueCosts(2e-5, 1e-6, 1e-4, 2e-5)


class ChaosDriver(StatisticsDriver):
    """Moves, splits, merges, shares and replans at random, and maintains the statistics."""

    def __init__(
        self, plan: Plan, query_table: QueryTable, network: Network, fade: float, seed: int
    ):
        super().__init__(plan, query_table, network, fade)
        self._random = np.random.default_rng(seed)
        self.kinds: set[str] = set()

    def changed(self, changes: Sequence[Change], per_query_s: float) -> None:
        super().changed(changes, per_query_s)
        self.kinds.update(type(change).__name__ for change in changes)

    def decide(self, view: SimulatedRound) -> Decision:
        if self._random.random() < 0.1:
            return Rebalance((self._replan(view.plan),), "chaos")
        changes: list[Change] = []
        for _ in range(int(self._random.integers(0, 5))):
            plan = apply_changes(view.plan, changes)
            choice = self._random.choice([self._split, self._move, self._merge])
            change = choice(plan)
            changes.extend([change] if change else [])
        return Rebalance(tuple(changes), "chaos") if changes else NoChange("no random change")

    def _owners(self, plan: Plan) -> tuple[int, ...]:
        several = self._random.random() < 0.2
        count = int(self._random.integers(1, plan.machines + 1)) if several else 1
        return tuple(self._random.permutation(plan.machines)[:count].tolist())

    def _pick(self, plan: Plan) -> Partition:
        return plan.partitions[int(self._random.integers(len(plan.partitions)))]

    def _split(self, plan: Plan) -> Split | None:
        p = self._pick(plan)
        vertical = bool(self._random.random() < 0.5)
        low, high = (p.column0, p.column1) if vertical else (p.row0, p.row1)
        if high - low < 2:
            return None
        at = int(self._random.integers(low + 1, high))
        ids = (plan.next_id, plan.next_id + 1)
        kept = p.machines if self._random.random() < 0.5 else self._owners(plan)
        return Split(p.partition_id, vertical, at, ids, (kept, self._owners(plan)))

    def _move(self, plan: Plan) -> Move:
        return Move(self._pick(plan).partition_id, self._owners(plan))

    def _merge(self, plan: Plan) -> Merge | None:
        """Merge the partitions between two random ones if they form a rectangle."""
        for _ in range(30):
            a, b = self._pick(plan), self._pick(plan)
            inside = [
                p
                for p in plan.partitions
                if p.column0 >= a.column0
                and p.row0 >= a.row0
                and p.column1 <= b.column1
                and p.row1 <= b.row1
            ]
            area = max(b.column1 - a.column0, 0) * max(b.row1 - a.row0, 0)
            whole = len(inside) > 1 and sum(p.cells for p in inside) == area
            if whole and len({frozenset(p.machines) for p in inside}) == 1:
                ids = tuple(p.partition_id for p in inside)
                return Merge(ids, plan.next_id, inside[0].machines)
        return None

    def _replan(self, plan: Plan) -> Replan:
        rects = [(0, 0, plan.columns, plan.rows)]
        for _ in range(int(self._random.integers(2 * plan.machines))):
            c0, r0, c1, r1 = rects.pop(int(self._random.integers(len(rects))))
            if c1 - c0 > 1 and (r1 - r0 < 2 or self._random.random() < 0.5):
                at = int(self._random.integers(c0 + 1, c1))
                rects += [(c0, r0, at, r1), (at, r0, c1, r1)]
            elif r1 - r0 > 1:
                at = int(self._random.integers(r0 + 1, r1))
                rects += [(c0, r0, c1, at), (c0, at, c1, r1)]
            else:
                rects.append((c0, r0, c1, r1))
        old = {(p.column0, p.row0, p.column1, p.row1): p for p in plan.partitions}
        parts = []
        for number, rect in enumerate(rects):
            if rect in old:
                was = old[rect]
                parts.append(Partition(was.partition_id, *rect, self._owners(plan), was.parents))
                continue
            c0, r0, c1, r1 = rect
            parents = tuple(
                p.partition_id
                for p in plan.partitions
                if p.column0 < c1 and p.column1 > c0 and p.row0 < r1 and p.row1 > r0
            )
            parts.append(Partition(plan.next_id + number, *rect, self._owners(plan), parents))
        return Replan(tuple(parts))


def random_faults(random: np.random.Generator, machines: int, rounds: int) -> Faults:
    """Draw random faults of every kind."""

    def some() -> Iterable[int]:
        return range(int(random.integers(0, 3)))

    def moment() -> Moment:
        return list(Moment)[int(random.integers(3))]

    def straggler() -> Straggler:
        start = int(random.integers(rounds))
        length = int(random.integers(1, rounds))
        factor = 1.0 + 4.0 * float(random.random())
        return Straggler(int(random.integers(machines)), start, start + length, factor)

    return Faults(
        tuple(straggler() for _ in some()),
        tuple(
            MachineCrash(int(random.integers(machines)), int(random.integers(rounds)))
            for _ in some()
        ),
        tuple(CoordinatorCrash(int(random.integers(rounds)), moment()) for _ in some()),
        float(random.choice([0.0, 0.1, 0.4])),
        float(random.choice([0.0, 0.1, 0.4])),
    )


def drawn_scenario(seed: int, strategy: str, rounds: int = 25) -> Scenario:
    """Draw a scenario that is small enough for brute-force checks."""
    random = np.random.default_rng([seed, 77])
    columns, rows = (int(side) for side in random.integers(3, 15, 2))
    machines = int(random.integers(1, 8))

    def spot() -> CellHotspot:
        start = int(random.integers(rounds))
        return CellHotspot(
            (float(random.random()), float(random.random())),
            start,
            start + int(random.integers(1, rounds)),
            share=float(random.choice([0.1, 0.3])),
            side=float(random.choice([0.01, 0.15, 0.4])),
            spread="normal" if random.random() < 0.5 else "uniform",
            intensity="normal" if random.random() < 0.5 else "step",
            queries=int(random.integers(0, 40)),
        )

    load = LoadSpec(
        points_per_round=int(random.choice([50, 1_000, 20_000])),
        queries=int(random.integers(0, 80)),
        query_side=float(random.choice([0.01, 0.2, 0.8])),
        towns=int(random.choice([0, 3, 10])),
        churn=int(random.integers(0, 8)),
        hotspots=tuple(spot() for _ in range(int(random.integers(0, 3)))),
        swing=float(random.choice([0.0, 0.0, 0.3])),
    )
    return Scenario(
        strategy=strategy,
        machines=machines,
        columns=columns,
        rows=rows,
        rounds=rounds,
        seed=seed,
        load=load,
        faults=random_faults(random, machines, rounds),
        costs=SMALL_COSTS,
        initial=str(random.choice(["uniform", "history", "replicated"])),
        utilisation=float(random.choice([0.5, 0.9, 1.5])),
        fade=float(random.choice([0.0, 0.5, 1.0])),
        check=True,
    )
