"""The greedy algorithm of StreamCloud (section V-B), the reference.

It starts if the standard deviation of the machines' utilisation exceeds a threshold. Each iteration
transfers the bucket with most tuples from the machine with the highest utilisation to the one with
the lowest, and is kept if it reduces the deviation by a minimum; the first that does not is undone
and ends the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.balance.changes import NoChange
from roost.dataflow.balancing.loads import (
    MapDecision,
    SubqueryLoad,
    deviation,
    machine_loads,
    map_change,
    rehomed,
)


@dataclass(frozen=True)
class GreedyPolicy:
    """Decides from the newest round; stateless.

    ``imbalance`` is the paper's upper imbalance threshold, ``improvement`` its minimum improvement
    threshold.
    """

    imbalance: float = 0.10
    improvement: float = 0.05

    def decide(self, load: SubqueryLoad) -> MapDecision:
        """Transfer buckets while each transfer is worth it."""
        owners = rehomed(load)
        if isinstance(owners, NoChange):
            return owners
        given, movable = load.newest, load.movable
        cost = given.busy_s / given.seconds
        utilisation = machine_loads(owners, cost, load.machines)
        before = spread = deviation(utilisation)
        if before <= self.imbalance:
            return map_change(load, owners, f"standard deviation of utilisation {before:.3f}")
        while True:
            highest, lowest = int(utilisation.argmax()), int(utilisation.argmin())
            own = np.flatnonzero((owners == highest) & movable)
            if not own.size:
                break
            bucket = own[given.tuples[own].argmax()]
            changed = utilisation.copy()
            changed[highest] -= cost[bucket]
            changed[lowest] += cost[bucket]
            after = deviation(changed)
            if after >= spread or spread - after < self.improvement * spread:
                break
            utilisation, spread, owners[bucket] = changed, after, lowest
        reason = f"standard deviation of utilisation from {before:.3f} to {spread:.3f}"
        return map_change(load, owners, reason)
