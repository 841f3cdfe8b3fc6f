"""Hotspot sensor: counts the queries in a hot partition by user and age.

At each rebalancing the sensor receives the live queries and the rectangles of the hot partition.
For each user with a query there, it counts queries by age: registered in this round, in the
previous one, and so on, five rounds back. Users with only older queries are in the summary with
zeros.

Beyond the paper, it sums the locations of these queries with the weights of x12, which distinguish
a crowd, which stays in place, from an attack, which must move to do harm. And it computes the
expected share of a user's queries there, from queries older than five rounds.

The sensor does not know what made the partition hot: it also counts queries that were always there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.guard.loops import sense

ROUNDS = 5


@dataclass(frozen=True, eq=False)
class LiveQueries:
    """The live queries, as columns.

    Parameters
    ----------
    names
        Distinct users.
    codes
        User of each query, as an index into ``names``.
    rounds
        Round in which each was registered; negative before the first round.
    bounds
        ``x0, y0, x1, y1`` of each, inclusive: coordinates or cells.
    """

    names: pa.Array
    codes: NDArray[np.int32]
    rounds: NDArray[np.int64]
    bounds: NDArray[Any]


@dataclass(frozen=True, eq=False)
class HotspotSummary:
    """Queries in one hotspot, one row per user.

    Parameters
    ----------
    names
        Users with a query in the hot partition.
    by_age
        Queries by age in rounds, ``(users, 5)``.
    places
        Weighted sums of x, of y and of their squares, ``(users, 3)``.
    chance
        Mean share of users' old queries that are in the hot partition: the expected share of a
        user who did not cause the hotspot.
    """

    names: pa.Array
    by_age: NDArray[np.int64]
    places: NDArray[np.float64]
    chance: float = 0.0


def sense_hotspot(queries: LiveQueries, rects: NDArray[Any], number: int) -> HotspotSummary:
    """Summarise the queries in a hot partition.

    Parameters
    ----------
    queries
        All live queries.
    rects
        Half-open rectangles ``(k, 4)``, in the same units as the queries. A query that touches
        several of them counts once.
    number
        The open round.

    Examples
    --------
    >>> queries = LiveQueries(
    ...     pa.array(["ann", "bob"]),
    ...     np.array([0, 0, 1], np.int32),
    ...     np.array([7, 6, 7]),
    ...     np.array([[0, 0, 1, 1], [1, 1, 2, 2], [9, 9, 9, 9]]),
    ... )
    >>> found = sense_hotspot(queries, np.array([[0, 0, 4, 4]]), 7)
    >>> found.names.to_pylist(), found.by_age.tolist()
    (['ann'], [[1, 1, 0, 0, 0]])
    """
    users = len(queries.names)
    present = np.zeros(users, np.bool_)
    by_age = np.zeros((users, ROUNDS), np.int64)
    older = np.zeros(users, np.int64)
    places = np.zeros((users, 3))
    ages = number - queries.rounds
    corners = np.asarray(rects, queries.bounds.dtype).reshape(-1, 4)
    sense(queries.bounds, corners, queries.codes, ages, present, by_age, older, places)
    rows = np.flatnonzero(present)
    held = np.bincount(queries.codes[ages >= ROUNDS], minlength=users)
    chance = float((older[held > 0] / held[held > 0]).mean()) if held.any() else 0.0
    return HotspotSummary(queries.names.take(pa.array(rows)), by_age[rows], places[rows], chance)
