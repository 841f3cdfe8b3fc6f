"""The planner: owners of all buckets at once, weighed against what moves.

Problem: the greedy algorithm considers one bucket at a time, the largest, so it stops as soon as
that one does not fit; and it ignores what a bucket's state costs to move.

Idea: the driver knows the load of every bucket, so it can compute whole maps before it adopts one.
It relieves overloaded machines, by the moves and swaps that relieve most for their cost; it also
packs all buckets anew, the heaviest first. Each candidate is judged by the busiest machine in the
rounds seen and by the time to load what arrives, and must be clearly better than the present map.

A bucket that is heavier than a fair share, or that cannot be moved now, raises what its machine may
have: the others are balanced around it, and nothing is moved in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.balance.changes import NoChange
from roost.balance.planner.policy import (
    AT_ONCE,
    HORIZON_ROUNDS,
    NOISE_ALLOWED,
    NOISE_AT_ONCE,
    NOISE_LEFT,
    ROUND_WEIGHTS,
    noise_of,
)
from roost.dataflow.balancing.loads import (
    MapDecision,
    SubqueryLoad,
    machine_loads,
    map_change,
    rehomed,
)
from roost.dataflow.balancing.packing import SLACK, RoundView, packed, relieved
from roost.dataflow.loads import BucketLoads
from roost.model.arrays import Ints


@dataclass(frozen=True)
class BucketPlanner:
    """Decides from one to three rounds; stateless.

    ``improvement`` is the least relative reduction of the busiest machine's load that a change must
    achieve. The map is kept while the busiest machine is so near to what it should have, or within
    noise if that is more.
    """

    improvement: float = 0.05

    @property
    def tolerance(self) -> float:
        """The busiest machine's load, in multiples of its share, that no change could improve."""
        return 1.0 / (1.0 - self.improvement)

    def decide(self, load: SubqueryLoad) -> MapDecision:
        """Return the best map, if it is worth its moves."""
        owners = rehomed(load)
        if isinstance(owners, NoChange):
            return owners
        resized = load.machines != load.map.machines
        newest = load.newest
        if load.machines == 1 or not newest.busy_s.sum() > 0.0:
            return map_change(load, owners, "one machine" if load.machines == 1 else "no load")
        seen = [r.busy_s for r in reversed(load.rounds) if r.busy_s.sum() > 0.0]
        rounds = [RoundView.of(load, busy_s) for busy_s in seen]
        noise = _noise(newest, rounds[0].level, load.machines)
        most = max(self.tolerance + NOISE_LEFT * noise, 1.0 + SLACK + NOISE_ALLOWED * noise)
        before = rounds[0].overload(owners)
        if before <= most and not resized:
            return NoChange(f"balanced: busiest machine has {before:.2f} of its share")
        at_once = max(AT_ONCE, 1.0 + NOISE_AT_ONCE * noise)
        # The present map is judged by the earlier load, whichever map was in use then.
        once = before < at_once and len(rounds) > 1 and rounds[1].overload(owners) <= most
        if once and not resized:
            return NoChange("out of balance for one round only")
        return self._choose(load, rounds, owners, most)

    def _choose(
        self, load: SubqueryLoad, rounds: list[RoundView], owners: Ints, most: float
    ) -> MapDecision:
        """Compare candidates with the present map."""
        weights = np.asarray(ROUND_WEIGHTS[: len(rounds)])
        weights /= weights.sum()
        scaled = [r.scaled(rounds[0].total) for r in rounds]
        tries = [relieved(load, rounds[0], owners)]
        views = [rounds[0]]
        if any(r.overload(tries[0]) > most for r in rounds[1:]):
            # The load oscillates or has just changed: one map may suit all rounds.
            mean = sum(w * r.cost for w, r in zip(weights, scaled, strict=True))
            views.append(RoundView.of(load, mean))
            tries.append(relieved(load, views[1], owners))
        if min(rounds[0].overload(t) for t in tries) > most:
            tries += [relieved(load, view, packed(load, view, owners)) for view in views]

        def busiest(candidate: Ints) -> float:
            return float(weights @ [r.busiest(candidate) for r in scaled])

        def price(candidate: Ints) -> float:
            # Machines load state in parallel, so the one with most to load decides.
            moved = candidate != load.owners
            loading = machine_loads(candidate[moved], load.move_s[moved], load.machines)
            return busiest(candidate) + float(loading.max()) / HORIZON_ROUNDS

        # A machine that should have more than others must not get more than the highest has now.
        highest = float(rounds[0].loads(owners).max())
        tries = [t for t in tries if float(rounds[0].loads(t).max()) <= highest]
        best = min(tries, key=price, default=owners)
        if best is owners or price(best) > price(owners) * (1.0 - self.improvement):
            return map_change(load, owners, "no map is worth its moves")
        before, after = rounds[0].overload(owners), rounds[0].overload(best)
        moved = int(load.newest.state_bytes[best != load.owners].sum())
        reason = f"busiest machine from {before:.2f} to {after:.2f} of its share"
        return map_change(load, best, f"{reason}, {moved} bytes of state to load")


def _noise(loads: BucketLoads, level: float, machines: int) -> float:
    """Return by how much noise raises the highest machine, in multiples of the level.

    Buckets above the level have machines of their own, which are not compared with others.
    """
    small = loads.busy_s <= level
    # Stored rows cost time, too, so a bucket may be busy without a new tuple.
    busy, tuples = loads.busy_s[small], np.maximum(loads.tuples[small], 1.0)
    compared = min(max(round(float(busy.sum()) / level), 2), machines)
    return noise_of(tuples, busy / tuples, compared) if busy.any() else 0.0
