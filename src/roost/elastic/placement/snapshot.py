"""What a placement policy sees of operators and executor groups, and what it decides.

An operator is a subquery of a dataflow; sources are not placed, so they are in no snapshot. The
load of an operator is the number of executors that it would keep busy: the rows offered to it in a
second, times the seconds of a row. It is not capped by what its group can process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from roost.balance.changes import NoChange
from roost.errors import ConfigError
from roost.model.arrays import Floats

ROUNDS = 12  # of the load series
ROUNDS_MIN = 3  # below which nothing is decided: two rounds always correlate
_FLAT = 1e-9  # a deviation below this share of the mean is rounding


@dataclass(frozen=True, slots=True)
class OperatorLoad:
    """An operator's load in executors by round, oldest first, and the bytes of its state."""

    name: str
    series: tuple[float, ...]
    state_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ExecutorGroup:
    """Executors of one kind: those present, those requested, and the least that it should have."""

    name: str
    executors: int
    requested: int = 0
    min: int = 1

    def __post_init__(self) -> None:
        """Check the counts."""
        for name, low in (("executors", 0), ("requested", 0), ("min", 1)):
            value = getattr(self, name)
            if value < low:
                key = f"group {self.name!r}: {name}"
                raise ConfigError(key, value, f"a whole number from {low} up")


@dataclass(frozen=True)
class PlacementSnapshot:
    """Operators and groups at the end of a round; ``mapping`` has the group of each operator.

    Operators that are not in the mapping have no group yet.

    Raises
    ------
    ConfigError
        If a name is given twice, series differ in length, or the mapping names an unknown operator
        or group.
    """

    operators: tuple[OperatorLoad, ...]
    groups: tuple[ExecutorGroup, ...]
    mapping: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check names and lengths."""
        operators, groups = ([one.name for one in some] for some in (self.operators, self.groups))
        for key, names in (("operators", operators), ("groups", groups)):
            if len(set(names)) < len(names):
                raise ConfigError(f"placement.{key}", ", ".join(names), "different names")
        if not groups:
            raise ConfigError("placement.groups", "no group", "at least one group")
        for operator, group in self.mapping.items():
            if operator not in operators or group not in groups:
                got = f"{operator!r} in {group!r}"
                known = f"operators {', '.join(operators)} in groups {', '.join(groups)}"
                raise ConfigError("placement.mapping", got, known)
        if len({len(one.series) for one in self.operators}) > 1:
            lengths = ", ".join(f"{one.name}: {len(one.series)}" for one in self.operators)
            raise ConfigError("placement.series", lengths, "series of one length")

    @cached_property
    def series(self) -> Floats:
        """Loads by operator and round."""
        return np.array([one.series for one in self.operators], np.float64).reshape(
            len(self.operators), self.rounds
        )

    @property
    def rounds(self) -> int:
        """Return the number of rounds that were measured."""
        return len(self.operators[0].series) if self.operators else 0

    @cached_property
    def capacities(self) -> Floats:
        """Return the executors of each group; those that are requested do no work yet."""
        return np.array([group.executors for group in self.groups], np.float64)

    def in_group(self, group: str) -> list[int]:
        """Return the operators of a group, by number."""
        return [k for k, o in enumerate(self.operators) if self.mapping.get(o.name) == group]

    def group_series(self, group: ExecutorGroup) -> Floats:
        """Return the load of a group's executors by round, with the operators it has now."""
        return per_executor(self.series[self.in_group(group.name)].sum(axis=0), group.executors)


@dataclass(frozen=True, slots=True)
class OperatorMove:
    """One operator that leaves a group for another one; without ``before``, it had none."""

    operator: str
    before: str | None
    after: str


@dataclass(frozen=True, slots=True)
class Place:
    """Run operators in other groups from the next batch on."""

    moves: tuple[OperatorMove, ...]
    reason: str


PlacementDecision = Place | NoChange


def per_executor(load: Floats, executors: float) -> Floats:
    """Return load over executors; a group without executors has no room for any load."""
    if executors > 0:
        return load / executors
    return np.where(load > 0.0, math.inf, 0.0)


def correlation(first: Floats, second: Floats) -> float:
    """Return the correlation of two series; zero if one has no variance.

    Examples
    --------
    >>> correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    1.0
    >>> correlation(np.array([1.0, 1.0, 1.0]), np.array([2.0, 4.0, 6.0]))
    0.0
    """
    if not (_varies(first) and _varies(second)):
        return 0.0
    a, b = first - first.mean(), second - second.mean()
    return round(float((a * b).mean() / math.sqrt((a * a).mean() * (b * b).mean())), 9)


def _varies(series: Floats) -> bool:
    return bool(np.isfinite(series).all() and series.std() > _FLAT * abs(series.mean()))
