"""Hotspot sensor: counts the queries in a hot partition by user and age.

At each rebalancing it counts the queries of each user in the hot partition by age, five rounds
back. Users with only older queries are in the summary with zeros. The sensor does not know what
made the partition hot: it also counts queries that were always there.

Beyond the paper, it sums the locations of these queries: a crowd stays in place, an attack must
move to do harm. And it computes the expected share of a user's queries there, from queries older
than five rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance.changes import Decision, Merge, Move, Rebalance, Split
from roost.balance.plan import Plan
from roost.guard.loops import sense

ROUNDS = 5
# A machine this much busier than the mean has a hotspot, even if it causes no rebalancing.
HOT = 1.2


@dataclass(frozen=True, eq=False)
class LiveQueries:
    """The live queries, as columns."""

    names: pa.Array  # distinct users
    codes: NDArray[np.int32]  # user of each query, as an index into ``names``
    rounds: NDArray[np.int64]  # of registration; negative before the first round
    bounds: NDArray[Any]  # x0, y0, x1, y1 of each, inclusive: coordinates or cells


@dataclass(frozen=True, eq=False)
class HotspotSummary:
    """Queries in one hotspot, one row per user with a query there.

    ``chance`` is the mean share of users' old queries that are in the hot partition: the expected
    share of a user who did not cause the hotspot.
    """

    names: pa.Array
    by_age: NDArray[np.int64]  # queries by age in rounds, (users, 5)
    places: NDArray[np.float64]  # sums of x, of y and of squares by x12's weights, (users, 3)
    chance: float


def sense_hotspot(queries: LiveQueries, rects: NDArray[Any], number: int) -> HotspotSummary:
    """Summarise the queries in a hot partition in round ``number``.

    ``rects`` are half-open rectangles ``(k, 4)`` in the units of the queries. A query that touches
    several of them counts once.

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


def relieved_machine(
    plan: Plan, decision: Decision, busy_s: NDArray[np.float64], *, hiding: bool
) -> int | None:
    """Return the machine with the hotspot of a round, by the busy time of each; None without one.

    With ``hiding``, quarantine hid queries from the balancer; their hotspots are reported, too.
    """
    busiest = int(busy_s.argmax())
    if isinstance(decision, Rebalance) and (decision.machines or not decision.changes):
        return None  # the number of machines changed
    if not isinstance(decision, Rebalance):
        hot = float(busy_s[busiest]) > HOT * float(busy_s.mean())
        return busiest if hiding and hot else None
    first = decision.changes[0]
    if isinstance(first, Merge):
        return None
    if isinstance(first, Move | Split) and len(decision.changes) == 1:
        owners = {p.partition_id: p.machines for p in plan.partitions}
        return owners[first.partition_id][0]
    return busiest
