"""The guard in a running pipeline: what it is shown, when its rounds end, and what comes of it.

At the end of a round of the balancer the guard sees the partition that made somebody rebalance,
with all live queries. When its own round is over, in event time, it judges; who is blocked then is
refused from the next request of the log on. State and decisions are recorded with the round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Partition, Plan
from roost.balance.changes import Decision
from roost.guard import Guard, LiveQueries
from roost.guard.hotspot import relieved_machine
from roost.kernel import Segment
from roost.space import Space
from roost.state.guard_book import GuardChange
from roost.state.guard_keeper import GuardKeeper, decision_row
from roost.state.queries import QuerySet
from roost.workload.cells import query_ranges

Hottest = Callable[[Plan, int], Partition | None]


@dataclass(frozen=True, eq=False)
class _Member:
    """What never changes of a segment: whose its queries are, since when, and over which cells."""

    slots: NDArray[np.int32]
    ranges: NDArray[np.int32]
    names: pa.Array
    codes: NDArray[np.int32]
    born: NDArray[np.int64]
    until: NDArray[np.int64] | None

    @classmethod
    def of(cls, segment: Segment, space: Space) -> _Member:
        slots, boxes = segment.bounds(space)
        users = segment.users
        if not isinstance(users, pa.DictionaryArray):
            users = users.dictionary_encode()
        nowhere = np.full(segment.size, -1) if segment.born is None else segment.born
        return cls(
            slots.astype(np.int32),
            query_ranges(space.grid, boxes),
            users.dictionary.cast(pa.string()),
            np.asarray(users.indices, np.int32)[slots],
            np.asarray(nowhere, np.int64)[slots],
            None if segment.live_until is None else np.asarray(segment.live_until)[slots],
        )

    def alive(self, ended: Mapping[int, int], now: int) -> NDArray[np.bool_]:
        """Whether the query of each row has not ended at an event time."""
        alive = np.ones(len(self.slots), np.bool_) if self.until is None else self.until > now
        if ended:
            gone = [slot for slot, until in ended.items() if until <= now]
            alive &= ~np.isin(self.slots, np.array(gone, np.int32))
        return alive


class LiveView:
    """The live queries in the columns that the sensor reads; bounds are cells.

    To find the cells of all queries takes most of the time, so it is done once for a segment.
    """

    def __init__(self, queries: QuerySet, space: Space, guard: Guard) -> None:
        self._queries = queries
        self._space = space
        self._guard = guard
        self._members: dict[str, _Member] = {}

    def at(self, now: int) -> LiveQueries:
        """Return the queries that have not ended at an event time."""
        names: list[pa.Array] = [pa.array([], pa.string())]
        codes, rounds = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        bounds = [np.empty((0, 4), np.int32)]
        known = 0
        before, self._members = self._members, {}
        for ref, segment, ended in self._queries.segments():
            member = before.get(ref.file) or _Member.of(segment, self._space)
            self._members[ref.file] = member
            alive = member.alive(ended, now)
            names.append(member.names)
            codes.append(member.codes[alive] + np.int32(known))
            rounds.append(self._guard.rounds_of(member.born[alive]))
            bounds.append(member.ranges[alive])
            known += len(member.names)
        # A user who has queries in several segments gets one code.
        users = pa.concat_arrays(names).dictionary_encode()
        places = np.asarray(users.indices, np.int32)
        return LiveQueries(
            users.dictionary,
            places[np.concatenate(codes)],
            np.concatenate(rounds),
            np.concatenate(bounds),
        )


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
        self._view = LiveView(queries, space, keeper.guard)
        self._length = round_length
        self._evict = evict
        self._quarantine = quarantine

    def hidden(self, now: int) -> NDArray[np.int32]:
        """Cells of the queries that are no reason to rebalance, ``(k, 4)``, both ends included."""
        if not (self._quarantine and self._guard.quarantined):
            return np.empty((0, 4), np.int32)
        found = self._view.at(now)
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
        *,
        hiding: bool,
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
        hiding
            Whether some queries were no reason to rebalance.

        Returns
        -------
        GuardChange or None
            What to record with the round; None where nothing happened.
        """
        self._keeper.now = now
        machine = relieved_machine(plan, decision, busy_s, hiding=hiding)
        hot = None if machine is None else hottest(plan, machine)
        if hot is not None:
            rect = np.array([[hot.column0, hot.row0, hot.column1, hot.row1]], np.int32)
            self._guard.on_rebalance(rect, self._view.at(now))
        opening = self._guard.opened is None
        if self._guard.opened is None:
            self._guard.opened = now
        passed = (now - self._guard.opened) // self._length
        if passed > 0:
            self._guard.opened += passed * self._length
            return self._judge(passed)
        return self._keeper.change() if opening or hot is not None else None

    def _judge(self, passed: int) -> GuardChange:
        """End the round, and those that passed without a word after it."""
        guard = self._guard
        last, rows = guard.round + passed - 1, self._queries.version.rows
        decisions = guard.close_round(last, rows, evict=self._evict)
        return self._keeper.change(decision_row(decision) for decision in decisions)
