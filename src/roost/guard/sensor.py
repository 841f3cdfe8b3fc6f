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

from roost.balance.changes import Decision, Rebalance, apply_changes
from roost.balance.global_index import GlobalIndex
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
    positions: NDArray[np.int64] | None = None  # of registration in the log, if known


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


def relieved_machines(
    plan: Plan, decision: Decision, busy_s: NDArray[np.float64], *, hiding: bool
) -> tuple[int, ...]:
    """Return the machines with the hotspots of a round, by the busy time of each.

    These are the machines that the decision relieves: they give cells away, or share them with
    more machines. A new plan also takes cells from machines without a hotspot; so of several, only
    those count that are at least half as far above the mean as the busiest of them.

    With ``hiding``, quarantine hid queries from the balancer. Then the busiest machine counts, too,
    if it is far above the mean, because the decision may not know of its hotspot.

    Examples
    --------
    >>> from roost.balance.changes import Move
    >>> from roost.balance.plan import Partition
    >>> thirds = tuple(Partition(k, k, 0, k + 1, 1, (k,)) for k in range(3))
    >>> moves = Rebalance((Move(0, (1,)), Move(2, (1,))), "two hotspots")
    >>> plan, busy_s = Plan(0, 3, 1, 3, thirds, 3), np.array([5.0, 1.0, 4.0])
    >>> relieved_machines(plan, moves, busy_s, hiding=False)
    (0, 2)
    """
    found: set[int] = set()
    # Where the number of machines changes, a new plan says nothing about hotspots.
    if isinstance(decision, Rebalance) and decision.changes and not decision.machines:
        found = _givers(plan, apply_changes(plan, decision.changes))
        if len(found) > 1:
            most = max(float(busy_s[m]) for m in found)
            least = min((float(busy_s.mean()) + most) / 2.0, most)
            found = {m for m in found if busy_s[m] >= least}
    busiest = int(busy_s.argmax())
    if hiding and float(busy_s[busiest]) > HOT * float(busy_s.mean()):
        found.add(busiest)
    return tuple(sorted(found))


def _givers(before: Plan, after: Plan) -> set[int]:
    """Return the machines that own fewer cells of some partition than before, or share more."""
    ranges = (before.rects() - np.array([0, 0, 1, 1])).astype(np.int32)
    old, new = GlobalIndex(after).overlaps_many(ranges)
    found: set[int] = set()
    for was, now in set(zip(old.tolist(), new.tolist(), strict=True)):
        mine, others = before.partitions[was].machines, after.partitions[now].machines
        shared = len(others) > len(mine)
        found |= {m for m in mine if shared or m not in others}
    return found
