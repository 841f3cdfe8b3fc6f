"""Which machine has a hotspot, by what the balancer decided: the same on every cluster.

The sensor is shown the costliest partition of that machine. Who runs a balancer knows which one
that is; the simulator and the engine find it each in their own statistics.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Decision, Merge, Move, Rebalance, Split
from roost.balance.plan import Plan

# So much busier than the mean, a machine has a hotspot, also where it is no reason to rebalance.
HOT = 1.2


def relieved_machine(
    plan: Plan, decision: Decision, busy_s: NDArray[np.float64], *, hiding: bool
) -> int | None:
    """Find the machine with the hotspot, if there is one.

    Parameters
    ----------
    plan
        Under which the round ran.
    decision
        What the balancer made of it.
    busy_s
        Time that each machine was busy.
    hiding
        Whether some queries were no reason to rebalance. Their hotspots must still be seen.
    """
    busiest = int(busy_s.argmax())
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
