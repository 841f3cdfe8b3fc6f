"""Features x1 to x14 of table 5.1, by user, completed when a round is closed.

The gate adds requests (x1, x2), :func:`add_hotspot` adds hotspots (x3 to x5, x11, x12). Closing the
round halves the history and adds the round (x6 to x10), divides (x13) and averages (x14).

Choices that the paper leaves open:

* x4 is the sum of the sensor's five ages. Older queries are not included, but they count as
  involvement (x3, x5).
* A query in two hotspots of a round counts twice in x4 and x12, because each summary is added
  separately.
* x13 is zero if x6 is: a user without recent requests has no recent queries in hotspots.
* x14 is the mean of the non-zero x13.
* A feature that is equal for all users is zero after normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.guard.loops import (
    CHANCE,
    CONTRIBUTED,
    FADED,
    INVOLVED,
    PLACE_SQUARE,
    PLACE_WEIGHT,
    RATE_ROUNDS,
    RATE_SUM,
    SEQUENCE,
    SEQUENCE_NEW,
    WEIGHTED,
)
from roost.guard.sensor import ROUNDS, HotspotSummary
from roost.guard.users import UserTable, keys_of

FADE = 0.5
WEIGHTS = FADE ** np.arange(ROUNDS)
COUNT = 14
# Columns of features that the detector reads.
X3, X6, X11, X12, X13, X14 = 2, 5, 10, 11, 12, 13
# A later hotspot replaces a user's place only with at least this share of the earlier weight.
PLACE_PART = 0.2

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Features:
    """Features of a round, one row per user.

    Parameters
    ----------
    keys, names
        Of the users.
    raw
        x1 to x14, ``(users, 14)``.
    places
        Location of each user's queries in the last hotspot of the round, ``(users, 4)``: the sum
        of their weights, and weighted sums of x, of y and of their squares. An attack may move
        within a round; a mean of two places would be neither.
    chances
        Expected x13 of each user in this round if they did not cause its hotspots: the sum over
        the hotspots in which they have recent queries. Other hotspots do not count.
    """

    keys: NDArray[np.uint64]
    names: list[str]
    raw: Floats
    places: Floats
    chances: Floats

    def taken(self, rows: NDArray[np.int64]) -> Features:
        """Select users."""
        names = [self.names[row] for row in rows.tolist()]
        return Features(
            self.keys[rows], names, self.raw[rows], self.places[rows], self.chances[rows]
        )


def add_hotspot(users: UserTable, summary: HotspotSummary, hotspot: int, number: int) -> None:
    """Add a hotspot, by its id, to the users' features of the open round."""
    rows = users.rows_for(keys_of(summary.names, users.secret), summary.names, number)
    known = rows >= 0
    rows, by_age = rows[known], summary.by_age[known]
    numbers = users.numbers
    numbers[rows, INVOLVED] += 1.0
    numbers[rows, CONTRIBUTED] += by_age.sum(axis=1)
    numbers[rows, SEQUENCE] += hotspot
    numbers[rows, SEQUENCE_NEW] += np.where(by_age[:, 0] > 0, hotspot, 0)
    weights = by_age @ WEIGHTS
    numbers[rows, WEIGHTED] += weights
    numbers[rows, CHANCE] += np.where(weights > 0.0, summary.chance, 0.0)
    here = (weights > 0.0) & (weights >= PLACE_PART * numbers[rows, PLACE_WEIGHT])
    places = np.column_stack([weights, summary.places[known]])
    numbers[rows[here], PLACE_WEIGHT : PLACE_SQUARE + 1] = places[here]


def close_features(users: UserTable, rounds: int = 1) -> Features:
    """Complete the features of the open round and start the next.

    Parameters
    ----------
    users
        Table of users.
    rounds
        Rounds since the last closed one; more than one if some were empty.
    """
    numbers = users.numbers[: users.used]
    history = numbers[:, FADED:SEQUENCE_NEW]
    history *= FADE**rounds
    history += numbers[:, : SEQUENCE + 1]
    raw = np.empty((users.used, COUNT))
    raw[:, :5] = numbers[:, : SEQUENCE + 1]
    raw[:, 5:10] = history
    raw[:, X11] = numbers[:, SEQUENCE_NEW]
    raw[:, X12] = numbers[:, WEIGHTED]
    raw[:, X13] = _quotient(raw[:, X12], raw[:, X6])
    numbers[:, RATE_SUM] += raw[:, X13]
    numbers[:, RATE_ROUNDS] += raw[:, X13] != 0.0
    raw[:, X14] = _quotient(numbers[:, RATE_SUM], numbers[:, RATE_ROUNDS])
    places = numbers[:, PLACE_WEIGHT : PLACE_SQUARE + 1].copy()
    chances = numbers[:, CHANCE].copy()
    closed = Features(users.keys[: users.used].copy(), list(users.names), raw, places, chances)
    users.start_round()
    return closed


def _quotient(part: Floats, whole: Floats) -> Floats:
    """Divide, with zero where the divisor is not positive."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0.0)


def normalise(raw: Floats) -> Floats:
    """Apply min-max normalisation to each column.

    Examples
    --------
    >>> normalise(np.array([[1.0, 5.0], [3.0, 5.0]])).tolist()
    [[0.0, 0.0], [1.0, 0.0]]
    """
    if len(raw) == 0:
        return raw.copy()
    low = raw.min(axis=0)
    width = raw.max(axis=0) - low
    scaled: Floats = np.divide(raw - low, width, out=np.zeros_like(raw), where=width > 0.0)
    return scaled
