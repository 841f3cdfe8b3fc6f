"""Assigning buckets to machines: what a machine should have, and maps that come near to it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.dataflow.balancing.loads import SubqueryLoad, machine_loads
from roost.model.arrays import Floats, Ints

# Machines are relieved until they are within this of what they should have. Buckets are smaller
# than the partitions of a plan, so this can be less than the slack of the global planner.
SLACK = 0.01
# Least level, as a share of the mean, where all load is in a few buckets.
LEVEL_MIN = 0.01
# Weight of load that is given away beyond the excess.
WASTE = 0.5
# Machines with the least load that exchange buckets with an overloaded one.
PARTNERS = 2
# Exchanges for each machine; a limit on the time.
EXCHANGES = 2


@dataclass(frozen=True)
class RoundView:
    """The load of each bucket in a round, and what a machine should have.

    ``level`` is the load of a machine without a bucket that is too heavy, if the load was divided
    evenly. A machine should have ``level``, or its heaviest bucket or its fixed ones if these are
    more.
    """

    cost: Floats
    fixed: Floats  # load of each machine that cannot move
    level: float

    @classmethod
    def of(cls, load: SubqueryLoad, cost: Floats) -> RoundView:
        """Compute the level: what is too heavy for an even division has a machine of its own."""
        stay, machines = ~load.movable, load.machines
        fixed = machine_loads(load.owners[stay], cost[stay], max(machines, load.map.machines))
        heaviest = -np.sort(-np.concatenate([cost[~stay], fixed]))[: machines - 1]
        # Rounding may leave less than nothing.
        left = np.maximum(float(cost.sum()) - np.concatenate([[0.0], heaviest.cumsum()]), 0.0)
        levels = left / np.arange(machines, machines - left.size, -1)
        # The first level that the next heaviest does not exceed.
        above = np.flatnonzero(np.append(heaviest, 0.0) <= levels)
        level = max(float(levels[above[0]]), LEVEL_MIN * float(levels[0]))
        return cls(cost, fixed[:machines], level)

    @property
    def total(self) -> float:
        """Load of all machines."""
        return float(self.cost.sum())

    def scaled(self, total: float) -> RoundView:
        """Return the round as if it had another total."""
        factor = total / self.total
        return RoundView(self.cost * factor, self.fixed * factor, self.level * factor)

    def loads(self, owners: Ints) -> Floats:
        """Return the load of each machine."""
        return machine_loads(owners, self.cost, self.fixed.size)

    def shares(self, owners: Ints) -> Floats:
        """Return what each machine should have."""
        heaviest = np.zeros(self.fixed.size)
        np.maximum.at(heaviest, owners, self.cost)
        return np.maximum(np.maximum(heaviest, self.fixed), self.level)

    def busiest(self, owners: Ints) -> float:
        """Return the level and the largest excess of a machine over what it should have."""
        excess = self.loads(owners) - self.shares(owners)
        return self.level + max(float(excess.max()), 0.0)

    def overload(self, owners: Ints) -> float:
        """Return :meth:`busiest` as a multiple of the level."""
        return self.busiest(owners) / self.level


def relieved(load: SubqueryLoad, view: RoundView, owners: Ints) -> Ints:
    """Return a map in which overloaded machines have given away what they should not have."""
    relief = _Relief(load, view, owners)
    relief.shed()
    relief.exchange(EXCHANGES * load.machines)
    relief.restore()
    return relief.owners


def packed(load: SubqueryLoad, view: RoundView, owners: Ints) -> Ints:
    """Pack all buckets, the heaviest first; machines retain as much as possible of what they own.

    Buckets without load keep their owners.
    """
    cost, machines = view.cost, load.machines
    loaded = np.flatnonzero(load.movable & (cost > 0.0))
    groups = _dealt(cost[loaded], view.fixed)
    kept = np.zeros((machines, machines))
    np.add.at(kept, (groups, owners[loaded]), load.move_s[loaded] + cost[loaded])
    found = owners.copy()
    found[loaded] = _named(kept, view.fixed > 0.0)[groups]
    return found


def _dealt(cost: Floats, loads: Floats) -> Ints:
    """Deal items to machines that have some load already: heaviest item to lowest load."""
    heap = [(float(own), machine) for machine, own in enumerate(loads)]
    heapq.heapify(heap)
    found = np.zeros(cost.size, np.int64)
    order = np.argsort(-cost, kind="stable")
    for place, own in zip(order.tolist(), cost[order].tolist(), strict=True):
        least, machine = heap[0]
        found[place] = machine
        heapq.heapreplace(heap, (least + own, machine))
    return found


def _named(kept: Floats, bound: NDArray[np.bool_]) -> Ints:
    """Assign groups to machines, the pair that retains most first; a bound group has its own."""
    names = np.where(bound, np.arange(bound.size), -1)
    taken = bound.copy()
    groups, machines = np.unravel_index(np.argsort(-kept, axis=None, kind="stable"), kept.shape)
    for group, machine in zip(groups.tolist(), machines.tolist(), strict=True):
        if names[group] < 0 and not taken[machine]:
            names[group], taken[machine] = machine, True
    return names


class _Relief:
    """A map while machines are relieved."""

    def __init__(self, load: SubqueryLoad, view: RoundView, owners: Ints) -> None:
        self._view, self._cost = view, view.cost
        self._home = load.owners
        self._movable = load.movable & (view.cost > 0.0)
        # Each move costs something beside the state, so of equal choices fewer moves are better.
        self._move_s = load.move_s + max(float(load.move_s.mean()), 1e-9)
        self.owners = owners.copy()
        self._loads = view.loads(owners)
        self._limit = view.level * (1.0 + SLACK)

    def _excess(self) -> Floats:
        return self._loads - self._view.shares(self.owners) * (1.0 + SLACK)

    def shed(self) -> None:
        """Deal what overloaded machines should not have, the most load for its cost first."""
        given: list[int] = []
        excess = self._excess()
        for machine in np.flatnonzero(excess > 0.0).tolist():
            given += self._given(machine, float(excess[machine]))
        if given:
            buckets = np.asarray(given)
            own = self._cost[buckets]
            np.subtract.at(self._loads, self.owners[buckets], own)
            self.owners[buckets] = _dealt(own, self._loads)
            self._loads = self._view.loads(self.owners)

    def _given(self, machine: int, excess: float) -> list[int]:
        """Return buckets that a machine gives away, the most relief for its cost first."""
        mine = np.flatnonzero((self.owners == machine) & self._movable)
        cost = self._cost[mine]
        if cost.size and cost.max() >= self._view.level:
            # A bucket that is too heavy for any machine is as well off here as anywhere.
            mine = np.delete(mine, cost.argmax())
            cost = self._cost[mine]
        price = self._price(mine)
        found: list[int] = []
        while excess > 0.0 and mine.size:
            # Giving away more than the excess makes work for other machines.
            useful = np.minimum(cost, excess) - WASTE * np.maximum(cost - excess, 0.0)
            place = int((useful / price).argmax())
            if useful[place] <= 0.0:
                break
            found.append(int(mine[place]))
            excess -= float(cost[place])
            cost[place] = 0.0
        return found

    def exchange(self, steps: int) -> None:
        """Move or exchange buckets of the most overloaded machine as long as it relieves it."""
        stuck = np.zeros(self._loads.size, np.bool_)
        for _ in range(steps):
            excess = self._excess()
            excess[stuck] = 0.0
            machine = int(excess.argmax())
            if excess[machine] <= 0.0:
                return
            step = self._best_step(machine, float(excess[machine]))
            stuck[machine] = not step
            for bucket, target in step:
                self._assign(bucket, target)

    def _assign(self, bucket: int, target: int) -> None:
        own = self._cost[bucket]
        self._loads[self.owners[bucket]] -= own
        self._loads[target] += own
        self.owners[bucket] = target

    def _best_step(self, machine: int, excess: float) -> list[tuple[int, int]]:
        """Return the moves that relieve most for their cost.

        If all of them overload another machine as much, return those that even out most.
        """
        mine = np.flatnonzero((self.owners == machine) & self._movable)
        partners = np.argsort(self._loads, kind="stable")[:PARTNERS]
        partners = partners[self._loads[partners] < self._loads[machine]]
        if not mine.size or not partners.size:
            return []
        near = np.zeros(self._loads.size, np.bool_)
        near[partners] = True
        theirs = np.flatnonzero(near[self.owners] & self._movable)
        # One column for each bucket that may come in return; the first column is "none".
        targets = np.concatenate([partners[:1], self.owners[theirs]])
        given = self._cost[mine][:, None] - np.concatenate([[0.0], self._cost[theirs]])
        price = self._price(mine)[:, None] + np.concatenate([[0.0], self._price(theirs)])
        least = self._loads[targets]
        evened = given * (self._loads[machine] - least - given)
        useful = np.minimum(given, excess) - np.maximum(least + given - self._limit, 0.0)
        useful[evened <= 0.0] = 0.0
        found = useful / price if useful.max() > 0.0 else evened
        place = int(found.argmax())
        if evened.flat[place] <= 1e-12 * self._limit**2:
            return []
        row, column = divmod(place, targets.size)
        step = [(int(mine[row]), int(targets[column]))]
        return step if column == 0 else [*step, (int(theirs[column - 1]), machine)]

    def _price(self, buckets: Ints) -> Floats:
        """Return the cost of moving buckets; one that has moved already costs nothing more."""
        return np.where(self.owners[buckets] == self._home[buckets], self._move_s[buckets], 1e-12)

    def restore(self) -> None:
        """Return buckets to machines that have the capacity after all, expensive ones first."""
        moved = np.flatnonzero((self.owners != self._home) & self._movable)
        moved = moved[self._home[moved] < self._loads.size]
        for bucket in moved[np.argsort(-self._move_s[moved], kind="stable")].tolist():
            home = int(self._home[bucket])
            if self._loads[home] + self._cost[bucket] <= self._limit:
                self._assign(bucket, home)
