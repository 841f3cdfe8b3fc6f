"""Consistent hashing: which node should have a bucket, while nodes come and go.

Nodes have many points on a circle of 64-bit hashes, and a bucket belongs to the node of the next
point. So a node that joins takes buckets from all others and leaves the rest where they are. Shares
of the nodes vary; the balancer corrects them from measured load (:func:`resized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance.changes import NoChange
from roost.dataflow.balancing import MapDecision, MapPolicy, SubqueryLoad
from roost.dataflow.balancing.loads import map_change
from roost.dataflow.buckets import hash_rows
from roost.dataflow.moves import MapChange
from roost.model.arrays import Ints, as_arrow

POINTS = 200  # of a node of weight 1


@dataclass(frozen=True, eq=False)
class Ring:
    """Nodes by name, and their points in ascending order."""

    nodes: tuple[str, ...]
    points: NDArray[np.uint64]
    owners: Ints  # node of each point

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Ring:
        """Place nodes on the ring, each with points in proportion to its weight.

        The result does not depend on the order of the nodes.
        """
        nodes = tuple(sorted(weights))
        counts = [max(round(weights[node] * POINTS), 1) for node in nodes]
        owners = np.repeat(np.arange(len(nodes)), counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        names = pa.array(nodes).take(as_arrow(owners))
        points = hash_rows([names, as_arrow(numbers)], owners.size)
        order = np.lexsort((owners, points))  # of equal points, the first name's counts
        return cls(nodes, points[order], owners[order])

    def owner_of(self, hashes: NDArray[np.uint64]) -> Ints:
        """Return the index in ``nodes`` of the owner of each hash."""
        return self.owners[np.searchsorted(self.points, hashes) % self.points.size]


def bucket_hashes(buckets: int) -> NDArray[np.uint64]:
    """Return the hash of each bucket, the same on every platform."""
    return hash_rows([as_arrow(np.arange(buckets))], buckets)


def ring_owners(machines: int, buckets: int) -> Ints:
    """Return the machine of each bucket on a ring of equal machines: the first bucket map."""
    ring = Ring.of({str(machine): 1.0 for machine in range(machines)})
    numbers = np.array([int(node) for node in ring.nodes])
    return np.asarray(numbers[ring.owner_of(bucket_hashes(buckets))], np.int64)


def proposed(load: SubqueryLoad) -> Ints:
    """Return owners for another number of machines, which differ only where they must.

    A machine that joins gets the buckets that the ring gives it; buckets of machines that leave go
    where the ring puts them. All others stay, because balancing has put them there.
    """
    owners = load.owners
    ring = ring_owners(load.machines, owners.size)
    moved = (owners >= load.machines) | (ring >= load.map.machines)
    moved &= load.movable
    return np.where(moved, ring, owners)


def resized(load: SubqueryLoad, balancer: MapPolicy) -> MapDecision:
    """Return the change to another number of machines: the ring's proposal, then balanced."""
    owners = proposed(load)
    if (owners >= load.machines).any():
        bucket = int(np.argmax(owners >= load.machines))
        return NoChange(f"bucket {bucket} cannot leave machine {owners[bucket]} yet")
    proposal = replace(load.map, machines=load.machines, owners=tuple(owners.tolist()))
    decision = balancer.decide(replace(load, map=proposal))
    if isinstance(decision, MapChange):
        owners[list(decision.owners)] = list(decision.owners.values())
    return map_change(load, owners, f"{load.machines} machines: {decision.reason}")
