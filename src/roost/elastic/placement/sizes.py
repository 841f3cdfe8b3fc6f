"""``algorithm_2``: how many executors each group should have, within a total (DoDo, section 7.1).

Each group is sized by its load in the latest round, because a mean over many rounds lags a ramp by
minutes. Executors that are requested count as if they were present, so that they are not requested
again. The decisions are those of the elastic manager, which carries them out.

Two slips of the printed algorithm are corrected: it acts on the last group only, and its number of
executors to remove lacks a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roost.balance.changes import NoChange
from roost.elastic.decisions import Provision, Release
from roost.elastic.placement.snapshot import ExecutorGroup, PlacementSnapshot
from roost.errors import ConfigError

SizeDecision = Provision | Release | NoChange
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Algorithm2:
    """Size all groups.

    Parameters
    ----------
    capacity
        Executors of all groups together.
    max_load, min_load
        Load of a group above and below which its size changes.
    k
        Share of ``max_load`` for which a group is sized when it shrinks.

    Raises
    ------
    ConfigError
        If a threshold is out of range.
    """

    capacity: int
    max_load: float = 0.9
    min_load: float = 0.5
    k: float = 0.67

    def __post_init__(self) -> None:
        """Check the thresholds."""
        highest = self.k * self.max_load
        for name, valid, expected in (
            ("capacity", self.capacity >= 1, "a whole number from 1 up"),
            ("max_load", self.max_load > 0.0, "a number above 0"),
            ("k", 0.0 < self.k <= 1.0, "a number above 0, at most 1"),
            # A group that shrank must not shrink again.
            ("min_load", 0.0 <= self.min_load <= highest, f"from 0 to k * max_load ({highest:g})"),
        ):
            if not valid:
                raise ConfigError(f"placement.{name}", getattr(self, name), expected)

    def decide(self, snapshot: PlacementSnapshot) -> Mapping[str, SizeDecision]:
        """Return the decision for each group; the most loaded one is served first."""
        if not snapshot.rounds:
            return {group.name: NoChange("no round is measured") for group in snapshot.groups}
        loads = {
            group.name: float(snapshot.series[snapshot.in_group(group.name)].sum(axis=0)[-1])
            for group in snapshot.groups
        }
        sizes = {group.name: _size(group) for group in snapshot.groups}
        wanted = {group.name: self._wanted(group, loads[group.name]) for group in snapshot.groups}
        ordered = sorted(
            snapshot.groups, key=lambda one: (-_load(loads[one.name], _size(one)), one.name)
        )
        free = self.capacity - sum(min(sizes[name], wanted[name]) for name in sizes)
        decided = {}
        for group in ordered:
            size, want = sizes[group.name], wanted[group.name]
            granted = want if want <= size else size + min(want - size, max(free, 0))
            free -= max(granted - size, 0)
            decided[group.name] = self._decision(group, loads[group.name], granted, want)
        return {group.name: decided[group.name] for group in snapshot.groups}

    def _wanted(self, group: ExecutorGroup, load: float) -> int:
        """Return the size for a load, never below the group's least."""
        size = _size(group)
        average = _load(load, size)
        if average > self.max_load:
            # size + size * (average - max_load) / max_load, and likewise below.
            size = math.ceil(load / self.max_load - _ROUNDING)
        elif average < self.min_load:
            size = math.ceil(load / (self.k * self.max_load) - _ROUNDING)
        return max(size, group.min)

    def _decision(
        self, group: ExecutorGroup, load: float, granted: int, wanted: int
    ) -> SizeDecision:
        size = _size(group)
        average = _load(load, size)
        reason = f"{size} executors at {average:.2f}"
        if wanted > granted:
            reason += f"; {wanted} would be needed, of {self.capacity} for all groups"
        if granted == size:
            return NoChange(reason)
        kind = Provision if granted > size else Release
        return kind(granted, load, reason)


def _size(group: ExecutorGroup) -> int:
    return group.executors + group.requested


def _load(load: float, executors: int) -> float:
    if executors:
        return load / executors
    return math.inf if load > 0.0 else 0.0
