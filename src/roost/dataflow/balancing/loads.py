"""What a balancing policy sees of a subquery, and what it decides."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import NoChange
from roost.dataflow.buckets import BucketMap
from roost.dataflow.loads import BucketLoads
from roost.dataflow.moves import MapChange
from roost.model.arrays import Floats, Ints


@dataclass(frozen=True)
class SubqueryLoad:
    """Everything that a policy sees of a subquery at the end of a round.

    ``machines`` is the number of machines to plan for, which may differ from that of the map.
    ``unmergeable`` names a function of the operator that cannot be aggregated partially.
    """

    subquery: str
    map: BucketMap
    machines: int
    rounds: tuple[BucketLoads, ...]  # one to three, the newest last
    move_s: Floats  # seconds that moving each bucket costs
    fixed: frozenset[int] = frozenset()  # buckets that cannot be moved now
    operator: str = ""
    unmergeable: str | None = None

    def __post_init__(self) -> None:
        """Check that the values fit together."""
        assert self.rounds and self.machines > 0
        shapes = {values.shape for r in self.rounds for values in (r.tuples, r.busy_s)}
        assert {*shapes, self.move_s.shape} == {(self.map.buckets,)}

    @property
    def newest(self) -> BucketLoads:
        """The round that has just ended."""
        return self.rounds[-1]

    @property
    def owners(self) -> Ints:
        """The machine of each bucket."""
        return np.asarray(self.map.owners, np.int64)

    @property
    def movable(self) -> NDArray[np.bool_]:
        """Whether each bucket can be moved now."""
        found = np.ones(self.map.buckets, np.bool_)
        found[list(self.fixed)] = False
        return found


MapDecision = MapChange | NoChange


class MapPolicy(Protocol):
    """Decides which machine owns which bucket."""

    def decide(self, load: SubqueryLoad) -> MapDecision:
        """Return new owners of buckets, or the reason why there are none."""


def deviation(utilisation: Floats) -> float:
    """Return the standard deviation over machines, with 1/n.

    Examples
    --------
    >>> deviation(np.array([0.25, 0.75]))
    0.25
    """
    return float(utilisation.std())


def machine_loads(owners: Ints, bucket_loads: Floats, machines: int) -> Floats:
    """Return the load of each machine."""
    return np.bincount(owners, bucket_loads, machines).astype(np.float64)


def rehomed(load: SubqueryLoad) -> Ints | NoChange:
    """Return owners among the machines to plan for: buckets of removed machines are dealt.

    The heaviest bucket goes first, to the machine with the least load, then fewest buckets.
    """
    owners, machines, busy = load.owners, load.machines, load.newest.busy_s
    stay = owners < machines
    lost = np.flatnonzero(~stay)
    stuck = load.fixed.intersection(lost.tolist())
    if stuck:
        bucket = min(stuck)
        text = f"bucket {bucket} cannot leave machine {owners[bucket]} yet, which is to be removed"
        return NoChange(text)
    loads = machine_loads(owners[stay], busy[stay], machines).tolist()
    counts = np.bincount(owners[stay], minlength=machines).tolist()
    heap = [(loads[m], counts[m], m) for m in range(machines)]
    heapq.heapify(heap)
    for bucket in lost[np.argsort(-busy[lost], kind="stable")].tolist():
        most, count, machine = heap[0]
        owners[bucket] = machine
        heapq.heapreplace(heap, (most + float(busy[bucket]), count + 1, machine))
    return owners


def map_change(load: SubqueryLoad, owners: Ints, reason: str) -> MapDecision:
    """Return the change to new owners."""
    moved = np.flatnonzero(owners != load.owners)
    if not moved.size and load.machines == load.map.machines:
        return NoChange(reason)
    new = dict(zip(moved.tolist(), owners[moved].tolist(), strict=True))
    machines = None if load.machines == load.map.machines else load.machines
    return MapChange(load.subquery, new, reason, machines)
