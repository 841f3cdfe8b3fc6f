"""The hotspot sensor: whose queries are in a partition that was just rebalanced, and how old.

It is called at each rebalancing with the live queries and the rectangle (or rectangles) of the
hot partition. For each user with a query there it counts queries by age: registered in this
round, in the one before, and so on, five rounds back. Users who have only older queries there
are in the summary with zeros.

Beyond the paper it also sums up where these queries lie, with the weights of x12. That is what
tells a crowd, which stays where it is, from an attack, which must move on to do harm. And it says
what part of anybody's queries is to be expected there, from those that are older than five rounds.

It does not know what made the partition hot: queries that were always there are counted too.
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
    """The live queries, in columns.

    Parameters
    ----------
    names
        Different users.
    codes
        User of each query, as a place in ``names``.
    rounds
        Round in which each was registered; those before the first round may be negative.
    bounds
        ``x0, y0, x1, y1`` of each, both ends included: coordinates or cells.
    """

    names: pa.Array
    codes: NDArray[np.int32]
    rounds: NDArray[np.int64]
    bounds: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Summary:
    """What the sensor found in one hotspot, a row a user.

    Parameters
    ----------
    names
        Users with a query in the hot partition.
    by_age
        Queries by age in rounds, ``(users, 5)``.
    places
        Weighted sums of x, of y and of their squares, ``(users, 3)``.
    chance
        Part of a user's old queries that are in the hot partition, on average over all users who
        have any: what is to be expected of somebody who has no part in the hotspot.
    """

    names: pa.Array
    by_age: NDArray[np.int64]
    places: NDArray[np.float64]
    chance: float = 0.0


def sense_hotspot(queries: LiveQueries, rects: NDArray[Any], number: int) -> Summary:
    """Look into a hot partition.

    Parameters
    ----------
    queries
        All live queries.
    rects
        ``(k, 4)``, without the upper ends: in the same units as the queries. A query that touches
        several of them counts once.
    number
        Round that is open.

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
    return Summary(queries.names.take(pa.array(rows)), by_age[rows], places[rows], chance)
