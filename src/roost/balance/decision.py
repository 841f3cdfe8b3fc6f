"""Decision mechanism of SWARM: five stages, as an immutable value.

The coordinator repeats its last decision, "rebalance" or "do nothing", while throughput rises, and
drops it when throughput has failed to rise more often than not. A pointer moves over five stages:
right after a better round, left after any other, never past the right end. The leftmost stage flips
the decision and resets the pointer to the middle. The decision is also flipped after ``beta``
rounds, because an oscillating load would otherwise never change it.

A rise within the noise of a rate is no better round. Under a steady load the rate rises in every
other round by chance, so a pointer that follows every rise stays where it is: an unbalanced plan
would be kept for ``beta`` rounds. The papers compare the rates alone, ``rise`` zero.

Throughput is a *rate*, objects per busy second of the slowest machine: with micro-batches, a source
that sends less would otherwise look like a worse plan.
"""

from __future__ import annotations

from dataclasses import dataclass

FLIP = 0
START = 2
RIGHTMOST = 4
BETA = 20
RISE = 0.05


@dataclass(frozen=True, slots=True)
class Stages:
    """Pointer, current decision, number of rounds it has been repeated, and last rate."""

    pointer: int = START
    rebalance: bool = False
    repeats: int = 0
    rate: float | None = None

    def after(self, rate: float, beta: int = BETA, rise: float = RISE) -> Stages:
        """Return the stages after a round; ``rebalance`` is the decision for this round.

        A round is better if its rate is above the last one by more than a share ``rise`` of it. The
        first rate does not move the pointer.

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
            pointer = (
                min(pointer + 1, RIGHTMOST) if rate > (1.0 + rise) * self.rate else pointer - 1
            )
        if pointer <= FLIP or self.repeats >= beta:
            return Stages(START, not self.rebalance, 1, rate)
        return Stages(pointer, self.rebalance, self.repeats + 1, rate)
