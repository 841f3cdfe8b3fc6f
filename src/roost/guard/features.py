"""Features x1 to x14 of table 5.1, by user, completed when a round is closed.

The gate adds requests (x1, x2), :func:`add_hotspot` adds hotspots (x3 to x5, x11, x12). Closing the
round halves the history and adds the round (x6 to x10), divides (x13) and averages (x14).

The paper leaves open:

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

from roost.guard import loops
from roost.guard.sensor import ROUNDS, HotspotSummary
from roost.guard.users import UserTable, keys_of
from roost.model.arrays import Floats

FADE = 0.5
WEIGHTS = FADE ** np.arange(ROUNDS)
COUNT = 14
# Columns of features that the detector reads.
X3, X6, X11, X12, X13, X14 = 2, 5, 10, 11, 12, 13
# A later hotspot replaces a user's place only with at least this share of the earlier weight.
PLACE_PART = 0.2


@dataclass(frozen=True, eq=False)
class Features:
    """Features of a round, one row per user."""

    keys: NDArray[np.uint64]
    names: list[str]
    raw: Floats  # x1 to x14, (users, 14)
    # Of each user's queries in the last hotspot of the round: the sum of their weights, and
    # weighted sums of x, of y and of squares, (users, 4). An attack may move within a round; a
    # mean of two places would be neither.
    places: Floats
    # Expected x13 of users who did not cause the hotspots: the sum over the hotspots of this round
    # in which they have recent queries.
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
    numbers[rows, loops.INVOLVED] += 1.0
    numbers[rows, loops.CONTRIBUTED] += by_age.sum(axis=1)
    numbers[rows, loops.SEQUENCE] += hotspot
    numbers[rows, loops.SEQUENCE_NEW] += np.where(by_age[:, 0] > 0, hotspot, 0)
    weights = by_age @ WEIGHTS
    numbers[rows, loops.WEIGHTED] += weights
    numbers[rows, loops.CHANCE] += np.where(weights > 0.0, summary.chance, 0.0)
    here = (weights > 0.0) & (weights >= PLACE_PART * numbers[rows, loops.PLACE_WEIGHT])
    places = np.column_stack([weights, summary.places[known]])
    numbers[rows[here], loops.PLACE_WEIGHT : loops.PLACE_SQUARE + 1] = places[here]


def close_features(users: UserTable, rounds: int = 1) -> Features:
    """Complete the features of the open round and start the next.

    ``rounds`` counts the rounds since the last closed one: more than one if some were empty.
    """
    numbers = users.numbers[: users.used]
    history = numbers[:, loops.FADED : loops.SEQUENCE_NEW]
    history *= FADE**rounds
    history += numbers[:, : loops.SEQUENCE + 1]
    raw = np.empty((users.used, COUNT))
    raw[:, :5] = numbers[:, : loops.SEQUENCE + 1]
    raw[:, 5:10] = history
    raw[:, X11] = numbers[:, loops.SEQUENCE_NEW]
    raw[:, X12] = numbers[:, loops.WEIGHTED]
    raw[:, X13] = _quotient(raw[:, X12], raw[:, X6])
    numbers[:, loops.RATE_SUM] += raw[:, X13]
    numbers[:, loops.RATE_ROUNDS] += raw[:, X13] != 0.0
    raw[:, X14] = _quotient(numbers[:, loops.RATE_SUM], numbers[:, loops.RATE_ROUNDS])
    places = numbers[:, loops.PLACE_WEIGHT : loops.PLACE_SQUARE + 1].copy()
    chances = numbers[:, loops.CHANCE].copy()
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
        return raw
    low = raw.min(axis=0)
    width = np.ptp(raw, axis=0)
    scaled: Floats = np.divide(raw - low, width, out=np.zeros_like(raw), where=width > 0.0)
    return scaled
