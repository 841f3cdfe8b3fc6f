"""The guard in a running pipeline: what it is shown, when its rounds end, and what comes of it.

At the end of a round of the balancer the guard sees the partition that made somebody rebalance,
with all live queries. When its own round is over, in event time, it judges; who is blocked then is
refused from the next request of the log on. State and decisions are recorded with the round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Partition, Plan
from roost.balance.changes import Decision, Merge, Move, Rebalance, Split
from roost.guard import Block, Guard, LiveQueries
from roost.model import TIME_MAX
from roost.space import Space
from roost.state.guard_book import GuardChange
from roost.state.guard_keeper import GuardKeeper, decision_row
from roost.state.queries import QuerySet
from roost.workload.cells import query_ranges

# So much busier than the mean, a machine has a hotspot, also where it is no reason to rebalance.
HOT = 1.2

Hottest = Callable[[Plan, int], Partition | None]


def live_queries(queries: QuerySet, space: Space, guard: Guard, now: int) -> LiveQueries:
    """Put the live queries into the columns that the sensor reads; bounds are cells."""
    names: list[pa.Array] = [pa.array([], pa.string())]
    codes, rounds, bounds = [], [], []
    known = 0
    for _, segment, ended in queries.segments():
        slots, boxes = segment.bounds(space)
        until = (
            np.full(segment.size, TIME_MAX) if segment.live_until is None else segment.live_until
        )
        until = np.array(until)
        for slot, end in ended.items():
            until[slot] = min(until[slot], end)
        alive = until[slots] > now
        slots, boxes = slots[alive], boxes[alive]
        users = segment.users
        if not isinstance(users, pa.DictionaryArray):
            users = users.dictionary_encode()
        names.append(users.dictionary.cast(pa.string()))
        codes.append(np.asarray(users.indices)[slots].astype(np.int32) + known)
        known += len(users.dictionary)
        born = np.full(slots.size, -1) if segment.born is None else segment.born[slots]
        rounds.append(guard.rounds_of(np.asarray(born, np.int64)))
        bounds.append(query_ranges(space.grid, boxes))
    return _unique(
        pa.concat_arrays(names),
        np.concatenate([np.empty(0, np.int32), *codes]),
        np.concatenate([np.empty(0, np.int64), *rounds]),
        np.concatenate([np.empty((0, 4), np.int32), *bounds]),
    )


def _unique(
    names: pa.Array,
    codes: NDArray[np.int32],
    rounds: NDArray[np.int64],
    bounds: NDArray[np.int32],
) -> LiveQueries:
    """Give a user who has queries in several segments one code."""
    encoded = names.dictionary_encode()
    places = np.asarray(encoded.indices, np.int32)
    return LiveQueries(encoded.dictionary, places[codes], rounds, bounds)


class GuardRounds:
    """Shows the guard hotspots, and ends its rounds.

    Parameters
    ----------
    keeper
        The guard of the state directory, which the fold of the query log has as well.
    queries, space
        The live queries, and where they are.
    round_length
        Length of a round of detection, in event time.
    evict
        Whether queries of users who are found and blocked are to go, too.
    quarantine
        Whether what suspicious users register is no reason to rebalance.
    """

    def __init__(
        self,
        keeper: GuardKeeper,
        queries: QuerySet,
        space: Space,
        round_length: int,
        *,
        evict: bool = False,
        quarantine: bool = False,
    ) -> None:
        self._keeper = keeper
        self._guard = keeper.guard
        self._queries = queries
        self._space = space
        self._length = round_length
        self._evict = evict
        self._quarantine = quarantine

    def hidden(self, now: int) -> NDArray[np.int32]:
        """Cells of the queries that are no reason to rebalance, ``(k, 4)``, both ends included."""
        if not (self._quarantine and self._guard.quarantined):
            return np.empty((0, 4), np.int32)
        found = live_queries(self._queries, self._space, self._guard, now)
        users = pa.DictionaryArray.from_arrays(pa.array(found.codes), found.names)
        hidden: NDArray[np.int32] = found.bounds[self._guard.quarantined_mask(users, found.rounds)]
        return hidden

    def after_round(
        self,
        plan: Plan,
        decision: Decision,
        busy_s: NDArray[np.float64],
        now: int,
        hottest: Hottest,
    ) -> GuardChange | None:
        """Note what a round of the balancer came to.

        Parameters
        ----------
        plan
            Under which the round ran.
        decision
            What the balancer decided.
        busy_s
            Time that each machine was busy.
        now
            Event time that the stream has reached.
        hottest
            Finds the costliest partition of a machine.

        Returns
        -------
        GuardChange or None
            What to record with the round; None where nothing happened.
        """
        machine = self._relieved(plan, decision, busy_s)
        hot = None if machine is None else hottest(plan, machine)
        if hot is not None:
            rect = np.array([[hot.column0, hot.row0, hot.column1, hot.row1]], np.int32)
            found = live_queries(self._queries, self._space, self._guard, now)
            self._guard.on_rebalance(rect, found)
        if self._guard.opened is None:
            self._guard.opened = now
        passed = (now - self._guard.opened) // self._length
        if passed > 0:
            self._guard.opened += passed * self._length
            return self._judge(passed)
        return None if hot is None else self._keeper.change()

    def _judge(self, passed: int) -> GuardChange:
        """End the round, and those that passed without a word after it."""
        guard = self._guard
        decisions = guard.close_round(guard.round + passed - 1, self._queries.version.rows)
        if self._evict:
            self._keeper.evict(name for d in decisions if isinstance(d, Block) for name in d.users)
        return self._keeper.change(decision_row(decision) for decision in decisions)

    def _relieved(self, plan: Plan, decision: Decision, busy_s: NDArray[np.float64]) -> int | None:
        """Find the machine with the hotspot, if there is one."""
        busiest = int(busy_s.argmax())
        if not isinstance(decision, Rebalance):
            hot = float(busy_s[busiest]) > HOT * float(busy_s.mean())
            return busiest if hot and self._quarantine and self._guard.quarantined else None
        first = decision.changes[0]
        if isinstance(first, Merge):
            return None
        if isinstance(first, Move | Split) and len(decision.changes) == 1:
            owners = {p.partition_id: p.machines for p in plan.partitions}
            return owners[first.partition_id][0]
        return busiest
