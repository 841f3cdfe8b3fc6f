"""Rules of SWARM, each a switch: as published, or as changed here.

A benchmark adds one change at a time to :data:`PAPER` and so shows what it is worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from roost.balance.costs import Cost, ProductCost, WorkCost
from roost.balance.decision import RISE

# Spread of loads that counts as balanced, relative to the mean.
QUIET = 0.07
GAIN_MIN = 0.02
# Pairs of machines that a round relieves at most.
PAIRS = 64
# Spread beyond which the stages are ignored: a hotspot waited for up to five rounds. With less,
# loads that oscillate changed the plan.
URGENT = 0.4
# Rounds between merges of adjacent partitions of one machine; the papers' example is five hours.
MERGE_EVERY = 20
MERGE_EVERY_PAPER = 1200


@dataclass(frozen=True, slots=True)
class SwarmRules:
    """How machines and coordinator decide; the defaults are all changes.

    Attributes
    ----------
    quiet
        Spread of loads, ``(highest - lowest) / mean``, that is ignored; the expected random spread
        of balanced machines if that is more. Zero ignores none.
    persistence
        Whether a pair must have been that far apart, in the same direction, in the previous round,
        too. An oscillating load reverses the pair each round and so moves nothing.
    gain
        Share of the higher cost of the pair by which a change must lower it.
    half_gap
        Whether whole partitions move only if they close half of the gap that can be closed, or no
        split does better. The papers accept any subset, even one of negligible cost.
    least_higher
        Whether the best cut is the one with the lowest higher cost; the papers take the one with
        the smallest difference.
    merge_every
        Rounds between merges.
    sampled_plan
        Whether the first plan has equal costs in a sample, if there is one, instead of equal areas.
    cost
        Cost of a partition.
    rise
        Share by which the rate of a better round is above the last one (:mod:`decision`).
    pairs
        Pairs of machines that a round relieves at most, from the costliest machine down. With more
        than one, a machine may be in several, and fills each cheap one up to the mean; the papers
        relieve one, and both cost the same afterwards.
    measured
        Whether a machine scales its estimates to the work of the round, which it counted: objects
        received, and queries checked.
    urgent
        Spread, as for ``quiet``, beyond which pairs are relieved even if the stages say to do
        nothing; infinite in the papers.
    """

    quiet: float = QUIET
    persistence: bool = True
    gain: float = GAIN_MIN
    half_gap: bool = True
    least_higher: bool = True
    merge_every: int = MERGE_EVERY
    sampled_plan: bool = True
    cost: Cost = WorkCost()  # noqa: RUF009 - immutable
    rise: float = RISE
    pairs: int = PAIRS
    measured: bool = True
    urgent: float = URGENT


PAPER = SwarmRules(
    0.0, False, 0.0, False, False, MERGE_EVERY_PAPER, False, ProductCost(), 0.0, 1, False, math.inf
)


def variants() -> Mapping[str, SwarmRules]:
    """Return the published rules, and each change alone added to them, by name."""
    changed = SwarmRules()
    names = [field.name for field in fields(SwarmRules)]
    alone = {name: replace(PAPER, **{name: getattr(changed, name)}) for name in names}
    return {"paper": PAPER} | {f"paper+{name}": rules for name, rules in alone.items()}
