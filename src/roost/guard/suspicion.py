"""Settings of the detector, and the suspicious list that it maintains between rounds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.guard.decisions import Evidence
from roost.guard.features import Features

Rows = NDArray[np.int64]

# A hot partition may cover only a part of a place. Two quarters of one square are up to 1.73 times
# as far apart as their spread.
APART = 2.0


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """Settings of the detector; ``detector.py`` explains the conditions."""

    beta: float = 3.0  # multiple of the other users' ALQR up to which a cluster is normal
    deviation_max: float = 0.05  # standard deviation of normalised x11 that is near zero
    # Minimum and maximum rounds of a cluster on the suspicious list; less than ``IDLE_ROUNDS``.
    removal_rounds: tuple[int, int] = (20, 60)
    share_min: float = 0.2  # of the recent queries in the round's hot partitions, by a cluster
    contribution_min: float = 0.1  # of each user, as a share of the cluster's median
    published: bool = False  # whether algorithm 4 applies without the further conditions
    tries: int = 5  # splitting attempts, with different random starts
    quarantine_rounds: int = 2  # after a cluster's first finding

    @classmethod
    def paper(cls) -> DetectorSettings:
        """Return the settings of algorithm 4 as published."""
        return cls(removal_rounds=(5, 30), share_min=0.0, published=True, tries=1)


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """Centre and spread of a cluster's recent queries in hotspots."""

    x: float
    y: float
    spread: float

    @classmethod
    def of(cls, features: Features, rows: Rows) -> ClusterPlace | None:
        """Return the place of users' queries; None if none is recent."""
        weight, *sums = features.places[rows].sum(axis=0).tolist()
        if weight <= 0.0:
            return None
        x, y, square = (value / weight for value in sums)
        return cls(x, y, max(square - x * x - y * y, 0.0) ** 0.5)

    def apart_from(self, other: ClusterPlace) -> bool:
        """Return whether two places are clearly farther apart than their spread."""
        away: float = ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5
        return away > APART * (self.spread + other.spread)


@dataclass(frozen=True, slots=True)
class ListedCluster:
    """A cluster on the suspicious list.

    ``stays`` means that it was found again at the same place, like a crowd.
    """

    users: tuple[tuple[int, str], ...]
    found: int
    until: int
    place: ClusterPlace | None = None
    stays: bool = False
    evidence: Evidence = field(default_factory=dict)

    def without(self, keys: Collection[int]) -> ListedCluster:
        """Return the entry without some users."""
        return replace(self, users=tuple(user for user in self.users if user[0] not in keys))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ListedCluster:
        """Invert :func:`dataclasses.asdict`."""
        users = tuple((key, name) for key, name in data["users"])
        place = ClusterPlace(**data["place"]) if data["place"] else None
        return cls(**{**data, "users": users, "place": place})
