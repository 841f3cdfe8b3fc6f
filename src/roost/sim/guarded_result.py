"""Result of a guarded simulation, and metrics: which users were blocked, when, at what cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.guard import Block, GuardDecision, Suspect
from roost.sim.scenario import Trace
from roost.sim.workloads import Floats

# Rounds of detection after its second hotspot within which an attack must be blocked.
BLOCK_WITHIN = 2


@dataclass(frozen=True)
class GuardedResult:
    """Result of a guarded simulation.

    Parameters
    ----------
    trace
        Trace of the cluster.
    decisions
        Decisions of the guard, in order.
    hotspots
        Balancer's round of each hotspot, and the target of the attack; None if malicious users did
        not cause it.
    malicious, blocked
        Names.
    detection_s
        Seconds of each detection, if a clock was given.
    detection_rounds
        Balancer's rounds in a round of detection.
    """

    trace: Trace
    decisions: tuple[GuardDecision, ...]
    hotspots: tuple[tuple[int, int | None], ...]
    malicious: frozenset[str]
    blocked: frozenset[str]
    detection_s: tuple[float, ...]
    detection_rounds: int

    @property
    def false_positives(self) -> int:
        """Number of blocked normal users."""
        return len(self.blocked - self.malicious)

    @property
    def missed(self) -> int:
        """Number of malicious users that are not blocked, harmful or not."""
        return len(self.malicious - self.blocked)

    @property
    def false_negatives(self) -> int:
        """Number of malicious users that are not blocked although they caused two hotspots.

        A weaker attack cannot be distinguished from normal users, and causes no rebalancing.
        """
        last = len(self.trace.rows) // self.detection_rounds - 1
        made = self.hotspot_rounds()
        return self.missed if len(made) > 1 and made[1] + BLOCK_WITHIN <= last else 0

    @property
    def blocked_in(self) -> int | None:
        """Round of detection in which the last malicious user was blocked, None if one is not."""
        left = set(self.malicious)
        for judgement in self.decisions:
            if isinstance(judgement, Block):
                left -= set(judgement.users)
                if not left:
                    return judgement.round
        return None

    @property
    def suspected_in(self) -> int | None:
        """Round of detection in which a malicious user was first suspected."""
        for judgement in self.decisions:
            if isinstance(judgement, Suspect | Block) and self.malicious & set(judgement.users):
                return judgement.round
        return None

    @property
    def attacked_in(self) -> int | None:
        """Balancer's round of the first hotspot that malicious users caused."""
        return next((tick for tick, target in self.hotspots if target is not None), None)

    def hotspot_rounds(self) -> list[int]:
        """Return the round of detection of the first hotspot at each target of the attack."""
        first: dict[int, int] = {}
        for tick, target in self.hotspots:
            if target is not None:
                first.setdefault(target, tick // self.detection_rounds)
        return list(first.values())

    @property
    def rounds_to_block(self) -> int | None:
        """Rounds of detection from the second hotspot to the last block, None without one.

        Zero is the round of the second hotspot.
        """
        made = self.hotspot_rounds()
        if self.blocked_in is None:
            return None
        return max(self.blocked_in - made[1], 0) if len(made) > 1 else 0


def shares(trace: Trace) -> Floats:
    """Return admitted over offered points by round; above 1 while the backlog shrinks."""
    return trace.column("admitted") / trace.column("offered")


def availability(trace: Trace) -> Floats:
    """Return the share of the offered points of each round that was admitted without delay."""
    return np.minimum(shares(trace), 1.0)
