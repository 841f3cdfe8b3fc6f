"""The policy ``best``: the mapping whose most loaded group has the lowest load.

All mappings are compared if there are few, otherwise those that a local search finds from the
present mapping and from the static one. Among mappings with equal highest loads, it prefers groups
whose loads rise and fall together, so that they stay balanced, and then those that move less state.

A new mapping is worth a change only if it is better than the present one by more than the noise of
the measured rounds, so a steady load cannot make it oscillate between two equally good ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from roost.balance.changes import NoChange
from roost.elastic.placement.pairs import Static
from roost.elastic.placement.snapshot import (
    ROUNDS_MIN,
    OperatorMove,
    Place,
    PlacementDecision,
    PlacementSnapshot,
    correlation,
)
from roost.model.arrays import Floats, Ints

FEW = 20_000  # mappings that are enumerated
_EQUAL = 1e-3  # loads that differ by less are equal
_DEVIATIONS = 3.0  # of the mean improvement, that it must exceed
_RESOLUTION = 2  # digits of a correlation that count


@dataclass(frozen=True)
class Best:
    """Find the best mapping, and change to it if that is worth it.

    Parameters
    ----------
    improvement
        Least reduction of the highest load.
    overload
        Highest load above which a reduction by ``least`` suffices.
    few
        Number of mappings up to which all are compared.
    """

    improvement: float = 0.05
    overload: float = 0.9
    least: float = 0.01
    few: int = FEW

    def decide(self, snapshot: PlacementSnapshot) -> PlacementDecision:
        """Compare the present mapping with the best one."""
        if snapshot.rounds < ROUNDS_MIN:
            return NoChange(f"{snapshot.rounds} of {ROUNDS_MIN} rounds are measured")
        names = [group.name for group in snapshot.groups]
        placed = [snapshot.mapping.get(one.name) for one in snapshot.operators]
        if None in placed:
            return Static().decide(snapshot)
        now = np.array([names.index(str(group)) for group in placed], np.int64)
        search = _Search(snapshot, now)
        found = search.enumerated() if search.count <= self.few else search.local()
        before, after = search.highest(now), search.highest(found)
        gained = np.array(search.by_round(now)) - np.array(search.by_round(found))
        reason = f"the highest load falls from {before:.2f} to {after:.2f}"
        least = self.least if before > self.overload else self.improvement
        error = float(np.nan_to_num(gained.std(ddof=1))) / math.sqrt(gained.size)
        if not before - after > max(least, _DEVIATIONS * error):
            return NoChange(f"{reason}, which is not worth a change")
        moves = tuple(
            OperatorMove(one.name, names[old], names[new])
            for one, old, new in zip(snapshot.operators, now, found, strict=True)
            if old != new
        )
        return Place(moves, reason)


class _Search:
    """Mappings of a snapshot, as the number of the group of each operator."""

    def __init__(self, snapshot: PlacementSnapshot, now: Ints) -> None:
        self._snapshot, self._now = snapshot, now
        self._means = snapshot.series.mean(axis=1)
        # A group without executors has no room.
        self._capacities = np.maximum(snapshot.capacities, 1e-9)
        self._groups = len(snapshot.groups)
        self.count = float(self._groups) ** now.size

    def loads(self, mappings: Ints) -> Floats:
        """Return the mean load of each group, by mapping."""
        sums = [(mappings == g) @ self._means for g in range(self._groups)]
        return np.asarray(np.stack(sums, axis=-1) / self._capacities)

    def highest(self, mapping: Ints) -> float:
        """Return the load of the most loaded group."""
        return float(self.loads(mapping).max())

    def by_round(self, mapping: Ints) -> Floats:
        """Return the load of the group that is most loaded on average, by round."""
        return np.asarray(self._series(mapping)[int(self.loads(mapping).argmax())])

    def _series(self, mapping: Ints) -> list[Floats]:
        series = self._snapshot.series
        sums = [series[mapping == g].sum(axis=0) for g in range(self._groups)]
        return [one / n for one, n in zip(sums, self._capacities, strict=True)]

    def _rank(self, mapping: Ints) -> tuple[float, float, tuple[int, ...]]:
        """Order mappings with the same highest load: by correlation, then by state moved."""
        series = self._series(mapping)
        together = sum(correlation(a, b) for a, b in itertools.combinations(series, 2))
        moved = (mapping != self._now).nonzero()[0].tolist()
        state = sum(self._snapshot.operators[k].state_bytes for k in moved)
        return -round(together, _RESOLUTION), state + len(moved), tuple(mapping.tolist())

    def enumerated(self) -> Ints:
        """Return the best of all mappings."""
        digits = self._groups ** np.arange(self._now.size)
        mappings = np.arange(int(self.count))[:, np.newaxis] // digits % self._groups
        highest = self.loads(mappings).max(axis=1)
        equal = mappings[highest <= highest.min() + _EQUAL]
        return min(equal, key=self._rank)

    def local(self) -> Ints:
        """Return the best mapping that single moves and exchanges lead to."""
        placed = Static().decide(PlacementSnapshot(self._snapshot.operators, self._snapshot.groups))
        names = [group.name for group in self._snapshot.groups]
        start = self._now.copy()
        if isinstance(placed, Place):
            groups = {move.operator: names.index(move.after) for move in placed.moves}
            start = np.array([groups[one.name] for one in self._snapshot.operators], np.int64)
        found = [self._descend(self._now), self._descend(start)]
        least = min(self.highest(one) for one in found)
        return min((one for one in found if self.highest(one) <= least + _EQUAL), key=self._rank)

    def _descend(self, mapping: Ints) -> Ints:
        """Take the best neighbour as long as it lowers the sorted loads of the groups."""
        while True:
            neighbours = self._neighbours(mapping)
            if not len(neighbours):
                return mapping
            loads = -np.sort(-self.loads(neighbours), axis=1)
            best = int(np.lexsort(loads.T[::-1])[0])
            before = -np.sort(-self.loads(mapping))
            differ = np.flatnonzero(np.abs(loads[best] - before) > _EQUAL)
            if not differ.size or loads[best][differ[0]] > before[differ[0]]:
                return mapping
            mapping = neighbours[best]

    def _neighbours(self, mapping: Ints) -> Ints:
        """Return the mappings that differ by one move, or by an exchange of two operators."""
        found = []
        for k, group in enumerate(mapping.tolist()):
            for other in range(self._groups):
                if other != group:
                    found.append(_with(mapping, {k: other}))
            for j in range(k):
                if mapping[j] != group:
                    found.append(_with(mapping, {k: int(mapping[j]), j: group}))
        return np.array(found, np.int64).reshape(len(found), mapping.size)


def _with(mapping: Ints, changes: dict[int, int]) -> Ints:
    changed = mapping.copy()
    changed[list(changes)] = list(changes.values())
    return changed
