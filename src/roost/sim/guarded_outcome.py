"""What a guarded run leaves, and what is read from it: who was blocked, when, at what cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.guard import Block, Decision, Suspect
from roost.sim.scenario import Trace
from roost.sim.workloads import Floats

# Rounds of detection after its second hotspot in which an attack is to be blocked.
BLOCK_WITHIN = 2


@dataclass(frozen=True)
class Outcome:
    """What a guarded run leaves.

    Parameters
    ----------
    trace
        Of the cluster.
    judgements
        Of the guard, in order.
    hotspots
        Balancer's round of each hotspot, and at which target of the attack it is; None where
        malicious users did not make it.
    malicious, blocked
        Names.
    detection_s
        Seconds of each detection, where a clock was given.
    detection_rounds
        Balancer's rounds in a round of detection.
    """

    trace: Trace
    judgements: tuple[Decision, ...]
    hotspots: tuple[tuple[int, int | None], ...]
    malicious: frozenset[str]
    blocked: frozenset[str]
    detection_s: tuple[float, ...]
    detection_rounds: int

    @property
    def false_positives(self) -> int:
        """Normal users who are blocked."""
        return len(self.blocked - self.malicious)

    @property
    def missed(self) -> int:
        """Malicious users who are not blocked, whether they did any harm or not."""
        return len(self.malicious - self.blocked)

    @property
    def false_negatives(self) -> int:
        """Malicious users who are not blocked although they had made two hotspots in time.

        An attack that is too weak to make two of them is not to be told from normal users, and
        makes nobody rebalance.
        """
        last = len(self.trace.rows) // self.detection_rounds - 1
        made = self.hotspot_rounds()
        return self.missed if len(made) > 1 and made[1] + BLOCK_WITHIN <= last else 0

    @property
    def blocked_in(self) -> int | None:
        """Round of detection in which the last malicious user was blocked, None if one is left."""
        left = set(self.malicious)
        for judgement in self.judgements:
            if isinstance(judgement, Block):
                left -= set(judgement.users)
                if not left:
                    return judgement.round
        return None

    @property
    def suspected_in(self) -> int | None:
        """Round of detection in which a malicious user was first suspected."""
        for judgement in self.judgements:
            if isinstance(judgement, Suspect | Block) and self.malicious & set(judgement.users):
                return judgement.round
        return None

    @property
    def attacked_in(self) -> int | None:
        """Balancer's round of the first hotspot that malicious users made."""
        return next((tick for tick, target in self.hotspots if target is not None), None)

    def hotspot_rounds(self) -> list[int]:
        """Round of detection of the first hotspot at each target of the attack."""
        first: dict[int, int] = {}
        for tick, target in self.hotspots:
            if target is not None:
                first.setdefault(target, tick // self.detection_rounds)
        return list(first.values())

    @property
    def rounds_to_block(self) -> int | None:
        """Rounds of detection from the second hotspot to the last block; None if it never came.

        Zero is the round in which the second hotspot was made.
        """
        made = self.hotspot_rounds()
        if self.blocked_in is None:
            return None
        return max(self.blocked_in - made[1], 0) if len(made) > 1 else 0


def shares(trace: Trace) -> Floats:
    """Points let in over points that came, by round; more than one where it catches up."""
    return trace.column("admitted") / trace.column("offered")


def availability(trace: Trace) -> Floats:
    """Part of what came in each round that was let in without delay."""
    return np.minimum(shares(trace), 1.0)
