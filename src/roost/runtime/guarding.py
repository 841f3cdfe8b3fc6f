"""The guard as a policy.

At the end of a round the guard sees the partition that caused the accepted rebalancing, with all
live queries. When its own round is over, in event time, it decides which users to block; log replay
refuses their requests from the next position on. State and decisions are recorded with the round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Partition, Plan
from roost.balance.changes import NoChange
from roost.guard import Guard, LiveQueries
from roost.guard.sensor import relieved_machines
from roost.kernel import Segment
from roost.model.space import Space
from roost.queries.guard_state import GuardState, decision_row
from roost.queries.live import QuerySet
from roost.runtime.rounds import BALANCE, GUARD, HiddenQueries, Proposal, RoundSnapshot
from roost.workload.cells import query_ranges


@dataclass(frozen=True, eq=False)
class _SegmentColumns:
    """Columns of a segment that never change: users, log positions and cells of its queries."""

    slots: NDArray[np.int32]
    ranges: NDArray[np.int32]
    names: pa.Array
    codes: NDArray[np.int32]
    created: NDArray[np.int64]

    @classmethod
    def of(cls, segment: Segment, space: Space) -> _SegmentColumns:
        slots, boxes = segment.bounds(space)
        users = segment.users
        if not isinstance(users, pa.DictionaryArray):
            users = users.dictionary_encode()
        created = segment.created_position
        if created is None:
            created = np.full(segment.size, -1)
        return cls(
            slots.astype(np.int32),
            query_ranges(space.grid, boxes),
            users.dictionary.cast(pa.string()),
            np.asarray(users.indices, np.int32)[slots],
            np.asarray(created, np.int64)[slots],
        )


class LiveView:
    """The live queries in the columns that the sensor reads; bounds are cells.

    Locating the cells of queries costs most, so it is done once per segment.
    """

    def __init__(self, queries: QuerySet, space: Space, guard: Guard) -> None:
        self._queries = queries
        self._space = space
        self._guard = guard
        self._columns: dict[str, _SegmentColumns] = {}

    def at(self, now: int) -> LiveQueries:
        """Return the queries that are active at an event time."""
        names: list[pa.Array] = [pa.array([], pa.string())]
        codes, created = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        bounds = [np.empty((0, 4), np.int32)]
        known = 0
        before, self._columns = self._columns, {}
        for found in self._queries.segments:
            file = found.ref.file
            columns = before.get(file) or _SegmentColumns.of(found.segment, self._space)
            self._columns[file] = columns
            alive = found.live_at(now)[columns.slots]
            names.append(columns.names)
            codes.append(columns.codes[alive] + np.int32(known))
            created.append(columns.created[alive])
            bounds.append(columns.ranges[alive])
            known += len(columns.names)
        # A user who has queries in several segments gets one code.
        users = pa.concat_arrays(names).dictionary_encode()
        places = np.asarray(users.indices, np.int32)
        positions = np.concatenate(created)
        return LiveQueries(
            users.dictionary,
            places[np.concatenate(codes)],
            self._guard.rounds_of(positions),
            np.concatenate(bounds),
            positions,
        )


@dataclass
class GuardPolicy:
    """Passes hotspots to the guard, and ends its rounds, whose length is in event time.

    With ``evict``, the queries of users who are detected and blocked are terminated. With
    ``quarantine``, the queries of suspicious users are no reason to rebalance.
    """

    name: ClassVar[str] = GUARD

    state: GuardState
    queries: QuerySet
    space: Space
    round_length: int
    hottest: Callable[[Plan, int], Partition | None]
    evict: bool
    quarantine: bool

    def __post_init__(self) -> None:
        self._guard = self.state.guard
        self._view = LiveView(self.queries, self.space, self._guard)

    def hidden(self, now: int) -> HiddenQueries:
        """Return the queries that are no reason to rebalance."""
        if not (self.quarantine and self._guard.quarantine):
            return HiddenQueries()
        found = self._view.at(now)
        assert found.positions is not None
        users = pa.DictionaryArray.from_arrays(pa.array(found.codes), found.names)
        mask = self._guard.quarantined_mask(users, found.rounds)
        return HiddenQueries(found.bounds[mask], found.positions[mask])

    def propose(self, snapshot: RoundSnapshot) -> Proposal:
        """Observe the accepted rebalancing; block users if the round of detection is over."""
        now, guard, plan = snapshot.now, self._guard, snapshot.routing.plan
        self.state.now = now
        hiding = len(snapshot.hidden) > 0
        decision = snapshot.accepted[BALANCE]
        machines = relieved_machines(plan, decision, snapshot.busy_s, hiding=hiding)
        hot = {p for p in (self.hottest(plan, machine) for machine in machines) if p is not None}
        live = self._view.at(now) if hot else None
        for p in sorted(hot, key=lambda p: p.partition_id):
            assert live is not None
            guard.on_rebalance(np.array([p.bounds], np.int32), live)
        opening = guard.opened is None
        if guard.opened is None:
            guard.opened = now
        passed = (now - guard.opened) // self.round_length
        if passed > 0:
            guard.opened += passed * self.round_length
            # Close this round and any empty rounds after it.
            last, rows = guard.round + passed - 1, self.queries.version.rows
            decisions = guard.close_round(last, rows, evict=self.evict)
            facts = self.state.facts(decision_row(decision) for decision in decisions)
            reason = f"detection round {last} closed with {len(decisions)} decisions"
            return Proposal(NoChange(reason), facts=tuple(facts))
        if opening or hot:
            names = ", ".join(str(number) for number in sorted(p.partition_id for p in hot))
            where = f"hotspot in partition {names}" if hot else "no hotspot"
            return Proposal(NoChange(where), facts=tuple(self.state.facts()))
        return Proposal(NoChange("no hotspot"))
