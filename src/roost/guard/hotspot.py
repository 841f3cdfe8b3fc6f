"""Hotspot lookup: the machine with a hotspot, from the balancer's decision.

The sensor inspects the costliest partition of that machine, which the engine and the simulator find
in their own statistics.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Decision, Merge, Move, Rebalance, Split
from roost.balance.plan import Plan

# A machine this much busier than the mean has a hotspot, even if it causes no rebalancing.
HOT = 1.2


def relieved_machine(
    plan: Plan, decision: Decision, busy_s: NDArray[np.float64], *, hiding: bool
) -> int | None:
    """Return the machine with the hotspot, or None.

    Parameters
    ----------
    plan
        The plan of the round.
    decision
        The balancer's decision.
    busy_s
        Busy time of each machine.
    hiding
        Whether quarantine hid queries from the balancer; their hotspots are reported all the same.
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
