"""When to rebalance: the five stages of SWARM, as an immutable value.

The coordinator keeps to its last decision, "rebalance" or "do nothing", while throughput rises,
and drops it only when throughput has failed to rise more often than not. A pointer over five
stages counts: right after a better round, left after any other, never past the right end. The
leftmost stage flips the decision and puts the pointer back in the middle. So is the decision
flipped when it was the same for ``beta`` rounds, or a load that goes up and down in turn would
keep it forever.

Throughput must be a *rate* here, objects per busy second of the slowest machine: with
micro-batches a source that sends less would otherwise look like a plan that got worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLIP = 0
START = 2
RIGHTMOST = 4
BETA = 20


@dataclass(frozen=True, slots=True)
class Stages:
    """The pointer, the decision in force, for how many rounds it has been, and the last rate."""

    pointer: int = START
    rebalance: bool = False
    repeats: int = 0
    rate: float | None = None

    def after(self, rate: float, beta: int = BETA) -> Stages:
        """Take one more round's rate into account; ``rebalance`` then is what to do now.

        The first rate has none to be compared with: it moves no pointer.

        Examples
        --------
        >>> falling = Stages().after(9.0).after(8.0)
        >>> falling.pointer, falling.rebalance
        (1, False)
        >>> falling.after(8.0)
        Stages(pointer=2, rebalance=True, repeats=1, rate=8.0)
        """
        pointer = self.pointer
        if self.rate is not None:
            pointer = min(pointer + 1, RIGHTMOST) if rate > self.rate else pointer - 1
        if pointer <= FLIP or self.repeats >= beta:
            return Stages(START, not self.rebalance, 1, rate)
        return Stages(pointer, self.rebalance, self.repeats + 1, rate)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state directory."""
        return {
            "pointer": self.pointer,
            "rebalance": self.rebalance,
            "repeats": self.repeats,
            "rate": self.rate,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Stages:
        """Inverse of :meth:`to_json`."""
        return cls(data["pointer"], data["rebalance"], data["repeats"], data["rate"])
