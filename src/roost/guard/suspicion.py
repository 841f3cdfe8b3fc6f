"""What the detector is set to, and what it remembers from round to round: the suspicious list."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.guard.decisions import Evidence
from roost.guard.features import Features

Rows = NDArray[np.int64]

# A hot partition shows a part of a place. Two quarters of one square are up to 1.73 times farther
# apart than they spread.
APART = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How the detector judges.

    Parameters
    ----------
    beta
        How many times everybody else's ALQR is still normal.
    deviation_max
        Standard deviation of normalised x11 that counts as near zero.
    removal_rounds
        Least and most rounds that a cluster stays on the suspicious list; users are forgotten
        after ``FORGET_ROUNDS``, which is more.
    share_min
        Part of the recent queries in the round's hot partitions that a cluster must have; zero
        asks for none.
    chance
        Whether a cluster must be in the hotspots with ``beta`` times the part of its queries that
        is to be expected of anybody.
    each
        Whether ``beta`` is asked of each user of a cluster, and a contribution to its hotspots.
    hanger_on
        Part of the cluster's median contribution that ``each`` asks for.
    moved
        Whether the second finding must be at another place.
    exact
        Whether the same cluster must be found again, and not just the same users.
    tries
        How often splitting begins again, from other random starts, while nobody is found.
    quarantine_rounds
        Rounds after its first finding for which a cluster is quarantined.
    """

    beta: float = 3.0
    deviation_max: float = 0.05
    removal_rounds: tuple[int, int] = (20, 60)
    share_min: float = 0.2
    chance: bool = True
    each: bool = True
    hanger_on: float = 0.1
    moved: bool = True
    exact: bool = False
    tries: int = 5
    quarantine_rounds: int = 2

    @classmethod
    def paper(cls) -> Settings:
        """Algorithm 4 and nothing else."""
        return cls(
            removal_rounds=(5, 30),
            share_min=0.0,
            chance=False,
            each=False,
            moved=False,
            exact=True,
            tries=1,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster's recent queries in hotspots lie: their middle, and how far they spread."""

    x: float
    y: float
    spread: float

    @classmethod
    def of(cls, features: Features, rows: Rows) -> Place | None:
        """Place of some users' queries; None where none of them is recent."""
        weight, *sums = features.places[rows].sum(axis=0).tolist()
        if weight <= 0.0:
            return None
        x, y, square = (value / weight for value in sums)
        return cls(x, y, max(square - x * x - y * y, 0.0) ** 0.5)

    def apart_from(self, other: Place) -> bool:
        """Whether two places are clearly farther apart than they spread."""
        away: float = ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5
        return away > APART * (self.spread + other.spread)


@dataclass(frozen=True, slots=True)
class Listed:
    """A cluster on the suspicious list.

    ``stays`` says that it was found again at the same place, as a crowd would be.
    """

    users: tuple[tuple[int, str], ...]
    found: int
    until: int
    place: Place | None = None
    stays: bool = False
    evidence: Evidence = field(default_factory=dict)

    def without(self, keys: Collection[int]) -> Listed:
        """Return the same without some users."""
        return replace(self, users=tuple(user for user in self.users if user[0] not in keys))

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state directory."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Listed:
        """Inverse of :meth:`to_json`."""
        users = tuple((key, name) for key, name in data["users"])
        place = Place(**data["place"]) if data["place"] else None
        return cls(**{**data, "users": users, "place": place})
